"""Running one rank's stage for one step: a loop without a pipeline, torch's schedules with one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from planner.errors import PlanError
from planner.graph import Graph
from planner.plan import Plan
from planner.runtime.blocks import (
    INPUT,
    Lowered,
    Stage,
    boundary_examples,
    constant,
    dtype_of,
    lower_block,
    lower_prelude,
    shape_of,
)
from planner.runtime.inputs import Inputs, ValidTargets
from planner.runtime.zero import Sharder, local

SCHEDULES: Mapping[str, type[Schedule1F1B] | type[ScheduleGPipe]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A parameter that this rank trains (or keeps, if frozen), and where it is registered.

    `is_counted` is off where an earlier stage counts the same parameter in the gradient norm.
    """

    name: str
    module: nn.Module
    leaf: str
    is_counted: bool = True

    @property
    def parameter(self) -> nn.Parameter:
        """The object the optimizer holds: a DTensor where it is sharded or replicated."""
        found: nn.Parameter = getattr(self.module, self.leaf)
        return found


class Engine(Protocol):
    """What a `Trainer` drives: one stage, with a graph or without."""

    owned: list[Owned]

    def run(self, batch: object) -> torch.Tensor:
        """Forward and backward of one step.

        Returns:
            The mean loss over this rank's micro-batches as a float64 scalar; zero on a rank whose
            stage has no loss.
        """

    def sum_tied(self) -> None:
        """Add up the gradients of parameters that other stages read as well."""

    def after_backward(self) -> None:
        """Free what the optimizer's step will make stale."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this rank may have changed, by name."""


class GraphEngine:
    """One rank's stage of a model that has a graph."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        tensors: Mapping[int, torch.Tensor],
        *,
        mesh: DeviceMesh,
        sharder: Sharder,
        device: torch.device,
    ) -> None:
        """`tensors` are the parameters and buffers of this rank's stage and of the prelude."""
        self.graph = graph
        self.num_microbatches = plan.num_microbatches
        self.sharder = sharder
        self.inputs = Inputs(
            graph,
            micro_batch=plan.micro_batch,
            num_microbatches=plan.num_microbatches,
            device=device,
        )
        self._pp_group = mesh["pp"].get_group()
        self._losses: list[torch.Tensor] = []
        attributes = _Attributes(graph, tensors, device)
        self.targets = ValidTargets(graph, attributes, micro_batch=plan.micro_batch, device=device)
        index = mesh["pp"].get_local_rank()
        self.stage = self._build(plan, index, attributes, device)
        self._schedule = self._make_schedule(plan, index, device) if plan.mesh.pp > 1 else None
        readers = stages_of_parameters(plan, graph)
        self.owned = [
            Owned(
                name=graph.tensors[tensor].name,
                module=module,
                leaf=leaf,
                is_counted=readers[tensor][0] == index,
            )
            for tensor, (module, leaf) in sorted(self.stage.sites().items())
        ]
        self._tied = _tied_groups(graph, readers, index, self._pp_group)
        self._has_gradient: dict[str, bool] = {}  # by tied parameter, whether any stage has one

    def run(self, batch: object) -> torch.Tensor:
        """Forward and backward of all micro-batches."""
        tensors = self.inputs.check(batch)
        micro_batches = self.inputs.split(tensors)
        self.targets.check(micro_batches)
        self._losses.clear()
        if self._schedule is None:
            for position, inputs in enumerate(micro_batches):
                self.sharder.before_micro_batch(is_last=position == self.num_microbatches - 1)
                loss = self.stage(**{f"{INPUT}{t}": value for t, value in inputs.items()})
                self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        else:
            self._run_schedule(tensors)
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=self.inputs.device)
        return torch.stack(self._losses).double().mean()

    def sum_tied(self) -> None:
        """All-reduce the local part of each tied gradient over the stages that own it."""
        by_name = {owned.name: owned.parameter for owned in self.owned}
        for name, group in self._tied:
            parameter = by_name[name]
            if name not in self._has_gradient:
                # A stage may only use the parameter detached; all stages of the group must still call alike.
                anyone = torch.tensor(parameter.grad is not None, dtype=torch.int32, device=self.inputs.device)
                dist.all_reduce(anyone, group=group)
                self._has_gradient[name] = bool(anyone)
            if self._has_gradient[name]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)

    def after_backward(self) -> None:
        """Free gathered parameters."""
        self.sharder.after_backward()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this stage updates, by name."""
        return {self.graph.tensors[t].name: b for t, b in self.stage.buffers_written().items()}

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Keep a micro-batch's loss, and give its part of the mean."""
        self._losses.append(loss.detach())
        return loss / self.num_microbatches

    def _run_schedule(self, tensors: Mapping[int, torch.Tensor]) -> None:
        assert self._schedule is not None
        self.sharder.before_schedule()
        keywords: dict[str, Any] = {f"{INPUT}{t}": value for t, value in tensors.items()}
        # The loss is in the graph; the schedule only asks for some target on the last stage.
        if self.stage.is_last:
            keywords["target"] = torch.arange(self.num_microbatches)
        try:
            self._schedule.step(return_outputs=False, **keywords)
        except RuntimeError as error:
            for note in getattr(error.__cause__, "__notes__", ()):
                error.add_note(note)
            raise

    def _build(self, plan: Plan, index: int, attributes: "_Attributes", device: torch.device) -> Stage:
        """Lower and wrap this rank's blocks one by one, then the stage."""
        graph, micro_batch = self.graph, plan.micro_batch
        positions = stage_positions(plan)[index]
        block_plans = plan.stages[index].blocks
        tied = tied_within(graph, positions)
        blocks: list[Lowered] = []
        for position, block_plan in zip(positions, block_plans, strict=True):
            block = lower_block(
                graph, graph.blocks[position], tied=tied, attributes=attributes,
                micro_batch=micro_batch, device=device,
            )  # fmt: skip
            self.sharder.wrap(block, block_plan.zero)
            blocks.append(block)
        stage = Stage(
            graph,
            blocks,
            positions=positions,
            recompute=[b.recompute == "full" for b in block_plans],
            tied={t: cast("nn.Parameter", attributes[t]) for t in tied},
            prelude=lower_prelude(
                graph,
                [t for p in positions for t in graph.blocks[p].shared],
                attributes=attributes, micro_batch=micro_batch, device=device,
            ),
        )  # fmt: skip
        zeros = [b.zero for b in block_plans]
        self.sharder.wrap(stage, root_zero(plan, graph, index))
        self._driven = self.sharder.for_schedule(stage, zeros)
        return stage

    def _make_schedule(self, plan: Plan, index: int, device: torch.device) -> PipelineScheduleSingle:
        """Torch's schedule with static shapes: it would otherwise run one real extra step."""
        graph = self.graph
        positions = stage_positions(plan)[index]
        is_first, is_last = index == 0, index == plan.mesh.pp - 1
        cuts = [*([] if is_first else [positions.start - 1]), *([] if is_last else [positions.stop - 1])]
        examples = boundary_examples(graph, cuts, plan.micro_batch)
        loss = torch.empty(
            shape_of(graph, graph.loss, plan.micro_batch),
            dtype=dtype_of(graph, graph.loss), device="meta", requires_grad=True,
        )  # fmt: skip
        stage = PipelineStage(
            self._driven,
            index,
            plan.mesh.pp,
            device,
            input_args=() if is_first else examples[positions.start - 1],
            output_args=(loss,) if is_last else examples[positions.stop - 1],
            group=self._pp_group,
        )
        chunks = {
            f"{INPUT}{t}": _Replicate() if (dim := self.inputs.batch_dim(t)) is None else TensorChunkSpec(dim)  # type: ignore[no-untyped-call]
            for t in graph.inputs
        }
        return SCHEDULES[plan.schedule](
            stage,
            plan.num_microbatches,
            loss_fn=lambda loss, _: self._scaled(loss),
            kwargs_chunk_spec=cast("dict[str, TensorChunkSpec]", chunks),
            scale_grads=False,
        )


class _Attributes(Mapping[int, torch.Tensor]):
    """The real tensors by index; constants are made when first asked for, once per rank."""

    def __init__(self, graph: Graph, tensors: Mapping[int, torch.Tensor], device: torch.device) -> None:
        self._graph = graph
        self._tensors = dict(tensors)
        self._device = device

    def __getitem__(self, tensor: int) -> torch.Tensor:
        if tensor not in self._tensors and self._graph.tensors[tensor].kind == "constant":
            self._tensors[tensor] = constant(self._graph, tensor, self._device)
        return self._tensors[tensor]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def stage_positions(plan: Plan) -> list[range]:
    """The blocks of each stage, as positions in `graph.blocks`."""
    result, start = [], 0
    for stage in plan.stages:
        result.append(range(start, start + len(stage.blocks)))
        start += len(stage.blocks)
    return result


def stages_of_parameters(plan: Plan, graph: Graph) -> dict[int, list[int]]:
    """Parameter tensor -> the stages that read it, in order."""
    result: dict[int, list[int]] = {}
    for stage, positions in enumerate(stage_positions(plan)):
        for position in positions:
            for tensor in graph.blocks[position].parameters:
                stages = result.setdefault(tensor, [])
                if stage not in stages:
                    stages.append(stage)
    return result


def tied_within(graph: Graph, positions: range) -> tuple[int, ...]:
    """Parameters that more than one block of a stage reads."""
    return tuple(
        parameter for parameter, readers in graph.tie_groups if sum(position in positions for position in readers) > 1
    )


def root_zero(plan: Plan, graph: Graph, index: int) -> int:
    """The ZeRO stage of a stage's own parameters, the tied ones; else the lowest of its blocks.

    Raises:
        PlanError: its tied parameters do not agree.
    """
    positions = stage_positions(plan)[index]
    zeros = [block.zero for block in plan.stages[index].blocks]
    readers = dict(graph.tie_groups)
    found = {
        zeros[p - positions.start]: graph.tensors[t].name
        for t in tied_within(graph, positions)
        for p in readers[t]
        if p in positions
    }
    if len(found) > 1:
        raise PlanError(
            f"parameters that several blocks share have ZeRO stages {sorted(found)} "
            f"({', '.join(sorted(set(found.values())))}); give the blocks that share one the same"
        )
    return next(iter(found), min(zeros))


def _tied_groups(
    graph: Graph, readers: Mapping[int, list[int]], index: int, pp_group: dist.ProcessGroup
) -> list[tuple[str, dist.ProcessGroup]]:
    """Trainable parameters that this and other stages read, with the group of those stages."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    result = []
    num_stages = dist.get_world_size(pp_group)
    for tensor, stages in sorted(readers.items(), key=lambda item: (item[1], item[0])):
        if len(stages) < 2 or index not in stages or not graph.tensors[tensor].requires_grad:
            continue
        key = tuple(stages)
        if key not in made:
            made[key] = (
                pp_group
                if len(stages) == num_stages
                else dist.new_group(
                    [dist.get_global_rank(pp_group, s) for s in stages],
                    use_local_synchronization=True,
                )
            )
        result.append((graph.tensors[tensor].name, made[key]))
    return result


Optimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
