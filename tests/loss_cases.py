"""Models whose labels only the loss reads, and what the ranks of their tests run."""

from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime import apply_plan
from planner.trace import trace
from tests import models
from tests.distributed_cases import Kind, make_plan

STEPS = 3


class Classifier(nn.Module):
    """Logits of three classes; `scale` has a default."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


class Branching(Classifier):
    """Has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3]."""
        return super().forward(x if x.sum().item() < 1e9 else 2 * x)


def batch_of(kind: str) -> Any:
    """(data, labels) as a tuple, a dict, or a tuple with a pair of labels."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (12,), generator=generator)
    return {"tuple": (data, labels), "dict": {"x": data, "labels": labels}, "nested": (data, (labels, labels))}[kind]


def labels_of(batch: Any) -> Tensor:
    """Those of a batch of any kind."""
    found = batch["labels"] if isinstance(batch, dict) else batch[1]
    return found if isinstance(found, Tensor) else found[0]


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(output, labels_of(batch))


def eager_losses(model: type[Classifier]) -> list[float]:
    """Of steps on one device, and after them."""
    net, batch = model().double(), batch_of("tuple")
    optimizer = models.sgd(net.named_parameters())
    losses = []
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        loss = loss_fn(net(batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned_losses(model: type[Classifier], kind: Kind, batch_kind: str) -> tuple[list[float], float]:
    """Of steps by a plan, and the loss of an evaluation after them."""
    net, batch = model().double(), batch_of(batch_kind)
    graph = trace(net, batch, loss_fn=loss_fn, precision="fp64", device_kind="cpu")
    plan = make_plan(graph, kind, global_batch=12, num_microbatches=3)
    trainer = apply_plan(plan, net, graph=graph, loss_fn=loss_fn, optimizer=models.sgd, batch=batch)

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.chunk(trainer.data_world)[trainer.data_rank]
        return {k: own(v) for k, v in value.items()} if isinstance(value, dict) else tuple(own(v) for v in value)

    losses = [trainer.step(own(batch)) for _ in range(STEPS)]
    loss = trainer.evaluate(own(batch)).loss
    assert loss is not None
    return losses, loss
