"""Training by a plan on stock PyTorch."""

from planner.runtime.trainer import Trainer, apply, apply_plan

__all__ = ["Trainer", "apply", "apply_plan"]
