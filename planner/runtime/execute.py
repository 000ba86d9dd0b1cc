"""Running one rank's stage for one step: a loop without a pipeline, torch's schedules with one.

The plan is made for one shape of batch. A batch of another shape (a last one with fewer samples, another sequence
length, evaluation) runs as a *variant*: the model is traced again, and the stage gets another program over the same
registered parameters. All ranks agree on the number of micro-batches before they run any.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from planner.errors import PlanError, RunError
from planner.graph import Graph
from planner.plan import Plan
from planner.runtime.blocks import (
    INPUT,
    WEIGHTS,
    Lowered,
    Stage,
    StageProgram,
    boundary_examples,
    constant,
    dtype_of,
    lower_block,
    lower_prelude,
    shape_of,
)
from planner.runtime.experts import ExpertCounts
from planner.runtime.inputs import (
    Fed,
    Form,
    Inputs,
    Shares,
    Weights,
    batch_dim,
    evaluation_sizes,
    exchanged,
    shared_out,
    split,
    tensors_of,
)
from planner.runtime.peers import Axes, Part
from planner.runtime.phases import Phases
from planner.runtime.random import RandomSource
from planner.runtime.statistics import DataRanks, Recursion, Statistics
from planner.runtime.zero import ShardedStage, Sharder, local, sends_integers

SCHEDULES: Mapping[str, type[Schedule1F1B] | type[ScheduleGPipe]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A parameter that this rank trains (or keeps, if frozen), and where it is registered.

    `is_counted` is off where an earlier stage counts the same parameter in the gradient norm; `is_split` is on where
    the ranks of tensor parallelism hold parts of it.
    """

    name: str
    module: nn.Module
    leaf: str
    is_counted: bool = True
    is_split: bool = False

    @property
    def parameter(self) -> nn.Parameter:
        """The object the optimizer holds: a DTensor where it is sharded or replicated."""
        found: nn.Parameter = getattr(self.module, self.leaf)
        return found


class Engine(Protocol):
    """What a `Trainer` drives: one stage, with a graph or without."""

    owned: list[Owned]
    random: RandomSource
    phases: Phases

    def run(self, batch: object, scale: float = 1.0) -> torch.Tensor:
        """Forward and backward of one step; gradients of the loss times `scale` are added to those that are there.

        Returns:
            The mean loss over this rank's micro-batches as a float64 scalar; zero on a rank whose
            stage has no loss. Its mean over the data ranks is the loss of the global batch.
        """

    def evaluate(self, batch: object, outputs: Sequence[str], *, gather: bool) -> "Evaluated":
        """Forward in eval mode without gradients, on any number of samples."""

    def sum_partial(self) -> None:
        """Add up the gradients of which the ranks of tensor parallelism have parts of the sum."""

    def sum_tied(self) -> None:
        """Add up the gradients of parameters that other stages read as well."""

    def after_backward(self) -> None:
        """Free what the optimizer's step will make stale."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this rank may have changed, by name."""

    def expert_loads(self) -> dict[str, list[int]]:
        """Tokens that each expert of each layer got so far, on all ranks; a collective."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """`loss` is the mean of the global batch (None without labels); `outputs` are leaves of the model's output."""

    loss: float | None
    outputs: Mapping[str, torch.Tensor]


# (form, outputs of an evaluation or None for training, whether there is a loss)
Key = tuple[Form, tuple[str, ...] | None, bool]
Retrace = Callable[[Key, object], Graph]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Variant:
    """One shape of batch: this rank's part of its graph, this stage's program of it, what its micro-batches weigh."""

    key: Key
    part: Part
    program: StageProgram
    weights: Weights
    needs_gradient: dict[int, tuple[bool, ...]] = field(default_factory=dict)  # by cut, of what crosses it

    @property
    def graph(self) -> Graph:
        """With the sizes of one rank."""
        return self.part.graph

    @property
    def digest(self) -> int:
        """A number that variants of different shapes, or split otherwise, do not share, exact in float64."""
        split = "" if self.graph is self.part.whole else self.graph.fingerprint
        return int.from_bytes(hashlib.blake2b(repr((self.key, split)).encode(), digest_size=6).digest())


MOST_VARIANTS = 8  # beside the planned one


class GraphEngine:
    """One rank's stage of a model that has a graph."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        tensors: Mapping[int, torch.Tensor],
        *,
        mesh: DeviceMesh,
        axes: Axes,
        sharder: Sharder,
        device: torch.device,
        seed: int = 0,
        retrace: Retrace | None = None,
    ) -> None:
        """`tensors` are the parameters and buffers of this rank's stage and of the prelude, as `axes` hold them.

        `retrace` makes the graph of a batch of another form, or for evaluation; without it there are none.
        """
        self.graph = graph
        self.plan = plan
        self.axes = axes
        self.sharder = sharder
        self.device = device
        self.inputs = Inputs(graph, device=device)
        self._retrace = retrace
        self._pp_group = mesh["pp"].get_group()
        self._losses: list[torch.Tensor] = []
        self._factor = 1.0  # of a micro-batch's loss in backward
        self.random = RandomSource(seed)
        self.phases = Phases(device)
        self._data_ranks = DataRanks.of(mesh)
        part = axes.planned
        attributes = _Attributes(part.graph, tensors, device)
        self._index = index = mesh["pp"].get_local_rank()
        self._experts = ExpertCounts(graph, device)
        self.stage = self._build(plan, index, attributes, device)
        self._planned = _Variant(
            key=(self.inputs.form, None, True), part=part, program=self.stage.first,
            weights=Weights(part.graph, attributes, device),
        )  # fmt: skip
        self._buffers = attributes.buffers
        self._variants: OrderedDict[Key, _Variant] = OrderedDict()
        self._schedules: dict[tuple[_Variant, int, int], PipelineScheduleSingle] = {}
        readers = stages_of_parameters(plan, graph)
        self._refuse_unsendable(part)
        self.owned = [
            Owned(
                name=graph.tensors[tensor].name,
                module=module,
                leaf=leaf,
                is_counted=readers[tensor][0] == index,
                is_split=axes.is_split(graph.tensors[tensor].name),
            )
            for tensor, (module, leaf) in sorted(self.stage.sites().items())
        ]
        self._tied = _tied_groups(graph, readers, index, self._pp_group)
        decays = {update.buffer: update.decay for update in graph.buffer_updates}
        self._statistics = Statistics(
            [
                Recursion(read=partial(block.value, tensor), decay=decays[tensor])
                for block in cast("list[Lowered]", list(self.stage.blocks))
                for tensor in block.mutated
                if tensor in decays
            ],
            self._data_ranks,
        )
        self._own_tied: dict[str, torch.Tensor] = {}
        self._partial = [o for o in self.owned if o.parameter.requires_grad and axes.is_partial(o.name)]
        self._spread = [o for o in self.owned if o.parameter.requires_grad and axes.is_spread(o.name)]
        self._has_gradient: dict[str, bool] = {}  # by tied parameter, whether any stage has one

    def run(self, batch: object, scale: float = 1.0) -> torch.Tensor:
        """Forward and backward of all micro-batches.

        Raises:
            RunError: the batch does not fit, on all ranks alike; nothing was run then.
        """
        with self.phases.measured("data"):
            fed, variant, samples = self._agreed(lambda: self._fed(batch))
            shares = shared_out(
                samples, self._data_ranks.rank, micro_batch=self.plan.micro_batch,
                num_microbatches=self.plan.num_microbatches, needs_two=variant.graph.needs_two_samples,
            )  # fmt: skip
            tensors = tensors_of(variant.graph, fed)
            micro_batches = split(variant.graph, tensors, shares.sizes)
            weights = variant.weights.of(micro_batches, shares)
        self._losses.clear()
        self._factor = scale / len(micro_batches) * self.axes.loss_factor
        self._own_tied = self._without_tied_gradients()
        self._share_partial()
        self.stage.program = variant.program
        self.stage.draws = iter(self.random.next_step(shares.first_sample, shares.sizes))
        self._statistics.begin()
        if self.plan.mesh.pp == 1:
            for position, inputs in enumerate(micro_batches):
                self.sharder.before_micro_batch(is_last=position == len(micro_batches) - 1)
                with self.phases.measured("forward"):
                    loss = self.stage(**_keywords(inputs, weights[position]))
                with self.phases.measured("backward"):
                    self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        else:
            self._run_pipeline(variant, tensors, weights, shares)
        self._statistics.end(len(micro_batches))
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(self._losses).double().mean()

    def evaluate(self, batch: object, outputs: Sequence[str], *, gather: bool) -> Evaluated:
        """Forward in eval mode without gradients, on any number of samples."""
        fed, variant, samples = self._agreed(lambda: self._fed_for_evaluation(batch, tuple(outputs)))
        graph, most, with_loss = variant.graph, max(samples), variant.key[2]
        # What compares the samples of a batch must see all of them.
        micro_batch = most if graph.couples_samples else min(self.plan.micro_batch, most)
        sizes, kept = evaluation_sizes(samples, self._data_ranks.rank, micro_batch)
        micro_batches = split(graph, tensors_of(graph, fed), sizes[:kept])
        micro_batches += split(graph, tensors_of(graph, fed), [1, fed.samples - 1])[:1] * (len(sizes) - kept)
        shares = Shares(samples, self._data_ranks.rank, tuple(sizes), ())
        weights = variant.weights.of(micro_batches, shares, kept=kept)
        results = self._forward_only(variant, micro_batches, weights, shares.sizes)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        found: dict[str, torch.Tensor] = {}
        if results:
            if with_loss:
                loss = torch.stack([result[0] for result in results]).double().mean() / (len(samples) * self.axes.size)
            for name, tensor in graph.outputs:
                position = variant.program.sent.index(tensor)
                found[name] = torch.cat([r[position] for r in results[:kept]], _batched_dim(graph, tensor))
        mean = None
        if with_loss:
            dist.all_reduce(loss)
            mean = loss.item()
        return Evaluated(loss=mean, outputs=self._exchanged(variant.part.whole, found, samples, gather=gather))

    def _fed(self, batch: object) -> tuple[Fed, _Variant]:
        fed = self.inputs.check(batch)
        return fed, self._variant_of((fed.form, None, True), batch)

    def _fed_for_evaluation(self, batch: object, outputs: tuple[str, ...]) -> tuple[Fed, _Variant]:
        fed = self.inputs.check(batch, optional=tuple(self.inputs.index_of))
        missing = sorted(self.inputs.index_of.keys() - fed.tensors.keys())
        if missing and not outputs:
            raise RunError(f"the batch lacks {missing[0]!r}, so it has no loss; give it, or ask for outputs")
        return fed, self._variant_of((fed.form, outputs, not missing), batch)

    def _variant_of(self, key: Key, batch: object) -> _Variant:
        """The variant of a form; a new one is traced and lowered, and the one that was not used for longest dropped."""
        if key == self._planned.key:
            return self._planned
        if key in self._variants:
            self._variants.move_to_end(key)
            return self._variants[key]
        if self._retrace is None:
            raise RunError(f"the batch has {_shown(key[0])}, the plan was made for {_shown(self.inputs.form)}")
        whole = self._retrace(key, batch)
        _check_alike(self.graph, whole, is_trained=key[1] is None)
        part = self.axes.part_of(whole)
        graph = part.graph
        attributes = _Attributes(graph, _Named(graph, self._buffers), self.device)
        program = self.stage.add(
            graph, attributes=attributes, device=self.device, weighed=True, peers=part.peers,
            counters=self._experts.of(part) if key[1] is None else {},
        )  # fmt: skip
        variant = _Variant(
            key=key, part=part, program=program, weights=Weights(graph, attributes, self.device)
        )  # fmt: skip
        self._variants[key] = variant
        if len(self._variants) > MOST_VARIANTS:
            self._variants.popitem(last=False)
        return variant

    def _agreed(self, feed: Callable[[], tuple[Fed, _Variant]]) -> tuple[Fed, _Variant, tuple[int, ...]]:
        """What this rank was given, and the samples of every data rank; a collective.

        Raises:
            RunError: a rank refuses its batch, or batches do not go together; on all ranks.
        """
        failure: Exception | None = None
        row = [0.0] * 5
        try:
            fed, variant = feed()
            weights = variant.weights
            content = fed.digest if self.axes.size > 1 else 0  # exact in float64
            row = [fed.samples, variant.digest, float(weights.fits_any_form), weights.width, content]
        except Exception as error:
            failure = error
        rows = exchanged(row, failure, self.device)
        dp, tp = self._data_ranks.size, self.axes.size
        for rank, (samples, digest, fits, width, values) in enumerate(rows):
            data_rank = rank // tp % dp
            first = rows[data_rank * tp]
            if [samples, digest] != first[:2]:
                are = "stages of one pipeline" if tp == 1 else "of one data rank"
                raise RunError(
                    f"ranks {data_rank * tp} and {rank} are {are} and were given different batches "
                    f"({first[0]:.0f} and {samples:.0f} samples); give all ranks of one data rank the same"
                )
            if values != rows[rank - rank % tp][4]:
                raise RunError(
                    f"ranks {rank - rank % tp} and {rank} split the tensors of one data rank and were given batches of "
                    "different values; give all ranks of one data rank the same (trainer.data_rank tells which it is)"
                )
            if digest != rows[0][1] and (not fits or width != rows[0][3]):
                raise RunError(
                    f"data ranks 0 and {data_rank} were given batches of different shapes, and the loss is not only a "
                    "mean over counted targets; give all data ranks the same sizes"
                )
        return fed, variant, tuple(int(samples) for samples, *_ in rows[: dp * tp : tp])

    def _run_pipeline(
        self, variant: _Variant, tensors: Mapping[int, torch.Tensor], weights: torch.Tensor, shares: Shares
    ) -> None:
        """One schedule for each run of equal micro-batches."""
        wanted = {(variant, size, count) for size, count in shares.runs}
        # Receive buffers are as many as micro-batches: only those of one step are kept.
        self._schedules = {key: schedule for key, schedule in self._schedules.items() if key in wanted}
        parts = split(variant.graph, tensors, [size * count for size, count in shares.runs])
        rows = weights.split([count for _, count in shares.runs])  # type: ignore[no-untyped-call]
        for (size, count), inputs, own in zip(shares.runs, parts, rows, strict=True):
            key = (variant, size, count)
            if key not in self._schedules:
                self._schedules[key] = self._make_schedule(variant, size, count)
            self.sharder.before_schedule()
            keywords: dict[str, Any] = _keywords(inputs, own)
            # The loss is in the graph; the schedule only asks for some target on the last stage.
            if self.stage.is_last:
                keywords["target"] = torch.arange(count)
            try:
                self._schedules[key].step(return_outputs=False, **keywords)
            except RuntimeError as error:
                for note in getattr(error.__cause__, "__notes__", ()):
                    error.add_note(note)
                raise

    def _forward_only(
        self,
        variant: _Variant,
        micro_batches: Sequence[Mapping[int, torch.Tensor]],
        weights: torch.Tensor,
        sizes: Sequence[int],
    ) -> list[tuple[torch.Tensor, ...]]:
        """What the last stage makes of each micro-batch; nothing on other stages."""
        graph, program = variant.graph, variant.program
        results: list[tuple[torch.Tensor, ...]] = []
        sends: list[tuple[Any, torch.Tensor]] = []
        self.stage.program = program
        self.stage.draws = iter(())
        with torch.no_grad():
            for inputs, row, size in zip(micro_batches, weights, sizes, strict=True):
                received = []
                for tensor in program.received:
                    shape, dtype = shape_of(graph, tensor, size), dtype_of(graph, tensor)
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(value, group=self._pp_group, group_src=self._index - 1)
                    received.append(value)
                made = self.stage(*received, **_keywords(inputs, row))
                made = made if isinstance(made, tuple) else (made,)
                if self.stage.is_last:
                    results.append(made)
                else:
                    for value in made:
                        work = dist.isend(value, group=self._pp_group, group_dst=self._index + 1)
                        sends.append((work, value))
            for work, _ in sends:
                work.wait()
        self.sharder.after_backward()
        return results

    def _exchanged(
        self, graph: Graph, found: Mapping[str, torch.Tensor], samples: tuple[int, ...], *, gather: bool
    ) -> dict[str, torch.Tensor]:
        """Outputs on every rank: those of all samples in order, or only those of its data rank."""
        result = {}
        for name, tensor in graph.outputs:
            parts = []
            for rank in range(len(samples)) if gather else [self._data_ranks.rank]:
                value = found.get(name)
                if value is None or rank != self._data_ranks.rank:
                    shape = shape_of(graph, tensor, samples[rank])
                    value = torch.empty(shape, dtype=dtype_of(graph, tensor), device=self.device)
                value = value.contiguous()
                last = self.plan.mesh.pp - 1
                if gather:  # from the first rank that has it; ranks count stages first, then data ranks
                    dist.broadcast(value, (last * len(samples) + rank) * self.axes.size)
                elif last:
                    dist.broadcast(value, group=self._pp_group, group_src=last)
                parts.append(value)
            result[name] = torch.cat(parts, _batched_dim(graph, tensor))
        return result

    def _share_partial(self) -> None:
        """Gradients of earlier calls are sums over tp already: each rank keeps its share for the next sum."""
        gradients = [local(o.parameter.grad) for o in self._partial if o.parameter.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self.axes.num_summands)
        if of_experts := [local(o.parameter.grad) for o in self._spread if o.parameter.grad is not None]:
            torch._foreach_mul_(of_experts, self.axes.num_owners)

    def sum_partial(self) -> None:
        """All-reduce the local part of each gradient of which the ranks of tp have parts of the sum."""
        with torch.no_grad():
            self.axes.sum(local(o.parameter.grad) for o in self._partial if o.parameter.grad is not None)
            # FSDP averages over the data ranks but those of ep, the sum over whose samples is there already.
            if of_experts := [local(o.parameter.grad) for o in self._spread if o.parameter.grad is not None]:
                torch._foreach_div_(of_experts, self.axes.num_owners)

    def _without_tied_gradients(self) -> dict[str, torch.Tensor]:
        """Take gradients of shared parameters aside: they are summed over stages already."""
        result = {}
        by_name = {owned.name: owned.parameter for owned in self.owned}
        for name, _ in self._tied:
            parameter = by_name[name]
            if parameter.grad is not None:
                result[name] = parameter.grad
                parameter.grad = None
        return result

    def sum_tied(self) -> None:
        """All-reduce the local part of each tied gradient over the stages that own it."""
        by_name = {owned.name: owned.parameter for owned in self.owned}
        for name, group in self._tied:
            parameter = by_name[name]
            if name not in self._has_gradient:
                # A stage may only use the parameter detached; all stages of the group must still call alike.
                anyone = torch.tensor(parameter.grad is not None, dtype=torch.int32, device=self.device)
                dist.all_reduce(anyone, group=group)
                self._has_gradient[name] = bool(anyone)
            if self._has_gradient[name]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)
                if name in self._own_tied:
                    parameter.grad += self._own_tied[name]
        self._own_tied = {}

    def after_backward(self) -> None:
        """Free gathered parameters."""
        self.sharder.after_backward()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that this stage updates, by name."""
        return {self.graph.tensors[t].name: b for t, b in self.stage.buffers_written().items()}

    def expert_loads(self) -> dict[str, list[int]]:
        """Tokens that each expert of each layer got so far, on all ranks; a collective."""
        return self._experts.read()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Keep a micro-batch's loss, and give its part of the mean."""
        self._losses.append(loss.detach())
        return loss * self._factor

    def _build(self, plan: Plan, index: int, attributes: "_Attributes", device: torch.device) -> Stage:
        """Lower and wrap this rank's blocks one by one, then the stage."""
        part, micro_batch = self.axes.planned, plan.micro_batch
        graph = part.graph
        positions = stage_positions(plan)[index]
        block_plans = plan.stages[index].blocks
        tied = tied_within(graph, positions)
        counters = self._experts.of(part)
        blocks: list[Lowered] = []
        for position, block_plan in zip(positions, block_plans, strict=True):
            block = lower_block(
                graph, graph.blocks[position], tied=tied, attributes=attributes,
                micro_batch=micro_batch, device=device, weighed=True, peers=part.peers, counters=counters,
            )  # fmt: skip
            self.sharder.wrap(block, block_plan.zero)
            blocks.append(block)
        stage = Stage(
            graph,
            blocks,
            positions=positions,
            recompute=[b.recompute == "full" for b in block_plans],
            tied={t: cast("nn.Parameter", attributes[t]) for t in tied},
            prelude=lower_prelude(
                graph,
                [t for p in positions for t in graph.blocks[p].shared],
                attributes=attributes, micro_batch=micro_batch, device=device, weighed=True,
            ),
        )  # fmt: skip
        zeros = [b.zero for b in block_plans]
        self.sharder.wrap(stage, root_zero(plan, graph, index))
        self._driven = self.sharder.for_schedule(stage, zeros)
        return stage

    def _refuse_unsendable(self, part: Part) -> None:
        """A pipeline sends tensors of fixed sizes, in an older torch floating ones alone.

        Raises:
            PlanError: it is cut where the size of a tensor depends on values, or where this torch cannot send one.
        """
        for cut in (self.stage.positions.start - 1, self.stage.positions.stop - 1):
            for tensor in part.graph.carried[cut] if 0 <= cut < len(part.graph.blocks) - 1 else ():
                if not sends_integers() and not dtype_of(part.graph, tensor).is_floating_point:
                    raise PlanError(
                        f"the pipeline is cut after block {part.graph.blocks[cut].name}, which hands on a tensor of "
                        f"{part.graph.tensors[tensor].dtype}; torch {torch.__version__} sends only what has a "
                        "gradient from stage to stage: use torch 2.13, cut it elsewhere, or plan with pp=1"
                    )
                if any(placement.is_part and not placement.is_split for placement in part.placed(tensor).values()):
                    raise PlanError(
                        f"the pipeline is cut after block {part.graph.blocks[cut].name}, where tokens are with their "
                        "experts, on each rank another number; cut it elsewhere, or plan with pp=1"
                    )

    def _make_schedule(self, variant: _Variant, size: int, count: int) -> PipelineScheduleSingle:
        """Torch's schedule with static shapes: it would otherwise run one real extra step."""
        graph, positions, num_stages = variant.graph, self.stage.positions, self.plan.mesh.pp
        before, after = positions.start - 1, positions.stop - 1
        cuts = [cut for cut in (before, after) if 0 <= cut < len(graph.blocks) - 1]
        if not variant.needs_gradient:
            examples = boundary_examples(graph, cuts, size, peers=variant.part.pretended)
            variant.needs_gradient.update({cut: tuple(t.requires_grad for t in examples[cut]) for cut in cuts})

        def crossing(cut: int) -> tuple[torch.Tensor, ...]:
            return tuple(
                torch.empty(shape_of(graph, t, size), dtype=dtype_of(graph, t), device="meta", requires_grad=grad)
                for t, grad in zip(graph.carried[cut], variant.needs_gradient[cut], strict=True)
            )

        loss = torch.empty(
            shape_of(graph, graph.loss, size), dtype=dtype_of(graph, graph.loss), device="meta", requires_grad=True
        )  # fmt: skip
        stage = ShardedStage(
            self._driven,
            self._index,
            num_stages,
            self.device,
            input_args=crossing(before) if self._index else (),
            output_args=(loss,) if self.stage.is_last else crossing(after),
            group=self._pp_group,
        )
        stage.sharder = self.sharder
        stage.phases = self.phases
        chunks = {
            f"{INPUT}{t}": _Replicate() if (dim := batch_dim(graph, t)) is None else TensorChunkSpec(dim)  # type: ignore[no-untyped-call]
            for t in graph.inputs
        }
        chunks[f"{INPUT}{WEIGHTS}"] = TensorChunkSpec(0)  # type: ignore[no-untyped-call]
        kind = self.plan.schedule if count >= num_stages else "gpipe"  # 1f1b needs as many micro-batches as stages
        return SCHEDULES[kind](
            stage,
            count,
            loss_fn=lambda loss, _: self._scaled(loss),
            kwargs_chunk_spec=cast("dict[str, TensorChunkSpec]", chunks),
            scale_grads=False,
        )


def _keywords(inputs: Mapping[int, torch.Tensor], weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a stage takes: the model's inputs and the weights."""
    return {f"{INPUT}{t}": value for t, value in inputs.items()} | {f"{INPUT}{WEIGHTS}": weights}


def _batched_dim(graph: Graph, tensor: int) -> int:
    found = batch_dim(graph, tensor)
    assert found is not None
    return found


def _shown(form: Form) -> str:
    """A form for a message: `input_ids [samples, 8]`."""
    return ", ".join(
        f"{name} [{', '.join('samples' if size is None else str(size) for size in sizes)}]" for name, sizes in form
    )


def _check_alike(planned: Graph, other: Graph, *, is_trained: bool) -> None:
    """Refuse a graph whose blocks do not read the parameters that the planned ones own.

    Raises:
        RunError: they do not.
    """
    if len(planned.blocks) != len(other.blocks):
        raise RunError(
            f"the model has {len(other.blocks)} blocks for this batch and {len(planned.blocks)} for the planned one; "
            "give batches of the planned shapes, or plan for this one"
        )
    for ours, theirs in zip(planned.blocks, other.blocks, strict=True):
        owned = {planned.tensors[t].name for t in ours.parameters}
        read = {other.tensors[t].name for t in theirs.parameters}
        if wrong := sorted(read - owned) or (sorted(owned - read) if is_trained else []):
            raise RunError(
                f"block {ours.name} {'does not read' if wrong[0] in owned else 'reads'} {wrong[0]} for this batch, "
                "other than for the planned one; give batches of the planned shapes, or plan for this one"
            )


class _Named(Mapping[int, torch.Tensor]):
    """Buffers by the tensor index of another graph."""

    def __init__(self, graph: Graph, buffers: Mapping[str, torch.Tensor]) -> None:
        self._graph = graph
        self._buffers = buffers

    def __getitem__(self, tensor: int) -> torch.Tensor:
        name = self._graph.tensors[tensor].name
        if name not in self._buffers:
            raise RunError(f"this batch makes the model read {name}, which the planned one does not; plan for this one")
        return self._buffers[name]

    def __iter__(self) -> Any:
        return (t for t, described in enumerate(self._graph.tensors) if described.name in self._buffers)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Attributes(Mapping[int, torch.Tensor]):
    """The real tensors by index; constants are made when first asked for, once per rank."""

    def __init__(self, graph: Graph, tensors: Mapping[int, torch.Tensor], device: torch.device) -> None:
        self._graph = graph
        self._tensors = tensors
        self._constants: dict[int, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}  # those that were asked for, by name
        self._device = device

    def __getitem__(self, tensor: int) -> torch.Tensor:
        if self._graph.tensors[tensor].kind == "buffer":
            return self.buffers.setdefault(self._graph.tensors[tensor].name, self._tensors[tensor])
        if self._graph.tensors[tensor].kind != "constant":
            return self._tensors[tensor]
        if tensor not in self._constants:
            self._constants[tensor] = constant(self._graph, tensor, self._device)
        return self._constants[tensor]

    def __iter__(self) -> Any:
        return iter({**self._tensors, **self._constants})

    def __len__(self) -> int:
        return len(self._tensors) + len(self._constants)


def stage_positions(plan: Plan) -> list[range]:
    """The blocks of each stage, as positions in `graph.blocks`."""
    result, start = [], 0
    for stage in plan.stages:
        result.append(range(start, start + len(stage.blocks)))
        start += len(stage.blocks)
    return result


def stages_of_parameters(plan: Plan, graph: Graph) -> dict[int, list[int]]:
    """Parameter tensor -> the stages that read it, in order."""
    result: dict[int, list[int]] = {}
    for stage, positions in enumerate(stage_positions(plan)):
        for position in positions:
            for tensor in graph.blocks[position].parameters:
                stages = result.setdefault(tensor, [])
                if stage not in stages:
                    stages.append(stage)
    return result


def tied_within(graph: Graph, positions: range) -> tuple[int, ...]:
    """Parameters that more than one block of a stage reads."""
    return tuple(
        parameter for parameter, readers in graph.tie_groups if sum(position in positions for position in readers) > 1
    )


def root_zero(plan: Plan, graph: Graph, index: int) -> int:
    """The ZeRO stage of a stage's own parameters, the tied ones; else the lowest of its blocks.

    Raises:
        PlanError: its tied parameters do not agree.
    """
    positions = stage_positions(plan)[index]
    zeros = [block.zero for block in plan.stages[index].blocks]
    readers = dict(graph.tie_groups)
    found = {
        zeros[p - positions.start]: graph.tensors[t].name
        for t in tied_within(graph, positions)
        for p in readers[t]
        if p in positions
    }
    if len(found) > 1:
        raise PlanError(
            f"parameters that several blocks share have ZeRO stages {sorted(found)} "
            f"({', '.join(sorted(set(found.values())))}); give the blocks that share one the same"
        )
    return next(iter(found), min(zeros))


def _tied_groups(
    graph: Graph, readers: Mapping[int, list[int]], index: int, pp_group: dist.ProcessGroup
) -> list[tuple[str, dist.ProcessGroup]]:
    """Trainable parameters that this and other stages read, with the group of those stages."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    result = []
    num_stages = dist.get_world_size(pp_group)
    for tensor, stages in sorted(readers.items(), key=lambda item: (item[1], item[0])):
        if len(stages) < 2 or index not in stages or not graph.tensors[tensor].requires_grad:
            continue
        key = tuple(stages)
        if key not in made:
            made[key] = (
                pp_group
                if len(stages) == num_stages
                else dist.new_group(
                    [dist.get_global_rank(pp_group, s) for s in stages],
                    use_local_synchronization=True,
                )
            )
        result.append((graph.tensors[tensor].name, made[key]))
    return result
