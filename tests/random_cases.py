"""Models that draw random numbers in many ways, and what the ranks of their tests run."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from planner.graph import Graph
from planner.runtime import Trainer, apply_plan
from planner.trace import trace
from tests import models
from tests.distributed_cases import Kind, make_plan, own_part

SAMPLES, SEQUENCE, WIDTH, STEPS = 8, 6, 8, 3


class Layer(nn.Module):
    """Attention and a residual; what is random is chosen by name."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width]."""
        batch, sequence, width = x.shape
        q, k, v = (t.view(batch, sequence, 2, width // 2).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        rate = 0.2 if self.what == "attention" else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        y = torch.tanh(self.mlp(mixed.transpose(1, 2).reshape(batch, sequence, width)))
        return self.norm(x + self.noise(y))  # type: ignore[no-any-return]

    def noise(self, y: Tensor) -> Tensor:
        """`y` with something random."""
        match self.what:
            case "dropout":
                return F.dropout(y, 0.3)
            case "in place":
                return F.dropout(y.clone(), 0.3, inplace=True)
            case "channels":
                return F.dropout2d(y[:, :, :, None], 0.3)[:, :, :, 0]
            case "alpha":
                return F.alpha_dropout(y, 0.3, training=True)
            case "path":
                return y * torch.empty(y.shape[0], 1, 1, dtype=y.dtype).bernoulli_(0.7) / 0.7
            case "uniform":
                return y + 0.1 * (torch.rand_like(y) - 0.5) + 0.1 * torch.randn(y.shape[0], 1, WIDTH, dtype=y.dtype)
            case "sequence first":  # the dim of the samples runs through them once per position
                rows = y.transpose(0, 1).reshape(-1, WIDTH)
                rows = F.dropout(rows, 0.3) + 0.1 * torch.rand_like(rows)
                return rows.view(SEQUENCE, -1, WIDTH).transpose(0, 1)
            case "shared":  # no batch dim: all samples of a step see the same
                return y * torch.rand(WIDTH, dtype=y.dtype)
            case "nested":
                return F.dropout(y, 0.3) * torch.bernoulli(torch.sigmoid(y.detach()))
        return y


WHAT = (
    "dropout", "attention", "in place", "channels", "alpha", "path", "uniform", "sequence first", "shared", "nested",
)  # fmt: skip


class Noisy(nn.Module):
    """Four layers of `what`, or one of each kind in turn."""

    def __init__(self, what: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer(w) for w in what)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randint(16, (SAMPLES, SEQUENCE), generator=generator) for name in ("tokens", "labels")}


@cache
def graph_of(what: tuple[str, ...]) -> Graph:
    graph = trace(Noisy(what).double(), batch_of(0), precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    return graph


def trainer_of(what: tuple[str, ...], kind: Kind, num_microbatches: int, **options: Any) -> Trainer:
    graph = graph_of(what)
    plan = make_plan(graph, kind, global_batch=SAMPLES, num_microbatches=num_microbatches)
    return apply_plan(plan, Noisy(what).double(), graph=graph, optimizer=models.sgd, **options)


def train(
    kind: Kind, num_microbatches: int, seed: int = 0, what: Sequence[str] = WHAT
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of a model with a layer of every kind, and the parameters after them."""
    trainer = trainer_of(tuple(what), kind, num_microbatches, seed=seed)
    torch.manual_seed(dist.get_rank())  # must not matter, nor be disturbed
    before = torch.get_rng_state()
    losses = [trainer.step(own_part(batch_of(step), trainer)) for step in range(STEPS)]
    assert torch.equal(torch.get_rng_state(), before)
    return losses, trainer.state_dict()


class Echo(nn.Module):
    """Dropout of ones in each of its layers; the loss is linear in `weight`, so its gradient tells what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(6))
        self.second = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """The mean over samples of what is left of both."""
        y = F.dropout(x * self.first, 0.25).sum(1).mean()
        return y + F.dropout(x * self.second, 0.25).sum(1).mean()


def kept_of_each_sample(kind: Kind, steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Gradients of `Echo`, step by step and sample by sample of this rank (only one sample of a batch is not zero)."""
    model = Echo().double()
    batch = {"x": torch.ones(SAMPLES, 6, dtype=torch.float64)}
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    plan = make_plan(graph, kind, global_batch=SAMPLES, num_microbatches=2)
    result = []
    trainer = apply_plan(plan, model, graph=graph, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0))
    for step in range(steps):
        one_by_one = []
        for sample in range(SAMPLES):
            trainer.num_steps = step
            x = torch.zeros_like(batch["x"])
            x[sample] = SAMPLES
            trainer.step(own_part({"x": x}, trainer))
            gradients = trainer.gradients()
            one_by_one.append((gradients["first"], gradients["second"]))
        result.append(one_by_one)
    return result


class Fallback(nn.Module):
    """Has no graph: its backward hook sees to that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[0].register_full_backward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        """The scalar loss."""
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.5)
        return x.square().mean()


def without_graph(seed: int) -> list[float]:
    """Losses of a model without graph; every data rank gets the same samples."""
    model = Fallback()
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(4, 6, generator=generator)}
    graph = trace(model, batch, precision="fp32", device_kind="cpu")
    assert graph.fallbacks
    kind = Kind(name="", dp=dist.get_world_size(), zero=(1,))
    plan = make_plan(graph, kind, global_batch=4 * kind.dp, num_microbatches=2, precision="fp32")
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd, seed=seed)
    before = torch.get_rng_state()
    losses = [trainer.step(batch) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    return losses
