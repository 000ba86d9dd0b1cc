"""Experts over ranks that have samples of their own (axis `ep`): which parameters are split, and where rows travel.

Nothing is to be chosen by price here. Every matrix of experts that a rule lets be split is split, and rows stay with
their experts between two products where all that is done to them there can be done there. What is not possible is
taken back until the rest holds together, which leaves what is right: without splits every rank has all experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.errors import PlanError
from planner.graph import Graph, Node, Size, reads
from planner.shard.loads import orders_of_experts
from planner.shard.placement import E, Option, Placement, R, Sharding, operands_of
from planner.shard.rules import options
from planner.shard.rules.own_samples import spread

_PRODUCT = "_grouped_mm"


def spread_experts(
    graph: Graph,
    degree: int,
    parameters: Mapping[str, Placement] | None = None,
    loads: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Sharding, ...]:
    """A sharding for each block, for `degree` ranks of `ep`.

    `parameters`, by name, are held so already: those of another graph of the same model. `loads` are measured tokens of
    each expert by layer: experts are put together such that ranks get about as many (`planner.shard.loads`).

    Raises:
        PlanError: no experts of the model can be spread over so many ranks, or not as they are held.
    """
    held = None if parameters is None else {name: p for name, p in parameters.items() if p.is_split}
    placing = _Placing(graph, degree, held, orders_of_experts(graph, loads or {}, degree))
    placed = placing.settled()
    if placing.cannot_be_ordered:
        placed = _Placing(graph, degree, held, {}).settled()
    found = {graph.tensors[t].name for t, p in placed.items() if p.is_split and graph.tensors[t].kind == "parameter"}
    if not found and held is None:
        raise PlanError(why_not(graph, degree))
    read = {graph.tensors[t].name for block in graph.blocks for t in block.parameters}
    if held is not None and (others := sorted((held.keys() & read) - found)):
        raise PlanError(
            f"{others[0]} is spread over ep={degree} ranks, which a graph of the model for another batch cannot do; "
            "give batches of the planned shapes, or plan with ep=1"
        )
    return tuple(
        Sharding(
            options=tuple(_option(graph, graph.nodes[i], degree, placed) for i in b.nodes),  # type: ignore[misc]
            parameters=tuple(placed.get(t, R) for t in b.parameters),
            buffers=tuple(R for _ in b.buffers),
            inputs=tuple(R for _ in b.inputs),
            outputs=tuple(R for _ in b.outputs),
        )
        for b in graph.blocks
    )


def why_not(graph: Graph, degree: int) -> str:
    """Why no experts can be spread: one sentence."""
    products = [node for _, node in _products(graph)]
    if not products:
        return (
            f"ep={degree} spreads experts, and {graph.name} has no grouped product of experts (aten._grouped_mm) whose "
            "tokens are sorted by expert and put back; leave ep out"
        )
    counts = sorted(numbers_of_experts(graph))
    if all(count % degree for count in counts):
        return f"ep={degree} does not divide the {', '.join(map(str, counts))} experts of {graph.name}; fix another ep"
    return (
        f"{products[0].source}: the matrices of experts of {graph.name} are no parameters whose first dim counts "
        f"experts, so ep={degree} cannot spread them; leave ep out"
    )


def numbers_of_experts(graph: Graph) -> frozenset[int]:
    """Numbers of experts that grouped products of the model have: what an `ep` must divide. Empty without experts."""
    found = (graph.tensors[operands_of(node)[1]].shape[0] for _, node in _products(graph))
    return frozenset(size for size in found if isinstance(size, int))


def _products(graph: Graph) -> Iterator[tuple[int, Node]]:
    """(block, node) of the products of rows that are in an order which cancels out."""
    for position, block in enumerate(graph.blocks):
        for node in (graph.nodes[i] for i in block.nodes):
            operands = operands_of(node)
            if (
                node.op.split(".")[1] == _PRODUCT
                and len(operands) == 3
                and graph.tensors[operands[0]].order is not None
            ):
                yield position, node


def _option(graph: Graph, node: Node, degree: int, placed: dict[int, Placement]) -> Option | None:
    """The option of a node that agrees with the placements of all that it touches; None if there is none."""
    operands = tuple(placed.get(t, R) for t in operands_of(node))
    outputs = tuple(None if t is None else placed.get(t, R) for t in node.outputs)
    seeds = {t: [p] for t in (*operands_of(node), *node.outputs) if t is not None and (p := placed.get(t, R)).is_split}
    for option in options(node, graph.tensors, degree, seeds, axis="ep"):
        if (option.operands, option.outputs) == (operands, outputs):
            return option
    return None


class _Placing:
    """What is split and sent: all that may be, less what does not go with the rest."""

    def __init__(
        self,
        graph: Graph,
        degree: int,
        held: Mapping[str, Placement] | None,
        orders: Mapping[int, tuple[int, ...]],
    ) -> None:
        """`held` are parameters that may be split, by name, all of them by default; `orders` are by product."""
        self._orders = orders
        self._product_of: dict[int, int] = {}  # what is made behind a product in its layer -> what that makes
        self._graph = graph
        self._held = held
        self._degree = degree
        self._nodes = [graph.nodes[i] for block in graph.blocks for i in block.nodes]
        self._maker = {t: node for node in self._nodes for t in node.outputs if t is not None}
        self._between = {t for block in graph.blocks for t in (*block.inputs, *block.outputs)}
        self.placed: dict[int, Placement] = {}
        self.cannot_be_ordered = False  # a parameter has several rows, or none, for each expert

    def settled(self) -> dict[int, Placement]:
        """Placements of tensors; others are R."""
        for _, node in _products(self._graph):
            self._split_in_order(operands_of(node)[1], node.outputs[0])
        self._send()
        for node in self._nodes:
            if any(self.placed.get(t) == E for t in node.outputs if t is not None):
                product = next((p for t in node.outputs if t is not None and (p := self._product_of.get(t))), None)
                for tensor in operands_of(node):
                    self._made_of_keys(tensor, product)
        touching = [n for n in self._nodes if any(t in self.placed for t in (*reads(n), *n.outputs) if t is not None)]
        while bad := [n for n in touching if _option(self._graph, n, self._degree, self.placed) is None]:
            if not self._take_back(bad):
                raise AssertionError(f"{bad[0].op} cannot run as it is")
        return self.placed

    def _take_back(self, nodes: list[Node]) -> bool:
        """Leave rows where they are at nodes that cannot have them so; if there are none there, parameters whole."""
        touched = {t for node in nodes for t in (*reads(node), *node.outputs) if t in self.placed}
        sent = {t for t in touched if self.placed[t] == E}
        for tensor in sent or touched:
            del self.placed[tensor]
        return bool(touched)

    def _num_experts(self, product: int) -> Size:
        """How many matrices the product has that makes a tensor."""
        return self._graph.tensors[operands_of(self._maker[product])[1]].shape[0]

    def _split_in_order(self, tensor: int, product: int | None) -> None:
        """Split what has a row for each expert, in the order of the product's layer or as its parameters are held."""
        before = set(self.placed)
        self._split(tensor)
        made = [t for t in self.placed if t not in before]
        order = self._orders.get(product, ()) if product is not None else ()
        if self._held is not None:
            names = [self._graph.tensors[t].name for t in made]
            order = next((self._held[name].order for name in names if name in self._held), ())
        if order and any(self._graph.tensors[t].shape[0] != len(order) for t in made):
            self.cannot_be_ordered, order = True, ()
        self.placed |= {t: replace(self.placed[t], order=order) for t in made}

    def _split(self, tensor: int) -> None:
        """Split what has a row for each expert, back to the parameters that it is made of."""
        shape = self._graph.tensors[tensor].shape
        if not shape or not isinstance(shape[0], int) or shape[0] % self._degree or tensor in self.placed:
            return
        if tensor in self._maker and tensor not in self._between:
            node = self._maker[tensor]
            seeds = {tensor: [spread(shape[0])]}
            for option in options(node, self._graph.tensors, self._degree, seeds, axis="ep"):
                is_wanted = all(p == spread(shape[0]) for p in option.outputs if p is not None)
                if is_wanted and all(p == R or p.dim == 0 for p in option.operands):
                    self.placed[tensor] = spread(shape[0])
                    for operand, placement in zip(operands_of(node), option.operands, strict=True):
                        if placement.is_split:
                            self._split(operand)
                    return
        elif self._graph.tensors[tensor].kind == "parameter" and (
            self._held is None or self._graph.tensors[tensor].name in self._held
        ):
            self.placed[tensor] = spread(shape[0])

    def _send(self) -> None:
        """Rows between two products stay with their experts: what one reaches, and what reaches another."""
        tensors = self._graph.tensors
        is_product = {id(node) for _, node in _products(self._graph)}
        behind: set[int] = set()
        for node in self._nodes:
            rows = [t for t in node.outputs if t is not None and _is_rows(tensors[t].order)]
            if id(node) in is_product or any(t in behind for t in reads(node)):
                behind.update(rows)
                own = node.outputs[0] if id(node) in is_product else None
                product = own or next((p for t in reads(node) if (p := self._product_of.get(t))), None)
                self._product_of |= dict.fromkeys(rows, product) if product is not None else {}
        ahead: set[int] = set()
        for node in reversed(self._nodes):
            first = operands_of(node)[:1]
            if id(node) in is_product:
                ahead.update(first)
            elif any(t in ahead for t in node.outputs if t is not None):
                ahead.update(t for t in reads(node) if _is_rows(tensors[t].order))
        self.placed |= dict.fromkeys((behind & ahead) - self._between, E)

    def _made_of_keys(self, tensor: int, product: int | None) -> bool:
        """Send what experts add to their rows, and split the tables that it is picked from; False for other rows."""
        node, tensors = self._maker.get(tensor), self._graph.tensors
        if tensor in self.placed or node is None or not _is_rows(tensors[tensor].order):
            return tensor in self.placed
        operands = operands_of(node)
        order = tensors[operands[-1]].order if len(operands) == 2 else None
        if order is not None and order.form == "keys":
            if product is None or tensors[operands[0]].shape[0] != self._num_experts(product):
                return False  # a table with rows of no expert: its rows are not where the matrices are
            self._split_in_order(operands[0], product)
            is_made = operands[0] in self.placed
        else:
            rows = [t for t in operands if tensors[t].order is not None]
            is_made = bool(rows) and all(self._made_of_keys(t, product) for t in rows)
        if is_made and tensor not in self._between:
            self.placed[tensor] = E
        return is_made


def _is_rows(order: object) -> bool:
    return getattr(order, "form", None) == "rows"
