"""What a user calls a batch: nested dicts, tuples and dataclass-like outputs, seen as named leaves."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.trace.refusal import where_defined

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Leaf:
    """One tensor of a batch. `name` is its place, as in `input_ids` or `0` or `images.left`."""

    name: str
    tensor: torch.Tensor
    is_batched: bool


def _name(path: tuple[Any, ...]) -> str:
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
    return ".".join(parts) or "0"


def _plain(batch: object) -> object:
    """A mapping that torch does not look into (a tokenizer's output) as a dict; dataclasses are made known to torch."""
    _register_dataclasses(batch)
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _register_dataclasses(batch: object) -> None:
    """Let torch look into the dataclasses of a batch, those in fields of others included."""
    for value in pytree.tree_leaves(batch):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            torch.export.register_dataclass(type(value))
            for field in dataclasses.fields(value):
                _register_dataclasses(getattr(value, field.name))


def settings(batch: object) -> tuple[tuple[str, str], ...]:
    """(name, value as text) of what a batch holds beside tensors: the graph is made for these values."""
    flat, _ = pytree.tree_flatten_with_path(_plain(batch))
    return tuple(
        (_name(path), repr(value)) for path, value in flat if value is not None and not isinstance(value, torch.Tensor)
    )


def leaves(batch: object) -> list[Leaf]:
    """The tensors of a batch in order. The batch dim is dim 0.

    The number of samples is dim 0 of the first tensor; if that is 1, of the first tensor with as
    many dims where it is not 1 (position ids of shape [1, sequence] may come first). A tensor with
    another dim 0, or without dims, belongs to all samples.

    Raises:
        ModelError: the batch holds no tensor with a batch dim, no sample, or arrays that are no tensors.
    """
    flat, _ = pytree.tree_flatten_with_path(_plain(batch))
    for path, value in flat:
        if isinstance(value, np.ndarray):
            raise ModelError(
                f"the batch has a numpy array, {_name(path)!r}; give tensors: torch.from_numpy({_name(path)})"
            )
    tensors = [(_name(path), value) for path, value in flat if isinstance(value, torch.Tensor)]
    with_dims = [t for _, t in tensors if t.ndim]
    if not with_dims:
        raise ModelError(
            f"the batch ({type(batch).__name__}) holds no tensor with a batch dim; "
            "give a dict of keyword arguments or a tuple of arguments of the model"
        )
    size = int(with_dims[0].shape[0])
    if size == 1:
        size = next((int(t.shape[0]) for t in with_dims if t.ndim >= with_dims[0].ndim and t.shape[0] != 1), 1)
    if not size:
        raise ModelError(f"the batch {describe(batch)} has no samples; give at least one")
    return [Leaf(n, t, bool(t.ndim) and int(t.shape[0]) == size) for n, t in tensors]


def describe(batch: object, dtype: torch.dtype | None = None) -> str:
    """The batch for an error message: `(x: float32 [2, 4])`; floats are cast to `dtype` if given.

    >>> describe({"x": torch.zeros(2, 4)}, torch.bfloat16)
    '(x: bfloat16 [2, 4])'
    """
    flat, _ = pytree.tree_flatten_with_path(_plain(batch))
    parts = []
    for path, value in flat:
        if isinstance(value, torch.Tensor):
            kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
            parts.append(f"{_name(path)}: {str(kind).removeprefix('torch.')} {list(value.shape)}")
    return f"({', '.join(parts)})"


def num_samples(batch: object) -> int:
    """Samples in a batch: dim 0 of its batched tensors."""
    return next(int(leaf.tensor.shape[0]) for leaf in leaves(batch) if leaf.is_batched)


def map_leaves(batch: object, change: Callable[[Leaf], torch.Tensor]) -> Any:
    """The same structure with every tensor replaced by `change(leaf)`."""
    replaced = iter([change(leaf) for leaf in leaves(batch)])
    return pytree.tree_map(lambda v: next(replaced) if isinstance(v, torch.Tensor) else v, _plain(batch))


def call(model: torch.nn.Module, batch: object, loss_fn: object = None) -> Any:
    """`model(**batch)`, `model(*batch)` or `model(batch)` by the kind of batch.

    With a `loss_fn`, entries that forward has no parameter for are the loss's alone. A tuple fills parameters in order,
    those with a default too.
    """
    if isinstance(batch, Mapping):
        left = () if loss_fn is None else not_taken(model, batch)
        return model(**{name: value for name, value in batch.items() if name not in left})
    if isinstance(batch, tuple | list):
        left = () if loss_fn is None else not_taken(model, batch)
        return model(*batch[: len(batch) - len(left)])
    return model(batch)


def not_taken(model: torch.nn.Module, batch: object) -> tuple[str, ...]:
    """Keys of a mapping, or places at the end of a tuple, that forward has no parameter for.

    >>> not_taken(torch.nn.Linear(2, 2), (torch.ones(1, 2), torch.ones(1)))
    ('1',)
    """
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(batch, Mapping):
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        return () if inspect.Parameter.VAR_KEYWORD in kinds else tuple(name for name in batch if name not in named)
    if isinstance(batch, tuple | list) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        return tuple(str(place) for place in range(count, len(batch)))
    return ()


def output_leaves(output: Any) -> dict[str, torch.Tensor]:
    """The tensors of what a model returns by name: `logits`, `hidden_states.0`, or `0` for the first of a tuple.

    >>> list(output_leaves({"a": torch.zeros(1), "b": (torch.zeros(1), None)}))
    ['a', 'b.0']
    """
    flat, _ = pytree.tree_flatten_with_path(_plain(output))
    result: dict[str, torch.Tensor] = {}
    for path, value in flat:
        if isinstance(value, torch.Tensor):
            result[_name(path)] = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            prefix = f"{_name(path)}." if path else ""
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            result |= {f"{prefix}{name}": leaf for name, leaf in output_leaves(fields).items()}
    return result


def scalar_loss(output: Any, batch: object, loss_fn: LossFunction | None, *, source: str = "") -> torch.Tensor:
    """The loss: `loss_fn(output, batch)` if given, else a scalar output, `.loss`, `["loss"]`, or the first of a tuple.

    `source` is where forward is defined.

    Raises:
        ModelError: there is no scalar loss.
    """
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(output, batch)
        origin = f"{where_defined(loss_fn)}: loss_fn"
    else:
        origin = f"{source}: the model" if source else "the model"
        loss = output
        if not isinstance(output, torch.Tensor):
            loss = getattr(output, "loss", None)
            if loss is None and isinstance(output, Mapping):
                loss = output.get("loss")
            if loss is None and isinstance(output, tuple | list) and output:
                loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else (
            f"{type(output if loss_fn is None else loss).__name__} without a loss"
        )  # fmt: skip
        if isinstance(output, Mapping) and loss_fn is None:
            what = f"a {type(output).__name__} with {', '.join(map(str, output)) or 'nothing'}"
        raise ModelError(
            f"{origin} returns {what}; return a scalar loss, `.loss`, ['loss'] or (loss, ...), "
            "or give loss_fn(output, batch) -> scalar mean (in Python; a command takes models that return one)"
        )
    return loss.reshape(())
