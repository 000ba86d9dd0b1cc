"""torch-autoplan: the fastest distributed training plan that fits, run on stock PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.plan import Plan

if TYPE_CHECKING:
    from planner.runtime import Trainer, apply
    from planner.search import autoplan, ranked_plans

__all__ = ["Cluster", "Plan", "PlannerError", "Trainer", "apply", "autoplan", "ranked_plans"]

# torch takes seconds to import: a plan can be read, and Ctrl-C answered, without it.
_WITH_TORCH = {
    "Trainer": "planner.runtime",
    "apply": "planner.runtime",
    "autoplan": "planner.search",
    "ranked_plans": "planner.search",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    value = getattr(import_module(_WITH_TORCH[name]), name)
    globals()[name] = value
    return value


def _apply(self: Plan, model: Any, **options: Any) -> "Trainer":
    """`planner.apply(plan, model, ...)`: train `model` by this plan, under torchrun."""
    from planner.runtime import apply

    return apply(self, model, **options)


Plan.apply = _apply  # type: ignore[attr-defined]
