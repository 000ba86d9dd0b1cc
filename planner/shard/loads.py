"""How evenly the ranks of an axis are loaded by their experts, and which experts to put together.

Measured numbers of tokens are by layer: all grouped products that have the same runs of rows are one layer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.graph import Graph, Node, Ref

_PRODUCT = "aten._grouped_mm"
_SAME_NUMBERS = ("to", "_to_copy", "alias", "clone", "detach", "contiguous", "view", "reshape")
_MOST_NAMED = 3  # layers of a model in a message


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The load of the busiest rank in units of the mean: 1 is balanced, the number of ranks the worst.

    `imbalance` is with the experts where they are, each rank having a run of them; `balanced_imbalance` with those of
    `order` one after the other.
    """

    imbalance: float
    balanced_imbalance: float
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Experts that tokens are shared out to; `product` is what the first of their grouped products makes."""

    name: str
    product: int
    num_experts: int


def expert_layers(graph: Graph) -> tuple[ExpertLayer, ...]:
    """The layers of experts in the order of the graph.

    A layer is named by the module that multiplies, or by the block outside of modules; the second layer of the same
    name is `name (2)`.
    """
    result: list[ExpertLayer] = []
    maker = {tensor: node for node in graph.nodes for tensor in node.outputs if tensor is not None}
    seen: set[int] = set()
    times: Counter[str] = Counter()
    for block in graph.blocks:
        for node in (graph.nodes[index] for index in block.nodes):
            ends, product = ends_of(node), node.outputs[0] if node.outputs else None
            if not node.op.startswith(_PRODUCT) or ends is None or product is None:
                continue
            source = _unconverted(ends, maker)
            shape = graph.tensors[ends].shape
            if source not in seen and len(shape) == 1 and isinstance(shape[0], int):
                seen.add(source)
                name = (node.path[-1] if node.path else "") or block.name
                times[name] += 1
                numbered = name if times[name] == 1 else f"{name} ({times[name]})"
                result.append(ExpertLayer(name=numbered, product=product, num_experts=shape[0]))
    return tuple(result)


def orders_of_experts(graph: Graph, loads: Mapping[str, Sequence[int]], degree: int) -> Mapping[int, tuple[int, ...]]:
    """For what each grouped product makes, the order of experts that spreads measured loads most evenly over ranks.

    Left out are products of layers without loads, and those whose experts are best as they are.
    """
    maker = {tensor: node for node in graph.nodes for tensor in node.outputs if tensor is not None}
    found: dict[int, tuple[int, ...]] = {}
    by_source: dict[int, tuple[int, ...]] = {}
    for layer in expert_layers(graph):
        tokens = loads.get(layer.name, ())
        ends = ends_of(maker[layer.product])
        if ends is not None and len(tokens) == layer.num_experts and layer.num_experts % degree == 0:
            of_layer = expert_loads(tokens, degree)
            if of_layer.balanced_imbalance < of_layer.imbalance:
                by_source[_unconverted(ends, maker)] = of_layer.order
    for node in graph.nodes:
        ends = ends_of(node) if node.op.startswith(_PRODUCT) else None
        if ends is not None and node.outputs[0] is not None and (source := _unconverted(ends, maker)) in by_source:
            found[node.outputs[0]] = by_source[source]
    return found


def _unconverted(tensor: int, maker: Mapping[int, Node]) -> int:
    """The tensor that a tensor has the numbers of: each product may convert what it is given."""
    while (node := maker.get(tensor)) is not None and node.op.split(".")[1] in _SAME_NUMBERS:
        first = node.args[0] if node.args else None
        if not isinstance(first, Ref):
            break
        tensor = first.tensor
    return tensor


def ends_of(node: Node) -> int | None:
    """The tensor that says where the run of rows of each expert ends, of a grouped product, or of a rank's part."""
    found = node.args[2] if len(node.args) > 2 else dict(node.kwargs).get("offs")
    return found.tensor if isinstance(found, Ref) else None


def check_expert_loads(graph: Graph, loads: Mapping[str, Sequence[int]]) -> None:
    """Refuse measured loads that are not those of this model.

    Raises:
        PlanError: no layer of experts has such a name, or so many experts, or what is given are no numbers of tokens.
    """
    layers = {layer.name: layer for layer in expert_layers(graph)}
    if not layers:
        raise PlanError(f"{graph.name} has no grouped products of experts, so loads of experts say nothing; leave them")
    if not isinstance(loads, Mapping) or not loads:
        raise PlanError("loads of experts must be a table of layers, each with tokens per expert; got none")
    for name, tokens in loads.items():
        if name not in layers:
            shown = ", ".join([*layers][:_MOST_NAMED]) + (", ..." if len(layers) > _MOST_NAMED else "")
            raise PlanError(f"loads of experts are given for {name!r}, which is none of the model's layers ({shown})")
        is_list = isinstance(tokens, Sequence) and not isinstance(tokens, str)
        if not is_list or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in tokens):
            raise PlanError(
                f"loads of experts must be lists of numbers of tokens, 0 or more; {name} has {tokens!r:.60}"
            )
        if len(tokens) != layers[name].num_experts:
            raise PlanError(
                f"{name} has {layers[name].num_experts} experts, loads are given for {len(tokens)}; measure this model"
            )
        if not sum(tokens):
            raise PlanError(f"loads of experts are all 0 for {name}; measure at least one step")


def worst_loads(loads: Mapping[str, Sequence[int]], degree: int) -> tuple[float, float]:
    """The imbalance of the worst layer on `degree` ranks: as the experts are, and in a better order in each layer.

    Layers whose experts cannot be spread evenly over so many ranks are not; without others both are 1.

    >>> worst_loads({"one": [8, 6, 1, 1], "two": [1, 1, 1, 1], "three": [9, 0, 0]}, 2)
    (1.75, 1.125)
    """
    found = [expert_loads(tokens, degree) for tokens in loads.values() if len(tokens) % degree == 0]
    return (
        max((each.imbalance for each in found), default=1.0),
        max((min(each.imbalance, each.balanced_imbalance) for each in found), default=1.0),  # greedy is not always best
    )


def expert_loads(tokens_per_expert: Sequence[int], degree: int) -> ExpertLoads:
    """What measured numbers of tokens mean for `degree` ranks, each of which has as many experts.

    The order is the greedy one (longest processing time first): the busiest expert goes to the least loaded rank that
    has room. `imbalance` is for `Prices.expert_imbalance` and `planner.trace.priced`.

    >>> expert_loads([8, 6, 1, 1], 2)
    ExpertLoads(imbalance=1.75, balanced_imbalance=1.125, order=(0, 3, 1, 2))

    Raises:
        PlanError: `degree` does not divide the experts, or they have no tokens.
    """
    count, total = len(tokens_per_expert), sum(tokens_per_expert)
    if degree < 1 or count % degree or count == 0:
        raise PlanError(f"{count} experts cannot be put on {degree} ranks, as many on each")
    if total <= 0 or min(tokens_per_expert) < 0:
        raise PlanError(f"loads of experts must be numbers of tokens, some of them above 0; got {tokens_per_expert}")
    room = count // degree
    ranks: list[list[int]] = [[] for _ in range(degree)]
    for expert in sorted(range(count), key=lambda e: -tokens_per_expert[e]):
        free = [rank for rank in ranks if len(rank) < room]
        min(free, key=lambda rank: sum(tokens_per_expert[e] for e in rank)).append(expert)
    order = tuple(expert for rank in ranks for expert in sorted(rank))

    def imbalance(experts: Sequence[int]) -> float:
        runs = (experts[start : start + room] for start in range(0, count, room))
        return max(sum(tokens_per_expert[e] for e in run) for run in runs) * degree / total

    return ExpertLoads(imbalance(range(count)), imbalance(order), order)
