"""Models and data: plain torch modules in named sizes, the user's own by factory or `config.json`, batches for all."""

from planner.zoo.load import LoadedModel, load_model
from planner.zoo.registry import NAMES, build
from planner.zoo.text import random_batch, text_batch

__all__ = ["NAMES", "LoadedModel", "build", "load_model", "random_batch", "text_batch"]
