"""The hardware as data: devices, links and how many of each. No torch, and no number without its source.

Bundled descriptions are TOML files under `profiles/`. Keys carry their unit and equal the field
names here, so loading converts nothing; the `source` table says where each number comes from.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from planner.errors import ClusterError
from planner.resources import profiles_path

DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64")
COMPUTE_KINDS = ("matmul", "attention_forward", "attention_backward", "convolution")
EFFICIENCY_KINDS = (*COMPUTE_KINDS, "memory")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
DEVICE_KINDS = ("cuda", "cpu")
LINK_KINDS = ("nvlink", "pcie", "infiniband", "ethernet", "gloo")
# What computing runs beside. pcie_pair: groups of two devices of a node; host: copies to and from host memory.
TRANSFER_KINDS = (*LINK_KINDS, "pcie_pair", "host")

_Part = TypeVar("_Part", "Device", "Link")

# Text that does not change a plan, so it is left out of the fingerprint.
_WORDS = ("source", "aliases", "cuda_names")


class Slowdown(NamedTuple):
    """How many times as long each of two things takes while both run at once: computing, and moving bytes.

    1 is no slow-down; (2, 2) is one after the other.
    """

    compute: float
    link: float


class OptimizerSeconds(NamedTuple):
    """What a step of an optimizer takes for each byte of parameters, and besides for each of their tensors.

    A tensor that is sharded is a DTensor, each operator of which passes through Python; None: it takes no longer.
    """

    per_byte: float
    per_tensor: float
    per_sharded_tensor: float | None = None


class ShardingSeconds(NamedTuple):
    """CPU time of FSDP2's own code for a block that gathers its parameters, and for one that reduces its gradients.

    Each as such, and besides for each of the block's tensors.
    """

    gather: float
    gather_tensor: float
    reduce: float
    reduce_tensor: float


class CheckpointSeconds(NamedTuple):
    """CPU time of torch's checkpoint for a block that is recomputed, beyond its second forward pass.

    As such, and for each of its kernels, whose saved tensors pass through hooks.
    """

    block: float
    kernel: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A fraction of a peak rate as a function of size, given as (size, fraction) points.

    Between points the fraction follows a power law (a line on log-log paper), outside it is that
    of the nearest end. Between two points it never rises faster than the size, so that a larger
    piece of work never takes less time.

    >>> curve = Curve(points=((1e6, 0.1), (1e8, 0.4)))
    >>> curve.at(1e3), round(curve.at(1e7), 6), curve.at(1e12)
    (0.1, 0.2, 0.4)
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Reject curves on which a larger size could be faster."""
        if not self.points:
            raise ClusterError("a curve needs at least one [size, fraction] point")
        for size, fraction in self.points:
            if not (size > 0 and 0 < fraction <= 1 and math.isfinite(size)):
                raise ClusterError(f"a curve's point must be [size > 0, 0 < fraction <= 1], got {[size, fraction]}")
        for (size, fraction), (next_size, next_fraction) in zip(self.points, self.points[1:], strict=False):
            if next_size <= size:
                raise ClusterError(f"a curve's sizes must increase, got {size:g}, {next_size:g}")
            if next_fraction / fraction > next_size / size * (1 + 1e-9):
                raise ClusterError(
                    f"a curve's fraction may not rise faster than its size, which would make "
                    f"{next_size:g} faster than {size:g}"
                )

    def at(self, size: float) -> float:
        """The fraction of the peak that work of this size reaches."""
        index = bisect_right(self.points, size, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (low, start), (high, end) = self.points[index - 1], self.points[index]
        share = math.log(size / low) / math.log(high / low)
        return float(start ** (1 - share) * end**share)


def _wrong(what: str, value: object) -> ValueError:
    return ValueError(f"must be {what}, got {value!r}")


def _number(
    what: str, accept: Callable[[float], bool], convert: type[int] | type[float] = float
) -> Callable[[object], object]:
    """A checker of one number: returns it converted, or raises ValueError with `what`."""

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(what, value)
        if not math.isfinite(value) or not accept(value):
            raise _wrong(what, value)
        if convert is int and value != int(value):
            raise _wrong("a whole number", value)
        return convert(value)

    return check


def _optional(check: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else check(value)


def _text(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise _wrong("a text", value)
    return value


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def _texts(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _wrong("a list of texts", value)
    return tuple(value)


def _one_of(names: tuple[str, ...]) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value not in names:
            raise _wrong(f"one of {', '.join(names)}", value)
        return value

    return check


def _curve(value: object) -> object:
    if isinstance(value, Curve):
        return value
    if not isinstance(value, list | tuple):
        raise _wrong("a list of [size, fraction] points", value)
    points = []
    for point in value:
        is_pair = isinstance(point, list | tuple) and len(point) == 2
        if not is_pair or not all(type(number) in (int, float) for number in point):
            raise _wrong("a list of [size, fraction] points", value)
        points.append((float(point[0]), float(point[1])))
    try:
        return Curve(points=tuple(points))
    except ClusterError as error:
        raise ValueError(f"is no curve: {error}") from None


def _slowdown(value: object) -> object:
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or not all(type(n) in (int, float) and math.isfinite(n) and n >= 1 for n in numbers):
        raise _wrong("two numbers >= 1, how many times as long computing and the transfer take", value)
    return Slowdown(float(numbers[0]), float(numbers[1]))


def _optimizer(value: object) -> object:
    numbers = [n for n in value if n is not None] if isinstance(value, list | tuple) else []
    if len(numbers) not in (2, 3) or not all(type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in numbers):
        raise _wrong("two or three numbers >= 0, seconds for a byte of parameters, a tensor and a sharded one", value)
    return OptimizerSeconds(*map(float, numbers))


def _sharding(value: object) -> object:
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 4 or not all(type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in numbers):
        raise _wrong("four numbers >= 0, seconds of a gather, of each tensor of it, and the same of a reduction", value)
    return ShardingSeconds(*map(float, numbers))


def _checkpoint(value: object) -> object:
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or not all(type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in numbers):
        raise _wrong("two numbers >= 0, seconds of a block and of each of its kernels", value)
    return CheckpointSeconds(*map(float, numbers))


def _table(
    names: tuple[str, ...] | None,
    check: Callable[[object], object],
    required: tuple[str, ...] = (),
) -> Callable[[object], object]:
    """A checker of a table with these keys (any, if None), each value by `check`."""

    def check_table(value: object) -> object:
        if not isinstance(value, Mapping):
            raise _wrong("a table", value)
        problems = [f"lacks {name}" for name in required if name not in value]
        result: dict[str, object] = {}
        for key in sorted(value):
            if names is not None and key not in names:
                problems.append(f"has the unknown key {key!r}{_nearest(key, names)}")
                continue
            try:
                result[key] = check(value[key])
            except ValueError as error:
                problems.append(f"key {key} {error}")
        if problems:
            raise ValueError(", ".join(problems))
        return result

    return check_table


def _sources(value: object) -> object:
    """Sources by key; one text for all is kept under '*'."""
    return _table(None, _text)({"*": value} if isinstance(value, str) else value)


_positive = _number("a number > 0", lambda value: value > 0)
_not_negative = _number("a number >= 0", lambda value: value >= 0)
_num_bytes = _number("a number of bytes >= 0", lambda value: value >= 0, int)
_count = _number("a whole number >= 1", lambda value: value >= 1, int)
_slack = _number("a number in [0, 1)", lambda value: 0 <= value < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one CPU process): its memory, its rates, and what they are worth.

    A kernel of `flop` and `num_bytes` takes `max(flop / (peak * efficiency), num_bytes /
    (bandwidth * efficiency), kernel_launch_seconds)`; the CPU needs `dispatch_seconds` to send it.
    With `synchronous_dispatch` (CPU) the two add up, else the slower of the two sums counts.
    """

    name: str
    kind: str  # one of DEVICE_KINDS
    compute_capability: str  # "8.0"; "none" on a CPU
    memory_bytes: int  # what torch reports as total memory
    context_bytes: int  # CUDA context, loaded kernels, library work space
    communicator_bytes: int  # buffers of NCCL's communicators, outside torch's allocator
    allocator_slack_fraction: float  # reserved by torch's allocator but lost to fragments
    memory_bytes_per_second: float
    host_bytes_per_second: float  # to or from host memory while all devices of a node copy
    peak_flop_per_second: Mapping[str, float] = field(hash=False)  # dense; absent = unsupported
    efficiency: Mapping[str, Curve] = field(hash=False)  # EFFICIENCY_KINDS; over FLOP, or bytes
    kernel_launch_seconds: float  # least time of a kernel on the device
    dispatch_seconds: float  # CPU time of one operation in eager mode with autograd
    wrapper_seconds: float  # CPU time of a fully_shard block's hooks, per block and pass
    block_seconds: float  # CPU time of calling a block as a module of its own, per block and pass
    pass_seconds: float  # CPU time of a pipeline schedule, per stage and pass of a micro-batch
    synchronous_dispatch: bool
    overlap_slowdown: Mapping[str, Slowdown] = field(hash=False)  # by TRANSFER_KINDS
    devices_per_node: int  # the usual machine around it: defaults of the shorthand 2x8xNAME
    nics_per_node: int
    intra_node_link: str
    inter_node_link: str
    aliases: tuple[str, ...] = ()
    cuda_names: tuple[str, ...] = ()  # as torch.cuda.get_device_name() says
    optimizer_seconds: Mapping[str, OptimizerSeconds] | None = field(default=None, hash=False)  # None: not measured
    sharding_seconds: ShardingSeconds | None = None  # None: in wrapper_seconds
    checkpoint_seconds: CheckpointSeconds | None = None  # None: not measured
    misaligned_matmul: float | None = None  # rate of 16-bit products of odd sizes (`planner.operators.ALIGNED`)
    pace_seconds: float | None = None  # of a CPU: those of `planner.measure.pace` when the rest was measured
    source: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Reject numbers that would make every cost meaningless."""
        _check(self, _DEVICE_KEYS, f"device {self.name!r}")
        if self.capacity_bytes <= 0:
            raise ClusterError(
                f"device {self.name!r}: memory_bytes {self.memory_bytes} is used up by context_bytes "
                f"{self.context_bytes} and communicator_bytes {self.communicator_bytes}"
            )

    @property
    def capacity_bytes(self) -> int:
        """Bytes of tensors that a rank may hold: memory less context, communicators and slack."""
        free = self.memory_bytes - self.context_bytes - self.communicator_bytes
        return int(free * (1 - self.allocator_slack_fraction))

    def supports(self, dtype: str) -> bool:
        """Whether the device computes in `dtype` (one of DTYPES) at a rate worth naming."""
        return dtype in self.peak_flop_per_second

    def flop_per_second(self, dtype: str, kind: str, flop: float) -> float:
        """The rate that a kernel of this kind (one of COMPUTE_KINDS) and size reaches."""
        return self.peak_flop_per_second[dtype] * self.efficiency[kind].at(flop)

    def copy_bytes_per_second(self, num_bytes: float) -> float:
        """The rate at which a kernel moves `num_bytes` in and out of the device's memory."""
        return self.memory_bytes_per_second * self.efficiency["memory"].at(num_bytes)

    def to_dict(self) -> dict[str, object]:
        """All fields as plain data, the form of a TOML or JSON file."""
        return _plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What carries bytes between two devices of a node, or one network card of a node.

    `bytes_per_second` is what can be had: per device and direction inside a node, per network card
    and direction between nodes. A link with `node_bytes_per_second` is shared: all devices of a
    node together get no more than that (a PCIe root, host memory).
    """

    name: str
    kind: str  # one of LINK_KINDS
    bytes_per_second: float
    latency_seconds: float  # of one step of a ring or tree
    launch_seconds: float  # of a collective as such: its kernel, its handshake
    node_bytes_per_second: float | None = None  # None: not shared
    in_switch_all_reduce_bytes_per_second: float | None = None  # of the tensor: algorithm bandwidth of nccl-tests
    in_switch_min_ranks: int | None = None  # fewer ranks use the ring
    efficiency: Mapping[str, Curve] = field(hash=False)  # by collective or "any"
    group_efficiency: Curve | None = None  # over ranks of the group in one node; None: all 1
    spread: float | None = None  # median |predicted / published - 1| by sources that had no part in it; None: not known
    source: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Reject numbers that would make every cost meaningless."""
        _check(self, _LINK_KEYS, f"link {self.name!r}")

    @property
    def shared(self) -> bool:
        """Whether the devices of a node compete for it."""
        return self.node_bytes_per_second is not None

    def fraction(self, collective: str, num_bytes: float) -> float:
        """Share of the bandwidth that a collective reaches with `num_bytes` sent.

        They are those of each rank inside a node, those of each network card between nodes. An all-to-all is many
        messages between two ranks if nobody has measured it.
        """
        if collective == "all_to_all" and collective not in self.efficiency:
            collective = "send_recv"
        curve = self.efficiency.get(collective) or self.efficiency["any"]
        return curve.at(num_bytes)

    def to_dict(self) -> dict[str, object]:
        """All fields as plain data, the form of a TOML or JSON file."""
        return _plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; ranks fill a node before the next one.

    >>> cluster = Cluster.load("2x8xA100-80GB")
    >>> cluster.num_devices, cluster.device.name, cluster.intra_node_link.name
    (16, 'A100-80GB', 'nvlink3')
    """

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    nics_per_node: int
    intra_node_link: Link
    inter_node_link: Link
    source: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Reject counts and combinations that mean nothing."""
        _check(self, _CLUSTER_KEYS, f"cluster {self.name!r}")
        for link in (self.intra_node_link, self.inter_node_link):
            if link.kind not in self.device.overlap_slowdown:
                raise ClusterError(
                    f"cluster {self.name!r}: device {self.device.name!r} has no overlap_slowdown "
                    f"for a link of kind {link.kind!r}; add it to the device"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.num_nodes * self.devices_per_node

    @property
    def capacity_bytes(self) -> int:
        """Bytes of tensors that a rank may hold."""
        return self.device.capacity_bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that can change a plan: every number, not the texts that explain them."""
        text = json.dumps(_without_words(self.to_dict()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def slowdown(self, link: Link) -> Slowdown:
        """What computing and communicating by this link do to one another while both run."""
        return self.device.overlap_slowdown[link.kind]

    def to_dict(self) -> dict[str, object]:
        """All of it as plain data, device and links in full; `from_dict` reads it back."""
        return {
            **_plain(self),
            "device": self.device.to_dict(),
            "intra_node_link": self.intra_node_link.to_dict(),
            "inter_node_link": self.inter_node_link.to_dict(),
        }

    def to_json(self) -> str:
        """The same as text, with a newline at its end; a file of it is loaded by `load`."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, table: Mapping[str, object], *, where: str = "cluster") -> "Cluster":
        """The cluster that a file describes; `where` begins every message.

        Raises:
            ClusterError: names every missing, unknown or wrong key at once.
        """
        return _read_cluster(table, where)

    @classmethod
    def load(cls, text: str) -> "Cluster":
        """A preset's name, a path (TOML or JSON), or `[NODESx][DEVICES PER NODEx]DEVICE`.

        Raises:
            ClusterError: nothing has this name (the nearest are named), or a file is wrong.
        """
        name = text.strip()
        key = _normal(name)
        if key in _presets():
            return _presets()[key]
        if name.endswith((".toml", ".json")) or "/" in name:
            path = Path(name)
            return _read_cluster(_read_file(path), str(path))
        if key == "local":
            raise ClusterError("'local' is measured: use planner.measure.local_cluster()")
        return _from_shorthand(name)


_DEVICE_KEYS: Mapping[str, Callable[[object], object]] = {
    "name": _text,
    "kind": _one_of(DEVICE_KINDS),
    "compute_capability": _text,
    "memory_bytes": _num_bytes,
    "context_bytes": _num_bytes,
    "communicator_bytes": _num_bytes,
    "allocator_slack_fraction": _slack,
    "memory_bytes_per_second": _positive,
    "host_bytes_per_second": _positive,
    "peak_flop_per_second": _table(DTYPES, _positive, ("float32",)),
    "efficiency": _table(EFFICIENCY_KINDS, _curve, EFFICIENCY_KINDS),
    "kernel_launch_seconds": _not_negative,
    "dispatch_seconds": _not_negative,
    "wrapper_seconds": _not_negative,
    "block_seconds": _not_negative,
    "pass_seconds": _not_negative,
    "synchronous_dispatch": _flag,
    "overlap_slowdown": _table(TRANSFER_KINDS, _slowdown),
    "devices_per_node": _count,
    "nics_per_node": _count,
    "intra_node_link": _text,
    "inter_node_link": _text,
    "aliases": _texts,
    "cuda_names": _texts,
    "optimizer_seconds": _optional(_table(None, _optimizer)),
    "sharding_seconds": _optional(_sharding),
    "checkpoint_seconds": _optional(_checkpoint),
    "misaligned_matmul": _optional(_positive),
    "pace_seconds": _optional(_not_negative),
    "source": _sources,
}
_LINK_KEYS: Mapping[str, Callable[[object], object]] = {
    "name": _text,
    "kind": _one_of(LINK_KINDS),
    "bytes_per_second": _positive,
    "latency_seconds": _not_negative,
    "launch_seconds": _not_negative,
    "node_bytes_per_second": _optional(_positive),
    "in_switch_all_reduce_bytes_per_second": _optional(_positive),
    "in_switch_min_ranks": _optional(_count),
    "efficiency": _table((*COLLECTIVES, "any"), _curve, ("any",)),
    "group_efficiency": _optional(_curve),
    "spread": _optional(_not_negative),
    "source": _sources,
}
_CLUSTER_KEYS: Mapping[str, Callable[[object], object]] = {
    "name": _text,
    "num_nodes": _count,
    "devices_per_node": _count,
    "nics_per_node": _count,
    "source": _sources,
}
_OPTIONAL_KEYS = {
    "aliases",
    "cuda_names",
    "node_bytes_per_second",
    "in_switch_all_reduce_bytes_per_second",
    "in_switch_min_ranks",
    "group_efficiency",
    "spread",
    "optimizer_seconds",
    "sharding_seconds",
    "checkpoint_seconds",
    "misaligned_matmul",
    "pace_seconds",
}
# Choices and names: they need no evidence.
_NO_SOURCE = {
    "name", "kind", "compute_capability", "synchronous_dispatch", "intra_node_link",
    "inter_node_link", "aliases", "cuda_names", "source", "num_nodes",
}  # fmt: skip


def all_devices() -> tuple[Device, ...]:
    """Every bundled device, by name."""
    return tuple(_devices()[key] for key in sorted(_devices()))


def all_links() -> tuple[Link, ...]:
    """Every bundled link, by name."""
    return tuple(_links()[key] for key in sorted(_links()))


def all_presets() -> tuple[Cluster, ...]:
    """Every bundled cluster, by name."""
    return tuple(_presets()[key] for key in sorted(_presets()))


def device_named(name: str) -> Device:
    """The bundled device of this name, alias or CUDA name; case and spaces do not matter.

    >>> device_named("h100").name, device_named("nvidia a100-sxm4-40gb").name
    ('H100-80GB', 'A100-40GB')

    Raises:
        ClusterError: no device has this name; the nearest names are in the message.
    """
    key = _normal(name)
    for device in all_devices():
        if key in map(_normal, (device.name, *device.aliases, *device.cuda_names)):
            return device
    names = [alias for device in all_devices() for alias in (device.name, *device.aliases)]
    known = ", ".join(device.name for device in all_devices())
    hint = _nearest(name, names) or f"; known are {known}"
    raise ClusterError(f"no device is named {name!r}{hint}")


def link_named(name: str) -> Link:
    """The bundled link of this name.

    Raises:
        ClusterError: no link has this name; the nearest names are in the message.
    """
    if _normal(name) not in _links():
        names = [link.name for link in all_links()]
        hint = _nearest(name, names) or f"; known are {', '.join(names)}"
        raise ClusterError(f"no link is named {name!r}{hint}")
    return _links()[_normal(name)]


def _normal(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _nearest(name: str, names: "list[str] | tuple[str, ...]") -> str:
    """The nearest names as the end of a sentence, or nothing."""
    by_normal = {_normal(known): known for known in names}
    near = difflib.get_close_matches(_normal(name), list(by_normal), n=3, cutoff=0.5)
    return f"; nearest are {', '.join(by_normal[key] for key in near)}" if near else ""


def _from_shorthand(text: str) -> Cluster:
    match = re.fullmatch(r"(?:(\d+)[x×](?=\d+[x×]))?(?:(\d+)[x×])?(.+)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ClusterError("the cluster's name is empty; write a preset, a file or 2x8xA100-80GB")
    num_nodes, devices_per_node = int(match[1] or 1), int(match[2] or 1)
    try:
        device = device_named(match[3])
    except ClusterError:
        for preset in all_presets() if match[2] else ():
            if _normal(match[3]) == _normal(preset.name):
                count = int(match[1] or 1) * int(match[2]) * preset.num_nodes
                raise ClusterError(
                    f"{preset.name} is a whole cluster; for {match[2]} of them write "
                    f"{count}x{preset.devices_per_node}x{preset.device.name}"
                ) from None
        names = [cluster.name for cluster in all_presets()]
        names += [alias for device in all_devices() for alias in (device.name, *device.aliases)]
        hint = _nearest(match[3] if match[2] else text, names)
        raise ClusterError(
            f"no cluster or device is named {match[3] if match[2] else text!r}{hint}; "
            "write a preset, a TOML file, or NODESxDEVICESxDEVICE such as 2x8xA100-80GB"
        ) from None
    if num_nodes < 1 or devices_per_node < 1:
        raise ClusterError(f"cluster {text!r} has no devices; both counts must be at least 1")
    return Cluster(
        name=f"{num_nodes}x{devices_per_node}x{device.name}",
        device=device,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        nics_per_node=max(1, device.nics_per_node * devices_per_node // device.devices_per_node),
        intra_node_link=link_named(device.intra_node_link),
        inter_node_link=link_named(device.inter_node_link),
        source={"*": f"links and network cards per device of the file of {device.name}"},
    )


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
        table: object = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ClusterError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: is no text in UTF-8") from None
    except ValueError as error:  # of tomllib and of json alike
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ClusterError(f"{path}: is no valid {kind}: {error}") from None
    if not isinstance(table, dict):
        raise ClusterError(f"{path}: must hold one table of keys, not {type(table).__name__}")
    return table


def _read_keys(
    table: Mapping[str, object],
    keys: Mapping[str, Callable[[object], object]],
    prefix: str,
    problems: list[str],
) -> dict[str, object]:
    """The checked values of a table; what is wrong with it is added to `problems`."""
    values: dict[str, object] = {}
    for key in sorted(set(table) - set(keys)):
        problems.append(f"{prefix}{key} is an unknown key{_nearest(key, tuple(keys))}")
    for key, check in keys.items():
        if key not in table:
            if key not in _OPTIONAL_KEYS:
                problems.append(f"{prefix}{key} is missing")
            continue
        try:
            values[key] = check(table[key])
        except ValueError as error:
            problems.append(f"{prefix}{key} {error}")
    source = values.get("source")
    if isinstance(source, Mapping) and "*" not in source:
        needed = [key for key in values if key not in _NO_SOURCE and values[key] is not None]
        problems += [f"{prefix}source.{key} is missing" for key in needed if key not in source]
    return values


def _with_base(value: object, named: Callable[[str], Device] | Callable[[str], Link]) -> object:
    """A table that says `base = NAME`, completed by the bundled description of that name."""
    if not isinstance(value, Mapping) or "base" not in value:
        return value
    own = {key: item for key, item in value.items() if key != "base"}
    base = named(str(value["base"])).to_dict()
    for key in ("aliases", "cuda_names"):  # those name the base, not what is made of it
        base.pop(key, None)
    sources = own.get("source", {})
    if isinstance(sources, str):
        # One text speaks for the numbers given here, the rest keep theirs.
        sources = {key: sources for key in own if key not in _NO_SOURCE}
    base_sources = base["source"]
    if isinstance(sources, Mapping) and isinstance(base_sources, Mapping):
        own["source"] = {**base_sources, **sources}
    return {**base, **own}


def _read_device(value: object, prefix: str, problems: list[str]) -> Device | None:
    try:
        if isinstance(value, str):
            return device_named(value)
        values = _read_part(_with_base(value, device_named), _DEVICE_KEYS, prefix, problems)
        return Device(**values) if values else None  # type: ignore[arg-type]
    except ClusterError as error:
        problems.append(f"{prefix}: {error}")
        return None


def _read_link(value: object, prefix: str, problems: list[str]) -> Link | None:
    try:
        if isinstance(value, str):
            return link_named(value)
        values = _read_part(_with_base(value, link_named), _LINK_KEYS, prefix, problems)
        return Link(**values) if values else None  # type: ignore[arg-type]
    except ClusterError as error:
        problems.append(f"{prefix}: {error}")
        return None


def _read_part(
    table: object, keys: Mapping[str, Callable[[object], object]], prefix: str, problems: list[str]
) -> dict[str, object]:
    """The checked values of a device or link; empty if `problems` has grown."""
    if not isinstance(table, Mapping):
        raise ClusterError("must be a name or a table")
    found = len(problems)
    values = _read_keys(table, keys, f"{prefix}.", problems)
    return values if len(problems) == found else {}


def _read_cluster(table: Mapping[str, object], where: str) -> Cluster:
    """A cluster from a file's table; what it does not say about links is the device's default."""
    problems: list[str] = []
    parts = ("device", "intra_node_link", "inter_node_link")
    device = None
    if "device" in table:
        device = _read_device(table["device"], "device", problems)
    else:
        problems.append("device is missing")
    own = {key: value for key, value in table.items() if key not in parts}
    if device is not None:
        own.setdefault("devices_per_node", device.devices_per_node)
        own.setdefault("nics_per_node", device.nics_per_node)
    values = _read_keys(own, _CLUSTER_KEYS, "", problems)
    links = {}
    for part in parts[1:]:
        if part in table:
            links[part] = _read_link(table[part], part, problems)
        elif device is not None:
            links[part] = _read_link(getattr(device, part), part, problems)
    if not problems and device is not None:
        try:
            return Cluster(device=device, **links, **values)  # type: ignore[arg-type]
        except ClusterError as error:
            problems.append(str(error))
    raise ClusterError(f"{where}: {'; '.join(problems)}")


def _check(value: Device | Link | Cluster, keys: Mapping[str, Callable[[object], object]], name: str) -> None:
    problems = []
    for key, check in keys.items():
        try:
            check(getattr(value, key))
        except ValueError as error:
            problems.append(f"{key} {error}")
    if problems:
        raise ClusterError(f"{name}: {'; '.join(problems)}")


def _plain(value: Device | Link | Cluster) -> dict[str, object]:
    """Fields as JSON can hold them; keys that are None are left out."""
    result: dict[str, object] = {}
    for item in dataclasses.fields(value):
        content = getattr(value, item.name)
        if isinstance(content, Device | Link):
            continue
        if content is not None:
            result[item.name] = _plain_value(content)
    return result


def _plain_value(value: object) -> object:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if isinstance(value, Mapping):
        return {key: _plain_value(value[key]) for key in sorted(value)}
    return list(value) if isinstance(value, tuple) else value


def _without_words(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_words(value[key]) for key in value if key not in _WORDS}
    return value


def _files(folder: str) -> list[Path]:
    return sorted((profiles_path() / folder).glob("*.toml"))


@cache
def _devices() -> Mapping[str, Device]:
    return _library("devices", _read_device)


@cache
def _links() -> Mapping[str, Link]:
    return _library("links", _read_link)


@cache
def _presets() -> Mapping[str, Cluster]:
    clusters = [_read_cluster(_read_file(path), path.name) for path in _files("clusters")]
    return {_normal(cluster.name): cluster for cluster in clusters}


def _library(folder: str, read: Callable[[object, str, list[str]], _Part | None]) -> dict[str, _Part]:
    problems: list[str] = []
    result = {}
    for path in _files(folder):
        value = read(_read_file(path), path.name, problems)
        if value is not None:
            result[_normal(value.name)] = value
    if problems:
        raise ClusterError("; ".join(problems))
    return result
