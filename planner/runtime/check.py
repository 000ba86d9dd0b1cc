"""The self-check before training: the lowered blocks against the user's eager module, value and every gradient.

Both run once, forward and backward, on one copy of the model with the same samples. Lowered blocks are the operators of
the eager module in its own order, so on the CPU both agree to the last bit and a difference is measured, not expected:

* below `_enough` (a few units of the last place) the tensors are equal;
* above it a third run of the eager module in the next wider dtype tells how much of a value is rounding in the first
  place. Up to `_FACTOR` times that is accepted (two roundings of one value differ by up to twice its error, a kernel
  that sums in another order included), unless an operator ran in a coarser dtype than in the module: a lost
  conversion to float32 hides within bfloat16's own rounding, so the dtypes themselves are counted and compared.

A gradient is compared relative to its norm, but to no less than `_SMALLEST` of the largest in its block: gradients that
are zero by construction (the bias of a key) hold nothing but rounding. Parameters are moved by about a tenth first:
fresh ones are often all zeros or ones, and two of them could not be told apart.

Before that the eager module runs forward twice: the graph of one that remembers its last call outside of
buffers is wrong.

With tensor or context parallelism the blocks of all its ranks run as well, as threads of one process on parts of the
same copy, and are compared in the same way; an operator that a rank does otherwise is named (`planner.runtime.split`).

Of a model that is too large for this, the repeats of a block class are left out on both sides.
"""

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import fx, nn
from torch.utils import _pytree as pytree

from planner.errors import CheckError, ModelError, PlanError, SolverError
from planner.graph import Block, Graph, reads
from planner.runtime.blocks import Program
from planner.runtime.samples import sample_batches
from planner.runtime.sides import (
    Chain,
    Left,
    Repeatable,
    copy_of,
    difference,
    repeats,
    size_of,
    tensors_by_name,
    without_chance,
)
from planner.runtime.split import Ranks, Split, fault_of
from planner.runtime.zero import COMPUTE_DTYPES
from planner.shard.chain import AxisSplit
from planner.trace.batch import LossFunction, call, map_leaves, scalar_loss

_log = logging.getLogger(__name__)
Splits = tuple[AxisSplit, ...]  # an axis after the other
# Other shardings without splitting some operators: (their names, how the model is split) -> how else.
Replicate = Callable[[Collection[str], Splits], Splits]

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_FACTOR = 3.0  # accepted difference by the rounding error of the eager module
_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4}  # where rounding cannot be measured; coarser dtypes below
_ALLOWED_COARSE = 5e-2
_SMALLEST = 1e-3
_NOISE_OF_RANKS = 10.0  # other kernels of other sizes cancel out otherwise

# What may be spent: FLOP of one forward and backward, about 2 s of a CPU core or of a GPU; three are run at most.
_WHOLE_FLOP = {"cpu": 1e11, "cuda": 3e14}
_LEAST_FLOP = {"cpu": 1e12, "cuda": 3e15}
_MEMORY_SHARE = 0.5  # of what is free
_WORTH_COLLECTING = 2**27  # bytes
_MEMORY = Path("/proc/meminfo")
_ASSUMED_FREE_BYTES = 2**32  # where the system does not tell
_CURE = (
    "if the model was changed after it was planned, plan again, else this is a fault of the planner, please report it; "
    "check=False (--no-check) trains all the same"
)
_SPLIT_CURE = (
    "this is a fault of the planner, please report it; check='replicate' (--check replicate) runs this operator whole "
    "on every rank, check=False (--no-check) trains all the same"
)
_MOST_REPLICATED = 8  # operators
_ALLOCATOR_WORDS = ("DefaultCPUAllocator", "not enough memory", "out of memory")
_STATELESS = "keep what it remembers in a buffer and draw with torch; check=False (--no-check) trains all the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What was compared, and how well it agreed; `skipped` says why nothing was.

    `difference` is the largest relative difference of the loss, a gradient or a buffer. `ranks` are those of the
    mesh `axis` that splits tensors; `replicated` are operators that they do not split: it would have been wrong.
    """

    blocks: int = 0
    of_blocks: int = 0
    gradients: int = 0
    difference: float = 0.0
    seconds: float = 0.0
    skipped: str = ""
    ranks: int = 1
    axis: str = "tp"
    replicated: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.skipped:
            return f"self-check skipped: {self.skipped}"
        which = f"{self.blocks} blocks" if self.blocks == self.of_blocks else (
            f"{self.blocks} of {self.of_blocks} blocks, the others repeat them"
        )  # fmt: skip
        which += f" on {self.ranks} ranks of {self.axis}" if self.ranks > 1 else ""
        replicated = f"; {', '.join(self.replicated)} run replicated" if self.replicated else ""
        return (
            f"self-check: loss and {self.gradients} gradients equal the eager module's within {self.difference:.1g} "
            f"({which}, {self.seconds:.1f} s){replicated}"
        )


def check_everywhere(
    model: nn.Module,
    graph: Graph,
    *,
    precision: str,
    micro_batch: int,
    device: torch.device,
    batch: object = None,
    loss_fn: LossFunction | None = None,
    splits: Splits = (),
    replicate: Replicate | None = None,
) -> tuple[CheckReport, Splits]:
    """`check_blocks` on rank 0; all ranks get its report, or raise its error. Collective.

    The plan's fingerprint has already told that all ranks hold the same graph. With `replicate`, an operator that the
    ranks of an axis do otherwise than one device is not split: `replicate` makes other shardings without the
    operators that it is given, which are checked again.

    Returns:
        The report and how to split for training: as given, unless operators are `replicated` in the report.

    Raises:
        CheckError: the blocks do not compute what the module does.
    """
    found: list[CheckReport | str | None] = [None]
    split_by = splits
    if dist.get_rank() == 0:

        def check(by: Splits) -> CheckReport:
            return check_blocks(
                model, graph, precision=precision, micro_batch=micro_batch, device=device, batch=batch,
                loss_fn=loss_fn, splits=by,
            )  # fmt: skip

        try:
            found[0], split_by = _checked_without_faults(check, split_by, replicate)
        except CheckError as error:
            found[0] = str(error)
        except Exception as error:
            # Memory above all. What it would have found is unknown, which is said, not hidden.
            found[0] = CheckReport(skipped=f"it failed with {_in_words(error)}")
            if split_by and not _is_out_of_memory(error) and _succeeds(partial(check, ())):
                axes = " x ".join(split.axis for split in split_by)
                found[0] = (
                    f"the blocks of the ranks of {axes} fail with {_in_words(error)} where one device runs; {_CURE}"
                )
        is_unknown = isinstance(found[0], CheckReport) and found[0].skipped and not graph.fallbacks
        level = logging.WARNING if is_unknown else logging.INFO
        _log.log(level, "%s", found[0])
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0, device=device)
    if not isinstance(found[0], CheckReport):
        raise CheckError(str(found[0]))
    if found[0].replicated and dist.get_world_size() > 1:
        others: list[Any] = [split_by]
        dist.broadcast_object_list(others, src=0, device=device)
        split_by = others[0]
    return found[0], split_by


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was at fault: on a CPU, torch's allocator says so in a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _ALLOCATOR_WORDS)
    )


def _succeeds(run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception:
        return False
    return True


class _OperatorError(CheckError):
    """A rank does its part of an operator otherwise than one device."""

    def __init__(self, sentence: str, operator: str) -> None:
        super().__init__(sentence)
        self.operator = operator


def _checked_without_faults(
    check: Callable[[Splits], CheckReport], splits: Splits, replicate: Replicate | None
) -> tuple[CheckReport, Splits]:
    """Check, and again without the operators that are at fault.

    Raises:
        CheckError: the fault is that of no operator, or there are too many.
    """
    banned: list[str] = []
    while True:
        try:
            return replace(check(splits), replicated=tuple(banned)), splits
        except _OperatorError as error:
            if replicate is None or error.operator in banned or len(banned) == _MOST_REPLICATED:
                raise
            banned.append(error.operator)
            try:
                splits = replicate(banned, splits)
            except (PlanError, SolverError) as reason:
                raise CheckError(
                    f"{error}; nor can the model be split without {' and '.join(banned)}: {reason}"
                ) from error
            _log.warning("%s; it is run replicated", error)


def check_blocks(
    model: nn.Module,
    graph: Graph,
    *,
    precision: str,
    micro_batch: int,
    device: torch.device,
    batch: object = None,
    loss_fn: LossFunction | None = None,
    splits: Splits = (),
) -> CheckReport:
    """Compare the lowered blocks of `graph` with `model` as it is now, on `device`.

    Up to two samples are taken: of `batch` where it has values, else random ones. The model, its buffers and torch's
    generators are left as they are. Parameters on meta take random values. With `splits`, an axis after the other, the
    blocks of all ranks of the axes that split tensors are compared, too.

    Raises:
        CheckError: they differ; names the block, the tensor, the user's line and the relative difference.
    """
    if graph.fallbacks:
        return CheckReport(skipped="the model has no graph, so its own modules are trained and nothing is lowered")
    start = time.perf_counter()
    dtype = COMPUTE_DTYPES[precision]
    plain = without_chance(graph)
    split = Split.of(plain, splits) if splits else None
    least = 2 if graph.updates_statistics else 1  # batch norm has nothing to do with one
    samples = max(min(2, micro_batch), least)
    parts = _affordable(model, graph, samples, dtype, device, split)
    if samples > least and (
        isinstance(parts, str) or _flop(graph, parts[0], samples, split) > _WHOLE_FLOP[device.type]
    ):
        samples = least
        parts = _affordable(model, graph, samples, dtype, device, split)
    if isinstance(parts, str):
        return CheckReport(skipped=parts)
    report = CheckReport()
    for part in parts:
        with _generators_restored(device), torch.inference_mode(False), torch.enable_grad():
            try:
                report = _compared(
                    model, plain, part, dtype=dtype, samples=samples, device=device, batch=batch,
                    loss_fn=loss_fn, split=split,
                )  # fmt: skip
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
                report = CheckReport(skipped=f"it ran out of memory on {device.type}: {_in_words(error)}")
            finally:
                if _bytes(graph, part, samples, dtype, split) > _WORTH_COLLECTING:
                    gc.collect()  # generated modules hold themselves in cycles, and with them their parameters
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        if not report.skipped:
            break
    return replace(report, seconds=time.perf_counter() - start)


# --- what is run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What one forward and backward gave. `counts` are calls in forward by (operator, dtype of the result)."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    counts: Mapping[tuple[str, torch.dtype], int]

    @property
    def coarsest(self) -> torch.dtype:
        """The floating dtype with the fewest digits that any operator gave."""
        return max({kind for _, kind in self.counts}, key=_unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A copy of the model, a batch that it runs on, and what is left out of both sides."""

    copied: nn.Module
    graph: Graph
    left: Sequence[Left]
    batch: Any
    samples: int
    dtype: torch.dtype
    device: torch.device
    loss_fn: LossFunction | None
    split: Split | None

    def fresh(self) -> Any:
        """The batch, as tensors that a model may write into."""
        return map_leaves(self.batch, lambda leaf: leaf.tensor.clone())

    def module_loss(self) -> torch.Tensor:
        """Forward of the module."""
        batch = self.fresh()
        return scalar_loss(call(self.copied, batch, self.loss_fn), batch, self.loss_fn)

    def chain(self) -> Chain:
        """The lowered blocks on the parameters and buffers that the copy has now."""
        return Chain(tensors_by_name(self.copied), self.graph, self.left, self.samples, self.device)

    def ranks(self) -> Ranks:
        """The lowered blocks of the ranks that split tensors, on parts of the same."""
        assert self.split is not None
        return Ranks(self.copied, self.split, self.left, self.samples, self.device)


def _compared(
    model: nn.Module,
    graph: Graph,
    left: Sequence[Left],
    *,
    dtype: torch.dtype,
    samples: int,
    device: torch.device,
    batch: object,
    loss_fn: LossFunction | None,
    split: Split | None,
) -> CheckReport:
    """Run both sides and judge."""
    failure = ""
    for attempt in sample_batches(graph, batch, samples, dtype, device):
        for spread in (True, False):
            subject = _Subject(
                copied=copy_of(model, graph, left, samples, dtype, device, spread=spread),
                graph=graph, left=left, batch=attempt, samples=samples, dtype=dtype, device=device, loss_fn=loss_fn,
                split=split,
            )  # fmt: skip
            try:
                eager = _one_run(subject.copied, subject.module_loss)
            except ModelError as error:
                return CheckReport(skipped=str(error))
            except Exception as error:
                failure = f"the eager module fails in {graph.dtype} on {device.type} with {_in_words(error)}"
                break  # other parameters will not help
            if math.isfinite(eager.loss):
                _check_stateless(subject, eager)
                try:
                    return _judged(subject, eager)
                except _ChoiceError as error:
                    failure = str(error)
                    continue
            failure = "the eager module's loss is not finite"
    return CheckReport(skipped=f"{failure}; apply(..., batch=) takes a batch to check with")


def _check_stateless(subject: _Subject, eager: _Run) -> None:
    """Run the module's forward once more, from the same buffers and chance.

    Raises:
        CheckError: it gives another loss for the same batch.
    """
    again: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        with torch.enable_grad():  # which forward may ask for
            again.append(subject.module_loss().detach().double())
        return again[0]

    _forward(subject.copied, run)
    first, second = float(eager.loss), float(again[0])
    coarsest = max(subject.dtype, eager.coarsest, key=_unit)
    allowed = _enough(coarsest)
    if coarsest != torch.float64 and subject.device.type != "cpu":
        allowed = _ALLOWED.get(coarsest, _ALLOWED_COARSE)  # kernels that add in any order
    if not abs(second - first) <= allowed * (abs(first) or 1.0):
        raise CheckError(
            f"forward gives another loss the second time for the same batch ({first:.10g}, then {second:.10g}), so it "
            f"keeps state outside of buffers or draws random numbers outside of torch; {_STATELESS}"
        )


def _judged(subject: _Subject, eager: _Run) -> CheckReport:
    """What the blocks give beside what the module gave.

    Raises:
        CheckError: they differ.
    """
    graph, left = subject.graph, subject.left
    try:
        chain = subject.chain()
        lowered = _one_run(subject.copied, lambda: chain(subject.fresh()))
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise CheckError(
            f"the lowered blocks fail where the module runs: {_in_words(error)}{notes}; {_CURE}"
        ) from error
    judge = _Judge(subject, eager)
    errors = _errors(eager, lowered, graph)
    verdict = judge.verdict(errors, _coarser(eager, lowered))
    if verdict is not None:
        if left and not _is_left_out_alike(subject, verdict.value_limit):
            return CheckReport(skipped="the repeats of a block cannot be left out of this model")
        raise CheckError(_sentence(subject, errors, verdict))
    worst = _worst(errors)
    if subject.split is not None:
        del chain, lowered
        worst = max(worst, _judged_ranks(subject, eager, judge))
    return CheckReport(
        blocks=len(graph.blocks) - len(left),
        of_blocks=len(graph.blocks),
        gradients=sum(gradient is not None for gradient in eager.gradients.values()),
        difference=worst,
        ranks=subject.split.degree if subject.split is not None else 1,
        axis=subject.split.axis if subject.split is not None else "tp",
    )


def _judged_ranks(subject: _Subject, eager: _Run, judge: "_Judge") -> float:
    """What the ranks give beside what the module gave: the largest difference.

    Raises:
        CheckError: they differ.
    """
    try:
        ranks = subject.ranks()
        runs = ranks.run(subject.fresh)
    except Exception as failure:
        if _is_out_of_memory(failure):
            raise
        notes = "".join(f" ({note})" for note in getattr(failure, "__notes__", ()))
        raise _rank_error(subject, math.inf, f"fail where the module runs: {_in_words(failure)}{notes}") from failure
    worst = 0.0
    for run in runs:
        lowered = _Run(loss=run.loss, gradients=run.gradients, buffers=run.buffers, counts=run.counts)
        errors = _errors(eager, lowered, subject.graph, noise=_NOISE_OF_RANKS)
        verdict = judge.verdict(errors, _coarser(eager, lowered), ranks=len(runs))
        if verdict is not None:
            if subject.split is not None and len(subject.split.links) > 1:
                # An operator is found where one axis splits: is it the outermost that goes wrong?
                _judged_ranks(replace(subject, split=subject.split.first), eager, judge)
            what, source, error, allowed = _worst_tensor(subject, errors, verdict)
            raise _rank_error(
                subject,
                verdict.value_limit,
                f"do not compute what one device does: {what} differs by {error:.2g} of its size, where {allowed:.1g} "
                f"is allowed ({source})",
            )
        worst = max(worst, _worst(errors))
    return worst


class _ChoiceError(Exception):
    """Values cannot be compared: rounding decides what is chosen."""


def _rank_error(subject: _Subject, limit: float, what: str) -> CheckError:
    """The error that names the operator if it is found, else says `what` the ranks do.

    Raises:
        _ChoiceError: it is no fault.
    """
    assert subject.split is not None
    ranks = f"the {subject.split.degree} ranks of {subject.split.axis}"
    fault = None
    if len(subject.split.links) > 1:
        return CheckError(f"{ranks} {what}; {_CURE}")
    with contextlib.suppress(Exception):  # it is an aid; the verdict stands without it
        blocks = list(_kept(subject.graph, subject.left))
        if subject.split.seen_bytes(blocks, subject.samples) > _MEMORY_SHARE * _free_bytes(subject.device):
            raise MemoryError
        fault = fault_of(subject.copied, subject.chain(), subject.ranks(), subject.fresh, limit)
    if fault is None:
        return CheckError(f"{ranks} {what}; {_CURE}")
    if fault.is_choice:
        raise _ChoiceError(
            f"rounding lets the ranks of {subject.split.axis} choose otherwise than one device: {fault.operator} "
            f"({fault.source})"
        )
    block = subject.graph.blocks[fault.block].name
    by = "" if fault.error is None else f" differs by {fault.error:.2g} of its size, where {limit:.1g} is allowed"
    if not fault.operator:
        return CheckError(
            f"block {block} on {ranks} is not that of one device: {fault.what}{by} ({fault.source}); {_CURE}"
        )
    sentence = (
        f"block {block} on {ranks} does not compute what it does on one device: {fault.words}: {fault.what}{by} "
        f"({fault.source}); {_SPLIT_CURE}"
    )
    return _OperatorError(sentence, fault.operator)


def _one_run(copied: nn.Module, run: Callable[[], torch.Tensor]) -> _Run:
    """Forward and backward; gradients are taken from the parameters, buffers get their values back."""
    before = {name: buffer.clone() for name, buffer in copied.named_buffers()}
    mode = Repeatable()
    try:
        with mode:
            loss = run()
            # Backward sums where forward broadcast, which a mask with a batch dim in the graph alone may move.
            counts = dict(mode.counts)
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: parameter.grad for name, parameter in copied.named_parameters()}
        after = {name: buffer.clone() for name, buffer in copied.named_buffers()}
    finally:
        for parameter in copied.parameters():
            parameter.grad = None
        _put_back(copied, before)
    changed = {name: value for name, value in after.items() if not torch.equal(value, before[name])}
    return _Run(loss=loss.detach().double(), gradients=gradients, buffers=changed, counts=counts)


def _put_back(copied: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Give buffers their earlier values; forward may have exchanged the tensors themselves."""
    with torch.no_grad():
        for name, value in before.items():
            path, _, leaf = name.rpartition(".")
            copied.get_submodule(path)._buffers[leaf] = value.clone()


@contextmanager
def _generators_restored(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


# --- the copy of the model -------------------------------------------------------------------------------------------


# --- how much of the model -------------------------------------------------------------------------------------------


def _affordable(
    model: nn.Module, graph: Graph, samples: int, dtype: torch.dtype, device: torch.device, split: Split | None
) -> list[tuple[Left, ...]] | str:
    """The blocks to leave out, none for a small model, and what to try next; or why even that costs too much."""
    free = _free_bytes(device)
    room, kind = _MEMORY_SHARE * free, device.type
    whole_flop, whole_fits = _flop(graph, (), samples, split), _bytes(graph, (), samples, dtype, split) <= room
    if whole_flop <= _WHOLE_FLOP[kind] and whole_fits:
        return [()]
    left = repeats(model, graph, () if split is None else split.links)
    flop, needed = _flop(graph, left, samples, split), _bytes(graph, left, samples, dtype, split)
    if flop > _LEAST_FLOP[kind]:
        return f"one block of each class costs {flop:.1e} FLOP, too many for {kind}"
    if needed > room:
        return f"one block of each class takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {kind}"
    return [left, ()] if left and whole_flop <= _LEAST_FLOP[kind] and whole_fits else [left]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError):  # no Linux
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _ASSUMED_FREE_BYTES


def _kept(graph: Graph, left: Sequence[Left]) -> Iterator[Block]:
    absent = {item.position for item in left}
    return (block for position, block in enumerate(graph.blocks) if position not in absent)


def _flop(graph: Graph, left: Sequence[Left], samples: int, split: Split | None) -> float:
    one = sum(
        graph.classes[block.class_index].flop(phase).at(samples)
        for block in _kept(graph, left)
        for phase in ("forward", "backward")
    )
    # Three runs of one device are allowed for, one of the ranks comes in addition.
    return one if split is None else one * (1 + split.flop_ratio())


def _bytes(graph: Graph, left: Sequence[Left], samples: int, dtype: torch.dtype, split: Split | None) -> float:
    """Parameters with the gradients of two runs, and what one run keeps for backward.

    The second run may be that of the ranks, which have parts of the parameters of their own.
    """
    kept = list(_kept(graph, left))
    parameters = {t for block in kept for t in block.parameters}
    elements = sum(graph.tensors[t].num_elements.fixed for t in parameters)
    saved = sum(block.saved.at(samples) for block in kept)
    if split is None:
        return 3 * elements * dtype.itemsize + saved
    held = max(1.0, 2 * split.bytes_ratio(kept, "parameter"))
    return (2 + held) * elements * dtype.itemsize + saved * max(1.0, split.bytes_ratio(kept, "activation"))


# --- the verdict -----------------------------------------------------------------------------------------------------

_Key = tuple[str, str]  # ("loss" | "gradient" | "buffer", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Why two runs are not equal: by how much each tensor may differ, an operator that is `coarser`."""

    limits: Mapping[_Key, float]
    coarser: str
    value_limit: float


class _Judge:
    """What may differ from the run of the eager module. Its rounding is measured when it is first asked for."""

    def __init__(self, subject: _Subject, eager: _Run) -> None:
        self._subject, self._eager = subject, eager
        self._coarsest = max(subject.dtype, eager.coarsest, key=_unit)
        self._enough = _enough(self._coarsest)

    @cached_property
    def _rounding(self) -> dict[_Key, float] | None:
        return _rounding(self._subject, self._eager)

    def verdict(self, errors: Mapping[_Key, float], coarser: str, *, ranks: int = 1) -> _Verdict | None:
        """None where a run differs by no more than rounding explains, and nothing runs in a coarser dtype.

        What several ranks add up is rounded on each of them, and in every addition.
        """
        if _worst(errors) <= self._enough:
            return None
        more = math.sqrt(ranks)
        limits = {key: max(self._enough, more * _limit(key, self._rounding, self._coarsest)) for key in errors}
        if not coarser and all(errors[key] <= limits[key] for key in errors):
            return None
        return _Verdict(
            limits=limits, coarser=coarser, value_limit=self._enough if coarser else min(limits.values())
        )  # fmt: skip


def _worst(errors: Mapping[_Key, float]) -> float:
    return max(errors.values(), key=lambda error: math.inf if math.isnan(error) else error)


def _unit(kind: torch.dtype) -> float:
    return float(torch.finfo(kind).eps)


def _enough(kind: torch.dtype) -> float:
    """The relative difference below which nothing more is asked."""
    if kind == torch.float64:
        return 1e-9
    # Eight units of the last place where a value has many places; a fraction of one where it has few, as the norm over
    # many elements then still tells a single wrong rounding from none.
    return _unit(kind) * (8 if kind == torch.float32 else 0.125)


def _errors(expected: _Run, actual: _Run, graph: Graph, *, noise: float = 1.0) -> dict[_Key, float]:
    """Relative differences of the loss, the gradients and the updated buffers.

    Gradients that are nothing but rounding may have `noise` times as much of it.
    """
    result: dict[_Key, float] = {("loss", ""): difference(expected.loss, actual.loss) / (size_of(expected.loss) or 1.0)}
    neighbours: dict[str, set[str]] = {}  # parameters that blocks read together
    for block in graph.blocks:
        names = {graph.tensors[t].name for t in block.parameters}
        for name in names:
            neighbours.setdefault(name, set()).update(names)
    sizes: dict[str, float] = {}

    def size(name: str) -> float:
        if name not in sizes:
            sizes[name] = size_of(expected.gradients.get(name))
        return sizes[name]

    for name, gradient in expected.gradients.items():
        apart = difference(gradient, actual.gradients.get(name))
        if apart:
            floor = _SMALLEST * max(map(size, neighbours.get(name, ())), default=0.0)
            apart /= (size(name) if size(name) >= floor else noise * floor) or 1.0
        result["gradient", name] = apart
    for name in expected.buffers.keys() | actual.buffers.keys():
        one, two = expected.buffers.get(name), actual.buffers.get(name)
        # One that only one side changed is wrong by all of it.
        result["buffer", name] = 1.0 if one is None or two is None else difference(one, two) / (size_of(one) or 1.0)
    return result


def _rounding(subject: _Subject, eager: _Run) -> dict[_Key, float] | None:
    """How far the eager module is from itself in the next wider dtype; None where there is none, or it fails."""
    if subject.dtype not in _WIDER:
        return None
    wider, copied = _WIDER[subject.dtype], subject.copied
    tensors = [t for t in (*copied.parameters(), *copied.buffers()) if t.is_floating_point()]
    before = [t.data for t in tensors]
    wide = map_leaves(
        subject.batch, lambda leaf: leaf.tensor.to(wider) if leaf.tensor.is_floating_point() else leaf.tensor
    )
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(torch.promote_types(tensor.dtype, wider))
        return _errors(_one_run(copied, replace(subject, batch=wide).module_loss), eager, subject.graph)
    except Exception as error:
        _log.info("self-check: the eager module does not run in %s: %s", wider, _in_words(error))
        return None
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data = value


def _limit(key: _Key, rounding: Mapping[_Key, float] | None, coarsest: torch.dtype) -> float:
    """The difference that rounding explains."""
    if rounding is None or not all(map(math.isfinite, rounding.values())):
        return _ALLOWED.get(coarsest, _ALLOWED_COARSE)
    # One value may be exact by luck: no tensor is held to less than what the others show on average.
    usual = math.sqrt(sum(error * error for error in rounding.values()) / len(rounding))
    return _FACTOR * max(rounding.get(key, 0.0), usual)


def _coarser(eager: _Run, lowered: _Run) -> str:
    """An operator that the blocks run as often as the module does, but in a coarser dtype; "" if none."""
    for name in sorted({name for name, _ in lowered.counts}):
        one = {kind: n for (op, kind), n in eager.counts.items() if op == name}
        two = {kind: n for (op, kind), n in lowered.counts.items() if op == name}
        if sum(one.values()) != sum(two.values()):
            continue  # kernels differ where a mask was folded
        for kind, count in two.items():
            finer = [k for k in one if _unit(k) < _unit(kind) and one[k] > two.get(k, 0)]
            if count > one.get(kind, 0) and finer:
                return f"{name} runs in {_short(kind)} where the module has {_short(finer[0])}"
    return ""


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}".rstrip(".: ")


# --- where it is -----------------------------------------------------------------------------------------------------


def _sentence(subject: _Subject, errors: Mapping[_Key, float], verdict: _Verdict) -> str:
    """What is wrong, where, and by how much.

    A wrong value is named by the first module call whose result differs, a wrong gradient by the last block that has
    one: backward comes from the end.
    """
    graph = subject.graph
    found = None
    with contextlib.suppress(Exception):  # it is an aid; the verdict stands without it
        found = _first_wrong_value(subject, verdict.value_limit)
    if found is not None:
        node, name, error = found
        position = next((p for p, block in enumerate(graph.blocks) if node in block.nodes), -1)
        what, source, allowed = f"the output of {name}", graph.nodes[node].source, verdict.value_limit
    else:
        position, _ = _last_wrong(graph, errors, verdict)
        what, source, error, allowed = _worst_tensor(subject, errors, verdict)
    block = f"block {graph.blocks[position].name}" if position >= 0 else "the part that depends on inputs alone"
    cause = f"{verdict.coarser}, and " if verdict.coarser else ""
    return (
        f"{block} does not compute what the eager module does: {cause}{what} differs by {error:.2g} of its size, where "
        f"{allowed:.1g} is allowed ({source}); {_CURE}"
    )


def _worst_tensor(subject: _Subject, errors: Mapping[_Key, float], verdict: _Verdict) -> tuple[str, str, float, float]:
    """The worst tensor of the last block with a wrong one: what it is, the user's line, its error, what is allowed."""
    position, key = _last_wrong(subject.graph, errors, verdict)
    kind, name = key
    what = {"loss": "the loss", "gradient": f"the gradient of {name}", "buffer": f"buffer {name}"}[kind]
    return what, _reader(subject.graph, position, name), errors[key], verdict.limits[key]


def _last_wrong(graph: Graph, errors: Mapping[_Key, float], verdict: _Verdict) -> tuple[int, _Key]:
    wrong = {key: error for key, error in errors.items() if not error <= verdict.limits[key]}
    return _last(graph, wrong or errors)


def _last(graph: Graph, wrong: Mapping[_Key, float]) -> tuple[int, _Key]:
    """The last block with a wrong tensor, and the worst of its tensors."""
    index_of = {t.name: i for i, t in enumerate(graph.tensors) if t.kind in ("parameter", "buffer")}

    def position(key: _Key) -> int:
        tensor = index_of.get(key[1], -1)
        readers = [p for p, block in enumerate(graph.blocks) if tensor in (*block.parameters, *block.buffers)]
        return max(readers, default=len(graph.blocks) - 1)

    last = max(wrong, key=lambda key: (position(key), wrong[key]))
    return position(last), last


def _reader(graph: Graph, position: int, name: str) -> str:
    """The user's line that reads a parameter or buffer in a block."""
    nodes = [graph.nodes[i] for i in graph.blocks[position].nodes]
    for node in nodes:
        if any(graph.tensors[t].name == name for t in reads(node)):
            return node.source
    return nodes[-1].source


def _first_wrong_value(subject: _Subject, limit: float) -> tuple[int, str, float] | None:
    """(last node, name, relative difference) of the first module call whose result differs from the eager module's.

    Both sides run forward again: the module with hooks, the blocks node by node.
    """
    graph = subject.graph
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.path, index))
    expected = _module_outputs(subject, {path.partition("@")[0] for path in last})
    actual: dict[int, list[torch.Tensor]] = {}
    chain = subject.chain()
    index_of = {id(node): index for index, node in enumerate(graph.nodes)}
    for part in chain.lowered():
        part.program.code.forward = _Recorder(part.program, index_of, actual).run
    _forward(subject.copied, lambda: chain(subject.fresh()))
    for index, name in sorted((index, name) for name, index in last.items()):
        error = _least_difference(expected.get(name, ()), actual.get(index, ()))
        if error is not None and not error <= limit:
            return index, name, error
    return None


def _is_left_out_alike(subject: _Subject, limit: float) -> bool:
    """Whether the first block whose output differs is one that was compared, and no stand-in.

    A stand-in takes the first tensor of the right shape for the main input, which the user's layer may not mean.
    """
    expected = _module_outputs(subject, {block.name for block in subject.graph.blocks})
    actual: dict[int, list[torch.Tensor]] = {}
    chain = subject.chain()

    def note(position: int, values: Sequence[torch.Tensor]) -> None:
        actual[position] = [value.detach().clone() for value in values]

    _forward(subject.copied, lambda: chain(subject.fresh(), note))
    absent = {item.position for item in subject.left}
    for position, block in enumerate(subject.graph.blocks):
        error = _least_difference(expected.get(block.name, ()), actual[position])
        if error is not None and not error <= limit:
            return position not in absent
    return True


def _least_difference(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> float | None:
    """Relative difference of the two values of one shape that are nearest; None if there are none."""
    return min(
        (difference(v, a) / (size_of(v) or 1.0) for v in expected for a in actual if v.shape == a.shape), default=None
    )


def _module_outputs(subject: _Subject, names: Iterable[str]) -> dict[str, list[torch.Tensor]]:
    """The floating tensors that modules of the copy return, by name; `name@1` is a second call."""
    modules = dict(subject.copied.named_modules())
    found: dict[str, list[torch.Tensor]] = {}
    handles = [
        modules[name].register_forward_hook(_kept_under(name, found)) for name in names if name and name in modules
    ]
    try:
        _forward(subject.copied, subject.module_loss)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _forward(copied: nn.Module, run: Callable[[], torch.Tensor]) -> None:
    before = {name: buffer.clone() for name, buffer in copied.named_buffers()}
    try:
        with Repeatable(), torch.no_grad():
            run()
    finally:
        _put_back(copied, before)


def _kept_under(name: str, found: dict[str, list[torch.Tensor]]) -> Callable[[nn.Module, Any, Any], None]:
    calls = 0

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        tensors = [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        found[f"{name}@{calls}" if calls else name] = [v.detach().clone() for v in tensors]
        calls += 1

    return hook


class _Recorder(fx.Interpreter):
    """Runs a lowered module node by node and keeps what each makes."""

    def __init__(self, program: Program, index_of: Mapping[int, int], found: dict[int, list[torch.Tensor]]) -> None:
        super().__init__(program.code)
        self._sources, self._index_of, self._found = program.sources, index_of, found

    def run_node(self, n: fx.Node) -> Any:
        """Its value."""
        value = super().run_node(n)
        node = self._sources.get(n.name)
        if node is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
            self._found.setdefault(self._index_of[id(node)], []).append(value.detach().clone())
        return value
