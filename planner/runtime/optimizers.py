"""The optimizer of a rank: torch's by name, and a look at whether one may be given parts of tensors."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.errors import PlanError

Optimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
_log = logging.getLogger(__name__)
_STEPS = 2  # in the first, some optimizers only take the sign of the gradient
_TOLERANCE = 1e-9  # in float64
_ELEMENTWISE = "an optimizer that works element by element (SGD, Adam, AdamW, RMSprop)"


def named_optimizer(name: str) -> Optimizer:
    """The optimizer that a plan names, with torch's defaults.

    Raises:
        PlanError: there is none of this name.
    """
    makers: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    }
    if name not in makers:
        raise PlanError(f"the plan's optimizer is {name!r}; give optimizer= or one of {sorted(makers)}")
    make = makers[name]
    return lambda named: make([parameter for _, parameter in named])


def check_elementwise(
    optimizer: torch.optim.Optimizer, *, num_shards: int, num_stages: int, num_parts: int = 1
) -> None:
    """Refuse an optimizer whose update of an element depends on elements that another rank holds.

    It is tried on small tensors, with its own settings: whole, in halves of the first dim where parameters are sharded,
    of any dim where tensor parallelism splits them into `num_parts`, one by one where a pipeline's stages hold
    different ones. One that cannot be made anew from its settings is not tried.

    Raises:
        PlanError: the updates differ.
    """
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        shapes = sorted({(4,) * p.ndim for p in group["params"] if p.ndim})
        if not shapes:
            continue
        like = group["params"][0]
        values, gradients = _drawn(shapes, like), _drawn(shapes, like)
        try:
            together = _updated(type(optimizer), settings, values, gradients)
            dims = range(max(map(len, shapes)) if num_parts > 1 else 1)
            joined = [_in_halves(type(optimizer), settings, values, gradients, dim) for dim in dims]
            alone = [_updated(type(optimizer), settings, [v], [g])[0] for v, g in zip(values, gradients, strict=True)]
        except Exception as error:  # whatever the user's own optimizer needs beside its settings
            _log.debug("%s was not tried on parts of tensors: %s", type(optimizer).__name__, error)
            continue
        name = type(optimizer).__name__
        for dim, halves in enumerate(joined):
            ranks = (num_shards if dim == 0 else 1) * num_parts
            if ranks > 1 and any(_differ(half, whole) for half, whole in zip(halves, together, strict=True)):
                remedies = [remedy for remedy, count in (("zero=0", num_shards), ("tp=1", num_parts)) if count > 1]
                raise PlanError(
                    f"{name} looks at whole tensors, and the plan shards them over {ranks} ranks, each of which would "
                    f"see its part alone; use {_ELEMENTWISE}, or plan with "
                    f"{' and '.join(remedies if dim == 0 else remedies[-1:])}"
                )
        if num_stages > 1 and any(_differ(single, whole) for single, whole in zip(alone, together, strict=True)):
            raise PlanError(
                f"{name} looks at all parameters together, and the plan has {num_stages} pipeline stages, each of "
                f"which holds its own; use {_ELEMENTWISE}, or plan with pp=1"
            )


def _in_halves(
    kind: Any, settings: Mapping[str, Any], values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], dim: int
) -> list[torch.Tensor]:
    """The change of each value where two optimizers have a half each of every tensor that has this dim."""

    def half(tensors: Sequence[torch.Tensor], which: int) -> list[torch.Tensor]:
        return [t.chunk(2, dim)[which].contiguous() if t.ndim > dim else t for t in tensors]

    first, second = (_updated(kind, settings, half(values, i), half(gradients, i)) for i in range(2))
    return [
        torch.cat([one, two], dim) if value.ndim > dim else one
        for value, one, two in zip(values, first, second, strict=True)
    ]


def _drawn(shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device) for shape in shapes]


def _updated(
    kind: Any, settings: Mapping[str, Any], values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The change of each value by a few steps of a new optimizer."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind([{**settings, "params": parameters}])
    for _ in range(_STEPS):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [(p.detach() - value) for p, value in zip(parameters, values, strict=True)]


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() > _TOLERANCE * other.norm())
