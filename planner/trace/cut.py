"""Cut a flat graph into blocks without knowing the model, and group equal blocks into classes.

Blocks come from the module calls of the trace plus a test of the live width: children of a
repeated module list are blocks; nested stages are entered, attention and MLP halves are not. A
model without such structure is cut where the live tensors are narrow. Layer names are never read.
Nodes that no parameter reaches (masks, positions, rotary tables) belong to no block: they are the
prelude, which every stage recomputes.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import networkx as nx

from planner.errors import TraceError
from planner.graph import Batch, Fallback, Graph, Node, Ref, Tensor, reads
from planner.trace.convert import FlatGraph
from planner.trace.refusal import NoGraphError

_INDEX = re.compile(r"\d*(@\d+)?$")  # of a list item or numbered attribute, and of a repeated call

# Shares of the model's weight (bytes of outputs and parameters): tested on 38 architectures.
SMALLEST_BLOCK = 5e-4
SMALLEST_LIST = 0.1  # unequal siblings (conv1, conv2) or leaves lighter than this are no list of blocks
ENTER_ABOVE = 0.5  # a module is entered when what is inside makes up this much of it
WIDTH_MARGIN = 1.1  # and its inner boundaries are about as narrow as its ends
COVERED_AT_LEAST = 0.3  # else the module calls give no useful blocks


@dataclass(frozen=True)
class Segment:
    """Nodes `main[start:end]`: a block, or the glue between blocks."""

    start: int
    end: int
    kind: str
    path: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """`main` and `free` are live nodes in order; segments cover `main` once."""

    main: tuple[int, ...]
    free: tuple[int, ...]
    segments: tuple[Segment, ...]


def split(flat: FlatGraph) -> tuple[list[int], list[int]]:
    """Live nodes as (main, free): free ones are deterministic and no parameter reaches them.

    A node that writes in place is live, and so is all it reads. What shares storage with a tensor
    that a main node writes is main as well.

    Raises:
        TraceError: the loss does not depend on a parameter.
        NoGraphError: forward writes into its batch, a parameter or a constant.
    """
    nodes = flat.nodes
    maker = {t: i for i, n in enumerate(nodes) for t in n.outputs if t is not None}
    live: set[int] = set()
    wanted = {flat.loss, *(t for t in flat.outputs if t is not None)}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if node.mutates or any(t in wanted for t in node.outputs):
            live.add(index)
            wanted.update(reads(node))

    storage = storages(nodes)
    _check_writes(flat, storage)
    written = {t for i in live for t in nodes[i].mutates if flat.tensors[t].kind in ("buffer", "parameter")}
    tainted: set[int] = {i for i, t in enumerate(flat.tensors) if t.kind == "parameter"} | written
    main: set[int] = set()
    while True:
        before = len(main)
        tainted_storages = {storage[t] for t in tainted if t in storage}
        for index in sorted(live - main):
            node = nodes[index]
            touched = [*reads(node), *(t for t in node.outputs if t is not None)]
            if node.is_random or any(t in tainted or storage.get(t) in tainted_storages for t in touched):
                main.add(index)
                tainted.update(t for t in node.outputs if t is not None)
                tainted.update(node.mutates)
        if len(main) == before:
            break
    if maker.get(flat.loss) not in main:
        raise TraceError(f"{flat.source}: the loss does not depend on any parameter; return a loss of the model")
    return sorted(main), sorted(live - main)


def _check_writes(flat: FlatGraph, storage: Mapping[int, int]) -> None:
    """Refuse writes that outlive a block: only buffers and activations may change in forward."""
    kept = {
        storage[i]: tensor
        for i, tensor in enumerate(flat.tensors)
        if tensor.kind in ("input", "parameter", "constant") and i in storage
    }
    for node in flat.nodes:
        for written in node.mutates:
            if (tensor := kept.get(storage[written])) is not None:
                reason = f"forward writes into the {tensor.kind} {tensor.name} in place"
                cure = "write into a clone of it, or register it as a buffer"
                raise NoGraphError([Fallback(source=node.source, reason=reason, cure=cure)])


def storages(nodes: Sequence[Node]) -> dict[int, int]:
    """Tensor -> representative of all tensors that may share its storage, where one is written."""
    union: nx.utils.UnionFind = nx.utils.UnionFind()
    for node in nodes:
        made = [t for t in node.outputs if t is not None]
        for operand in node.aliases:
            union.union(operand, *made)
    written = {union[t] for n in nodes for t in n.mutates}
    shared = {t for n in nodes for t in (*n.aliases, *n.mutates, *n.outputs) if t is not None}
    return {t: union[t] for t in sorted(shared) if union[t] in written}


def cut(flat: FlatGraph) -> Cut:
    """Segments of the model, blocks and glue in order."""
    main, free = split(flat)
    cutter = _Cutter(flat, main)
    blocks = cutter.by_modules()
    if sum(cutter.weight(a, b) for a, b, _ in blocks) < COVERED_AT_LEAST * cutter.weight(0, len(main)):
        blocks = cutter.by_width()
    return Cut(tuple(main), tuple(free), tuple(cutter.segments(blocks)))


def cut_like(flat: FlatGraph, planned: Graph) -> Cut:
    """The segments of another graph of the same model (another sequence length, evaluation): those of `planned`.

    Nodes are matched in order by operator and module call, so that every block has its own again, whatever its weight.

    Raises:
        NoGraphError: a boundary would part a tensor from a node that writes it in place.
    """
    main, free = split(flat)
    cutter = _Cutter(flat, main)
    ours = [(planned.nodes[i].op, planned.nodes[i].path) for block in planned.blocks for i in block.nodes]
    theirs = [(node.op, node.path) for node in cutter.nodes]
    place: dict[int, int] = {}  # of our nodes among theirs
    if ours == theirs:
        place = {i: i for i in range(len(ours))}
    else:
        for start, other, length in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
            place |= {start + i: other + i for i in range(length)}
    segments: list[Segment] = []
    end = count = 0
    for position, block in enumerate(planned.blocks):
        count += len(block.nodes)
        before = max((place[i] + 1 for i in range(count) if i in place), default=0)
        after = min((place[i] for i in range(count, len(ours)) if i in place), default=len(main))
        if position == len(planned.blocks) - 1:
            before = after = len(main)
        wanted = after if count in place else before
        open_ones = [b for b in range(before, after + 1) if b not in cutter.closed]
        if not open_ones:
            node = cutter.nodes[min(before, len(main) - 1)]
            reason = f"the model writes in place across the end of block {block.name}, for this batch only"
            raise NoGraphError([Fallback(source=node.source, reason=reason, cure="give batches of the planned shapes")])
        stop = min(open_ones, key=lambda b: abs(b - wanted))
        segments.append(Segment(end, stop, block.kind, (block.name,)))
        end = stop
    return Cut(tuple(main), tuple(free), tuple(segments))


class _Cutter:
    """The main nodes with prefix sums of weight and the live width at each boundary."""

    def __init__(self, flat: FlatGraph, main: list[int]) -> None:
        self.flat = flat
        self.main = main
        self.nodes = [flat.nodes[i] for i in main]
        self.prefix = [0.0]
        for node in self.nodes:
            self.prefix.append(self.prefix[-1] + self._node_weight(node))
        self.width = self._widths()
        self.signatures: dict[tuple[int, int], str] = {}
        self.calls, self.children = self._calls()
        self.with_children = {(start, end) for call, (start, end, _) in self.calls.items() if self.children.get(call)}
        self.closed = self._closed_boundaries()

    def weight(self, start: int, end: int) -> float:
        """Bytes of outputs and of parameters of a range, the measure of what is worth cutting."""
        return self.prefix[end] - self.prefix[start]

    def _node_weight(self, node: Node) -> float:
        tensors = self.flat.tensors
        made = sum(tensors[t].num_bytes.at(1) for t in node.outputs if t is not None)
        owned = {t for t in reads(node) if tensors[t].kind == "parameter"}
        return made + sum(tensors[t].num_bytes.at(1) for t in owned)

    def _widths(self) -> list[float]:
        """Bytes alive between main[c-1] and main[c], per boundary c."""
        made = {t: p for p, n in enumerate(self.nodes) for t in n.outputs if t is not None}
        last: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            for tensor in reads(node):
                if tensor in made:
                    last[tensor] = position
        last[self.flat.loss] = len(self.nodes)
        change = [0.0] * (len(self.nodes) + 2)
        for tensor, end in last.items():
            size = self.flat.tensors[tensor].num_bytes.at(1)
            change[made[tensor] + 1] += size
            change[end + 1] -= size
        width, alive = [], 0.0
        for boundary in range(len(self.nodes) + 1):
            alive += change[boundary]
            width.append(alive)
        return width

    def _closed_boundaries(self) -> set[int]:
        """Boundaries that would part a tensor from a node that writes it in place.

        A node that writes stays in one block with every node that touches the same storage up to
        the last writer; a reader after that sees the final value wherever it is.
        """
        shared = storages(self.flat.nodes)
        first: dict[int, int] = {}
        last_write: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            for tensor in (*reads(node), *node.outputs):
                if tensor in shared and self.flat.tensors[tensor].kind == "activation":
                    first.setdefault(shared[tensor], position)
            for tensor in node.mutates:
                if tensor in shared and self.flat.tensors[tensor].kind == "activation":
                    last_write[shared[tensor]] = position
        return {boundary for group, end in last_write.items() for boundary in range(first[group] + 1, end + 1)}

    def _calls(
        self,
    ) -> tuple[dict[tuple[str, ...], list[int]], dict[tuple[str, ...], list[tuple[str, ...]]]]:
        """Module call -> [first, end, count] over main; call -> direct child calls in order."""
        calls: dict[tuple[str, ...], list[int]] = {}
        children: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            for depth in range(1, len(node.path) + 1):
                call = node.path[:depth]
                if call in calls:
                    calls[call][1] = position + 1
                    calls[call][2] += 1
                else:
                    calls[call] = [position, position + 1, 1]
                    children[call[:-1]].append(call)
        return calls, children

    def signature(self, start: int, end: int) -> str:
        """Hash of a range up to names of tensors and float constants."""
        if (start, end) not in self.signatures:
            self.signatures[start, end] = signature(self.flat.tensors, self.nodes[start:end], ())
        return self.signatures[start, end]

    def _is_leaf(self, start: int, end: int) -> bool:
        """Whether a range is one module without children."""
        return (start, end) not in self.with_children

    def by_modules(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """Disjoint ranges of main that are blocks by the module structure."""
        whole = self.weight(0, len(self.nodes))
        found = [b for b in self._refine(()) if self.weight(b[0], b[1]) > SMALLEST_BLOCK * whole]
        result: list[tuple[int, int, tuple[str, ...]]] = []
        for block in found:
            if not result or block[0] >= result[-1][1]:
                result.append(block)
        return result

    def _refine(self, call: tuple[str, ...]) -> list[tuple[int, int, tuple[str, ...]]]:
        """Blocks inside one module call."""
        whole = self.weight(0, len(self.nodes))
        groups: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for child in self.children.get(call, ()):
            groups[_INDEX.sub("", child[-1])].append(child)
        result: list[tuple[int, int, tuple[str, ...]]] = []
        for siblings in groups.values():
            spans = [(self.calls[s][0], self.calls[s][1]) for s in siblings]
            if len(siblings) == 1:
                inner = self._refine(siblings[0])
                heavy = sum(self.weight(a, b) for a, b, _ in inner) > ENTER_ABOVE * whole
                if len(inner) > 1 and (heavy or not all(self._is_leaf(a, b) for a, b, _ in inner)):
                    result += inner
                continue
            alike = len({self.signature(*span) for span in spans}) < len(spans)
            no_list = not alike or all(self._is_leaf(*s) for s in spans)  # one dropout called twice is none
            if no_list and sum(self.weight(*s) for s in spans) < SMALLEST_LIST * whole:
                continue
            contiguous = all(self.calls[s][1] - self.calls[s][0] == self.calls[s][2] for s in siblings)
            for sibling, (start, end) in zip(siblings, spans, strict=True):
                inner = self._refine(sibling)
                if self._enter(start, end, inner, alike):
                    result += inner
                elif contiguous:
                    result.append((start, end, sibling))
        return sorted(result)

    def _enter(self, start: int, end: int, inner: list[tuple[int, int, tuple[str, ...]]], alike: bool) -> bool:
        """Whether the blocks inside a list item replace the item (nested stages do)."""
        if len(inner) < 2 or all(self._is_leaf(a, b) for a, b, _ in inner):
            return False
        inner_alike = len({self.signature(a, b) for a, b, _ in inner}) < len(inner)
        if alike and not inner_alike:
            return False
        if sum(self.weight(a, b) for a, b, _ in inner) <= ENTER_ABOVE * self.weight(start, end):
            return False
        inside = [self.width[a] for a, _, _ in inner[1:]] + [self.width[b] for _, b, _ in inner[:-1]]
        return max(inside) <= WIDTH_MARGIN * max(self.width[start], self.width[end])

    def by_width(self, most: int = 48) -> list[tuple[int, int, tuple[str, ...]]]:
        """Cut at local minima of the live width that are about as narrow as any nearby."""
        count, width = len(self.nodes), self.width
        radius = max(8, count // 8)
        narrow = [
            c
            for c in range(1, count)
            if width[c] > 0
            and width[c] <= min(width[c - 1], width[c + 1])
            and width[c] <= 1.01 * min(width[max(1, c - radius) : min(count, c + radius)])
            and c not in self.closed
        ]
        cuts = [0]
        for position, boundary in enumerate(narrow):
            of_a_run = narrow[position + 1 : position + 2] == [boundary + 1]
            heavy = self.weight(cuts[-1], boundary) >= self.weight(0, count) / most / 4
            if heavy and not of_a_run:
                cuts.append(boundary)
        return [(a, b, ()) for a, b in zip(cuts, [*cuts[1:], count], strict=True)]

    def segments(self, blocks: list[tuple[int, int, tuple[str, ...]]]) -> list[Segment]:
        """Blocks and the glue between them; no boundary is closed."""
        result: list[Segment] = []
        end = 0
        for start, stop, path in blocks:
            if start > end:
                result.append(Segment(end, start, "glue", ()))
            result.append(Segment(start, stop, "block", path))
            end = stop
        if end < len(self.nodes):
            result.append(Segment(end, len(self.nodes), "glue", ()))
        merged: list[Segment] = []
        for segment in result:
            if merged and segment.start in self.closed:
                before = merged.pop()
                keep = max((before, segment), key=lambda s: self.weight(s.start, s.end))
                merged.append(Segment(before.start, segment.end, keep.kind, keep.path))
            else:
                merged.append(segment)
        return merged


def signature(
    tensors: Sequence[Tensor],
    nodes: Sequence[Node],
    outputs: Sequence[int],
    marked: Collection[int] = (),
) -> str:
    """Hash of a run of nodes with tensors renumbered by first use and float constants masked.

    Equal hashes cost the same: operators, shapes, dtypes, which tensors are parameters, need
    gradients or are `marked`, and which leave the block. Of a float only whether it is 0 or 1
    counts (a dropout rate of 0 keeps no mask).
    """
    numbers: dict[int, int] = {}

    def plain(arg: object) -> object:
        if isinstance(arg, Ref):
            if arg.tensor not in numbers:
                numbers[arg.tensor] = len(numbers)
                tensor = tensors[arg.tensor]
                return (
                    numbers[arg.tensor], tensor.kind, _shape(tensor), tensor.dtype,
                    tensor.requires_grad, arg.tensor in marked,
                )  # fmt: skip
            return numbers[arg.tensor]
        if isinstance(arg, tuple):
            return tuple(plain(item) for item in arg)
        return "float" if isinstance(arg, float) and arg not in (0.0, 1.0) else arg

    rows = []
    for node in nodes:
        row = (node.op, plain(node.args), plain(node.kwargs))
        made = [t for t in node.outputs if t is not None]
        for tensor in made:
            numbers[tensor] = len(numbers)
        rows.append((row, [(_shape(tensors[t]), tensors[t].dtype, tensors[t].order) for t in made]))
    leaving = sorted(numbers[t] for t in outputs)
    return hashlib.sha256(repr((rows, leaving)).encode()).hexdigest()


def _shape(tensor: Tensor) -> tuple[str, ...]:
    return tuple(f"{s.per_sample}b" if isinstance(s, Batch) else str(s) for s in tensor.shape)
