"""References for the equality matrix, computed in a process that never imports planner."""

import sys
from functools import partial

from tests import models
from tests.eager_oracle import Reference, train_reference

SAMPLES = 24  # of a global batch: divisible by 6 micro-batches on 1, 2 or 4 data ranks
STEPS = 3
# Below every model's gradient norm, so that clipping acts in each step.
MAX_GRAD_NORM = 0.05


def reference(model: str, optimizer: str, chunks: int) -> Reference:
    """Three clipped steps of the eager module on one device."""
    result = train_reference(
        partial(models.build, model),
        models.batches(model, SAMPLES, STEPS),
        models.OPTIMIZERS[optimizer],
        chunks=chunks,
        max_grad_norm=MAX_GRAD_NORM,
        float64_mode=models.MODELS[model].needs_float64_mode,
    )
    foreign = sorted(name for name in sys.modules if name.split(".")[0] == "planner")
    if foreign:
        raise AssertionError(f"the reference process imported {foreign}")
    return result
