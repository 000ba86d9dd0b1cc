"""Which split each operator of a model takes: one integer program for all its blocks.

Blocks that are alike take the same options, so the program has one copy of each, and what passes between blocks of a
kind has one layout. With that the layouts along the blocks, tied parameters and what skips blocks need no search of
their own: they are variables like the others. In the copy of one block (n blocks are like it):

    x[v,o]     node v takes option o                                   binary, sum_o x = 1
    g[j,p]     what is stored or passed between blocks has placement p   binary, sum_p g = 1
    y[k,p,q]   consumer k takes its tensor as q, where it is made as p   >= 0
    z[t,p,q]   tensor t is converted from p to q, for all its consumers  >= 0
    s[t,q]     tensor t is kept for backward as q                        >= 0

    sum_q y[k,p,q] = made[p],  sum_p y[k,p,q] = taken[k,q]     made and taken are sums of x, or g
    z[t,p,q] >= y[k,p,q],      s[t,q] >= taken[k,q]            for all consumers k of t (that keep it)

    minimise   sum n (seconds x + conversion_seconds z + saved_bytes seconds_per_saved_byte s)
               + sum over stored parameters (update and gradient seconds + bytes seconds_per_saved_byte) g

A pair (p, q) without conversion has no y. The rows of y are those of a transport problem, which leaves the relaxation
nearly always integral. `_Choice.cost` is the same objective without the solver: what the tests enumerate.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from planner.errors import PlanError, SolverError
from planner.graph import DTYPE_BYTES, Arg, Batch, Block, Graph, Node, Ref, reads
from planner.highs import Program, Terms, Variable
from planner.shard.outer import conversion_seconds, is_outer
from planner.shard.placement import (
    Collective,
    Option,
    Placement,
    Q,
    R,
    Sharding,
    conversion,
    effective,
    operands_of,
)
from planner.shard.rules import options
from planner.shard.rules.special import DISPATCHED, OF_EXPERTS, inner_collectives
from planner.shard.work import LOOKS_UP, base_name, flop_of, kept_by, size_at
from planner.shard.writes import Writes

_MICROSECONDS = 1e6  # what the solver sees: its tolerances are absolute
_NODE_LIMIT = 2_000
_GAP = 1e-6
# What all bytes that the fastest way holds are worth in leaner ones, in units of its seconds; the first that differ.
_WEIGHTS = (1.0, 3.0, 10.0)
_NAMES = ("fast", "lean", "leanest")
_MOST_SEEDS = 12  # splits of one tensor that are tried
_UPDATE_BYTES = 28.0  # of one element in an optimizer step: parameter, gradient and two moments read, three written
_STATE_BYTES = 16.0  # that stay: parameter, gradient and two moments, fp32
_BUCKET_BYTES = 32.0 * 2**20  # a size at which the summing of partial gradients is priced: they are summed together


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What work costs on one rank, and communication on the axis.

    `collective_seconds` takes bytes as `planner.collectives` counts them. `expert_imbalance` is the load of the rank
    whose experts have the most rows, in units of the mean over ranks (`planner.shard.loads` has it of measured ones).
    `outer_seconds` are those of collectives on axes, by name, that have split the graph before.
    """

    flop_per_second: float
    bytes_per_second: float
    kernel_seconds: float
    collective_seconds: Callable[[Collective, float], float]
    micro_batch: int
    num_microbatches: int
    seconds_per_saved_byte: float = 0.0
    expert_imbalance: float = 1.0
    outer_seconds: Mapping[str, Callable[[Collective, float], float]] = field(default_factory=dict)

    @property
    def of_fast_links(self) -> "Prices":
        """The same where a collective and a launch take a thousandth of their time."""
        seconds = self.collective_seconds
        return replace(
            self,
            kernel_seconds=self.kernel_seconds / 1000,
            collective_seconds=lambda collective, num_bytes: seconds(collective, num_bytes) / 1000,
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run all blocks of a graph: a sharding for each."""

    name: str
    shardings: tuple[Sharding, ...]


def variants(graph: Graph, degree: int, prices: Prices, *, whole_parameters: bool = False) -> tuple[Variant, ...]:
    """The fastest way to run the blocks on `degree` ranks, then leaner ones (fewer bytes held), each once.

    `prices.seconds_per_saved_byte` is what a byte is worth in the fastest; in the leaner ones the bytes that are held
    weigh more. Tied parameters have one placement everywhere. With `whole_parameters` that is Q for those that train:
    every rank has all of each and finds a part of its gradient, so that what is shared out are activations.

    Raises:
        SolverError: the solver found nothing, which no model should make it do.
    """
    problem = _Problem(graph, degree, prices, whole_parameters=whole_parameters)
    fast = problem.solve(prices.seconds_per_saved_byte)
    found = [fast]
    for weight in _WEIGHTS if fast.held_bytes() > 0 else ():
        if len(found) < len(_NAMES):
            choice = problem.solve(prices.seconds_per_saved_byte + weight * fast.seconds() / fast.held_bytes())
            found += [choice] if choice.held_bytes() < (1 - _GAP) * found[-1].held_bytes() else []
    return tuple(
        Variant(name=name, shardings=problem.shardings(choice)) for name, choice in zip(_NAMES, found, strict=False)
    )


def resharded(
    graph: Graph,
    degree: int,
    prices: Prices,
    parameters: Mapping[str, Placement],
    carried: Mapping[int, Placement] | None = None,
    *,
    replicated: Collection[str] = (),
    whole_parameters: bool = False,
    keeps_parts: bool = False,
) -> tuple[Sharding, ...]:
    """The fastest shardings of another graph of the same model (other lengths, evaluation), its parameters as given.

    `parameters` and buffers are given by name, `carried` are layouts of tensors between blocks of `graph`, by index
    (None = free). Operators that are `replicated` are not split, conversions among them not made. `whole_parameters`
    is as for `variants`. With `keeps_parts` no parameter is gathered to be used whole.

    Raises:
        PlanError: a parameter cannot have its placement in this graph.
    """
    names = {t.name: i for i, t in enumerate(graph.tensors) if t.kind in ("parameter", "buffer")}
    fixed = {names[name]: placement for name, placement in parameters.items() if name in names} | dict(carried or {})
    problem = _Problem(
        graph, degree, prices, fixed, replicated, whole_parameters=whole_parameters, keeps_parts=keeps_parts
    )
    return problem.shardings(problem.solve(prices.seconds_per_saved_byte))


# --- the blocks that are alike ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """Blocks that are alike: the first stands for all."""

    block: Block
    members: tuple[int, ...]  # of graph.blocks
    maker: Mapping[int, tuple[int, int]]  # the node of the first block, and the output of it, that makes a tensor

    @property
    def number(self) -> int:
        """What names it."""
        return self.members[0]


def _kinds(graph: Graph, gradients: Collection[int], fixed: Mapping[int, Placement]) -> list[_Kind]:
    """Blocks by what they do, their tensors numbered in order of appearance."""
    groups: dict[object, list[int]] = {}
    for index, block in enumerate(graph.blocks):
        number: dict[int, int] = {}

        def local(arg: Arg, number: dict[int, int] = number) -> object:
            if isinstance(arg, Ref):
                return ("t", number.setdefault(arg.tensor, len(number)))
            return tuple(map(local, arg)) if isinstance(arg, tuple) else (type(arg).__name__, arg)

        def all_of(tensors: Iterable[int | None], number: dict[int, int] = number) -> object:
            return tuple(None if t is None else number.setdefault(t, len(number)) for t in tensors)

        outer = [all_of(part) for part in (block.inputs, block.shared, block.parameters, block.buffers)]
        nodes = [
            (n.op, local(n.args), [(k, local(v)) for k, v in n.kwargs], all_of(n.outputs), all_of(n.mutates))
            for n in (graph.nodes[i] for i in block.nodes)
        ]
        ends = [all_of(block.outputs), [t in _ends(graph) for t in block.outputs]]
        tensors = [
            (tensor.shape, tensor.dtype, tensor.kind, tensor.order, t in gradients, fixed.get(t))
            for t in number
            for tensor in [graph.tensors[t]]
        ]
        groups.setdefault(repr((outer, nodes, ends, tensors)), []).append(index)
    kinds = []
    for members in groups.values():
        first = graph.blocks[members[0]]
        made = ((i, at, t) for i in first.nodes for at, t in enumerate(graph.nodes[i].outputs))
        kinds.append(_Kind(first, tuple(members), {t: (i, at) for i, at, t in made if t is not None}))
    return kinds


def _ends(graph: Graph) -> set[int]:
    """What the user gets: always whole."""
    return {graph.loss, *(tensor for _, tensor in graph.outputs)}


# --- the problem ------------------------------------------------------------------------------------


@dataclass
class _Group:
    """What has one placement: a parameter or buffer wherever it is read, or a tensor between blocks."""

    tensor: int  # one of them
    candidates: tuple[Placement, ...] = (R,)
    num_stored: int = 0  # distinct parameters among them


@dataclass(frozen=True)
class _Use:
    """A consumer of a tensor in a block: a node's operand, or (node None) the block's output."""

    node: int | None
    position: int
    takes: tuple[Placement, ...]
    as_made: bool = False  # it is written in place (planner.shard.writes)


class _Problem:
    """Candidates, costs and the integer program of a graph at one degree."""

    def __init__(
        self,
        graph: Graph,
        degree: int,
        prices: Prices,
        fixed: Mapping[int, Placement] | None = None,
        replicated: Collection[str] = (),
        *,
        whole_parameters: bool = False,
        keeps_parts: bool = False,
    ) -> None:
        self.graph, self.degree, self.prices = graph, degree, prices
        self.replicated = frozenset(replicated)
        self.whole_parameters, self.keeps_parts = whole_parameters, keeps_parts
        self.fixed = dict(fixed or {})
        self.writes = Writes(graph)
        self.gradients = self.writes.moving
        self.kinds = _kinds(graph, self.gradients, self.fixed)
        self.group_of, self.groups = self._grouped()
        self.pinned = {t for d in graph.divisors for t in (d.tensor, *(t for t, _ in d.sums))}
        self.options: dict[int, tuple[Option, ...]] = {}  # by node of the first block of each kind
        self._find_candidates()
        self.uses = {kind.number: self._uses(kind) for kind in self.kinds}
        self._prune()

    # Which tensors have one placement.

    def _grouped(self) -> tuple[dict[int, int], list[_Group]]:
        """Group of every tensor that is stored or passed between blocks; those of blocks alike are one group."""
        parent: dict[int, int] = {}

        def root(t: int) -> int:
            while parent.setdefault(t, t) != t:
                t = parent[t]
            return t

        for kind in self.kinds:
            first = _outside(kind.block)
            for member in kind.members:
                for one, other in zip(first, _outside(self.graph.blocks[member]), strict=True):
                    a, b = sorted((root(one), root(other)))
                    parent[b] = a
        roots = sorted({root(t) for t in parent})
        groups = [_Group(t) for t in roots]
        found = {t: roots.index(root(t)) for t in sorted(parent)}
        for t, group in found.items():
            groups[group].num_stored += self.graph.tensors[t].kind == "parameter"
        return found, groups

    # Candidates.

    def _find_candidates(self) -> None:
        """Options of every node, from the splits that its neighbours may have, until nothing is new."""
        seeds: dict[int, dict[Placement, None]] = defaultdict(dict)
        group_seeds: dict[int, dict[Placement, None]] = defaultdict(dict)
        for tensor, placement in self.fixed.items():
            if placement.is_split and tensor in self.group_of:
                group_seeds[self.group_of[tensor]][placement] = None
        asked: dict[int, object] = {}

        def visit(index: int) -> bool:
            node = self.graph.nodes[index]
            touched = list(dict.fromkeys((*reads(node), *(t for t in node.outputs if t is not None))))
            known = {}
            for t in touched:
                here = group_seeds[self.group_of[t]] if t in self.group_of else seeds[t]
                known[t] = tuple(here)
            if asked.get(index) == known:
                return False
            asked[index] = known
            found = options(node, self.graph.tensors, self.degree, known, self.gradients)
            self.options[index] = tuple(filter(_is_whole, found)) if node.op in self.replicated else found
            is_new = False
            for option in self.options[index]:
                for t, placement in _placed(node, option):
                    if not placement.is_part:
                        continue
                    here = group_seeds[self.group_of[t]] if t in self.group_of else seeds[t]
                    if placement not in here and len(here) < _MOST_SEEDS:
                        here[placement] = None
                        is_new = True
            return is_new

        order = [i for kind in self.kinds for i in kind.block.nodes]
        for turn in range(16):  # a split travels through a whole block in one turn; few more settle it
            if sum(visit(i) for i in (order if turn % 2 == 0 else order[::-1])) == 0:
                break
        for index, node in ((i, self.graph.nodes[i]) for i in order):
            if any(t in self.pinned for t in node.outputs):
                whole = tuple(o for o in self.options[index] if all(p in (None, R) for p in o.outputs))
                self.options[index] = whole
        ends = _ends(self.graph)
        for number, group in enumerate(self.groups):
            group.candidates = self._candidates(group, group_seeds[number])
        for t, number in self.group_of.items():
            if t in ends or t in self.pinned:
                self.groups[number].candidates = (R,)
        for t, placement in self.fixed.items():
            if t in self.group_of:
                self.groups[self.group_of[t]].candidates = (placement,)

    def _candidates(self, group: _Group, seeds: Iterable[Placement]) -> tuple[Placement, ...]:
        tensor = self.graph.tensors[group.tensor]
        splits = tuple(seeds)
        if tensor.kind in ("parameter", "buffer"):
            partial = (Q,) if group.tensor in self.gradients else ()
            if self.whole_parameters:
                return partial or (R,)
            return (R, *partial, *splits)
        # Between blocks: whole, or plain splits.
        return (R, *(p for p in splits if _is_plain(p)))

    def _uses(self, kind: _Kind) -> dict[int, list[_Use]]:
        """Consumers of every tensor in a block."""
        block = kind.block
        uses: dict[int, list[_Use]] = defaultdict(list)
        alike = [self.graph.blocks[member] for member in kind.members]
        for place, index in enumerate(block.nodes):
            others = [self.graph.nodes[one.nodes[place]] for one in alike]
            for position, t in enumerate(operands_of(self.graph.nodes[index])):
                takes = tuple(dict.fromkeys(o.operands[position] for o in self.options[index]))
                as_made = any(
                    self.writes.takes_as_made(one.nodes[place], operands_of(other)[position])
                    for one, other in zip(alike, others, strict=True)
                )
                uses[t].append(_Use(index, position, takes, as_made=as_made))
        for place, t in enumerate(block.outputs):
            if t in kind.maker:
                takes = self.groups[self.group_of[t]].candidates
                as_made = any(self.writes.is_handed_on_as_made(one.outputs[place]) for one in alike)
                uses[t].append(_Use(None, 0, takes, as_made=as_made))
        return dict(uses)

    def _prune(self) -> None:
        """Drop options whose operands nothing becomes, or whose outputs become nothing that is taken."""
        for kind in self.kinds:
            uses = self.uses[kind.number]
            while True:
                made = {t: self._made(kind, t) for t in uses}
                before = sum(len(self.options[index]) for index in kind.block.nodes)
                for t, consumers in uses.items():
                    for at, use in enumerate(consumers):
                        takes = tuple(q for q in use.takes if any(self.reachable(t, p, q, use) for p in made[t]))
                        if use.node is not None:
                            kept = [o for o in self.options[use.node] if o.operands[use.position] in takes]
                            self._keep(use.node, kept)
                            takes = tuple(dict.fromkeys(o.operands[use.position] for o in kept))
                        consumers[at] = replace(use, takes=takes)
                        if t in kind.maker:
                            index, output = kind.maker[t]
                            good = {p for p in made[t] if any(self.reachable(t, p, q, use) for q in takes)}
                            self._keep(index, [o for o in self.options[index] if o.outputs[output] in good])
                if sum(len(self.options[index]) for index in kind.block.nodes) == before:
                    break

    def _keep(self, index: int, kept: Sequence[Option]) -> None:
        if not kept:
            node = self.graph.nodes[index]
            raise PlanError(f"{node.source or node.op}: no split of {node.op} agrees with its neighbours")
        self.options[index] = tuple(kept)

    def _made(self, kind: _Kind, t: int) -> tuple[Placement, ...]:
        """Placements that a tensor may have where a block gets or makes it."""
        if (found := kind.maker.get(t)) is not None:
            index, position = found
            made = (o.outputs[position] for o in self.options[index])
            return tuple(dict.fromkeys(p for p in made if p is not None))
        if t in kind.block.shared or t not in self.group_of:
            return (R,)
        return self.groups[self.group_of[t]].candidates

    def reachable(self, t: int, source: Placement, target: Placement, use: _Use) -> bool:
        """Whether a consumer that takes `target` can have it from `source`."""
        if source == target or self.same(t, source, target):
            return True
        return not use.as_made and self.convert(t, source, target) is not None

    def same(self, t: int, source: Placement, target: Placement) -> bool:
        """Whether two placements are one: Q is R where there is no gradient."""
        has_gradient = t in self.gradients
        return effective(source, has_gradient=has_gradient) == effective(target, has_gradient=has_gradient)

    # Costs.

    def convert(self, t: int, source: Placement, target: Placement) -> float | None:
        """Seconds of a conversion, forward and backward; None if there is none."""
        key = (t, source, target)
        if key not in self._conversions:
            self._conversions[key] = self._convert(t, source, target)
        return self._conversions[key]

    @cached_property
    def _conversions(self) -> dict[tuple[int, Placement, Placement], float | None]:
        return {}

    def _convert(self, t: int, source: Placement, target: Placement) -> float | None:
        if self.same(t, source, target):
            return 0.0
        has_gradient = t in self.gradients
        found = conversion(source, target, has_gradient=has_gradient)
        if found is None or found.op in self.replicated:
            return None
        is_held = source.is_split and self.graph.tensors[t].kind == "parameter"
        if is_held and (self.keeps_parts or t not in self.fixed):
            return None  # sharding by FSDP gathers parameters as well, ahead of time, and keeps no copy for backward
        whole = self.bytes_of(t)
        seconds = 0.0
        for collective in (found.forward, found.backward):
            if collective is not None:
                moved = whole / self.degree if collective == "all_to_all" else whole
                seconds += self.prices.collective_seconds(collective, moved)
        copied = any(p.is_split and not self._is_in_a_row(t, p) for p in (source, target))
        return seconds + self._copying_seconds(found.op, whole, copied=copied, has_gradient=has_gradient)

    def _is_in_a_row(self, t: int, placement: Placement) -> bool:
        """Whether what a rank holds lies together in memory, so that it need not be copied to be sent."""
        leading = self.graph.tensors[t].shape[: placement.dim]
        is_one_piece = len(placement.parts) == 1 and size_at(placement.repeats, self.prices.micro_batch) == 1
        return is_one_piece and prod(size_at(size, self.prices.micro_batch) for size in leading) == 1

    def _copying_seconds(self, op: str, whole: float, *, copied: bool, has_gradient: bool) -> float:
        """Of the copies around a collective: pieces are put together along a dim, or cut out of it."""
        part = whole / self.degree
        gathers, cuts = (2 * whole, 2 * part) if copied else (0.0, 0.0)
        moved = {
            "take": (cuts, whole + part), "cut": (cuts, gathers), "gather": (gathers, cuts),
            "gather_sum": (gathers, gathers), "scatter": (gathers, gathers), "exchange": (4 * part, 4 * part),
            "share": (2 * whole, 0.0), "unshare": (0.0, 2 * whole),
        }.get(op.split(".")[1], (0.0, 0.0))  # fmt: skip
        return sum(self._memory_seconds(b) for b in (moved if has_gradient else moved[:1]) if b)

    def _memory_seconds(self, num_bytes: float) -> float:
        return max(num_bytes / self.prices.bytes_per_second, self.prices.kernel_seconds)

    def bytes_of(self, t: int, placement: Placement = R) -> float:
        """Bytes that a rank holds of a tensor."""
        whole = self.graph.tensors[t].num_bytes.at(self.prices.micro_batch)
        rows = self.prices.expert_imbalance if placement.kind == "D" else 1.0
        return whole * rows / self.degree if placement.is_part else whole

    def node_seconds(self, index: int, option: Option) -> float:
        """Forward and backward of a node, with the collectives inside its operator."""
        node = self.graph.nodes[index]
        key = (index, option.operands, option.outputs)
        if key not in self._node_seconds:
            self._node_seconds[key] = self._seconds_of(node, option)
        return self._node_seconds[key]

    @cached_property
    def _node_seconds(self) -> dict[tuple[int, tuple[Placement, ...], tuple[Placement | None, ...]], float]:
        return {}

    def _seconds_of(self, node: Node, option: Option) -> float:
        communicating = self._inner_seconds(option) + self._sorting_seconds(node, option)
        communicating += self._outer_seconds(node, option)
        if node.aliases and not node.mutates:
            return communicating
        prices = self.prices
        placed = list(_placed(node, option))
        moved = sum(self.bytes_of(t, p) for t, p in placed)
        if base_name(node) in LOOKS_UP and placed:  # of what is looked up in, only as much as is found
            moved -= max(0.0, self.bytes_of(*placed[0]) - self.bytes_of(*placed[-1]))
        flop = flop_of(node, self.graph.tensors, prices.micro_batch)
        if option.op in OF_EXPERTS:
            flop *= prices.expert_imbalance
        forward = max(
            flop * option.share / prices.flop_per_second, moved / prices.bytes_per_second, prices.kernel_seconds
        )
        num_gradients = min(2, sum(t in self.gradients for t in operands_of(node)))
        made = any(t in self.gradients for t in (*node.outputs, *node.mutates))
        backward = 0.0 if not made else (float(num_gradients) if flop else 2.0)
        return communicating + forward * (1.0 + backward)

    def _inner_seconds(self, option: Option) -> float:
        """Of collectives inside an operator."""
        inner = inner_collectives(option.op, option.args, self.graph.tensors, self.degree)
        busiest = self.prices.expert_imbalance if option.op in OF_EXPERTS else 1.0
        sizes = ((kind, size.at(self.prices.micro_batch) * busiest) for _, kind, size in inner)
        return sum(self.prices.collective_seconds(kind, num_bytes) for kind, num_bytes in sizes)

    def _outer_seconds(self, node: Node, option: Option) -> float:
        """Of a conversion that another axis has made."""
        seconds = self.prices.outer_seconds.get(str(dict(node.kwargs).get("axis")))
        if seconds is None or not is_outer(node):
            return 0.0
        (read, before), (made, after) = list(_placed(node, option))[:2]
        moves = made in self.gradients
        return conversion_seconds(node, self.bytes_of(read, before), self.bytes_of(made, after), seconds, moves=moves)

    def _sorting_seconds(self, node: Node, option: Option) -> float:
        """Of putting rows in the order of the experts that they came for, and back, forward and backward."""
        if option.op != DISPATCHED:
            return 0.0
        enters, leaves = option.args[3:5]
        moved = [operands_of(node)[0]] if enters else []
        moved += [t for t in node.outputs if t is not None] if leaves else []
        return sum(2 * self._memory_seconds(2 * self.bytes_of(t) / self.degree) for t in moved)

    def stored_costs(self, group: _Group, placement: Placement) -> tuple[float, float]:
        """(seconds, bytes) a micro-batch, of holding a parameter: its update, and summing its partial gradients."""
        tensor = self.graph.tensors[group.tensor]
        if tensor.kind != "parameter":
            return 0.0, 0.0
        elements = tensor.num_elements.fixed / (self.degree if placement.is_split else 1)
        seconds, prices = 0.0, self.prices
        if tensor.requires_grad:
            seconds = elements * _UPDATE_BYTES / prices.bytes_per_second / prices.num_microbatches
        if placement == Q and not self.whole_parameters:  # else data parallelism sums over these ranks, too
            per_byte = prices.collective_seconds("all_reduce", _BUCKET_BYTES) / _BUCKET_BYTES
            seconds += elements * DTYPE_BYTES[tensor.dtype] * per_byte / prices.num_microbatches
        return seconds * group.num_stored, elements * _STATE_BYTES * group.num_stored

    def kept(self, kind: _Kind) -> Iterator[tuple[int, int, int | None]]:
        """(tensor, node, operand position or None for its own output) that backward needs."""
        for index in kind.block.nodes:
            node = self.graph.nodes[index]
            yield from ((t, index, position) for t, position in kept_by(node, self.graph.tensors, self.gradients))

    # The integer program.

    def solve(self, seconds_per_byte: float) -> "_Choice":
        """The best choice where a held byte is worth so many seconds.

        Raises:
            SolverError: HiGHS found none within its limit, or one that breaks a rule.
        """
        rows = _Rows(self, seconds_per_byte)
        end = rows.program.solve(gap=_GAP, node_limit=_NODE_LIMIT)
        if not end.found:
            raise SolverError(f"no sharding of {self.graph.name or 'the model'} on {self.degree} ranks was found")
        choice = rows.choice()
        if choice.seconds() == float("inf"):
            raise SolverError(f"HiGHS chose conversions on {self.degree} ranks that do not exist")
        return choice

    def shardings(self, choice: "_Choice") -> tuple[Sharding, ...]:
        """A sharding per block of the graph."""
        found: dict[int, Sharding] = {}
        for kind in self.kinds:
            for member in kind.members:
                found[member] = self._sharding(choice, kind.block, self.graph.blocks[member])
        return tuple(found[i] for i in range(len(self.graph.blocks)))

    def _sharding(self, choice: "_Choice", first: Block, block: Block) -> Sharding:
        def stored(tensors: Iterable[int]) -> tuple[Placement, ...]:
            return tuple(choice.groups[self.group_of[t]] for t in tensors)

        taken = []
        for one, other in zip(first.nodes, block.nodes, strict=True):
            mine, its = self.graph.nodes[one], self.graph.nodes[other]
            renamed = dict(zip(reads(mine), reads(its), strict=True))
            option = choice.options[one]
            taken.append(
                replace(
                    option,
                    args=tuple(_renamed(a, renamed) for a in option.args),
                    kwargs=tuple((name, _renamed(a, renamed)) for name, a in option.kwargs),
                )
            )
        return Sharding(
            options=tuple(taken),
            parameters=stored(block.parameters),
            buffers=stored(block.buffers),
            inputs=stored(block.inputs),
            outputs=stored(block.outputs),
        )


@dataclass(frozen=True)
class _Choice:
    """An option per node (of the first block of each kind) and a placement per group."""

    problem: _Problem
    options: Mapping[int, Option]
    groups: Mapping[int, Placement]

    def made(self, kind: _Kind, t: int) -> Placement:
        """Where a block gets or makes a tensor."""
        problem = self.problem
        if (found := kind.maker.get(t)) is not None:
            index, position = found
            return self.options[index].outputs[position] or R
        if t in kind.block.shared or t not in problem.group_of:
            return R
        return self.groups[problem.group_of[t]]

    def conversions(self, kind: _Kind) -> list[tuple[int, Placement, Placement]] | None:
        """(tensor, from, to) that a block makes, each once; None if one is impossible."""
        problem = self.problem
        found: dict[tuple[int, Placement, Placement], None] = {}
        for t, uses in problem.uses[kind.number].items():
            source = self.made(kind, t)
            for use in uses:
                target = (
                    self.groups[problem.group_of[t]]
                    if use.node is None
                    else self.options[use.node].operands[use.position]
                )
                if problem.same(t, source, target):
                    continue
                if use.as_made or problem.convert(t, source, target) is None:
                    return None
                found[t, source, target] = None
        return list(found)

    def seconds(self) -> float:
        """Of a micro-batch, forward and backward, and its share of what is done once a step; inf if impossible."""
        problem, total = self.problem, 0.0
        for kind in problem.kinds:
            converted = self.conversions(kind)
            if converted is None:
                return float("inf")
            one = sum(problem.convert(*c) or 0.0 for c in converted)
            one += sum(problem.node_seconds(i, self.options[i]) for i in kind.block.nodes)
            total += one * len(kind.members)
        return total + sum(problem.stored_costs(g, self.groups[i])[0] for i, g in enumerate(problem.groups))

    def held_bytes(self) -> float:
        """Of states, and of what one micro-batch keeps for backward."""
        problem, total = self.problem, 0.0
        for kind in problem.kinds:
            kept = set()
            for t, index, position in problem.kept(kind):
                option = self.options[index]
                placement = self.made(kind, t) if position is None else option.operands[position]
                kept.add((t, placement if placement.is_part else R))
            total += sum(problem.bytes_of(t, p) for t, p in kept) * len(kind.members)
        return total + sum(problem.stored_costs(g, self.groups[i])[1] for i, g in enumerate(problem.groups))

    def cost(self, seconds_per_byte: float) -> float:
        """The objective."""
        return self.seconds() + (seconds_per_byte * self.held_bytes() if seconds_per_byte else 0.0)


class _Rows:
    """The integer program (module docstring), in microseconds."""

    def __init__(self, problem: _Problem, seconds_per_byte: float) -> None:
        self.problem, self.per_byte = problem, seconds_per_byte
        self.program = Program("sharding")
        self.objective: Terms = []
        self.g: dict[int, dict[Placement, Terms]] = {}
        self.x: dict[int, list[Terms]] = {}
        for number, group in enumerate(problem.groups):
            self.g[number] = {}
            for at, p in enumerate(group.candidates):
                seconds, held = problem.stored_costs(group, p)
                cost = seconds + held * seconds_per_byte
                self.g[number][p] = [(self._variable(f"g_{number}_{at}", cost, integer=True), 1.0)]
            self._one_of(self.g[number].values())
        for kind in problem.kinds:
            for index in kind.block.nodes:
                self.x[index] = [
                    [(self._variable(f"x_{index}_{at}", cost, integer=True), 1.0)]
                    for at, option in enumerate(problem.options[index])
                    for cost in [problem.node_seconds(index, option) * len(kind.members)]
                ]
                self._one_of(self.x[index])
            for t, uses in problem.uses[kind.number].items():
                self._add_tensor(kind, t, uses)
            if seconds_per_byte:
                self._add_kept(kind)
        self.program.minimise(self.objective)

    def choice(self) -> _Choice:
        """What the solver found."""

        def best(terms: Sequence[Terms]) -> int:
            return max(range(len(terms)), key=lambda i: float(terms[i][0][0].varValue))

        return _Choice(
            self.problem,
            {index: self.problem.options[index][best(terms)] for index, terms in self.x.items()},
            {number: list(terms)[best(list(terms.values()))] for number, terms in self.g.items()},
        )

    def _variable(self, name: str, seconds: float = 0.0, *, integer: bool = False) -> Variable:
        variable = self.program.variable(name, 1.0, integer=integer)
        if seconds:
            self.objective.append((variable, seconds * _MICROSECONDS))
        return variable

    def _one_of(self, terms: Iterable[Terms]) -> None:
        self.program.row([term for one in terms for term in one], "==", 1.0)

    def _made(self, kind: _Kind, t: int) -> dict[Placement, Terms | None]:
        """Per placement in which a block gets or makes a tensor: when it does (None = always)."""
        problem = self.problem
        if (found := kind.maker.get(t)) is not None:
            index, position = found
            made: dict[Placement, Terms] = defaultdict(list)
            for option, terms in zip(problem.options[index], self.x[index], strict=True):
                made[option.outputs[position] or R] += terms
            return dict(made)
        if t in kind.block.shared or t not in problem.group_of:
            return {R: None}
        return dict(self.g[problem.group_of[t]])

    def _taken(self, t: int, use: _Use) -> dict[Placement, Terms]:
        """Per placement in which a consumer takes its tensor: when it does."""
        if use.node is None:
            return dict(self.g[self.problem.group_of[t]])
        taken: dict[Placement, Terms] = defaultdict(list)
        for option, terms in zip(self.problem.options[use.node], self.x[use.node], strict=True):
            taken[option.operands[use.position]] += terms
        return dict(taken)

    def _add_tensor(self, kind: _Kind, t: int, uses: Sequence[_Use]) -> None:
        """The conversions between what is made and what is taken."""
        problem, number = self.problem, len(kind.members)
        made = self._made(kind, t)
        shared: dict[tuple[Placement, Placement], list[Terms]] = defaultdict(list)
        for at, use in enumerate(uses):
            taken = self._taken(t, use)
            arcs: dict[tuple[Placement, Placement], Terms] = {}
            for i, p in enumerate(made):
                for j, q in enumerate(taken):
                    if not problem.reachable(t, p, q, use):
                        continue
                    if len(made) == 1:
                        arcs[p, q] = taken[q]
                    elif len(taken) == 1:
                        arcs[p, q] = made[p] or []
                    else:
                        arcs[p, q] = [(self._variable(f"y_{kind.number}_{t}_{at}_{i}_{j}"), 1.0)]
            if len(made) > 1 and len(taken) > 1:
                for p, when in made.items():
                    self._equal([a for (source, _), arc in arcs.items() if source == p for a in arc], when or [])
                for q, when in taken.items():
                    self._equal([a for (_, target), arc in arcs.items() if target == q for a in arc], when)
            else:
                self._forbid(made, taken, arcs)
            for (p, q), arc in arcs.items():
                if problem.convert(t, p, q):
                    shared[p, q].append(arc)
        for at, ((p, q), all_arcs) in enumerate(shared.items()):
            seconds = (problem.convert(t, p, q) or 0.0) * number
            if len(all_arcs) == 1:
                self.objective += [(variable, factor * seconds * _MICROSECONDS) for variable, factor in all_arcs[0]]
                continue
            converted = [(self._variable(f"z_{kind.number}_{t}_{at}", seconds), -1.0)]
            for arc in all_arcs:
                self.program.row([*arc, *converted], "<=")

    def _forbid(
        self,
        made: Mapping[Placement, Terms | None],
        taken: Mapping[Placement, Terms],
        arcs: Mapping[tuple[Placement, Placement], Terms],
    ) -> None:
        """Where one side has no choice, the other must not take what is impossible."""
        for p, when in made.items():
            for q, then in taken.items():
                if (p, q) not in arcs:
                    self.program.row(then if len(made) == 1 else when or [], "==")

    def _equal(self, left: Terms, right: Terms) -> None:
        self.program.row([*left, *((v, -f) for v, f in right)], "==")

    def _add_kept(self, kind: _Kind) -> None:
        """Bytes kept for backward: once for a tensor, whole or split."""
        problem = self.problem
        needs: dict[tuple[int, Placement], list[Terms]] = defaultdict(list)
        for t, index, position in problem.kept(kind):
            when = self._made(kind, t) if position is None else self._taken(t, _Use(index, position, ()))
            by_storage: dict[Placement, Terms] = defaultdict(list)
            for p, terms in when.items():
                by_storage[p if p.is_part else R] += terms or []
            for p, terms in by_storage.items():
                needs[t, p].append(terms)
        for at, ((t, p), all_terms) in enumerate(needs.items()):
            cost = problem.bytes_of(t, p) * self.per_byte * len(kind.members)
            keeps = [(self._variable(f"s_{kind.number}_{at}", cost), -1.0)]
            for terms in all_terms:
                self.program.row([*terms, *keeps], "<=")


def _is_plain(placement: Placement) -> bool:
    """Whether a split cuts a dim that is no batch into equal pieces in a row."""
    is_one = placement.is_split and len(placement.parts) == 1 and placement.repeats == 1
    return is_one and not isinstance(placement.parts[0], Batch)


def _is_whole(option: Option) -> bool:
    """Whether every rank does what one device does."""
    return all(p in (None, R, Q) for p in (*option.operands, *option.outputs))


def _outside(block: Block) -> tuple[int, ...]:
    """Tensors of a block whose placement others know."""
    return (*block.parameters, *block.buffers, *block.inputs, *block.outputs)


def _placed(node: Node, option: Option) -> Iterator[tuple[int, Placement]]:
    """The tensors of a node with their placements."""
    yield from zip(operands_of(node), option.operands, strict=True)
    for t, placement in zip(node.outputs, option.outputs, strict=True):
        if t is not None and placement is not None:
            yield t, placement


def _renamed(arg: Arg, names: Mapping[int, int]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.tensor])
    return tuple(_renamed(a, names) for a in arg) if isinstance(arg, tuple) else arg
