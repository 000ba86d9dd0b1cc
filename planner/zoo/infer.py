"""The example batch of a model that tells what it takes: one of the zoo, or of Hugging Face."""

from typing import Any

from torch import nn

from planner.errors import ModelError
from planner.zoo.huggingface import batch_of
from planner.zoo.registry import batch_of_module


def infer_batch(model: nn.Module) -> dict[str, Any]:
    """An example batch for `model`.

    Raises:
        ModelError: the model does not tell; give a batch.
    """
    batch = batch_of_module(model) or batch_of(model)
    if batch is None:
        raise ModelError(
            f"what {type(model).__name__} takes cannot be inferred; give an example: batch={{name: tensor, ...}}"
        )
    return batch
