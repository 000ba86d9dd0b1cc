"""An optimizer that is given parts of tensors must work element by element."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.runtime.optimizers import check_elementwise

ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients together, or of each tensor."""

    def __init__(self, params: Any, over: str = "all") -> None:
        super().__init__(params, {"over": over})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = nn.utils.get_total_norm([p.grad for p in given])
            with torch.no_grad():
                for p in given:
                    p -= p.grad / (norm if group["over"] == "all" else p.grad.norm())


class Needy(torch.optim.SGD):
    """Cannot be made from its settings."""

    def __init__(self, params: Any, context: object) -> None:
        super().__init__(params)
        self.context = context


def parameters() -> Iterable[Tensor]:
    return [nn.Parameter(torch.ones(6, 8)), nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_works_element_by_element_is_taken(name: str) -> None:
    check_elementwise(ELEMENTWISE[name](parameters()), num_shards=8, num_stages=4)


def test_an_optimizer_that_looks_at_matrices_is_refused_where_they_are_sharded() -> None:
    muon = torch.optim.Muon([p for p in parameters() if p.ndim == 2])

    with pytest.raises(PlanError, match=r"^Muon looks at whole tensors, and the plan shards them over 2 ranks.*zero=0"):
        check_elementwise(muon, num_shards=2, num_stages=1)
    check_elementwise(muon, num_shards=1, num_stages=4)


def test_an_optimizer_that_looks_at_each_tensor_is_refused_where_they_are_sharded() -> None:
    with pytest.raises(PlanError, match="whole tensors"):
        check_elementwise(Normed(parameters(), "each"), num_shards=2, num_stages=1)
    check_elementwise(Normed(parameters(), "each"), num_shards=1, num_stages=2)


def test_an_optimizer_that_looks_at_all_parameters_is_refused_in_a_pipeline() -> None:
    with pytest.raises(PlanError, match=r"^Normed looks at all parameters together, and the plan has 2 pipeline.*pp=1"):
        check_elementwise(Normed(parameters()), num_shards=1, num_stages=2)
    check_elementwise(Normed(parameters()), num_shards=1, num_stages=1)


class RowNormed(torch.optim.SGD):
    """Divides each row of a matrix by its norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= p.grad / p.grad.norm(dim=-1, keepdim=True) if p.ndim > 1 else p.grad


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_works_element_by_element_is_taken_with_tensor_parallelism(name: str) -> None:
    check_elementwise(ELEMENTWISE[name](parameters()), num_shards=2, num_stages=2, num_parts=4)


def test_an_optimizer_that_looks_at_rows_is_refused_where_tensor_parallelism_splits_them() -> None:
    check_elementwise(RowNormed(parameters()), num_shards=8, num_stages=4)

    said = r"^RowNormed looks at whole tensors, and the plan shards them over 4 ranks.*or plan with tp=1$"
    with pytest.raises(PlanError, match=said):
        check_elementwise(RowNormed(parameters()), num_shards=8, num_stages=4, num_parts=4)
    with pytest.raises(PlanError, match=r"over 8 ranks.*or plan with zero=0 and tp=1$"):
        check_elementwise(Normed(parameters(), "each"), num_shards=2, num_stages=1, num_parts=4)
    with pytest.raises(PlanError, match=r"over 4 ranks.*or plan with tp=1$"):
        check_elementwise(Normed(parameters(), "each"), num_shards=1, num_stages=1, num_parts=4)


def test_the_settings_of_each_group_are_tried() -> None:
    first, second, _ = parameters()
    groups = [{"params": [first], "over": "each"}, {"params": [second], "over": "all"}]

    with pytest.raises(PlanError, match="whole tensors"):
        check_elementwise(Normed(groups), num_shards=2, num_stages=1)


def test_one_that_cannot_be_made_anew_is_not_tried() -> None:
    check_elementwise(Needy(parameters(), object()), num_shards=2, num_stages=2)
