"""What real modules do: each of these trains as the eager module does, or is refused with the user's line."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, register_flop_formula

from planner import ranked_plans
from planner.runtime import apply_plan
from planner.trace import scalar_loss, trace
from planner.trace.batch import call
from tests import models
from tests.distributed_cases import Kind, make_plan, own_part
from tests.ranks import RankPool
from tests.test_trace import assert_equals_eager, run_by_blocks

HERE = Path(__file__).name
WIDTH, CLASSES, SAMPLES, STEPS, MICRO_BATCHES = 6, 5, 8, 2, 2
KINDS = {
    "dp2": Kind(name="dp2", dp=2, zero=(3,), recompute=("none", "full")),
    "pp2": Kind(name="pp2", pp=2, recompute=("full", "none")),
}


class Stack(nn.Module):
    """Four layers, a head, a mean loss; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for index, layer in enumerate(self.layers):
            x = self.between(torch.tanh(layer(x)), index)
        return self.end(self.head(x), y)

    def between(self, x: Tensor, index: int) -> Tensor:
        return x

    def end(self, z: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(z, y)


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


class GradientReversal(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        return _Reversal.apply(x, 0.3) if index == 1 else x


class _Rounded(torch.autograd.Function):
    """In the newer style, with a second output that has no gradient."""

    @staticmethod
    def forward(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        return torch.round(x * levels) / levels, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 0.9), None


class StraightThrough(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        rounded, is_positive = _Rounded.apply(x, 7)
        return rounded * is_positive + 0.1 * x  # type: ignore[no-any-return]


class TensorHook(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        doubled = 2 * x  # reads x before the hook is set: its gradient goes through the hook as well
        x.register_hook(lambda gradient: 0.5 * gradient)
        x.register_hook(lambda gradient: None)
        return x + 0.1 * doubled


class WeightNorm(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index in (1, 3):
            nn.utils.parametrizations.weight_norm(self.layers[index])


class InPlaceResidual(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        y = x * 0.5
        y += torch.sin(x)
        return y.mul_(1.5)


class SharedModule(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        return torch.tanh(self.layers[0](x)) if index == 2 else x


class DataDependentLoop(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        for _ in range(int(x.abs().max() * 3)):
            x = 0.9 * x
        return x


class BufferCounter(Stack):
    """Counts its calls, and reads the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, x: Tensor, index: int) -> Tensor:
        if index == 1:
            self.calls = self.calls + 1
            x = x * (1 + 0.1 * self.calls)
        return x


class FrozenHalf(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index in (0, 1):
            self.layers[index].requires_grad_(False)


class LoRA(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(WIDTH, 2) for _ in range(4))
        self.up = nn.ParameterList(0.1 * torch.randn(2, WIDTH) for _ in range(4))

    def between(self, x: Tensor, index: int) -> Tensor:
        low: Tensor = x @ self.down[index]
        changed: Tensor = x + low @ self.up[index]
        return changed


class IgnoredLabels(Stack):
    def end(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, ignore_index=-100)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


class DataclassOutput(Stack):
    def end(self, z: Tensor, y: Tensor) -> Output:
        return Output(loss=F.cross_entropy(z, y))


def plain_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64),
        "y": torch.randint(CLASSES, (SAMPLES,), generator=generator),
    }


def ragged_batch(step: int) -> dict[str, Tensor]:
    """Labels of which micro-batches have unequal counts."""
    batch = plain_batch(step)
    batch["y"][[0, 1, 5]] = -100
    return batch


@dataclass(frozen=True)
class Case:
    """`reason` why there is no graph ("" = there is one); `whole` if one whole batch is the reference."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]] = plain_batch
    reason: str = ""
    whole: bool = False
    kinds: tuple[str, ...] = ("dp2", "pp2")
    ops: frozenset[str] = field(default_factory=frozenset)


CASES = {
    "gradient reversal": Case(GradientReversal, ops=frozenset({"planner.opaque.default"})),
    "straight through": Case(StraightThrough, ops=frozenset({"planner.opaque.default"})),
    "tensor hook": Case(TensorHook, ops=frozenset({"planner.hooked.default"})),
    "weight norm": Case(WeightNorm),
    "in-place residual": Case(InPlaceResidual, ops=frozenset({"aten.add_.Tensor"})),
    "shared module": Case(SharedModule),
    "data-dependent loop": Case(DataDependentLoop, reason="into a Python number", kinds=("dp2",)),
    # On two data-parallel ranks each counts its own calls, which a note of the plan says.
    "buffer counter": Case(BufferCounter, kinds=("pp2",), ops=frozenset({"aten.copy_.default"})),
    "frozen half": Case(FrozenHalf),
    "LoRA": Case(LoRA),
    "ignored labels": Case(IgnoredLabels, ragged_batch, whole=True),
    "dataclass output": Case(DataclassOutput),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return CASES[name].build().double()


@pytest.mark.parametrize("name", CASES)
def test_a_nasty_module_has_the_eager_loss_and_gradients_or_names_its_line(name: str) -> None:
    case, model = CASES[name], build(name)

    graph = trace(model, case.batch(0), precision="fp64", device_kind="cpu")

    if case.reason:
        assert case.reason in graph.fallbacks[0].reason
        assert HERE in graph.fallbacks[0].source
        return
    assert not graph.fallbacks
    assert case.ops <= {node.op for node in graph.nodes}
    assert_equals_eager(graph, model, case.batch(1))


def eager(name: str, chunks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of one device."""
    case, model = CASES[name], build(name)
    optimizer = models.sgd(model.named_parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        batch = case.batch(step)
        for index in range(chunks):
            part = {key: value.chunk(chunks)[index] for key, value in batch.items()}
            loss = scalar_loss(call(model, part), part, None) / chunks
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


def train(name: str, kind_name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same on this rank by a plan."""
    case, model, kind = CASES[name], build(name), KINDS[kind_name]
    graph = trace(model, case.batch(0), precision="fp64", device_kind="cpu")
    if graph.fallbacks:
        kind = Kind(name="", dp=2, zero=(3,))
    plan = make_plan(graph, kind, global_batch=SAMPLES, num_microbatches=MICRO_BATCHES)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd)
    losses = [trainer.step(own_part(case.batch(step), trainer)) for step in range(STEPS)]
    return losses, trainer.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, case in CASES.items() for kind in case.kinds])
def test_a_nasty_module_trains_on_two_ranks_as_on_one_device(two: RankPool, name: str, kind: str) -> None:
    chunks = 1 if CASES[name].whole else MICRO_BATCHES * (2 if kind == "dp2" else 1)
    losses, state = eager(name, chunks)

    for found_losses, found_state in two.run(train, name, kind):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        assert found_state.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found_state[key], value, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


# --- more ways in which modules are parametrized, hooked and checkpointed -------------------------


class Parametrized(Stack):
    def __init__(self, how: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        how(self.layers[1])  # type: ignore[arg-type]


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        self.layers[1].register_forward_hook(lambda module, given, made: 2 * made)


class Checkpointed(Stack):
    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(self.inner, layer, x, use_reentrant=self.is_reentrant)
        return self.end(self.head(x), y)

    def inner(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x))


class ReentrantAfterLayer(Checkpointed):
    """A reentrant checkpoint gives no gradient to the layers of the first, whose arguments need none."""

    def __init__(self) -> None:
        super().__init__(is_reentrant=True)


class AuxiliaryLoss(Stack):
    """Set on a module in forward and read after it."""

    penalty: Tensor

    def between(self, x: Tensor, index: int) -> Tensor:
        self.penalty = x.square().mean()
        return x

    def end(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + self.penalty


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: Parametrized(nn.utils.parametrizations.spectral_norm),
    "orthogonal": lambda: Parametrized(nn.utils.parametrizations.orthogonal),
    "own parametrization": lambda: Parametrized(
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    ),
    "old spectral norm": lambda: Parametrized(nn.utils.spectral_norm),
    "forward hooks": Hooked,
    "checkpoint": lambda: Checkpointed(is_reentrant=False),
    "reentrant checkpoint": ReentrantAfterLayer,
    "auxiliary loss": AuxiliaryLoss,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_eager_loss_and_gradients(name: str) -> None:
    torch.manual_seed(1)
    model = VARIANTS[name]().double()

    graph = trace(model, plain_batch(0), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks
    assert_equals_eager(graph, model, plain_batch(1))


@pytest.mark.filterwarnings("ignore")
def test_weight_norm_of_the_older_style_has_a_graph() -> None:
    """Such a module cannot be copied after it has run, so it is compared with one that is made the same way."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        return Parametrized(nn.utils.weight_norm).double()

    graph = trace(made(), plain_batch(0), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks
    assert {t.name for t in graph.tensors if t.kind == "parameter"} >= {"layers.1.weight_g", "layers.1.weight_v"}


def test_a_plan_says_that_it_does_not_run_the_checkpoints_of_the_model() -> None:
    torch.manual_seed(1)
    model = Checkpointed(is_reentrant=False)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in plain_batch(0).items()}

    plan = ranked_plans(model, "1x2xA100-80GB", batch=batch, global_batch=4, precision="fp32", top=1)[0]

    assert any(HERE in note and "own checkpoint is not run" in note for note in plan.notes)


# --- Functions ------------------------------------------------------------------------------------


class _ManyOutputs(torch.autograd.Function):
    """Returns a None and a number between tensors, one of which is an argument; looks at needs_input_grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
        ctx.save_for_backward(x, weight)
        ctx.scale = options["scale"]
        return x @ weight * ctx.scale, None, x, 3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, product: Tensor, _: Any, same: Tensor, __: Any) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return product @ weight.T + same if needed[0] else None, 5 * x.T @ product if needed[1] else None, None


class ManyOutputs(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.eye(WIDTH))

    def between(self, x: Tensor, index: int) -> Tensor:
        if index == 2:
            made, nothing, same, number = _ManyOutputs.apply(x, self.square, {"scale": 0.7, "name": "a"})
            assert nothing is None
            x = made + same / number
        return x


class InNoGrad(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            gate: Tensor = _Reversal.apply(x, 0.5)
        return x + 0.1 * gate


@pytest.mark.parametrize("kind", [ManyOutputs, InNoGrad])
def test_a_function_of_any_shape_is_called_as_it_is(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = kind().double()

    graph = trace(model, plain_batch(0), precision="fp64", device_kind="cpu")

    assert "planner.opaque.default" in {node.op for node in graph.nodes}
    assert_equals_eager(graph, model, plain_batch(1))


def test_a_plan_knows_other_code_of_a_function_by_its_fingerprint() -> None:
    def graph_with(factor: int, strength: float) -> Any:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
                return x * strength

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
                return gradients[0] * factor, None

        class Model(Stack):
            def between(self, x: Tensor, index: int) -> Tensor:
                return Scaled.apply(x, strength)  # type: ignore[no-any-return]

        return trace(Model(), {k: v.float() if v.is_floating_point() else v for k, v in plain_batch(0).items()})

    first = graph_with(2, 0.5)

    assert first.fingerprint == graph_with(2, 0.5).fingerprint
    assert first.fingerprint != graph_with(3, 0.5).fingerprint
    assert first.fingerprint != graph_with(2, 0.6).fingerprint
    assert "may mix samples" in first.not_separable


def test_a_size_of_the_batch_is_given_to_a_function_anew() -> None:
    class Averaged(Stack):
        def end(self, z: Tensor, y: Tensor) -> Tensor:
            (mean,) = _Averaged.apply(F.cross_entropy(z, y, reduction="sum"), y.shape[0])
            return mean  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model = Averaged().double()

    graph = trace(model, plain_batch(0), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks
    assert_equals_eager(graph, model, plain_batch(1))


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, size: int) -> tuple[Tensor]:
        ctx.size = size
        return (total / size,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.size, None


class _Sorted(torch.autograd.Function):
    """Its backward needs values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (2 if x.sum().item() > 0 else 3)


class Sorted(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        return _Sorted.apply(x)  # type: ignore[no-any-return]


def test_a_function_whose_backward_needs_values_is_priced_by_its_bytes() -> None:
    torch.manual_seed(1)
    model = Sorted().double()

    graph = trace(model, plain_batch(0), precision="fp64", device_kind="cuda")

    assert not graph.fallbacks
    assert_equals_eager(graph, model, plain_batch(1))
    assert sum(k.num_bytes.at(1) for c in graph.classes for k in c.kernels if k.op.startswith("aten.clone")) > 0


# --- buffers and attributes -----------------------------------------------------------------------


class Carried(Stack):
    """Reads what the forward before it left in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(WIDTH, dtype=torch.float64)

    def between(self, x: Tensor, index: int) -> Tensor:
        x = x + self.state
        self.state = x.detach().mean(0)
        return x


class Cached(Stack):
    """Builds a table once, of nothing but constants."""

    table: Tensor | None = None

    def between(self, x: Tensor, index: int) -> Tensor:
        if self.table is None:
            self.table = torch.arange(float(WIDTH), dtype=x.dtype)
        return x * self.table


def test_what_one_forward_leaves_to_the_next_outside_of_buffers_is_refused() -> None:
    graph = trace(Carried().double(), plain_batch(0), precision="fp64", device_kind="cpu")

    assert "reads the tensor attribute state" in graph.fallbacks[0].reason
    assert HERE in graph.fallbacks[0].source
    assert not trace(Cached().double(), plain_batch(0), precision="fp64", device_kind="cpu").fallbacks


def test_a_replaced_buffer_is_written_once_per_forward() -> None:
    model = build("buffer counter")
    reference = copy.deepcopy(model)
    graph = trace(model, plain_batch(0), precision="fp64", device_kind="cpu")

    assert graph.updates_statistics
    assert not graph.reads_updates  # forward reads a copy
    assert_equals_eager(graph, model, plain_batch(0))
    assert reference.get_buffer("calls") == 0


# --- autocast, operators of the user, batches -----------------------------------------------------


class Autocast(Stack):
    """Regions with a part in full precision inside, an attention, and a tensor cast on its way out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = self.norm(layer(x))
                with torch.autocast("cpu", enabled=False):
                    x = torch.tanh(x.float())
            heads = self.layers[0](x).view(-1, 2, 1, WIDTH // 2)
            x = F.scaled_dot_product_attention(heads, heads, heads).flatten(1) + x
            z = self.head(x)
        return F.cross_entropy(z.float(), y)


def test_autocast_becomes_casts_of_operands() -> None:
    torch.manual_seed(1)
    model = Autocast()
    batch = {k: v.float() if v.is_floating_point() else v for k, v in plain_batch(0).items()}

    graph = trace(model, batch, precision="fp32", device_kind="cpu")

    assert not graph.fallbacks
    assert {"bfloat16", "float32"} <= {t.dtype for t in graph.tensors if t.kind == "activation"}
    assert_equals_eager(graph, model, batch, limit=1e-2)  # eager adds the gradients of a weight used twice in bfloat16
    assert "autocast" in trace(model, batch, precision="fp32", device_kind="cuda").fallbacks[0].reason


@torch.library.custom_op("nasty::linear", mutates_args=())
def own_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


@own_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


own_linear.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[1], 3 * gradient.T @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class OwnOperator(Stack):
    def between(self, x: Tensor, index: int) -> Tensor:
        return own_linear(x, self.layers[index].weight)  # type: ignore[no-any-return]


def test_an_operator_of_the_user_is_priced_by_the_formula_that_torch_knows() -> None:
    torch.manual_seed(1)
    model = OwnOperator().double()
    plan = ranked_plans(model, "1xA100-80GB", batch=plain_batch(0), global_batch=4, precision="fp32")[0]
    assert any(
        "nasty.linear.default has no FLOP formula and is priced by its bytes alone" in note
        and "register_flop_formula(torch.ops.nasty.linear)" in note
        for note in plan.notes
    )

    @register_flop_formula(torch.ops.nasty.linear)
    def flop(x: Any, weight: Any, *_: Any, **__: Any) -> int:
        return int(2 * x[0] * x[1] * weight[0])

    try:
        graph = trace(model, plain_batch(0), precision="fp64", device_kind="cpu")
    finally:
        del flop_registry[torch.ops.nasty.linear]

    assert_equals_eager(graph, model, plain_batch(1))
    kernels = [k for c in graph.classes for k in c.kernels if k.op == "nasty.linear.default"]
    assert {k.flop.at(1) for k in kernels} == {2 * WIDTH * WIDTH}
    assert "nasty.linear.default may mix samples" in graph.not_separable


@dataclass
class Target:
    y: Tensor
    weights: Tensor | None = None


@dataclass
class Sample:
    x: Tensor
    target: Target
    factor: float = 1.0


class OfDataclass(Stack):
    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        for layer in self.layers:
            sample.x = torch.tanh(layer(sample.x)) * sample.factor
        z = self.head(sample.x)
        return F.cross_entropy(z, sample.target.y), z


def test_a_batch_may_be_a_dataclass_and_an_output_a_tuple() -> None:
    torch.manual_seed(1)
    model = OfDataclass().double()
    given = plain_batch(0)

    def sample() -> Sample:
        return Sample(given["x"], Target(given["y"]), factor=0.5)

    graph = trace(model, sample(), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks
    assert [graph.tensors[i].name for i in graph.inputs] == ["x", "target.y"]
    assert graph.settings == (("factor", "0.5"),)
    eager, _ = copy.deepcopy(model)(sample())
    assert run_by_blocks(graph, model, sample()).item() == pytest.approx(eager.item(), rel=1e-12)
