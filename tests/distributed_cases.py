"""What the ranks of the runtime's tests run, and how the results are compared."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import PlanError, RunError
from planner.graph import Batch, Graph
from planner.plan import BlockPlan, InputSpec, Mesh, Plan, Prediction, ShardingPlan, StagePlan
from planner.runtime import Trainer, apply, apply_plan
from planner.runtime.execute import GraphEngine, stage_positions
from planner.shard.localize import localize
from planner.shard.placement import Sharding, is_floating, split
from planner.shard.program import Prices, resharded, variants
from planner.shard.spread import spread_experts
from planner.shard.stored import stored
from planner.trace import trace
from tests import models
from tests.distributed_references import MAX_GRAD_NORM, SAMPLES, STEPS
from tests.eager_oracle import Reference
from tests.float64 import explicit_float32_as_float64
from tests.ranks import fsdp_groups
from tests.sharded import Chance

TOLERANCE = 1e-9

# Attention is blind to a shift of all keys, so a key's bias has a zero gradient: what is there is rounding noise, which
# Adam blows up to full steps. The part of the bias that is not compared, per model.
ZERO_GRADIENTS = {
    "gpt": (r"attention\.qkv\.bias$", slice(16, 32)),
    "gpt-tied": (r"attention\.qkv\.bias$", slice(16, 32)),
    "bert": (r"attention\.key\.bias$", slice(None)),
    "vit": (r"attention\.qkv\.bias$", slice(16, 32)),
    "hf-gpt2": (r"attn\.c_attn\.bias$", slice(16, 32)),
    "hf-bert": (r"attention\.self\.key\.bias$", slice(None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to train, for a model with any number of blocks."""

    name: str
    pp: int = 1
    dp: int = 1
    shards: int = 0  # of `dp`, dp_shard; 0: 1 for ZeRO-0, else all
    zero: Sequence[int] = (0,)  # repeated over the blocks
    recompute: Sequence[Literal["none", "full"]] = ("none",)  # repeated over the blocks
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    sizes: Sequence[int] = ()  # blocks of all stages but the longest, which takes the rest; empty: about equal
    longest: int = 0
    tp: int = 1
    cp: int = 1  # these ranks shard parameters, so ZeRO-0 is not for them
    ep: int = 1  # of `shards`
    variant: str = "fast"  # of those that are found for tp or cp; the last one if there is none of the name

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp * self.cp


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="one device"),
        Kind(name="one device, recompute", recompute=("full",)),
        Kind(name="ZeRO-0", dp=2),
        Kind(name="ZeRO-1", dp=2, zero=(1,)),
        Kind(name="ZeRO-2", dp=2, zero=(2,)),
        Kind(name="ZeRO-3", dp=2, zero=(3,)),
        Kind(name="ZeRO-3, recompute", dp=2, zero=(3,), recompute=("full",)),
        Kind(name="ZeRO-0, recompute", dp=2, recompute=("none", "full")),
        Kind(name="ZeRO 1/3/2 mixed", dp=2, zero=(1, 3, 2), recompute=("none", "full")),
        Kind(name="PP2 1F1B", pp=2),
        Kind(name="PP2 GPipe, recompute", pp=2, schedule="gpipe", recompute=("full",)),
        Kind(name="PP2 1F1B, uneven", pp=2, sizes=(1,), longest=1),
        Kind(name="ZeRO-1 on 4", dp=4, zero=(1,)),
        Kind(name="HSDP 2x2 ZeRO-1", dp=4, shards=2, zero=(1,)),
        Kind(name="HSDP 2x2 ZeRO-2, recompute", dp=4, shards=2, zero=(2,), recompute=("none", "full")),
        Kind(name="HSDP 2x2 ZeRO-3", dp=4, shards=2, zero=(3,)),
        Kind(name="HSDP 2x2 ZeRO 1/3/2 mixed, recompute", dp=4, shards=2, zero=(1, 3, 2), recompute=("full", "none")),
        Kind(name="PP4 GPipe", pp=4, schedule="gpipe"),
        Kind(name="PP4 1F1B, uneven, recompute", pp=4, sizes=(1, 1, 1), longest=2, recompute=("none", "full")),
        Kind(name="PP2xDP2 ZeRO-0", pp=2, dp=2),
        Kind(name="PP2xDP2 ZeRO-1", pp=2, dp=2, zero=(1,)),
        Kind(name="PP2xDP2 ZeRO-2", pp=2, dp=2, zero=(2,)),
        Kind(name="PP2xDP2 ZeRO-3", pp=2, dp=2, zero=(3,)),
        Kind(
            name="PP2xDP2 ZeRO 2/3 mixed, uneven, recompute", pp=2, dp=2, zero=(3, 2), sizes=(2,), longest=1,
            recompute=("full", "none"),
        ),
        Kind(name="PP2xDP2 GPipe ZeRO-1, recompute", pp=2, dp=2, zero=(1,), schedule="gpipe", recompute=("full",)),
        Kind(name="PP4xDP2 ZeRO-1", pp=4, dp=2, zero=(1,)),
        Kind(name="PP4xDP2 ZeRO-3", pp=4, dp=2, zero=(3,)),
        Kind(name="PP2xDP4 GPipe ZeRO-2", pp=2, dp=4, zero=(2,), schedule="gpipe"),
        Kind(name="PP2xHSDP 2x2 ZeRO-1", pp=2, dp=4, shards=2, zero=(1,)),
        Kind(name="PP2xHSDP 2x2 ZeRO-3", pp=2, dp=4, shards=2, zero=(3,)),
        Kind(name="TP2", tp=2),
        Kind(name="TP2 lean, recompute", tp=2, variant="lean", recompute=("full",)),
        Kind(name="TP4 leanest", tp=4, variant="leanest"),
        Kind(name="TP2xDP2 ZeRO-0", tp=2, dp=2, variant="leanest"),
        Kind(name="TP2xDP2 ZeRO-1", tp=2, dp=2, zero=(1,)),
        Kind(name="TP2xDP2 ZeRO-2", tp=2, dp=2, zero=(2,), variant="leanest"),
        Kind(name="TP2xDP2 ZeRO-3, recompute", tp=2, dp=2, zero=(3,), variant="leanest", recompute=("full", "none")),
        Kind(name="PP2xTP2 1F1B, recompute", pp=2, tp=2, variant="leanest", recompute=("none", "full")),
        Kind(name="PP2xTP2 GPipe", pp=2, tp=2, schedule="gpipe"),
        Kind(name="PP2xDP2xTP2 ZeRO-1", pp=2, dp=2, tp=2, zero=(1,), variant="sequence"),
        Kind(
            name="PP2xDP2xTP2 ZeRO-3, recompute", pp=2, dp=2, tp=2, zero=(3,), variant="sequence",
            recompute=("full", "none"),
        ),
        Kind(name="CP2", cp=2, zero=(1,)),
        Kind(name="CP2 lean, recompute", cp=2, zero=(3,), variant="lean", recompute=("full",)),
        Kind(name="CP4", cp=4, zero=(2,)),
        Kind(name="CP2xDP2 ZeRO-3", cp=2, dp=2, zero=(3,)),
        Kind(name="CP2xDP2 ZeRO-1 lean", cp=2, dp=2, zero=(1,), variant="lean"),
        Kind(name="HSDP 2x1xCP2 ZeRO 1/3/2 mixed", cp=2, dp=2, shards=1, zero=(1, 3, 2)),
        Kind(name="PP2xCP2 1F1B ZeRO-1, recompute", pp=2, cp=2, zero=(1,), recompute=("none", "full")),
        Kind(name="PP2xCP2 GPipe ZeRO-3 lean", pp=2, cp=2, zero=(3,), schedule="gpipe", variant="lean"),
        Kind(name="EP2 ZeRO-1", dp=2, ep=2, zero=(1,)),
        Kind(name="EP2 ZeRO-2, recompute", dp=2, ep=2, zero=(2,), recompute=("full",)),
        Kind(name="EP2 ZeRO-3, recompute", dp=2, ep=2, zero=(3,), recompute=("full", "none")),
        Kind(name="DP2xEP2 ZeRO-1", dp=4, ep=2, zero=(1,)),
        Kind(name="DP2xEP2 ZeRO-3, recompute", dp=4, ep=2, zero=(3,), recompute=("full", "none")),
        Kind(name="EP4 ZeRO-2", dp=4, ep=4, zero=(2,)),
        Kind(name="HSDP 2xEP2 ZeRO 1/3/2 mixed", dp=4, shards=2, ep=2, zero=(1, 3, 2), recompute=("none", "full")),
        Kind(name="PP2xEP2 1F1B ZeRO-1, recompute", pp=2, dp=2, ep=2, zero=(1,), recompute=("full", "none")),
        Kind(name="PP2xEP2 GPipe ZeRO-3", pp=2, dp=2, ep=2, zero=(3,), schedule="gpipe"),
        Kind(name="EP2xTP2 ZeRO-1", dp=2, ep=2, tp=2, zero=(1,)),
        Kind(name="EP2xTP2 ZeRO-3, recompute", dp=2, ep=2, tp=2, zero=(3,), variant="leanest", recompute=("full",)),
        Kind(name="HSDP 2x2xTP2 ZeRO 1/3/2 mixed", dp=4, shards=2, tp=2, zero=(1, 3, 2), variant="leanest"),
        Kind(name="CP2xTP2 ZeRO-1", cp=2, tp=2, zero=(1,)),
        Kind(name="CP2xTP2 ZeRO-2 lean, recompute", cp=2, tp=2, zero=(2,), variant="lean", recompute=("full", "none")),
        Kind(name="CP2xTP2 ZeRO-3 leanest", cp=2, tp=2, zero=(3,), variant="leanest"),
        Kind(name="CP2xTP2xDP2 ZeRO 1/3/2 mixed", cp=2, tp=2, dp=2, zero=(1, 3, 2), variant="leanest"),
        Kind(
            name="PP2xCP2xTP2 1F1B ZeRO-3, recompute", pp=2, cp=2, tp=2, zero=(3,), variant="leanest",
            recompute=("none", "full"),
        ),
        Kind(name="PP2xCP2xTP2 GPipe ZeRO-1", pp=2, cp=2, tp=2, zero=(1,), schedule="gpipe"),
    )
}  # fmt: skip
NUM_MICROBATCHES = 6  # not a power of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one rank saw in the steps of one case."""

    losses: list[float]
    norms: list[float]
    first_gradients: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)


def make_plan(
    graph: Graph,
    kind: Kind,
    *,
    global_batch: int = SAMPLES,
    num_microbatches: int = NUM_MICROBATCHES,
    precision: str = "fp64",
    optimizer: str = "adamw",
    **changes: Any,
) -> Plan:
    """A plan written by hand; `changes` replace fields at the end."""
    count = len(graph.blocks)
    sizes = [count // kind.pp + (i < count % kind.pp) for i in range(kind.pp)]
    if kind.sizes:
        sizes = [*kind.sizes]
        sizes.insert(kind.longest, count - sum(sizes))
    zeros = [kind.zero[i % len(kind.zero)] for i in range(count)]
    for _, readers in graph.tie_groups:
        for reader in readers:
            zeros[reader] = zeros[readers[0]]
    mesh = Mesh(cp=kind.cp, ep=kind.ep, tp=kind.tp)
    shardings: list[ShardingPlan] = []
    of_block: list[tuple[int, ...]] = [() for _ in graph.blocks]
    whole = graph
    for axis, degree in mesh.splits:
        if axis == "ep":
            made = spread_experts(whole, degree)
        else:
            made = found_shardings(whole, degree, kind.variant, whole_parameters=axis == "cp")
        distinct, indices = stored(made, axis)
        of_block = [(*before, len(shardings) + index) for before, index in zip(of_block, indices, strict=True)]
        shardings += distinct
        whole = localize(whole, made, degree, axis=axis).graph
    plans = [
        BlockPlan(
            name=block.name, zero=zeros[i], recompute=kind.recompute[i % len(kind.recompute)], shardings=of_block[i]
        )
        for i, block in enumerate(graph.blocks)
    ]  # fmt: skip
    starts = [sum(sizes[:i]) for i in range(kind.pp)]
    shards = kind.shards or (1 if kind.zero[0] == 0 else kind.dp)
    fields: dict[str, Any] = {
        "model": graph.name,
        "cluster": "test",
        "graph_fingerprint": graph.fingerprint,
        "cluster_fingerprint": "",
        "precision": precision,
        "optimizer": optimizer,
        "global_batch": global_batch,
        "micro_batch": global_batch // kind.dp // num_microbatches,
        "num_microbatches": num_microbatches,
        "schedule": kind.schedule,
        "mesh": Mesh(
            pp=kind.pp, dp_replicate=kind.dp // shards, dp_shard=shards // kind.ep, cp=kind.cp, ep=kind.ep, tp=kind.tp
        ),
        "shardings": tuple(shardings),
        "stages": tuple(
            StagePlan(blocks=tuple(plans[a : a + n])) for a, n in zip(starts, sizes, strict=True)
        ),
        "prediction": Prediction(
            step_seconds=1.0, bubble=0.0, peak_bytes=(0.0,) * kind.pp, capacity_bytes=1.0, gap=0.0, mfu=0.0
        ),
    }  # fmt: skip
    return Plan(**(fields | changes))


PRICES = Prices(  # of a machine that is slow enough for tiny models to be worth splitting
    flop_per_second=1e9, bytes_per_second=1e9, kernel_seconds=0.0,
    collective_seconds=lambda _, num_bytes: 1e-9 * num_bytes, micro_batch=2, num_microbatches=NUM_MICROBATCHES,
)  # fmt: skip


def found_shardings(graph: Graph, degree: int, name: str, *, whole_parameters: bool = False) -> tuple[Sharding, ...]:
    """One of the ways that are found to split the blocks of a graph.

    "sequence" splits parameters as the leanest way does, and `[samples, tokens, width]` between blocks by tokens where
    the degree divides them. "chance" is a way that nobody would choose, and all that passes between blocks is anyhow.
    """
    if name == "chance":
        return Chance(graph, degree, 0).shardings
    key = graph.fingerprint, degree, whole_parameters, name
    if key not in _FOUND:
        found = variants(graph, degree, PRICES, whole_parameters=whole_parameters)
        _FOUND.update({(*key[:3], variant.name): variant.shardings for variant in found})
        _FOUND[key] = next((variant for variant in found if variant.name == name), found[-1]).shardings
        if name == "sequence":
            _FOUND[key] = _by_tokens(graph, degree, _FOUND[key])
    return _FOUND[key]


def _by_tokens(graph: Graph, degree: int, shardings: Sequence[Sharding]) -> tuple[Sharding, ...]:
    stored_as = {
        graph.tensors[t].name: placement
        for block, sharding in zip(graph.blocks, shardings, strict=True)
        for t, placement in zip(
            (*block.parameters, *block.buffers), (*sharding.parameters, *sharding.buffers), strict=True
        )
    }
    shapes = {t: graph.tensors[t].shape for cut in graph.carried for t in cut if is_floating(graph.tensors[t])}
    by_tokens = {
        t: split(1, [shape[1]])
        for t, shape in shapes.items()
        if len(shape) == 3 and isinstance(shape[0], Batch) and isinstance(shape[1], int) and shape[1] % degree == 0
    }
    return resharded(graph, degree, PRICES, stored_as, by_tokens)


_FOUND: dict[tuple[str, int, bool, str], tuple[Sharding, ...]] = {}


@cache
def graph_of(model: str) -> Graph:
    """The trace of a test model in float64, once per process."""
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        graph = trace(
            models.build(model), models.batch(model, 4, step=0), precision="fp64", name=model, device_kind="cpu"
        )
    assert not graph.fallbacks, graph.fallbacks
    return graph


def build(model: str) -> torch.nn.Module:
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        return models.build(model)


def trainer_of(model: str, kind: Kind, optimizer: str = "sgd", **changes: Any) -> Trainer:
    graph = graph_of(model)
    return apply_plan(
        make_plan(graph, kind, **changes), build(model), graph=graph, optimizer=models.OPTIMIZERS[optimizer],
        max_grad_norm=MAX_GRAD_NORM,
    )  # fmt: skip


def own_part(batch: dict[str, Tensor], trainer: Trainer) -> dict[str, Tensor]:
    """This data rank's samples."""
    return {key: value.chunk(trainer.data_world)[trainer.data_rank] for key, value in batch.items()}


def train(model: str, kind_name: str, optimizer: str) -> Result:
    """Three steps on this rank."""
    kind = KINDS[kind_name]
    trainer = trainer_of(model, kind, optimizer)
    losses, norms = [], []
    for step, batch in enumerate(models.batches(model, SAMPLES, STEPS)):
        losses.append(trainer.step(own_part(batch, trainer)))
        norms.append(trainer.grad_norm)
        if step == 0:
            gradients = trainer.gradients()
    state = trainer.state_dict()
    fresh = build(model)
    fresh.load_state_dict(state, strict=True)
    return Result(losses=losses, norms=norms, first_gradients=gradients, state=state)


def relative(value: Tensor, expected: Tensor) -> float:
    """The error's norm over the expected norm."""
    scale = expected.double().norm().item()
    error: float = (value.double() - expected.double()).norm().item()
    return error / (scale or 1.0)


def compared(model: str, name: str, value: Tensor) -> Tensor:
    """The part of a parameter whose gradient is not zero by construction."""
    pattern, part = ZERO_GRADIENTS.get(model, ("(?!)", slice(None)))
    if re.search(pattern, name):
        value = value.clone()
        value[part] = 0
    return value


def worst_error(model: str, results: Sequence[Result], expected: Reference) -> tuple[float, str]:
    """The largest relative error of losses, norms, gradients, parameters and buffers on any rank, and where."""
    errors: list[tuple[float, str]] = []
    scale = min(1.0, MAX_GRAD_NORM / (expected.gradient_norms[0] + 1e-6))
    assert min(expected.gradient_norms) > MAX_GRAD_NORM, "clipping is not active"
    seen: set[str] = set()
    for rank, result in enumerate(results):
        for what, values, wanted in (
            ("loss", result.losses, expected.losses),
            ("norm", result.norms, expected.gradient_norms),
        ):
            errors += [(abs(v / w - 1), f"{what} of rank {rank}") for v, w in zip(values, wanted, strict=True)]
        for name, gradient in result.first_gradients.items():
            seen.add(name)
            wanted_gradient = compared(model, name, expected.first_gradients[name] * scale)
            errors.append((relative(compared(model, name, gradient), wanted_gradient), f"gradient of {name}"))
        for name, parameter in expected.parameters.items():
            wanted_parameter = compared(model, name, parameter)
            errors.append((relative(compared(model, name, result.state[name]), wanted_parameter), f"parameter {name}"))
        for name, buffer in expected.buffers.items():
            if name in result.state:
                errors.append((relative(result.state[name], buffer), f"buffer {name}"))
    assert seen == set(expected.first_gradients), seen ^ set(expected.first_gradients)
    return max(errors)


class Collectives(TorchDispatchMode):
    """Counts c10d operators (CommDebugMode fails on fx.GraphModule)."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("c10d.") and "wait" not in name:
            self.count[name.split(".")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def held(module: torch.nn.Module) -> dict[str, int]:
    """Bytes of the FSDP group of one module on this rank, every storage once."""
    seen: set[int] = set()

    def size(tensor: Any) -> int:
        if tensor is None:
            return 0
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        # The shards of a group's gradient are views of one reduce-scatter buffer.
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return int(storage.nbytes())

    result = dict.fromkeys(("p_shard", "p_full", "g_full", "g_shard"), 0)
    for group in fsdp_groups(module):
        for parameter in group.fsdp_params:
            result["p_shard"] += size(parameter._sharded_param_data)
            result["p_full"] += sum(size(t) for t in parameter.all_gather_outputs)
            unsharded = getattr(parameter, "_unsharded_param", None)
            result["g_full"] += size(unsharded.grad) if unsharded is not None else 0
            result["g_full"] += size(parameter.unsharded_accumulated_grad)
            result["g_shard"] += size(parameter.sharded_param.grad)
        # Hybrid sharding: what was reduce-scattered and not yet summed over the replicas.
        result["g_shard"] += size(getattr(group, "_partial_reduce_output", None))
    return result


def held_and_collectives(kind: Kind, precision: str, micro_batches: int) -> dict[str, Any]:
    """What each block of this rank holds between micro-batches and after the last, and what a step communicates."""
    graph = graph_of("gpt") if precision == "fp64" else bf16_graph()
    plan = make_plan(
        graph, kind, num_microbatches=micro_batches, global_batch=micro_batches * kind.dp, precision=precision
    )
    trainer = apply_plan(plan, models.build("gpt"), graph=graph)
    engine = trainer.engine
    moments: dict[str, list[dict[str, int]]] = {}
    passes = 0

    def note(moment: str) -> None:
        moments[moment] = [held(block) for block in engine.stage.blocks]  # type: ignore[attr-defined]

    def before_forward(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == micro_batches:  # on the last stage all others have had their backward pass
            note("between")

    after_backward = engine.after_backward

    def noted_after_backward() -> None:
        note("last")
        after_backward()
        note("after")

    def step(number: int) -> None:
        dtype = torch.float64 if precision == "fp64" else torch.bfloat16
        trainer.step(own_part(models.batch("gpt", plan.global_batch, step=number, dtype=dtype), trainer))

    step(0)
    engine.after_backward = noted_after_backward  # type: ignore[method-assign]
    engine.stage.register_forward_pre_hook(before_forward)  # type: ignore[attr-defined]
    with Collectives() as collectives:
        step(1)
    return {
        "moments": moments,
        "collectives": dict(collectives.count),
        "parameters": [
            [(graph.tensors[t].shape, graph.tensors[t].requires_grad) for t in graph.blocks[p].parameters]
            for p in stage_positions(plan)[dist.get_rank() // kind.dp]
        ],
        "zero": [b.zero for b in plan.stages[dist.get_rank() // kind.dp].blocks],
    }


@cache
def bf16_graph() -> Graph:
    return trace(models.build("gpt"), models.batch("gpt", 4, step=0), precision="bf16", name="gpt", device_kind="cpu")


class Doubling(torch.autograd.Function):
    """Identity whose backward is not; it is given a module, which no node of a graph can hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: torch.nn.Module) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return 2 * gradients[0], None


class Unusual(torch.nn.Module):
    """Layers in a list and a mean loss; with a Function, a hook on a parameter or activation, or by values of x."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.head = torch.nn.Linear(6, 3)
        if what == "containers":
            self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"only": layer}) for layer in self.layers)
        if what == "parameter hook":
            self.get_parameter("layers.1.weight").register_hook(lambda gradient: 3 * gradient)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.what == "skipped layers" and x[:, index].sum() < 0:
                continue  # not in all micro-batches, and in some steps in none
            if self.what in ("experts", "containers"):
                layer = layer["only"] if isinstance(layer, torch.nn.ModuleDict) else layer
                mine = x[:, index] > 0.5 * index
                x = x.clone()
                x[mine] = torch.tanh(layer(x[mine]))
                continue
            x = torch.tanh(layer(x))
            if self.what == "function":
                x = Doubling.apply(x, self)
            if self.what == "activation hook":
                x.register_hook(self.halved)  # a method: it could read anything of the module
        loss: Tensor = (self.head(x) - y).square().mean()
        if self.what == "gradient penalty":
            given = y.new_ones(len(y), 6).requires_grad_()
            inner = self.layers[1](torch.tanh(self.layers[0](given)))
            (slope,) = torch.autograd.grad(inner.sum(), given, create_graph=True)
            loss = loss + slope.square().mean()
        return loss

    def halved(self, gradient: Tensor) -> Tensor:
        return 0.5 * gradient


def unusual(what: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return Unusual(what).double()


def unusual_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(12, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(12, 3, generator=generator, dtype=torch.float64),
    }


def train_without_graph(what: str, zero: int, shards: int = 0) -> Result:
    model = unusual(what)
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    assert graph.fallbacks
    assert "distributed_cases.py:" in str(graph.fallbacks[0])
    kind = Kind(name="", dp=dist.get_world_size(), shards=shards, zero=(zero,))
    plan = make_plan(graph, kind, global_batch=12, num_microbatches=3)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd, max_grad_norm=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(trainer.step(own_part(unusual_batch(step), trainer)))
        norms.append(trainer.grad_norm)
        if step == 0:
            gradients = trainer.gradients()
    state = trainer.state_dict()
    unusual(what).load_state_dict(state, strict=True)
    return Result(losses=losses, norms=norms, first_gradients=gradients, state=state)


class Frozen(torch.nn.Module):
    """Five blocks in a row; some frozen, one without parameters, one parameter that nothing reads."""

    def __init__(self, frozen: Sequence[str]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.head = torch.nn.Linear(6, 3)
        self.gain = torch.nn.Parameter(torch.tensor(1.2))  # no dims, and read by every block
        self.temperature = torch.nn.Parameter(torch.tensor(0.7))
        self.spare = torch.nn.Parameter(torch.arange(3.0))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.scale * self.gain)
        loss: Tensor = (self.head(x) * self.temperature - y).square().mean()
        return loss


def frozen_model(frozen: Sequence[str]) -> torch.nn.Module:
    torch.manual_seed(5)
    return Frozen(frozen).double()


def train_frozen(kind: Kind, frozen: Sequence[str]) -> dict[str, Any]:
    """Three steps with a learning-rate schedule; beside it the eager module with the same micro-batches."""
    model = frozen_model(frozen)
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    plan = make_plan(graph, kind, global_batch=12, num_microbatches=3)
    given: list[str] = []

    def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        given.extend(name for name, _ in named)
        return models.sgd(named)

    trainer = apply_plan(plan, model, graph=graph, optimizer=optimizer, max_grad_norm=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in [trainer.optimizer] if o is not None]

    eager = frozen_model(frozen)
    eager_optimizer = models.sgd((n, p) for n, p in eager.named_parameters() if p.requires_grad)
    eager_scheduler = torch.optim.lr_scheduler.StepLR(eager_optimizer, 1, 0.5)
    losses, wanted_losses, norms, wanted_norms = [], [], [], []
    for step in range(STEPS):
        batch = unusual_batch(step)
        losses.append(trainer.step(own_part(batch, trainer)))
        norms.append(trainer.grad_norm)
        for scheduler in schedulers:
            scheduler.step()
        loss = eager(**batch)
        eager_optimizer.zero_grad()
        loss.backward()
        wanted_losses.append(loss.item())
        wanted_norms.append(torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1).item())
        eager_optimizer.step()
        eager_scheduler.step()
    state = trainer.state_dict()
    frozen_model(frozen).load_state_dict(state, strict=True)
    errors = [relative(state[name], value) for name, value in eager.state_dict().items()]
    errors += [abs(a / b - 1) for a, b in zip([*losses, *norms], [*wanted_losses, *wanted_norms], strict=True)]
    return {
        "given": given,
        "error": max(errors),
        "optimizer": trainer.optimizer is not None,
        "keys": list(state) == list(eager.state_dict()),
        "meta": sorted(n for n, p in model.named_parameters() if p.is_meta),
    }


def refusal(change: str) -> str:
    """The sentence with which a trainer of the test GPT on two ranks refuses."""
    graph, model = graph_of("gpt"), build("gpt")
    kind = Kind(name="", dp=2, zero=(1,))
    plan = make_plan(graph, kind)
    if change == "world":
        plan = make_plan(graph, Kind(name="", dp=4, zero=(1,)))
    if change == "fingerprint":
        plan = make_plan(graph, kind, graph_fingerprint="0" * 64)
    if change == "unequal" and dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("blocks.1.mlp.up.bias")[3] += 1e-3
    if change == "another model":
        model = build("gpt-tied")
    if change == "coupled":
        graph = replace(graph, couples_samples="model.py:7: it compares samples")
    if change == "tp":
        plan = make_plan(graph, kind, mesh=Mesh(dp_shard=1, tp=2))
    if change == "mixed":
        plan = make_plan(graph, Kind(name="", dp=2, zero=(0, 1)))
    if change == "batch":
        plan = make_plan(graph, kind, global_batch=25)
    if change == "class":
        plan = make_plan(graph, Kind(name="", pp=2, zero=(1, 2)))
    if change == "few micro-batches":
        plan = make_plan(graph, Kind(name="", pp=2), num_microbatches=1)
    if change == "precision":
        plan = make_plan(graph, kind, precision="fp32")
    if change == "another plan" and dist.get_rank() == 1:
        plan = make_plan(graph, Kind(name="", dp=2, zero=(2,)))
    try:
        apply_plan(plan, model, graph=graph)
    except PlanError as error:
        return str(error)
    return ""


def bad_batches() -> dict[str, str]:
    """What `step` says to batches that do not fit."""
    trainer = trainer_of("gpt", Kind(name="", dp=2, zero=(1,)))
    good = own_part(models.batch("gpt", SAMPLES, step=0), trainer)
    labels = good["labels"].clone()
    labels[:, 0] = -100
    uneven = labels.clone()
    if dist.get_rank() == 1:
        uneven[3, 1] = -100
    answers = {}
    for name, batch in {
        "missing": {"input_ids": good["input_ids"]},
        "unknown": {**good, "mask": good["labels"]},
        "samples": {**good, "input_ids": good["input_ids"][:-1]},
        "more": {k: v.repeat(2, 1) for k, v in good.items()},
        "shape": {**good, "labels": good["labels"][:, :-1]},
        "dims": {**good, "labels": good["labels"][:, 0]},
        "dtype": {**good, "labels": good["labels"].int()},
        "empty": {},
        "uneven": {**good, "labels": uneven},
        "even": {**good, "labels": labels},
    }.items():
        try:
            trainer.step(batch)
            answers[name] = ""
        except RunError as error:
            answers[name] = str(error)
    return answers


def schedule_order(schedule: str) -> list[str]:
    """The passes of this rank's stage in a step, as torch's schedule runs them: f0, b0, ..."""
    kind = Kind(name="", pp=dist.get_world_size(), schedule=schedule)  # type: ignore[arg-type]
    trainer = trainer_of("gpt", kind)
    trainer.step(models.batch("gpt", SAMPLES, step=0))
    (schedule_run,) = trainer.engine._schedules.values()  # type: ignore[attr-defined]
    stage = schedule_run._stage
    passes: list[str] = []
    for letter, attribute in (("f", "forward_one_chunk"), ("b", "backward_one_chunk")):
        run = getattr(stage, attribute)

        def noted(index: int, *args: Any, letter: str = letter, run: Any = run, **kw: Any) -> Any:
            passes.append(f"{letter}{index}")
            return run(index, *args, **kw)

        setattr(stage, attribute, noted)
    trainer.step(models.batch("gpt", SAMPLES, step=1))
    return passes


def failing_note(kind: Kind) -> str:
    """What the rank that fails on a token id out of range says."""
    trainer = trainer_of("gpt", kind)
    batch = own_part(models.batch("gpt", SAMPLES, step=0), trainer)
    batch["input_ids"] = batch["input_ids"] + models.VOCABULARY
    try:
        trainer.step(batch)
    except Exception as error:
        return "\n".join(getattr(error, "__notes__", []))
    return ""


def low_precision(kind: Kind, precision: str) -> list[float]:
    """Losses of a gpt in bf16 or fp32 with the plan's own optimizer."""
    dtype = torch.float32
    model = models.build("gpt", dtype=dtype)
    graph = trace(
        model, models.batch("gpt", 4, step=0, dtype=dtype), precision=precision, name="gpt", device_kind="cpu"
    )
    plan = make_plan(graph, kind, precision=precision, optimizer="sgd")
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd)
    assert all(o.parameter.dtype == torch.float32 for o in trainer.engine.owned)
    return [trainer.step(own_part(batch, trainer)) for batch in models.batches("gpt", SAMPLES, STEPS, dtype=dtype)]


def apply_by_the_plan_alone() -> tuple[float, float]:
    """A step of `apply`, which traces from the plan's own description of a batch, and the eager loss."""
    model = frozen_model(())
    batch = unusual_batch(0)
    graph = trace(model, (batch["x"], batch["y"]), precision="fp64", device_kind="cpu")
    inputs = (InputSpec(name="0", shape=(-1, 6), dtype="float64"), InputSpec(name="1", shape=(-1, 3), dtype="float64"))
    plan = make_plan(graph, Kind(name="", dp=2, zero=(1,)), global_batch=12, num_microbatches=3, inputs=inputs)
    trainer = apply(plan, model)
    part = own_part(batch, trainer)
    return trainer.step((part["x"], part["y"])), frozen_model(())(**batch).item()


class Skipping(torch.nn.Module):
    """Later layers read what the first one made: a float with a gradient and a boolean without."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(6))
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.layers[0](x)
        positive, x = first > 0, torch.tanh(first)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) + 0.1 * first
        x = torch.where(positive, x, 2 * x)
        loss: Tensor = (self.head(x) - y).square().mean()
        return loss


def skipping() -> torch.nn.Module:
    torch.manual_seed(7)
    return Skipping().double()


def train_skipping(kind: Kind) -> tuple[float, list[list[str]]]:
    """The worst relative error of three steps beside the eager module, and what crosses each cut."""
    model, eager = skipping(), skipping()
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    trainer = apply_plan(
        make_plan(graph, kind, global_batch=12, num_microbatches=6 // kind.dp), model, graph=graph, optimizer=models.sgd
    )
    optimizer = models.sgd(eager.named_parameters())
    errors = []
    for step in range(STEPS):
        batch = unusual_batch(step)
        loss = trainer.step(own_part(batch, trainer))
        wanted = eager(**batch)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        errors.append(abs(loss / wanted.item() - 1))
    state = trainer.state_dict()
    errors += [relative(state[name], value) for name, value in eager.state_dict().items()]
    return max(errors), [[graph.tensors[t].dtype for t in cut] for cut in graph.carried]


def refused_cut(kind: Kind) -> str:
    """What a torch says that cannot send an integer from stage to stage."""
    graph = trace(skipping(), unusual_batch(0), precision="fp64", device_kind="cpu")
    plan = make_plan(graph, kind, global_batch=12, num_microbatches=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.runtime.execute.sends_integers", lambda: False)
        try:
            apply_plan(plan, skipping(), graph=graph)
        except PlanError as error:
            return str(error)
    return ""


class FailingSchedule:
    """Fails as torch's schedules do: the block's error is the cause of one that shows shapes."""

    def step(self, **_: Any) -> None:
        cause = IndexError("index out of range")
        cause.add_note("in block b, model.py:3 (operator aten.embedding.default)")
        raise RuntimeError("[Stage 0] failed to run forward") from cause


def note_of_a_failed_schedule() -> list[str]:
    trainer = trainer_of("gpt", Kind(name=""))
    engine = cast("GraphEngine", trainer.engine)
    engine.plan = replace(engine.plan, mesh=Mesh(pp=2))
    engine._make_schedule = lambda *_: FailingSchedule()  # type: ignore[method-assign,assignment]
    try:
        trainer.step(models.batch("gpt", SAMPLES, step=0))
    except RuntimeError as error:
        return list(error.__notes__)
    return []


class MaskedMean(torch.nn.Module):
    """A mean over unmasked samples, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The scalar loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.square().mean(1) * mask).sum() / mask.sum()


def masked_means() -> tuple[list[float], list[float]]:
    """Losses of batches with as many unmasked samples in each micro-batch and with others, and the eager losses."""
    batch = {"x": torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), "mask": torch.tensor([1.0, 0.0] * 6)}
    batch = {name: value.double() for name, value in batch.items()}
    model = MaskedMean().double()
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    plan = make_plan(graph, Kind(name="", dp=2, zero=(1,)), global_batch=12, num_microbatches=3)
    trainer = apply_plan(plan, model, graph=graph)
    losses = [trainer.forward_backward(own_part(batch, trainer))]
    eager = [MaskedMean().double()(**batch).item()]
    batch["mask"][:3] = 0.0
    losses.append(trainer.forward_backward(own_part(batch, trainer)))
    eager.append(MaskedMean().double()(**batch).item())
    return losses, eager


class Detached(torch.nn.Module):
    """A layer that the first stage trains and the last one only reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss."""
        first = cast("torch.nn.Linear", self.layers[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        z = torch.nn.functional.linear(x, first.weight.detach(), first.bias.detach())
        return (z - y).square().mean()


def detached_tie() -> tuple[list[float], list[float]]:
    """Losses of a pipeline and of one device."""
    generator = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(12, 6, generator=generator, dtype=torch.float64) for name in ("x", "y")}
    model, eager = Detached().double(), Detached().double()
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    assert graph.tie_groups
    plan = make_plan(graph, Kind(name="", pp=2), global_batch=12, num_microbatches=3)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd)
    optimizer = models.sgd(eager.named_parameters())
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = eager(**batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return [trainer.step(batch) for _ in range(3)], expected
