"""Weights on disk or in memory, read slice by slice, and safetensors files that are written tensor by tensor.

A safetensors file is eight bytes of header length, a JSON header (name -> dtype, shape, byte range), and the tensors'
bytes one after the other. Source: https://github.com/huggingface/safetensors, "Format".
"""

import contextlib
import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from planner.errors import ModelError

Where = tuple[slice, ...]
GivenWeights = str | Path | Mapping[str, torch.Tensor]

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_ALIGNMENT = 8  # bytes; readers map tensors in place


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a stored tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredWeights(Protocol):
    """Tensors by name. `place` is for people; `bytes_read` counts what was asked for so far."""

    place: str
    bytes_read: int

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What there is."""

    def read(self, name: str, where: Where) -> torch.Tensor:
        """The part `where` of a tensor, all of it for `()`. It may be a view: copy it."""

    def digest(self) -> str:
        """What must agree between ranks that are given the same weights."""


def open_weights(given: GivenWeights) -> StoredWeights:
    """Weights from a directory, a file or a mapping.

    A directory holds safetensors with Hugging Face's index, or one or several files of safetensors or of `torch.save`.

    Raises:
        ModelError: there are none, or they cannot be read.
    """
    if isinstance(given, Mapping):
        return _InMemory(given)
    path = Path(given)
    if not path.exists():
        raise ModelError(f"there are no weights {path}; give a directory or file of safetensors, or a state_dict")
    if path.is_dir():
        return _Files(str(path), _files_in(path))
    return _Files(str(path), _files_of_index(path) if path.suffix == ".json" else [path])


def _files_in(folder: Path) -> list[Path]:
    for suffix in (".safetensors", ".bin", ".pt", ".pth"):
        indices = sorted(folder.glob(f"*{suffix}.index.json"))
        if len(indices) > 1:
            raise ModelError(
                f"{folder} has {len(indices)} indices of weights ({indices[0].name}, ...); give one of them"
            )
        if indices:
            return _files_of_index(indices[0])
        found = sorted(file for file in folder.glob(f"*{suffix}") if not file.name.startswith("."))
        if found and (suffix == ".safetensors" or len(found) == 1):
            return found
        if found:
            raise ModelError(f"{folder} has {len(found)} files {found[0].name}, ...; give one of them")
    if (folder / ".metadata").exists():
        raise ModelError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint; turn it into a file of weights first: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt"
        )
    raise ModelError(f"{folder} holds no weights (*.safetensors, *.bin, *.pt); give the directory that does")


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} is no index of weights ({type(error).__name__}: {error}); give the files themselves"
        ) from None
    files = [index.parent / str(name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(files)} files missing)"
        )
    return files


class _InMemory:
    """A state_dict."""

    def __init__(self, tensors: Mapping[str, Any], place: str = "the given state_dict") -> None:
        self.place = place
        self.bytes_read = 0
        for name, value in tensors.items():
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise ModelError(
                    f"{name!r} of {place} is a {type(value).__name__}; weights are tensors by the names of the model's "
                    "state_dict()"
                )
            if value.is_meta:
                raise ModelError(f"{name!r} of {place} is on meta and has no value; load it first")
        self._tensors = cast("Mapping[str, torch.Tensor]", tensors)
        self.entries = {name: Entry(tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    def read(self, name: str, where: Where) -> torch.Tensor:
        value = self._tensors[name].detach()[where]
        self.bytes_read += value.nbytes
        return value

    def digest(self) -> str:
        found = hashlib.sha256()
        for name in sorted(self._tensors):
            found.update(f"{name} {digest_of(self._tensors[name])}".encode())
        return found.hexdigest()


class _Files:
    """Files of one kind; only their headers are read before a tensor is asked for."""

    def __init__(self, place: str, files: Sequence[Path]) -> None:
        self.place = place
        self.bytes_read = 0
        self.entries: dict[str, Entry] = {}
        self._sizes = [file.stat().st_size for file in files]
        self._readers: dict[str, tuple[Any, bool]] = {}  # name -> file, whether it is safetensors
        for file in files:
            is_safe = file.suffix == ".safetensors"
            reader, entries = _open_safe(file) if is_safe else _open_torch(file)
            for name, entry in entries.items():
                if name in self.entries:
                    raise ModelError(f"{name} is in two files of {place}, one of them {file.name}; remove one")
                self.entries[name] = entry
                self._readers[name] = (reader, is_safe)

    def read(self, name: str, where: Where) -> torch.Tensor:
        reader, is_safe = self._readers[name]
        try:
            if not is_safe:
                value = reader[name].detach()[where]
            else:
                value = reader.get_slice(name)[where] if where else reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{name} of {self.place} cannot be read: {error}") from error
        self.bytes_read += value.nbytes
        return cast("torch.Tensor", value)

    def digest(self) -> str:
        known = sorted((name, entry.shape, str(entry.dtype)) for name, entry in self.entries.items())
        return hashlib.sha256(repr((known, self._sizes)).encode()).hexdigest()


def _open_safe(file: Path) -> tuple[Any, dict[str, Entry]]:
    try:
        reader: Any = safe_open(file, framework="pt")
        entries = {}
        for name in reader.keys():  # noqa: SIM118 it is no mapping
            part = reader.get_slice(name)
            dtype = _TORCH_DTYPES.get(part.get_dtype())
            if dtype is None:
                raise ModelError(
                    f"{name} of {file} has the dtype {part.get_dtype()}, which has no meaning without its scales; give "
                    f"weights in {', '.join(_DTYPES[d] for d in (torch.float32, torch.bfloat16, torch.float16))}"
                )
            entries[name] = Entry(tuple(part.get_shape()), dtype)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is no whole file of safetensors ({error}); fetch or write it again") from error
    return reader, entries


def _open_torch(file: Path) -> tuple[Any, dict[str, Entry]]:
    try:
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{file} cannot be read by torch.load with weights_only ({reason}); save a state_dict by torch.save"
        ) from error
    if not isinstance(loaded, Mapping):
        raise ModelError(f"{file} holds a {type(loaded).__name__}; save the model's state_dict() instead")
    return loaded, dict(_InMemory(loaded, str(file)).entries)


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's shape, dtype and values."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(plain.shape)} {plain.dtype}".encode())
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_fit(
    weights: StoredWeights, wanted: Mapping[str, tuple[tuple[str, ...], torch.Tensor]], ignored: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Which stored names hold each tensor of the model; several where tied tensors were stored more than once.

    `wanted` gives for each tensor of the model's state_dict its names there; `ignored` are patterns of stored names
    that the model says it can do without.

    Raises:
        ModelError: names are missing or unexpected, or shapes or kinds of dtype differ.
    """
    found = {name: tuple(key for key in keys if key in weights.entries) for name, (keys, _) in wanted.items()}
    known = {key for keys, _ in wanted.values() for key in keys}
    missing = [name for name, keys in found.items() if not keys]
    unexpected = [
        key for key in weights.entries if key not in known and not any(re.search(pattern, key) for pattern in ignored)
    ]
    if missing or unexpected:
        raise ModelError(
            f"the weights in {weights.place} are not those of this model: {len(missing)} of {len(wanted)} names missing"
            f"{_first(missing)}, {len(unexpected)} unexpected{_first(unexpected)}; names are those of the model's "
            "state_dict(): load them into the model as its library does and save that again (Hugging Face: "
            "save_pretrained(DIR, save_original_format=False)), or give weights=model.state_dict()"
        )
    for name, keys in found.items():
        tensor = wanted[name][1]
        for key in keys:
            entry = weights.entries[key]
            if entry.shape != tuple(tensor.shape):
                raise ModelError(
                    f"{key} has shape {list(entry.shape)} in {weights.place}, {list(tensor.shape)} in the model; give "
                    "the weights of this model"
                )
            if _kind(entry.dtype) != _kind(tensor.dtype):
                raise ModelError(
                    f"{key} is {entry.dtype} in {weights.place}, {tensor.dtype} in the model; convert it first"
                )
    return found


def _first(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})" if names else ""


def _kind(dtype: torch.dtype) -> str:
    """Dtypes of one kind may be converted."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to write: (name, entry) in order."""

    name: str
    tensors: tuple[tuple[str, Entry], ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(num_bytes(entry) for _, entry in self.tensors)


def num_bytes(entry: Entry) -> int:
    """Bytes of a tensor."""
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def header_of(tensors: Sequence[tuple[str, Entry]]) -> bytes:
    """The first bytes of a safetensors file with these tensors in this order.

    Raises:
        ModelError: the format has no such dtype.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in tensors:
        if entry.dtype not in _DTYPES:
            raise ModelError(f"{name} is {entry.dtype}, which safetensors cannot hold; use state_dict()")
        end = start + num_bytes(entry)
        described[name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def raw(value: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, not copied."""
    plain = value.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def index_of(files: Sequence[FilePlan]) -> bytes:
    """Hugging Face's `model.safetensors.index.json`."""
    content = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": {name: file.name for file in files for name, _ in file.tensors},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


@contextmanager
def removed_on_failure(drafts: list[Path]) -> Iterator[None]:
    """Remove the files that `drafts` lists when the block ends, however it ends."""
    try:
        yield
    finally:
        for draft in drafts:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
