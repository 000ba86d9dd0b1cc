"""What one block launches and keeps, seen by running it on fake tensors: no memory, no device.

A block runs forward and backward under `FakeTensorMode` at two micro-batch sizes; what it launches
and what autograd saves is recorded and fitted as `fixed + per_sample * micro_batch`. For CUDA the
tensors are on meta (fake CUDA tensors abort a CPU build of torch), where attention, dropout and
RMS norm would take a CPU's path: they are replaced by the operator that CUDA's dispatcher picks.
"""

import bisect
import copy
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import PlannerError, TraceError
from planner.graph import Affine, Batch, BlockClass, Communicated, Kernel, Node, Operand, Tensor, reads
from planner.trace.assumed import LargestSizes
from planner.trace.aten import run_nodes
from planner.trace.batch import Leaf, LossFunction, call, map_leaves, scalar_loss
from planner.trace.kernels import (
    REPLACEMENTS,
    DeviceFunctions,
    DeviceKind,
    Kind,
    Launched,
    device_of,
    launched,
    scratch_bytes,
    storage_key,
    tensors_in,
)
from planner.trace.parallel import Pretended, bound
from planner.trace.refusal import UNKNOWN, first_line, user_line

Phase = Literal["forward", "backward"]
Owner = int | str  # the place of a node in its block, or the name of a module


# --- recording ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel, and whose code launched it."""

    kernel: Launched
    phase: Phase
    owner: Owner


@dataclass(slots=True)
class _Storage:
    """A storage that the run made. `is_saved` once autograd has kept it."""

    num_bytes: int
    saved_by: Owner | None = None
    is_gradient: bool = False


@dataclass(slots=True)
class _Moment:
    """A storage that came to life or died, and whose code was running."""

    storage: _Storage
    sign: int
    owner: Owner
    phase: Phase


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Kernels, saved tensors and live bytes of what runs under it.

    `given` are tensors that exist before (parameters, buffers, inputs): they cost nothing here.
    """

    def __init__(self, given: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[_Launch] = []
        self.moments: list[_Moment] = []
        self.phase: Phase = "forward"
        self.owner: Owner = ""
        self.saved_given: set[int] = set()  # keys of given storages that autograd keeps
        self._live: dict[int, _Storage] = {}
        self._given = {storage_key(t) for t in given}
        self._matrices = {storage_key(p) for p in parameters if p.ndim >= 2}
        self._starts: list[int] = []
        self._owners: list[Owner] = []

    def enter(self, owner: Owner) -> None:
        """From here on, what runs belongs to `owner`; so will its backward."""
        self.owner = owner
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._owners.append(owner)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps a tensor."""
        key = storage_key(tensor)
        if key in self._given:
            self.saved_given.add(key)
        elif (storage := self._live.get(key)) is not None and storage.saved_by is None:
            storage.saved_by = self.owner
        return tensor

    def storage(self, tensor: torch.Tensor) -> _Storage | None:
        """The storage of a tensor that the run made; None for a given one."""
        return self._live.get(storage_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.owner = self.runs_for()
        out = func(*args, **kwargs)
        if kernel := launched(func, args, kwargs, out, self._matrices):
            self.launches.append(_Launch(kernel, self.phase, self.owner))
        for tensor in tensors_in(out):
            self._track(tensor)
        if scratch := scratch_bytes(func, args, kwargs, out):
            taken = _Storage(scratch)
            self.moments += [_Moment(taken, sign, self.owner, self.phase) for sign in (1, -1)]
        return out

    def runs_for(self) -> Owner:
        """Whose code runs now: in backward, that whose forward made the autograd node."""
        node: Any = torch._C._current_autograd_node() if self.phase == "backward" and self._starts else None
        if node is None:
            return self.owner
        position = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[position] if 0 <= position < len(self._owners) else ""

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._given or key in self._live:
            return
        made = self._live[key] = _Storage(storage.nbytes())
        self.moments.append(_Moment(made, 1, self.owner, self.phase))
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        if (storage := self._live.pop(key, None)) is not None:
            self.moments.append(_Moment(storage, -1, self.owner, self.phase))


# --- from two sizes to lines ----------------------------------------------------------------------


def _fit(values: tuple[float, float], sizes: tuple[int, int], what: str, *, linearised: bool = False) -> Affine:
    """The line through two values; one from zero through the second where they do not grow in a line, if `linearised`.

    Raises:
        TraceError: the line would start below zero or fall: the quantity is no line.
    """
    (low, high), (small, large) = values, sizes
    per_sample = (high - low) / (large - small)
    fixed = low - per_sample * small
    tolerance = 1e-6 * max(low, high, 1.0)
    if linearised and (fixed < -tolerance or per_sample < -tolerance):
        return Affine(0.0, high / large)
    if fixed < -tolerance or per_sample < -tolerance:
        raise TraceError(
            f"{what} grow from {low:g} to {high:g} between micro-batch {small} and {large}, "
            "which is not linear in the micro-batch; the model compares samples of one batch"
        )
    return Affine(max(fixed, 0.0), max(per_sample, 0.0))


def _fit_kernels(
    runs: tuple[Sequence[_Launch], Sequence[_Launch]],
    sizes: tuple[int, int],
    nodes: Sequence[Node] = (),
    *,
    linearised: bool = False,
) -> tuple[Kernel, ...]:
    """Kernels of both runs. Where torch picks others by size, those of the larger run, at so much a sample."""
    first, second = runs
    if not _are_alike(first, second):
        first = [replace(launch, kernel=_shrunk(launch.kernel, sizes[0] / sizes[1])) for launch in second]

    def what(launch: _Launch) -> str:
        at = f"{nodes[launch.owner].source}: " if nodes and isinstance(launch.owner, int) else ""
        return f"{at}{{}} of {launch.kernel.op}"

    return tuple(
        Kernel(
            op=a.op,
            phase=launch.phase,
            kind=a.kind,
            dtype=a.dtype,
            flop=_fit((a.flop, b.flop), sizes, what(launch).format("FLOP"), linearised=linearised),
            num_bytes=_fit((a.num_bytes, b.num_bytes), sizes, what(launch).format("bytes"), linearised=linearised),
            operands=_fit_operands(a, b, sizes),
            node=launch.owner if isinstance(launch.owner, int) else -1,
            has_formula=a.has_formula,
        )
        for launch, other in zip(first, second, strict=True)
        for a, b in [(launch.kernel, other.kernel)]
    )


def _are_alike(first: Sequence[_Launch], second: Sequence[_Launch]) -> bool:
    """Whether two runs launch the same kernels."""
    return [launch.kernel.op for launch in first] == [launch.kernel.op for launch in second]


def _shrunk(kernel: Launched, factor: float) -> Launched:
    return replace(kernel, flop=kernel.flop * factor, num_bytes=kernel.num_bytes * factor, operands=())


def _fit_operands(first: Launched, second: Launched, sizes: tuple[int, int]) -> tuple[Operand, ...]:
    """What a kernel reads at any micro-batch; empty where a size is neither fixed nor a multiple of it."""
    if len(first.operands) != len(second.operands):
        return ()
    result = []
    for (dtype, shape, is_strided), (_, other, _) in zip(first.operands, second.operands, strict=True):
        if len(shape) != len(other):
            return ()
        fitted: list[int | Batch] = []
        for low, high in zip(shape, other, strict=True):
            if low != high and (low % sizes[0] or low * sizes[1] != high * sizes[0]):
                return ()
            fitted.append(low if low == high else Batch(low // sizes[0]))
        result.append(Operand(dtype, tuple(fitted), is_strided))
    return tuple(result)


def _by_operator(launches: Sequence[_Launch], others: Sequence[_Launch]) -> list[_Launch]:
    """One kernel for each operator of either run, with the sums over `launches`."""
    sums: dict[tuple[str, Kind, str, Phase, bool], list[float]] = {}
    for launch in (*launches, *others):
        kernel = launch.kernel
        sums.setdefault((kernel.op, kernel.kind, kernel.dtype, launch.phase, kernel.has_formula), [0.0, 0.0])
    for launch in launches:
        kernel = launch.kernel
        found = sums[kernel.op, kernel.kind, kernel.dtype, launch.phase, kernel.has_formula]
        found[0] += kernel.flop
        found[1] += kernel.num_bytes
    return [
        _Launch(Launched(op, kind, dtype, flop, num_bytes, has_formula=has_formula), phase, "")
        for (op, kind, dtype, phase, has_formula), (flop, num_bytes) in sorted(sums.items())
    ]


def _fit_peak(levels: tuple[np.ndarray, np.ndarray], sizes: tuple[int, int]) -> Affine:
    """The least line above the highest level at every micro-batch from 1 on.

    Each moment's level is a line of its own; the highest of lines is convex. The bound has the
    steepest slope and is exact at micro-batch 1.
    """
    low, high = levels
    if len(low) != len(high):  # storages died in another order
        low, high = (np.max(level, initial=0.0, keepdims=True) for level in levels)
    if not len(low):
        return Affine()
    slopes = (high - low) / (sizes[1] - sizes[0])
    at_one = low - slopes * (sizes[0] - 1)
    slope = max(float(slopes.max()), 0.0)
    return Affine(max(float(at_one.max()) - slope, 0.0), slope)


@contextmanager
def _as_trace_error(what: str, *, runs_users_code: bool = False) -> Iterator[None]:
    """Says in one sentence that something cannot run on fake tensors."""
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        said = first_line(error)
        line = user_line(traceback.extract_tb(error.__traceback__)) if runs_users_code else UNKNOWN
        what = what if line == UNKNOWN else f"{line}: {what}"
        cure = "let it run on meta tensors: shapes must not depend on values (torch.where instead of a mask as index)"
        if isinstance(error, NotImplementedError):
            said = said.partition(": attempted")[0]
            cure = "torch cannot tell the shapes of what it makes without running it; use another operator"
        raise TraceError(
            f"{what} cannot run on fake tensors, so it has no price: {type(error).__name__}: {said}; {cure}"
        ) from error


@contextmanager
def _told_where(recorder: _Recorder, nodes: Sequence[Node]) -> Iterator[None]:
    """Says of which node something cannot run on fake tensors."""
    try:
        yield
    except Exception:
        owner = recorder.owner
        if not isinstance(owner, int):
            raise
        backward = "the backward of " if recorder.phase == "backward" else ""
        with _as_trace_error(f"{nodes[owner].source or nodes[owner].name}: {backward}{nodes[owner].op}"):
            raise


# --- a block of a graph ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a block at one micro-batch size."""

    launches: Sequence[_Launch]
    saved: float
    saves_input: tuple[bool, ...]
    saves_output: tuple[bool, ...]
    forward_levels: np.ndarray  # live bytes beyond what is saved in the end, moment by moment
    backward_levels: np.ndarray
    collectives: Sequence[tuple[str, str, Phase, int, float]] = ()  # name, axis, phase, node, bytes


def price_nodes(
    tensors: Sequence[Tensor],
    nodes: Sequence[Node],
    inputs: Sequence[int],
    shared: Collection[int],
    outputs: Sequence[int],
    *,
    device_kind: DeviceKind = "cuda",
    detached: Collection[int] = (),
    micro_batches: tuple[int, int] = (2, 4),
    linearised: bool = False,
    axes: Mapping[str, int] = {},
    expert_imbalance: float = 1.0,
) -> BlockClass:
    """Kernels, saved bytes and peaks of a block, forward and backward, alone on fake tensors.

    Floating-point `inputs` get gradients unless `detached`; `shared` tensors do not. Saved bytes
    count whole storages once. The peaks hold outputs and incoming gradients but no gradients of
    parameters, which a rank's memory counts by itself. In a block that compares samples with each
    other, quantities grow with the square of the micro-batch; `linearised`, they are right at the
    larger of `micro_batches` only. `axes` are the mesh axes over which the nodes communicate, with
    their sizes; a rank's experts get `expert_imbalance` times a fair share of what is sent to them.

    Raises:
        TraceError: an operator does not run on fake tensors, or a quantity is not linear in the micro-batch.
    """
    with _as_trace_error(f"the block from {nodes[0].name} to {nodes[-1].name}" if nodes else "an empty block"):
        first, second = (
            _run_block(tensors, nodes, inputs, shared, outputs, size, device_kind, detached, axes, expert_imbalance)
            for size in micro_batches
        )
    linearised = linearised or not _are_alike(first.launches, second.launches)
    saved = f"{nodes[0].source}: saved bytes of the block that begins here" if nodes else "saved bytes"
    return BlockClass(
        kernels=_fit_kernels((first.launches, second.launches), micro_batches, nodes, linearised=linearised),
        saved=_fit((first.saved, second.saved), micro_batches, saved, linearised=linearised),
        saves_input=first.saves_input,
        saves_output=first.saves_output,
        forward_peak=_fit_peak((first.forward_levels, second.forward_levels), micro_batches),
        backward_peak=_fit_peak((first.backward_levels, second.backward_levels), micro_batches),
        collectives=tuple(
            Communicated(
                collective=collective,
                axis=axis,
                phase=phase,
                num_bytes=_fit((low, high), micro_batches, f"bytes of {collective}", linearised=linearised),
                node=node,
            )
            for (collective, axis, phase, node, low), (*_, high) in zip(
                first.collectives, second.collectives, strict=True
            )
        ),
    )


def price_forward(
    tensors: Sequence[Tensor],
    nodes: Sequence[Node],
    outputs: Sequence[int],
    *,
    device_kind: DeviceKind = "cuda",
    micro_batches: tuple[int, int] = (2, 4),
) -> tuple[tuple[Kernel, ...], Affine]:
    """Kernels of nodes that run without gradient (the prelude), and the bytes of `outputs`.

    Outputs that are views of what existed before cost nothing; a storage counts once.
    """
    runs: list[Sequence[_Launch]] = []
    sizes: list[float] = []
    for micro_batch in micro_batches:
        device = device_of(device_kind)
        with _as_trace_error("the prelude"), FakeTensorMode(), torch.no_grad():
            env = _given_tensors(tensors, nodes, (), micro_batch, device)
            given = list(env.values())  # alive to the end: a key is unique among the living
            recorder = _Recorder(given, ())
            with recorder, _told_where(recorder, nodes):
                _run_forward(tensors, nodes, env, outputs, micro_batch, device_kind, recorder)
            made = {storage_key(env[t]): recorder.storage(env[t]) for t in outputs if t in env}
            sizes.append(float(sum(s.num_bytes for s in made.values() if s is not None)))
            runs.append(recorder.launches)
    kernels = _fit_kernels((runs[0], runs[1]), micro_batches, nodes)
    return kernels, _fit((sizes[0], sizes[1]), micro_batches, "bytes of the prelude")


def _given_tensors(
    tensors: Sequence[Tensor],
    nodes: Iterable[Node],
    differentiable: Collection[int],
    micro_batch: int,
    device: torch.device,
) -> dict[int, torch.Tensor]:
    """Fresh fake tensors for everything that nodes read and do not make, in order of use."""
    env: dict[int, torch.Tensor] = {}
    made: set[int] = set()
    for node in nodes:
        for index in reads(node):
            if index not in made and index not in env:
                tensor = tensors[index]
                env[index] = torch.empty(
                    [s if isinstance(s, int) else s.per_sample * micro_batch for s in tensor.shape],
                    dtype=getattr(torch, tensor.dtype),
                    device=device,
                    requires_grad=index in differentiable,
                )
        made.update(t for t in node.outputs if t is not None)
    return env


def _run_forward(
    tensors: Sequence[Tensor],
    nodes: Sequence[Node],
    env: dict[int, torch.Tensor],
    outputs: Collection[int],
    micro_batch: int,
    device_kind: DeviceKind,
    recorder: _Recorder,
    operators: Mapping[str, Callable[..., Any]] = {},
) -> None:
    """Runs nodes and lets go of every tensor after its last use, as Python would."""
    replacements = {**REPLACEMENTS[device_kind], **operators}
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for tensor in (*reads(node), *(t for t in node.outputs if t is not None)):
            last_use[tensor] = position
    dying: dict[int, list[int]] = {}
    for tensor, position in last_use.items():
        if tensor not in outputs:
            dying.setdefault(position, []).append(tensor)
    for position, node in enumerate(nodes):
        recorder.enter(position)
        run_nodes(
            tensors, [node], env,
            micro_batch=micro_batch, device=device_of(device_kind), replace=replacements,
        )  # fmt: skip
        for tensor in dying.get(position, ()):
            env.pop(tensor, None)


def _run_block(
    tensors: Sequence[Tensor],
    nodes: Sequence[Node],
    inputs: Sequence[int],
    shared: Collection[int],
    outputs: Sequence[int],
    micro_batch: int,
    device_kind: DeviceKind,
    detached: Collection[int],
    axes: Mapping[str, int],
    expert_imbalance: float,
) -> _Run:
    """One forward and backward of a block."""
    read = [t for t in dict.fromkeys(t for node in nodes for t in reads(node)) if t not in shared]
    trainable = [t for t in read if tensors[t].kind == "parameter" and tensors[t].requires_grad]
    moving = [t for t in inputs if _is_floating(tensors[t]) and t not in detached]
    with FakeTensorMode():
        leaves = _given_tensors(tensors, nodes, {*trainable, *moving}, micro_batch, device_of(device_kind))
        # An input may be written in place, which a leaf may not.
        env = leaves | {t: leaves[t].clone() for t in moving if t in leaves}
        seed = torch.empty(())
        given = [*leaves.values(), *env.values(), seed]
        parameters = [leaves[t] for t in read if tensors[t].kind == "parameter"]
        keys = {t: storage_key(env[t]) for t in inputs if t in env}
        recorder = _Recorder(given, parameters)
        collectives: list[tuple[str, str, Phase, int, float]] = []

        def pretended(axis: str, size: int) -> Pretended:
            def seen(collective: str, num_bytes: int) -> None:
                owner = recorder.runs_for()
                node = owner if isinstance(owner, int) else -1
                collectives.append((collective, axis, recorder.phase, node, num_bytes))

            return Pretended(size, seen, expert_imbalance=expert_imbalance)

        operators = {
            name: partial(_as_device, device_kind, function)
            for name, function in bound({axis: pretended(axis, size) for axis, size in axes.items()}).items()
        }
        with recorder, _told_where(recorder, nodes):
            with saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
                _run_forward(tensors, nodes, env, outputs, micro_batch, device_kind, recorder, operators)
            made = {t: env.get(t) for t in outputs}
            storages = {t: recorder.storage(x) for t, x in made.items() if x is not None}
            kept = sum(m.storage.num_bytes for m in recorder.moments
                       if m.sign > 0 and m.storage.saved_by is not None)  # fmt: skip
            moments_of_forward = len(recorder.moments)
            ends = [x for x in made.values() if x is not None and x.requires_grad]
            edge = get_gradient_edge(_Incoming.apply(*ends)) if ends else None  # type: ignore[no-untyped-call]
            # Later blocks are done with their inputs by now: only what autograd keeps lives on.
            env.clear()
            made.clear()
            ends.clear()
            start_of_backward = len(recorder.moments)
            recorder.phase = "backward"
            targets = [leaves[t] for t in (*moving, *trainable) if t in leaves]
            if edge and targets:
                gradients = torch.autograd.grad(edge, targets, seed, allow_unused=True)
                for gradient in gradients[sum(t in leaves for t in moving) :]:
                    storage = recorder.storage(gradient) if gradient is not None else None
                    if storage is not None:
                        storage.is_gradient = True
        levels = _levels(recorder.moments) - kept
    return _Run(
        launches=recorder.launches,
        saved=kept - _kept_by_outputs(storages, tensors, micro_batch),
        saves_input=tuple(keys.get(t) in recorder.saved_given for t in inputs),
        saves_output=tuple(_is_saved(storages.get(t)) for t in outputs),
        forward_levels=levels[:moments_of_forward],
        backward_levels=levels[max(start_of_backward - 1, 0) :],
        collectives=collectives,
    )


def _as_device(device_kind: DeviceKind, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns when the operators that it calls are those of a device."""
    with DeviceFunctions(device_kind):
        return function(*args, **kwargs)


class _Incoming(torch.autograd.Function):
    """What follows a block: its backward makes the outputs' gradients, which autograd then owns."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        """A scalar that depends on all outputs."""
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in outputs]
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One gradient for each output."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def _is_saved(storage: _Storage | None) -> bool:
    return storage is not None and storage.saved_by is not None


def _kept_by_outputs(storages: Mapping[int, _Storage | None], tensors: Sequence[Tensor], micro_batch: int) -> float:
    """Saved bytes that `saves_output` accounts for: a view of a larger storage has only its own."""
    bytes_of: dict[int, float] = {}
    whole: dict[int, int] = {}
    for tensor, storage in storages.items():
        if storage is not None and storage.saved_by is not None:
            whole[id(storage)] = storage.num_bytes
            own = tensors[tensor].num_bytes.at(micro_batch)
            bytes_of[id(storage)] = bytes_of.get(id(storage), 0.0) + own
    return sum(min(whole[key], num_bytes) for key, num_bytes in bytes_of.items())


def _levels(moments: Sequence[_Moment]) -> np.ndarray:
    """Live bytes after every moment, without gradients of parameters."""
    return np.cumsum([0.0 if m.storage.is_gradient else m.sign * float(m.storage.num_bytes) for m in moments])


# --- a module without a graph ---------------------------------------------------------------------


@dataclass(slots=True)
class _ModuleRun:
    """What the modules of one run launched, kept and held at most."""

    launches: list[_Launch]
    moments: list[_Moment]
    peaks: dict[tuple[Owner, Phase], float] = field(default_factory=dict)
    saved: dict[Owner, float] = field(default_factory=dict)


def price_module(
    model: nn.Module,
    batch: object,
    loss_fn: LossFunction | None,
    *,
    wrapped: Sequence[str],
    dtype: torch.dtype,
    device_kind: DeviceKind = "cuda",
    micro_batches: tuple[int, int] = (2, 4),
) -> dict[str, BlockClass]:
    """Kernels, saved bytes and peaks of each module in `wrapped`, and of the rest as "".

    The model runs as it is on fake tensors, custom autograd functions and hooks of modules
    included; backward kernels belong to the module whose forward made their autograd node. What
    autograd keeps counts where it is kept first, so `saves_input` and `saves_output` are empty.

    Raises:
        TraceError: the model cannot run on fake tensors.
    """
    runs = []
    for size in micro_batches:
        with _as_trace_error("the model", runs_users_code=True):
            runs.append(_run_module(model, batch, loss_fn, wrapped, dtype, device_kind, size))
    first, second = runs

    def kernels(owner: str) -> tuple[Kernel, ...]:
        low, high = ([k for k in run.launches if k.owner == owner] for run in (first, second))
        if not _are_alike(low, high):  # a loop over samples, say
            low, high = _by_operator(low, high), _by_operator(high, low)
        return _fit_kernels((low, high), micro_batches, linearised=True)

    return {
        owner: BlockClass(
            kernels=kernels(owner),
            saved=_fit(
                (first.saved.get(owner, 0.0), second.saved.get(owner, 0.0)),
                micro_batches, f"saved bytes of {owner or 'the model'}", linearised=True,
            ),
            saves_input=(),
            saves_output=(),
            forward_peak=_peak_of(first, second, owner, "forward", micro_batches),
            backward_peak=_peak_of(first, second, owner, "backward", micro_batches),
        )
        for owner in [*wrapped, ""]
    }  # fmt: skip


def _peak_of(first: _ModuleRun, second: _ModuleRun, owner: str, phase: Phase, sizes: tuple[int, int]) -> Affine:
    low, high = (np.array([run.peaks.get((owner, phase), 0.0)]) for run in (first, second))
    return _fit_peak((low, high), sizes)


def _run_module(
    model: nn.Module,
    batch: object,
    loss_fn: LossFunction | None,
    wrapped: Sequence[str],
    dtype: torch.dtype,
    device_kind: DeviceKind,
    micro_batch: int,
) -> _ModuleRun:
    device = device_of(device_kind)

    def fake(leaf: Leaf) -> torch.Tensor:
        shape = leaf.tensor.shape
        kind = dtype if leaf.tensor.is_floating_point() else leaf.tensor.dtype
        size = (micro_batch, *shape[1:]) if leaf.is_batched else shape
        return torch.empty(size, dtype=kind, device=device)

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        module = _fake_copy(model, dtype, device)
        small = map_leaves(batch, fake)
        parameters = dict(module.named_parameters())
        given = [*parameters.values(), *module.buffers(), *tensors_in(small)]
        recorder = _Recorder(given, parameters.values())
        _attribute(module, wrapped, recorder)
        stack.enter_context(LargestSizes())  # type: ignore[no-untyped-call]
        stack.enter_context(DeviceFunctions(device_kind))
        stack.enter_context(recorder)
        recorder.enter("")
        with saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            loss = scalar_loss(call(module, small, loss_fn), small, loss_fn)
        end_of_forward = len(recorder.moments)
        recorder.phase = "backward"
        targets = [p for p in parameters.values() if p.requires_grad]
        gradients = torch.autograd.grad(loss, targets, allow_unused=True)
        for gradient in gradients:
            storage = recorder.storage(gradient) if gradient is not None else None
            if storage is not None:
                storage.is_gradient = True
    run = _ModuleRun(recorder.launches, recorder.moments)
    for moment in recorder.moments[:end_of_forward]:
        storage = moment.storage
        if moment.sign > 0 and storage.saved_by is not None:
            owner = storage.saved_by
            run.saved[owner] = run.saved.get(owner, 0.0) + storage.num_bytes
    _find_peaks(run)
    return run


def _find_peaks(run: _ModuleRun) -> None:
    """The rise of live bytes over every stretch that one module runs, less what it keeps."""
    level = start = kept = 0.0
    previous: tuple[Owner, Phase] | None = None
    for moment in run.moments:
        current = (moment.owner, moment.phase)
        if current != previous:
            previous, start, kept = current, level, 0.0
        storage = moment.storage
        if not storage.is_gradient:
            level += moment.sign * storage.num_bytes
            if moment.phase == "forward" and storage.saved_by is not None:
                kept += moment.sign * storage.num_bytes
        rise = level - start - kept
        run.peaks[current] = max(run.peaks.get(current, 0.0), rise)


def _fake_copy(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model on fake tensors, floating parameters in the compute dtype; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=kind, device=device), parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:  # a plain attribute
                memo[id(value)] = torch.empty(value.shape, dtype=value.dtype, device=device)
    result = copy.deepcopy(model, memo)
    return result if result.training else result.train()


def _attribute(module: nn.Module, wrapped: Sequence[str], recorder: _Recorder) -> None:
    """Tells the recorder when a wrapped module is running."""
    modules = dict(module.named_modules())
    running: list[str] = [""]

    def starts(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            running.append(name)
            recorder.enter(name)

        return hook

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        recorder.enter(running[-1])

    for name in wrapped:
        modules[name].register_forward_pre_hook(starts(name), prepend=True)
        modules[name].register_forward_hook(ends)
