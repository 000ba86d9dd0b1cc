"""Run models that ask for float32 by name (masks, softmax, rotary tables of Hugging Face) in float64, in tests only.

Equality with one device is checked at a relative 1e-9; a float32 island inside a float64 model would hide errors
below 1e-7 and show differences that are none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_SAME_IN_FLOAT64 = {Tensor.float: Tensor.double}


class _Float32AsFloat64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = _SAME_IN_FLOAT64.get(func, func)
        if func is torch._grouped_mm and args[0].dtype is torch.float64:  # has no such kernel: the library's own loop
            func, args, kwargs = torch.ops.transformers.grouped_mm_fallback, (*args[:2], (kwargs or {})["offs"]), {}
        args, kwargs = tree_map_only(
            torch.dtype, lambda dtype: torch.float64 if dtype is torch.float32 else dtype, (args, dict(kwargs or {}))
        )
        if func is Tensor.type and args[1:] in (("torch.FloatTensor",), (torch.FloatTensor,)):
            args = (args[0], torch.float64)
        return func(*args, **kwargs)


@contextmanager
def explicit_float32_as_float64() -> Iterator[None]:
    """Within it every float32 that code asks for by name or by default is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float32AsFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


class NoFloat32(TorchDispatchMode):
    """Raises where an operator, forward or backward, takes or gives a float32 tensor."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.dtype is torch.float32:
                raise AssertionError(f"{func} has a float32 tensor of shape {list(leaf.shape)}")
        return result
