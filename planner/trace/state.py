"""What forward keeps on its modules from one call to the next: a graph repeats the first call forever.

A registered buffer that forward writes in place is a node like others. One that it replaces
(`self.steps = self.steps + 1`) is given to forward as a copy, and the new value is written into it at the end. Plain
Python values that change are refused, and so are lists, dicts, sets, arrays and objects whose items do, unless they are
a cache that the first call fills for good, or are made anew in each call. A tensor that is a plain attribute may be set
in forward and read after that, as an auxiliary loss is; one that is read first carries something over from the last
call and is refused, unless no input, parameter or draw is in it.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.errors import ModelError
from planner.trace.batch import LossFunction, call, output_leaves, scalar_loss
from planner.trace.grouped import EveryDtype
from planner.trace.refusal import where_defined

Kept = Literal["value", "tensor", "buffer", "cache"]  # a cache is a container in which tensors change
Note = Callable[[Kept, str], None]
Contents = Mapping[tuple[object, ...], object]  # what a container holds, by the keys that lead there

_DEEPEST, _MOST_ITEMS = 8, 20_000  # of containers that are compared
_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NOT_OURS = ("torch.", "logging.", "threading.")  # objects of these modules keep nothing of a model's forward


class Evaluation:
    """In place of a loss function: the model is in eval mode, and named leaves of what it returns are results too.

    The results are the loss, or without one the first leaf again, then the leaves. `names` are those of the last call.
    """

    def __init__(self, outputs: Sequence[str], loss_fn: LossFunction | None, *, with_loss: bool) -> None:
        self.outputs = tuple(outputs)
        self.loss_fn = loss_fn
        self.with_loss = with_loss
        self.names: tuple[str, ...] = ()

    def __call__(self, output: Any, batch: Any) -> Any:
        """The results.

        Raises:
            ModelError: the model returns no such leaf, or no loss where one is wanted.
        """
        named = output_leaves(output)
        wanted = {n: v for o in self.outputs for n, v in named.items() if n == o or n.startswith(f"{o}.")}
        for name in self.outputs:
            if not any(n == name or n.startswith(f"{name}.") for n in wanted):
                raise ModelError(f"the model returns no tensor {name!r}; it returns {', '.join(named) or 'none'}")
        self.names = tuple(wanted)
        first = scalar_loss(output, batch, self.loss_fn) if self.with_loss else next(iter(wanted.values()))
        return (first, *wanted.values())


class LossOnly(nn.Module):
    """The model with its loss: what is exported returns one scalar, for an `Evaluation` its results.

    `note` is told what forward sets: Python values, tensors that are plain attributes, and buffers that it replaces,
    but for those in `replaced`, which are written at the end instead.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        note: Note = lambda kind, name: None,
        replaced: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.model = model.eval() if isinstance(loss_fn, Evaluation) else model
        self._loss_fn = (loss_fn,)  # in a tuple, so that a loss that is a module adds no parameters
        self.note = note  # not a list of our own: export puts attributes back to what they were
        self.replaced = frozenset(replaced)

    @property
    def loss_fn(self) -> LossFunction | None:
        """The user's."""
        function = self._loss_fn[0]
        return function.loss_fn if isinstance(function, Evaluation) else function

    def forward(self, batch: Any) -> Any:
        """The scalar loss of one batch."""
        values, tensors = _python_values(self.model), _tensor_attributes(self.model)
        containers = _containers(self.model)
        buffers = [
            (f"{name}.{key}".lstrip("."), module, key, buffer)
            for name, module in self.model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        for name, module, key, buffer in buffers:
            if name in self.replaced:
                module._buffers[key] = buffer.clone()
        function = self._loss_fn[0]
        with EveryDtype():
            output = call(self.model, batch, self.loss_fn)
        loss: Any  # in evaluation with what it returns beside
        loss = (
            function(output, batch)
            if isinstance(function, Evaluation)
            else scalar_loss(output, batch, function, source=where_defined(type(self.model).forward))
        )
        for name, value in _python_values(self.model).items():
            if values.get(name, value) != value:
                self.note("value", name)
        for name, kind in _changed(containers, _containers(self.model)).items():
            self.note(kind, name)
        for name, tensor in _tensor_attributes(self.model).items():
            if tensors.get(name) is not tensor:
                self.note("tensor", name)
        for name, module, key, buffer in buffers:
            new = module._buffers.get(key)
            if new is buffer:
                continue
            module._buffers[key] = buffer
            if new is None or new.shape != buffer.shape or new.dtype != buffer.dtype:
                self.note("value", name)
            elif name in self.replaced:
                with torch.no_grad():
                    buffer.copy_(new)
            else:
                self.note("buffer", name)
        return loss


def _python_values(model: nn.Module) -> dict[str, object]:
    """Plain attributes of all modules by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes, by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _containers(model: nn.Module) -> dict[str, Contents]:
    """What lists, dicts, sets, tuples, arrays and plain objects hold that are attributes of modules, by name.

    Tensors are themselves, whatever their contents. What two attributes share is told under the first.
    """
    seen: dict[int, object] = {}  # holds on to what was seen, so that no id comes twice
    result: dict[str, Contents] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and not isinstance(value, (*_PLAIN, torch.Tensor, nn.Module)):
                found: dict[tuple[object, ...], object] = {}
                _collect(value, (), found, seen)
                result[f"{name}.{key}".lstrip(".")] = found
    return result


def _collect(
    value: object, path: tuple[object, ...], found: dict[tuple[object, ...], object], seen: dict[int, object]
) -> None:
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        found[path] = value
        return
    found[path] = type(value)
    if id(value) in seen or len(path) > _DEEPEST or len(seen) + len(found) > _MOST_ITEMS:
        return
    seen[id(value)] = value
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()
            found[path] = (str(value.dtype), value.shape, digest)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, (*path, key), found, seen)
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(value):
            _collect(item, (*path, index), found, seen)
    elif isinstance(value, set | frozenset):
        for item in value:
            found[*path, item] = type(item)
    elif not isinstance(value, nn.Module | type) and not f"{type(value).__module__}.".startswith(_NOT_OURS):
        for key, item in getattr(value, "__dict__", {}).items():
            _collect(item, (*path, key), found, seen)


def _changed(before: Mapping[str, Contents], after: Mapping[str, Contents]) -> dict[str, Literal["value", "cache"]]:
    """The containers that hold something else than before."""
    result: dict[str, Literal["value", "cache"]] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name, {}), after.get(name, {})
        pairs = [(old.get(path, _ABSENT), new.get(path, _ABSENT)) for path in old.keys() | new.keys()]
        other = [pair for pair in pairs if not _is_same(*pair)]
        if other:
            is_cache = any(isinstance(item, torch.Tensor) for pair in other for item in pair)
            result[name] = "cache" if is_cache else "value"
    return dict(sorted(result.items()))


def _is_same(one: object, two: object) -> bool:
    if one is two:
        return True
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor) or type(one) is not type(two):
        return False
    return one == two


class _Taint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages that are made of given tensors or of random draws."""

    def __init__(self, given: Collection[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {t.untyped_storage()._cdata for t in given}

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or any(map(self.has, read)):
            self.storages.update(t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        else:  # one that was freed may have left its address to this
            self.storages -= {t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


@contextmanager
def _first_uses(wanted: Collection[tuple[int, str]], first: dict[tuple[int, str], str]) -> Iterator[None]:
    """Within it the first use of each wanted (module id, attribute) is noted as "read" or "written"."""
    kind: Any = nn.Module
    set_attribute = kind.__setattr__

    def watched_get(self: nn.Module, key: str) -> Any:
        if (id(self), key) in wanted:
            first.setdefault((id(self), key), "read")
        return object.__getattribute__(self, key)

    def watched_set(self: nn.Module, key: str, value: Any) -> None:
        if (id(self), key) in wanted:
            first.setdefault((id(self), key), "written")
        set_attribute(self, key, value)

    kind.__getattribute__ = watched_get
    kind.__setattr__ = watched_set
    try:
        yield
    finally:
        del kind.__getattribute__
        kind.__setattr__ = set_attribute


def carried_over(wrapped: LossOnly, batch: Any, names: Collection[str]) -> list[str]:
    """Which of the plain tensor attributes forward reads before it sets them, with something of this call in them.

    `wrapped` and `batch` are on fake tensors, whose mode is active.
    """
    places: dict[tuple[int, str], str] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        places[id(wrapped.model.get_submodule(path)), key] = name
    given = [t for t in (*wrapped.parameters(), *wrapped.buffers(), *tree_leaves(batch)) if isinstance(t, torch.Tensor)]
    first: dict[tuple[int, str], str] = {}
    with _Taint(given) as taint, _first_uses(places, first):
        call(wrapped.model, batch, wrapped.loss_fn)
    result = []
    for place, name in places.items():
        path, _, key = name.rpartition(".")
        value = vars(wrapped.model.get_submodule(path)).get(key)
        if first.get(place) == "read" and isinstance(value, torch.Tensor) and taint.has(value):
            result.append(name)
    return result


def is_filled_once(wrapped: LossOnly, batch: Any, names: Collection[str]) -> bool:
    """Whether the containers of tensors tell a second forward nothing of the first one's batch.

    They do not if the first fills them for good with what holds no input, parameter or draw, or if forward makes them
    anew before it reads them. `wrapped` and `batch` are on fake tensors, whose mode is active.
    """
    places = {}
    for name in names:
        path, _, key = name.rpartition(".")
        places[id(wrapped.model.get_submodule(path)), key] = name
    given = [t for t in (*wrapped.parameters(), *wrapped.buffers(), *tree_leaves(batch)) if isinstance(t, torch.Tensor)]
    first: dict[tuple[int, str], str] = {}
    empty = _containers(wrapped.model)
    with _Taint(given) as taint:
        call(wrapped.model, batch, wrapped.loss_fn)
        values, filled = _python_values(wrapped.model), _containers(wrapped.model)
        with _first_uses(places, first):
            call(wrapped.model, batch, wrapped.loss_fn)
    anew = {name for place, name in places.items() if first.get(place) == "written"}
    if _python_values(wrapped.model) != values or _changed(filled, _containers(wrapped.model)).keys() - anew:
        return False
    old = {id(item) for contents in empty.values() for item in contents.values()}
    return not any(
        isinstance(item, torch.Tensor) and id(item) not in old and taint.has(item)
        for name in set(names) - anew
        for item in filled.get(name, {}).values()
    )
