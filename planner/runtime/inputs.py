"""A user's batch as the tensors of a graph: checked, cast, moved, and split into micro-batches."""

from collections.abc import Mapping, Sequence

import torch
from torch import distributed as dist

from planner.errors import ModelError, RunError
from planner.graph import Batch, Graph
from planner.runtime.blocks import dtype_of, lower_prelude
from planner.trace.batch import leaves, settings


class Inputs:
    """What one data rank gets per step: `num_microbatches` micro-batches of `micro_batch` samples."""

    def __init__(self, graph: Graph, *, micro_batch: int, num_microbatches: int, device: torch.device) -> None:
        self.graph = graph
        self.micro_batch = micro_batch
        self.num_microbatches = num_microbatches
        self.device = device
        self.index_of = {graph.tensors[i].name: i for i in graph.inputs}

    def check(self, batch: object) -> dict[int, torch.Tensor]:
        """The tensors of a batch by tensor index, on the rank's device.

        Floating tensors are cast to the dtype that the graph was traced in.

        Raises:
            RunError: names, number of samples, shapes or dtypes differ from the graph's.
        """
        try:
            named = {leaf.name: leaf.tensor for leaf in leaves(batch)}
        except ModelError as error:
            raise RunError(f"step: {error}") from error
        if missing := [name for name in self.index_of if name not in named]:
            raise RunError(f"the batch lacks {missing[0]!r}; the model was planned with {sorted(self.index_of)}")
        if unknown := [name for name in named if name not in self.index_of]:
            raise RunError(
                f"the batch has {unknown[0]!r}, which the model was not planned with; it takes {sorted(self.index_of)}"
            )
        if wrong := [f"{name}={value}" for name, value in settings(batch) if (name, value) not in self.graph.settings]:
            raise RunError(
                f"the batch has {wrong[0]}, which the model was not traced with; plan and apply with such a batch"
            )
        return {self.index_of[name]: self._checked(name, value) for name, value in named.items()}

    def _checked(self, name: str, value: torch.Tensor) -> torch.Tensor:
        index = self.index_of[name]
        samples = self.micro_batch * self.num_microbatches
        expected = tuple(
            size.per_sample * samples if isinstance(size, Batch) else size for size in self.graph.tensors[index].shape
        )
        got = tuple(value.shape)
        dim = self.batch_dim(index)
        if len(got) == len(expected) and dim is not None and got[dim] != expected[dim]:
            raise RunError(
                f"{name!r} has {got[dim]} samples, this data rank takes {expected[dim]} a step "
                f"({self.num_microbatches} micro-batches of {self.micro_batch}); "
                "give every data rank its own global_batch / data_world samples"
            )
        if got != expected:
            raise RunError(
                f"{name!r} has shape {list(got)}, the plan was made for {list(expected)}; "
                "plan again with a batch of this shape"
            )
        dtype = dtype_of(self.graph, index)
        if value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point):
            raise RunError(f"{name!r} is {value.dtype}, the plan was made for {dtype}")
        return value.to(device=self.device, dtype=dtype)

    def batch_dim(self, tensor: int) -> int | None:
        """The dim of an input that counts samples; None if it belongs to all samples."""
        dims = [d for d, s in enumerate(self.graph.tensors[tensor].shape) if isinstance(s, Batch)]
        return dims[0] if dims else None

    def split(self, tensors: Mapping[int, torch.Tensor]) -> list[dict[int, torch.Tensor]]:
        """The micro-batches in order."""
        parts: dict[int, Sequence[torch.Tensor]] = {}
        for tensor, value in tensors.items():
            dim = self.batch_dim(tensor)
            parts[tensor] = (
                [value] * self.num_microbatches if dim is None else value.tensor_split(self.num_microbatches, dim)
            )
        return [{t: values[i] for t, values in parts.items()} for i in range(self.num_microbatches)]


class ValidTargets:
    """Counts the targets that mean losses do not ignore: they must be equal everywhere.

    The mean over all samples is the mean of micro-batch means only if each has as many valid
    targets. Until losses are weighted by their counts, unequal counts are refused.
    """

    def __init__(
        self,
        graph: Graph,
        attributes: Mapping[int, torch.Tensor],
        *,
        micro_batch: int,
        device: torch.device,
    ) -> None:
        self.terms = graph.loss_terms
        self.prelude = lower_prelude(
            graph, [term.target for term in self.terms],
            attributes=attributes, micro_batch=micro_batch, device=device,
        )  # fmt: skip

    def check(self, micro_batches: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Compare the counts of all micro-batches on all ranks (one small all-reduce).

        Raises:
            RunError: the counts differ; it is raised on every rank.
        """
        if not self.terms:
            return
        counts = []
        for inputs in micro_batches:
            env = dict(inputs)
            if self.prelude is not None:
                # Copies: the stage runs the same nodes again, and they may write their inputs.
                with torch.no_grad():
                    made = self.prelude(*(env[tensor].clone() for tensor in self.prelude.inputs))
                env.update(zip(self.prelude.outputs, made, strict=True))
            counts.append(torch.stack([_counted(env[t.target], t.ignore_index) for t in self.terms]))
        mine = torch.stack(counts)  # [micro-batch, term]
        bounds = torch.stack([mine.amax(0), -mine.amin(0)])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        most, least = bounds[0].tolist(), (-bounds[1]).tolist()
        for term, low, high in zip(self.terms, least, most, strict=True):
            if low != high and term.ignore_index is None:
                raise RunError(
                    f"the loss divides by a value that is between {low:.6g} and {high:.6g} in micro-batches, so the "
                    "mean of their losses is not that of the batch; pack or pad so that all have the same"
                )
            if low != high:
                raise RunError(
                    f"micro-batches have between {low:.0f} and {high:.0f} targets that count (the others "
                    "are the ignored index), so the mean of their losses is not the mean over the "
                    "batch; pack or pad so that all have as many"
                )


def _counted(value: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    """Targets that count, or the value itself where the loss divides by it."""
    return value.double().sum() if ignore_index is None else (value != ignore_index).sum().double()
