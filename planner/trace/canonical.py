"""One order for what a model prepares in any order: `for kind in {"full", "sliding"}` differs in every process.

Python orders a set of strings anew in each process, so two ranks would trace two graphs, and a plan of one would not
fit the other. Nodes that are made of inputs, buffers and constants alone (masks, positions, rotary tables) and that
neither write nor draw are sorted by what they compute; all others stay where they are. What is computed twice is read
from where it is computed first: which of the two a reader has is chance as well.
"""

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from planner.graph import Arg, Node, Ref, reads
from planner.trace.convert import FlatGraph, storage_roots

_LEAVES = ("input", "buffer", "constant")


def in_canonical_order(flat: FlatGraph) -> FlatGraph:
    """The graph with the nodes that prepare, and the tensors that they make, in an order that is not up to chance.

    Nodes move only within a stretch in which no other node reads what the stretch has prepared.
    """
    free = _free(flat)
    key: dict[int, str] = {
        index: _digest(tensor.kind, tensor.name if tensor.kind != "constant" else "", tensor.shape, tensor.dtype,
                       tensor.value)
        for index, tensor in enumerate(flat.tensors)
    }  # fmt: skip
    nodes = list(flat.nodes)
    moved: dict[int, int] = {}  # tensor -> its new index
    first: dict[str, int] = {}  # what is computed -> the tensor that holds it first
    for places in _stretches(flat.nodes, free):
        order = _sorted([flat.nodes[i] for i in places], key)
        made = sorted(t for node in order for t in node.outputs if t is not None)
        moved |= zip((t for node in order for t in node.outputs if t is not None), made, strict=True)
        for tensor in (t for node in order for t in node.outputs if t is not None):
            first.setdefault(key[tensor], tensor)
        for place, node in zip(places, order, strict=True):
            nodes[place] = node
    read = {tensor: moved[first[key[tensor]]] for tensor in moved}
    tensors = list(flat.tensors)
    for old, new in moved.items():
        tensors[new] = flat.tensors[old]
    return replace(
        flat,
        tensors=tuple(tensors),
        nodes=tuple(_renamed(node, read, moved) for node in nodes),
        loss=read.get(flat.loss, flat.loss),
        outputs=tuple(None if t is None else read.get(t, t) for t in flat.outputs),
    )


def _free(flat: FlatGraph) -> set[int]:
    """Nodes that only prepare: pure, and made of what no node writes."""
    root = storage_roots(flat.nodes)
    written = {root.get(t, t) for node in flat.nodes for t in node.mutates}
    known = {i for i, t in enumerate(flat.tensors) if t.kind in _LEAVES and i not in written}
    free = set()
    for index, node in enumerate(flat.nodes):
        made = [t for t in node.outputs if t is not None]
        if node.is_random or node.mutates or any(root.get(t, t) in written for t in made):
            continue
        if all(t in known for t in reads(node)):
            free.add(index)
            known.update(made)
    return free


def _stretches(nodes: Sequence[Node], free: Iterable[int]) -> list[list[int]]:
    """Places of free nodes; a new stretch begins where another node reads what the last one made."""
    free = set(free)
    stretches: list[list[int]] = [[]]
    made: set[int] = set()
    for index, node in enumerate(nodes):
        if index in free:
            stretches[-1].append(index)
            made.update(t for t in node.outputs if t is not None)
        elif any(t in made for t in reads(node)):
            stretches.append([])
            made = set()
    return stretches


def _sorted(nodes: Sequence[Node], key: dict[int, str]) -> list[Node]:
    """The nodes, those first that others need, and else by what they compute; `key` [tensor] is filled in."""
    maker: dict[str, int] = {}  # of what is computed: the first node that does
    digests = []
    for position, node in enumerate(nodes):
        digests.append(_digest(node.op, _named(node.args, key), _named(node.kwargs, key)))
        for number, tensor in enumerate(node.outputs):
            if tensor is not None:
                key[tensor] = f"{digests[-1]}/{number}"
                maker.setdefault(key[tensor], position)
    needs = [{maker[key[t]] for t in reads(node) if key[t] in maker} for node in nodes]
    needed_by: list[list[int]] = [[] for _ in nodes]
    for position, before in enumerate(needs):
        for other in before:
            needed_by[other].append(position)
    missing = [len(before) for before in needs]
    ready = [(digests[p], p) for p, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, position = heapq.heappop(ready)
        order.append(nodes[position])
        for other in needed_by[position]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (digests[other], other))
    return order


def _named(arg: object, key: Mapping[int, str]) -> object:
    """An argument with what its tensors are in place of their numbers."""
    if isinstance(arg, Ref):
        return key[arg.tensor]
    return tuple(_named(item, key) for item in arg) if isinstance(arg, tuple) else arg


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _renamed(node: Node, read: Mapping[int, int], made: Mapping[int, int]) -> Node:
    """A node that reads and makes other numbers of tensors."""

    def of(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(read.get(arg.tensor, arg.tensor))
        return tuple(of(item) for item in arg) if isinstance(arg, tuple) else arg

    return replace(
        node,
        args=tuple(of(arg) for arg in node.args),
        kwargs=tuple((name, of(arg)) for name, arg in node.kwargs),
        outputs=tuple(None if t is None else made.get(t, t) for t in node.outputs),
        mutates=tuple(read.get(t, t) for t in node.mutates),
        aliases=tuple(read.get(t, t) for t in node.aliases),
    )
