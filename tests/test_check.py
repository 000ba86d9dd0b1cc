"""The self-check before training: quiet where blocks and eager module agree, loud about each kind of planted fault."""

import copy
import gc
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import CheckError
from planner.graph import Arg, Graph, Node, Ref, Symbol
from planner.runtime import apply_plan, sides
from planner.runtime import check as checking
from planner.runtime.blocks import Lowered, lower_block
from planner.runtime.check import CheckReport, check_blocks
from planner.runtime.samples import nested, sample_batches
from planner.trace import masks, opaque, trace
from tests import families, models
from tests.distributed_cases import Kind, make_plan
from tests.ranks import RankPool

CPU = torch.device("cpu")
WIDTH = 8


def checked(
    model: nn.Module, graph: Graph, precision: str = "fp64", *, samples: int = 2, batch: object = None
) -> CheckReport:
    return check_blocks(model, graph, precision=precision, micro_batch=samples, device=CPU, batch=batch)


def refusal(model: nn.Module, graph: Graph, precision: str = "fp64", *, batch: object = None) -> str:
    with pytest.raises(CheckError) as caught:
        checked(model, graph, precision, batch=batch)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "check=False (--no-check)" in sentence
    return sentence


class Chain(nn.Module):
    """Four layers and a loss; `layer` makes them."""

    def __init__(self, layer: Callable[[], nn.Module], *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The scalar loss."""
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def traced(model: nn.Module, precision: str = "fp64", shape: tuple[int, ...] = (4, 5, WIDTH)) -> Graph:
    graph = trace(model, {"x": torch.zeros(shape)}, precision=precision, device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    return graph


def with_nodes(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    return replace(graph, nodes=tuple(change(node) for node in graph.nodes))


# --- no false alarm --------------------------------------------------------------------------------------------------


SOME = {("resnet", "fp64"), ("hf-gpt2", "fp32"), ("hf-llama", "bf16")}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) in SOME else pytest.mark.matrix)
        for name in models.MODELS
        for precision in ("fp64", "fp32", "bf16")
    ],
)
def test_blocks_that_are_right_pass(name: str, precision: str) -> None:
    model = models.build(name, dtype=torch.float64 if precision == "fp64" else torch.float32)
    graph = trace(model, models.batch(name, 4, step=0), precision=precision, device_kind="cpu")

    report = checked(model, graph, precision, samples=1)

    if name == "resnet" and precision == "bf16":  # batch norm with statistics in float32 is not on the CPU
        assert "expected scalar type BFloat16" in report.skipped
        return
    assert report.skipped == ""
    assert "self-check: loss and" in str(report)
    assert report.blocks == report.of_blocks == len(graph.blocks)
    assert report.gradients == sum(p.requires_grad for p in model.parameters()) - len(graph.unused_parameters)
    assert report.difference <= {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2}[precision]


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["whole", "reduced"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_families_pass(name: str, precision: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = families.make(name).to(dtype)
    drawn = families.FAMILIES[name].batch(4, torch.Generator().manual_seed(1))
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in drawn.items()}
    graph = trace(model, batch, precision=precision, device_kind="cpu")
    assert not graph.fallbacks
    if form == "reduced":
        only_one_of_each(monkeypatch)

    report = checked(model, graph, precision)

    if precision == "fp64" and any("grouped_mm" in node.op for node in graph.nodes):
        return  # torch's own grouped matmul, which the eager module calls, has no float64
    assert report.skipped == ""
    assert form == "whole" or report.blocks < report.of_blocks


def only_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is small enough to be compared as a whole."""
    monkeypatch.setattr(checking, "_WHOLE_FLOP", {"cpu": 0.0})
    affordable = checking._affordable
    monkeypatch.setattr(checking, "_affordable", lambda *a: f if isinstance(f := affordable(*a), str) else f[:1])


class Noisy(nn.Module):
    """Draws in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(x)) + 0.1 * torch.randn_like(x)
        kept = functional.dropout1d(y, 0.3, self.training)
        return kept + functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5)


class Counted(nn.Module):
    """Buffers that forward writes, one of them in place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        cast("Tensor", self.calls).add_(1)
        return torch.tanh(self.norm(x.flatten(0, 1)).reshape(x.shape)) * cast("Tensor", self.calls)


@pytest.mark.parametrize("layer", [Noisy, Counted])
def test_chance_and_buffers_do_not_disturb_it(layer: Callable[[], nn.Module]) -> None:
    model = Chain(layer)
    assert checked(model, traced(model)).difference < 1e-12


@pytest.mark.parametrize("layer", [Noisy, Counted])
def test_the_model_and_the_generators_are_left_as_they_were(layer: Callable[[], nn.Module]) -> None:
    model = Chain(layer)
    model.layers[1].eval()
    graph = traced(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model)
    objects = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()

    checked(model, graph)

    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == objects
    for (name, mine), (_, old) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(mine, old), name
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]


def test_no_memory_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_WORTH_COLLECTING", 0)
    model = Chain(partial_linear)
    graph = traced(model)
    checked(model, graph)
    before = tensors_alive()

    checked(model, graph)

    assert tensors_alive() <= before


def partial_linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(o) in (Tensor, nn.Parameter) for o in gc.get_objects())


# --- planted faults --------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers of one shape, both zero at first, as adapters are."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for layer in (self.one, self.two):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x)))
        return x + y


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_swapped_parameters_are_found(leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(Two)
    graph = traced(model)
    index = {t.name: i for i, t in enumerate(graph.tensors)}
    one, two = index[f"layers.2.one.{leaf}"], index[f"layers.2.two.{leaf}"]

    def swapped(*args: Any, attributes: Mapping[int, Tensor], **kwargs: Any) -> Lowered:
        return lower_block(*args, attributes={**attributes, one: attributes[two], two: attributes[one]}, **kwargs)

    assert checked(model, graph).difference == 0.0
    monkeypatch.setattr(sides, "lower_block", swapped)
    sentence = refusal(model, graph)

    assert sentence.startswith("block layers.2 does not compute what the eager module does: the output of layers.2.")
    assert "test_check.py:" in sentence


def test_an_activation_at_the_wrong_place_is_found() -> None:
    model = Chain(Two)
    graph = traced(model)
    third = graph.blocks[2]
    (inside,) = third.inputs
    tanh = next(n for n in (graph.nodes[i] for i in third.nodes) if "tanh" in n.op)

    def rewired(node: Node) -> Node:
        return replace(node, args=(Ref(inside),)) if node is tanh else node

    assert "block layers.2 does not" in refusal(model, with_nodes(graph, rewired))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda g: 3 * g)
        return torch.tanh(y)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", Reversal.apply(torch.tanh(self.linear(x))))


@pytest.mark.parametrize("layer", [Hooked, Reversed])
def test_a_lost_hook_or_function_is_found(layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(layer)
    model.layers[0] = partial_linear().double()
    assert checked(model, traced(model)).difference == 0.0
    monkeypatch.setattr(opaque, "is_recording", lambda: False)

    sentence = refusal(model, traced(model))

    assert sentence.startswith("block layers.")
    assert "the gradient of layers." in sentence
    assert "differs by " in sentence


class Windowed(nn.Module):
    """Attention to the sample's last three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        mask = (distance >= 0) & (distance < 3)
        y: Tensor = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)
        return x + y


@pytest.mark.parametrize(("kind", "precision"), [("causal", "fp64"), ("full", "bf16")])
def test_a_wrong_mask_is_found(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(Windowed)
    assert checked(model, traced(model, precision), precision).difference < 1e-2
    monkeypatch.setattr(masks, "mask_kind", lambda *_: kind)

    sentence = refusal(model, traced(model, precision), precision)

    assert "block layers.0 does not" in sentence
    assert "the output of layers.0 differs" in sentence


class Island(nn.Module):
    """A normalisation in float32 whatever the model computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.gain * y.to(x.dtype)


def without_island(node: Node) -> Node:
    """Conversions to float32 keep the compute dtype."""

    def kept(arg: Arg) -> Arg:
        return Symbol("dtype", "bfloat16") if arg == Symbol("dtype", "float32") else arg

    return replace(node, args=tuple(map(kept, node.args)), kwargs=tuple((k, kept(v)) for k, v in node.kwargs))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_lost_dtype_is_found(precision: str) -> None:
    model = Chain(Island, dtype=torch.float32)
    graph = traced(model, precision)
    assert checked(model, graph, precision).difference < 1e-6

    sentence = refusal(model, with_nodes(graph, without_island), precision)

    assert "block layers.0 does not" in sentence
    if precision == "bf16":
        assert "runs in bfloat16 where the module has float32" in sentence


class Added(nn.Module):
    """Writes into its own activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y += x
        return y * 1.0


def test_a_lost_write_is_found() -> None:
    model = Chain(Added)
    graph = traced(model)
    assert checked(model, graph).difference == 0.0

    def lost(node: Node) -> Node:
        return replace(node, op=node.op.replace("add_", "add")) if "add_" in node.op else node

    assert any("add_" in node.op for node in graph.nodes)
    assert "block layers.0 does not" in refusal(model, rewritten(graph, lost))


def rewritten(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    """A node that no longer writes: its readers read the old value."""
    renamed: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        other = change(node)
        if other is not node and isinstance(node.args[0], Ref) and node.outputs[0] is not None:
            renamed[node.outputs[0]] = node.args[0].tensor
        args = tuple(Ref(renamed.get(a.tensor, a.tensor)) if isinstance(a, Ref) else a for a in other.args)
        nodes.append(replace(other, args=args))
    return replace(graph, nodes=tuple(nodes))


def test_a_lost_update_of_a_buffer_is_found() -> None:
    model = Chain(lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (-1, 5))))
    graph = traced(model)
    assert checked(model, graph).difference < 1e-12

    def lost(node: Node) -> Node:
        if "num_batches_tracked" in str([graph.tensors[t].name for t in node.mutates]):
            return replace(node, op="aten.add.Tensor")
        return node

    assert "buffer layers.3.1.num_batches_tracked" in refusal(model, with_nodes(graph, lost))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 0.5
        self.table = torch.linspace(0.1, 1.0, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return x + self.factor * y * self.table


@pytest.mark.parametrize("change", ["factor", "table"])
def test_what_changed_after_tracing_is_found(change: str) -> None:
    model = Chain(Scaled)
    graph = traced(model)
    assert checked(model, graph).difference == 0.0
    if change == "factor":
        cast("Scaled", model.layers[2]).factor = 0.25
    else:
        cast("Scaled", model.layers[2]).table.mul_(2)

    sentence = refusal(model, graph)

    assert sentence.startswith("block layers.2 does not compute what the eager module does: the output of layers.2")
    assert "plan again" in sentence


class Stepping(nn.Module):
    """Counts its calls in an iterator, in which nothing but the next value shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.steps = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return x + y * next(self.steps)


def test_an_iterator_that_forward_moves_on_is_found() -> None:
    model = Chain(Stepping)
    sentence = refusal(model, traced(model))

    assert sentence.startswith("forward gives another loss the second time for the same batch (")
    assert "keep what it remembers in a buffer" in sentence


# --- large models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["gpt-tied", "hf-bert"])
def test_one_block_of_each_class_stands_for_its_repeats(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_one_of_each(monkeypatch)
    model = models.build(name, dtype=torch.float32, device=device)
    graph = trace(model, models.batch(name, 4, step=0, dtype=torch.float32), precision="fp32", device_kind="cpu")

    report = checked(model, graph, "fp32")

    assert report.skipped == ""
    assert (report.blocks, report.of_blocks) == (3, 6)
    assert "3 of 6 blocks, the others repeat them" in str(report)
    assert report.difference < 1e-6


def test_a_fault_of_a_class_is_found_without_its_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    only_one_of_each(monkeypatch)
    model = Chain(Two)
    graph = traced(model)
    assert checked(model, graph).blocks == 3

    def lost(node: Node) -> Node:
        return replace(node, op="aten.relu.default") if "tanh" in node.op else node

    assert "block layers.0 does not" in refusal(model, with_nodes(graph, lost))


class Mixing(nn.Module):
    """A layer whose main input is not the first tensor of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * first)


class Residual(Chain):
    def forward(self, x: Tensor) -> Tensor:
        """The scalar loss."""
        first = x = self.head.weight * x
        for layer in self.layers:
            x = layer(first, x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def test_a_model_that_cannot_do_without_its_repeats_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Residual(Mixing)
    graph = traced(model)
    monkeypatch.setattr(checking, "_WHOLE_FLOP", {"cpu": 0.0})
    whole = checked(model, graph)  # with room for it, the whole is compared after all
    only_one_of_each(monkeypatch)

    report = checked(model, graph)

    assert (whole.blocks, whole.difference) == (whole.of_blocks, 0.0)
    assert "cannot be left out" in report.skipped


@pytest.mark.parametrize(
    ("limit", "value", "sentence"),
    [
        ("_LEAST_FLOP", {"cpu": 1.0}, "FLOP, too many for cpu"),
        ("_MEMORY_SHARE", 1e-12, "GiB are free on cpu"),
    ],
)
def test_what_costs_too_much_is_said(limit: str, value: object, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_WHOLE_FLOP", {"cpu": 0.0})
    monkeypatch.setattr(checking, limit, value)
    model = Chain(Two)

    assert sentence in checked(model, traced(model)).skipped


# --- samples ---------------------------------------------------------------------------------------------------------


class Looking(nn.Module):
    """Indexes tables of several sizes by what its inputs hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kinds = nn.Embedding(7, WIDTH), nn.Embedding(3, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor, labels: Tensor, scale: float) -> Tensor:
        """The scalar loss."""
        x = self.table(pair[0].flatten()).reshape(*mask.shape, WIDTH) + self.kinds(pair[1])
        x = torch.where(mask[..., None].bool(), x, 0.0) * scale
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.reshape(-1))


def test_random_samples_stay_within_what_they_index() -> None:
    model = Looking()
    batch = {
        "pair": (torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)),
        "mask": torch.ones(4, 6, dtype=torch.long), "labels": torch.zeros(4, 6, dtype=torch.long), "scale": 2.0,
    }  # fmt: skip
    graph = trace(model, batch, device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks

    drawn = next(sample_batches(graph, None, 64, torch.float32, CPU))

    assert drawn["scale"] == 2.0
    assert [int(t.max()) for t in (*drawn["pair"], drawn["mask"], drawn["labels"])] == [6, 2, 1, 4]
    assert [int(t.min()) for t in (*drawn["pair"], drawn["mask"], drawn["labels"])] == [1, 1, 0, 1]
    assert checked(model, graph, "fp32").difference == 0.0


def test_a_batch_with_values_is_what_is_compared() -> None:
    model = Looking()
    zeros = torch.zeros(4, 6, dtype=torch.long)
    batch = {"pair": (zeros, zeros), "mask": zeros + 1, "labels": zeros, "scale": 2.0}
    graph = trace(model, batch, device_kind="cpu")

    given = next(sample_batches(graph, {**batch, "labels": zeros + 3}, 2, torch.float32, CPU))

    assert given["labels"].tolist() == [[3] * 6] * 2
    assert nested({"0": 1, "1": 2}) == (1, 2)


def test_a_module_that_fails_on_random_samples_is_said() -> None:
    class Fails(Chain):
        is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            """The scalar loss."""
            if self.is_ready:
                raise ValueError("no")
            return super().forward(x)

    model = Fails(Two)
    graph = traced(model)
    model.is_ready = True

    assert "fails in float64 on cpu with ValueError: no" in checked(model, graph).skipped


# --- before training -------------------------------------------------------------------------------------------------


def apply_a_stale_plan(check: bool) -> str:
    model = Chain(Scaled)
    graph = traced(model)
    plan = make_plan(graph, Kind(name="", dp=2, zero=(3,)), global_batch=8, num_microbatches=2)
    if torch.distributed.get_rank() == 0:
        cast("Scaled", model.layers[1]).factor = 0.25
    try:
        return str(apply_plan(plan, model, graph=graph, check=check).check)
    except CheckError as error:
        return str(error)


def apply_a_right_plan() -> tuple[str, float]:
    model = Chain(Noisy)
    graph = traced(model)
    plan = make_plan(graph, Kind(name="", pp=2), global_batch=8, num_microbatches=2)
    trainer = apply_plan(plan, model, graph=graph)
    assert trainer.check is not None
    return trainer.check.skipped, trainer.check.difference


@pytest.mark.distributed
def test_all_ranks_hear_of_it(tmp_path: Path) -> None:
    with RankPool(2, tmp_path, timeout_seconds=100) as pool:
        refused = pool.run(apply_a_stale_plan, True)
        unchecked = pool.run(apply_a_stale_plan, False)
        right = pool.run(apply_a_right_plan)

    assert refused[0] == refused[1]
    assert refused[0].startswith("block layers.1 does not compute what the eager module does: the output of layers.1")
    assert unchecked == ["None", "None"]
    assert right == [("", 0.0)] * 2


def test_a_model_without_graph_has_nothing_to_compare() -> None:
    class Branching(Chain):
        def forward(self, x: Tensor) -> Tensor:
            """The scalar loss."""
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    model = Branching(Two)
    graph = trace(model, {"x": torch.zeros(4, 5, WIDTH)}, precision="fp64", device_kind="cpu")

    assert "nothing is lowered" in checked(model, graph).skipped
