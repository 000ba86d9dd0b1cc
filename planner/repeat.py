"""A deep model from a shallow trace: the equal blocks of a graph, repeated as often as the deep model has them.

Tracing takes time in proportion to the depth, planning does not need it: layers that are alike differ in nothing but
their names. `repeated` copies nodes and tensors, so that what comes out is the graph that the deep model would have.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.errors import PlanError
from planner.graph import Arg, Block, Graph, Node, Ref, Tensor

LEAST_RUN = 2  # equal blocks that make a run


@dataclass(frozen=True, kw_only=True, eq=False)
class Repeated:
    """The deep graph, and of which block of the shallow one each of its blocks is a copy."""

    graph: Graph
    origins: tuple[int, ...]


def runs(graph: Graph) -> tuple[range, ...]:
    """Positions of neighbouring blocks of one class, where there are at least two, in order.

    Equal blocks are layers, not the glue between them.
    """
    found, start = [], 0
    for end in range(1, len(graph.blocks) + 1):
        here = graph.blocks[start]
        if end < len(graph.blocks) and graph.blocks[end].class_index == here.class_index:
            continue
        if end - start >= LEAST_RUN and here.kind == "block":
            found.append(range(start, end))
        start = end
    return tuple(found)


def repeated(graph: Graph, counts: Sequence[int]) -> Repeated:
    """The graph with `counts[i]` blocks in the i-th of its `runs`, each at least as many as there are.

    The second block of a run is the one that is copied, right behind itself: it has neighbours of its own kind on
    both sides wherever a run has three, and so has each copy. Costs need no more than that; shared inputs, those of
    the prelude and of blocks before the run are read by all copies alike.

    Raises:
        PlanError: the graph has another number of runs, or a run is longer than what is wanted.
    """
    found = runs(graph)
    if len(found) != len(counts) or any(count < len(run) for run, count in zip(found, counts, strict=False)):
        raise PlanError(
            f"the graph of {graph.name} has runs of {', '.join(str(len(run)) for run in found) or 'no'} equal blocks, "
            f"which cannot be repeated to {', '.join(map(str, counts)) or 'none'}"
        )
    copier = _Copier(graph)
    for run, count in zip(found, counts, strict=True):
        copier.copy(run, count - len(run))
    return copier.result()


class _Copier:
    """Grows the lists of a graph; blocks are kept in order with their origin."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors: list[Tensor] = list(graph.tensors)
        self.nodes: list[Node] = list(graph.nodes)
        self.nodes_of: dict[int, list[int]] = {}  # block of the shallow graph -> nodes copied right behind it
        self.copies: dict[int, list[Block]] = {}
        self.renamed: dict[int, int] = {}  # what later blocks read in place of an output of the copied block
        self.random: list[int] = []
        self.aliases = list(graph.aliases)

    def copy(self, run: range, times: int) -> None:
        """Put `times` copies of the second block of a run behind it, and give the rest of the run later names."""
        template = run[1]
        block = self.graph.blocks[template]
        chain = _chain(self.graph, run)
        carried = dict(zip(block.outputs, block.outputs, strict=True))  # what the last copy made of each output
        for copy in range(1, times + 1):
            names = _Renamer(block.name, copy)
            new = {chain[t]: carried[t] for t in block.outputs if t in chain}
            for parameter in (*block.parameters, *block.buffers):
                new[parameter] = self._add(self.graph.tensors[parameter], names)
            for node in block.nodes:
                for made in self.graph.nodes[node].outputs:
                    if made is not None:
                        new[made] = self._add(self.graph.tensors[made], names)
            first = len(self.nodes)
            self.nodes += [_mapped(self.graph.nodes[node], new, names) for node in block.nodes]
            at = {old: first + i for i, old in enumerate(block.nodes)}
            self.random += [at[node] for node in block.nodes if node in set(self.graph.dropout_nodes)]
            self.aliases += [tuple(map(names, group)) for group in self.graph.aliases if names.holds(group)]
            moved = _mapped_block(block, new, tuple(at.values()), names(block.name))
            self.copies.setdefault(template, []).append(moved)
            carried = {t: new[t] for t in block.outputs}
        self.renamed |= {old: last for old, last in carried.items() if old != last}
        for place in run[2:]:
            self._rename(self.graph.blocks[place], times)

    def _add(self, tensor: Tensor, names: "_Renamer") -> int:
        self.tensors.append(replace(tensor, name=names(tensor.name)))
        return len(self.tensors) - 1

    def _rename(self, block: Block, by: int) -> None:
        """Parameters of a block that comes later in the deep model."""
        names = _Renamer(block.name, by)
        for parameter in (*block.parameters, *block.buffers):
            self.tensors[parameter] = replace(self.tensors[parameter], name=names(self.tensors[parameter].name))
        self.aliases = [tuple(map(names, group)) if names.holds(group) else group for group in self.aliases]

    def result(self) -> Repeated:
        """The whole graph, its nodes in the order of the blocks."""
        later: dict[int, int] = {}  # position in a run -> by how much its name moves
        for run in runs(self.graph):
            later |= dict.fromkeys(run[2:], len(self.copies.get(run[1], ())))
        blocks: list[Block] = []
        origins: list[int] = []
        seen: dict[int, int] = {}  # `renamed` holds from behind the copies on
        for place, block in enumerate(self.graph.blocks):
            names = _Renamer(block.name, later.get(place, 0))
            name = _numbered(block.name, len(blocks) - place)
            moved = _mapped_block(block, seen, block.nodes, names(name))
            for node in block.nodes:
                self.nodes[node] = _mapped(self.graph.nodes[node], seen, names)
            blocks.append(moved)
            origins.append(place)
            for copy in self.copies.get(place, ()):
                blocks.append(copy)
                origins.append(place)
            if self.copies.get(place):
                seen |= {old: self.renamed[old] for old in block.outputs}
        order = self._order()
        at = {old: new for new, old in enumerate(order)}
        return Repeated(
            graph=replace(
                self.graph,
                tensors=tuple(self.tensors),
                nodes=tuple(self.nodes[old] for old in order),
                blocks=tuple(replace(block, nodes=tuple(at[node] for node in block.nodes)) for block in blocks),
                prelude=replace(self.graph.prelude, nodes=tuple(at[node] for node in self.graph.prelude.nodes)),
                dropout_nodes=tuple(sorted(at[node] for node in (*self.graph.dropout_nodes, *self.random))),
                loss=seen.get(self.graph.loss, self.graph.loss),
                aliases=tuple(self.aliases),
            ),
            origins=tuple(origins),
        )

    def _order(self) -> list[int]:
        """Old places of all nodes in the new order: copies behind the last node of their template."""
        behind: dict[int, list[int]] = {}
        for template, copies in self.copies.items():
            last = max(self.graph.blocks[template].nodes)
            behind[last] = [node for copy in copies for node in copy.nodes]
        return [new for old in range(len(self.graph.nodes)) for new in (old, *behind.get(old, ()))]


def _numbered(name: str, shift: int) -> str:
    """A block without a name of its own has its position.

    >>> _numbered("glue#7", 4), _numbered("norm", 4)
    ('glue#11', 'norm')
    """
    return re.sub(r"(?<=#)\d+$", lambda match: str(int(match[0]) + shift), name)


def _chain(graph: Graph, run: range) -> dict[int, int]:
    """For each output of the copied block that the next one reads in place of one of its own inputs: that input.

    Blocks of a class read their operands in the same order.
    """
    first, second = graph.blocks[run[0]], graph.blocks[run[1]]
    made_before = {t: place for place, t in enumerate(first.outputs)}
    return {
        second.outputs[made_before[read]]: read
        for read in second.inputs
        if read in made_before and made_before[read] < len(second.outputs)
    }


class _Renamer:
    """Names of a layer `by` further on: the last number in the block's name is its place.

    >>> _Renamer("encoder.blocks.1", 4)("encoder.blocks.1.up.weight")
    'encoder.blocks.5.up.weight'
    """

    def __init__(self, block: str, by: int) -> None:
        match = re.search(r"^(.*?)(\d+)(\D*)$", block)
        self.prefix = self.later = block
        if match is not None:
            self.later = f"{match[1]}{int(match[2]) + by}{match[3]}"

    def __call__(self, name: str) -> str:
        if name == self.prefix or name.startswith(f"{self.prefix}."):
            return self.later + name[len(self.prefix) :]
        return name

    def holds(self, names: Sequence[str]) -> bool:
        """Whether all of these are of the block."""
        return all(name.startswith(f"{self.prefix}.") for name in names)


def _mapped(node: Node, new: dict[int, int], names: _Renamer) -> Node:
    def tensor(old: int) -> int:
        return new.get(old, old)

    return replace(
        node,
        args=tuple(_mapped_arg(arg, new) for arg in node.args),
        kwargs=tuple((key, _mapped_arg(arg, new)) for key, arg in node.kwargs),
        outputs=tuple(None if t is None else tensor(t) for t in node.outputs),
        mutates=tuple(map(tensor, node.mutates)),
        aliases=tuple(map(tensor, node.aliases)),
        path=tuple(map(names, node.path)),
    )


def _mapped_arg(arg: Arg, new: dict[int, int]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(new.get(arg.tensor, arg.tensor))
    return tuple(_mapped_arg(item, new) for item in arg) if isinstance(arg, tuple) else arg


def _mapped_block(block: Block, new: dict[int, int], nodes: tuple[int, ...], name: str) -> Block:
    def tensors(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new.get(t, t) for t in old)

    return replace(
        block,
        name=name,
        nodes=nodes,
        inputs=tensors(block.inputs),
        shared=tensors(block.shared),
        outputs=tensors(block.outputs),
        parameters=tensors(block.parameters),
        buffers=tensors(block.buffers),
    )
