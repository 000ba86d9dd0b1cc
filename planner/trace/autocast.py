"""Autocast made explicit: which operands of an operator it casts, seen by running the operator on fake tensors.

A graph holds no mode, so a region that the model runs under `torch.autocast` becomes ordinary operators with the casts
that autocast would make in front of them. The policy is torch's own, asked for each call, not a list of ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import map_arg
from torch.utils._python_dispatch import TorchDispatchMode


class NotExplicit(Exception):  # noqa: N818 it is a reason, which becomes a fallback with the user's line
    """Autocast does more to an operator than to cast its operands."""


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The casts that run: of an operand (its identity), or of something else (0)."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands = {id(t) for t in operands}
        self.seen: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            key = id(args[0])
            self.seen.append((key if key in self.operands else 0, out.dtype))
        return out


def casts_of(node: fx.Node, dtype: torch.dtype) -> Mapping[fx.Node, torch.dtype]:
    """Operands of a call that autocast to `dtype` casts on a CPU, and to what.

    Raises:
        NotExplicit: the operator casts inside, or its results have other dtypes than with operands cast.
    """
    operands = {n: n.meta.get("val") for n in node.all_input_nodes}
    tensors = {n: v for n, v in operands.items() if isinstance(v, torch.Tensor)}
    if len(tensors) < len(operands) or not tensors:
        raise NotExplicit(f"{node.target} has operands that are no tensors")
    target: Any = node.target

    def run(values: Mapping[fx.Node, torch.Tensor], *, enabled: bool) -> tuple[Any, list[tuple[int, torch.dtype]]]:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        mode: Any = next(iter(values.values())).fake_mode  # type: ignore[attr-defined]
        log = _Casts(list(values.values()))
        with mode, torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=False), log:
            return target(*args, **kwargs), log.seen

    copies = {n: v.clone() for n, v in tensors.items()}  # what is written in place are copies
    wanted, with_autocast = run(copies, enabled=True)
    _, without = run({n: v.clone() for n, v in tensors.items()}, enabled=False)
    node_of = {id(v): n for n, v in copies.items()}
    casts = {node_of[key]: kind for key, kind in with_autocast if key}
    if without:
        if len(with_autocast) == len(without):
            return {}
        raise NotExplicit(f"{node.target} casts by itself")
    if any(not key for key, _ in with_autocast):
        raise NotExplicit(f"{node.target} casts inside")
    found, _ = run({n: v.to(casts.get(n, v.dtype)) for n, v in tensors.items()}, enabled=False)
    if _dtypes(found) != _dtypes(wanted) or _dtypes(wanted) != _dtypes(node.meta.get("val")):
        raise NotExplicit(f"{node.target} gives other dtypes")
    return casts


def _dtypes(value: Any) -> list[torch.dtype | None]:
    items = value if isinstance(value, list | tuple) else (value,)
    return [item.dtype if isinstance(item, torch.Tensor) else None for item in items]
