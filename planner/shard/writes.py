"""Writing in place: which tensors share storage, and what must not be converted because somebody writes into it.

The program that chooses splits and the rewrite that carries them out ask here, so that neither does what the other
refuses.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from planner.graph import Graph, Node, reads
from planner.shard.placement import differentiable


class Groups:
    """Tensors that may share their storage; a group is named by the first of its tensors."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._before: dict[int, int] = {}
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        """What a node makes of what it aliases."""
        for operand in node.aliases:
            for made in node.outputs:
                if made is not None:
                    one, two = sorted((self.find(operand), self.find(made)))
                    self._before[two] = one

    def find(self, tensor: int) -> int:
        """The name of its group."""
        while self._before.get(tensor, tensor) != tensor:
            tensor = self._before[tensor]
        return tensor


class Writes:
    """What a graph writes in place, and who sees it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.moving = differentiable(graph)
        groups = Groups(graph.nodes)
        touched = {t for node in graph.nodes for t in (*reads(node), *node.outputs) if t is not None}
        self.group = {tensor: groups.find(tensor) for tensor in touched}
        self.maker = {t: i for i, node in enumerate(graph.nodes) for t in node.outputs if t is not None}
        self._live = sorted({*graph.prelude.nodes, *(i for block in graph.blocks for i in block.nodes)})
        # the last node that writes what a storage holds, that reads a tensor; results of the model are read after all
        self.last_write = {self.group.get(t, t): i for i in self._live for t in graph.nodes[i].mutates}
        self.last_read = {t: i for i in self._live for t in reads(graph.nodes[i])}
        self.last_read |= dict.fromkeys((graph.loss, *(t for _, t in graph.outputs)), len(graph.nodes))

    def needs_its_storage(self, index: int, tensor: int) -> str:
        """Why a node must write a tensor where it is ("" = a node that makes a new tensor instead is as good).

        What it writes is read again by another name, it is no value made here, or there is no operator that makes it.
        """
        node, described = self._graph.nodes[index], self._graph.tensors[tensor]
        packet = node.op.split(".")[1] if node.op.count(".") > 1 else node.op
        if described.kind != "activation" or not packet.endswith("_"):
            return "; a tensor that is written must be used as it is placed"
        for other in self._made_before(index, tensor):
            if self.last_read.get(other, -1) > index:
                name = self._graph.tensors[other].name
                return f", but {name} is read again later and must see what was written"
        if packet == "copy_" and any(t in self.moving for t in (*reads(node), *node.mutates)):
            return ", and without writing in place it has no derivative"
        return ""

    def _made_before(self, index: int, tensor: int) -> list[int]:
        """What may share storage with `tensor` and exists before a node, itself included."""
        group = self.group.get(tensor, tensor)
        members = self._members.get(group, [tensor])
        return [t for t in members if t == tensor or self.maker.get(t, -1) < index]

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for tensor in sorted(self.group):
            found[self.group[tensor]].append(tensor)
        return dict(found)

    @cached_property
    def _first_write(self) -> dict[int, int]:
        """Of each tensor whose storage is written where it is: the first node that does so."""
        found: dict[int, int] = {}
        for index in self._live:
            for written in self._graph.nodes[index].mutates:
                if self.needs_its_storage(index, written):
                    for tensor in self._made_before(index, written):
                        found.setdefault(tensor, index)
        return found

    def takes_as_made(self, index: int, tensor: int) -> bool:
        """Whether a node must take an operand as it was made.

        After a write, a copy that was converted before would miss it. Before it, a view must be one of the storage that
        is written, and autograd lets nobody write what it knows as the result of a conversion.
        """
        first = self._first_write.get(tensor)
        if first is None:
            return False
        return index >= first or tensor in self._graph.nodes[index].aliases or tensor in self.moving

    def is_handed_on_as_made(self, tensor: int) -> bool:
        """Whether a block must hand a tensor on as it was made."""
        return tensor in self._first_write
