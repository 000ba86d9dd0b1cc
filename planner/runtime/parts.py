"""Tensors of which the ranks of tensor parallelism hold parts: cut, located in the whole, gathered.

A parameter is a DTensor on the mesh axis `tp`, `Shard` for a placement S and else `Replicate`, before FSDP shards what
a rank holds over the data axes. Where a placement has several parts or repeats, what is stored is permuted along the
dim (see `planner.shard.pieces`): undone here wherever a whole value comes in or leaves. Buffers are plain tensors, this
rank's part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False, slots=True)
class TensorParallel:
    """The ranks of tensor parallelism, and how they hold each parameter and buffer of the model, by name.

    What has no placement is whole on every rank.
    """

    mesh: DeviceMesh
    placements: Mapping[str, Placement]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This one."""
        return self.mesh.get_local_rank()

    def of(self, name: str) -> Placement:
        """The placement of a parameter or buffer."""
        return self.placements.get(name, R)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a placement that does not fit.

        Raises:
            PlanError: as `check_splits`.
        """
        check_splits(name, shape, self.of(name), self.size)

    def cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, a copy; the value itself where it is not split."""
        return piece(value, self.of(name), self.rank, self.size)

    def distributed(self, name: str, part: torch.Tensor, shape: torch.Size) -> DTensor:
        """This rank's part (contiguous, on the device or on meta) as a DTensor of `shape`; no communication."""
        placement = self.of(name)
        placements = [Shard(placement.dim) if placement.is_split else Replicate()]
        stride = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a plain tensor of which each rank holds its part; a collective of the axis."""
        placement = self.of(name)
        return _joined(part, placement, self.mesh.get_group()) if placement.is_split else part


def piece(value: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of a whole value, a copy; the value itself where it is not split."""
    if not placement.is_split:
        return value
    return piece_of(value, *_sizes(placement), rank, size).clone(memory_format=torch.contiguous_format)


def parts_of(tensor: torch.Tensor, placement: Placement = R) -> tuple[tuple[Where, Where], ...]:
    """What this rank holds of a parameter: (where it is in the rank's own part, where in the whole), `()` for all.

    `placement` is that on the axis of tensor parallelism, of which the data axes shard each rank's part. Chunks of the
    data axes are those of `torch.chunk`.
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
    if not placement.is_split:
        return (((), where),)
    degree = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    found: list[tuple[Where, Where]] = []
    position, dim = 0, placement.dim
    for start, stop in original(placement, degree, *bounds[dim]):
        here = _along(dim, len(shape), (position, position + stop - start))
        found.append((here, (*where[:dim], slice(start, stop), *where[dim + 1 :])))
        position += stop - start
    return tuple(found)


def whole(tensor: torch.Tensor, placement: Placement = R) -> torch.Tensor:
    """The full tensor in the model's own order; a collective of the ranks that hold parts of it.

    `placement` is that on the axis of tensor parallelism.
    """
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        mesh = tensor.device_mesh
        if mesh.mesh_dim_names is None or AXIS not in mesh.mesh_dim_names:
            return tensor.full_tensor()
        assert not any(kind.is_partial() for kind in tensor.placements), "gradients are summed before they are read"
        # Torch's own way warns of every tensor that both axes shard along one dim, and knows no permutation.
        value = tensor.to_local()
        for axis, dim in reversed(_sharded_axes(tensor)):
            group = mesh.get_group(axis)
            if axis == mesh.ndim - 1:
                value = _joined(value, placement, group)
            else:
                assert dim == 0, "FSDP shards the first dim"
                size = tensor.shape[0]
                if placement.is_split and placement.dim == 0:
                    size //= mesh.size(mesh.ndim - 1)
                value = _chunks_joined(value, size, group)
        return value


def _sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """(axis of the mesh, dim of the tensor) of each split, in the order in which they were made: `tp` first."""
    mesh = tensor.device_mesh
    axes = list(range(mesh.ndim))
    if mesh.mesh_dim_names is not None and mesh.mesh_dim_names[-1] == AXIS:
        axes = [axes[-1], *axes[:-1]]
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
