"""The plan: everything the runtime needs, nothing it has to look up or decide. JSON in and out."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from planner.engine import STOCK
from planner.errors import PlanError

SCHEMA_VERSION = 2  # 1 had one sharding for each block

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
SPLITTING = ("cp", "ep", "tp")  # axes whose ranks have parts of tensors, in the order in which graphs are rewritten
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum")
PRECISIONS = ("bf16", "fp32", "fp64")
Recompute = Literal["none", "full"]
ScheduleName = Literal["gpipe", "1f1b"]
Phase = Literal["forward", "backward", "step"]  # step: once, after the last micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the mesh axes, outermost first; an unused axis has size 1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def num_devices(self) -> int:
        """Devices used."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.ep * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks: how many parts the global batch is split into. Those of `ep` are among them."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def shards(self) -> int:
        """Ranks that ZeRO-1, 2 and 3 shard over: those of `cp` and `ep`, neighbours, are among them."""
        return self.dp_shard * self.cp * self.ep

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """The axes whose ranks have parts of tensors, with their sizes, outermost first; those of one rank left out.

        >>> Mesh(dp_shard=4, cp=2, tp=8).splits
        (('cp', 2), ('tp', 8))
        """
        return tuple((axis, size) for axis in SPLITTING if (size := getattr(self, axis)) > 1)

    @property
    def peers(self) -> int:
        """Ranks that run the same samples together; they are neighbours."""
        return self.cp * self.tp

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in asdict(self).items() if size > 1]
        return ", ".join(used) or "1 device"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What is done with one block: its ZeRO stage (0 to 3), its recomputation, and how it is split over ranks.

    `shardings` are indices into `Plan.shardings`, one for each of `Mesh.splits` in their order.
    """

    name: str
    zero: int
    recompute: Recompute
    shardings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """Equal collectives of one cause that a block makes over an axis in a micro-batch, or once a step.

    Bytes are as in `collectives`.
    """

    collective: str
    phase: Phase
    count: int
    num_bytes: float
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """How the blocks of one class run on the ranks of an axis, as text; equal blocks share one.

    They split the blocks as the axes before this one have left them (`Mesh.splits`). `nodes` has the option of each
    node (`R,S0[64]>S1[64]`: placements of its operands, then of what it makes), the next four the placement of each
    tensor of the block, in its order (`planner.shard.placement` defines the words).
    For people: `words` says of each parameter what is split, `collectives` what the block communicates.
    """

    axis: str = "tp"
    nodes: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    collectives: tuple[CollectivePlan, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A short word that shardings share which are executed alike."""
        executed = (self.axis, self.nodes, self.parameters, self.buffers, self.inputs, self.outputs)
        return hashlib.sha256(repr(executed).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage: its blocks in order. With pp = 1 there is one stage."""

    blocks: tuple[BlockPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor of a batch: its name (`input_ids`, or `0`), its shape with -1 for the batch, its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan.

    `peak_bytes` and `capacity_bytes` are per rank, the heaviest rank of each stage. `gap` is
    (this plan - proven lower bound) / this plan within its configuration. `mfu` is model FLOP
    (no recomputation) over peak FLOP of the devices used. The `parts_seconds` add up to the step; of it
    `measured_share` rests on rows of a profile. Of computing, `forward_seconds` are forward passes; `corrections` are
    factors of terms by which audited runs have corrected it (`planner.audit`). Between `_low` and `_high` are 8 of 10
    measurements (`planner.interval`); plans of earlier releases do not say.
    """

    step_seconds: float
    bubble: float
    peak_bytes: tuple[float, ...]
    capacity_bytes: float
    gap: float
    mfu: float
    parts_seconds: tuple[tuple[str, float], ...] = ()
    measured_share: float = 0.0
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    peak_bytes_low: float | None = None  # of the fullest stage
    peak_bytes_high: float | None = None
    forward_seconds: float | None = None
    corrections: tuple[tuple[str, float], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every stage stays within the capacity of a device."""
        return max(self.peak_bytes) <= self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAttention:
    """What a plan of context parallelism would take with ring attention, and why it is not executed so.

    Seconds and bytes are as in `Prediction`, of the same choices.
    """

    step_seconds: float
    peak_bytes: tuple[float, ...]
    why_not: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to train one model on one cluster."""

    model: str
    cluster: str
    graph_fingerprint: str
    cluster_fingerprint: str
    precision: str
    optimizer: str
    global_batch: int
    micro_batch: int
    num_microbatches: int
    schedule: ScheduleName
    mesh: Mesh
    stages: tuple[StagePlan, ...]
    inputs: tuple[InputSpec, ...] = ()
    shardings: tuple[ShardingPlan, ...] = ()
    prediction: Prediction
    ring_attention: RingAttention | None = None
    engine: str = STOCK  # the training system that it is priced for; stock PyTorch runs it
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.mesh.num_devices

    @property
    def block_plans(self) -> tuple[BlockPlan, ...]:
        """All blocks in model order."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what `dumps` writes and `--json` prints. Seconds, bytes, fractions."""
        return {
            "schema_version": self.schema_version,
            "model": self.model,
            "cluster": self.cluster,
            "graph_fingerprint": self.graph_fingerprint,
            "cluster_fingerprint": self.cluster_fingerprint,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "global_batch": self.global_batch,
            "mesh": asdict(self.mesh),
            "devices": self.devices,
            "micro_batch": self.micro_batch,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "step_seconds": self.prediction.step_seconds,
            "bubble": self.prediction.bubble,
            "peak_bytes": list(self.prediction.peak_bytes),
            "capacity_bytes": self.prediction.capacity_bytes,
            "fits": self.prediction.fits,
            "gap": self.prediction.gap,
            "mfu": self.prediction.mfu,
            "parts_seconds": dict(self.prediction.parts_seconds),
            "notes": list(self.notes),
            "inputs": [{**asdict(i), "shape": list(i.shape)} for i in self.inputs],
            "stages": [{"blocks": [_block_data(b) for b in s.blocks]} for s in self.stages],
            # Left out where it says nothing, so that plans that split no tensors read as before.
            **({"shardings": [_sharding_data(sharding) for sharding in self.shardings]} if self.shardings else {}),
            **({} if (ring := self.ring_attention) is None else {"ring_attention": _ring_data(ring)}),
            **({"engine": self.engine} if self.engine != STOCK else {}),
            **({"measured_share": share} if (share := self.prediction.measured_share) else {}),
            **({} if (forward := self.prediction.forward_seconds) is None else {"forward_seconds": forward}),
            **({"corrections": dict(factors)} if (factors := self.prediction.corrections) else {}),
            **{k: end for k in _INTERVAL_KEYS if (end := getattr(self.prediction, k)) is not None},
        }

    def dumps(self) -> str:
        """The plan as JSON; the same plan gives the same bytes."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str, *, origin: str = "the plan") -> "Plan":
        """Read JSON back.

        Raises:
            PlanError: it is no plan; every fault is named with its path.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"{origin} is no JSON ({error}); it is truncated or not a plan, make it again with autoplan plan --out"
            ) from None
        return _read(data, origin)

    def save(self, path: str | Path) -> None:
        """Write atomically: the file is whole or not there.

        Raises:
            PlanError: the folder does not exist or cannot be written.
        """
        write_atomically(Path(path), self.dumps())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Raises:
            PlanError: the file is missing, corrupt or of another schema.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: no UTF-8, or a null byte in the path
            reason = getattr(error, "strerror", None) or "not a text file"
            raise PlanError(f"cannot read the plan {path}: {reason}") from None
        return cls.loads(text, origin=str(path))

    def diff(self, other: "Plan") -> list[tuple[str, str, str]]:
        """(what, here, there) for every difference; runs of equal blocks are put together."""
        mine, theirs = self.to_dict(), other.to_dict()
        rows = []
        for key in dict.fromkeys([*mine, *theirs]):
            if key in ("mesh", "parts_seconds"):
                for name in dict.fromkeys([*mine[key], *theirs[key]]):
                    here, there = mine[key].get(name), theirs[key].get(name)
                    if here != there:
                        rows.append((f"{key}.{name}", _text(here), _text(there)))
            elif key not in _NOT_COMPARED and mine.get(key) != theirs.get(key):
                rows.append((key, _text_of(mine, key), _text_of(theirs, key)))
        here_of, there_of = self._block_texts(), other._block_texts()
        for name in dict.fromkeys([*here_of, *there_of]):
            here_text, there_text = (of.get(name, "absent") for of in (here_of, there_of))
            if here_text != there_text:
                if rows and rows[-1][1:] == (here_text, there_text):
                    first = rows.pop()[0].partition(" to ")[0]
                    rows.append((f"{first} to {name}", here_text, there_text))
                else:
                    rows.append((f"block {name}", here_text, there_text))
        return rows

    def _block_texts(self) -> dict[str, str]:
        """What is done with each block, in words; equal words for equal shardings, whatever their index."""
        return {
            b.name: f"stage {index}, ZeRO-{b.zero}, recompute {b.recompute}"
            + "".join(f", {self.shardings[i].axis} sharding {self.shardings[i].fingerprint}" for i in b.shardings)
            for index, stage in enumerate(self.stages)
            for b in stage.blocks
        }


def _block_data(block: BlockPlan) -> dict[str, Any]:
    data = asdict(block)
    indices = data.pop("shardings")
    return {**data, "shardings": list(indices)} if indices else data


def _sharding_data(sharding: ShardingPlan) -> dict[str, Any]:
    return {name: item if name == "axis" else list(item) for name, item in asdict(sharding).items()}


def _ring_data(ring: RingAttention) -> dict[str, Any]:
    return {**asdict(ring), "peak_bytes": list(ring.peak_bytes)}


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole or not there.

    Raises:
        PlanError: the folder does not exist or cannot be written.
    """
    handle = None
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        descriptor, handle = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)  # else a crash of the machine may keep the name and lose the text
        Path(handle).chmod(0o644)
        Path(handle).replace(path)
        handle = None
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if handle is not None:
            Path(handle).unlink(missing_ok=True)


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_INTERVAL_KEYS = ("step_seconds_low", "step_seconds_high", "peak_bytes_low", "peak_bytes_high")
_NOT_COMPARED = ("stages", "notes", "inputs", "shardings", "ring_attention", *_INTERVAL_KEYS)


def _text_of(data: Mapping[str, Any], key: str) -> str:
    """A value with its interval, if it has one."""
    ends = [data[end] for end in (f"{key}_low", f"{key}_high") if end in data]
    return _text(data.get(key, "absent")) + (f" ({_text(ends[0])} to {_text(ends[1])})" if len(ends) == 2 else "")


class _Reader:
    """Reads typed fields from plain data and remembers every fault with its path."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def get(self, data: object, path: str, key: str, kind: type | tuple[type, ...]) -> Any:
        where = f"{path}.{key}".lstrip(".")
        if not isinstance(data, Mapping) or key not in data:
            self.faults.append(f"{where} is missing")
            return None
        value = data[key]
        wanted = kind if isinstance(kind, tuple) else (kind,)
        wrong = isinstance(value, bool) and bool not in wanted
        if wrong or not isinstance(value, wanted):
            names = " or ".join(_KINDS[k] for k in wanted)
            self.faults.append(f"{where} must be {names}, is {_shown(value)}")
            return None
        return value

    def one_of(self, data: object, path: str, key: str, choices: tuple[Any, ...]) -> Any:
        value = self.get(data, path, key, type(choices[0]))
        if value is not None and value not in choices:
            where = f"{path}.{key}".lstrip(".")
            self.faults.append(f"{where} must be one of {', '.join(map(str, choices))}, is {_shown(value)}")
        return value

    def text(self, data: object, path: str, key: str) -> Any:
        value = self.get(data, path, key, str)
        if value is not None and not value.isprintable():
            self.faults.append(f"{f'{path}.{key}'.lstrip('.')} must be printable text, is {_shown(value)}")
        return value

    def positive(self, data: object, path: str, key: str) -> Any:
        value = self.get(data, path, key, int)
        if value is not None and not 1 <= value < _LARGEST:
            self.faults.append(f"{f'{path}.{key}'.lstrip('.')} must be at least 1, is {_shown(value)}")
            return None
        return value

    def number(self, value: object, where: str) -> Any:
        """A finite number that is not negative."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
            self.faults.append(f"{where} must be a number, at least 0, is {_shown(value)}")
            return None
        return value

    def known(self, data: object, path: str, keys: Iterable[str]) -> None:
        """No key but these: one that is not read would be ignored in silence."""
        if isinstance(data, Mapping):
            self.faults += [
                f"{f'{path}.{key}'.lstrip('.')} is no key of a plan" for key in data if key not in set(keys)
            ]


_KINDS = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}
_LARGEST = 1e30  # of any count, time or size that means something


def _shown(value: object) -> str:
    """A value in a message: short, in one line, in ASCII."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read(data: object, origin: str) -> Plan:
    if not isinstance(data, Mapping):
        raise PlanError(f"{origin} holds no plan: it must be a JSON object")
    reader = _Reader()
    version = data.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise PlanError(
            f"{origin} has schema version {_shown(version)}, this release reads "
            f"{SCHEMA_VERSION}; make it again with autoplan plan --out"
        )
    texts = {
        key: reader.text(data, "", key) for key in ("model", "cluster", "graph_fingerprint", "cluster_fingerprint")
    }
    counts = {key: reader.positive(data, "", key) for key in ("global_batch", "micro_batch", "num_microbatches")}
    devices = reader.positive(data, "", "devices")
    precision = reader.one_of(data, "", "precision", PRECISIONS)
    optimizer = reader.one_of(data, "", "optimizer", OPTIMIZERS)
    schedule = reader.one_of(data, "", "schedule", get_args(ScheduleName))
    axes = {axis: reader.positive(data.get("mesh"), "mesh", axis) for axis in AXES}
    reader.known(data.get("mesh"), "mesh", AXES)
    stages = _read_stages(data, reader)
    inputs = _read_inputs(data, reader)
    shardings = _read_shardings(data, reader)
    ring = _read_ring(data, reader)
    engine = reader.text(data, "", "engine") if "engine" in data else STOCK
    numbers = {
        key: reader.number(data.get(key), key) for key in ("step_seconds", "bubble", "capacity_bytes", "gap", "mfu")
    }
    peaks = reader.get(data, "", "peak_bytes", list) or []
    peaks = [reader.number(peak, f"peak_bytes[{i}]") for i, peak in enumerate(peaks)]
    parts = reader.get(data, "", "parts_seconds", dict) or {}
    parts = {name: reader.number(seconds, f"parts_seconds.{name}") for name, seconds in parts.items()}
    share = reader.number(data.get("measured_share", 0.0), "measured_share")
    forward = reader.number(data["forward_seconds"], "forward_seconds") if "forward_seconds" in data else None
    factors = (reader.get(data, "", "corrections", dict) or {}) if "corrections" in data else {}
    factors = {name: reader.number(factor, f"corrections.{name}") for name, factor in factors.items()}
    ends: dict[str, Any] = {key: reader.number(data[key], key) for key in _INTERVAL_KEYS if key in data}
    fits = reader.get(data, "", "fits", bool)
    notes = reader.get(data, "", "notes", list) or []
    if any(not isinstance(note, str) or not note.isprintable() for note in notes):
        reader.faults.append("notes must hold printable text")
    if any(not name.isprintable() for name in (*parts, *factors)):
        reader.faults.append("parts_seconds and corrections must have printable names")
    reader.known(data, "", _TOP_KEYS)
    if not reader.faults:
        mesh = Mesh(**axes)
        prediction = Prediction(
            **numbers, **ends, peak_bytes=tuple(peaks), parts_seconds=tuple(parts.items()), measured_share=share,
            forward_seconds=forward, corrections=tuple(factors.items()),
        )  # fmt: skip
        reader.faults += _contradictions(mesh, stages, counts, len(peaks), schedule)
        reader.faults += _sharding_faults(mesh, stages, shardings)
        if ring is not None and (mesh.cp == 1 or len(ring.peak_bytes) != len(stages)):
            reader.faults.append(
                f"ring_attention has {len(ring.peak_bytes)} peak_bytes for {len(stages)} stages and cp {mesh.cp}"
            )
        if devices != mesh.num_devices:
            reader.faults.append(f"devices is {devices}, the mesh has {mesh.num_devices}")
        if peaks and fits != prediction.fits:
            reader.faults.append(f"fits is {_shown(fits)}, peak_bytes and capacity_bytes say {_shown(not fits)}")
    if reader.faults:
        more = len(reader.faults) - _MOST_FAULTS
        named = [*reader.faults[:_MOST_FAULTS], *([f"and {more} more"] if more > 0 else [])]
        raise PlanError(f"{origin} is no valid plan: {'; '.join(named).encode('ascii', 'backslashreplace').decode()}")
    return Plan(
        **texts,
        **counts,
        precision=precision,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        stages=stages,
        inputs=inputs,
        shardings=shardings,
        prediction=prediction,
        ring_attention=ring,
        engine=engine,
        notes=tuple(notes),
    )


_MOST_FAULTS = 50  # of one message; a file of another kind has thousands
_TOP_KEYS = (
    "schema_version", "model", "cluster", "graph_fingerprint", "cluster_fingerprint", "precision", "optimizer",
    "global_batch", "mesh", "devices", "micro_batch", "num_microbatches", "schedule", "step_seconds", "bubble",
    "peak_bytes", "capacity_bytes", "fits", "gap", "mfu", "parts_seconds", "notes", "inputs", "stages", "shardings",
    "ring_attention", "measured_share", "forward_seconds", "corrections", "engine",
    *_INTERVAL_KEYS,
)  # fmt: skip


def _read_stages(data: Mapping[str, Any], reader: _Reader) -> tuple[StagePlan, ...]:
    stages = []
    for s, stage in enumerate(reader.get(data, "", "stages", list) or []):
        reader.known(stage, f"stages[{s}]", ("blocks",))
        blocks = []
        for b, block in enumerate(reader.get(stage, f"stages[{s}]", "blocks", list) or []):
            path = f"stages[{s}].blocks[{b}]"
            reader.known(block, path, ("name", "zero", "recompute", "shardings"))
            has_shardings = isinstance(block, Mapping) and "shardings" in block
            indices = reader.get(block, path, "shardings", list) or [] if has_shardings else []
            if any(isinstance(index, bool) or not isinstance(index, int) for index in indices):
                reader.faults.append(f"{path}.shardings must hold whole numbers, is {_shown(indices)}")
            blocks.append(
                BlockPlan(
                    name=reader.text(block, path, "name"),
                    zero=reader.one_of(block, path, "zero", (0, 1, 2, 3)),
                    recompute=reader.one_of(block, path, "recompute", get_args(Recompute)),
                    shardings=tuple(indices),
                )
            )
        if not blocks:
            reader.faults.append(f"stages[{s}] has no block")
        stages.append(StagePlan(blocks=tuple(blocks)))
    return tuple(stages)


def _read_inputs(data: Mapping[str, Any], reader: _Reader) -> tuple[InputSpec, ...]:
    inputs = []
    for i, item in enumerate(reader.get(data, "", "inputs", list) or []):
        path = f"inputs[{i}]"
        reader.known(item, path, ("name", "shape", "dtype"))
        name, dtype = reader.text(item, path, "name"), reader.text(item, path, "dtype")
        shape = reader.get(item, path, "shape", list) or []
        if any(isinstance(size, bool) or not isinstance(size, int) or size < -1 for size in shape):
            reader.faults.append(f"{path}.shape must hold whole numbers, -1 for the batch, is {_shown(shape)}")
        inputs.append(InputSpec(name=name, shape=tuple(shape), dtype=dtype))
    return tuple(inputs)


_SIZE = r"(?:\d{1,12}B?|B)"
_PLACEMENT = rf"(?:[RQPDE]|[SLD]\d{{1,3}}(?:\*{_SIZE})?\[{_SIZE}(?:,{_SIZE})*(?:@\d+(?:\.\d+)*)?\])"
_PLACEMENT_TEXT = re.compile(_PLACEMENT)
_OPTION_TEXT = re.compile(rf"(?:{_PLACEMENT}(?:,{_PLACEMENT})*)?>(?:(?:-|{_PLACEMENT})(?:,(?:-|{_PLACEMENT}))*)?")


def _read_shardings(data: Mapping[str, Any], reader: _Reader) -> tuple[ShardingPlan, ...]:
    """The optional shardings; whether a rule allows them is for whoever has the graph."""
    if "shardings" not in data:
        return ()
    keys = ("nodes", "parameters", "buffers", "inputs", "outputs")
    shardings = []
    for i, item in enumerate(reader.get(data, "", "shardings", list) or []):
        path = f"shardings[{i}]"
        reader.known(item, path, ("axis", *keys, "words", "collectives"))
        texts: dict[str, tuple[str, ...]] = {}
        for key in keys:
            form = _OPTION_TEXT if key == "nodes" else _PLACEMENT_TEXT
            rows = reader.get(item, path, key, list) or []
            for j, text in enumerate(rows):
                if not isinstance(text, str) or not form.fullmatch(text):
                    wanted = "such as R,S0[64]>S1[64]" if key == "nodes" else "R, Q, P, D or such as S1[128]"
                    reader.faults.append(f"{path}.{key}[{j}] must be {wanted}, is {_shown(text)}")
            texts[key] = tuple(rows)
        words = reader.get(item, path, "words", list) or []
        if any(not isinstance(line, str) or not line.isprintable() for line in words):
            reader.faults.append(f"{path}.words must hold printable text")
        made = _read_collectives(item, path, reader)
        axis = reader.one_of(item, path, "axis", SPLITTING)
        shardings.append(ShardingPlan(axis=axis, **texts, words=tuple(words), collectives=made))
    return tuple(shardings)


def _read_collectives(item: object, path: str, reader: _Reader) -> tuple[CollectivePlan, ...]:
    result = []
    for j, made in enumerate(reader.get(item, path, "collectives", list) or []):
        where = f"{path}.collectives[{j}]"
        reader.known(made, where, ("collective", "phase", "count", "num_bytes", "cause"))
        num_bytes = made.get("num_bytes") if isinstance(made, Mapping) else None
        result.append(
            CollectivePlan(
                collective=reader.text(made, where, "collective"),
                phase=reader.one_of(made, where, "phase", get_args(Phase)),
                count=reader.positive(made, where, "count"),
                num_bytes=reader.number(num_bytes, f"{where}.num_bytes"),
                cause=reader.text(made, where, "cause") if isinstance(made, Mapping) and "cause" in made else "",
            )
        )
    return tuple(result)


def _read_ring(data: Mapping[str, Any], reader: _Reader) -> RingAttention | None:
    """The optional price of ring attention."""
    if "ring_attention" not in data:
        return None
    path = "ring_attention"
    item = reader.get(data, "", path, dict)
    reader.known(item, path, ("step_seconds", "peak_bytes", "why_not"))
    seconds = reader.number(item.get("step_seconds") if isinstance(item, Mapping) else None, f"{path}.step_seconds")
    peaks = reader.get(item, path, "peak_bytes", list) or []
    return RingAttention(
        step_seconds=seconds,
        peak_bytes=tuple(reader.number(peak, f"{path}.peak_bytes[{i}]") for i, peak in enumerate(peaks)),
        why_not=reader.text(item, path, "why_not"),
    )


def _sharding_faults(mesh: Mesh, stages: tuple[StagePlan, ...], shardings: tuple[ShardingPlan, ...]) -> list[str]:
    """Every block has a sharding that is there for each axis that splits, and no other."""
    faults = []
    used = set()
    for s, stage in enumerate(stages):
        for b, block in enumerate(stage.blocks):
            path = f"stages[{s}].blocks[{b}].shardings"
            if len(block.shardings) != len(mesh.splits):
                wanted = " and ".join(f"mesh.{axis} is {size}" for axis, size in mesh.splits)
                faults.append(
                    f"{path} has {len(block.shardings)} entries, but "
                    + (f"{wanted}: one for each" if wanted else f"mesh.{', mesh.'.join(SPLITTING)} are 1")
                )
                continue
            for (axis, _), index in zip(mesh.splits, block.shardings, strict=True):
                used.add(index)
                if not 0 <= index < len(shardings):
                    faults.append(f"{path} has {index}, there are {len(shardings)} shardings")
                elif shardings[index].axis != axis:
                    faults.append(f"{path} has {index} for {axis}, which is of {shardings[index].axis}")
    if not faults:
        faults += [f"shardings[{i}] is of no block" for i in range(len(shardings)) if i not in used]
    return faults


def _sharding_axis(mesh: Mesh) -> str:
    return next((axis for axis in ("cp", "ep") if getattr(mesh, axis) > 1), "dp_shard")


def _contradictions(
    mesh: Mesh,
    stages: tuple[StagePlan, ...],
    counts: Mapping[str, int],
    num_peaks: int,
    schedule: str,
) -> list[str]:
    """Rules between fields: what the runtime could not execute as stated."""
    faults = []
    if mesh.pp != len(stages):
        faults.append(f"mesh.pp is {mesh.pp} but there are {len(stages)} stages")
    if num_peaks != len(stages):
        faults.append(f"peak_bytes has {num_peaks} entries for {len(stages)} stages")
    if min(mesh.ep, mesh.cp) > 1:
        faults.append(f"mesh.ep is {mesh.ep} and mesh.cp is {mesh.cp}; this release runs one of the two at a time")
    parts = counts["micro_batch"] * counts["num_microbatches"] * mesh.dp
    if parts != counts["global_batch"]:
        faults.append(
            f"micro_batch x num_microbatches x data-parallel ranks is {parts}, global_batch is {counts['global_batch']}"
        )
    if schedule == "1f1b" and mesh.pp > 1 and counts["num_microbatches"] < mesh.pp:
        faults.append(f"1f1b needs at least as many micro-batches as stages: {counts['num_microbatches']} < {mesh.pp}")
    names = [block.name for stage in stages for block in stage.blocks]
    if len(set(names)) != len(names):
        faults.append("stages name a block twice")
    all_zero_0 = all(b.zero == 0 for s in stages for b in s.blocks)
    if mesh.shards > 1 and any(b.zero == 0 for s in stages for b in s.blocks):
        faults.append(f"blocks with ZeRO-0 need dp_replicate, the mesh has {_sharding_axis(mesh)}")
    if mesh.shards == 1 and not all_zero_0:
        faults.append("blocks with ZeRO-1, 2 or 3 need dp_shard, the mesh has none")
    for s, stage in enumerate(stages):
        kinds = {min(block.zero, 2) for block in stage.blocks}
        if mesh.pp > 1 and len(kinds) > 1:
            faults.append(f"stages[{s}] mixes ZeRO-1 with ZeRO-2 or 3")
    return faults
