"""Measured numbers of one machine as data: a versioned JSON file, and what it does to a graph and to a cluster.

Rows are looked up by what was measured and nothing else: an operator by its name, the shapes and dtypes of what it
reads and its pass; a block by all its operators; a collective by its group and its bytes. `measured_graph` writes the
seconds into a graph, where `planner.operators` finds them before it asks the roofline, and `measured_cluster` replaces
links and rates. Seconds are medians; `spread` is the distance of the quartiles over the median.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, get_type_hints

from planner.cluster import Cluster, Curve, Link, OptimizerSeconds, Slowdown, all_links, device_named, link_named
from planner.errors import ClusterError, PlanError, ProfileError
from planner.graph import DTYPE_BYTES, BlockClass, Graph, Kernel, MeasuredPasses
from planner.plan import write_atomically

PROFILE_VERSION = 1
SOURCE = "measured, from a profile"
UNITS = {
    "*_seconds": "s", "seconds": "s", "*_bytes": "B", "spread": "(third quartile - first quartile) / median",
    "flop": "floating-point operations", }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and with what a profile was measured. `host` is a hash: it tells machines apart and names none."""

    device: str  # as torch.cuda.get_device_name() says, or the processor's model
    kind: str  # "cuda" or "cpu"
    capability: str
    driver: str
    torch: str
    python: str
    host: str
    processes: int  # that measured at once
    threads: int  # of each
    date: str
    pace_seconds: float = 0.0  # of a CPU: those of `planner.measure.pace` that rows are scaled to; 0: to none

    def differences(self, other: "Machine") -> list[str]:
        """What sets this machine apart from `other`, in words; the date, the driver and Python do not count."""
        told = {"device": "device", "torch": "torch", "host": "machine", "processes": "number of processes"}
        return [
            f"another {words} ({getattr(self, name)}, not {getattr(other, name)})"
            for name, words in told.items()
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One kernel. `operands` are as `graph.Operand.text`, `flop` tells apart what shapes do not (a stride, a mask)."""

    op: str
    phase: str
    operands: tuple[str, ...]
    flop: float
    seconds: float  # on the device; on a CPU without the call
    spread: float
    repeats: int
    made_bytes: float  # that it returns in memory of its own
    saved_bytes: float  # of those, what autograd keeps
    peak_bytes: float  # most held beyond what was there before

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return _operator_key(self.op, self.phase, self.operands, self.flop)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """A forward and a backward pass of a block; `key` is `block_key`, `name` is for people."""

    key: str
    name: str
    micro_batch: int
    forward_seconds: float  # kernels alone
    backward_seconds: float
    forward_host_seconds: float  # of the processor; where it computes itself, the rest of the pass
    backward_host_seconds: float
    spread: float
    repeats: int
    saved_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """A collective of `ranks` ranks on `nodes` nodes while `groups` groups like it run at once.

    Bytes are counted as `planner.collectives` counts them. `stride` is the distance of neighbours of a group.
    """

    collective: str
    ranks: int
    nodes: int
    groups: int
    stride: int
    num_bytes: float
    seconds: float
    spread: float
    repeats: int

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return f"{self.collective} {self.ranks} {self.nodes} {self.groups} {self.stride} {self.num_bytes:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """Computing (a matmul) and a collective, each alone and both at once."""

    collective: str
    ranks: int
    compute_seconds: float
    link_seconds: float
    both_seconds: float
    repeats: int

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return f"{self.collective} {self.ranks}"

    @property
    def slowdown(self) -> float:
        """What each of the two is slowed down by while both run, taken to be the same; from 1 to 2.

        By hand: 1 s and 0.5 s alone take 1.2 s together; the shorter one takes 0.5 s times 1.4, in which the longer one
        gets 0.5 s done, and 0.5 s are left.
        """
        longer = max(self.compute_seconds, self.link_seconds)
        shorter = min(self.compute_seconds, self.link_seconds)
        return min(2.0, max(1.0, 1 + (self.both_seconds - longer) / shorter)) if shorter > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One step of torch.optim's own form on `tensors` tensors of `elements` elements together."""

    optimizer: str
    dtype: str
    elements: int
    tensors: int
    seconds: float
    spread: float
    repeats: int

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return f"{self.optimizer} {self.dtype} {self.elements} {self.tensors}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow:
    """A copy between pinned host memory and a device (`h2d`, `d2h`) while `devices` devices copy."""

    direction: str
    devices: int
    num_bytes: float
    seconds: float
    spread: float
    repeats: int

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return f"{self.direction} {self.devices} {self.num_bytes:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRow:
    """How two devices of a node are connected, in the words of `nvidia-smi topo -m` (NV12, PIX, SYS, ...)."""

    first: int
    second: int
    connection: str

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return f"{self.first} {self.second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """What training by a plan took, term by term, and what the terms are priced at without any such row.

    `graph` is the model's fingerprint, `way` a digest of the plan's choices; `mesh` is as `str(Mesh)`.
    """

    graph: str
    way: str
    name: str  # of the model, for people
    mesh: str
    micro_batch: int
    num_microbatches: int
    forward_seconds: float
    backward_seconds: float
    collectives_seconds: float
    optimizer_seconds: float
    forward_priced_seconds: float
    backward_priced_seconds: float
    collectives_priced_seconds: float
    optimizer_priced_seconds: float
    step_seconds: float
    spread: float
    repeats: int

    @property
    def key(self) -> str:
        """What it is looked up by."""
        return f"{self.graph[:16]} {self.way}"


Row = OperatorRow | BlockRow | CollectiveRow | OverlapRow | OptimizerRow | CopyRow | TopologyRow | RunRow
_TABLES: Mapping[str, type[Any]] = {
    "operators": OperatorRow,
    "blocks": BlockRow,
    "collectives": CollectiveRow,
    "overlaps": OverlapRow,
    "optimizers": OptimizerRow,
    "copies": CopyRow,
    "topology": TopologyRow,
    "runs": RunRow,
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured on one machine; every table has one row for a key, in the order of keys."""

    machine: Machine
    operators: tuple[OperatorRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    overlaps: tuple[OverlapRow, ...] = ()
    optimizers: tuple[OptimizerRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    topology: tuple[TopologyRow, ...] = ()
    runs: tuple[RunRow, ...] = ()

    @cached_property
    def operator_seconds(self) -> Mapping[str, float]:
        """Seconds by key."""
        return {row.key: row.seconds for row in self.operators}

    @cached_property
    def block_rows(self) -> Mapping[str, BlockRow]:
        """Passes by key."""
        return {row.key: row for row in self.blocks}

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """Those at which blocks were measured."""
        return tuple(sorted({row.micro_batch for row in self.blocks}))

    def row_keys(self) -> set[tuple[str, str]]:
        """(table, key) of every row."""
        return {(name, row.key) for name in _TABLES for row in getattr(self, name)}

    def with_rows(self, rows: Iterable[Row]) -> Self:
        """With these rows too; one of a key that is there already takes its place."""
        tables: dict[str, dict[str, Row]] = {name: {r.key: r for r in getattr(self, name)} for name in _TABLES}
        names = {kind: name for name, kind in _TABLES.items()}
        for row in rows:
            tables[names[type(row)]][row.key] = row
        sorted_tables: dict[str, Any] = {n: tuple(of[key] for key in sorted(of)) for n, of in tables.items()}
        return replace(self, **sorted_tables)

    def merged(self, other: "Profile", *, any_machine: bool = False) -> Self:
        """With the rows of another profile of the same machine, which take precedence.

        Raises:
            ProfileError: it was measured on another machine or with another torch.
        """
        if not any_machine and (differences := other.machine.differences(self.machine)):
            raise ProfileError(
                f"the profiles cannot be merged, one is of {' and '.join(differences)}; measure into a new file"
            )
        return self.with_rows(row for name in _TABLES for row in getattr(other, name))

    def dumps(self) -> str:
        """As JSON, one row a line; the same profile gives the same bytes."""
        head = {"schema_version": PROFILE_VERSION, "units": UNITS, "machine": dataclasses.asdict(self.machine)}
        parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
        for name in _TABLES:
            rows = [json.dumps(dataclasses.asdict(row)) for row in getattr(self, name)]
            parts.append(f'"{name}": [' + ",".join(f"\n  {row}" for row in rows) + ("\n ]" if rows else "]"))
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Write atomically: the file is whole or not there.

        Raises:
            ProfileError: the folder does not exist or cannot be written.
        """
        try:
            write_atomically(Path(path), self.dumps())
        except PlanError as error:
            raise ProfileError(str(error)) from None

    @classmethod
    def loads(cls, text: str, *, origin: str = "the profile") -> "Profile":
        """Read JSON back.

        Raises:
            ProfileError: it is no profile of this version; the first faults are named with their path.
        """
        again = "make it again with autoplan measure --out"
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"{origin} is no JSON ({error}); {again}") from None
        if not isinstance(data, dict):
            raise ProfileError(f"{origin} holds no profile: it must be a JSON object; {again}")
        version = data.get("schema_version")
        if version != PROFILE_VERSION or isinstance(version, bool):
            raise ProfileError(
                f"{origin} has the schema_version {json.dumps(version)[:40]}, this release reads {PROFILE_VERSION}; "
                f"{again}"
            )
        faults: list[str] = []
        known = {"schema_version", "units", "machine", *_TABLES}
        faults += [f"{key[:40]!r} is no key of a profile" for key in data if key not in known]
        machine = read_row(Machine, data.get("machine"), "machine", faults)
        tables: dict[str, Any] = {}
        for name, kind in _TABLES.items():
            rows = data.get(name, [])
            if not isinstance(rows, list):
                faults.append(f"{name} must be a list")
                continue
            tables[name] = tuple(read_row(kind, row, f"{name}[{i}]", faults) for i, row in enumerate(rows))
        if faults:
            more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise ProfileError(f"{origin} is no profile: {'; '.join(faults[:5])}{more}")
        rows = (row for table in tables.values() for row in table)
        return Profile(machine=machine).with_rows(rows)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile's file.

        Raises:
            ProfileError: the file is missing, corrupt or of another version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: no UTF-8, or a null byte in the path
            reason = getattr(error, "strerror", None) or "not a text file"
            raise ProfileError(f"cannot read the profile {path}: {reason}") from None
        return cls.loads(text, origin=str(path))


def unlike(profile: Profile, cluster: Cluster, here: Machine | None) -> list[str]:
    """Why a profile's numbers are not those of a cluster's devices, in words; empty where they are.

    `here` is this machine, if the cluster is it; else only the device and torch's release count, given by `here` too
    where they are known.
    """
    machine = profile.machine
    if here is not None:
        return machine.differences(here)
    device = cluster.device
    if machine.kind != device.kind:
        return [f"a {machine.kind} device ({machine.device}), not of {device.name}"]
    if device.kind == "cuda":
        try:
            found = device_named(machine.device).name
        except ClusterError:
            found = machine.device
        if found != device.name:
            return [f"another device ({machine.device}, not {device.name})"]
    return []


def operator_key(kernel: Kernel, micro_batch: int) -> str:
    """What a kernel's row is looked up by, for `micro_batch` samples."""
    operands = tuple(operand.text(micro_batch) for operand in kernel.operands)
    return _operator_key(operator_name(kernel), kernel.phase, operands, kernel.flop.at(micro_batch))


def operator_name(kernel: Kernel) -> str:
    """The operator's name; attention is one operator, whichever kernel a device or a release of torch picks for it."""
    return "attention" if kernel.kind == "attention" else kernel.op


def block_key(kind: BlockClass, micro_batch: int) -> str:
    """What a block's row is looked up by: a digest of all that it launches for `micro_batch` samples."""
    parts = [f"{operator_key(k, micro_batch)} {k.num_bytes.at(micro_batch):.0f}" for k in kind.kernels]
    parts += [f"{c.collective} {c.axis} {c.phase} {c.num_bytes.at(micro_batch):.0f}" for c in kind.collectives]
    return hashlib.sha256("\n".join([str(micro_batch), *parts]).encode()).hexdigest()[:24]


def measured_graph(graph: Graph, profile: Profile) -> Graph:
    """The graph with the profile's seconds in its kernels and block classes; what is executed is the same."""
    sizes = profile.micro_batches
    seconds = profile.operator_seconds

    def with_seconds(kernel: Kernel) -> Kernel:
        found = ((size, seconds.get(operator_key(kernel, size))) for size in sizes) if kernel.operands else ()
        return replace(kernel, measured=tuple((size, value) for size, value in found if value is not None))

    def with_passes(kind: BlockClass) -> BlockClass:
        rows = [profile.block_rows.get(block_key(kind, size)) for size in sizes]
        return replace(
            kind,
            kernels=tuple(with_seconds(kernel) for kernel in kind.kernels),
            measured=tuple(
                MeasuredPasses(
                    micro_batch=row.micro_batch,
                    forward_seconds=row.forward_seconds,
                    backward_seconds=row.backward_seconds,
                    forward_host_seconds=row.forward_host_seconds,
                    backward_host_seconds=row.backward_host_seconds,
                )
                for row in rows
                if row is not None
            ),
        )

    return replace(graph, classes=tuple(with_passes(kind) for kind in graph.classes))


def measured_part(part: Graph, whole: Graph, profile: Profile) -> Graph:
    """A graph of one rank of several that run `whole` (measured already) together, with the profile's seconds.

    Where a block of the rank was not measured, it is as far from the roofline as that of the whole model: else ways to
    train that nobody measured would look better, or worse, for that alone.
    """
    measured = measured_graph(part, profile)
    whole_of = {
        mine.class_index: whole.classes[block.class_index]
        for mine, block in zip(part.blocks, whole.blocks, strict=True)
    }
    return replace(
        measured,
        classes=tuple(
            replace(kind, part_of=whole_of[index])
            if not kind.measured and index in whole_of and whole_of[index].measured
            else kind
            for index, kind in enumerate(measured.classes)
        ),
    )


def measured_cluster(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with links and rates from the profile's rows, where it has them."""
    device, intra, inter = cluster.device, cluster.intra_node_link, cluster.inter_node_link
    intra = _connected(intra, profile.topology, device.compute_capability)
    local = _widest(row for row in profile.collectives if row.nodes == 1)
    if local:
        intra = measured_link(intra, local)
    far = _widest(row for row in profile.collectives if row.nodes > 1)
    if far:
        inter = measured_link(inter, far)
    if profile.overlaps:
        worst = round(max(row.slowdown for row in profile.overlaps), 4)
        device = replace(
            device,
            overlap_slowdown={**device.overlap_slowdown, intra.kind: Slowdown(worst, worst)},
            source={**device.source, "overlap_slowdown": SOURCE},
        )
    copies = [row for row in profile.copies if row.direction in ("h2d", "d2h")]
    if copies:
        most = max(row.devices for row in copies)
        largest = max(row.num_bytes for row in copies if row.devices == most)
        slowest = max(r.seconds for r in copies if r.devices == most and r.num_bytes == largest)
        device = replace(
            device,
            host_bytes_per_second=float(f"{largest / slowest:.4g}"),
            source={**device.source, "host_bytes_per_second": SOURCE},
        )
    known = device.optimizer_seconds or {}
    optimizers = {
        name: _still_sharded(found, known.get(name)) for name, found in _optimizer_seconds(profile.optimizers).items()
    }
    if optimizers:
        device = replace(
            device,
            optimizer_seconds={**known, **optimizers},
            source={**device.source, "optimizer_seconds": SOURCE},
        )
    return replace(cluster, device=device, intra_node_link=intra, inter_node_link=inter)


def _optimizer_seconds(rows: Sequence[OptimizerRow]) -> dict[str, OptimizerSeconds]:
    """The line through the least and the most elements of each optimizer, of the same number of tensors."""
    found = {}
    for name in sorted({row.optimizer for row in rows}):
        mine = sorted((row for row in rows if row.optimizer == name), key=lambda row: row.elements)
        few, many = mine[0], mine[-1]
        if few.tensors != many.tensors or few.dtype != many.dtype or few.elements == many.elements:
            continue
        width = DTYPE_BYTES[many.dtype]
        per_byte = max(0.0, many.seconds - few.seconds) / (width * (many.elements - few.elements))
        rest = max(0.0, few.seconds - per_byte * width * few.elements)
        found[name] = OptimizerSeconds(float(f"{per_byte:.4g}"), float(f"{rest / few.tensors:.4g}"))
    return found


def _still_sharded(found: OptimizerSeconds, known: OptimizerSeconds | None) -> OptimizerSeconds:
    """With what a sharded tensor takes more than a plain one: the rows are of plain tensors."""
    if known is None or known.per_sharded_tensor is None:
        return found
    more = max(0.0, known.per_sharded_tensor - known.per_tensor)
    return found._replace(per_sharded_tensor=float(f"{found.per_tensor + more:.4g}"))


_PCIE_OF_CAPABILITY = {"7": "pcie3", "8": "pcie4", "9": "pcie5", "10": "pcie5", "12": "pcie5"}
_STAGED = ("NODE", "SYS")  # through the processor's own links: no peer access, bytes stop in host memory


def _connected(link: Link, topology: Sequence[TopologyRow], capability: str) -> Link:
    """The link that the worst pair of devices has: the cluster's own where all have NVLink, else PCIe of their age."""
    words = {row.connection for row in topology}
    if not words or all(word.startswith("NV") for word in words):
        return link
    name = _PCIE_OF_CAPABILITY.get(capability.partition(".")[0])
    if link.kind != "nvlink" or name is None:
        return link
    staged = f"{name}-staged"
    known = {known.name for known in all_links()}
    return link_named(staged if words & set(_STAGED) and staged in known else name)


def _widest(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """Rows of the largest group alone, in which most links take part."""
    found = [row for row in rows if row.groups == 1]
    most = max((row.ranks for row in found), default=0)
    return [row for row in found if row.ranks == most]


def _ring(collective: str, ranks: int) -> tuple[int, float]:
    """Steps of a collective in one node, and the share of its bytes that each rank sends, as `planner.collectives`."""
    share = (ranks - 1) / ranks
    if collective == "all_reduce":
        return 2 * (ranks - 1), 2 * share
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return ranks - 1, share
    if collective == "broadcast":
        return ranks - 1, 1.0
    return 1, 1.0


_ON_A_LINK = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")


def measured_link(link: Link, rows: Sequence[CollectiveRow]) -> Link:
    """A link that gives the seconds of `rows` back by the formulas of `planner.collectives`; all of one group.

    Of the least time the call and its steps get 45 % each, the bytes the rest: one group size cannot tell them apart.
    """
    rows = [row for row in rows if row.collective in _ON_A_LINK and row.num_bytes > 0]
    if not rows:
        return link
    ranks = rows[0].ranks
    least = min(row.seconds for row in rows)
    steps = max(_ring(row.collective, ranks)[0] for row in rows)
    launch, latency = 0.45 * least, 0.45 * least / steps
    rates: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.num_bytes):
        hops, share = _ring(row.collective, ranks)
        moving = row.seconds - launch - hops * latency
        rates.setdefault(row.collective, []).append((row.num_bytes * share, row.num_bytes * share / moving))
    peak = max(rate for points in rates.values() for _, rate in points)
    curves = {name: _curve(points, peak) for name, points in rates.items()}
    general = next(curves[name] for name in ("all_gather", *curves) if name in curves)
    return replace(
        link,
        name=f"{link.name.removesuffix('-measured')}-measured",
        bytes_per_second=float(f"{peak:.4g}"),
        latency_seconds=float(f"{latency:.4g}"),
        launch_seconds=float(f"{launch:.4g}"),
        node_bytes_per_second=None,
        in_switch_all_reduce_bytes_per_second=None,
        in_switch_min_ranks=None,
        group_efficiency=None,
        spread=None,
        efficiency={"any": general, **curves},
        source={"*": SOURCE},
    )


def _curve(points: Sequence[tuple[float, float]], peak: float) -> Curve:
    """Shares of the peak; noise that would make more work faster is cut off."""
    result: list[tuple[float, float]] = []
    for size, rate in points:
        fraction = float(f"{max(1e-9, min(1.0, rate / peak)):.4g}")
        if result:
            fraction = min(fraction, result[-1][1] * size / result[-1][0])
        result.append((size, fraction))
    return Curve(points=tuple(result))


def _operator_key(op: str, phase: str, operands: Sequence[str], flop: float) -> str:
    return f"{phase} {op} {' '.join(operands)} {flop:.6g}"


def read_row(kind: type[Any], value: object, path: str, faults: list[str]) -> Any:
    """One row by the types of its fields; None, and the faults, where it is none."""
    if not isinstance(value, Mapping):
        faults.append(f"{path} is missing" if value is None else f"{path} must be an object")
        return None
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    found: dict[str, Any] = {}
    for name, wanted in hints.items():
        item = value.get(name, defaults.get(name))
        if wanted is float and isinstance(item, int) and not isinstance(item, bool):
            item = float(item)
        if wanted == tuple[str, ...] and isinstance(item, list) and all(isinstance(text, str) for text in item):
            found[name] = tuple(item)
        elif (
            wanted in (str, int, float)
            and type(item) is wanted
            and (isinstance(item, str) or (isinstance(item, int | float) and math.isfinite(item) and item >= 0))
        ):
            found[name] = item
        else:
            words = {str: "text", int: "a whole number, at least 0", float: "a number, at least 0"}
            faults.append(f"{path}.{name} must be {words.get(wanted, 'a list of texts')}")
    faults += [f"{path}.{str(key)[:40]} is no key of it" for key in value if key not in hints]
    return kind(**found) if len(found) == len(hints) else None
