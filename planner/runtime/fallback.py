"""Training a model that has no graph: its own modules, wrapped as they are.

Custom autograd Functions, hooks and parametrizations run as the user wrote them. There is no
pipeline and no recomputation; ZeRO, gradient accumulation and clipping are the same.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.errors import ModelError, PlanError, RunError
from planner.plan import Plan
from planner.runtime.execute import Owned
from planner.runtime.zero import COMPUTE_DTYPES, Sharder, master_dtype
from planner.trace.batch import Leaf, call, leaves, map_leaves, num_samples, scalar_loss

LossFunction = Callable[[Any, Any], torch.Tensor]


class FallbackEngine:
    """The user's module on one data rank. The plan's blocks name the modules to wrap."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: LossFunction | None,
        *,
        sharder: Sharder,
        device: torch.device,
    ) -> None:
        self.model = model
        self.sharder = sharder
        self._loss_fn = loss_fn
        self._device = device
        self._micro_batch = plan.micro_batch
        self._num_microbatches = plan.num_microbatches
        self._dtype = COMPUTE_DTYPES[plan.precision]
        hooks = _parameter_hooks(model)
        names = {id(p): name for name, p in model.named_parameters()}
        _prepare(model, master_dtype(plan.precision), device, wrapped=sharder.mesh is not None)
        # The same tensors under new objects if they moved: sites stay, objects are read when needed.
        self.owned = _sites(model, names)
        modules = dict(model.named_modules())
        zeros = {block.name: block.zero for block in plan.stages[0].blocks}
        unknown = [name for name in zeros if name not in modules]
        if unknown or "" not in zeros:
            raise PlanError(f"the plan wraps modules {unknown or ['']}, which the model lacks")
        for name in sorted(zeros, key=lambda name: name.count("."), reverse=True):
            if name:
                sharder.wrap(modules[name], zeros[name])
        sharder.wrap(model, zeros[""])
        _move_hooks(model, hooks)
        if not model.training:  # parts that the user put in eval mode stay so
            model.train()

    def run(self, batch: object) -> torch.Tensor:
        """Forward and backward of all micro-batches; the mean of their losses."""
        losses = []
        for position, inputs in enumerate(self._split(batch)):
            self.sharder.before_micro_batch(is_last=position == self._num_microbatches - 1)
            try:
                loss = scalar_loss(call(self.model, inputs), inputs, self._loss_fn)
            except ModelError as error:
                raise RunError(f"step: {error}") from error
            losses.append(loss.detach().double())
            (loss / self._num_microbatches).backward()  # type: ignore[no-untyped-call]
        return torch.stack(losses).mean()

    def sum_tied(self) -> None:
        """Nothing: one stage holds every parameter once."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        return dict(self.model.named_buffers())

    def after_backward(self) -> None:
        """Free gathered parameters."""
        self.sharder.after_backward()

    def _split(self, batch: object) -> Iterable[Any]:
        """Micro-batches: equal parts of every tensor that has the samples in dim 0."""
        expected = self._micro_batch * self._num_microbatches
        try:
            samples = num_samples(batch)
        except ModelError as error:
            raise RunError(f"step: {error}") from error
        if samples != expected:
            raise RunError(
                f"the batch has {samples} samples, this data rank takes {expected} a step "
                f"({self._num_microbatches} micro-batches of {self._micro_batch}); "
                "give every data rank its own global_batch / data_world samples"
            )
        batched = {leaf.name for leaf in leaves(batch) if leaf.is_batched}

        def part(position: int, leaf: Leaf) -> torch.Tensor:
            value = leaf.tensor
            if leaf.name in batched:
                value = value.tensor_split(self._num_microbatches)[position]
            kind = self._dtype if value.is_floating_point() else value.dtype
            return value.to(self._device, kind)

        for position in range(self._num_microbatches):
            yield map_leaves(batch, partial(part, position))


def _prepare(model: nn.Module, dtype: torch.dtype, device: torch.device, *, wrapped: bool) -> None:
    """Parameters in the dtype that the optimizer sees, everything on the device."""
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        parameter.data = parameter.data.to(device, kind)
        if wrapped and not parameter.ndim:
            raise PlanError(
                "a parameter without dims cannot be sharded where the model has no graph; give it the shape [1], "
                "or plan with one data rank"
            )
        if wrapped:
            parameter.data = parameter.data.contiguous()
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)


def _sites(model: nn.Module, names: dict[int, str]) -> list[Owned]:
    """Every parameter once, under its first name, and where it is registered."""
    found: dict[str, Owned] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = names[id(parameter)]
                found.setdefault(name, Owned(name=name, module=module, leaf=leaf))
    return list(found.values())


def _parameter_hooks(model: nn.Module) -> dict[tuple[nn.Module, str], list[Any]]:
    """Gradient hooks by the place of their parameter.

    Raises:
        PlanError: a hook that runs after accumulation, which sharding would run on other values.
    """
    found: dict[tuple[nn.Module, str], list[Any]] = {}
    seen: set[int] = set()
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise PlanError(
                    f"parameter {leaf} of {type(module).__name__} has a post-accumulate-gradient "
                    "hook, which a plan cannot keep; use a gradient hook or an optimizer instead"
                )
            if hooks := getattr(parameter, "_backward_hooks", None):
                found[module, leaf] = list(hooks.values())
    return found


def _move_hooks(model: nn.Module, hooks: dict[tuple[nn.Module, str], list[Any]]) -> None:
    """Put gradient hooks on the parameters that autograd sees: the gathered ones.

    FSDP keeps each gathered parameter object for good and only frees its storage, so a hook on it
    stays. It sees this rank's gradient of one micro-batch, before the average over ranks.
    """
    if not hooks or not isinstance(model, FSDPModule):
        return
    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in wrapped:
        part.unshard()
    for (module, leaf), functions in hooks.items():
        for function in functions:
            getattr(module, leaf).register_hook(function)
    for part in wrapped:
        part.reshard()
