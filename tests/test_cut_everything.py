"""Skips, encoder memories and models without layers, cut into stages: equal to one device, priced by what is sent."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.cluster import Cluster
from planner.costs import price
from planner.plan import Mesh
from planner.runtime import apply_plan
from planner.runtime.execute import stage_positions
from planner.search.engine import search
from planner.trace import trace
from tests import models
from tests.distributed_cases import Kind, graph_of, make_plan, own_part, relative
from tests.distributed_references import STEPS
from tests.ranks import RankPool

SAMPLES, M = 12, 6


class UNet(nn.Module):
    """Four levels down and four up, of different widths; each level up reads what its level down made."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 12, 16, 20)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(nn.Conv1d(a, b, 3, padding=1) for a, b in pairs)
        self.middle = nn.Conv1d(widths[-1], widths[-1], 3, padding=1)
        self.up = nn.ModuleList(nn.Conv1d(2 * b, a, 3, padding=1) for a, b in reversed(pairs))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = nn.functional.gelu(layer(x))
            skips.append(x)
            x = nn.functional.avg_pool1d(x, 2)
        x = nn.functional.gelu(self.middle(x))
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = nn.functional.gelu(layer(torch.cat([x, skips.pop()], 1)))
        return (x - y).square().mean()


class Attending(nn.Module):
    """Attention to a memory (its own input without one), then a feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))
        return x + torch.tanh(self.out(attended))


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads the last output of the encoder; positions are made from the length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Attending(8) for _ in range(3))
        self.decoder = nn.ModuleList(Attending(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        positions = torch.sin(steps[:, None] / torch.arange(1, 9, dtype=x.dtype, device=x.device)[None])
        memory = x
        for layer in self.encoder:
            memory = layer(memory + positions, memory)
        out = x.flip(1)
        for layer in self.decoder:
            out = layer(out + positions, memory)
        loss: Tensor = (self.head(out) - y).square().mean()
        return loss


class Unrepeated(nn.Module):
    """No two children alike, and no list of them: cut where few tensors are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 24), nn.Linear(24, 10), nn.Linear(10, 30)
        self.fourth, self.last = nn.Linear(30, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = torch.relu(self.fourth(torch.sigmoid(self.third(x))))
        loss: Tensor = (self.last(x) - y).square().mean()
        return loss


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "unet": (UNet, (3, 32), (3, 32)),
    "encoder-decoder": (EncoderDecoder, (5, 8), (5, 3)),
    "unrepeated": (Unrepeated, (6,), (3,)),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(11)
    return MODELS[name][0]().double()


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    _, x, y = MODELS[name]
    return {
        "x": torch.randn(SAMPLES, *x, generator=generator, dtype=torch.float64),
        "y": torch.randn(SAMPLES, *y, generator=generator, dtype=torch.float64),
    }


def traced(name: str) -> Any:
    graph = trace(build(name), batch_of(name, 0), precision="fp64", name=name, device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    return graph


class Sent(TorchDispatchMode):
    """Bytes that this rank sends to each other stage of its pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d.send"):
            tensors, _, target, *_ = args
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.num_bytes[target] = self.num_bytes.get(target, 0) + size
        return func(*args, **(kwargs or {}))


def train(name: str, kind: Kind) -> tuple[float, dict[int, int], list[int]]:
    """The worst relative error of three steps against the eager module, bytes sent in the last, stages' last blocks."""
    graph, model, eager = traced(name), build(name), build(name)
    plan = make_plan(graph, kind, global_batch=SAMPLES, num_microbatches=M)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd)
    optimizer = models.sgd(eager.named_parameters())
    errors = []
    for step in range(STEPS):
        batch = batch_of(name, step)
        with Sent() as sent:
            loss = trainer.step(own_part(batch, trainer))
        wanted = eager(**batch)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        errors.append(abs(loss / wanted.item() - 1))
    state = trainer.state_dict()
    errors += [relative(state[key], value) for key, value in eager.state_dict().items()]
    return max(errors), sent.num_bytes, [positions.stop - 1 for positions in stage_positions(plan)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("unet", Kind(name="unet on 4 stages", pp=4, recompute=("full", "none"))),
        ("encoder-decoder", Kind(name="encoder-decoder on 4 stages", pp=4)),
        ("encoder-decoder", Kind(name="encoder-decoder on 2x2", pp=2, dp=2, zero=(3,), schedule="gpipe")),
        ("unrepeated", Kind(name="unrepeated on 2x2", pp=2, dp=2, zero=(1,))),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_a_cut_model_equals_one_device_and_sends_what_is_priced(four: RankPool, name: str, kind: Kind) -> None:
    results = four.run(train, name, kind)
    costs = price(
        traced(name), Cluster.load("1x4xA100-80GB"), mesh=Mesh(pp=kind.pp, dp_shard=kind.dp),
        micro_batch=SAMPLES // M // kind.dp, num_microbatches=M, schedule=kind.schedule, precision="fp64",
        optimizer="sgd",
    )  # fmt: skip

    for rank, (error, sent, ends) in enumerate(results):
        assert error < 1e-9
        stage = rank // kind.dp
        expected = {}
        if stage > 0:
            expected[stage - 1] = M * costs.hop_bytes[ends[stage - 1]]  # gradients of what came
        if stage < kind.pp - 1:
            expected[stage + 1] = M * costs.hop_bytes[ends[stage]]
        assert sent == expected


def test_a_skip_counts_at_every_cut_that_it_crosses() -> None:
    graph = traced("unet")
    behind_last_down = next(i for i, block in enumerate(graph.blocks) if block.name == "down.3")

    assert len(graph.carried[behind_last_down]) == 4
    assert graph.carried_bytes(behind_last_down).at(1) == 8 * (8 * 32 + 12 * 16 + 16 * 8 + 20 * 4)


def test_the_encoders_output_crosses_every_cut_of_the_decoder() -> None:
    graph = traced("encoder-decoder")
    decoder = [i for i, block in enumerate(graph.blocks) if block.name.startswith("decoder")]
    memory = graph.carried[decoder[0]]

    assert len(memory) == 2  # the stream and the memory
    assert all(len(graph.carried[i]) == 2 for i in decoder[:-1])


@pytest.mark.parametrize("name", ["llama", "hf-llama"])
def test_rotary_tables_are_computed_on_every_stage_and_sent_to_none(name: str) -> None:
    graph = graph_of(name)
    layers = [block for block in graph.blocks if block.kind == "block"]

    assert graph.prelude.nodes
    assert all(block.shared for block in layers)
    assert all(len(carried) == 1 for carried in graph.carried)


def test_a_model_without_repeated_children_is_planned_with_a_pipeline() -> None:
    graph = trace(build("unrepeated").float(), {k: v.float() for k, v in batch_of("unrepeated", 0).items()},
                  precision="fp32", name="unrepeated", device_kind="cuda")  # fmt: skip

    plan = search(graph, Cluster.load("1x2xA100-40GB"), global_batch=8, precision="fp32", pins="pp=2", top=1).plans[0]

    assert len(plan.stages) == 2
    assert all(stage.blocks for stage in plan.stages)
