"""Measured training runs as other people publish them: one CSV row each, read with patience.

The format is that of `benchmarks/published/training.csv`, whose README says what each column means. Empty is "not
stated"; a cell that cannot be read is a reason to refuse its row, never an error of the whole file.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.errors import ProfileError
from planner.units import GB, GIB

MemoryKind = Literal["allocated", "reserved", "nvidia-smi", ""]
Outcome = Literal["ok", "oom", "failed", ""]
REQUIRED_COLUMNS = ("id", "gpu", "n_gpus")

_COUNTS = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "n_gpus", "gpus_per_node", "dp", "tp",
    "pp", "vp_interleave", "cp", "ep", "zero_stage", "micro_batch", "global_batch",
)  # fmt: skip
_NUMBERS = (
    "params_b", "gpu_mem_gb", "iter_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu",
    "peak_mem_gb",
)  # fmt: skip
_FLAGS = ("sequence_parallel", "flash_attention", "compiled")
_RECOMPUTED = ("", "unknown", "none", "selective", "full")
_OUTCOMES: Mapping[str, Outcome] = {
    "": "", "ok": "ok", "failed": "failed", "oom": "oom", "out of memory": "oom", "out-of-memory": "oom",
}  # fmt: skip
# What is moved to host memory, or that nothing is; other words are no reason to price a row as if nothing were.
_OFFLOADED = r"(|none|no|n|false|unknown|.*\b(cpu|optimizer|optim|activations?|params?|parameters?|partial)\b.*)"
_PRECISIONS = r"(|unknown|.*(bf16|bfloat16|fp16|float16|half|mixed|amp|tf32|fp32|float32|fp8|float8).*)"
# No run has more, and to trace a model of more layers, or of tensors that large, would take forever.
_MOST = {"layers": 10_000, "hidden": 10**7, "ffn_hidden": 10**8}
_MOST_OF_OTHERS = 10**9
LENGTH = "the row has more or fewer cells than the header"  # begins `Row.unreadable`
_TEXTS = ("source", "model", "gpu", "interconnect", "activation_recompute", "offload", "precision", "notes")


class RefusedError(Exception):
    """Why a row has no prediction; the text is counted in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run; names and units are those of the columns, None and "" are "not stated"."""

    id: str
    source: str = ""
    model: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    gpu: str = ""
    gpu_mem_gb: float | None = None
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    interconnect: str = ""
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vp_interleave: int | None = None
    cp: int | None = None
    ep: int | None = None
    sequence_parallel: bool | None = None
    zero_stage: int | None = None
    activation_recompute: str = ""
    offload: str = ""
    precision: str = ""
    flash_attention: bool | None = None
    compiled: bool | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    iter_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_mem_gb: float | None = None
    notes: str = ""
    outcome: Outcome = ""
    unreadable: str = ""  # what was wrong with a cell

    @property
    def prefix(self) -> str:
        """The source's short name, the id without its number."""
        return re.sub(r"-?\d+$", "", self.id) or self.id

    @property
    def is_inconsistent(self) -> bool:
        """Whether the layout does not multiply to the number of GPUs, as published."""
        return "INCONSISTENT" in self.notes

    @property
    def peak_memory_bytes(self) -> float | None:
        """The measured peak of a GPU. The unit is the source's: GiB unless the notes say GB."""
        if self.peak_mem_gb is None:
            return None
        is_decimal = re.search(r"mem_unit\s*=\s*GB\b|\bGB as printed|as printed in GB", self.notes)
        return self.peak_mem_gb * (GB if is_decimal else GIB)

    @property
    def memory_kind(self) -> MemoryKind:
        """What was measured; of an unknown tool all of the process, of an unknown kind what torch allocated."""
        if self.peak_mem_gb is None:
            return ""
        if re.search(r"nvidia-smi|tool not stated", self.notes):
            return "nvidia-smi"
        stated = re.search(r"mem_kind\s*=\s*([^;]*)", self.notes)
        if stated and re.search("reserved", stated[1]):
            return "reserved"
        return "allocated"

    @property
    def memory_is_of_last_rank(self) -> bool:
        """Whether the peak is that of the last pipeline stage, not of the worst rank."""
        return "LAST rank" in self.notes

    def note(self, pattern: str) -> re.Match[str] | None:
        """Where the notes say something."""
        return re.search(pattern, self.notes, re.IGNORECASE)


def read_rows(paths: Sequence[str | Path]) -> tuple[Row, ...]:
    """All rows of all files, in order.

    Raises:
        ProfileError: a file cannot be read, or lacks the columns without which nothing can be priced.
    """
    return tuple(row for path in paths for row in _read_file(Path(path)))


def remarks(paths: Sequence[str | Path], rows: Sequence[Row]) -> tuple[str, ...]:
    """What a reader of the figures has to know of the files: what of them is not read, ids that occur again."""
    known = {"id", "outcome", *_COUNTS, *_NUMBERS, *_FLAGS, *_TEXTS}
    others: dict[str, None] = {}
    broken = []
    for path in paths:
        with Path(path).open(encoding="utf-8-sig", newline="", errors="replace") as file:
            others |= dict.fromkeys(name for name in next(csv.reader(file), []) if name not in known)
            if any("\N{REPLACEMENT CHARACTER}" in line for line in file):
                broken.append(str(path))
    again = [name for name, count in Counter(row.id for row in rows).items() if count > 1]
    told = [f"{path} has bytes that are no UTF-8, which are not read" for path in broken]
    if others:
        told.append(f"columns that are not known are not read: {', '.join(map(repr, others))}")
    if again:
        told.append(f"{len(again)} ids occur more than once, and all of their rows count: {', '.join(again[:3])}")
    return tuple(told)


def _read_file(path: Path) -> Iterable[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ProfileError(
                    f"{path}: {_why_not(reader.fieldnames or ())}has no column {', '.join(missing)}; it must be in the "
                    "format of benchmarks/published/training.csv: UTF-8, with commas"
                )
            rows = [_row(cells) for cells in reader]
            if not rows:
                raise ProfileError(f"{path}: has no rows below its header")
            return rows
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except csv.Error as error:
        raise ProfileError(f"{path}: is no CSV: {error}") from None


def _why_not(header: Sequence[str]) -> str:
    """What the first line looks like instead, for people."""
    if not header:
        return "is empty, "
    text = ",".join(header)
    if "\x00" in text:
        return "is not UTF-8, "
    return "is separated by something else than commas, " if re.search(r"[;\t|]", text) else ""


def _row(cells: dict[str | None, object]) -> Row:
    texts = {
        key: (value or "").strip() for key, value in cells.items() if key and (value is None or isinstance(value, str))
    }
    values: dict[str, object] = {"id": texts.get("id", "") or "no-id"}
    problems = []
    if None in cells or None in cells.values():
        problems.append(LENGTH)
    for name in _COUNTS + _NUMBERS:
        text = texts.get(name, "")
        if not text:
            continue
        number = _number(text)
        if name in _NUMBERS and re.fullmatch(r"\d{1,3},\d+", text):
            problems.append(f"{name} is {text}, with a comma that may be either; write a point or nothing")
        elif number is None or number < 0 or (name in _COUNTS and number != int(number)):
            problems.append(f"{name} is {text[:40]!r}, no number" if number is None else f"{name} is {text[:40]}")
        elif number > _MOST.get(name, _MOST_OF_OTHERS):
            problems.append(f"{name} is {text[:40]}, too large to be true")
        else:
            values[name] = int(number) if name in _COUNTS else number
    heads, shared = values.get("heads"), values.get("kv_heads")
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        problems.append(f"kv_heads is {shared}, no divisor of {heads} heads")
    devices, experts = values.get("n_gpus"), values.get("ep")
    if isinstance(devices, int) and isinstance(experts, int) and 0 < devices < experts:
        problems.append(f"ep is {experts} on {devices} GPUs")
    for name in _FLAGS:
        values[name] = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}.get(
            texts.get(name, "").lower()
        )
    values |= {name: texts.get(name, "") for name in _TEXTS}
    word = texts.get("activation_recompute", "").lower()
    values["activation_recompute"] = "" if word == "unknown" else word
    if word not in _RECOMPUTED:
        problems.append(f"activation_recompute is {word[:40]!r}, not full, selective or none")
    outcome = texts.get("outcome", "").lower()
    values["outcome"] = _OUTCOMES.get(outcome, "")
    if outcome not in _OUTCOMES:
        problems.append(f"outcome is {outcome[:40]!r}, not oom, failed or ok")
    offload, precision = texts.get("offload", "").lower(), texts.get("precision", "").lower()
    if not re.fullmatch(_OFFLOADED, offload):
        problems.append(f"offload is {offload[:40]!r}, not optimizer, params, activations or none")
    if not re.fullmatch(_PRECISIONS, precision):
        problems.append(f"precision is {precision[:40]!r}, not bf16, fp16, fp8, tf32 or fp32")
    values["unreadable"] = "; ".join(problems)
    return Row(**values)  # type: ignore[arg-type]


def _number(text: str) -> float | None:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None
