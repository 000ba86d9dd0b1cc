"""torch-autoplan: the fastest distributed training plan that fits, run on stock PyTorch."""

from typing import Any

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.plan import Plan
from planner.runtime import Trainer, apply
from planner.search import autoplan, ranked_plans

__all__ = ["Cluster", "Plan", "PlannerError", "Trainer", "apply", "autoplan", "ranked_plans"]


def _apply(self: Plan, model: Any, **options: Any) -> Trainer:
    """`planner.apply(plan, model, ...)`: train `model` by this plan, under torchrun."""
    return apply(self, model, **options)


Plan.apply = _apply  # type: ignore[attr-defined]
