"""Training by a plan on stock PyTorch: `apply_plan` under torchrun gives a `Trainer`."""

import hashlib
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.audit import RunRecord
from planner.engine import STOCK
from planner.errors import PlanError, RunError
from planner.graph import Graph
from planner.plan import Mesh, Plan, ShardingPlan
from planner.profile import Machine
from planner.runtime.check import CheckReport, check_everywhere
from planner.runtime.execute import (
    Engine,
    Evaluated,
    GraphEngine,
    Key,
    Retrace,
    root_zero,
)
from planner.runtime.fallback import FallbackEngine
from planner.runtime.initialise import Init
from planner.runtime.inputs import Form, Inputs
from planner.runtime.machine import this_machine
from planner.runtime.optimizers import Optimizer, check_elementwise, named_optimizer
from planner.runtime.peers import Axes, replicated
from planner.runtime.phases import Phases, save_record
from planner.runtime.samples import nested
from planner.runtime.statistics import DataRanks
from planner.runtime.weight_files import GivenWeights
from planner.runtime.weights import (
    DEFAULT_SHARD_BYTES,
    StateTemplate,
    Values,
    check_parameters,
    fill,
    release,
    take,
    together,
)
from planner.runtime.zero import COMPUTE_DTYPES, Sharder, local, stage_class
from planner.shard.chain import AxisSplit
from planner.shard.stored import stored
from planner.trace import Evaluation, leaves, trace

_log = logging.getLogger(__name__)
LossFunction = Callable[[Any, Any], torch.Tensor]
_GRAPH_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float16": "fp16"}


class Trainer:
    """One rank's part of training by a plan.

    `optimizer` is the torch optimizer over this rank's parameters (None where a rank has none to
    train): learning-rate schedulers take it as usual. `grad_norm` is the norm of the whole model's
    gradient in the last step, before clipping. `check` is what the self-check before training found (None = not run).
    `weight_bytes_read` is what this rank read of the weights that `apply` was given.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        optimizer: Optimizer | None,
        max_grad_norm: float | None,
        template: StateTemplate,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.device = device
        self.data_world = plan.mesh.dp
        self.data_rank = dist.get_rank() // plan.mesh.peers % plan.mesh.dp
        self.grad_norm = math.nan
        self.check: CheckReport | None = None
        self.weight_bytes_read = 0
        self._max_grad_norm = max_grad_norm
        self._template = template
        self._mesh = mesh
        self._trained = [owned for owned in engine.owned if owned.parameter.requires_grad]
        named = [(owned.name, owned.parameter) for owned in self._trained]
        with together():
            make = optimizer or named_optimizer(plan.optimizer)
            if not callable(make):
                raise PlanError(
                    f"optimizer= is {type(make).__name__}; give a function that takes a list of (name, parameter) and "
                    "returns a torch optimizer, such as lambda named: torch.optim.AdamW([p for _, p in named])"
                )
            self.optimizer = make(named) if named else None
            if self.optimizer is not None:
                check_elementwise(
                    self.optimizer, num_shards=plan.mesh.shards, num_stages=plan.mesh.pp, num_parts=plan.mesh.tp
                )

    @property
    def num_steps(self) -> int:
        """Steps that were run; set it when you resume, so that dropout goes on where it was."""
        return self.engine.random.step

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self.engine.random.step = number

    def step(self, batch: object) -> float:
        """Train on one batch: this data rank's `global_batch / data_world` samples, or fewer.

        All ranks of one data rank (`data_rank`) give the same batch: those of its pipeline and of tensor or context
        parallelism.
        Data ranks may differ a little in samples, and sequence lengths may change from step to step. Returns the loss
        of the whole global batch, on every rank: as one device has it, whatever the samples, valid targets and masks of
        each micro-batch. Gradients stay until the next step.

        Raises:
            RunError: the batch does not fit the plan.
        """
        self.phases.begin(anew=True)
        self.zero_grad()
        loss = self._run(batch, 1.0)
        with self.phases.measured("sync"):
            # One collective for both: the last stages' mean losses, everyone's squared gradient norm.
            totals = torch.stack([self._share_of(loss), self._squared_norm()])
            dist.all_reduce(totals)
            mean_loss, squared = totals.tolist()
            self._note_norm(squared)
            if self._max_grad_norm is not None:
                self._clip(self._max_grad_norm)
        self.optimizer_step()
        return float(mean_loss)

    def forward_backward(self, batch: object, *, scale: float = 1.0) -> float:
        """Add the gradients of one batch's loss times `scale` to those that are there; nothing is updated.

        For a loop of your own: several calls add up as several `backward` calls do, then come `clip_grad_norm_`,
        `optimizer_step` and `zero_grad`, as usual. The batch is as for `step`; so is what is returned, not scaled.

        Raises:
            RunError: the batch does not fit the plan.
        """
        self.phases.begin()
        loss = self._share_of(self._run(batch, scale))
        with self.phases.measured("sync"):
            dist.all_reduce(loss)
            return loss.item()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of the whole model as `torch.nn.utils.clip_grad_norm_` does; a collective.

        Returns:
            The norm before clipping, over all ranks and stages; a shared parameter counts once.
        """
        with self.phases.measured("sync"):
            squared = self._squared_norm()
            dist.all_reduce(squared)
            self._note_norm(squared.item())
            self._clip(max_norm)
        return self.grad_norm

    def optimizer_step(self) -> None:
        """`optimizer.step()`, on ranks that have parameters to train."""
        with self.phases.measured("optimizer"):
            if self.optimizer is not None:
                self.optimizer.step()
        self.phases.finish()

    @property
    def phases(self) -> Phases:
        """The timers of this rank; `phases.sample(range(10, 13))` names steps that run under torch's profiler.

        A step is one of `step`, or from `forward_backward` to the end of `optimizer_step`.
        """
        return self.engine.phases

    def record(
        self,
        path: str | Path | None = None,
        *,
        peak_bytes: float | None = None,
        memory_kind: str = "",
        machine: Machine | None = None,
    ) -> RunRecord:
        """What the steps so far took on all ranks, phase by phase; every rank must call it.

        Rank 0 writes it to `path`, if there is one, for `autoplan audit`. Without sampled steps (`phases.sample`) it
        does not tell communication from computing. `peak_bytes` of this rank are by default what CUDA's allocator
        says, on a CPU unknown.

        Raises:
            RunError: no step beyond warm-up was run, or the file cannot be written.
        """
        if peak_bytes is None and self.device.type == "cuda":
            peak_bytes, memory_kind = float(torch.cuda.max_memory_allocated(self.device)), "allocated"
        record = self.phases.record(
            self.plan, peak_bytes=peak_bytes, memory_kind=memory_kind, machine=machine or this_machine(
                "cuda" if self.device.type == "cuda" else "cpu", dist.get_world_size()
            ),
        )  # fmt: skip
        if path is not None:
            save_record(record, path)
        return record

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's parameters."""
        for owned in self._trained:
            owned.parameter.grad = None

    def evaluate(self, batch: object, outputs: Sequence[str] = (), *, gather: bool = True) -> Evaluated:
        """Loss and outputs in eval mode, without gradients: dropout is off, no statistics are updated.

        The batch is this data rank's, of any number of samples (at least one); it may lack labels if outputs are asked
        for. `outputs` are names of tensors in what the model returns: a field, a key, or "0" for the first of a tuple
        ("hidden_states" is all tensors in it). All ranks call it alike. Outputs are those of the whole batch in order,
        on every rank; with `gather=False` those of this data rank.

        Raises:
            RunError: the batch does not fit the model, or it does not return such an output.
        """
        return self.engine.evaluate(batch, outputs, gather=gather)

    def _run(self, batch: object, scale: float) -> torch.Tensor:
        """Forward and backward; this rank's part of the mean loss."""
        loss = self.engine.run(batch, scale)
        with self.phases.measured("sync"):
            self.engine.after_backward()
            self.engine.sum_partial()
            self.engine.sum_tied()
        return loss

    def _share_of(self, loss: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over all ranks that is the loss; ranks that split tensors have it alike."""
        return loss / (self.data_world * self.plan.mesh.peers)

    def _note_norm(self, squared: float) -> None:
        # Replicas hold the same gradient, shards of one gradient add up.
        self.grad_norm = math.sqrt(squared / self.plan.mesh.dp_replicate)

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The model as it is now: names and shapes of the plain model, full tensors on the CPU.

        Complete on every rank, or with `rank0_only` on rank 0 and empty elsewhere; every rank must call it. Loads
        strictly into the plain model.
        Buffers that training updates (BatchNorm statistics) are the same on every data rank: those of one device
        that ran the micro-batches of all ranks in order.
        """
        return self._template.fill(self._mesh["pp"].get_group(), self.engine, self.device, rank0_only=rank0_only)

    def save_weights(
        self, directory: str | Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES, dtype: torch.dtype | None = None
    ) -> list[Path]:
        """Write safetensors under the names of the plain model; with Hugging Face's index if they are several files.

        Every rank must call it. The first rank of each stage writes the tensors of its stage one by one, so that
        no rank holds more than its part and one tensor; `directory` must be shared. A tied parameter is written once,
        under its first name, as Hugging Face and `safetensors.torch.load_model` do. Files get their names when all are
        whole. `dtype` converts floating tensors, which else have the dtype of the optimizer's parameters.

        Returns:
            The files, the index last.

        Raises:
            RunError: the directory holds weights already or cannot be written.
        """
        return self._template.save(
            Path(directory), self.engine, stage=self._mesh["pp"].get_local_rank(),
            is_writer=self.data_rank == 0 and dist.get_rank() % self.plan.mesh.peers == 0,
            max_shard_bytes=max_shard_bytes, dtype=dtype,
        )  # fmt: skip

    def expert_loads(self) -> dict[str, list[int]]:
        """Tokens that each expert of each layer got in all training so far, on all ranks; every rank must call it.

        Layers are named by the module whose grouped product it is; a token that takes two experts counts for both.
        Experts that are no grouped product are not counted. `autoplan(..., expert_loads=)` plans with what it returns.
        Where there is nothing to return, a warning says why.
        """
        return self.engine.expert_loads()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients of this rank's parameters by name, on the CPU, as the last step used them.

        Every rank of a stage must call it.
        """
        return {
            owned.name: self._template.whole(owned, owned.parameter.grad).cpu()
            for owned in self._trained
            if owned.parameter.grad is not None
        }

    def _squared_norm(self) -> torch.Tensor:
        """What this rank adds to the sum over all ranks; `_note_norm` undoes that replicas count several times."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        # Parts of a gradient that tensor parallelism splits add up; of the others each of its ranks has all.
        for is_split, copies in ((False, self.plan.mesh.tp), (True, 1)):
            gradients = [
                local(owned.parameter.grad)
                for owned in self._trained
                if owned.parameter.grad is not None and owned.is_counted and owned.is_split == is_split
            ]
            if gradients:
                total += nn.utils.get_total_norm(gradients).double().square() / copies
        return total

    def _clip(self, max_norm: float) -> None:
        """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, by the norm over all ranks."""
        factor = min(1.0, max_norm / (self.grad_norm + 1e-6))
        gradients = [local(owned.parameter.grad) for owned in self._trained if owned.parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)


def apply(
    plan: Plan,
    model: nn.Module,
    *,
    batch: object = None,
    optimizer: Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    max_grad_norm: float | None = None,
    weights: GivenWeights | None = None,
    seed: int = 0,
    init: Init | None = None,
    check: bool | Literal["replicate"] = True,
) -> Trainer:
    """`apply_plan` with the graph traced anew from `model` and the batch that the plan describes.

    `batch` gives names, shapes and dtypes where the plan holds none, and the self-check its samples.

    Raises:
        PlanError: the plan is not for this model or number of processes.
        ModelError: the batch or the weights do not fit the model.
    """
    described = _described_batch(plan) if batch is None else batch
    graph = trace(
        model, described, precision=plan.precision, loss_fn=loss_fn, name=plan.model,
        device_kind="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    return apply_plan(
        plan, model, graph=graph, optimizer=optimizer, loss_fn=loss_fn, max_grad_norm=max_grad_norm,
        weights=weights, seed=seed, init=init, check=check, batch=batch,
    )  # fmt: skip


def _described_batch(plan: Plan) -> object:
    """A batch on meta of the shapes that the plan was made for."""
    if not plan.inputs:
        raise PlanError("the plan does not say what a batch looks like; give apply(..., batch=)")
    fixed = {spec.shape[0] for spec in plan.inputs if spec.shape}
    samples = next(n for n in itertools.count(2) if n not in fixed)
    tensors = {}
    for spec in plan.inputs:
        shape = [samples if size == -1 else size for size in spec.shape]
        tensors[spec.name] = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
    return nested(tensors)


def apply_plan(
    plan: Plan,
    model: nn.Module,
    *,
    graph: Graph,
    optimizer: Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    max_grad_norm: float | None = None,
    weights: GivenWeights | None = None,
    seed: int = 0,
    init: Init | None = None,
    check: bool | Literal["replicate"] = True,
    batch: object = None,
    device: torch.device | None = None,
) -> Trainer:
    """A trainer for `model` by `plan`, on this rank of a torchrun job.

    `model` holds its weights, the same on all ranks, or is on meta. `weights` are those to start from: a state_dict, or
    a directory or file of safetensors or `torch.save`, of which a rank reads its own part. What is on meta and not
    among them is drawn from `seed` by the modules' own methods, then by `init(module)`: the same values for every plan
    (see `initialise`). Afterwards the trainer owns the weights: this rank keeps its own stage, and parameters of
    `model` that are sharded, cast or of another stage are on meta. `graph` is the trace of `model`, made anew in each
    process. `optimizer` takes a list of (name, parameter) and returns a torch optimizer. `loss_fn` is read by the
    self-check, and where the model has no graph. `seed` is also that of dropout and other random operators: with a
    graph the same elements are dropped whatever the plan. They leave torch's own generator as it is. With `check`, rank
    0 first compares the lowered blocks with `model` as it is now, on samples of `batch` or random ones. An operator
    that ranks which share its work do otherwise than one device is an error; with "replicate" it runs whole on every
    rank instead, and the trainer's plan says how. `device` is by default a CUDA device of the rank's own under NCCL,
    else the CPU; ranks that share one need a process group of gloo.

    Raises:
        PlanError: the plan is not for this model, graph or number of processes.
        ModelError: the weights are not this model's, or nothing initialises a parameter or buffer.
        CheckError: the blocks do not compute what the module does.
    """
    device = _start(plan, device)
    with together():
        _check_plan(plan, graph)
    _check_same_plan(plan)
    check_parameters(model, graph)
    with together():
        values = Values(model, weights=weights, seed=seed, init=init, device=device)
    values.check_equal_everywhere()
    if plan.engine != STOCK:
        _log.warning("the plan is priced for %s; it runs by stock PyTorch, which takes another time", plan.engine)
    if graph.not_separable and plan.num_microbatches * plan.mesh.dp > 1:
        _log.warning("%s: training equals one device with the same micro-batches", graph.not_separable)
    if graph.fallbacks and plan.num_microbatches * plan.mesh.dp > 1:
        _log.warning(
            "without a graph micro-batches are weighted by their samples: right where the loss is a mean over samples, "
            "not where it is one over labels that count (ignored labels, masks) and micro-batches differ in those"
        )
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # FSDP shards over the ranks of cp and ep as well: to it they are one axis. This mesh is made first, so that its
    # groups are named as without: torch's caches of layouts take meshes of equal shape for the same.
    sharding_mesh = _device_mesh(device, plan.mesh.shards, replace(plan.mesh, cp=1, ep=1))
    mesh = sharding_mesh if plan.mesh.cp == 1 else _device_mesh(device, plan.mesh.dp_shard, plan.mesh)
    # Of experts that are spread over ep a rank has its own; they are sharded over the other data ranks alone.
    expert_mesh = _device_mesh(device, plan.mesh.dp_shard, plan.mesh) if plan.mesh.ep > 1 else None
    with together():
        axes = Axes(plan, graph, mesh, sharding_mesh, expert_mesh)
    report = None
    if check:
        report, splits = check_everywhere(
            model, graph, precision=plan.precision, micro_batch=plan.micro_batch, device=device, batch=batch,
            loss_fn=loss_fn, splits=axes.splits,
            replicate=partial(replicated, graph) if check == "replicate" else None,
        )  # fmt: skip
        if report.replicated:
            plan = _with_splits(plan, splits)
            with together():
                axes = Axes(plan, graph, mesh, sharding_mesh, expert_mesh, replicated=report.replicated)
    with together():
        sharder = Sharder(
            _data_mesh(plan, sharding_mesh), plan.precision, same_gradients=not graph.fallbacks,
            experts=None if expert_mesh is None else _data_mesh(plan, expert_mesh),
        )  # fmt: skip
    with together():
        template = StateTemplate(model, plan, graph, values, axes.parallel)
    engine: Engine
    if graph.fallbacks:
        engine = FallbackEngine(
            plan, model, graph, loss_fn, sharder=sharder, data_ranks=DataRanks.of(mesh), device=device, seed=seed,
            values=values,
        )  # fmt: skip
    else:
        index = mesh["pp"].get_local_rank()
        with together():
            tensors = take(
                model, plan, graph, index, device, values=values, wrapped=sharder.mesh is not None,
                parallel=axes.parallel,
            )  # fmt: skip
        engine = GraphEngine(
            plan, graph, tensors, mesh=mesh, axes=axes, sharder=sharder, device=device, seed=seed,
            retrace=_retracer(plan, model, graph, loss_fn),
        )  # fmt: skip
        with together():
            fill(engine.stage, engine.owned, values, device, axes.parallel)
        del tensors
        release(model, engine, graph)
    values.refuse_missing()
    trainer = Trainer(
        plan,
        engine,
        mesh=mesh,
        device=device,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        template=template,
    )
    trainer.check = report
    trainer.weight_bytes_read = values.bytes_read
    return trainer


def _with_splits(plan: Plan, splits: Sequence[AxisSplit]) -> Plan:
    """The plan with other shardings for each block, one for each axis that splits."""
    distinct: list[ShardingPlan] = []
    of_block: list[tuple[int, ...]] = [() for _ in plan.block_plans]
    for split in splits:
        plans, indices = stored(split.shardings, split.axis)
        of_block = [(*before, len(distinct) + index) for before, index in zip(of_block, indices, strict=True)]
        distinct += plans
    numbers = iter(of_block)
    stages = tuple(
        replace(stage, blocks=tuple(replace(block, shardings=next(numbers)) for block in stage.blocks))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, shardings=tuple(distinct))


def _retracer(plan: Plan, model: nn.Module, graph: Graph, loss_fn: LossFunction | None) -> Retrace:
    """What makes graphs of `model` for other batches.

    Before the first one the planned graph is made again: `model` and `loss_fn` must be those that it was made of.
    """
    inputs = Inputs(graph, device=torch.device("meta"))
    is_known = False

    def traced(form: Form, batch: object, evaluation: Evaluation | None) -> Graph:
        return trace(
            model, inputs.example(form, batch), precision=plan.precision, loss_fn=loss_fn, name=plan.model,
            evaluation=evaluation, like=graph,
        )  # fmt: skip

    def retrace(key: Key, batch: object) -> Graph:
        nonlocal is_known
        form, outputs, with_loss = key
        if not is_known:
            whole = batch
            if {leaf.name for leaf in leaves(batch)} != inputs.index_of.keys() and not graph.settings:
                whole = nested({name: torch.empty(1, device="meta") for name in inputs.index_of})
            if traced(inputs.form, whole, None).fingerprint != graph.fingerprint:
                raise RunError(
                    "the batch is of another shape than the planned one, or to be evaluated, and the model or the "
                    "loss function is not the one that was traced; give apply the loss_fn, and leave the model as it is"
                )
            is_known = True
        return traced(form, batch, None if outputs is None else Evaluation(outputs, loss_fn, with_loss=with_loss))

    return retrace


def _check_plan(plan: Plan, graph: Graph) -> None:
    """Refuse what cannot be run as stated."""
    if graph.fingerprint != plan.graph_fingerprint:
        raise PlanError(
            f"the plan was made for another model, batch or precision ({plan.model}, graph "
            f"{plan.graph_fingerprint[:12]}; this one is {graph.name}, {graph.fingerprint[:12]}); "
            "plan again"
        )
    mesh = plan.mesh
    if min(mesh.ep, mesh.cp) > 1:
        raise PlanError(f"the plan uses ep={mesh.ep} and cp={mesh.cp}, of which the runtime has one at a time; fix one")
    if mesh.cp > 1 and graph.own_backward:
        raise PlanError(
            f"{graph.own_backward} has a backward of its own, which sees gradients of another size where cp={mesh.cp} "
            "ranks share out samples; plan with cp=1"
        )
    splits = ", ".join(f"{axis}={degree}" for axis, degree in mesh.splits)
    if splits and graph.fallbacks:
        raise PlanError(
            f"{graph.fallbacks[0]}; without a graph nothing can be split over {splits}; plan with "
            f"{', '.join(f'{axis}=1' for axis, _ in mesh.splits)}"
        )
    _check_shardings(plan, splits)
    if plan.precision not in COMPUTE_DTYPES or _GRAPH_DTYPES.get(graph.dtype) != plan.precision:
        raise PlanError(
            f"the plan trains in {plan.precision}, the graph was traced in {graph.dtype}; the "
            f"runtime has {', '.join(COMPUTE_DTYPES)}, and both must agree"
        )
    samples = plan.micro_batch * plan.num_microbatches * mesh.dp
    if samples != plan.global_batch:
        raise PlanError(
            f"the plan's {plan.num_microbatches} micro-batches of {plan.micro_batch} on {mesh.dp} "
            f"data ranks are {samples} samples, not its global batch of {plan.global_batch}"
        )
    if graph.couples_samples and (plan.num_microbatches > 1 or mesh.dp > 1):
        raise PlanError(
            f"{graph.couples_samples}, so micro-batches and data parallelism change the result; "
            "plan with one micro-batch on one data rank"
        )
    if graph.needs_two_samples and plan.micro_batch == 1:
        raise PlanError(f"{graph.needs_two_samples}, and the plan's micro-batches are one sample; plan again")
    if graph.one_data_rank and mesh.dp > 1:
        raise PlanError(f"{graph.one_data_rank}, so {mesh.dp} data ranks would differ from one device; plan with dp=1")
    names = [block.name for stage in plan.stages for block in stage.blocks]
    if names != [block.name for block in graph.blocks] or len(plan.stages) != mesh.pp:
        raise PlanError(
            f"the plan's {len(plan.stages)} stages with {len(names)} blocks are not the model's "
            f"{len(graph.blocks)} blocks in order on {mesh.pp} stages; plan again"
        )
    if mesh.pp > 1 and plan.schedule == "1f1b" and plan.num_microbatches < mesh.pp:
        raise PlanError(f"1f1b needs as many micro-batches as stages: {plan.num_microbatches} < {mesh.pp}")
    zeros = [block.zero for stage in plan.stages for block in stage.blocks]
    for stage in plan.stages:
        stage_class([block.zero for block in stage.blocks], mesh.pp)
    if 0 in zeros and (max(zeros) > 0 or mesh.shards > 1):
        raise PlanError(
            f"ZeRO-0 blocks use dp_replicate and all blocks or none; the plan has dp_replicate={mesh.dp_replicate}, "
            f"dp_shard={mesh.dp_shard}, cp={mesh.cp}, ep={mesh.ep} and ZeRO stages {sorted(set(zeros))}"
        )
    if 0 not in zeros and mesh.shards == 1 < mesh.dp_replicate:
        raise PlanError(
            f"ZeRO stages {sorted(set(zeros))} shard over dp_shard, which is 1 in the plan beside dp_replicate="
            f"{mesh.dp_replicate}"
        )
    if graph.fallbacks:
        if mesh.pp > 1 or any(b.recompute != "none" for b in plan.stages[0].blocks):
            raise PlanError(f"{graph.fallbacks[0]}; without a graph a plan has no pipeline and no recomputation")
        return
    if mesh.pp > 1 and graph.reads_updates:
        raise PlanError(f"{graph.reads_updates}; plan with pp=1")
    zero_of = dict(zip(names, zeros, strict=True))
    for parameter, readers in graph.tie_groups:
        found = {zero_of[names[reader]] for reader in readers}
        if len(found) > 1:
            raise PlanError(
                f"the blocks that share {graph.tensors[parameter].name} have ZeRO stages "
                f"{sorted(found)}; give them the same"
            )
    for index in range(mesh.pp):
        root_zero(plan, graph, index)


def _check_shardings(plan: Plan, splits: str) -> None:
    """Refuse a plan that does not say of every block how each axis splits it, or says it of other axes."""
    wanted = [axis for axis, _ in plan.mesh.splits]
    for block in plan.block_plans:
        found = [plan.shardings[i].axis if 0 <= i < len(plan.shardings) else axis
                 for i, axis in zip(block.shardings, wanted, strict=False)]  # fmt: skip
        if len(block.shardings) != len(wanted) or found != wanted:
            says = "says" if len(block.shardings) > len(wanted) else "does not say"
            raise PlanError(
                f"the plan has {splits or 'tp=1'} and {says} how block {block.name or '(the model)'} is split; "
                "plan again"
            )


def _start(plan: Plan, given: torch.device | None) -> torch.device:
    """This rank's device; the process group is made if there is none."""
    wanted = plan.mesh.num_devices
    if not dist.is_initialized():
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        _check_world(launched, wanted)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            # One process without torchrun.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    _check_world(dist.get_world_size(), wanted)
    if given is not None and given.type not in ("cpu", "cuda"):
        raise PlanError(f"device={given} does not train; give a cpu or cuda device")
    if given is not None and given.type == "cpu":
        return given
    if given is not None or (torch.cuda.is_available() and "nccl" in dist.get_backend()):
        device = given or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        if plan.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise PlanError(f"{torch.cuda.get_device_name()} has no bf16; plan with precision fp32")
        return device
    return torch.device("cpu")


def _check_world(launched: int, wanted: int) -> None:
    if launched != wanted:
        raise PlanError(
            f"the plan is for {wanted} processes, one per device, and {launched} "
            f"{'was' if launched == 1 else 'were'} started; use torchrun --nproc-per-node "
            f"{wanted} on one node, or plan for {launched}"
        )


def _check_same_plan(plan: Plan) -> None:
    """Refuse ranks that were given different plans: they would wait for each other forever."""
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, hashlib.sha256(plan.dumps().encode()).hexdigest())
    others = [rank for rank, other in enumerate(plans) if other != plans[0]]
    if others:
        raise PlanError(
            f"rank {others[0]} has another plan than rank 0; plan once with autoplan plan --out, and load that file on "
            "every rank"
        )


def _device_mesh(device: torch.device, dp_shard: int, mesh: Mesh) -> DeviceMesh:
    """The ranks in the order of the axes, `tp` innermost.

    `dp_shard` may have the ranks of `cp` and of `ep`, which are left out of 1.
    """
    sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": dp_shard}
    sizes |= {axis: size for axis, size in (("cp", mesh.cp), ("ep", mesh.ep)) if size > 1} | {"tp": mesh.tp}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _data_mesh(plan: Plan, mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis that ZeRO works on, or both for hybrid sharding; none where one data rank needs no wrapper.

    `mesh` has the ranks of `cp` in `dp_shard`, and those of `ep`, unless it is for experts that are spread over these.

    One data rank in bf16 is wrapped as well: mixed precision is the wrapper's.
    """
    if plan.mesh.dp * plan.mesh.cp == 1 and plan.precision != "bf16":
        return None
    if plan.mesh.dp_replicate > 1 and plan.mesh.shards > 1:
        return mesh["dp_replicate", "dp_shard"]
    is_replicated = plan.stages[0].blocks[0].zero == 0
    return mesh["dp_replicate"] if is_replicated else mesh["dp_shard"]
