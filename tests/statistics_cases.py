"""Models whose forward updates buffers, the eager loop that is right, and what the ranks of their tests run."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import PlanError, RunError
from planner.runtime import apply_plan
from planner.trace import trace
from tests import models
from tests.distributed_cases import Kind, make_plan, own_part

SAMPLES, WIDTH, STEPS = 16, 6, 3


class Layer(nn.Module):
    """A residual that keeps something about its activations."""

    kept: Tensor
    count: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.linspace(0, 1, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        match what:
            case "batch norm" | "twice" | "frozen":
                self.norm: nn.Module = nn.BatchNorm1d(WIDTH, momentum=0.2)
            case "last only":
                self.norm = nn.BatchNorm1d(WIDTH, momentum=1.0)
            case "instance norm":
                self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True, affine=True)
            case "cumulative":
                self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width]."""
        y = torch.tanh(self.linear(x))
        seen = y.detach().mean(0)
        match self.what:
            case "batch norm" | "last only" | "cumulative" | "frozen":
                y = self.norm(y)
            case "twice":
                y = self.norm(y + self.norm(y))
            case "instance norm":
                y = self.norm(torch.stack([y, 2 * y.sin()], 2)).mean(2)
            case "average":
                self.kept.mul_(0.9).add_(seen, alpha=0.1)
                self.count += 1
            case "lerp":
                self.kept.lerp_(seen, 0.3)
                self.count.add_(2)
            case "copy":
                with torch.no_grad():
                    self.kept.copy_(0.8 * self.kept + 0.2 * seen)
            case "assigned":
                self.kept = 0.7 * self.kept + 0.3 * seen
            case "samples":
                self.kept += x.shape[0]
                self.count += x.shape[0]
            case "sum":
                self.kept.view(-1).add_(seen)
            case "of weights":  # no sample in it
                self.kept.mul_(0.9).add_(self.linear.weight.detach().mean(0), alpha=0.1)
            case "largest":
                self.kept.copy_(torch.maximum(self.kept, seen))
            case "part":
                self.kept[0] = seen[0]
            case "used":
                self.kept.mul_(0.9).add_(seen, alpha=0.1)
                y = y / (1 + self.kept.abs())
            case "schedule":  # used, but the same for all samples
                self.count += 1
                y = y * torch.exp(-0.1 * self.count)
        return x + y


MERGED = (
    "batch norm", "twice", "frozen", "last only", "instance norm", "average", "lerp", "copy", "assigned", "sum",
    "of weights", "samples",
)  # fmt: skip
REFUSED = ("largest", "part", "used")


class Keeping(nn.Module):
    """A layer for each of `what`; without a graph if `hooked`."""

    def __init__(self, what: Sequence[str], *, hooked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Layer(w) for w in what)
        self.head = nn.Linear(WIDTH, 3)
        if hooked:
            self.head.register_full_backward_hook(lambda *_: None)
        for layer in self.layers:
            if layer.what == "frozen":
                layer.eval()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss."""
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = (self.head(x) - y).square().mean()
        return loss


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64),
        "y": torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
    }


Trained = tuple[list[float], dict[str, Tensor]]


def on_one_device(what: Sequence[str], chunks: int) -> Trained:
    """The eager module, all micro-batches of a global batch in order."""
    model = Keeping(what).double()
    optimizer = models.sgd(model.named_parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(value.chunk(chunks) for value in batch_of(step).values()), strict=True):
            loss = model(*part) / chunks
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def train(what: Sequence[str], kind: Kind, num_microbatches: int, hooked: bool = False) -> Trained:
    """Losses of three steps, and parameters and buffers after them."""
    model = Keeping(what, hooked=hooked).double()
    graph = trace(model, batch_of(0), precision="fp64", device_kind="cpu")
    assert bool(graph.fallbacks) == hooked, graph.fallbacks
    plan = make_plan(graph, kind, global_batch=SAMPLES, num_microbatches=num_microbatches)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd)
    losses = [trainer.step(own_part(batch_of(step), trainer)) for step in range(STEPS)]
    state = trainer.state_dict()
    Keeping(what).double().load_state_dict(state, strict=True)
    return losses, state


def refused(what: str) -> tuple[str, str]:
    """What two data ranks say to a buffer that they cannot merge: with a graph, and without."""
    kind = Kind(name="", dp=dist.get_world_size())
    said = []
    for hooked in (False, True):
        try:
            train([what], kind, 2, hooked)
            said.append("")
        except (PlanError, RunError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said[0], said[1]
