"""Training a model that has no graph: its own modules, wrapped as they are.

Custom autograd Functions, hooks and parametrizations run as the user wrote them. There is no
pipeline and no recomputation; ZeRO, gradient accumulation and clipping are the same. Random numbers are torch's own,
seeded anew for every micro-batch: repeatable, but another plan draws others.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import ModelError, PlanError, RunError
from planner.graph import Graph
from planner.plan import Plan
from planner.runtime.execute import Evaluated, Owned
from planner.runtime.inputs import evaluation_sizes, exchanged, shared_out
from planner.runtime.phases import Phases
from planner.runtime.random import RandomSource, seeded
from planner.runtime.statistics import DataRanks, ModuleStatistics
from planner.runtime.unused import UsedParameters
from planner.runtime.weights import Values, check_attributes, fill, together
from planner.runtime.zero import COMPUTE_DTYPES, Sharder, fsdp_modules, master_dtype
from planner.trace import Evaluation
from planner.trace.batch import Leaf, call, leaves, map_leaves, num_samples, scalar_loss

_log = logging.getLogger(__name__)
LossFunction = Callable[[Any, Any], torch.Tensor]


class FallbackEngine:
    """The user's module on one data rank. The plan's blocks name the modules to wrap."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        graph: Graph,
        loss_fn: LossFunction | None,
        *,
        sharder: Sharder,
        data_ranks: DataRanks,
        device: torch.device,
        values: Values,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.sharder = sharder
        self._loss_fn = loss_fn
        self._device = device
        self._micro_batch = plan.micro_batch
        self._num_microbatches = plan.num_microbatches
        self._dtype = COMPUTE_DTYPES[plan.precision]
        self.random = RandomSource(seed)
        self.phases = Phases(device)
        self._rank = data_ranks.rank
        self._why_no_graph = str(graph.fallbacks[0])
        self._input_names = {graph.tensors[index].name for index in graph.inputs}
        hooks = _parameter_hooks(model)
        names = {id(p): name for name, p in model.named_parameters()}
        with together():
            check_attributes(model)
            _prepare(model, master_dtype(plan.precision), values, device, wrapped=sharder.mesh is not None)
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
        with together():
            fill(model, self.owned, values, device)
        self._read = _read_in_forward(model, self.owned)
        _move_hooks(self.owned, self._read, hooks)
        self._used = UsedParameters(self._read)
        self._statistics = ModuleStatistics(model, data_ranks, device)
        if not model.training:  # parts that the user put in eval mode stay so
            model.train()

    def run(self, batch: object, scale: float = 1.0) -> torch.Tensor:
        """Forward and backward of all micro-batches; the mean of their losses, weighed by their samples.

        Raises:
            RunError: the batch does not fit, on all ranks alike; nothing was run then.
        """
        with self.phases.measured("data"):
            samples = self._samples_everywhere(batch)
        shares = shared_out(
            samples, self._rank, micro_batch=self._micro_batch, num_microbatches=self._num_microbatches
        )  # fmt: skip
        draws = self.random.next_step(shares.first_sample, shares.sizes)
        losses = []
        self._statistics.begin()
        for position, inputs in enumerate(self._split(batch, shares.sizes)):
            self.sharder.before_micro_batch(is_last=position == len(shares.sizes) - 1)
            with seeded(draws[position].of_sample(0, 0), self._device):
                try:
                    with self.phases.measured("forward"):
                        loss = scalar_loss(call(self.model, inputs, self._loss_fn), inputs, self._loss_fn)
                except ModelError as error:
                    raise RunError(f"step: {error}") from error
                loss = loss * (shares.sizes[position] * shares.num_microbatches / sum(samples))
                losses.append(loss.detach().double())
                loss = self._used.touch(loss, self._read)
                with self.phases.measured("backward"):
                    (loss * (scale / len(shares.sizes))).backward()  # type: ignore[no-untyped-call]
        self._statistics.end()
        return torch.stack(losses).mean()

    def evaluate(self, batch: object, outputs: Sequence[str], *, gather: bool) -> Evaluated:
        """Forward in eval mode without gradients, on any number of samples; the loss is the mean over them."""
        samples = self._samples_everywhere(batch)
        sizes, kept = evaluation_sizes(samples, self._rank, min(self._micro_batch, max(samples)))
        with_loss = self._input_names <= {leaf.name for leaf in leaves(batch)}
        results: list[tuple[torch.Tensor, ...]] = []
        modes = [(module, module.training) for module in self.model.modules()]
        evaluation = Evaluation(outputs, self._loss_fn, with_loss=with_loss)
        failure: Exception | None = None
        self.model.eval()
        try:
            with torch.no_grad():
                for inputs in self._split(batch, sizes, kept=kept):
                    results.append(evaluation(call(self.model, inputs, self._loss_fn), inputs))
        except ModelError as error:
            failure = error
        finally:
            for module, training in modes:
                module.training = training
            self.sharder.after_backward()
        exchanged([], failure, self._device)
        loss = None
        if with_loss:
            parts = [result[0].double() * size for result, size in zip(results[:kept], sizes, strict=False)]
            total = torch.stack(parts).sum() / sum(samples)
            dist.all_reduce(total)
            loss = total.item()
        found = {}
        for position, name in enumerate(evaluation.names, 1):
            for result, size in zip(results[:kept], sizes, strict=False):
                if result[position].ndim == 0 or result[position].shape[0] != size:
                    raise RunError(f"the output {name} has no batch dim; only outputs of each sample can be had")
            found[name] = torch.cat([result[position] for result in results[:kept]])
        return Evaluated(loss=loss, outputs={n: _gathered(v, samples) if gather else v for n, v in found.items()})

    def sum_partial(self) -> None:
        """Nothing: without a graph no tensor is split."""

    def sum_tied(self) -> None:
        """Nothing: one stage holds every parameter once."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        return dict(self.model.named_buffers())

    def expert_loads(self) -> dict[str, list[int]]:
        """Nothing, with a warning: experts are found in a graph."""
        if dist.get_rank() == 0:
            _log.warning("no expert is counted, since the model has no graph: %s", self._why_no_graph)
        return {}

    def after_backward(self) -> None:
        """Free gathered parameters; take gradients from parameters that no rank used."""
        self.sharder.after_backward()
        self._used.drop_unused({owned.name: owned.parameter for owned in self.owned if owned.name in self._read})

    def _samples_everywhere(self, batch: object) -> list[int]:
        """The samples of every data rank."""
        failure: Exception | None = None
        samples = 0
        try:
            samples = num_samples(batch)
        except ModelError as error:
            failure = RunError(f"step: {error}")
        return [int(count) for (count,) in exchanged([samples], failure, self._device)]

    def _split(self, batch: object, sizes: Sequence[int], *, kept: int | None = None) -> Iterable[Any]:
        """Micro-batches of `sizes`: parts of what has the samples in dim 0; from `kept` on the first sample."""
        batched = {leaf.name for leaf in leaves(batch) if leaf.is_batched}

        def part(start: int, size: int, leaf: Leaf) -> torch.Tensor:
            value = leaf.tensor
            if leaf.name in batched:
                value = value[start : start + size]
            kind = self._dtype if value.is_floating_point() else value.dtype
            return value.to(self._device, kind)

        start = 0
        for position, size in enumerate(sizes):
            yield map_leaves(batch, partial(part, start if kept is None or position < kept else 0, size))
            start += size


def _gathered(value: torch.Tensor, samples: Sequence[int]) -> torch.Tensor:
    """The values of all data ranks along dim 0, in order."""
    parts = []
    for rank, count in enumerate(samples):
        is_own = rank == dist.get_rank()
        part = value.contiguous() if is_own else value.new_empty((count, *value.shape[1:]))
        dist.broadcast(part, rank)
        parts.append(part)
    return torch.cat(parts)


def _prepare(model: nn.Module, dtype: torch.dtype, values: Values, device: torch.device, *, wrapped: bool) -> None:
    """Parameters in the dtype that the optimizer sees, everything on the device but parameters without a value yet."""
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        parameter.data = parameter.data.to("meta" if parameter.is_meta else device, kind)
        if wrapped and not parameter.ndim:
            raise PlanError(
                "a parameter without dims cannot be sharded where the model has no graph; give it the shape [1], "
                "or plan with one data rank"
            )
        if wrapped:
            parameter.data = parameter.data.contiguous()
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    moved: dict[str, torch.Tensor] = {}
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                name = names[id(buffer)]
                if name not in moved:
                    moved[name] = values.buffer(name, device)
                module._buffers[leaf] = moved[name]


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


def _read_in_forward(model: nn.Module, owned: Sequence[Owned]) -> dict[str, nn.Parameter]:
    """The objects that autograd sees of the trainable parameters: the gathered ones, where they are sharded.

    FSDP keeps each gathered parameter object for good and only frees its storage. One part is gathered at a time.
    """
    trained = [o for o in owned if o.parameter.requires_grad]
    found = {o.name: o.parameter for o in trained}
    for part in fsdp_modules(model):
        part.unshard()
        found.update({o.name: o.parameter for o in trained if not isinstance(o.parameter, DTensor)})
        part.reshard()
    return found


def _move_hooks(
    owned: Sequence[Owned], read: Mapping[str, nn.Parameter], hooks: Mapping[tuple[nn.Module, str], Sequence[Any]]
) -> None:
    """Put gradient hooks on the parameters that forward reads, if those are other objects than the model's own.

    A hook then sees this rank's gradient of one micro-batch, before the average over ranks.
    """
    for site in owned:
        if site.name in read and read[site.name] is not site.parameter:
            for function in hooks.get((site.module, site.leaf), ()):
                read[site.name].register_hook(function)  # type: ignore[no-untyped-call]
