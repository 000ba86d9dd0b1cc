"""What is watched while a model is exported: what export would lose without a word, or would unroll for minutes."""

import contextlib
import io
import logging
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
)
from torch.overrides import TorchFunctionMode

from planner.graph import Fallback
from planner.trace import opaque
from planner.trace.prime import comes_from, is_near
from planner.trace.refusal import TRAINS_WITHOUT, is_user_file, refused, user_line, where_defined
from planner.trace.state import Kept

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Modules of Functions that export knows, or that are refused as what they belong to (a module's backward hook).
_TORCHS_OWN = ("torch._", "torch.export", "torch.fx", "torch.nn.modules._functions")
ONE_BY_ONE = "forward treats the samples of a batch one by one"
CHANGES_VALUE = "forward changes the Python value"
DRAWS_OUTSIDE = "forward draws random numbers outside of torch"


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


def _refusal_of_hook(what: str, hooks: Any) -> Fallback:
    return Fallback(
        source=where_defined(next(iter(hooks.values()))),
        reason=f"{what} is lost in a graph",
        cure="scale the loss or the activation in forward instead",
    )


@contextlib.contextmanager
def watch(found: list[Fallback], checkpoints: list[str], prime: int) -> Iterator[None]:
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
        return is_near(number, prime) or (isinstance(number, float) and comes_from(number, prime))

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
        if found is None or not is_user_file(sys._getframe(1).f_code.co_filename):
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


class OneByOne(TorchFunctionMode):
    """Refuses recurrences and loops over the samples, before they are unrolled."""

    def __init__(self, prime: int) -> None:
        super().__init__()
        self.prime = prime

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in RECURRENT and args[0].ndim == 3 and args[0].shape[0] == self.prime and args[-1] is False:
            is_packed = isinstance(args[1], torch.Tensor) and args[1].ndim == 1
            if not is_packed:  # its last argument is batch_first
                raise refused(
                    user_line(list(traceback.extract_stack(sys._getframe(1)))),
                    f"{name} takes dim 0 of its input, which is the samples of the batch, for time",
                    f"put the samples in dim 0 and time in dim 1 (batch_first=True), {TRAINS_WITHOUT}",
                    couples=True,
                )
        kwargs = kwargs or {}
        if name == "unbind" and args[0].shape[(*args[1:], kwargs.get("dim", 0))[0]] == self.prime:
            source = user_line(list(traceback.extract_stack(sys._getframe(1))))
            raise refused(source, ONE_BY_ONE, f"write it for the whole batch, {TRAINS_WITHOUT}")
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


def _numpy_state() -> bytes:
    """The state of numpy's global generator."""
    return pickle.dumps(np.random.get_state())  # noqa: NPY002 it is the generator that models use


@contextlib.contextmanager
def watch_python_state(model: nn.Module, changed: list[tuple[Kept, str]], found: list[Fallback]) -> Iterator[None]:
    """Record what forward changes or draws outside of tensors: a graph would repeat its first value forever."""
    before = random.getstate(), _numpy_state()
    yield
    source = where_defined(type(model).forward)
    if values := [name for kind, name in changed if kind in ("value", "cache")]:
        reason = f"{CHANGES_VALUE} {values[0]}"
        cure = f"keep it in a buffer (without, it changes in every micro-batch of every rank), {TRAINS_WITHOUT}"
        found.append(Fallback(source=source, reason=reason, cure=cure))
    if (random.getstate(), _numpy_state()) != before:
        found.append(Fallback(source=source, reason=DRAWS_OUTSIDE, cure=f"draw with torch, {TRAINS_WITHOUT}"))


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Export logs a failure, and prints its whole graph; the caller reports it in one sentence."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(previous)


class ListOfValuesError(NotImplementedError):
    """Values were asked for one by one."""


@contextlib.contextmanager
def no_lists_of_values() -> Iterator[None]:
    """Refuse `tolist` of a tensor without values: export would give every element a symbol of its own, for minutes."""
    tolist = FakeTensor.tolist

    def watched(self: FakeTensor) -> Any:
        if self.numel() > 1:
            raise ListOfValuesError
        return tolist(self)

    FakeTensor.tolist = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = tolist  # type: ignore[method-assign]


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
