"""Values for a model on `meta`: each module is materialised alone, in full, and initialised by its own methods.

The values are the same for every plan, and for one device by `materialise`: a module's generators are seeded by its
name alone. They are not those that the model's constructor would have drawn from the same seed, which draws in another
order.

What initialises a module, in this order, children before parents as constructors do:

    1. `reset_parameters()` or `_reset_parameters()` of each module: torch's layers
    2. `_init_weights(module)` of the innermost module around it that has one: Hugging Face and the many that call
       `self.apply(self._init_weights)`; where there is none, the module's own `init_weights()`
    3. `init(module)`, the caller's, as for `nn.Module.apply`

A parent may initialise what its children own. So a module is also given the calls of all modules around it, while every
other tensor of the model stays on meta, where writing costs and changes nothing.
"""

import copy
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError

Init = Callable[[nn.Module], object]
Model = TypeVar("Model", bound=nn.Module)
_RESETS = ("reset_parameters", "_reset_parameters")
_WRITES = frozenset(
    ["normal_", "uniform_", "constant_", "ones_", "zeros_", "fill_", "zero_", "copy_", "mul_", "div_",
     "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_"]
)  # fmt: skip
_SHOWN = 4  # names in a sentence


def materialise(model: Model, *, seed: int = 0, init: Init | None = None, device: torch.device | str = "cpu") -> Model:
    """Give every parameter and buffer of `model` that is on meta a value, in place: the values that `apply` trains.

    Tied parameters stay tied. Returns `model`.

    Raises:
        ModelError: nothing initialises a parameter or buffer, or an initialisation fails.
    """
    initialiser = Initialiser(model, seed=seed, init=init, device=torch.device(device))
    values = {name: initialiser.tensor(name) for name, tensor in named_tensors(model) if tensor.is_meta}
    if missing := [name for name, value in values.items() if value is None]:
        raise ModelError(uninitialised(missing))
    put(model, cast("dict[str, torch.Tensor]", values))
    return model


class Initialiser:
    """Draws the tensors of a model one module at a time; `model` itself is not touched."""

    def __init__(self, model: nn.Module, *, seed: int, init: Init | None, device: torch.device) -> None:
        """`seed` and the names of the modules decide the values, on one type of `device`.

        Raises:
            ModelError: the model cannot be copied, or its tied parameters were separated.
        """
        self._skeleton = _on_meta(model)
        _check_ties(model)
        self._seed = seed
        self._device = device
        self._modules = dict(self._skeleton.named_modules())
        self._own: dict[str, dict[str, str]] = {}  # path of a module -> its tensors, name -> attribute
        for name, _ in named_tensors(self._skeleton):
            path, _, leaf = name.rpartition(".")
            self._own.setdefault(path, {})[name] = leaf
        self._calls: dict[str, list[tuple[int, _Call]]] = {}  # by the path of the module they are made for
        for index, call in enumerate(_calls(self._skeleton, init)):
            self._calls.setdefault(call.path, []).append((index, call))
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None

    def tensor(self, name: str) -> torch.Tensor | None:
        """One parameter or buffer in full, None if nothing initialises it. The module of the last one is kept.

        Raises:
            ModelError: an initialisation fails.
        """
        path = name.rpartition(".")[0]
        if self._last is None or self._last[0] != path:
            self._last = None  # one module at a time
            self._last = (path, self.module(path))
        return self._last[1].get(name)

    def forget(self) -> None:
        """Free the module of the last tensor."""
        self._last = None

    def module(self, path: str) -> dict[str, torch.Tensor]:
        """What the module at `path` owns, children aside, by full name; what nothing initialises is absent.

        Raises:
            ModelError: an initialisation fails.
        """
        owner = self._modules[path]
        own = self._own.get(path, {})
        before = {leaf: _registered(owner, leaf) for leaf in own.values()}
        unset = {leaf: _unset(tensor, self._device) for leaf, tensor in before.items()}
        versions = {leaf: tensor._version for leaf, tensor in unset.items()}
        for leaf, tensor in unset.items():
            _register(owner, leaf, tensor)
        try:
            with _seeded(self._seed, path, self._device), torch.no_grad(), _OnMetaFree():
                for _, call in sorted(
                    (found for around in _upwards(path) for found in self._calls.get(around, [])), key=itemgetter(0)
                ):
                    _run(call, path)
            values = {name: _registered(owner, leaf).detach() for name, leaf in own.items()}
        finally:
            for leaf, tensor in before.items():
                _register(owner, leaf, tensor)
        result = {}
        for name, leaf in own.items():
            value, described = values[name], before[leaf]
            if value.shape != described.shape or value.dtype != described.dtype:
                raise ModelError(
                    f"the initialisation of {name} makes it {value.dtype} {list(value.shape)}, the model has "
                    f"{described.dtype} {list(described.shape)}; give weights=, or the model with its weights"
                )
            # Integers have no value that means none: in-place operators count the versions of a tensor.
            is_written = value._version != versions[leaf] or value.data_ptr() != unset[leaf].data_ptr()
            if not value.is_meta and (is_written or not value.numel()) and not _has_unset(value):
                result[name] = value.to(self._device)
        return result


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every distinct parameter and buffer under its first name, as in `named_parameters`, module by module."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{leaf}" if path else leaf, tensor


def put(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Register `values` by name in place of the model's tensors, under all their names."""
    identity = {id(tensor): name for name, tensor in named_tensors(model)}
    made: dict[str, torch.Tensor] = {}
    for module in model.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = identity.get(id(tensor), "") if tensor is not None else ""
            if tensor is None or name not in values:
                continue
            if name not in made:
                value = values[name]
                made[name] = nn.Parameter(value, tensor.requires_grad) if leaf in module._parameters else value
            _register(module, leaf, made[name])


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that may initialise tensors at or below a module."""

    path: str
    name: str  # for people: class and method
    run: Callable[[], object]


def _calls(model: nn.Module, init: Init | None) -> list[_Call]:
    """Everything that initialises the model, in order."""
    modules = list(_children_first(model, "", set()))
    by_path = dict(modules)
    result: list[_Call] = []
    for path, module in modules:
        for name in _RESETS:
            if (method := _method(module, name)) is not None and _takes(method):
                result.append(_Call(path, f"{type(module).__name__}.{name}()", method))
                break
    for path, module in modules:
        governor = _governor(by_path, path)
        if governor is not None:
            method = getattr(governor, "_init_weights")  # noqa: B009 a method that most modules lack
            name = f"{type(governor).__name__}._init_weights({type(module).__name__})"
            result.append(_Call(path, name, partial(method, module)))
        elif (method := _method(module, "init_weights")) is not None and _takes(method):
            result.append(_Call(path, f"{type(module).__name__}.init_weights()", method))
    if init is not None:
        for path, module in modules:
            result.append(_Call(path, f"init({type(module).__name__})", partial(init, module)))
    return result


def _run(call: _Call, path: str) -> None:
    try:
        call.run()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{call.name} fails while {f'module {path}' if path else 'the outermost module'} is initialised alone: "
            f"{type(error).__name__}: {reason}; give weights=, or the model with its weights"
        ) from error


def _children_first(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules as `nn.Module.apply` visits them, each once, with their first names in that order."""
    seen.add(id(module))
    for leaf, child in module._modules.items():
        if child is not None and id(child) not in seen:
            yield from _children_first(child, f"{path}.{leaf}" if path else leaf, seen)
    yield path, module


def _governor(by_path: dict[str, nn.Module], path: str) -> nn.Module | None:
    """The innermost module at or above `path` with a method `_init_weights(module)`."""
    for around in _upwards(path):
        module = by_path[around]
        method = _method(module, "_init_weights")
        if method is not None and _takes(method, module):
            return module
    return None


def _upwards(path: str) -> Iterator[str]:
    """The path, and those of the modules around it, the outermost last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _method(module: nn.Module, name: str) -> Callable[..., object] | None:
    found = getattr(module, name, None)
    return found if inspect.ismethod(found) or inspect.isfunction(found) else None


def _takes(method: Callable[..., object], *args: object) -> bool:
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _registered(module: nn.Module, leaf: str) -> torch.Tensor:
    found = module._parameters.get(leaf)
    return cast("torch.Tensor", module._buffers[leaf] if found is None else found)


def _register(module: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    """Without the checks and hooks of attribute assignment; a buffer stays persistent or not."""
    if isinstance(tensor, nn.Parameter):
        module._buffers.pop(leaf, None)
        module._parameters[leaf] = tensor
    else:
        module._parameters.pop(leaf, None)
        module._buffers[leaf] = tensor


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model with all its parameters and buffers on meta; ties stay."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the model cannot be copied to initialise it: {type(error).__name__}: {reason}; give it with its weights"
        ) from error


def _check_ties(model: nn.Module) -> None:
    """Refuse a model whose own `tie_weights` ties what is not tied: `.to("meta")` separates tied parameters.

    Raises:
        ModelError: with the names of the first pair.
    """
    tie = _method(model, "tie_weights")
    if tie is None or not _takes(tie):
        return
    skeleton = _on_meta(model)
    before = {name: id(p) for name, p in skeleton.named_parameters(remove_duplicate=False)}
    try:
        cast("Any", skeleton).tie_weights()
    except Exception:  # it needs values, or arguments: nothing can be said
        return
    first: dict[int, str] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if before.get(name) != before.get(other):
            raise ModelError(
                f"{other} and {name} are two parameters, which the model's tie_weights() makes one (to('meta') "
                "separates them); call model.tie_weights() after it, and plan again"
            )


def _unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like `tensor` on `device`, filled with what no initialisation leaves: not a number."""
    value = torch.empty_like(tensor, device=device)
    with torch.no_grad():
        if value.is_floating_point() or value.is_complex():
            value.fill_(float("nan"))
        else:
            value.zero_()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _has_unset(value: torch.Tensor) -> bool:
    return bool((value.is_floating_point() or value.is_complex()) and value.isnan().any())


def uninitialised(names: Sequence[str]) -> str:
    """The sentence that refuses tensors that nothing initialises."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    one = len(names) == 1
    return (
        f"{', '.join(names[:_SHOWN])}{more} {'is' if one else 'are'} on meta and no method of "
        f"{'its' if one else 'their'} module initialises {'it' if one else 'them'}; give weights=, init= (called with "
        "each module), a reset_parameters() to the module, or the model with its weights"
    )


class _OnMetaFree(TorchFunctionMode):
    """Writes to tensors on meta do nothing at once: torch's own way to nothing takes 0.1 ms.

    A method that initialises the whole model is called for each of its modules: for 100 layers that makes a minute.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _WRITES:
            target = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **(kwargs or {}))


@contextmanager
def _seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """The generators of torch, numpy and Python seeded by `seed` and a module's name; afterwards as before."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 the one that an init may use
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)  # noqa: NPY002
