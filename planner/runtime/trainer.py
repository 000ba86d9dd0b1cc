"""Training by a plan on stock PyTorch: `apply_plan` under torchrun gives a `Trainer`."""

import hashlib
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.errors import PlanError
from planner.graph import Graph
from planner.plan import Plan
from planner.runtime.execute import (
    Engine,
    GraphEngine,
    Optimizer,
    root_zero,
    stage_positions,
    stages_of_parameters,
)
from planner.runtime.fallback import FallbackEngine
from planner.runtime.zero import COMPUTE_DTYPES, Sharder, local, master_dtype, stage_class, whole
from planner.trace import trace

_log = logging.getLogger(__name__)
LossFunction = Callable[[Any, Any], torch.Tensor]
_GRAPH_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float16": "fp16"}


class Trainer:
    """One rank's part of training by a plan.

    `optimizer` is the torch optimizer over this rank's parameters (None where a rank has none to
    train): learning-rate schedulers take it as usual. `grad_norm` is the norm of the whole model's
    gradient in the last step, before clipping.
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
        template: "_StateTemplate",
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.device = device
        self.data_world = plan.mesh.dp
        self.data_rank = dist.get_rank() % plan.mesh.dp
        self.grad_norm = math.nan
        self._max_grad_norm = max_grad_norm
        self._template = template
        self._mesh = mesh
        self._trained = [owned for owned in engine.owned if owned.parameter.requires_grad]
        make = optimizer or _default_optimizer(plan.optimizer)
        named = [(owned.name, owned.parameter) for owned in self._trained]
        self.optimizer = make(named) if named else None

    def step(self, batch: object) -> float:
        """Train on one batch: this data rank's `global_batch / data_world` samples.

        All pipeline ranks of one data rank give the same batch. Returns the mean loss over the
        whole global batch, on every rank. Gradients stay until the next step.

        Raises:
            RunError: the batch does not fit the plan.
        """
        for owned in self._trained:
            owned.parameter.grad = None
        loss = self.engine.run(batch)
        self.engine.after_backward()
        self.engine.sum_tied()
        # One collective for both: the last stages' mean losses, everyone's squared gradient norm.
        totals = torch.stack([loss / self.data_world, self._squared_norm()])
        dist.all_reduce(totals)
        mean_loss, squared = totals.tolist()
        # Replicas hold the same gradient, shards of one gradient add up.
        self.grad_norm = math.sqrt(squared / self.plan.mesh.dp_replicate)
        self._clip()
        if self.optimizer is not None:
            self.optimizer.step()
        return float(mean_loss)

    def state_dict(self) -> dict[str, Any]:
        """The model as it is now: names and shapes of the plain model, full tensors on the CPU.

        Complete on every rank; every rank must call it. Loads strictly into the plain model.
        Buffers that training updates (BatchNorm statistics) are those of the caller's data rank.
        """
        return self._template.fill(self._mesh["pp"].get_group(), self.engine, self.device)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients of this rank's parameters by name, on the CPU, as the last step used them.

        Every rank of a stage must call it.
        """
        return {
            owned.name: whole(owned.parameter.grad).cpu() for owned in self._trained if owned.parameter.grad is not None
        }

    def _squared_norm(self) -> torch.Tensor:
        gradients = [
            local(owned.parameter.grad)
            for owned in self._trained
            if owned.parameter.grad is not None and owned.is_counted
        ]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return nn.utils.get_total_norm(gradients).double().square()

    def _clip(self) -> None:
        """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, by the norm over all ranks."""
        if self._max_grad_norm is None:
            return
        factor = min(1.0, self._max_grad_norm / (self.grad_norm + 1e-6))
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
) -> Trainer:
    """`apply_plan` with the graph traced anew from `model` and the batch that the plan describes.

    `batch` gives names, shapes and dtypes where the plan holds none.

    Raises:
        PlanError: the plan is not for this model or number of processes.
        ModelError: the batch does not fit the model.
    """
    described = _described_batch(plan) if batch is None else batch
    graph = trace(
        model, described, precision=plan.precision, loss_fn=loss_fn, name=plan.model,
        device_kind="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    return apply_plan(plan, model, graph=graph, optimizer=optimizer, loss_fn=loss_fn, max_grad_norm=max_grad_norm)


def _described_batch(plan: Plan) -> object:
    """A batch on meta of the shapes that the plan was made for."""
    if not plan.inputs:
        raise PlanError("the plan does not say what a batch looks like; give apply(..., batch=)")
    fixed = {spec.shape[0] for spec in plan.inputs if spec.shape}
    samples = next(n for n in itertools.count(2) if n not in fixed)
    nested: dict[str, Any] = {}
    for spec in plan.inputs:
        *path, leaf = spec.name.split(".")
        place = nested
        for key in path:
            place = place.setdefault(key, {})
        shape = [samples if size == -1 else size for size in spec.shape]
        place[leaf] = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
    return _sequences(nested)


def _sequences(nested: Any) -> Any:
    """Dicts whose keys count from 0 are what a sequence was called."""
    if not isinstance(nested, dict):
        return nested
    items = {key: _sequences(value) for key, value in nested.items()}
    if list(items) == [str(i) for i in range(len(items))]:
        return tuple(items.values())
    return items


def apply_plan(
    plan: Plan,
    model: nn.Module,
    *,
    graph: Graph,
    optimizer: Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    max_grad_norm: float | None = None,
) -> Trainer:
    """A trainer for `model` by `plan`, on this rank of a torchrun job.

    `model` holds its weights, the same on all ranks. Afterwards the trainer owns them: this rank
    keeps its own stage, and parameters of `model` that are sharded, cast or of another stage are
    on meta. `graph` is the trace of `model`, made anew in each process. `optimizer` takes a list
    of (name, parameter) and returns a torch optimizer. `loss_fn` is read only where the model has
    no graph.

    Raises:
        PlanError: the plan is not for this model, graph or number of processes.
    """
    _check_plan(plan, graph)
    _check_materialised(model)
    device = _start(plan)
    _check_same_plan(plan)
    _check_equal_everywhere(model)
    _check_parameters(model, graph)
    if graph.not_separable and plan.num_microbatches * plan.mesh.dp > 1:
        _log.warning("%s: training equals one device with the same micro-batches", graph.not_separable)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(
        device.type,
        (plan.mesh.pp, plan.mesh.dp_replicate, plan.mesh.dp_shard),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard"),
    )
    sharder = Sharder(_data_mesh(plan, mesh), plan.precision)
    template = _StateTemplate(model, plan, graph)
    engine: Engine
    if graph.fallbacks:
        engine = FallbackEngine(plan, model, loss_fn, sharder=sharder, device=device)
    else:
        tensors = _take(model, plan, graph, mesh["pp"].get_local_rank(), device, wrapped=sharder.mesh is not None)
        engine = GraphEngine(plan, graph, tensors, mesh=mesh, sharder=sharder, device=device)
        del tensors
        _release(model, engine, graph)
    return Trainer(
        plan,
        engine,
        mesh=mesh,
        device=device,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        template=template,
    )


def _check_plan(plan: Plan, graph: Graph) -> None:
    """Refuse what cannot be run as stated."""
    if graph.fingerprint != plan.graph_fingerprint:
        raise PlanError(
            f"the plan was made for another model, batch or precision ({plan.model}, graph "
            f"{plan.graph_fingerprint[:12]}; this one is {graph.name}, {graph.fingerprint[:12]}); "
            "plan again"
        )
    mesh = plan.mesh
    if mesh.tp > 1 or mesh.cp > 1 or mesh.ep > 1:
        raise PlanError(
            f"the plan uses tp={mesh.tp}, cp={mesh.cp}, ep={mesh.ep}, which the runtime does not "
            "have yet; plan with tp=1"
        )
    if mesh.dp_replicate > 1 and mesh.dp_shard > 1:
        raise PlanError(
            f"the plan has dp_replicate={mesh.dp_replicate} and dp_shard={mesh.dp_shard}, a mix "
            "that the runtime does not have yet; plan with one of them 1"
        )
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
    if 0 in zeros and (max(zeros) > 0 or mesh.dp_shard > 1):
        raise PlanError(
            f"ZeRO-0 blocks use dp_replicate and all blocks or none; the plan has dp_replicate="
            f"{mesh.dp_replicate}, dp_shard={mesh.dp_shard} and ZeRO stages {sorted(set(zeros))}"
        )
    if 0 not in zeros and mesh.dp_replicate > 1:
        raise PlanError(f"ZeRO stages {sorted(set(zeros))} use dp_shard, the plan has dp_replicate={mesh.dp_replicate}")
    if graph.fallbacks:
        if mesh.pp > 1 or any(b.recompute != "none" for b in plan.stages[0].blocks):
            raise PlanError(f"{graph.fallbacks[0]}; without a graph a plan has no pipeline and no recomputation")
        return
    if mesh.pp > 1 and graph.reads_updates:
        raise PlanError(
            f"{graph.reads_updates} reads a buffer that forward updates, which a pipeline would change before the "
            "backward pass; plan with pp=1"
        )
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


def _check_materialised(model: nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise PlanError(
                    f"{kind} {name} is on meta and has no value; build the model on the CPU from "
                    "one seed on every rank, or load its weights, before apply"
                )


def _start(plan: Plan) -> torch.device:
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
    if torch.cuda.is_available() and "nccl" in dist.get_backend():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
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


def _check_equal_everywhere(model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers differ between ranks."""
    if dist.get_world_size() == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    digests = [(name, _digest(tensor)) for name, tensor in named]
    everything = hashlib.sha256(repr(digests).encode()).hexdigest()
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, everything)
    if len(set(totals)) == 1:
        return
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, digests)
    for rank, other in enumerate(lists):
        for (name, one), (other_name, two) in zip(lists[0], other, strict=False):
            if (name, one) != (other_name, two):
                raise PlanError(
                    f"{name} of rank 0 and {other_name} of rank {rank} differ; build the model "
                    "from the same seed, or load the same weights, on every rank"
                )
    raise PlanError("the ranks have models with different numbers of parameters")


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(plain.shape)} {plain.dtype}".encode())
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_parameters(model: nn.Module, graph: Graph) -> None:
    """Refuse a model that is not the traced one."""
    found = dict[str, torch.Tensor](model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
    for tensor in graph.tensors:
        if tensor.kind not in ("parameter", "buffer"):
            continue
        if tensor.name not in found:
            raise PlanError(f"the model has no {tensor.kind} {tensor.name}, the traced one has")
        shape = tuple(found[tensor.name].shape)
        if shape != tensor.shape:
            raise PlanError(f"{tensor.name} has shape {list(shape)}, in the traced model {list(tensor.shape)}")
        if tensor.kind == "parameter" and found[tensor.name].requires_grad != tensor.requires_grad:
            raise PlanError(
                f"{tensor.name} is {'trained' if tensor.requires_grad else 'frozen'} in the traced "
                "model and not in this one; trace again"
            )


def _data_mesh(plan: Plan, mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis that ZeRO works on; none where one data rank needs no wrapper.

    One data rank in bf16 is wrapped as well: mixed precision is the wrapper's.
    """
    if plan.mesh.dp == 1 and plan.precision != "bf16":
        return None
    is_replicated = plan.stages[0].blocks[0].zero == 0
    return mesh["dp_replicate"] if is_replicated else mesh["dp_shard"]


def _take(
    model: nn.Module, plan: Plan, graph: Graph, index: int, device: torch.device, *, wrapped: bool
) -> dict[int, torch.Tensor]:
    """Parameters of this rank's stage, and all buffers, on `device`.

    The same objects where device, dtype and layout are right already.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    dtype = master_dtype(plan.precision)
    mine = {
        t for p in stage_positions(plan)[index] for t in graph.blocks[p].parameters
    }  # fmt: skip
    result: dict[int, torch.Tensor] = {}
    for tensor, described in enumerate(graph.tensors):
        if described.kind == "parameter" and tensor in mine:
            result[tensor] = _as_stored(parameters[described.name], dtype, device, wrapped=wrapped)
        elif described.kind == "buffer":
            result[tensor] = buffers[described.name].to(device)
    return result


def _as_stored(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device, *, wrapped: bool) -> nn.Parameter:
    """A parameter as the optimizer sees it: master dtype, this device.

    FSDP wants it contiguous and with at least one dim; the blocks read a stored scalar as one.
    """
    value = parameter.detach().to(device, dtype if parameter.is_floating_point() else parameter.dtype)
    if wrapped:
        value = value.contiguous().reshape(value.shape or (1,))
    same = value.data_ptr() == parameter.data_ptr() and value.shape == parameter.shape
    if same and value.dtype == parameter.dtype and value.stride() == parameter.stride():
        return parameter
    return nn.Parameter(value, parameter.requires_grad)


def _release(model: nn.Module, engine: Engine, graph: Graph) -> None:
    """Put parameters that this rank does not train as they are on meta, to free their memory.

    Those that nothing reads stay: no block owns them.
    """
    kept = {id(owned.parameter) for owned in engine.owned}
    kept |= {id(p) for n, p in model.named_parameters() if n in graph.unused_parameters}
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in kept:
                continue
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            module._parameters[leaf] = memo[id(parameter)]


class _StateTemplate:
    """What the plain model's `state_dict` has: its keys, and where each value is now."""

    def __init__(self, model: nn.Module, plan: Plan, graph: Graph) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        buffers = {id(b): name for name, b in model.named_buffers()}
        self._dtype = master_dtype(plan.precision)
        self._keys: list[tuple[str, str, Any]] = []  # key, name of the parameter or buffer, value
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._kinds = {name: self._dtype if p.is_floating_point() else p.dtype for name, p in model.named_parameters()}
        readers = stages_of_parameters(plan, graph)
        self._stage_of = {graph.tensors[t].name: stages[0] for t, stages in readers.items()}
        if graph.fallbacks:
            self._stage_of = dict.fromkeys(self._shapes, 0)
        self._written: dict[str, int] = {}  # buffer -> stage that updates it
        for stage, positions in enumerate(stage_positions(plan)):
            for position in positions:
                for node in graph.blocks[position].nodes:
                    for tensor in graph.nodes[node].mutates:
                        if graph.tensors[tensor].kind == "buffer":
                            self._written[graph.tensors[tensor].name] = stage
        self._unused: dict[str, torch.Tensor] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            name = names.get(id(value), buffers.get(id(value), ""))
            if id(value) in names:
                if name not in self._stage_of:
                    self._unused[name] = value.detach().cpu().clone()
                value = None
            self._keys.append((key, name, value))

    def fill(self, pp_group: dist.ProcessGroup, engine: Engine, device: torch.device) -> dict[str, Any]:
        """The state dict; collective."""
        owned = {o.name: o for o in engine.owned}
        me, stages = dist.get_rank(pp_group), dist.get_world_size(pp_group)

        def exchanged(value: torch.Tensor, stage: int) -> torch.Tensor:
            if stages > 1:
                dist.broadcast(value, dist.get_global_rank(pp_group, stage), group=pp_group)
            return value.cpu()

        values: dict[str, torch.Tensor] = dict(self._unused)
        for name, stage in self._stage_of.items():
            value = (
                whole(owned[name].parameter).reshape(self._shapes[name]).contiguous()
                if me == stage
                else torch.empty(self._shapes[name], dtype=self._kinds[name], device=device)
            )
            values[name] = exchanged(value, stage)
        current = engine.buffers()
        values.update(current)
        for _, name, value in self._keys:
            if name in self._written:
                stage = self._written[name]
                mine = current[name] if me == stage else torch.empty_like(value, device=device)
                values[name] = exchanged(mine.detach().contiguous(), stage)
        return {key: _plain(values.get(name, value)) for key, name, value in self._keys}


def _plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _default_optimizer(name: str) -> Optimizer:
    """The optimizer that a plan names, with torch's defaults."""
    makers: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    }
    if name not in makers:
        raise PlanError(f"the plan's optimizer is {name!r}; give optimizer= or one of {sorted(makers)}")
    make = makers[name]
    return lambda named: make([parameter for _, parameter in named])
