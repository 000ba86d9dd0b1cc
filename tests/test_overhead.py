"""Lowered blocks of one device launch the operators of the eager module, and weigh the loss (`benchmarks.overhead`)."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.overhead import lowered
from planner.runtime.blocks import INPUT, WEIGHTS, weight_layout
from tests import models
from tests.distributed_cases import graph_of

# Views and allocations compute nothing.
LAUNCH_NOTHING = {
    "view", "_unsafe_view", "select", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "split",
    "split_with_sizes", "detach", "alias", "as_strided", "unbind", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "promote_types",
}  # fmt: skip


class Launched(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name not in LAUNCH_NOTHING:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def step(forward: Any) -> Counter[str]:
    launched = Launched()
    with launched:
        forward().backward()
    return launched.count


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "resnet"])
def test_a_step_launches_what_the_module_does(name: str) -> None:
    model, graph = models.build(name), graph_of(name)
    batch = models.batch(name, 4, step=0)
    stage = lowered(graph, model)
    width = max(stop for _, stop in weight_layout(graph).values())
    keywords = {f"{INPUT}{t}": batch[graph.tensors[t].name] for t in graph.inputs}
    keywords[f"{INPUT}{WEIGHTS}"] = torch.ones(1, width, dtype=torch.float64)
    eager = step(lambda: model(**batch))
    model.zero_grad()

    found = step(lambda: stage(**keywords))

    assert sum(eager.values()) > 100
    assert found - eager == {"mul": 2}  # the loss is weighed, and its gradient
    assert not eager - found
