"""Tensors of which the ranks of tensor and expert parallelism hold parts: cut, located in the whole, gathered.

A parameter is a DTensor on the mesh axis `tp`, `Shard` for a placement S and else `Replicate`, before FSDP shards what
a rank holds over the data axes. One whose experts are spread is one on `ep` as well, before `tp`, and FSDP shards it
over the other data ranks; to all other parameters the ranks of `ep` are data ranks. Where a placement has several
parts or repeats, what is stored is permuted along the dim (see `planner.shard.pieces`): undone here wherever a whole
value comes in or leaves. Buffers are plain tensors, this rank's part.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from planner.runtime.weight_files import Where
from planner.shard.pieces import check_splits, original
from planner.shard.placement import Placement, R
from planner.trace.parallel import piece_of, put_together

AXIS = "tp"  # of a mesh; always the innermost
EXPERTS = "ep"
_FIRST = (EXPERTS, AXIS)  # axes that split a parameter before FSDP does, in this order


@dataclass(frozen=True, eq=False, slots=True)
class TensorParallel:
    """The ranks that hold parts of parameters and buffers of the model, and how, by name.

    `mesh` is the axis `tp` (None without), `placements` are those on it; what has none is whole on every rank. `spread`
    has the placements on `ep` of parameters that are split there, `experts` is the mesh of these: `ep`, and `tp` where
    there is one.
    """

    mesh: DeviceMesh | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    experts: DeviceMesh | None = None
    spread: Mapping[str, Placement] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks of `tp`."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """This one, of `tp`."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    def of(self, name: str) -> Placement:
        """The placement of a parameter or buffer on `tp`."""
        return self.placements.get(name, R)

    def spread_of(self, name: str) -> Placement:
        """The placement of a parameter on `ep`."""
        return self._spread(name)[0]

    def _spread(self, name: str) -> tuple[Placement, int, int]:
        """The placement of a parameter on `ep`, this rank there, and how many there are."""
        if self.experts is None:
            return R, 0, 1
        return self.spread.get(name, R), self.experts.get_local_rank(EXPERTS), self.experts.size(0)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a placement that does not fit.

        Raises:
            PlanError: as `check_splits`.
        """
        placement, _, ranks = self._spread(name)
        check_splits(name, shape, placement, ranks)
        if placement.is_split:
            shape = (shape[0] // ranks, *shape[1:])
        check_splits(name, shape, self.of(name), self.size)

    def cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, a copy; the value itself where it is not split."""
        return piece(piece(value, *self._spread(name)), self.of(name), self.rank, self.size)

    def distributed(self, name: str, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """This rank's part (contiguous, on the device or on meta) as a DTensor of `shape`; no communication.

        What is whole on all ranks of `ep` stays as it is without `tp`: FSDP takes it for the rank's own.
        """
        spread, placement = self._spread(name)[0], self.of(name)
        mesh = self.experts if spread.is_split else self.mesh
        if mesh is None:
            return part
        kinds = [spread, placement][: mesh.ndim] if spread.is_split else [placement]
        placements = [Shard(kind.dim) if kind.is_split else Replicate() for kind in kinds]
        stride = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    def gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a plain tensor of which each rank holds its part; a collective of the axis."""
        placement = self.of(name)
        return part if self.mesh is None or not placement.is_split else _joined(part, placement, self.mesh.get_group())


def piece(value: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of a whole value, a copy; the value itself where it is not split."""
    if not placement.is_split:
        return value
    if placement.order:
        value = value.index_select(placement.dim, torch.tensor(placement.order, device=value.device))
    return piece_of(value, *_sizes(placement), rank, size).clone(memory_format=torch.contiguous_format)


def parts_of(tensor: torch.Tensor, placement: Placement = R, spread: Placement = R) -> tuple[tuple[Where, Where], ...]:
    """What this rank holds of a parameter: (where it is in the rank's own part, where in the whole), `()` for all.

    `placement` is that on the axis of tensor parallelism, `spread` that on `ep`, of which the data axes shard each
    rank's part. Chunks of the data axes are those of `torch.chunk`.
    """
    if not isinstance(tensor, DTensor):
        return (((), ()),)
    shape = tensor.shape
    bounds = [(0, size) for size in shape]
    for axis, dim in _sharded_axes(tensor):
        start, stop = bounds[dim]
        ranks, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        chunk = -(-(stop - start) // ranks)
        bounds[dim] = (min(start + rank * chunk, stop), min(start + (rank + 1) * chunk, stop))
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return (((), ()),)
    where = tuple(slice(*bound) for bound in bounds)
    if spread.order:
        parts = _parts_along(where, bounds, placement, tensor) if placement.is_split else (((), where),)
        names = tensor.device_mesh.mesh_dim_names or ()
        ranks = tensor.device_mesh.size(names.index(EXPERTS))
        return tuple(_of_experts(parts, original(spread, ranks, *bounds[0]), len(shape)))
    if not placement.is_split:
        return (((), where),)
    return _parts_along(where, bounds, placement, tensor)


def _of_experts(
    parts: Iterable[tuple[Where, Where]], spans: Iterable[tuple[int, int]], ndim: int
) -> Iterator[tuple[Where, Where]]:
    """Parts of all of a rank's experts as parts of each run of them."""
    position = 0
    for start, stop in spans:
        for here, there in parts:
            mine = here or (slice(None),) * ndim
            yield (slice(position, position + stop - start), *mine[1:]), (slice(start, stop), *there[1:])
        position += stop - start


def _parts_along(
    where: Where, bounds: Sequence[tuple[int, int]], placement: Placement, tensor: DTensor
) -> tuple[tuple[Where, Where], ...]:
    """What a rank holds between `bounds` of what tensor parallelism splits."""
    shape = tensor.shape
    degree = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    found: list[tuple[Where, Where]] = []
    position, dim = 0, placement.dim
    for start, stop in original(placement, degree, *bounds[dim]):
        here = _along(dim, len(shape), (position, position + stop - start))
        found.append((here, (*where[:dim], slice(start, stop), *where[dim + 1 :])))
        position += stop - start
    return tuple(found)


def whole(tensor: torch.Tensor, placement: Placement = R, spread: Placement = R) -> torch.Tensor:
    """The full tensor in the model's own order; a collective of the ranks that hold parts of it.

    `placement` is that on the axis of tensor parallelism, `spread` that on `ep`.
    """
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or ()
        if not {*_FIRST} & {*names}:
            return tensor.full_tensor()
        assert not any(kind.is_partial() for kind in tensor.placements), "gradients are summed before they are read"
        # Torch's own way warns of every tensor that both axes shard along one dim, and knows no permutation.
        value = tensor.to_local()
        axes = _sharded_axes(tensor)
        for position, (axis, dim) in reversed([*enumerate(axes)]):
            group = mesh.get_group(axis)
            if names[axis] == AXIS:
                value = _joined(value, placement, group)
            else:
                before = prod(mesh.size(other) for other, its in axes[:position] if its == dim)
                joined = _chunks_joined(value.movedim(dim, 0), tensor.shape[dim] // before, group)
                value = joined.movedim(0, dim)
        if spread.order:
            value = value[torch.tensor(spread.order, device=value.device).argsort()]
        return value


def _sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """(axis of the mesh, dim of the tensor) of each split, in the order in which they were made: `ep`, `tp`, FSDP's."""
    names = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    first = [names.index(name) for name in _FIRST if name in names]
    axes = [*first, *(axis for axis in range(len(names)) if axis not in first)]
    # `_StridedShard`, of a dim that two axes split, is no `Shard`.
    dims = [(axis, getattr(tensor.placements[axis], "dim", None)) for axis in axes]
    return [(axis, dim) for axis, dim in dims if dim is not None]


def _along(dim: int, ndim: int, span: tuple[int, int]) -> Where:
    return tuple(slice(*span) if d == dim else slice(None) for d in range(ndim))


def _chunks_joined(part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The first dim of `size` from its chunks, those of `torch.chunk`: later ranks may have less, or nothing."""
    chunk = -(-size // group.size())
    if part.shape[0] < chunk:
        part = torch.cat([part, part.new_zeros((chunk - part.shape[0], *part.shape[1:]))])
    return _gathered(part, group).flatten(0, 1)[:size]


def _joined(part: torch.Tensor, placement: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """A whole dim from the pieces of all ranks."""
    return put_together(_gathered(part, group), *_sizes(placement))


def _sizes(placement: Placement) -> tuple[int, list[int], int]:
    """Dim, parts and repeats, which have no batch."""
    return placement.dim, cast("list[int]", list(placement.parts)), cast("int", placement.repeats)


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks hold, `[ranks, *part.shape]`."""
    result = part.new_empty((group.size(), *part.shape))
    dist.all_gather(list(result.unbind(0)), part.contiguous(), group=group)
    return result
