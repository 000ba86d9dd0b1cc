"""User code with a backward of its own, as nodes of a graph: `autograd.Function`s and tensor hooks.

Export would trace into a Function's forward and lose its backward, and would drop a hook. So while a model is exported
each call is recorded as one operator, `planner::opaque` or `planner::hooked`, which holds a key; when a graph runs, the
original is called. The graph stays plain data: the live class or hook is found by its key in this process, where the
model was traced as on every rank. The key holds a digest of the code and of the arguments that are neither tensors nor
numbers, so that a graph's fingerprint tells other code from this. Integers and floats are arguments of the node: one
that is made from the batch size is treated as everywhere.

What a key could not stand for is refused: arguments that are modules or objects, code that closes over tensors.
"""

import dataclasses
import enum
import hashlib
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import TraceError
from planner.graph import HOOKED, OPAQUE


class NotKept(Exception):  # noqa: N818 it is a reason, which becomes a fallback with the user's line
    """Why a Function or hook cannot be a node, in words that follow its name."""


# --- what a key stands for ------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Reader:
    """Writes values and code as text that is the same in every process; keeps the numbers that it meets."""

    numbers: list[float] = dataclasses.field(default_factory=list)

    def text(self, value: object) -> str:
        """A plain value.

        Raises:
            NotKept: the value is an object that has no such text.
        """
        match value:
            case bool() | None | complex() | str() | bytes() | slice():
                return repr(value)
            case enum.Enum():
                return f"{type(value).__qualname__}.{value.name}"
            case int() | float():
                self.numbers.append(value)
                return repr(value)
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return repr(value)
            case list() | tuple():
                return f"{type(value).__name__}({','.join(map(self.text, value))})"
            case set() | frozenset():
                return f"set({','.join(sorted(map(self.text, value)))})"
            case Mapping():
                return f"map({','.join(f'{self.text(k)}:{self.text(v)}' for k, v in value.items())})"
            case type():
                return f"{value.__qualname__}"
            case types.ModuleType():
                return value.__name__
            case types.FunctionType():
                return self.code(value)
            case types.BuiltinFunctionType() if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
                return f"{value.__module__}.{value.__qualname__}"
            case torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
                return str(value)
            case _ if dataclasses.is_dataclass(value):
                fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
                return f"{type(value).__qualname__}({','.join(f'{name}={self.text(v)}' for name, v in fields)})"
            case _:
                raise NotKept(f"an object of type {type(value).__module__}.{type(value).__qualname__}")

    def code(self, function: types.FunctionType) -> str:
        """Name and code of a function with what it closes over; torch's own by name.

        The module is no part of it: a file is `__main__` to one process and a module to another.
        """
        name = function.__qualname__
        if (function.__module__ or "").partition(".")[0] == "torch" and not function.__closure__:
            return name
        held = []
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not yet bound
                continue
            if (
                isinstance(content, type) and content.__qualname__ in name
            ):  # the class itself, in a method that names it
                continue
            try:
                held.append(f"{variable}={self.text(content)}")
            except NotKept as reason:
                raise NotKept(f"closes over {variable}, {reason}") from None
        defaults = self.text([function.__defaults__, function.__kwdefaults__])
        return f"{name}({_bytes_of(function.__code__)};{defaults};{','.join(held)})"

    def class_code(self, kind: type) -> str:
        """Name and code of a class: its methods and plain attributes, those of its bases included."""
        parts = []
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            for name, member in sorted(vars(base).items(), key=lambda item: item[0]):
                plain = getattr(member, "__func__", member)
                if isinstance(plain, types.FunctionType):
                    parts.append(self.code(plain))
                elif not name.startswith("_"):
                    try:
                        parts.append(f"{name}={self.text(member)}")
                    except NotKept as reason:
                        raise NotKept(f"has an attribute {name}, {reason}") from None
        return f"{kind.__qualname__}({';'.join(parts)})"


def _bytes_of(code: types.CodeType) -> str:
    """Instructions, names and constants of code: not where it is written."""
    constants = [
        _bytes_of(c) if isinstance(c, types.CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


def _key(kind: Any, text: str, known: Any) -> str:
    """The key of a class or function; `known` gives what has that key so far, or None.

    Raises:
        NotKept: something of another module has the same key: what they read of their modules may differ.
    """
    key = f"{kind.__qualname__}#{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    other = known(key)
    if other is not None and other.__module__ != kind.__module__:
        raise NotKept(f"has the name and code of another one, in {other.__module__}")
    return key


# --- arguments ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """The place of an argument that the node holds: `kind` is "tensor", "int" or "float", or "device"."""

    kind: str
    position: int = 0


@dataclasses.dataclass(slots=True)
class _Values:
    """The node's own arguments."""

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ints: list[int] = dataclasses.field(default_factory=list)
    floats: list[float] = dataclasses.field(default_factory=list)

    def take(self, value: Any) -> Any:
        """`value` with slots in place of tensors and numbers."""
        match value:
            case torch.Tensor():
                self.tensors.append(value)
                return _Slot("tensor", len(self.tensors) - 1)
            case bool() | enum.Enum():
                return value
            case int():
                self.ints.append(value)
                return _Slot("int", len(self.ints) - 1)
            case float():
                self.floats.append(value)
                return _Slot("float", len(self.floats) - 1)
            case torch.device():
                return _Slot("device")
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self.take, value))
            case list():
                return [self.take(item) for item in value]
            case tuple():  # a torch.Size is one
                return tuple(self.take(item) for item in value)
            case dict():
                return {key: self.take(item) for key, item in value.items()}
            case _:
                return value

    def fill(self, template: Any) -> Any:
        """The value that `take` saw."""
        match template:
            case _Slot("tensor", position):
                return self.tensors[position]
            case _Slot("int", position):
                return self.ints[position]
            case _Slot("float", position):
                return self.floats[position]
            case _Slot("device", _):
                return self.tensors[0].device
            case tuple() if hasattr(template, "_fields"):
                return type(template)(*map(self.fill, template))
            case list() | tuple():
                return type(template)(self.fill(item) for item in template)
            case dict():
                return {key: self.fill(item) for key, item in template.items()}
            case _:
                return template


@dataclasses.dataclass(frozen=True, slots=True)
class _Spec:
    """A tensor without data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Spec":
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor like it, without gradient."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


# --- calls of the original ------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Seen:
    """What a call makes of tensors without data."""

    outputs: list[_Spec]
    template: Any  # of what apply returned, with the numbers in it
    ints: list[int]
    floats: list[float]
    aliases: bool
    is_random: bool


@dataclasses.dataclass(slots=True)
class _Function:
    """A Function with a template of its arguments. `runs_without_data`: forward and backward do on meta tensors."""

    kind: Any
    template: Any
    seen: dict[object, _Seen] = dataclasses.field(default_factory=dict)
    runs_without_data: bool = True

    def apply(self, values: _Values) -> Any:
        """The original, with its own autograd."""
        args, kwargs = values.fill(self.template)
        return self.kind.apply(*args, **kwargs)

    def look(self, values: _Values) -> _Seen:
        """Shapes of the results, and whether the call runs on tensors without data, forward and backward."""
        specs = [_Spec.of(t) for t in values.tensors]
        key = (tuple(specs), tuple(values.ints), tuple(values.floats))
        if key not in self.seen:
            self.seen[key] = _alone(partial(self._look, specs, values, torch.device("cpu")))
            try:
                for device in ("cpu", "meta"):
                    _alone(partial(self._look, specs, values, torch.device(device), backward=True))
            except Exception:  # whatever the user's code does with tensors that have no data
                self.runs_without_data = False
        return self.seen[key]

    def _look(self, specs: Sequence[_Spec], values: _Values, device: torch.device, *, backward: bool = False) -> _Seen:
        with FakeTensorMode(allow_non_fake_inputs=True), _Randomness() as randomness:  # type: ignore[no-untyped-call]
            # Not leaves, which may not be written in place.
            given = [s.empty(device).requires_grad_(s.requires_grad).clone() for s in specs]
            versions = [t._version for t in given]
            made = _Values()
            template = made.take(self.apply(_Values(given, values.ints, values.floats)))
            if [t._version for t in given] != versions:
                raise NotKept("writes into an argument")
            storages = {t.untyped_storage()._cdata for t in given}
            ends = [t for t in made.tensors if t.requires_grad]
            if backward and ends:
                torch.autograd.grad(ends, [t for t in given if t.requires_grad], list(map(torch.ones_like, ends)),
                                    allow_unused=True)  # fmt: skip
        return _Seen(
            outputs=[_Spec.of(t) for t in made.tensors],
            template=template,
            ints=made.ints,
            floats=made.floats,
            aliases=any(t.untyped_storage()._cdata in storages for t in made.tensors),
            is_random=randomness.seen,
        )


class _Randomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether a random operator ran."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _alone(run: Callable[[], Any]) -> Any:
    """What `run` returns in a thread of its own, where neither export nor a mode sees it."""
    result: list[Any] = []
    failure: list[BaseException] = []
    is_autocast, kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def target() -> None:
        try:
            with torch.autocast("cpu", dtype=kind, enabled=is_autocast):
                result.append(run())
        except BaseException as error:
            failure.append(error)

    with recording_off():
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    if failure:
        raise failure[0]
    return result[0]


_off: list[None] = []  # not empty while originals are called


@contextmanager
def recording_off() -> Iterator[None]:
    """Within it calls are the user's code at work, and no part of the model."""
    _off.append(None)
    try:
        yield
    finally:
        _off.pop()


def is_recording() -> bool:
    """Whether a call comes from the model rather than from here."""
    return not _off


_functions: dict[str, _Function] = {}
_hooks: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {}


class _StandIn(torch.autograd.Function):
    """Has the shapes of a Function that needs values, and moves its bytes in and out: what is priced instead."""

    @staticmethod
    def forward(ctx: Any, specs: list[_Spec], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Empty results; the arguments are saved."""
        ctx.save_for_backward(*tensors)
        made = tuple(s.empty(tensors[0].device).fill_(0) for s in specs)
        ctx.mark_non_differentiable(*(t for t, s in zip(made, specs, strict=True) if not s.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """A gradient for each differentiable argument."""
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(t.clone() if is_needed else None for t, is_needed in needed)


def run_function(
    key: str, tensors: Sequence[torch.Tensor], ints: Sequence[int], floats: Sequence[float]
) -> list[torch.Tensor]:
    """The node `planner.opaque.default`: the tensors that the original's `apply` returns, in order.

    Raises:
        TraceError: the model was not traced in this process.
    """
    if key not in _functions:
        raise TraceError(f"autograd.Function {key!r} is not known in this process; trace the model in it")
    function = _functions[key]
    values = _Values(list(tensors), list(ints), list(floats))
    if not function.runs_without_data and any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return list(_StandIn.apply(function.look(values).outputs, *tensors))  # type: ignore[no-untyped-call]
    made = _Values()
    made.take(function.apply(values))
    return made.tensors


def run_hooked(key: str, x: torch.Tensor) -> torch.Tensor:
    """The node `planner.hooked.default`: `x`, whose gradient goes through the user's hook.

    Raises:
        TraceError: the model was not traced in this process.
    """
    if key not in _hooks:
        raise TraceError(f"the hook {key!r} is not known in this process; trace the model in it")
    result = x.view_as(x)
    if result.requires_grad:
        result.register_hook(_hooks[key])  # type: ignore[no-untyped-call]
    return result


RUNS: dict[str, Callable[..., Any]] = {OPAQUE: run_function, HOOKED: run_hooked}


# --- recording ------------------------------------------------------------------------------------

_library = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "opaque(str key, Tensor[] tensors, int[] ints, float[] floats) -> Tensor[]",
    "hooked(str key, Tensor x) -> Tensor",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
has_side_effect(torch.ops.planner.hooked.default)  # nothing reads it: export must not drop it


@torch.library.register_fake("planner::opaque")  # type: ignore[untyped-decorator]
def _fake_opaque(key: str, tensors: list[torch.Tensor], ints: list[int], floats: list[float]) -> list[torch.Tensor]:
    seen = _functions[key].look(_Values(tensors, ints, floats))
    return [s.empty(tensors[0].device) for s in seen.outputs]


@torch.library.register_fake("planner::hooked")  # type: ignore[untyped-decorator]
def _fake_hooked(key: str, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _not_run(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("a recorded call has no backward of its own")


torch.library.register_autograd("planner::opaque", _not_run)  # so that results require gradients while exporting
torch.library.register_autograd("planner::hooked", _not_run)


def record_function(
    kind: Any, args: Iterable[Any], kwargs: Mapping[str, Any], is_of_batch: Callable[[float], bool]
) -> Any:
    """One node instead of what `kind.apply` does; returns what apply returns.

    `is_of_batch` tells numbers that are made from the batch size: a key may not hold one.

    Raises:
        NotKept: the call cannot be a node.
    """
    values, reader = _Values(), _Reader()
    template = values.take((tuple(args), dict(kwargs)))
    code = reader.class_code(kind)
    try:
        text = f"{code}({reader.text(template)})"
    except NotKept as reason:
        raise NotKept(f"is given {reason}") from None
    _check_numbers(reader, is_of_batch)
    key = _key(kind, text, lambda key: _functions[key].kind if key in _functions else None)
    function = _functions.setdefault(key, _Function(kind, template))
    function.kind = kind  # the code is the same; the class may have been made anew
    try:
        seen = function.look(values)
    except NotKept:
        raise
    except Exception as error:
        raise NotKept(f"cannot run on tensors without values ({_first_line(error)})") from error
    if not seen.outputs:
        raise NotKept("returns no tensor")
    made = torch.ops.planner.opaque(key, values.tensors, values.ints, values.floats)
    return _Values(list(made), seen.ints, seen.floats).fill(seen.template)


def record_hook(tensor: torch.Tensor, hook: Callable[..., Any], is_of_batch: Callable[[float], bool]) -> None:
    """Mark that the gradient of `tensor` goes through `hook`.

    Raises:
        NotKept: the hook cannot be a node.
    """
    if not isinstance(hook, types.FunctionType):
        owner = getattr(hook, "__self__", None)
        what = f"a method of {type(owner).__name__}" if inspect.ismethod(hook) else f"a {type(hook).__name__}"
        raise NotKept(f"is {what}")
    if tensor.is_leaf:
        raise NotKept("is set on a parameter, anew in every forward")
    reader = _Reader()
    key = _key(hook, reader.code(hook), _hooks.get)
    _check_numbers(reader, is_of_batch)
    spec = _Spec.of(tensor)

    def check() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            hook(spec.empty(torch.device("cpu")))

    try:
        _alone(check)
    except Exception as error:
        raise NotKept(f"cannot run on tensors without values ({_first_line(error)})") from error
    _hooks[key] = hook
    torch.ops.planner.hooked(key, tensor)


def _check_numbers(reader: _Reader, is_of_batch: Callable[[float], bool]) -> None:
    for number in reader.numbers:
        if is_of_batch(number):
            raise NotKept(f"holds the number {number:g}, which is made from the batch size")


def _first_line(error: Exception) -> str:
    text = (str(error).strip().split("\n")[0] or "no message")[:160].rstrip(".")
    return f"{type(error).__name__}: {text}"


def traits(key: str) -> tuple[bool, bool]:
    """(whether results may share storage with arguments, whether it draws random numbers) of a Function."""
    seen = _functions[key].seen.values()
    return any(s.aliases for s in seen), any(s.is_random for s in seen)
