"""ZeRO stages as FSDP2 settings, per block.

    0  replicate: whole parameters twice (a shard that is the whole, and the gathered copy),
       all-reduce of gradients at the last micro-batch
    1  fully_shard, parameters kept gathered through the step, reduce-scatter at the last micro-batch
    2  as 1, reduce-scatter at every micro-batch
    3  fully_shard, parameters freed after forward and after backward, reduce-scatter at every one

With both data-parallel axes (hybrid sharding) 1, 2 and 3 shard over dp_shard, and the sum of a
gradient's shards over dp_replicate is taken once a step, at the last micro-batch: until then FSDP
adds up what it reduce-scattered (`set_requires_all_reduce`, `_partial_reduce_output`).

Without a pipeline the loop of `execute` sets what each block synchronises, so that blocks of one
stage may differ. In a pipeline the schedule looks at what it is given: an FSDP root is driven as
ZeRO-0/1 whatever its flags (synchronisation off until the end, parameters kept), so for ZeRO-2/3
the root is hidden in a plain module and the flags set here hold. Source: torch 2.13,
`torch.distributed.pipelining.stage`, and the held bytes that the tests compare.

Gradients are averaged by FSDP over the data-parallel ranks, and over those of context parallelism, which are among
those of dp_shard here and whose parts are to be summed: the loss is multiplied by their number. Those of experts that
are spread over `ep` are whole on their owner, summed over the samples of all ranks of `ep`, and FSDP averages over the
other data ranks: they are divided by the size of `ep` once a step (`execute`). Stock `scale_grads` of
the schedules misses gradients of parameters that are gathered, so losses are divided by the micro-batches instead.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Shard

from planner.errors import PlanError
from planner.memory import expert_dim
from planner.runtime.phases import Phases

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def master_dtype(precision: str) -> torch.dtype:
    """The dtype of the parameters that the optimizer sees."""
    return torch.float64 if precision == "fp64" else torch.float32


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Compute in bf16 on fp32 parameters and reduce in fp32; nothing for fp32 and fp64.

    `cast_forward_inputs` is off: the graph's own dtypes hold, and a cast turns fp32 masks with the
    smallest number into -inf.
    """
    if precision != "bf16":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class Hidden(nn.Module):
    """A plain module around an FSDP root: the schedule leaves the root's flags alone."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """What the root returns."""
        return self.root(*args, **kwargs)


class ShardedStage(PipelineStage):
    """A pipeline stage that tells its sharder which backward pass is the last, and times its passes."""

    sharder: "Sharder"
    phases: Phases

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """What the schedule calls for each micro-batch."""
        with self.phases.measured("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """What the schedule calls for each micro-batch."""
        self.sharder.before_backward(is_last=last_backward)
        with self.phases.measured("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _post_metadata_inference_cleanup(self) -> None:
        """Torch drops all gradients here when a schedule starts for the first time, as if it had run an extra step.

        With static shapes it has not, and gradients of earlier micro-batches of other sizes would be lost silently.
        """


class Sharder:
    """Wraps the parts of a stage, then its root; afterwards drives what the parts synchronise.

    `mesh` is the data-parallel axis, both axes (dp_replicate, dp_shard) for hybrid sharding, or None where
    nothing needs a wrapper: one data rank in fp32 or fp64. Parts are wrapped as soon as they exist, so that
    only one is whole at a time.

    `same_gradients` tells that every micro-batch gives gradients to the same parameters. Only then replicas may
    be summed once a step: FSDP adds what it reduce-scattered as one flat buffer, without looking whose it is.

    `experts` is what `mesh` is, for parameters that are spread over `ep`: without the ranks of that axis.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        precision: str,
        *,
        same_gradients: bool = True,
        experts: DeviceMesh | None = None,
    ) -> None:
        """As above.

        Raises:
            PlanError: this torch shards all parameters of a module over the same ranks, and there are `experts`.
        """
        self.mesh = mesh
        self._placing: dict[str, Any] = {} if experts is None else {"shard_placement_fn": _placing(experts)}
        self.policy = mixed_precision(precision)
        self._sums_replicas_once = mesh is not None and mesh.ndim == 2 and same_gradients
        self.parts: list[tuple[nn.Module, int]] = []
        self._has_run = False

    def wrap(self, module: nn.Module, zero: int) -> None:
        """Put the parameters of `module` that are in no wrapped part yet under ZeRO stage `zero`."""
        if self.mesh is None:
            return
        if zero == 0:
            replicate(module, mesh=self.mesh, mp_policy=self.policy)
        else:
            fully_shard(
                module, mesh=self.mesh, mp_policy=self.policy, reshard_after_forward=zero == 3, **self._placing
            )  # fmt: skip
        cast("FSDPModule", module).set_reshard_after_backward(zero == 3, recurse=False)
        self.parts.append((module, zero))

    def for_schedule(self, root: nn.Module, zeros: Sequence[int]) -> nn.Module:
        """The module to give to a pipeline stage, so that the schedule does what `zeros` says."""
        return Hidden(root) if self.mesh is not None and min(zeros) >= 2 else root

    def before_schedule(self) -> None:
        """Gather what a pipeline stage keeps gathered, before it waits for its first activations.

        All stages do so at the same time; in their first forward passes the gathers would line up, one stage after the
        other. In the very first step FSDP is not initialised yet, which only a forward pass through the root does.
        """
        if self._has_run:
            for module, zero in self.parts:
                if zero < 3:
                    cast("FSDPModule", module).unshard()
        self._has_run = True

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Synchronise ZeRO-0 and ZeRO-1 parts, and sum replicas, in this micro-batch only if it is the last."""
        for module, zero in self.parts:
            if zero < 2:
                cast("FSDPModule", module).set_requires_gradient_sync(is_last, recurse=False)
        self.before_backward(is_last=is_last)

    def before_backward(self, *, is_last: bool) -> None:
        """Sum the replicas of ZeRO-2 and ZeRO-3 parts only in the last backward pass.

        For ZeRO-1 the first reduction is the last one.
        """
        if self._sums_replicas_once:
            for module, zero in self.parts:
                if zero >= 2:
                    cast("FSDPModule", module).set_requires_all_reduce(is_last, recurse=False)

    def after_backward(self) -> None:
        """Free gathered copies: after the optimizer's step they would be read though stale.

        Before the step they are of no use, and only without them are the registered parameters the
        sharded ones that carry the gradients. `reshard` is not recursive.
        """
        for module, _ in self.parts:
            cast("FSDPModule", module).reshard()


def _placing(experts: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """What tells FSDP over which ranks to shard a parameter: those spread over `ep` over `experts`, others by default.

    Raises:
        PlanError: this torch does not ask.
    """
    try:  # private in torch 2.13, which documents it in `fully_shard`; 2.11 has no such thing
        common = import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
        placed = common.ShardPlacementResult
        if experts.ndim == 1:
            info = common.FSDPMeshInfo(experts, shard_mesh_dim=0)
        else:
            info = common.HSDPMeshInfo(experts, shard_mesh_dim=1, replicate_mesh_dim=0)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"ep needs an FSDP that shards each parameter over ranks of its own, as torch 2.13 has; this is "
            f"{torch.__version__}, so install that, or plan with ep=1"
        ) from error

    def place(parameter: nn.Parameter) -> Any:
        if not is_spread(parameter):
            return None
        dim = expert_dim(local(parameter).shape, experts.size(experts.ndim - 1))
        return placed(Shard(dim), info)

    return place


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether ranks of `ep` have parts of a tensor."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return names is not None and "ep" in names


def stage_class(zeros: Sequence[int], num_stages: int) -> None:
    """Refuse a mix of ZeRO stages that one pipeline stage (or the whole model) cannot run.

    Raises:
        PlanError: the mix is not possible.
    """
    kinds = set(zeros)
    if not kinds <= {0, 1, 2, 3}:
        raise PlanError(f"the plan has ZeRO stages {sorted(kinds)}; they are 0, 1, 2 and 3")
    if 0 in kinds and len(kinds) > 1:
        raise PlanError(
            f"the plan mixes ZeRO-0 with ZeRO stages {sorted(kinds - {0})}; give all blocks ZeRO-0, or none"
        )
    if num_stages > 1 and 1 in kinds and len(kinds) > 1:
        raise PlanError(
            f"one pipeline stage has ZeRO stages {sorted(kinds)}; a stage is all ZeRO-1, or ZeRO-2 and ZeRO-3"
        )


def sends_integers() -> bool:
    """Whether this torch's pipeline stages hand on tensors that have no gradient: up to 2.11 all were given one."""
    return hasattr(import_module("torch.distributed.pipelining.stage"), "_TensorMeta")  # private: what came with it


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor is its own part."""
    with torch.no_grad():
        to_local = getattr(tensor, "to_local", None)
        return tensor if to_local is None else cast("torch.Tensor", to_local())


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Every wrapped module inside `root`, itself included."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield module
