"""What the ranks of the tests of weights and initialisation run."""

import gc
import importlib
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.errors import PlannerError
from planner.runtime import apply, apply_plan
from planner.runtime.initialise import materialise
from planner.trace import trace
from tests import models
from tests.distributed_cases import (
    Kind,
    bf16_graph,
    frozen_model,
    graph_of,
    make_plan,
    own_part,
    relative,
    unusual_batch,
)
from tests.distributed_references import SAMPLES
from tests.float64 import explicit_float32_as_float64

SEED = 7


def on_meta(model: str) -> nn.Module:
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        return models.build(model, device="meta")


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def different(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names whose values are not the same bits."""
    assert list(state) == list(expected)
    return [name for name, value in expected.items() if not torch.equal(state[name], value)]


def drawn(model: str, kind: Kind, steps: int = 0) -> dict[str, Any]:
    """A trainer of a model on meta beside the same model materialised on one device."""
    graph = graph_of(model)
    trainer = apply_plan(
        make_plan(graph, kind), on_meta(model), graph=graph, optimizer=models.sgd, seed=SEED, check=False
    )
    one = materialise(on_meta(model), seed=SEED)
    wrong = different(trainer.state_dict(), state_of(one))
    errors = []
    optimizer = models.sgd(one.named_parameters())
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        for step in range(steps):
            batch = models.batch(model, SAMPLES, step=step)
            loss = trainer.step(own_part(batch, trainer))
            optimizer.zero_grad()
            wanted = one(**batch)
            wanted = getattr(wanted, "loss", wanted)
            wanted.backward()
            optimizer.step()
            errors.append(abs(loss / wanted.item() - 1))
    if steps:
        errors += [relative(value, one.state_dict()[name]) for name, value in trainer.state_dict().items()]
    return {"different": wrong, "error": max(errors, default=0.0)}


class Live(TorchDispatchMode):
    """Bytes of the storages on the CPU that operators made and that are alive: now, and at most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf._local_tensor if isinstance(leaf, DTensor) else leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if tensor.is_meta or key in self._known or not size or storage.filename is not None:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def shard_bytes(trainer: Any) -> int:
    """What this rank keeps of the parameters, as FSDP holds it: all shards as large as the first."""
    total = 0
    for owned in trainer.engine.owned:
        parameter = owned.parameter
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += local.nbytes
    return total


def held_while_starting(kind: Kind, weights: str | None) -> dict[str, int]:
    """The most bytes alive on this rank while a model on meta gets its values, beside what it keeps."""
    graph = graph_of("gpt")
    plan = make_plan(graph, kind)
    apply_plan(plan, on_meta("gpt"), graph=graph, weights=weights, check=False)  # what torch makes once
    gc.collect()
    with Live() as live:
        trainer = apply_plan(plan, on_meta("gpt"), graph=graph, weights=weights, check=False)
    model = models.build("gpt")
    return {
        "most": live.most,
        "shard": shard_bytes(trainer),
        "padded": sum(p.nbytes for p in (o.parameter for o in trainer.engine.owned)) // kind.dp,
        "largest tensor": max(p.nbytes for p in model.parameters()),
        "largest module": max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules()),
        "model": sum(p.nbytes for p in model.parameters()),
        "read": trainer.weight_bytes_read,
    }


def loaded(model: str, kind: Kind, weights: Any, *, real: bool = False, steps: int = 0) -> dict[str, Any]:
    """A trainer that reads `weights`, or the model's own state where that is None; what it has, and what it read."""
    graph = graph_of(model)
    module = on_meta(model)
    if real:
        module = materialise(on_meta(model), seed=99)
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        eager = models.build(model)
    trainer = apply_plan(
        make_plan(graph, kind), module, graph=graph, optimizer=models.sgd, check=False,
        weights=state_of(eager) if weights is None else weights,
    )  # fmt: skip
    errors = []
    wrong = different(trainer.state_dict(), state_of(eager))
    optimizer = models.sgd(eager.named_parameters())
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        for step in range(steps):
            batch = models.batch(model, SAMPLES, step=step)
            loss = trainer.step(own_part(batch, trainer))
            optimizer.zero_grad()
            wanted = eager(**batch)
            wanted = getattr(wanted, "loss", wanted)
            wanted.backward()
            optimizer.step()
            errors.append(abs(loss / wanted.item() - 1))
    return {
        "different": wrong,
        "read": trainer.weight_bytes_read,
        "own": shard_bytes(trainer),
        "error": max(errors, default=0.0),
    }


def sentence(make: Callable[..., nn.Module], arguments: Mapping[str, Any], kind: Kind) -> str:
    """With what `apply_plan` refuses `make()` and the arguments; "" if it does not. `{rank}` in weights is the rank."""
    graph = graph_of("gpt")
    given = dict(arguments)
    if isinstance(given.get("weights"), str):
        given["weights"] = given["weights"].replace("{rank}", os.environ.get("RANK", str(dist.get_rank())))
    try:
        apply_plan(make_plan(graph, kind), make(), graph=graph, check=False, **given)
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def meta_gpt() -> nn.Module:
    return on_meta("gpt")


class Scale(nn.LayerNorm):
    """A LayerNorm that nobody can initialise."""

    reset_parameters = None  # type: ignore[assignment]

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = (width,), 1e-5, True
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))


def gpt_with_a_norm_without_init() -> nn.Module:
    with torch.device("meta"):
        model = on_meta("gpt")
        cast("Any", model).norm = Scale(16).double()
    return model


def differently_initialised() -> nn.Module:
    """Ranks that hold other values of one parameter, the rest on meta."""
    model = on_meta("gpt")
    value = torch.full((16,), float(dist.get_rank()), dtype=torch.float64)
    cast("Any", model).norm.bias = nn.Parameter(value)
    return model


def saved(model: str, kind: Kind, folder: Path, max_shard_bytes: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Two steps, then the weights on disk; the state beside them, and what a second save to the same place says."""
    graph = graph_of(model)
    with explicit_float32_as_float64() if models.MODELS[model].needs_float64_mode else nullcontext():
        module = models.build(model)
    trainer = apply_plan(make_plan(graph, kind), module, graph=graph, optimizer=models.sgd, check=False)
    for step in range(2):
        trainer.step(own_part(models.batch(model, SAMPLES, step=step), trainer))
    gc.collect()
    with Live() as live:
        files = trainer.save_weights(folder, max_shard_bytes=max_shard_bytes, dtype=dtype)
    held = live.most
    state = trainer.state_dict(rank0_only=True)
    loss = trainer.step(own_part(models.batch(model, SAMPLES, step=9), trainer))
    try:
        trainer.save_weights(folder)
        again = ""
    except PlannerError as error:
        again = str(error)
    return {"files": [file.name for file in files], "state": state, "loss": loss, "again": again, "held": held}


def save_that_fails(folder: Path) -> str:
    """A disk that is full after some tensors, on the first rank only."""
    graph = graph_of("gpt")
    trainer = apply_plan(
        make_plan(graph, Kind(name="", dp=2, zero=(3,))), models.build("gpt"), graph=graph, check=False
    )
    if dist.get_rank() == 0:
        module: Any = importlib.import_module("planner.runtime.weights")

        real, count = module.raw, iter(range(100))

        def raw(value: Tensor) -> Any:
            if next(count) == 5:
                raise OSError(28, "No space left on device")
            return real(value)

        module.raw = raw
    try:
        trainer.save_weights(folder, max_shard_bytes=4000)
    except PlannerError as error:
        return str(error)
    finally:
        if dist.get_rank() == 0:
            module.raw = real
    return ""


def frozen_from_weights(kind: Kind, frozen: tuple[str, ...]) -> dict[str, Any]:
    """A parameter without dims, one that nothing reads, frozen ones, fewer rows than ranks: by `apply` alone."""
    model = frozen_model(frozen)
    state = state_of(model)
    state["gain"] = state["gain"].float()  # another dtype
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    trainer = apply(
        make_plan(graph, kind, global_batch=12, num_microbatches=3), frozen_model(frozen).to("meta"),
        batch=unusual_batch(0), optimizer=models.sgd, weights=state, init=_scratch, check=False,
    )  # fmt: skip
    model.load_state_dict(state)
    loss = trainer.step(own_part(unusual_batch(0), trainer))
    return {
        "error": abs(loss / model(**unusual_batch(0)).item() - 1),
        "keys": list(trainer.state_dict()) == list(state),
    }


def _scratch(module: nn.Module) -> None:
    if hasattr(module, "scratch"):
        cast("Tensor", module.scratch).fill_(1.0)


def low_precision_start(kind: Kind, weights: str) -> list[float]:
    """Two losses in bf16 from weights on disk, on fp32 masters."""
    graph = bf16_graph()
    trainer = apply_plan(
        make_plan(graph, kind, precision="bf16"), models.build("gpt", device="meta", dtype=torch.float32), graph=graph,
        optimizer=models.sgd, weights=weights, check=False,
    )  # fmt: skip
    assert all(o.parameter.dtype == torch.float32 for o in trainer.engine.owned)
    return [
        trainer.step(own_part(models.batch("gpt", SAMPLES, step=step, dtype=torch.bfloat16), trainer))
        for step in range(2)
    ]


class Stateful(nn.Module):
    """No graph: forward branches on a value. A buffer, and a layer that is used under two names."""

    def __init__(self, *, attribute: bool = False) -> None:
        super().__init__()
        if attribute:
            self.shift = torch.ones(6)
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6), self.first])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 1e9:
                x = x * 2
        loss: Tensor = (self.head(self.first(x)) - y).square().mean()
        return loss


def lost_attribute() -> str:
    """What is said to a tensor on meta that is a plain attribute."""
    with torch.device("meta"):
        model = Stateful(attribute=True).double()
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    try:
        apply_plan(make_plan(graph, Kind(name=""), global_batch=12, num_microbatches=1), model, graph=graph)
    except PlannerError as error:
        return str(error)
    return ""


def without_graph(kind: Kind, given: bool) -> dict[str, Any]:
    """A model that has no graph, on meta, drawn or from its state."""
    with torch.device("meta"):
        model, one = Stateful().double(), Stateful().double()
    materialise(one, seed=SEED)
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    assert graph.fallbacks
    plan = make_plan(graph, kind, global_batch=12, num_microbatches=1)
    trainer = apply_plan(
        plan, model, graph=graph, optimizer=models.sgd, seed=SEED, weights=state_of(one) if given else None, check=False
    )
    wrong = different(trainer.state_dict(), state_of(one))
    loss = trainer.step(own_part(unusual_batch(0), trainer))
    parts = [{k: v.chunk(kind.dp)[i] for k, v in unusual_batch(0).items()} for i in range(kind.dp)]
    wanted = sum(one(**part).item() for part in parts) / kind.dp
    return {"different": wrong, "error": abs(loss / wanted - 1)}
