"""Assumptions under which a forward that looks at values can be priced: fake tensors have none.

Every value is one, every condition holds (or none), every mask selects all. A size that depends on values is thereby
the largest it can be, so FLOP and bytes are upper bounds: an expert that gets some of the tokens is priced as if it
got all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_VALUE_OF: Mapping[Any, type | None] = {
    torch.Tensor.item: None,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.__index__: int,
}
_MASKS = (torch.bool, torch.uint8)
_ATEN = torch.ops.aten


class AssumedValues(TorchFunctionMode):
    """Answers questions for a tensor's value: one, in the type that was asked for.

    Conditions hold, or do not: one that guards an error must not.
    """

    def __init__(self, *, holds: bool = True) -> None:
        super().__init__()
        self.holds = holds

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _VALUE_OF:
            kind = _VALUE_OF[func]
            if kind is bool or (kind is None and args[0].dtype == torch.bool):
                return self.holds
            return _one(args[0]) if kind is None else kind(1)
        if func is torch.Tensor.tolist:
            return _nested(args[0], args[0].shape)
        return func(*args, **(kwargs or {}))


def _one(tensor: torch.Tensor) -> float | int | bool:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _nested(tensor: torch.Tensor, shape: Sequence[int]) -> Any:
    return [_nested(tensor, shape[1:]) for _ in range(shape[0])] if shape else _one(tensor)


class LargestSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators whose result's size depends on values the largest result that there can be.

    To be entered inside of a `FakeTensorMode`, which refuses these operators.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is _ATEN.nonzero.default:
            return _positions(args[0])
        if func in (_ATEN._ctc_loss.default, _ATEN._ctc_loss.Tensor):
            return _ctc_loss(args[0], args[1])
        if func in (_ATEN._ctc_loss_backward.default, _ATEN._ctc_loss_backward.Tensor):
            return torch.empty_like(args[1])  # torch has no shape function for it
        if func is _ATEN.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            return args[0].new_empty([shape.numel()])
        if func in (_ATEN._unique2.default, _ATEN.unique_consecutive.default):
            return _distinct(args[0], args[0].reshape(-1).shape, args[0].shape)
        if func in (_ATEN.unique_dim.default, _ATEN.unique_dim_consecutive.default):
            return _distinct(args[0], args[0].shape, [args[0].shape[args[1]]])
        if func is _ATEN.bincount.default:
            size = args[2] if len(args) > 2 else named.get("minlength", 0)
            weights = args[1] if len(args) > 1 else named.get("weights")
            kind = torch.int64 if weights is None else torch.float64
            return args[0].new_empty([max(size, 1)], dtype=kind)
        if func is _ATEN.repeat_interleave.Tensor and named.get("output_size") is None:
            named["output_size"] = args[0].numel()
        if func in (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default):
            args = (args[0], _without_masks(args[1]), *args[2:])
        return func(*args, **named)


def _ctc_loss(log_probabilities: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[samples], and [samples, time, 2 * targets + 1] of paths. Targets are padded, or of all samples in one dim."""
    time, samples = log_probabilities.shape[:2]
    paths = 2 * targets.shape[-1] + 1
    return log_probabilities.new_empty([samples]), log_probabilities.new_empty([samples, time, paths])


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Where `mask` is set, as `nonzero` gives it: [elements, dims]."""
    return mask.new_empty([mask.numel(), mask.ndim], dtype=torch.int64)


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Every mask among the indices as the positions that it selects, one index per dim of it."""
    result: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            result += _positions(index).unbind(1)
        else:
            result.append(index)
    return result


def _distinct(values: torch.Tensor, shape: Sequence[int], inverse: Any) -> tuple[torch.Tensor, ...]:
    """Distinct values, for each element the place of its value, and how often each occurs."""
    count = shape[0] if len(shape) else 1
    return (
        values.new_empty(shape),
        values.new_empty(inverse, dtype=torch.int64),
        values.new_empty([count], dtype=torch.int64),
    )
