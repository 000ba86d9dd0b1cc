"""What the operators of `planner.*` that rules put in an ATen operator's place communicate inside."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from planner.graph import DTYPE_BYTES, Affine, Arg, Batch, Ref, Tensor
from planner.shard.placement import Collective

MASKED, DISPATCHED = "planner.masked_experts_mm.default", "planner.dispatched_experts_mm.default"
ROWS_OF_EXPERTS = "planner.rows_of_experts.default"
OF_EXPERTS = (MASKED, DISPATCHED, ROWS_OF_EXPERTS)  # a rank's work depends on how many rows its experts get
BALANCED_CAUSAL_ATTENTION = "planner.balanced_causal_attention.default"
_COMMUNICATE = ("cross_entropy", "cross_entropy_of_part", "softmax", "log_softmax")
Inner = tuple[Literal["forward", "backward"], Collective, Affine]  # bytes as `planner.collectives` counts them


def inner_collectives(op: str, args: Sequence[Arg], tensors: Sequence[Tensor], degree: int) -> tuple[Inner, ...]:
    """The collectives inside of an operator; none for those of ATen.

    A loss over split classes gathers four numbers of each rank for each target, one over split targets sums their
    number; a softmax along a split dim gathers two numbers for each row, and its gradient sums one. Halves are
    accumulated as float32. Causal attention sends a rank's queries to where there is less to do, and what is made of
    them back. `tensors` are those of the whole graph.

    >>> logits = Tensor(name="", shape=(Batch(6), 8), dtype="bfloat16", kind="activation")
    >>> inner_collectives("planner.cross_entropy.default", (Ref(0),), [logits], 2)
    (('forward', 'all_gather', Affine(fixed=0.0, per_sample=192.0)),)
    """
    if op == DISPATCHED:
        return tuple(_dispatched(args, tensors, degree))
    if op == ROWS_OF_EXPERTS and args[2] and isinstance(args[0], Ref):
        experts = tensors[args[0].tensor].shape[0]
        return (("forward", "all_to_all", Affine(8.0 * experts if isinstance(experts, int) else 0.0)),)
    if op == BALANCED_CAUSAL_ATTENTION:
        return tuple(_balanced_attention(args, tensors, degree))
    name = op.split(".")[1] if op.startswith("planner.") else ""
    if name not in _COMMUNICATE or not args or not isinstance(args[0], Ref):
        return ()
    x = tensors[args[0].tensor]
    rank = len(x.shape)
    if name == "cross_entropy_of_part":
        has_weights = len(args) > 2 and isinstance(args[2], Ref)
        return (("forward", "all_reduce", Affine(_width(x) if has_weights else DTYPE_BYTES["int64"])),)
    if name == "cross_entropy":
        dim = 1 if rank > 1 else 0
        return (("forward", "all_gather", _rows_bytes(x, dim, 4 * degree)),)
    dim = args[1] % rank if len(args) > 1 and isinstance(args[1], int) else 0
    return (
        ("forward", "all_gather", _rows_bytes(x, dim, 2 * degree)),
        ("backward", "all_reduce", _rows_bytes(x, dim, 1)),
    )


def _dispatched(args: Sequence[Arg], tensors: Sequence[Tensor], degree: int) -> Iterator[Inner]:
    """Numbers of rows, then the rows to their experts and back, as many as if experts were balanced."""
    rows, matrices = (tensors[arg.tensor] for arg in args[:2] if isinstance(arg, Ref))
    experts, width, made = (size for size in matrices.shape if isinstance(size, int))
    yield "forward", "all_to_all", Affine(8.0 * experts)
    enters, leaves = args[3:5]
    num_rows = replace(rows, shape=rows.shape[:1]).num_elements
    for moves, features in ((enters, width), (leaves, made)):
        one = features * DTYPE_BYTES[rows.dtype] / degree
        num_bytes = Affine(num_rows.fixed * one, num_rows.per_sample * one)
        if moves:
            yield "forward", "all_to_all", num_bytes
            yield "backward", "all_to_all", num_bytes


def _balanced_attention(args: Sequence[Arg], tensors: Sequence[Tensor], degree: int) -> Iterator[Inner]:
    """A rank's queries and what is made for them, as wide as values are; backward the same the other way round."""
    query, _, value = (tensors[arg.tensor] for arg in args if isinstance(arg, Ref))
    of_made = replace(query, shape=(*query.shape[:-1], value.shape[-1])).num_bytes
    sent, returned = (Affine(b.fixed / degree, b.per_sample / degree) for b in (query.num_bytes, of_made))
    yield "forward", "all_to_all", sent
    yield "forward", "all_to_all", returned
    yield "backward", "all_to_all", returned
    yield "backward", "all_to_all", sent


def _rows_bytes(x: Tensor, dim: int, numbers: int) -> Affine:
    """Bytes of so many numbers for each row along a dim."""
    size = x.shape[dim]
    length = size.per_sample if isinstance(size, Batch) else size
    each = numbers * _width(x)
    elements = x.num_elements
    if isinstance(size, Batch):
        return Affine(each * elements.per_sample / max(length, 1))
    return Affine(each * elements.fixed / max(length, 1), each * elements.per_sample / max(length, 1))


def _width(x: Tensor) -> int:
    """Bytes of a number that is accumulated."""
    return max(DTYPE_BYTES["float32"], DTYPE_BYTES[x.dtype])
