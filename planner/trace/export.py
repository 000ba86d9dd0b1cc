"""From a module to flat nodes: torch.export at a large prime batch on fake CPU tensors.

One export tells which sizes and integer constants are batch: those that the prime divides
(decision 1 of the tracing experiments: it agrees with a comparison of two exports on all models
tried, and on fake tensors a large batch costs nothing). Sizes and numbers that depend on the batch
in another way are refused, as is what export would lose silently and is watched for while it runs:
custom autograd Functions, tensor hooks, backward hooks, parametrizations.
"""

import contextlib
import copy
import inspect
import io
import logging
import math
import operator
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError, TraceError
from planner.graph import Arg, Batch, BatchNumber, Fallback, Node, Ref, Size, Symbol, Tensor, TensorKind, reads, refs
from planner.trace import aten, autocast, opaque
from planner.trace.batch import Leaf, LossFunction, describe, leaves, map_leaves, num_samples
from planner.trace.bounded import Bounded, TooLongError
from planner.trace.state import Kept, LossOnly, carried_over

# Primes that divide few usual sizes; the first that the model's own sizes allow is taken.
LARGEST_EXACT = 2.0**53  # up to it every whole number is a float
NEAR = 64  # constants this near to a multiple of the prime may be made from it
PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)

# Operators that write what their schema does not say: batch norm updates its running statistics
# (arguments 3 and 4) where argument 5 says so.
HIDDEN_WRITES = {"aten.batch_norm.default": ((3, 4), 5), "aten.instance_norm.default": ((3, 4), 5)}
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default",
          "aten._assert_async.msg", "aten.sym_constrain_range_for_size.default")  # fmt: skip
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_PLANNER_FOLDER = str(Path(__file__).parents[1])
_ZOO_FOLDER = str(Path(__file__).parents[1] / "zoo")
# What fake tensors cannot do although the batch fits.
_NEEDS_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
    GuardOnDataDependentSymNode, NotImplementedError,
)  # fmt: skip

# What they say to `x.numpy()` and the like.
_LEAVES_TORCH = (".numpy() is not supported", "Cannot access data pointer", "data pointer of FakeTensor")

# Modules of Functions that export knows, or that are refused as what they belong to (a module's backward hook).
_TORCHS_OWN = ("torch._", "torch.export", "torch.fx", "torch.nn.modules._functions")

UNKNOWN = "unknown place"
ONE_BY_ONE = "forward treats the samples of a batch one by one"
CHANGES_VALUE = "forward changes the Python value"
DRAWS_OUTSIDE = "forward draws random numbers outside of torch"
TRAINS_WITHOUT = "or train it as it is, without a pipeline and without recomputation"


@dataclass(frozen=True)
class FlatGraph:
    """An exported model before it is cut."""

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    loss: int
    aliases: tuple[tuple[str, ...], ...]
    unused_parameters: tuple[str, ...]
    outputs: tuple[int | None, ...] = ()  # beside the loss, of an evaluation
    checkpoints: tuple[str, ...] = ()  # lines at which the model itself checkpoints


class NoGraphError(TraceError):
    """The model has no graph; `couples_samples` is set where its loss is no mean over samples.

    `may_branch` is off where every forward is known to call the same modules, whatever the values in the batch.
    """

    def __init__(self, fallbacks: Sequence[Fallback], couples_samples: str = "", *, may_branch: bool = False) -> None:
        super().__init__("; ".join(str(f) for f in fallbacks))
        self.fallbacks = tuple(fallbacks)
        self.couples_samples = couples_samples
        self.may_branch = may_branch


def _refused(source: str, reason: str, cure: str, *, couples: bool = False) -> NoGraphError:
    return NoGraphError([Fallback(source=source, reason=reason, cure=cure)], f"{source}: {reason}" if couples else "")


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have no data; ordinary tensors may meet them and count as constants."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, export=True)


def fake_copy(model: nn.Module, dtype: torch.dtype, mode: FakeTensorMode) -> nn.Module:
    """The model on fake CPU tensors, floating parameters in the compute dtype; no weight is allocated.

    Buffers keep their dtype, as they do under FSDP's mixed precision. A tensor that is a plain
    attribute keeps its value and becomes a constant. A model in eval mode is put in train mode; in
    one that is training, modules that the user put in eval mode stay there.

    Raises:
        ModelError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=kind), parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and id(value) not in memo and value.device.type == "meta":
                    memo[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().cpu().clone()
    try:
        result = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(f"the model cannot be copied: {type(error).__name__}: {_first_line(error)}") from error
    if not result.training:
        result.train()
    return result


def _is_user_file(name: str) -> bool:
    if name.startswith(_ZOO_FOLDER):
        return True
    return not name.startswith((_TORCH_FOLDER, _PLANNER_FOLDER, "<"))


def user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    for frame in reversed(frames):
        if _is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return UNKNOWN


def refusals(model: nn.Module) -> list[Fallback]:
    """What of the module itself an exported graph would lose."""
    found = []
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            found.append(_refusal_of_hook(f"the gradient hook on parameter {name}", hooks))
    for name, module in model.named_modules():
        label = f"module {name}" if name else "the model"
        for attribute in ("_backward_hooks", "_backward_pre_hooks"):
            if hooks := getattr(module, attribute, None):
                found.append(_refusal_of_hook(f"the backward hook on {label}", hooks))
    for attribute in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        if hooks := getattr(nn.modules.module, attribute, None):
            found.append(_refusal_of_hook("the backward hook on all modules", hooks))
    return found


def _where_defined(thing: Any) -> str:
    code = getattr(thing, "__code__", None) or getattr(getattr(thing, "__func__", None), "__code__", None)
    if code is None:
        kind = thing if isinstance(thing, type) else type(thing)
        for member in vars(kind).values():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None:
                break
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else UNKNOWN


def _refusal_of_hook(what: str, hooks: Any) -> Fallback:
    return Fallback(
        source=_where_defined(next(iter(hooks.values()))),
        reason=f"{what} is lost in a graph",
        cure="scale the loss or the activation in forward instead",
    )


@contextlib.contextmanager
def _watch(found: list[Fallback], checkpoints: list[str], prime: int) -> Iterator[None]:
    """While the model is exported, record its Functions and tensor hooks as nodes and note its checkpoints.

    `apply` is watched where `Function` itself looks it up, one class below: a user's
    `f = MyFunction.apply` was bound before this. What cannot be a node is added to `found`.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    register_hook = torch.Tensor.register_hook
    grad_fn: Any = torch.Tensor.grad_fn
    # Called by checkpoint(..., use_reentrant=False); that is imported by name before this.
    without_reentrant = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def here() -> str:
        return user_line(list(traceback.extract_stack(sys._getframe(2))))

    def record(source: str, reason: str, cure: str) -> None:
        item = Fallback(source=source, reason=reason, cure=cure)
        if item not in found:
            found.append(item)

    def is_of_batch(number: float) -> bool:
        return _is_near(number, prime) or (isinstance(number, float) and comes_from(number, prime))

    def called(original: Callable[..., Any], cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not opaque.is_recording() or cls.__module__.startswith(_TORCHS_OWN):
            return original(*args, **kwargs)
        if cls.__module__ == "torch.utils.checkpoint":
            note_checkpoint()
            return _reentrant_plainly(*args)
        if not any(isinstance(arg, torch.Tensor) for arg in args):
            return original(*args, **kwargs)  # nothing to differentiate
        try:
            return opaque.record_function(cls, args, kwargs, is_of_batch)
        except opaque.NotKept as reason:
            record(
                here(),
                f"autograd.Function {cls.__name__} cannot be a node of a graph: it {reason}",
                f"give it tensors and numbers only, or write it with differentiable operators, {TRAINS_WITHOUT}",
            )
        return original(*args, **kwargs)

    def note_checkpoint() -> None:
        source = user_line(list(traceback.extract_stack(sys._getframe(2))))
        if source not in checkpoints:
            checkpoints.append(source)

    def watched_base(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return called(super(base, cls).apply, cls, args, kwargs)

    def watched_hook(self: torch.Tensor, hook: Any) -> Any:
        if not opaque.is_recording():
            return register_hook(self, hook)  # type: ignore[no-untyped-call]
        with opaque.recording_off():  # torch calls it again for each of its modes
            handle = register_hook(self, hook)  # type: ignore[no-untyped-call]
        source, cure = here(), f"scale the activation in forward instead, {TRAINS_WITHOUT}"
        try:
            opaque.record_hook(self, hook, is_of_batch)
        except opaque.NotKept as reason:
            record(source, f"a tensor hook is lost in a graph: it {reason}", cure)
        handle.remove = lambda: record(source, "a tensor hook is lost in a graph: forward removes it", cure)
        return handle

    def watched_grad_fn(self: torch.Tensor) -> Any:
        found = grad_fn.__get__(self)
        if found is None or not _is_user_file(sys._getframe(1).f_code.co_filename):
            return found
        cure = f"scale the activation in forward instead, {TRAINS_WITHOUT}"
        return _Hookless(found, lambda: record(here(), "a hook on a grad_fn is lost in a graph", cure))

    def watched_checkpoint(*args: Any, **kwargs: Any) -> Any:
        note_checkpoint()
        return without_reentrant(*args, **kwargs)

    base.apply = classmethod(watched_base)
    torch.Tensor.register_hook = watched_hook  # type: ignore[method-assign]
    torch.Tensor.grad_fn = property(watched_grad_fn)  # type: ignore[assignment]
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = watched_checkpoint
    try:
        yield
    finally:
        del base.apply
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        del torch.Tensor.grad_fn  # that of its base shows again
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = without_reentrant


class _OneByOne(TorchFunctionMode):
    """Refuses recurrences and loops over the samples, before they are unrolled."""

    def __init__(self, prime: int) -> None:
        super().__init__()
        self.prime = prime

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in RECURRENT and args[0].ndim == 3 and args[0].shape[0] == self.prime and args[-1] is False:
            is_packed = isinstance(args[1], torch.Tensor) and args[1].ndim == 1
            if not is_packed:  # its last argument is batch_first
                raise _refused(
                    user_line(list(traceback.extract_stack(sys._getframe(1)))),
                    f"{name} takes dim 0 of its input, which is the samples of the batch, for time",
                    f"put the samples in dim 0 and time in dim 1 (batch_first=True), {TRAINS_WITHOUT}",
                    couples=True,
                )
        kwargs = kwargs or {}
        if name == "unbind" and args[0].shape[(*args[1:], kwargs.get("dim", 0))[0]] == self.prime:
            source = user_line(list(traceback.extract_stack(sys._getframe(1))))
            raise _refused(source, ONE_BY_ONE, f"write it for the whole batch, {TRAINS_WITHOUT}")
        return func(*args, **kwargs)


class _Hookless:
    """A grad_fn for the eyes of forward: hooks on it are told of, for a graph has no such nodes."""

    def __init__(self, node: Any, refuse: Callable[[], None]) -> None:
        self._node, self._refuse = node, refuse

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._refuse()
        return getattr(self._node, name)


def _reentrant_plainly(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """What a reentrant checkpoint computes: its results require gradients only if one of its arguments does."""
    moves = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with contextlib.nullcontext() if moves else torch.no_grad():
        return run(*args)


def _near_batch(prime: int) -> frozenset[int]:
    """Sizes that come from the batch and are no multiple of it: halves, thirds, quarters, one more or less."""
    parts = {prime // k + more for k in (2, 3, 4) for more in (0, 1)}
    return frozenset(parts | {k * prime + more for k in (1, 2) for more in (-1, 1)})


def prime_for(model: nn.Module, given: Sequence[Leaf]) -> int:
    """A prime that no size of the model or of a sample can be mistaken for.

    Raises:
        ModelError: a size of the model stands against each of the primes.
    """
    sizes = {s for t in (*model.parameters(), *model.buffers()) for s in t.shape}
    for leaf in given:
        for size in leaf.tensor.shape[1:] if leaf.is_batched else leaf.tensor.shape:
            sizes |= {size - 1, size, size + 1}  # labels are shifted by one
    for prime in PRIMES:
        if not any(size and size % prime == 0 for size in sizes) and not sizes & _near_batch(prime):
            return prime
    raise ModelError(f"sizes of the model are too near to each of {PRIMES}; change one of them")


def export(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, *, trains_on_cpu: bool = False
) -> FlatGraph:
    """The flat graph of model and loss in the compute dtype. The model itself is not touched.

    What the model does under autocast can be written down only where it `trains_on_cpu`.

    Raises:
        NoGraphError: the model runs on the batch, but has no graph.
        ModelError: the batch does not fit the model, or there is no scalar loss.
    """
    given = leaves(batch)
    prime = prime_for(model, given)
    if found := refusals(model):
        may_branch = False
        try:
            _exported(model, batch, dtype, loss_fn, prime, trains_on_cpu=trains_on_cpu)
        except NoGraphError as error:
            may_branch = error.may_branch
        raise NoGraphError(found, may_branch=may_branch)
    flat = _exported(model, batch, dtype, loss_fn, prime, trains_on_cpu=trains_on_cpu)
    if _has_number_near(flat, model, given, prime):
        # Such as batch + 1, or the index of the last sample: at another prime it is another number.
        other = _exported(
            model, batch, dtype, loss_fn, next(p for p in PRIMES[::-1] if p != prime), trains_on_cpu=trains_on_cpu
        )
        for one, two in zip(flat.nodes, other.nodes, strict=False):
            if (one.op, one.args, one.kwargs) != (two.op, two.args, two.kwargs):
                raise _refused(
                    one.source,
                    f"a number of {one.op} is made from the batch size",
                    f"use sizes and indices that do not depend on the batch, {TRAINS_WITHOUT}",
                    couples=True,
                )
        for mine, its in zip(_made_in_forward(flat), _made_in_forward(other), strict=False):
            if flat.tensors[mine].value != other.tensors[its].value:
                reader = next((n for n in flat.nodes if mine in reads(n)), flat.nodes[0])
                raise _refused(
                    reader.source,
                    "a tensor is made from the batch size",
                    f"make it with torch.full or multiply by the number, {TRAINS_WITHOUT}",
                    couples=True,
                )
    return flat


def _made_in_forward(flat: FlatGraph) -> list[int]:
    """Constants that forward makes of Python numbers, by torch.tensor for example."""
    return [i for i, t in enumerate(flat.tensors) if t.kind == "constant" and "lifted_tensor" in t.name]


def _exported(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, prime: int,
    replaced: Sequence[str] = (), *, trains_on_cpu: bool, is_second: bool = False,
) -> FlatGraph:  # fmt: skip
    """One export with `prime` samples; `replaced` are buffers that forward is known to replace.

    With `is_second` forward has run once before: Python values that it sets to the same again and again are set.
    """
    found: list[Fallback] = []
    checkpoints: list[str] = []
    given = leaves(batch)
    mode = fake_mode()
    changed: list[tuple[Kept, str]] = []
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn, lambda *what: changed.append(what), replaced)
    try:
        with (
            warnings.catch_warnings(), _watch(found, checkpoints, prime), _watch_python_state(model, changed, found),
            _quiet_logs(), _no_lists_of_values(), _OneByOne(prime), Bounded(user_line),
            torch.inference_mode(False), torch.enable_grad(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            large = _fake_batch(batch, prime, dtype, mode)
            if is_second:
                with mode:
                    wrapped(large)
                changed.clear()
            program = torch.export.export(wrapped, (large,), strict=False)
    except (NoGraphError, TooLongError):
        raise
    except Exception as error:
        if found:
            raise NoGraphError(found, may_branch=True) from error
        is_general = _runs_at(prime, model, batch, dtype, loss_fn)
        if isinstance(error, ModelError):
            raise
        fallback = _export_failure(error)
        couples = "" if is_general else f"{fallback.source}: what forward does depends on the size of the batch"
        raise NoGraphError([fallback], couples, may_branch=True) from error
    if found:
        if not is_second and all(f.reason.startswith(CHANGES_VALUE) for f in found):
            second = _exported(
                model, batch, dtype, loss_fn, prime, replaced, trains_on_cpu=trains_on_cpu, is_second=True
            )
            first = _Converter(program, model, given, prime, trains_on_cpu=trains_on_cpu).flat_graph()
            if [(n.op, n.args, n.kwargs) for n in first.nodes] == [(n.op, n.args, n.kwargs) for n in second.nodes]:
                return second
        raise NoGraphError(found, may_branch=any(f.reason == DRAWS_OUTSIDE for f in found))
    if not replaced and (names := [name for kind, name in changed if kind == "buffer"]):
        return _exported(model, batch, dtype, loss_fn, prime, names, trains_on_cpu=trains_on_cpu, is_second=is_second)
    if names := [name for kind, name in changed if kind == "tensor"]:
        _check_carried(model, batch, dtype, loss_fn, prime, names)
    flat = _Converter(program, model, given, prime, trains_on_cpu=trains_on_cpu).flat_graph()
    nodes = _written_early(flat) if replaced else flat.nodes
    return replace(flat, nodes=nodes, checkpoints=tuple(checkpoints))


def _written_early(flat: FlatGraph) -> tuple[Node, ...]:
    """The nodes with the copies of replaced buffers next to what reads and makes their values.

    They were made at the two ends of forward; one block should hold both, or a buffer could not be in a pipeline.
    """
    nodes = list(flat.nodes)
    roots = _roots(nodes)
    for write in [n for n in nodes if n.op == "aten.copy_.default" and flat.tensors[n.mutates[0]].kind == "buffer"]:
        buffer, (source,) = write.mutates[0], refs(write.args[1])
        moved = [write]
        detach = next((n for n in nodes if source in n.outputs), None)
        if detach is not None and detach.op == "aten.detach.default":
            moved.insert(0, detach)
            (source,) = refs(detach.args)
        read = next((n for n in nodes if n.op == "aten.clone.default" and [*refs(n.args)] == [buffer]), None)
        rest = [n for n in nodes if n not in moved and n is not read]
        copied = set(read.outputs) if read is not None else set()
        first = next((i for i, n in enumerate(rest) if copied & set(reads(n))), len(rest))
        if read is not None and first < len(rest):
            rest.insert(first, replace(read, path=rest[first].path))
        made = max((i for i, n in enumerate(rest) if source in n.outputs), default=-1)
        position = max(made, first if first < len(rest) else -1)
        if made < 0 or any(
            roots.get(t, t) == roots.get(source, source) for n in rest[position + 1 :] for t in n.mutates
        ):
            continue
        path = rest[made].path
        rest[position + 1 : position + 1] = [replace(n, path=path) for n in moved]
        nodes = rest
    return tuple(nodes)


def _roots(nodes: Iterable[Node]) -> dict[int, int]:
    """Of each view, or result of an operator in place: a tensor of the same storage that came first."""
    root: dict[int, int] = {}
    for node in nodes:
        first = next((root.get(t, t) for t in node.aliases), None)
        if first is not None:
            root.update((t, first) for t in node.outputs if t is not None)
    return root


def _check_carried(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, prime: int, names: Sequence[str]
) -> None:
    """Refuse plain tensor attributes through which one forward tells something to the next."""
    mode = fake_mode()
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn)
    with (
        warnings.catch_warnings(),
        _quiet_logs(),
        _no_lists_of_values(),
        torch.inference_mode(False),
        torch.enable_grad(),
        mode,
    ):
        warnings.simplefilter("ignore")
        carried = carried_over(wrapped, _fake_batch(batch, prime, dtype, mode), names)
    if carried:
        owner = model.get_submodule(carried[0].rpartition(".")[0])
        raise _refused(
            _where_defined(type(owner).forward),
            f"forward reads the tensor attribute {carried[0]} that the forward before it set",
            f"register it as a buffer, {TRAINS_WITHOUT}",
        )


def _has_number_near(flat: FlatGraph, model: nn.Module, given: Sequence[Leaf], prime: int) -> bool:
    """Whether a constant lies near a multiple of the prime and is no size of the model or of a sample."""
    sizes = {s for t in (*model.parameters(), *model.buffers()) for s in t.shape}
    sizes |= {s for leaf in given for s in leaf.tensor.shape[leaf.is_batched :]}
    todo: list[Arg] = [(node.args, tuple(value for _, value in node.kwargs)) for node in flat.nodes]
    for index in _made_in_forward(flat):
        tensor = flat.tensors[index]
        if tensor.value and not tensor.dtype.startswith(("complex", "bool")):
            todo += torch.frombuffer(bytearray(tensor.value), dtype=getattr(torch, tensor.dtype)).double().tolist()
    while todo:
        item = todo.pop()
        if isinstance(item, tuple):
            todo += item
        elif (
            isinstance(item, int | float)
            and not isinstance(item, bool)
            and item not in sizes
            and (_is_near(item, prime) or (isinstance(item, float) and _comes_roughly_from(item, prime)))
        ):
            return True
    return False


def _is_near(number: float, prime: int) -> bool:
    """Whether a whole number may be the batch size, a multiple of it, or one of them and a little more or less."""
    if not prime / 2 < number < 8 * prime or number != int(number):
        return False
    return min(number % prime, prime - number % prime) <= NEAR


def _comes_roughly_from(number: float, prime: int) -> bool:
    """`comes_from` for a number that was rounded to float32 or bfloat16: it asks for a second look only."""
    size = abs(number)
    return any(abs(size * prime**power - k) <= 4e-3 * k for power in (1, 0.5) for k in (0.5, 1, 2))


def _numpy_state() -> bytes:
    """The state of numpy's global generator."""
    return pickle.dumps(np.random.get_state())  # noqa: NPY002 it is the generator that models use


@contextlib.contextmanager
def _watch_python_state(model: nn.Module, changed: list[tuple[Kept, str]], found: list[Fallback]) -> Iterator[None]:
    """Record what forward changes or draws outside of tensors: a graph would repeat its first value forever."""
    before = random.getstate(), _numpy_state()
    yield
    source = _where_defined(type(model).forward)
    if values := [name for kind, name in changed if kind == "value"]:
        reason = f"{CHANGES_VALUE} {values[0]}"
        found.append(Fallback(source=source, reason=reason, cure=f"keep it in a buffer, {TRAINS_WITHOUT}"))
    if (random.getstate(), _numpy_state()) != before:
        found.append(Fallback(source=source, reason=DRAWS_OUTSIDE, cure=f"draw with torch, {TRAINS_WITHOUT}"))


def _fake_batch(batch: object, size: int, dtype: torch.dtype, mode: FakeTensorMode) -> Any:
    """`batch` with `size` samples and floats in the compute dtype, on fake tensors."""

    def fake(leaf: Leaf) -> torch.Tensor:
        shape = ((size,) if leaf.is_batched else leaf.tensor.shape[:1]) + leaf.tensor.shape[1:]
        kind = dtype if leaf.tensor.is_floating_point() else leaf.tensor.dtype
        with mode:
            return torch.empty(shape, dtype=kind)

    return map_leaves(batch, fake)


def _runs_at(size: int, model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None) -> bool:
    """Whether the model runs at another batch size too, as it is and without export, on fake tensors.

    What fails for want of values counts as running.

    Raises:
        ModelError: it fails on the batch as it came: the batch does not fit.
    """
    mode = fake_mode()
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn)

    def failure(samples: int) -> Exception | None:
        try:
            with (
                warnings.catch_warnings(),
                _quiet_logs(),
                _no_lists_of_values(),
                torch.inference_mode(False),
                torch.enable_grad(),
                mode,
            ):
                warnings.simplefilter("ignore")
                wrapped(_fake_batch(batch, samples, dtype, mode))
        except ModelError:
            raise
        except _NEEDS_VALUES:
            return None
        except Exception as error:
            return None if any(text in str(error) for text in _LEAVES_TORCH) else error
        return None

    if error := failure(num_samples(batch)):
        source = user_line(list(traceback.extract_tb(error.__traceback__)))
        place = "" if source == UNKNOWN else f"{source}: "
        raise ModelError(
            f"the model does not run on the batch {describe(batch, dtype)}: {place}{type(error).__name__}: "
            f"{_first_line(error)}; its forward takes {_parameters_of(model)}"
        ) from error
    return failure(size) is None


def _parameters_of(model: nn.Module) -> str:
    try:
        return str(inspect.signature(model.forward)).partition(" -> ")[0]
    except (TypeError, ValueError):
        return "(...)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0][:200] or "no message").rstrip(".")


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Export logs a failure, and prints its whole graph; the caller reports it in one sentence."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(previous)


class _ListOfValuesError(NotImplementedError):
    """Values were asked for one by one."""


@contextlib.contextmanager
def _no_lists_of_values() -> Iterator[None]:
    """Refuse `tolist` of a tensor without values: export would give every element a symbol of its own, for minutes."""
    tolist = FakeTensor.tolist

    def watched(self: FakeTensor) -> Any:
        if self.numel() > 1:
            raise _ListOfValuesError
        return tolist(self)

    FakeTensor.tolist = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = tolist  # type: ignore[method-assign]


def _export_failure(error: Exception) -> Fallback:
    reason = f"export fails with {type(error).__name__}: {_first_line(error)}"
    if any(text in str(error) for text in _LEAVES_TORCH):
        reason = f"forward takes the values out of a tensor, with .numpy() for example ({_first_line(error)})"
    elif isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        reason = (
            "forward turns the value of a tensor into a Python number, by .item(), float() or a branch, for example"
        )
    elif isinstance(error, _ListOfValuesError):
        reason = "forward turns a tensor into a list of Python numbers"
    return Fallback(
        source=user_line(list(traceback.extract_tb(error.__traceback__))),
        reason=reason,
        cure=f"keep branches and sizes in forward independent of tensor values, {TRAINS_WITHOUT}",
    )


class _Converter:
    """Turn the nodes of an ExportedProgram into planner.graph nodes, nested graphs inlined."""

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, given: Sequence[Leaf], prime: int,
        *, trains_on_cpu: bool,
    ) -> None:  # fmt: skip
        self.program = program
        self.prime = prime
        self.near_batch = _near_batch(prime)
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Arg] = {}
        self.trains_on_cpu = trains_on_cpu
        self.autocast: torch.dtype | None = None  # in the region that is converted now
        self.hooks: dict[fx.Node, list[fx.Node]] = {}  # of a call: the hooks on its result, in order
        self.leaf_names = iter([leaf.name for leaf in given])
        self.inputs: list[int] = []
        self.parameters = dict(model.named_parameters())
        self.index_of: dict[str, int] = {}  # of parameters and buffers
        groups = _names_by_identity(model.named_parameters(remove_duplicate=False))
        buffers = _names_by_identity(model.named_buffers(remove_duplicate=False))
        self.aliases = tuple(tuple(names) for names in groups if len(names) > 1)
        self.canonical = {name: names[0] for names in (*groups, *buffers) for name in names}

    def flat_graph(self) -> FlatGraph:
        """All nodes in order.

        Raises:
            NoGraphError: a node that a graph cannot hold, or that depends on the batch size in a
                way that is not proportional.
        """
        signature = self.program.graph_signature
        parameters, buffers = signature.inputs_to_parameters, signature.inputs_to_buffers  # both are computed anew
        constants = signature.inputs_to_lifted_tensor_constants
        loss: Arg = None
        others: list[Arg] = []
        self._find_hooks(self.program.graph_module)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                value: Any = node.meta.get("val")
                if node.name in parameters:
                    full = self.canonical[parameters[node.name].removeprefix("model.")]
                    index = self._registered(full, value, "parameter")
                elif node.name in buffers:
                    full = self.canonical[buffers[node.name].removeprefix("model.")]
                    index = self._registered(full, value, "buffer")
                elif node.name in constants:
                    constant = self.program.constants[constants[node.name]]
                    index = self._new(node.name, constant, "constant", data=self._bytes_of(constant, node))
                elif isinstance(value, torch.Tensor):
                    index = self._new(next(self.leaf_names), value, "input", node=node)
                    self.inputs.append(index)
                else:
                    self.values[node] = value
                    continue
                self.values[node] = Ref(index)
            elif node.op == "call_function":
                self._call(node, self.program.graph_module, no_grad=False)
            elif node.op == "output":
                loss, *others = (
                    self.values.get(arg)
                    for arg, spec in zip(node.args[0], signature.output_specs, strict=True)
                    if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
                )
        self._check_hooks()
        if not isinstance(loss, Ref):
            raise ModelError("the loss is a constant; return a loss that the parameters determine")
        read = {t for node in self.nodes for t in reads(node)}
        used = {self.tensors[t].name for t in read if self.tensors[t].kind == "parameter"}
        for name, parameter in self.parameters.items():
            self._registered(name, parameter, "parameter")
        return FlatGraph(
            tensors=tuple(self.tensors),
            nodes=_with_buffers_written(self.tensors, self.nodes),
            inputs=tuple(self.inputs),
            loss=loss.tensor,
            outputs=tuple(value.tensor if isinstance(value, Ref) else None for value in others),
            aliases=self.aliases,
            unused_parameters=tuple(name for name in self.parameters if name not in used),
        )

    def _registered(self, name: str, value: torch.Tensor, kind: TensorKind) -> int:
        """The one tensor of a parameter or buffer; export has one for each of its names."""
        if name not in self.index_of:
            grad = kind == "parameter" and self.parameters[name].requires_grad
            self.index_of[name] = self._new(name, value, kind, grad=grad)
        return self.index_of[name]

    def _scale(self, value: Any) -> Any:
        """A number of the exported graph: a multiple of the prime is batch."""
        if not value or value % self.prime != 0:
            return value
        if isinstance(value, int):
            return Batch(value // self.prime)
        is_exact = abs(value) < LARGEST_EXACT  # a larger float (the least of a dtype, for masks) is divisible by chance
        return BatchNumber(int(value) // self.prime) if is_exact else value

    def _size(self, size: int, node: fx.Node) -> Size:
        if not isinstance(size, int):
            raise _refused(
                self._source(node),
                f"a size depends on the values of tensors ({size})",
                f"give tensors a fixed size, with a mask for example, {TRAINS_WITHOUT}",
            )
        scaled: Size = self._scale(size)
        self._check_power(scaled, node)
        return scaled

    def _new(
        self, name: str, value: torch.Tensor, kind: TensorKind, *, grad: bool = False,
        data: bytes | None = None, node: fx.Node | None = None,
    ) -> int:  # fmt: skip
        shape: tuple[Size, ...] = tuple(value.shape)
        if node is not None:
            shape = tuple(self._size(s, node) for s in value.shape)
            if shape and shape[0] in self.near_batch:  # half a batch, or all but one sample
                raise _refused(
                    self._source(node),
                    "samples of one batch are not treated alike",
                    f"treat every sample of a batch alike, {TRAINS_WITHOUT}",
                    couples=True,
                )
        self.tensors.append(
            Tensor(
                name=name, shape=shape, dtype=str(value.dtype).removeprefix("torch."), kind=kind,
                requires_grad=grad, value=data,
            )
        )  # fmt: skip
        return len(self.tensors) - 1

    def _call(self, node: fx.Node, owner: nn.Module, *, no_grad: bool) -> None:
        """One call of the exported graph, or of a graph nested in it."""
        target = node.target
        name = str(target)
        if name in CHECKS or name == opaque.HOOKED:
            return
        if target is operator.getitem and isinstance(container := self.values.get(node.args[0]), tuple):  # type: ignore[arg-type]
            self.values[node] = container[node.args[1]]  # type: ignore[index]
            self._hook(node)
            return
        if name == "aten._has_compatible_shallow_copy_type.default":  # all that is left of it in a graph
            raise _refused(
                self._source(node),
                "forward assigns to the .data of a tensor",
                f"write it in place under torch.no_grad, {TRAINS_WITHOUT}",
            )
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self._inline(node, owner, name, no_grad)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            raise _refused(
                self._source(node),
                f"the graph holds the nested operator {name}",
                f"write it without torch.cond, loops over tensors and the like, {TRAINS_WITHOUT}",
            )
        else:
            try:
                self._append(node)
                self._hook(node)
            except NoGraphError:
                raise
            except TraceError as error:
                raise _refused(self._source(node), str(error), f"use another operator, {TRAINS_WITHOUT}") from error

    def _find_hooks(self, module: fx.GraphModule) -> None:
        """Note which results have tensor hooks, here and in nested graphs."""
        for node in module.graph.nodes:
            if str(node.target) == opaque.HOOKED:
                hooked = node.args[1]
                if hooked.op != "call_function":
                    raise _refused(
                        self._source(node),
                        "a tensor hook is lost in a graph: it is set in another grad mode than its tensor",
                        f"scale the activation in forward instead, {TRAINS_WITHOUT}",
                    )
                self.hooks.setdefault(hooked, []).append(node)
        for child in module.children():
            if isinstance(child, fx.GraphModule):
                self._find_hooks(child)

    def _hook(self, node: fx.Node) -> None:
        """Put the hooks of a result between it and all that reads it; the first to run is the last in the graph."""
        for marker in reversed(self.hooks.get(node, ())):
            value = self.values[node]
            if not isinstance(value, Ref):
                raise TraceError("a tensor hook is set on a value that no operator made")
            made = self._new(marker.name, node.meta["val"], "activation", node=node)
            key = str(marker.args[0])
            self.nodes.append(
                Node(name=marker.name, op=opaque.HOOKED, args=(key, value), outputs=(made,), aliases=(value.tensor,),
                     path=self._path(node), source=self._source(marker))
            )  # fmt: skip
            self.values[node] = Ref(made)

    def _check_hooks(self) -> None:
        """Refuse a hook on a tensor that is written in place: it would see the gradient of another value."""
        hooked = {t: n.source for n in self.nodes if n.op == opaque.HOOKED for t in n.aliases}
        if not hooked:
            return
        root = _roots(self.nodes)
        written = {root.get(t, t) for n in self.nodes for t in n.mutates}
        for tensor, source in hooked.items():
            if root.get(tensor, tensor) in written:
                raise _refused(
                    source,
                    "a tensor hook is lost in a graph: its tensor is written in place",
                    f"write it without operators in place, {TRAINS_WITHOUT}",
                )

    def _inline(self, node: fx.Node, owner: nn.Module, name: str, no_grad: bool) -> None:
        """Put the nodes of a nested graph in place of its call."""
        nested: Any = node.args[1] if name == "wrap_with_set_grad_enabled" else node.args[4]
        module: Any = getattr(owner, str(nested.target)) if isinstance(nested, fx.Node) else nested
        sources = (self._source(n) for n in (node, *module.graph.nodes))  # torch often gives the call none
        source = next((s for s in sources if s != UNKNOWN), UNKNOWN)
        outside = self.autocast
        if name == "wrap_with_set_grad_enabled":
            enabled, _, *args = node.args
            if enabled and no_grad:
                raise _refused(
                    source,
                    "gradients are enabled inside a part without gradients",
                    f"compute that part outside of torch.no_grad, {TRAINS_WITHOUT}",
                )
            no_grad = not enabled
        else:
            device, dtype, enabled, _, _, *args = node.args
            assert dtype is None or isinstance(dtype, torch.dtype)
            if enabled and not (device == "cpu" and self.trains_on_cpu):
                raise _refused(
                    source,
                    "the model switches autocast on, of which a graph holds only what it does on a CPU",
                    f"give the precision to the planner instead, {TRAINS_WITHOUT}",
                )
            self.autocast = (dtype or torch.get_autocast_dtype("cpu")) if enabled else None
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args, strict=True):
            value: Any = self.values[arg] if isinstance(arg, fx.Node) else arg
            if no_grad and isinstance(value, Ref):
                value = self._detached(value, node, source)
            self.values[placeholder] = value
        for child in module.graph.nodes:
            if child.op == "call_function":
                self._call(child, module, no_grad=no_grad)
            elif child.op == "output":
                result = child.args[0]
                if isinstance(result, list | tuple):
                    self.values[node] = tuple(self.values[o] if isinstance(o, fx.Node) else o for o in result)
                else:
                    self.values[node] = self.values[result]
        self.autocast = outside

    def _detached(self, value: Ref, node: fx.Node, where: str) -> Ref:
        """`value` without gradient: what no_grad makes of an operand. It shares the storage."""
        source = self.tensors[value.tensor]
        if source.kind != "activation" and not source.requires_grad:
            return value
        self.tensors.append(
            Tensor(name=f"{source.name}.detached", shape=source.shape, dtype=source.dtype, kind="activation")
        )
        result = len(self.tensors) - 1
        self.nodes.append(
            Node(name=f"{node.name}.detach", op="aten.detach.default", args=(value,), outputs=(result,),
                 aliases=(value.tensor,), path=self._path(node), source=where)
        )  # fmt: skip
        return Ref(result)

    def _append(self, node: fx.Node) -> None:
        """One operator. The operands of a part without gradients are detached, so it needs no mark."""
        name = aten.operator_name(node.target)
        if name == "aten.detach_.default":
            name = "aten.detach.default"  # its only effect here is on autograd, not on data
        cast = self._cast(node) if self.autocast is not None else {}

        def value_of(operand: fx.Node) -> Arg:
            return cast.get(operand, self.values[operand])

        args = aten.freeze(tuple(node.args), value_of, self._scale)
        assert isinstance(args, tuple)
        kwargs = tuple((key, aten.freeze(value, value_of, self._scale)) for key, value in sorted(node.kwargs.items()))
        self._check_constants(node, (args, kwargs))
        self._check_batch_dim(node, name, args)
        value = node.meta.get("val")
        if value is not None and not isinstance(value, torch.Tensor | list | tuple):
            self.values[node] = self._constant_result(node, name, args, kwargs)
            return
        many = isinstance(value, list | tuple)
        items: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
        self._check_count(len(items), node)
        outputs = tuple(
            self._new(node.name, item, "activation", node=node) if isinstance(item, torch.Tensor) else None
            for item in items
        )
        if name == opaque.OPAQUE:
            shares, is_random = opaque.traits(str(args[0]))
            aliases = tuple(dict.fromkeys(refs(args))) if shares else ()
        else:
            is_random = aten.is_random(name, args, dict(kwargs))
            aliases = _touched(node, args, kwargs, only_writes=False)
        self.nodes.append(
            Node(
                name=node.name, op=name, args=args, kwargs=kwargs, outputs=outputs,
                returns_list=many, mutates=self._mutates(node, name, args, kwargs),
                aliases=aliases,
                is_random=is_random,
                path=self._path(node), source=self._source(node),
            )
        )  # fmt: skip
        found = tuple(Ref(o) if o is not None else None for o in outputs)
        self.values[node] = found if many else found[0]

    def _cast(self, node: fx.Node) -> dict[fx.Node, Arg]:
        """Operands of a call as autocast gives them, cast by nodes of their own."""
        assert self.autocast is not None
        try:
            casts = autocast.casts_of(node, self.autocast)
        except autocast.NotExplicit as reason:
            raise _refused(
                self._source(node),
                f"autocast cannot be written down for an operator: {reason}",
                f"give the precision to the planner instead, {TRAINS_WITHOUT}",
            ) from None
        result: dict[fx.Node, Arg] = {}
        for operand, dtype in casts.items():
            value = self.values[operand]
            assert isinstance(value, Ref)
            before = self.tensors[value.tensor]
            short = str(dtype).removeprefix("torch.")
            name = f"{node.name}.{operand.name}.to"
            self.tensors.append(Tensor(name=name, shape=before.shape, dtype=short, kind="activation"))
            made = len(self.tensors) - 1
            self.nodes.append(
                Node(name=name, op="aten.to.dtype", args=(value, Symbol("dtype", short)), outputs=(made,),
                     path=self._path(node), source=self._source(node))
            )  # fmt: skip
            result[operand] = Ref(made)
        return result

    def _constant_result(self, node: fx.Node, name: str, args: Arg, kwargs: tuple[tuple[str, Arg], ...]) -> Arg:
        """The value of a node that makes no tensor, such as a promoted dtype, from operands that are no tensors."""
        if any(True for _ in refs((args, kwargs))):
            raise TraceError(f"{name} computes with values of tensors")
        cpu = torch.device("cpu")
        plain = aten.materialize(args, {}, self.prime, cpu)
        named = {key: aten.materialize(value, {}, self.prime, cpu) for key, value in kwargs}
        assert isinstance(plain, list)
        return aten.freeze(aten.torch_operator(name)(*plain, **named), lambda _: None, self._scale)

    def _check_constants(self, node: fx.Node, arguments: Arg) -> None:
        """Refuse numbers made from the batch size, such as 1 / batch, and lists of one item per sample."""
        todo: list[Arg] = [arguments]
        while todo:
            item = todo.pop()
            if isinstance(item, tuple):
                self._check_count(len(item), node)
                todo += item
            self._check_power(item, node)
            if isinstance(item, float) and comes_from(item, self.prime):
                raise _refused(
                    self._source(node),
                    f"the number {item:g} is made from the batch size",
                    f"take the mean with a tensor operator instead, {TRAINS_WITHOUT}",
                    couples=True,
                )

    def _check_power(self, item: Arg, node: fx.Node) -> None:
        """Refuse a number made from the square of the batch size."""
        if isinstance(item, Batch) and item.per_sample % self.prime == 0:
            raise _refused(
                self._source(node),
                "a number is made from the square of the batch size",
                f"do not compare the samples of a batch with each other, {TRAINS_WITHOUT}",
                couples=True,
            )

    def _check_batch_dim(self, node: fx.Node, name: str, args: tuple[Arg, ...]) -> None:
        """Refuse a loop over the samples by an index, which the trace unrolled."""
        if name == "aten.select.int" and args[1:] == (0, self.prime - 1) and isinstance(args[0], Ref):
            count = self.tensors[args[0].tensor].shape[0]
            self._check_count(self.prime if isinstance(count, Batch) else 0, node)

    def _check_count(self, count: int, node: fx.Node) -> None:
        """Refuse a loop over samples, which the trace unrolled."""
        if count and count % self.prime == 0:
            raise _refused(
                self._source(node),
                ONE_BY_ONE,
                f"write it for the whole batch, {TRAINS_WITHOUT}",
            )

    def _mutates(
        self, node: fx.Node, name: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
    ) -> tuple[int, ...]:
        if name == "aten.detach.default":
            return ()
        hidden: list[int] = []
        if name in HIDDEN_WRITES:
            positions, switch = HIDDEN_WRITES[name]
            if args[switch]:
                hidden = [t for p in positions for t in refs(args[p])]
        return tuple(dict.fromkeys([*hidden, *_touched(node, args, kwargs, only_writes=True)]))

    def _path(self, node: fx.Node) -> tuple[str, ...]:
        """Module calls, outermost first; a second call of one module carries torch's `@k`."""
        result = []
        for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
            name = name.removeprefix("model").lstrip(".")
            if name:
                result.append(f"{name}@{key.rsplit('@', 1)[1]}" if "@" in key else name)
        return tuple(result)

    def _source(self, node: fx.Node) -> str:
        """The user's innermost `file:line` of a node."""
        for line in reversed((node.meta.get("stack_trace") or "").split("\n")):
            line = line.strip()
            if line.startswith('File "'):
                file, _, rest = line[6:].partition('", line ')
                if _is_user_file(file):
                    return f"{file}:{rest.split(',')[0]}"
        return UNKNOWN

    def _bytes_of(self, constant: torch.Tensor, node: fx.Node) -> bytes:
        """The value of a constant."""
        name = node.name.removeprefix("c_")
        has_value = type(constant) in (
            torch.Tensor,
            nn.Parameter,
        ) and not torch._C._functorch.is_functorch_wrapped_tensor(constant)
        if constant.device.type == "meta" or not has_value:
            reader = next(iter(node.users), node)
            if "lifted_tensor" in name:  # export saw a tensor that no operator of the graph made
                raise _refused(
                    self._source(reader),
                    "forward computes by torch.autograd.grad, torch.func or the like, which a graph does not hold",
                    f"write it with operators, {TRAINS_WITHOUT}",
                )
            raise _refused(
                self._source(reader),
                f"the constant {name} has no value on the meta device",
                f"register it as a buffer, or build the model on a real device, {TRAINS_WITHOUT}",
            )
        plain = constant.detach().cpu().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _with_buffers_written(tensors: Sequence[Tensor], nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes; one that writes into a view of a buffer is said to write the buffer, too."""
    buffer_of = {i: i for i, tensor in enumerate(tensors) if tensor.kind == "buffer"}
    result = []
    for node in nodes:
        shared = next((buffer_of[t] for t in node.aliases if t in buffer_of), None)
        if shared is not None:
            buffer_of.update((t, shared) for t in node.outputs if t is not None)
        written = dict.fromkeys([*node.mutates, *(buffer_of[t] for t in node.mutates if t in buffer_of)])
        result.append(replace(node, mutates=tuple(written)) if len(written) > len(node.mutates) else node)
    return tuple(result)


def _names_by_identity(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Names of one tensor together, in order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def comes_from(number: float, prime: int) -> bool:
    """Whether a float is made from the batch size `prime`: a ratio with it, its root, or its logarithm.

    >>> comes_from(1 / 1009, 1009), comes_from(math.log(1009), 1009), comes_from(0.1, 1009)
    (True, True, False)
    """
    if not math.isfinite(number) or not number:
        return False

    def is_ratio(value: float, largest: int, tolerance: float) -> bool:
        near = Fraction(value).limit_denominator(largest)
        exact = abs(float(near) - value) <= tolerance * abs(value)
        return exact and bool(near) and (near.numerator % prime == 0 or near.denominator % prime == 0)

    size = abs(number)
    if is_ratio(size, 10**7, 4.5e-16):
        return True
    if 1e-100 < size < 1e100 and is_ratio(size * size, 10**6, 1e-15):
        return True
    return size < 50 and (is_ratio(math.exp(size), 100, 4e-15) or is_ratio(2.0**size, 100, 4e-15))


def _touched(
    node: fx.Node, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], *, only_writes: bool
) -> tuple[int, ...]:
    """Operands that the schema says are written, or whose storage the result may share."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    named, found = dict(kwargs), []
    for position, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not only_writes):
            found += list(refs(args[position] if position < len(args) else named.get(argument.name)))
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def checkpoint_inlined() -> Iterator[None]:
    """Within it a reentrant checkpoint runs its function plainly: pricing takes gradients, which it forbids."""
    kind: Any = torch.utils.checkpoint.CheckpointFunction

    def plainly(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return run(*args)

    kind.apply = plainly
    try:
        yield
    finally:
        del kind.apply
