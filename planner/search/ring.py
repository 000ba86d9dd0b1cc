"""What ring attention would give a context-parallel plan: priced, not run.

Ring attention (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023):
each of t ranks keeps its queries and its part of keys and values, and in t steps computes attention of the two while it
sends the keys and values on to its neighbour. No rank ever holds more than two parts of them. Under a causal mask ranks
do the same work in every step if each has a piece from the front and one from the back of the sequence, the zigzag
order (Brandon et al., "Striped attention", 2023, has the idea; Grattafiori et al., "The Llama 3 herd of models", 2024,
and torch's `_HeadTailLoadBalancer` the order).

Attention of the plan, with the collectives around it, is taken out of the graph of a rank and the ring put in its
place. What a block holds while it runs beside what it saves is taken to be that of the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.audit import Factors, corrected
from planner.cluster import Cluster, Slowdown
from planner.collectives import Group, axis_group, group_slowdown, overlapped_seconds, send_recv_seconds
from planner.costs import Costs, price
from planner.graph import DTYPE_BYTES, Affine, Block, BlockClass, Graph, Kernel, Node, Ref, Tensor, reads
from planner.operators import kernel_seconds
from planner.plan import AXES, Mesh, RingAttention
from planner.shard.chain import AxisSplit
from planner.shard.rules.special import BALANCED_CAUSAL_ATTENTION
from planner.simulate import simulate

Floats = NDArray[np.float64]

WHY_NOT = (
    "torch's ring attention (torch.distributed.tensor.experimental.context_parallel, a prototype) takes only attention "
    "of DTensors without a mask by CUDA's fused kernels, and by default gathers all keys and values; blocks of a plan "
    "run on plain tensors, and would need a ring of their own and all that follows the sequence in zigzag order"
)
NO_RING = "ring attention has no price here: no attention without a mask of the model's own communicates over cp"

_ATTENTION = "aten.scaled_dot_product_attention.default"
_MASKED = "planner.causal_attention.default"  # of all keys, half of them behind the mask
# These are given the keys and values of the whole sequence.
_OF_ALL_KEYS = (BALANCED_CAUSAL_ATTENTION, _MASKED, "planner.shared_heads_attention.default")
_GATHERS = ("planner.gather.default", "planner.gather_sum.default")
_EXCHANGE = "planner.exchange.default"
_ACCUMULATED_BYTES = 4  # partial results are put together in float32 at least


@dataclass(frozen=True, slots=True)
class Links:
    """What sends to the next rank of a ring of `group` while it computes; without `overlaps` one after the other."""

    group: Group
    slowdown: Slowdown
    overlaps: bool = True

    def seconds(self, compute_seconds: float, num_bytes: float) -> float:
        """Seconds of one step that computes and sends `num_bytes`."""
        sending = send_recv_seconds(num_bytes, self.group)
        if not self.overlaps:
            return compute_seconds + sending
        return overlapped_seconds(compute_seconds, sending, self.slowdown)


def ring_seconds(
    degree: int, forward_seconds: float, backward_seconds: float, key_value_bytes: float, links: Links
) -> tuple[float, float]:
    """Seconds of the forward and the backward of one attention in a ring of `degree` ranks.

    `forward_seconds` and `backward_seconds` are what a rank computes in all steps together, `key_value_bytes` one
    rank's part of keys and values. Forward they are sent in all steps but the last. Backward their gradients travel
    behind them, from the second step on, and once more to get home, which nothing hides:

        forward   (t - 1) max(F / t, send(KV)) + F / t
        backward  max(B / t, send(KV)) + (t - 2) max(B / t, send(2 KV)) + max(B / t, send(KV)) + send(KV)

    with `collectives.overlapped_seconds` for max.
    """
    if degree == 1:
        return forward_seconds, backward_seconds
    step, back = forward_seconds / degree, backward_seconds / degree
    first_and_last = 2 * links.seconds(back, key_value_bytes)
    between = (degree - 2) * links.seconds(back, 2 * key_value_bytes)
    forward = (degree - 1) * links.seconds(step, key_value_bytes) + step
    return forward, first_and_last + between + send_recv_seconds(key_value_bytes, links.group)


def with_ring_attention(
    costs: Costs,
    stages: Sequence[Sequence[tuple[int, int]]],
    graph: Graph,
    cluster: Cluster,
    splits: Sequence[AxisSplit],
    factors: Factors | None = None,
) -> RingAttention | None:
    """A plan of context parallelism, simulated with ring attention; None where no attention could be one.

    `graph` is that of a rank, `costs` its price, `stages` are as `simulate` takes them; `factors` correct the terms.
    """
    found = _ring_graph(graph, cluster, costs.mesh, costs.micro_batch)
    if found is None:
        return None
    other, exposed = found
    priced = price(
        other, cluster, mesh=costs.mesh, micro_batch=costs.micro_batch, num_microbatches=costs.num_microbatches,
        schedule=costs.schedule, precision=costs.precision, optimizer=costs.optimizer, splits=splits,
    )  # fmt: skip
    forward = exposed[:, :1]
    backward = exposed[:, 1:] + priced.strategy_recompute * forward  # recomputation sends keys and values again
    ringed = replace(
        priced,
        forward_seconds=priced.forward_seconds + forward,
        backward_seconds=priced.backward_seconds + backward,
        exposed_seconds=priced.exposed_seconds + forward + backward,
        exposed_forward_seconds=priced.exposed_forward_seconds + forward,
    )
    simulation = simulate(corrected(ringed, factors), stages, costs.schedule, costs.num_microbatches)
    return RingAttention(step_seconds=simulation.step_seconds, peak_bytes=tuple(simulation.peak_bytes), why_not=WHY_NOT)


def _ring_graph(graph: Graph, cluster: Cluster, mesh: Mesh, micro_batch: int) -> tuple[Graph, Floats] | None:
    """The graph with rings in place of attention, and [L, 2] seconds that sending adds, forward and backward."""
    group = axis_group(cluster, {name: getattr(mesh, name) for name in AXES}, "cp")
    links = Links(group, group_slowdown(cluster, group), overlaps=not cluster.device.synchronous_dispatch)
    first_of = {block.class_index: block for block in reversed(graph.blocks)}
    classes, exposed = list(graph.classes), np.zeros((len(graph.classes), 2))
    for index, block in first_of.items():
        rings = [ring for place in _attention(graph, block) if (ring := _ring_of(graph, block, place, mesh.cp))]
        if not rings:
            continue
        kind = graph.classes[index]
        replaced = frozenset(place for ring in rings for place in ring.places)
        kept = [kernel for kernel in kind.kernels if kernel.node not in replaced]
        for ring in rings:
            mine = ring.kernels(kind, mesh.cp, micro_batch)
            priced = kernel_seconds(cluster.device, mine, micro_batch)
            is_forward = np.array([kernel.phase == "forward" for kernel in mine], bool)
            compute = float(priced[is_forward].sum()), float(priced[~is_forward].sum())
            part = ring.part_bytes(mesh.cp, micro_batch)
            exposed[index] += np.array(ring_seconds(mesh.cp, *compute, part, links)) - compute
            kept += mine
        freed = sum(ring.freed_bytes(mesh.cp, micro_batch) for ring in rings)
        saved = max(0.0, kind.saved.at(micro_batch) - freed)
        collectives = tuple(made for made in kind.collectives if made.axis != "cp" or made.node not in replaced)
        classes[index] = replace(kind, kernels=tuple(kept), saved=Affine(saved), collectives=collectives, measured=())
    if not exposed.any() and classes == list(graph.classes):
        return None
    return replace(graph, classes=tuple(classes)), exposed[[block.class_index for block in graph.blocks]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """One attention of a rank's graph that could be a ring; `places` are nodes of its block that it replaces."""

    place: int
    places: frozenset[int]
    query: Tensor
    keys: tuple[Tensor, Tensor]  # keys and values, as the node is given them
    made: Tensor
    has_all_keys: bool
    work_share: float  # of the node's FLOP, what is left where no mask hides anything

    def part_bytes(self, degree: int, micro_batch: int) -> float:
        """One rank's part of keys and values."""
        held = sum(tensor.num_bytes.at(micro_batch) for tensor in self.keys)
        return held / degree if self.has_all_keys else held

    def freed_bytes(self, degree: int, micro_batch: int) -> float:
        """What is not kept for backward any more: the keys and values of others."""
        held = sum(tensor.num_bytes.at(micro_batch) for tensor in self.keys)
        return held - self.part_bytes(degree, micro_batch)

    def kernels(self, kind: BlockClass, degree: int, micro_batch: int) -> list[Kernel]:
        """Those of all steps, for one micro-batch: attention, and what puts partial results together.

        Forward that is what is made, backward the gradients of queries, keys and values: read and added to a sum.
        """
        moved = self.query.num_bytes.at(micro_batch) + self.made.num_bytes.at(micro_batch)
        moved += self.part_bytes(degree, micro_batch)
        result = []
        for phase, summed in (
            ("forward", [self.made]),
            ("backward", [self.query, *self.keys]),
        ):
            own = [k for k in kind.kernels if k.node == self.place and k.phase == phase and k.kind == "attention"]
            if not own:
                continue
            flop = self.work_share * sum(kernel.flop.at(micro_batch) for kernel in own) / degree
            num_bytes = moved if phase == "forward" else 2 * moved  # gradients beside values
            step = replace(own[0], flop=Affine(flop), num_bytes=Affine(num_bytes), operands=(), measured=())
            elements = sum(tensor.num_elements.at(micro_batch) for tensor in summed)
            if phase == "backward" and self.has_all_keys:
                elements -= sum(tensor.num_elements.at(micro_batch) for tensor in self.keys) * (1 - 1 / degree)
            width = max(_ACCUMULATED_BYTES, DTYPE_BYTES[self.made.dtype])
            put_together = replace(
                step, op="planner.put_together", kind="memory", flop=Affine(), num_bytes=Affine(3 * width * elements)
            )
            result += [step] * degree + [put_together] * (degree - 1)
        return result


def _attention(graph: Graph, block: Block) -> list[int]:
    """Places in a block of attention without a mask of the model's own."""
    found = []
    for place, index in enumerate(block.nodes):
        node = graph.nodes[index]
        has_mask = len([arg for arg in node.args[:4] if isinstance(arg, Ref)]) > 3 or "attn_mask" in {
            name for name, arg in node.kwargs if isinstance(arg, Ref)
        }
        is_attention = node.op == _ATTENTION or (node.op in _OF_ALL_KEYS and _is_over_cp(node))
        if is_attention and not has_mask:
            found.append(place)
    return found


def _ring_of(graph: Graph, block: Block, place: int, degree: int) -> _Ring | None:
    """The ring that an attention could be; None where it does not communicate: its sequence is not split."""
    nodes = [graph.nodes[index] for index in block.nodes]
    node = nodes[place]
    operands = [arg.tensor for arg in node.args[:3] if isinstance(arg, Ref)]
    made = next((t for t in node.outputs if t is not None), None)
    if len(operands) < 3 or made is None or degree == 1:
        return None
    query, key, value = (graph.tensors[t] for t in operands)
    length = key.shape[-2]  # of the whole sequence, in all forms
    is_causal = node.op in (BALANCED_CAUSAL_ATTENTION, _MASKED) or _is_causal(node)
    if is_causal and not (isinstance(length, int) and length % (2 * degree) == 0):
        return None
    in_front, of_keys = (_conversions(nodes, given) for given in (operands, operands[1:]))
    behind = _conversions_behind(nodes, place)
    gathered = any(nodes[p].op in _GATHERS for p in of_keys)
    if not in_front and not behind:
        return None
    return _Ring(
        place=place,
        places=frozenset({place, *in_front, *behind}),
        query=query,
        keys=(key, value),
        made=graph.tensors[made],
        has_all_keys=node.op in _OF_ALL_KEYS or gathered,
        work_share=0.5 if node.op == _MASKED else 1.0,
    )


def _is_causal(node: Node) -> bool:
    return (*node.args[5:6], *(value for name, value in node.kwargs if name == "is_causal")) == (True,)


def _is_over_cp(node: Node) -> bool:
    """Whether a node communicates over the axis that splits samples."""
    return dict(node.kwargs).get("axis") == "cp"


def _conversions(nodes: Sequence[Node], tensors: Iterable[int]) -> frozenset[int]:
    """The nearest gathers and exchanges that tensors are made of."""
    makers: Mapping[int, int] = {t: p for p, node in enumerate(nodes) for t in node.outputs if t is not None}
    found, queue, seen = set(), list(tensors), set[int]()
    while queue:
        place = makers.get(queue.pop())
        if place is None or place in seen:
            continue
        seen.add(place)
        if nodes[place].op in (*_GATHERS, _EXCHANGE) and _is_over_cp(nodes[place]):
            found.add(place)
        else:
            queue += reads(nodes[place])
    return frozenset(found)


def _conversions_behind(nodes: Sequence[Node], place: int) -> frozenset[int]:
    """Where the heads that attention made are exchanged for tokens again, before any product is made of them."""
    carried = {t for t in nodes[place].outputs if t is not None}
    found = set()
    for at, node in enumerate(nodes[place + 1 :], place + 1):
        if not carried.intersection(reads(node)):
            continue
        if node.op == _EXCHANGE and _is_over_cp(node):
            found.add(at)
        elif node.aliases or node.op.split(".")[1] in _MOVES:
            carried |= {t for t in node.outputs if t is not None}
    return frozenset(found)


_MOVES = ("reshape", "transpose", "permute", "view", "contiguous", "clone", "flatten", "_unsafe_view")
