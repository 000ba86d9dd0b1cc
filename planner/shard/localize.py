"""The graph of one rank: the sizes that it holds, and a node for every collective.

It is a `planner.graph.Graph` as any other, equal on all ranks of the axis, so that what is priced is what is run. A
tensor of the whole graph has the same index in it, with the shape of what a rank holds; copies that are placed
otherwise come after them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.errors import PlanError
from planner.graph import Arg, Block, Graph, Node, Ref, RowOrder, Tensor
from planner.shard.placement import (
    E,
    Option,
    Placement,
    R,
    Sharding,
    conversion,
    divides,
    effective,
    local_shape,
    operands_of,
)
from planner.shard.writes import Groups, Writes

_ORDER = re.compile(r"@[\d.]+")  # of experts, in the text of a placement
# Conversions whose result is the very tensor, seen anew.
_SAME_STORAGE = ("planner.copy.default", "planner.unshare.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Localized:
    """The graph of a rank, and how the tensors of the whole graph are placed.

    Parameters and buffers as they are stored, what a block hands on as it is handed on, others as they are made.
    """

    graph: Graph
    placements: Mapping[int, Placement]


def localize(graph: Graph, shardings: Sequence[Sharding], degree: int, *, axis: str = "tp") -> Localized:
    """The graph of one of `degree` ranks of a mesh axis; `shardings` has one for each block.

    Blocks keep names, order and tensors; nodes outside of blocks are unchanged. The graph has no classes: blocks that
    are equal have the same `class_index`, and `planner.trace.priced` gives the prices.

    Raises:
        PlanError: shardings that do not fit the graph or one another, or that ask for what cannot be.
    """
    if len(shardings) != len(graph.blocks):
        raise PlanError(f"{len(shardings)} shardings were given for the {len(graph.blocks)} blocks of {graph.name}")
    rewrite = _Rewrite(graph, degree, axis)
    for block, sharding in zip(graph.blocks, shardings, strict=True):
        rewrite.arrive(block, sharding)
    block_of = {index: position for position, block in enumerate(graph.blocks) for index in block.nodes}
    option_of = {
        index: option
        for block, sharding in zip(graph.blocks, shardings, strict=True)
        for index, option in zip(block.nodes, sharding.options, strict=True)
    }
    last = {block.nodes[-1]: position for position, block in enumerate(graph.blocks) if block.nodes}
    for index, node in enumerate(graph.nodes):
        if index not in block_of:
            rewrite.keep(index, node)
            continue
        position = block_of[index]
        rewrite.enter(position)
        rewrite.add(index, node, option_of[index])
        if index in last:
            rewrite.leave(graph.blocks[position], shardings[position])
    rewrite.check_results()
    return rewrite.result(shardings)


@dataclass(slots=True)
class _Scope:
    """What is known inside of one block: by which tensor something is had in a placement.

    `renamed` are outputs that are made otherwise than they are handed on; `final` how they are handed on.
    """

    placed: dict[int, Placement]
    final: dict[int, Placement]
    converted: dict[tuple[int, Placement], int] = field(default_factory=dict)
    renamed: dict[int, int] = field(default_factory=dict)


class _Rewrite:
    """The graph of a rank in the making."""

    def __init__(self, graph: Graph, degree: int, axis: str) -> None:
        self._graph = graph
        self._degree = degree
        self._axis = axis
        self._writes = Writes(graph)
        self._moving, self._group = self._writes.moving, self._writes.group
        self._maker, self._last_read = self._writes.maker, self._writes.last_read
        self._tensors = list(graph.tensors)
        self._nodes: list[Node] = []
        self._names = Counter(tensor.name for tensor in graph.tensors)
        self._new_nodes: dict[int, list[int]] = {}  # old node -> its conversions and itself
        self._after: dict[int, list[int]] = {}  # block -> conversions at its end
        self._stored: dict[int, Placement] = {}
        self._made_as: dict[int, int] = {}  # what is handed on otherwise than it is made -> the tensor that is made
        self._shared = Groups()  # of the rank's graph
        self._copies: list[int] = []  # made by conversions that move nothing: nobody may write into their storage
        self._scopes: list[_Scope] = []
        self._position = 0

    # --- what comes in ---

    def arrive(self, block: Block, sharding: Sharding) -> None:
        """Take down how all that a block reads is placed, and how it hands on what it makes."""
        self._check_lengths(block, sharding)
        for tensor, placement in (
            *zip(block.parameters, sharding.parameters, strict=True),
            *zip(block.buffers, sharding.buffers, strict=True),
        ):
            if placement.kind not in ("R", "Q", "S"):
                name = self._graph.tensors[tensor].name
                raise PlanError(
                    f"{name} of block {block.name} is stored as {placement}; what is stored must be whole or split"
                )
        placed: dict[int, Placement] = {}
        for tensor, placement in (
            *zip(block.parameters, sharding.parameters, strict=True),
            *zip(block.buffers, sharding.buffers, strict=True),
            *zip(block.inputs, sharding.inputs, strict=True),
        ):
            placed[tensor] = self._agreed(tensor, placement, block)
        final = {
            tensor: self._agreed(tensor, placement, block)
            for tensor, placement in zip(block.outputs, sharding.outputs, strict=True)
        }
        self._scopes.append(_Scope(placed, final))

    def _check_lengths(self, block: Block, sharding: Sharding) -> None:
        for what in ("parameters", "buffers", "inputs", "outputs"):
            given, there = len(getattr(sharding, what)), len(getattr(block, what))
            if given != there:
                raise PlanError(f"block {block.name} has {there} {what}, its sharding {given}")
        if len(sharding.options) != len(block.nodes):
            raise PlanError(
                f"block {block.name} has {len(block.nodes)} nodes, its sharding {len(sharding.options)} options"
            )

    def _agreed(self, tensor: int, placement: Placement, block: Block) -> Placement:
        """The placement of a tensor between blocks, which is one and the same."""
        placement = self._effective(tensor, placement)
        described = self._graph.tensors[tensor]
        if placement.is_split and (placement.dim >= len(described.shape) or not divides(self._degree, placement)):
            raise PlanError(f"{described.name} of block {block.name} cannot be split as {placement} in {self._degree}")
        before = self._stored.setdefault(tensor, placement)
        if before != placement:
            raise PlanError(
                f"{described.name} is {before} in one block and {placement} in block {block.name}; it must be the same"
            )
        return placement

    def _effective(self, tensor: int, placement: Placement) -> Placement:
        return effective(placement, has_gradient=tensor in self._moving)

    # --- nodes ---

    def keep(self, index: int, node: Node) -> None:
        """A node outside of the blocks."""
        self._new_nodes[index] = [self._append(node)]

    def enter(self, position: int) -> None:
        """The nodes that follow are those of this block."""
        self._position = position

    @property
    def _scope(self) -> _Scope:
        return self._scopes[self._position]

    def add(self, index: int, node: Node, option: Option) -> None:
        """A node of a block with its option, and the conversions that it needs."""
        start = len(self._nodes)
        operands = operands_of(node)
        if len(option.operands) != len(operands) or len(option.outputs) != len(node.outputs):
            raise PlanError(f"{node.source}: {node.op} has other operands or outputs than its option {option}")
        used: dict[int, int] = {}
        op, mutates, aliases = option.op, node.mutates, node.aliases
        for tensor, wanted in zip(operands, option.operands, strict=True):
            used[tensor] = self._as(tensor, self._effective(tensor, wanted), node)
            is_converted = used[tensor] != self._current(tensor) or self._is_view_of_copy(used[tensor])
            if tensor in node.mutates and is_converted:
                op = self._out_of_place(index, node, op, tensor)
                mutates = tuple(t for t in mutates if t != tensor)
                aliases = tuple(t for t in aliases if t != tensor)
        outputs = tuple(
            None if t is None else self._made(t, p, node) for t, p in zip(node.outputs, option.outputs, strict=True)
        )
        kwargs = tuple((key, _exchanged(arg, used)) for key, arg in option.kwargs)
        if op.startswith("planner.") and op != node.op:
            kwargs = (*kwargs, ("axis", self._axis))
        self._append(
            replace(
                node,
                op=op,
                args=_exchanged_all(option.args, used),
                kwargs=kwargs,
                outputs=outputs,
                mutates=tuple(used.get(t, t) for t in mutates),
                aliases=tuple(used.get(t, t) for t in aliases),
            )
        )
        for tensor in mutates:
            self._check_seen(index, node, tensor)
            # copies of what was there before are of no use any more
            group = self._group.get(tensor, tensor)
            scope = self._scope
            stale = [key for key in scope.converted if self._group.get(key[0], key[0]) == group]
            for key in stale:
                del scope.converted[key]
        self._new_nodes[index] = list(range(start, len(self._nodes)))

    def _is_view_of_copy(self, tensor: int) -> bool:
        """Whether autograd refuses to write it in place: its gradient passes through a conversion to its storage."""
        group = self._shared.find(tensor)
        return any(self._shared.find(copy) == group for copy in self._copies)

    def _append(self, node: Node) -> int:
        self._nodes.append(node)
        self._shared.add(node)
        return len(self._nodes) - 1

    def _check_seen(self, index: int, node: Node, written: int) -> None:
        """Who reads what shares its storage with `written` must see what is written: no conversion may be between."""
        group = self._group.get(written, written)
        for other, its in self._group.items():
            if its != group or self._maker.get(other, -1) >= index or self._last_read.get(other, -1) <= index:
                continue
            if self._shared.find(self._current(other)) != self._shared.find(self._current(written)):
                name = self._graph.tensors[other].name
                raise PlanError(
                    f"{node.source}: {node.op} writes into a converted copy of {name}, which is read again later and "
                    "must see what was written"
                )

    def _current(self, tensor: int) -> int:
        """The tensor that a tensor of the whole graph is, as it was made."""
        return self._scope.renamed.get(tensor, tensor)

    def _placed(self, tensor: int) -> Placement:
        """How a tensor is, as it was made or came in. Inputs of the model, constants and the prelude are R."""
        return self._scope.placed.get(tensor, R)

    def _as(self, tensor: int, target: Placement, node: Node) -> int:
        """The tensor that is `tensor` placed as `target`, converted if need be."""
        source = self._placed(tensor)
        if source == target:
            return self._current(tensor)
        scope = self._scope
        key = (tensor, target)
        if key not in scope.converted:
            is_handed_on = scope.final.get(tensor) == target and not self._is_written_later(tensor)
            scope.converted[key] = self._convert(tensor, source, target, node, tensor if is_handed_on else None)
        return scope.converted[key]

    def _is_written_later(self, tensor: int) -> bool:
        """Whether a node that is still to come writes what `tensor` may share its storage with."""
        group = self._group.get(tensor, tensor)
        written = self._writes.last_write.get(group)
        return written is not None and written not in self._new_nodes

    def _convert(self, tensor: int, source: Placement, target: Placement, node: Node, into: int | None) -> int:
        """A node that converts; `into` is a tensor of the whole graph that it makes, else a new one."""
        described = self._graph.tensors[tensor]
        made = conversion(source, target, has_gradient=tensor in self._moving)
        if made is None:
            raise PlanError(
                f"{node.source or node.name}: {node.op} needs {described.name} as {target}, which is {source} and "
                "cannot become it"
            )
        word = made.op.split(".")[1]
        current = self._current(tensor)
        if into is None:
            into = self._new_tensor(described, word, target)
        else:
            self._tensors[into] = self._local(described, target)
        self._append(
            Node(
                name=f"{described.name}.{word}",
                op=made.op,
                args=(Ref(current), *made.args),
                kwargs=(("axis", self._axis),),
                outputs=(into,),
                aliases=(current,) if made.op in _SAME_STORAGE else (),
                path=node.path,
                source=node.source,
            )
        )
        if made.op in _SAME_STORAGE:
            self._copies.append(into)
        return into

    def _new_tensor(self, described: Tensor, word: str, placement: Placement) -> int:
        """The index of a further tensor."""
        name = f"{described.name}.{word}"
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}#{self._names[name]}"
        made = replace(described, name=name, kind="activation", requires_grad=False, value=None)
        self._tensors.append(self._local(made, placement))
        return len(self._tensors) - 1

    def _local(self, described: Tensor, placement: Placement) -> Tensor:
        order = RowOrder("sent") if placement == E else described.order
        return replace(described, shape=local_shape(described.shape, placement, self._degree), order=order)

    def _made(self, tensor: int, placement: Placement | None, node: Node) -> int | None:
        """Take down how an output is; None where nothing reads it."""
        if placement is None:
            if tensor in self._last_read:
                name = self._graph.tensors[tensor].name
                raise PlanError(
                    f"{node.source}: {node.op} makes {name}, which is read, but its option does not make it"
                )
            return tensor
        placement = self._effective(tensor, placement)
        scope = self._scope
        scope.placed[tensor] = placement
        if scope.final.get(tensor, placement) != placement:
            scope.renamed[tensor] = self._new_tensor(self._graph.tensors[tensor], "made", placement)
            self._made_as[tensor] = scope.renamed[tensor]
            return scope.renamed[tensor]
        self._stored.setdefault(tensor, placement)
        self._tensors[tensor] = self._local(self._graph.tensors[tensor], placement)
        return tensor

    def _out_of_place(self, index: int, node: Node, op: str, tensor: int) -> str:
        """The operator that leaves its operand as it is, for one that writes into a copy.

        Raises:
            PlanError: what it writes is read later; it must be written where it is.
        """
        if reason := self._writes.needs_its_storage(index, tensor):
            name = self._graph.tensors[tensor].name
            raise PlanError(f"{node.source}: {op} writes into {name}, which would have to be converted before{reason}")
        namespace, packet, overload = op.split(".")
        return f"{namespace}.{packet.removesuffix('_')}.{overload}"

    # --- what goes out ---

    def leave(self, block: Block, sharding: Sharding) -> None:
        """Convert what is handed on otherwise than it was made."""
        start = len(self._nodes)
        scope = self._scope
        for tensor, target in zip(block.outputs, sharding.outputs, strict=True):
            target = self._effective(tensor, target)
            source = self._placed(tensor)
            if source == target or scope.converted.get((tensor, target)) == tensor:
                continue
            self._convert(tensor, source, target, self._graph.nodes[self._maker[tensor]], tensor)
        self._after[self._position] = list(range(start, len(self._nodes)))

    def check_results(self) -> None:
        """The loss and the outputs of an evaluation are whole on every rank."""
        for tensor in _results(self._graph):
            placement = self._stored.get(tensor, R)
            if placement != R:
                name = self._graph.tensors[tensor].name
                raise PlanError(f"the model's result {name} is {placement}; a result must be R")

    def result(self, shardings: Sequence[Sharding]) -> Localized:
        """The graph with the nodes renumbered."""
        graph = self._graph
        for tensor, described in enumerate(graph.tensors):
            if described.kind in ("parameter", "buffer"):
                self._tensors[tensor] = self._local(described, self._stored.get(tensor, R))
        new_index = {index: made[-1] for index, made in self._new_nodes.items()}
        classes: dict[object, int] = {}
        blocks = []
        for position, (block, sharding) in enumerate(zip(graph.blocks, shardings, strict=True)):
            nodes = [n for i in block.nodes for n in self._new_nodes[i]] + self._after.get(position, [])
            key = (block.class_index, _without_orders(text(sharding)))
            index = classes.setdefault(key, len(classes))
            blocks.append(replace(block, nodes=tuple(nodes), class_index=index))
        local = replace(
            graph,
            tensors=tuple(self._tensors),
            nodes=tuple(self._nodes),
            blocks=tuple(blocks),
            classes=(),
            prelude=replace(graph.prelude, nodes=tuple(new_index[i] for i in graph.prelude.nodes)),
            dropout_nodes=tuple(new_index[i] for i in graph.dropout_nodes),
            # what is weighed is what the reduction makes
            loss_terms=tuple(replace(t, tensor=self._made_as.get(t.tensor, t.tensor)) for t in graph.loss_terms),
        )
        return Localized(graph=local, placements=dict(self._stored))


def text(sharding: Sharding) -> tuple[tuple[str, ...], ...]:
    """A sharding in words that equal blocks share: its options, then parameters, buffers, inputs and outputs."""
    parts = (sharding.options, sharding.parameters, sharding.buffers, sharding.inputs, sharding.outputs)
    return tuple(tuple(str(item) for item in part) for part in parts)


def _without_orders(words: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """The text of a sharding, whichever experts a rank has: blocks that cost the same."""
    return tuple(tuple(_ORDER.sub("", word) for word in part) for part in words)


def _results(graph: Graph) -> tuple[int, ...]:
    """The loss, and the outputs of an evaluation."""
    return tuple(dict.fromkeys((graph.loss, *(tensor for _, tensor in graph.outputs))))


def _exchanged(arg: Arg, used: Mapping[int, int]) -> Arg:
    """An argument with other tensors."""
    if isinstance(arg, Ref):
        return Ref(used[arg.tensor])
    if isinstance(arg, tuple):
        return _exchanged_all(arg, used)
    return arg


def _exchanged_all(args: Sequence[Arg], used: Mapping[int, int]) -> tuple[Arg, ...]:
    return tuple(_exchanged(arg, used) for arg in args)
