"""What has no graph says why, with the user's line, and comes back as modules to wrap; what does not fit is refused."""

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.errors import ModelError, TraceError
from planner.graph import Graph
from planner.trace import trace
from planner.trace.export import export
from planner.trace.prime import comes_from
from planner.trace.refusal import NoGraphError

HERE = Path(__file__).name
BATCH = {"x": torch.ones(4, 6), "y": torch.ones(4, 6)}


class _Double(torch.autograd.Function):
    """Given a module, which no node of a graph can hold."""

    @staticmethod
    def forward(ctx, x, owner):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * float(x.max())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


bound_before = _Double.apply  # as people write it: bound long before the model is traced


class Layered(nn.Module):
    """Three equal layers and a head; `forward` calls `unusual` once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 6)
        self.recurrent = nn.GRU(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (self.head(self.unusual(x)) - y).square().mean()

    def unusual(self, x: Tensor) -> Tensor:
        return x

    def halve(self, gradient: Tensor) -> Tensor:
        return gradient / 2


def variant(unusual) -> Any:
    return type("Variant", (Layered,), {"unusual": unusual})()


def function(self, x):
    return _Double.apply(x, self)


def function_bound(self, x):
    return bound_before(x, self)


def function_in_place(self, x):
    return _InPlace.apply(x * 1)


def function_of_values(self, x):
    return _Values.apply(x)


def function_over_tensor(self, x):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient * weight

    weight = self.head.weight.detach()[0]
    return Scaled.apply(x)


def tensor_hook_method(self, x):
    x.register_hook(self.halve)
    return x


def tensor_hook_of_batch(self, x):
    size = x.shape[0]
    x.register_hook(lambda gradient: gradient * size)
    return x


def tensor_hook_in_place(self, x):
    x = x * 2
    x.register_hook(lambda gradient: gradient / 2)
    return x.add_(1)


def tensor_hook_removed(self, x):
    handle = x.register_hook(lambda gradient: gradient / 2)
    handle.remove()
    return x


def hook_of_grad_fn(self, x):
    x.grad_fn.register_hook(lambda given, made: (given[0] / 2,))
    return x


def gradient_in_forward(self, x):
    (gradient,) = torch.autograd.grad(x.square().sum(), self.layers[0].weight, create_graph=True)
    return x + gradient.sum(0)


def sequence_first(self, x):
    return self.recurrent(x[:, None].expand(-1, 3, -1))[0].mean(1)


def tensor_of_batch(self, x):
    return x + torch.tensor(x.shape[0] * 1.0)


def einsum_under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.einsum("bi,ij->bj", x, self.head.weight).float()


def data_assigned(self, x):
    self.scale.data = self.scale * 0.5
    return x * self.scale


def numpy_values(self, x):
    return x * float(x.detach().numpy().max())


def branch(self, x):
    return x if x.sum() > 0 else -x


def item(self, x):
    return x * x.abs().max().item()


def boolean_mask(self, x):
    return x + x[x.sum(1) > 0].mean()


def autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layers[0](x).float()


def one_over_batch(self, x):
    return x * (1.0 / x.shape[0])


def root_of_batch(self, x):
    return x / x.shape[0] ** 0.5


def logarithm_of_batch(self, x):
    import math

    return x * math.log(x.shape[0])


def per_sample_loop(self, x):
    return torch.stack([row * 2 for row in x])


def with_parameter_hook() -> nn.Module:
    model = Layered()
    model.head.weight.register_hook(lambda gradient: gradient / 2)
    return model


def with_backward_hook() -> nn.Module:
    model = Layered()
    model.layers[1].register_full_backward_hook(lambda module, given, made: None)
    return model


WITHOUT_GRAPH = {  # what the model does: (the model, in the reason, in the cure, the file it names)
    "function": (lambda: variant(function), "autograd.Function _Double cannot be", "tensors and numbers only", HERE),
    "function-bound-before": (lambda: variant(function_bound), "autograd.Function _Double", "differentiable", HERE),
    "function-in-place": (lambda: variant(function_in_place), "it writes into an argument", "differentiable", HERE),
    "function-of-values": (lambda: variant(function_of_values), "tensors without values", "differentiable", HERE),
    "function-over-tensor": (lambda: variant(function_over_tensor), "closes over weight", "differentiable", HERE),
    "tensor-hook-method": (lambda: variant(tensor_hook_method), "hook is lost", "in forward", HERE),
    "tensor-hook-of-batch": (lambda: variant(tensor_hook_of_batch), "from the batch size", "in forward", HERE),
    "tensor-hook-in-place": (lambda: variant(tensor_hook_in_place), "written in place", "without operators in", HERE),
    "tensor-hook-removed": (lambda: variant(tensor_hook_removed), "forward removes it", "in forward", HERE),
    "hook-of-grad-fn": (lambda: variant(hook_of_grad_fn), "grad_fn is lost", "in forward", HERE),
    "gradient-in-forward": (lambda: variant(gradient_in_forward), "torch.autograd.grad", "with operators", HERE),
    "tensor-of-batch": (lambda: variant(tensor_of_batch), "made from the batch size", "torch.full", HERE),
    "data-assigned": (lambda: variant(data_assigned), ".data of a tensor", "in place", HERE),
    "parameter-hook": (with_parameter_hook, "hook on parameter head.weight", "in forward", HERE),
    "backward-hook": (with_backward_hook, "backward hook on module layers.1", "in forward", HERE),
    "branch": (lambda: variant(branch), "value of a tensor into a Python number", "independent of tensor values", HERE),
    "item": (lambda: variant(item), "", "", HERE),
    "boolean-mask": (lambda: variant(boolean_mask), "", "", HERE),
    "autocast": (lambda: variant(autocast), "autocast", "precision to the planner", HERE),
    "one-over-batch": (lambda: variant(one_over_batch), "made from the batch size", "mean", HERE),
    "root-of-batch": (lambda: variant(root_of_batch), "made from the batch size", "mean", HERE),
    "logarithm-of-batch": (lambda: variant(logarithm_of_batch), "made from the batch size", "mean", HERE),
}

# What export stops at may be a branch: it may call other modules in another batch, so that none is wrapped alone.
# Nor is one where forward runs a backward, which would free what was gathered for the outer one.
MAY_BRANCH = {"function-of-values", "branch", "gradient-in-forward"}


@pytest.mark.parametrize("case", WITHOUT_GRAPH)
def test_what_a_graph_would_lose_is_named_with_its_line_and_still_priced(case):
    make, reason, cure, file = WITHOUT_GRAPH[case]
    graph = trace(make(), BATCH)
    assert graph.fallbacks
    first = graph.fallbacks[0]
    assert reason in first.reason
    assert cure in first.cure
    assert Path(first.source.rpartition(":")[0]).name == file
    assert int(first.source.rpartition(":")[2]) > 0
    assert_wraps(graph, [] if case in MAY_BRANCH else ["layers.0", "layers.1", "layers.2"])


def assert_wraps(graph: Graph, modules: list[str]) -> None:
    assert [b.name for b in graph.blocks] == [*modules, ""]
    owned = [p for b in graph.blocks for p in b.parameters]
    assert sorted(owned) == [i for i, t in enumerate(graph.tensors) if t.kind == "parameter"]
    assert not graph.nodes
    for block in graph.blocks:
        kind = graph.classes[block.class_index]
        assert kind.flop("forward").at(1) > 0
        assert kind.flop("backward").at(1) > 0


def test_reasons_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        trace(variant(function), BATCH)
    assert "autograd.Function _Double" in caplog.text


def test_a_loop_over_the_samples_is_refused():
    graph = trace(variant(per_sample_loop), BATCH)
    assert "one by one" in graph.fallbacks[0].reason


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_has_a_graph_that_names_it(is_reentrant):
    def forward(self, x):
        return checkpoint(torch.relu, x, use_reentrant=is_reentrant)

    graph = trace(variant(forward), BATCH)

    assert not graph.fallbacks
    (line,) = graph.checkpoints
    assert HERE in line


@pytest.mark.parametrize("cut", ["halves", "view"])
def test_samples_that_are_not_treated_alike_couple_the_batch(cut):
    def forward(self, x):
        half = x.shape[0] // 2
        if cut == "view":
            return x.view(half, 2, 6).flip(1).reshape(x.shape)
        return torch.cat([x[half:], x[:half]])

    graph = trace(variant(forward), BATCH)
    assert graph.fallbacks
    assert HERE in graph.couples_samples


def test_values_taken_out_of_torch_are_named(caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(TraceError, match="numpy"):
        trace(variant(numpy_values), BATCH)
    assert "forward takes the values out of a tensor" in caplog.text
    assert HERE in caplog.text


def test_a_recurrence_over_the_samples_is_refused():
    with pytest.raises(
        NoGraphError, match="takes dim 0 of its input, which is the samples of the batch, for time"
    ) as e:
        export(variant(sequence_first), BATCH, torch.float32, None)
    assert "batch_first=True" in str(e.value)
    assert HERE in e.value.couples_samples


def test_autocast_that_no_casts_of_operands_stand_for_is_refused():
    graph = trace(variant(einsum_under_autocast), BATCH, device_kind="cpu")

    assert "casts inside" in graph.fallbacks[0].reason
    assert HERE in graph.fallbacks[0].source


def test_a_loss_that_computes_with_the_number_of_samples_is_no_mean_of_its_parts():
    graph = trace(variant(lambda self, x: x + x.shape[0]), BATCH)

    assert "computes with the number of samples" in graph.not_separable


def test_writing_into_the_batch_is_refused():
    def forward(self, x):
        return x

    class Writes(Layered):
        def forward(self, x, y):
            y.add_(1)
            return super().forward(x, y)

    graph = trace(Writes(), BATCH)
    assert "into the input y in place" in graph.fallbacks[0].reason


def test_numbers_made_from_the_batch_are_told_from_others():
    made = [1 / 1009, 0.5 / 1009, 1009**0.5, 1009**-0.5, 1 / (1009 * 4096), 3 * 1009.0]
    others = [0.1, 1e-5, 1e-6, 1e-12, 0.7978845608028654, 0.044715, 0.125, 80**-0.5, 500000.0, 1.702, 3.4028234e38]
    assert all(comes_from(number, 1009) for number in made)
    assert not any(comes_from(number, 1009) for number in others)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), labels.flatten())


TOKENS = torch.zeros(4, 5, dtype=torch.int64)


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Keyed(nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x), "total": x.mean()}


MISFITS = {
    "missing": (Classifier, {"tokens": TOKENS}, ["tokens: int64 [4, 5]", "labels", "forward takes"]),
    "unexpected": (
        Classifier,
        {"tokens": TOKENS, "labels": TOKENS, "extra": TOKENS},
        ["extra", "forward takes", "give one"],
    ),
    "more": (lambda: nn.Linear(6, 6), (torch.ones(4, 6), TOKENS[:, :1]), ["positional", "give one"]),
    "dtype": (Classifier, {"tokens": TOKENS.float(), "labels": TOKENS}, [HERE, "Long, Int", "tokens: float32 [4, 5]"]),
    "length": (Classifier, {"tokens": TOKENS, "labels": TOKENS[:, :3]}, [HERE, "labels: int64 [4, 3]"]),
    "samples": (Classifier, (TOKENS, TOKENS[:3]), [HERE, "1: int64 [3, 5]"]),
    "width": (Layered, {"x": torch.ones(4, 7), "y": torch.ones(4, 6)}, [HERE, "x: float32 [4, 7]"]),
    "empty": (Layered, {}, ["no tensor with a batch dim"]),
    "no-samples": (Layered, {"x": torch.ones(0, 6), "y": torch.ones(0, 6)}, ["no samples"]),
    "no-loss": (lambda: nn.Linear(6, 6), torch.ones(4, 6), ["[4, 6]", "return a scalar loss"]),
    "two-outputs": (lambda: TwoOutputs(6, 6), torch.ones(4, 6), ["[4, 6]", "(loss, ...)"]),
    "no-key": (lambda: Keyed(6, 6), torch.ones(4, 6), ["a dict with logits, total", "['loss']"]),
    "numpy": (Layered, {"x": np.ones((4, 6)), "y": torch.ones(4, 6)}, ["numpy array, 'x'", "torch.from_numpy(x)"]),
    "frozen": (lambda: Layered().requires_grad_(False), BATCH, ["no parameter that requires a gradient"]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_batch_that_does_not_fit_is_refused_in_one_sentence(case):
    make, batch, parts = MISFITS[case]
    with pytest.raises(ModelError) as caught:
        trace(make(), batch)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_loss_without_parameters_is_refused():
    class Constant(nn.Linear):
        def forward(self, x):
            return x.mean()

    with pytest.raises(ModelError, match="does not depend on any parameter"):
        trace(Constant(6, 6), torch.ones(4, 6))


def test_an_unknown_precision_is_refused():
    with pytest.raises(ModelError, match="fp12"):
        trace(Layered(), BATCH, precision="fp12")


def test_shared_children_belong_to_the_root():
    class Shared(Layered):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight

        def unusual(self, x):
            return _Double.apply(x, self)

    graph = trace(Shared(), BATCH)
    assert [b.name for b in graph.blocks] == ["layers.1", ""]
    assert graph.aliases == (("layers.0.weight", "layers.2.weight"),)


class Stateful(nn.Module):
    """Forward does something with Python values that a graph would freeze."""

    def __init__(self, what) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.what = what

    def forward(self, x):
        return self.what(self, self.linear(x)).square().mean()


def _count(self, z):
    self.calls += 1
    return z / self.calls


@pytest.mark.parametrize(
    ("what", "reason", "is_coupled"),
    [
        (_count, "forward changes the Python value calls", False),
        (lambda self, z: z * random.random(), "forward draws random numbers outside of torch", False),
        (lambda self, z: z * float(np.random.rand()), "forward draws random numbers outside of torch", False),  # noqa: NPY002
        (lambda self, z: z / (z.shape[0] + 1), "a number of aten.div.Tensor is made from the batch size", True),
        (lambda self, z: z / (z.shape[0] + 10), "a number of aten.div.Tensor is made from the batch size", True),
        (lambda self, z: z * (1.0 / z.shape[0] ** 0.5), "is made from the batch size", True),
    ],
    ids=["counter", "python random", "numpy random", "batch + 1", "batch + 10", "root of the batch"],
)
def test_what_a_graph_would_freeze_is_refused(what, reason, is_coupled):
    graph = trace(Stateful(what), {"x": torch.randn(3, 4)})

    assert reason in graph.fallbacks[0].reason
    assert bool(graph.couples_samples) == is_coupled


def test_a_width_near_the_traced_batch_is_no_number_of_the_batch():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1000)

        def forward(self, x):
            return self.linear(x).view(-1, 10, 100).square().mean() + self.linear(x)[:, 990:].mean()

    assert not trace(Wide(), {"x": torch.randn(3, 4)}).fallbacks


def test_the_function_of_torch_that_looks_at_values_is_named():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1])).square().mean()

    first = trace(Masked(), {"x": torch.randn(4, 5, 8)}).fallbacks[0]

    assert "in _detect_is_causal_mask of torch/nn/modules/transformer.py, line " in first.reason
    assert Path(first.source.rpartition(":")[0]).name == HERE


def test_what_is_not_cast_is_said_with_what_to_do():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv1d(4, 4, 1)
            self.register_buffer("table", torch.ones(4, 3))

        def forward(self, x):
            return self.mix(x * self.table).mean()

    batch = {"x": torch.randn(2, 4, 3)}
    with pytest.raises(ModelError, match=r"buffers and what forward makes are not cast: .* or plan in fp32"):
        trace(Scaled(), batch, precision="bf16")
    assert not trace(Scaled(), batch, precision="fp32").fallbacks
