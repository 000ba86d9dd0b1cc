"""Parameters that a forward did not use, where ranks may differ in which: an expert without tokens, a skipped layer.

FSDP reduces the gradients that a rank has, so ranks with different sets would reduce different buffers into one
another. Within this module's care every rank has a gradient for every trainable parameter, zero where its forward did
not use it, and a parameter that no rank used has none in the end, as on one device: optimizers skip it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn


class _Touch(torch.autograd.Function):
    """The loss itself; parameters that it does not depend on get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], *(torch.zeros(s, dtype=kind, device=device) for s, kind, device in ctx.like)


def reached(loss: torch.Tensor) -> set[int]:
    """Ids of the leaf tensors that a loss depends on, by its autograd graph."""
    found: set[int] = set()
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        function = todo.pop()
        if function is None:
            continue
        leaf = getattr(function, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        for following, _ in function.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return found


class UsedParameters:
    """Which of a data rank's trainable parameters the micro-batches of one step used."""

    def __init__(self, names: Iterable[str]) -> None:
        self._used = dict.fromkeys(names, False)

    def touch(self, loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
        """The loss, made to depend on each of `parameters`, which are those that forward read (gathered ones)."""
        ids = reached(loss)
        unused = []
        for name, parameter in parameters.items():
            if id(parameter) in ids:
                self._used[name] = True
            else:
                unused.append(parameter)
        return _Touch.apply(loss, *unused) if unused else loss  # type: ignore[no-untyped-call]

    def drop_unused(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the gradient from every parameter that no data rank used in this step; a collective.

        A gradient that is not zero counts as use: reentrant checkpoints hide what they read.
        """
        flags = []
        for name, parameter in parameters.items():
            gradient = parameter.grad
            mine = getattr(gradient, "_local_tensor", gradient)
            flags.append(self._used[name] or (mine is not None and bool(mine.any())))
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        used = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)  # without a graph there are data ranks only
        for (name, parameter), is_used in zip(parameters.items(), used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None
            self._used[name] = False
