"""Lowered blocks on one device: the eager module's loss, gradients, buffers and objects."""

import copy
import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from planner.graph import Graph
from planner.runtime.blocks import (
    INPUT,
    Lowered,
    Stage,
    boundary_examples,
    constant,
    lower_block,
    lower_prelude,
    sendable,
)
from planner.runtime.execute import tied_within
from planner.trace import trace
from tests import models
from tests.distributed_cases import build, graph_of

CPU = torch.device("cpu")


def tensors_of(graph: Graph, model: nn.Module) -> dict[int, Tensor]:
    """The model's parameters and buffers, and the graph's constants, by tensor index."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False))}
    return {
        i: constant(graph, i, CPU) if t.kind == "constant" else named[t.name]
        for i, t in enumerate(graph.tensors)
        if t.kind in ("parameter", "buffer", "constant")
    }


def stage_of(graph: Graph, model: nn.Module, micro_batch: int, *, recompute: bool = False) -> Stage:
    """The whole model as one stage."""
    tensors = tensors_of(graph, model)
    positions = range(len(graph.blocks))
    tied = tied_within(graph, positions)
    options = {"attributes": tensors, "micro_batch": micro_batch, "device": CPU}
    return Stage(
        graph,
        [lower_block(graph, block, tied=tied, **options) for block in graph.blocks],  # type: ignore[arg-type]
        positions=positions,
        recompute=[recompute] * len(positions),
        tied={t: tensors[t] for t in tied},  # type: ignore[misc]
        prelude=lower_prelude(graph, [t for b in graph.blocks for t in b.shared], **options),  # type: ignore[arg-type]
    )


def run(stage: Stage, graph: Graph, batch: dict[str, Tensor]) -> Tensor:
    loss = stage(**{f"{INPUT}{t}": batch[graph.tensors[t].name] for t in graph.inputs})
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", ["gpt", "gpt-tied", "resnet", "hf-gpt2", "bert", "t5", "vit", "unet", "moe"])
def test_blocks_in_sequence_give_the_eager_loss_and_gradients(name: str, micro_batch: int) -> None:
    model, graph = build(name), graph_of(name)
    eager = copy.deepcopy(model)
    batch = models.batch(name, micro_batch, step=0)
    output = eager(**batch)
    wanted = output if isinstance(output, Tensor) else output.loss
    wanted.backward()

    loss = run(stage_of(graph, model, micro_batch), graph, batch)
    loss.backward()

    tolerance = 1e-5 if name.startswith("hf") else 1e-9  # eager Hugging Face has float32 islands
    assert loss.item() == pytest.approx(wanted.item(), rel=tolerance)
    for (key, mine), (_, theirs) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance * 1e-2, msg=key)


def test_parameters_and_buffers_are_the_models_own_objects_under_its_own_names() -> None:
    model, graph = build("resnet"), graph_of("resnet")
    stage = stage_of(graph, model, 2)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    found = {
        name.split(".model.")[1]: tensor
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]
        if ".model." in name
    }

    assert found.keys() == own.keys()
    assert all(found[name] is own[name] for name in own)


def test_a_tied_parameter_is_registered_once_and_by_the_stage() -> None:
    model, graph = build("gpt-tied"), graph_of("gpt-tied")
    stage = stage_of(graph, model, 2)
    weight = model.get_parameter("tokens.weight")

    assert [name for name, p in stage.named_parameters(remove_duplicate=False) if p is weight] == [
        f"tied.tied_{graph.tie_groups[0][0]}"
    ]


class Counting(nn.Module):
    """A layer whose result depends on a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        return torch.tanh(self.norm(self.linear(x)) * self.calls)


class Layers(nn.Module):
    """Children with the names of attributes of fx.GraphModule, and a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.ModuleList(Counting() for _ in range(3))
        self.meta = nn.Linear(4, 1)
        self.code = nn.Parameter(torch.ones(1))
        self.table = torch.arange(1.0, 5.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.graph:
            x = layer(x) * self.table
        loss: Tensor = (self.meta(x) * self.code).square().mean()
        return loss


@pytest.mark.parametrize("recompute", [False, True])
def test_buffers_are_written_once_and_recomputed_with_their_earlier_value(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Layers().double()
    eager = copy.deepcopy(model)
    batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    graph = trace(model, {"x": batches[0]}, precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    stage = stage_of(graph, model, 5, recompute=recompute)

    if recompute:  # all forward passes before the first backward, as in a pipeline; eager autograd refuses that here
        losses = [run(stage, graph, {"x": x}) for x in batches]
        for loss in losses:
            loss.backward()
    else:
        for x in batches:
            run(stage, graph, {"x": x}).backward()
    for x in batches:
        eager(x).backward()

    for (key, mine), (_, theirs) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        # A bias before batch normalisation has a zero gradient.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=key)
    for (key, buffer), (_, wanted) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=1e-12, atol=0, msg=key)


def test_what_crosses_a_cut_is_known_with_its_gradient() -> None:
    graph = graph_of("gpt")

    (example,) = boundary_examples(graph, [2], 3)[2]

    assert example.shape == (3, models.SEQUENCE, 16)
    assert example.requires_grad
    assert example.device.type == "meta"


def test_a_sent_activation_is_contiguous_and_no_view() -> None:
    x = torch.arange(6.0).reshape(2, 3)

    for value in (x.T, x[:1], x.view(3, 2), x):
        sent = sendable(value)
        assert sent.is_contiguous()
        assert not sent._is_view()
        assert torch.equal(sent, value)


def test_a_shape_error_names_the_block_the_line_and_the_operator() -> None:
    model, graph = build("gpt"), graph_of("gpt")
    stage = stage_of(graph, model, 2)
    block = stage.blocks[1]
    assert isinstance(block, Lowered)

    with pytest.raises(RuntimeError) as caught:
        block(torch.zeros(2, models.SEQUENCE, 17, dtype=torch.float64))

    (note,) = caught.value.__notes__
    assert note.startswith("in block blocks.0, ")
    assert "gpt.py:" in note
    assert note.endswith("(operator aten.layer_norm.default)")


def seen_by_hooks(value: object) -> int:
    """How many things FSDP's hooks look at in what a module is given: through containers and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return 1 + sum(seen_by_hooks(getattr(value, each.name)) for each in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return 1 + sum(map(seen_by_hooks, value.values()))
    return 1 + sum(map(seen_by_hooks, value)) if isinstance(value, list | tuple) else 1


def test_what_a_block_is_given_is_little_to_look_through():
    graph, model = graph_of("gpt"), build("gpt")
    stage = stage_of(graph, model, 2)
    numbers: list[int] = []
    for block in stage.blocks:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: numbers.append(seen_by_hooks((args, kwargs))), with_kwargs=True
        )

    run(stage, graph, models.batch("gpt", 2, step=0))

    assert len(numbers) == len(graph.blocks)
    assert max(numbers) < 30
