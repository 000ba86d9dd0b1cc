"""From what a user types to a model with a batch.

A model is given as
    a name of the zoo               gpt2
    a Hugging Face config           path/to/config.json, or the directory that holds it
    a factory                       file.py:factory or package.module:factory, returning (model, batch)

On `meta` no weights are allocated. A factory that cannot run there (it reads a value, say) is run on the CPU instead.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.zoo.huggingface import load_huggingface
from planner.zoo.registry import NAMES, build, default_sequence_length, task


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can be traced and run: `module(**batch)`, or `module(*batch)` where the batch is a tuple."""

    module: nn.Module
    batch: dict[str, Any] | tuple[Any, ...]  # two samples from the zoo and Hugging Face, else the factory's
    loss_fn: Callable[[Any, Any], Tensor] | None  # None: the module returns its loss
    name: str  # short, for people and file names
    spec: str  # what `load_model` was given
    default_sequence_length: int | None  # what the model was trained on; None: no sequence, or unknown
    kind: str  # "factory", or what the model learns: "causal-lm", "image-classification", ...
    is_zoo: bool = False  # labels of the zoo's language models are shifted already


def load_model(
    spec: str,
    *,
    sequence_length: int | None = None,
    device: str = "meta",
    seed: int = 0,
    batch_device: str | None = None,
) -> LoadedModel:
    """The model that `spec` names, on `device`; on a real device its weights are drawn from `seed`.

    The batch of the zoo's and Hugging Face's is on `batch_device`, by default `device`; a factory's is its own.

    Raises:
        ModelError: there is no such model, or it cannot be built.
    """
    if spec in NAMES:
        if device != "meta":
            torch.manual_seed(seed)
        module, batch = build(spec, sequence_length=sequence_length, device=device, batch_device=batch_device)
        return LoadedModel(
            module=module,
            batch=batch,
            loss_fn=None,
            name=spec,
            spec=spec,
            default_sequence_length=default_sequence_length(spec),
            kind=task(spec),
            is_zoo=True,
        )
    source, colon, factory = spec.rpartition(":")
    if colon and source:
        if sequence_length is not None:
            raise ModelError(f"the batch of {spec} comes from its factory; set the sequence length there")
        return _from_factory(spec, source, factory, device=device, seed=seed)
    path = Path(spec)
    if path.suffix == ".json" or (path.is_dir() and (path / "config.json").exists()):
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"there is no file {spec}; give the path of a Hugging Face config.json")
        module, batch, kind, trained = load_huggingface(
            path, sequence_length=sequence_length, device=device, seed=seed, batch_device=batch_device
        )
        stem = path.resolve().parent.name if path.name == "config.json" else path.stem
        return LoadedModel(
            module=module,
            batch=batch,
            loss_fn=None,
            name=stem or type(module).__name__,
            spec=spec,
            default_sequence_length=trained,
            kind=kind,
        )
    if path.suffix == ".py":
        if not path.is_file():
            raise ModelError(f"there is no file {spec}; give file.py:factory")
        with _importable(path.resolve().parent):
            offered = _offered(_import_file(spec, path))
        raise ModelError(f"{spec} names no factory; write {spec}:NAME, where the file offers {offered}")
    raise ModelError(f"there is no model {spec!r}; {_nearest(spec)}")


def _nearest(spec: str) -> str:
    nearest = difflib.get_close_matches(spec.lower(), NAMES, n=3, cutoff=0.5)
    other = "a config.json, file.py:factory or package.module:factory"
    return (
        f"did you mean {' or '.join(nearest)}? (else {other})"
        if nearest
        else f"give one of {', '.join(NAMES)}, {other}"
    )


def _from_factory(spec: str, source: str, name: str, *, device: str, seed: int) -> LoadedModel:
    path = Path(source)
    is_file = source.endswith(".py")
    with _user_function(spec, source, name, "factory") as (factory, user_module):
        made = _call(spec, factory, user_module, device=device, seed=seed)
    module, batch = _checked(spec, made)
    return LoadedModel(
        module=module,
        batch=batch,
        loss_fn=None,
        name=f"{path.stem if is_file else source}-{name}",
        spec=spec,
        default_sequence_length=None,
        kind="factory",
    )


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `file.py:name` or `package.module:name` names.

    Raises:
        ModelError: there is no such file, module or function.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source:
        raise ModelError(f"{spec} names no function; give file.py:function or package.module:function")
    with _user_function(spec, source, name, "function") as (function, _):
        return function


@contextmanager
def _user_function(spec: str, source: str, name: str, what: str) -> Iterator[tuple[Callable[..., Any], ModuleType]]:
    path = Path(source)
    is_file = source.endswith(".py")
    if is_file and not path.is_file():
        raise ModelError(f"there is no file {source}; give file.py:{what}")
    with _importable(path.resolve().parent if is_file else Path.cwd()):
        user_module = _import_file(spec, path) if is_file else _import_module(spec, source)
        function = getattr(user_module, name, None)
        if not callable(function):
            raise ModelError(f"{source} has no {what} {name!r}; it offers {_offered(user_module)}")
        yield function, user_module


@contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """The user's file can import its neighbours, as in `python file.py`."""
    before = list(sys.path)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path[:] = before


def _import_file(spec: str, path: Path) -> ModuleType:
    name = f"_user_model_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ModelError(f"{spec}: the file cannot be imported: {_told(error, str(path.resolve()))}") from error
    return module


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ModelError(
                f"{spec}: there is no module {error.name}; give package.module:factory (importable from here) "
                "or file.py:factory"
            ) from None
        raise ModelError(f"{spec}: {name} cannot be imported: {_told(error, None)}") from error
    except Exception as error:
        raise ModelError(f"{spec}: {name} cannot be imported: {_told(error, None)}") from error


def _call(spec: str, factory: Callable[[], Any], user_module: ModuleType, *, device: str, seed: int) -> Any:
    if device == "meta":
        try:
            with torch.device("meta"):
                return factory()
        except Exception:  # whatever a model does that has no values to work on
            device = "cpu"
    torch.manual_seed(seed)
    try:
        with torch.device(device) if device != "cpu" else nullcontext():
            return factory()
    except Exception as error:
        raise ModelError(f"{spec}: the factory raises {_told(error, user_module.__file__)}") from error


def _told(error: BaseException, file: str | None) -> str:
    """Type, message and the innermost line of the user's file (or of the last file that is known)."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    own = [frame for frame in frames if file is not None and frame.filename == file] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text[:300]}{place}" if text else f"{type(error).__name__}{place}"


def _offered(module: ModuleType) -> str:
    names = sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__
    )
    return ", ".join(names) if names else "no function"


def _checked(spec: str, made: Any) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
    wanted = "it must return (model, batch), an nn.Module and a dict, tuple or tensor of inputs"
    if not isinstance(made, tuple):
        raise ModelError(f"{spec}: the factory returns {_described(made)}; {wanted}")
    if len(made) != 2:
        raise ModelError(f"{spec}: the factory returns {len(made)} values; {wanted}")
    module, batch = made
    if not isinstance(module, nn.Module):
        raise ModelError(f"{spec}: the factory's first value is {_described(module)}; {wanted}")
    match batch:
        case Tensor():
            inputs: dict[str, Any] | tuple[Any, ...] = (batch,)
        case tuple() | list():
            inputs = tuple(batch)
        case Mapping() if all(isinstance(key, str) for key in batch):
            inputs = dict(batch)
        case _:
            raise ModelError(f"{spec}: the factory's batch is {_described(batch)}; {wanted}")
    values = inputs.values() if isinstance(inputs, dict) else inputs
    if not any(isinstance(value, Tensor) for value in values):
        raise ModelError(f"{spec}: the factory's batch holds no tensor; {wanted}")
    return module, inputs


def _described(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
