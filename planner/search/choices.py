"""The outer choices: what a user may fix, and every configuration that the arithmetic allows."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from planner.errors import PlanError
from planner.plan import Mesh, Recompute, ScheduleName
from planner.search.ring import WHY_NOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Choices that are made already; None leaves one to the search.

    `dp` are all ranks with samples of their own, `dp_shard` of them those that ZeRO-1 to 3 shard over (1: ZeRO-0),
    beside those of `cp`, which always do; `ep` of these share out the experts.
    """

    pp: int | None = None
    dp: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    micro_batch: int | None = None
    num_microbatches: int | None = None
    schedule: ScheduleName | None = None
    devices: int | None = None

    @classmethod
    def of(cls, pins: "Pins | Mapping[str, Any] | str | None") -> "Pins":
        """Pins from a mapping or from text such as `pp=4,zero=1,recompute=full`.

        Raises:
            PlanError: an unknown choice or value; all faults at once.
        """
        if pins is None or isinstance(pins, Pins):
            return pins or cls()
        faults = []
        if isinstance(pins, str):
            items = [item.partition("=") for item in pins.split(",") if item.strip()]
            faults += [f"{key.strip()!r} has no value" for key, equals, _ in items if not equals]
            named = [key.strip() for key, _, _ in items]
            faults += [f"{key} is fixed twice" for key in dict.fromkeys(named) if named.count(key) > 1]
            pins = {key.strip(): value.strip() for key, _, value in items}
        known = [f.name for f in fields(cls)]
        words = {"recompute": get_args(Recompute), "schedule": get_args(ScheduleName)}
        least = {name: 0 if name == "zero" else 1 for name in known}
        values: dict[str, Any] = {}
        for key, value in pins.items():
            if key == "attention":
                why = f"it is priced and not executed: {WHY_NOT}" if value == "ring" else "its form is chosen by price"
                faults.append(f"attention={value} cannot be fixed, {why}; leave it out")
            elif key not in known:
                faults.append(f"{key!r} is none of {', '.join(known)}")
            elif key in words:
                if value not in words[key]:
                    faults.append(f"{key} must be one of {', '.join(words[key])}, is {value!r}")
                values[key] = value
            elif isinstance(value, bool) or not re.fullmatch("[0-9]{1,9}", str(value)) or int(value) < least[key]:
                faults.append(f"{key} must be a whole number, at least {least[key]}, is {value!r}")
            else:
                values[key] = int(value)
        if values.get("zero", 0) > 3:
            faults.append(f"zero must be 0, 1, 2 or 3, is {values['zero']}")
        if faults:
            raise PlanError(f"cannot fix these choices: {'; '.join(faults)}")
        return cls(**values)

    @property
    def settle_all(self) -> bool:
        """Whether nothing that decides about memory is left to the search, stage cuts apart."""
        mesh = self.pp is not None and (self.dp is not None or self.devices is not None)
        batch = self.micro_batch is not None or self.num_microbatches is not None
        return mesh and batch and self.zero is not None and self.recompute is not None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Configuration:
    """One outer choice. Ordered: fewer stages first, then fewer devices, larger micro-batches.

    `variant` is the index of one of several ways to split the model over the ranks of `cp`, `ep` and `tp`.
    """

    pp: int
    dp: int
    dp_shard: int  # of dp; 1: whole copies everywhere
    micro_batch: int
    num_microbatches: int
    schedule: str
    tp: int = 1
    cp: int = 1
    ep: int = 1  # of dp_shard
    variant: int = 0

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def way(self) -> tuple[object, ...]:
        """What ranked plans differ in.

        Of hybrid sharding with different degrees, and of the variants of a degree of tensor or context parallelism,
        only the best is ranked.
        """
        mesh = self.pp, self.dp, self.tp, self.cp, self.ep, self.dp_shard * self.cp > 1
        return *mesh, self.micro_batch, self.num_microbatches, self.schedule

    @property
    def program(self) -> tuple[object, ...]:
        """What configurations of another schedule share."""
        return self.pp, self.dp, self.tp, self.cp, self.ep, self.variant, self.dp_shard, self.micro_batch

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        replicas = self.dp // self.dp_shard
        return Mesh(
            pp=self.pp, dp_replicate=replicas, dp_shard=self.dp_shard // self.ep, cp=self.cp, ep=self.ep, tp=self.tp
        )  # fmt: skip

    def __str__(self) -> str:
        kind = {1: "replicated", self.dp: "sharded"}.get(self.dp_shard, f"sharded over {self.dp_shard}")
        data = f"dp {self.dp} ({kind})" if self.dp > 1 else "dp 1"
        splits = "".join(f"{axis} {degree}, " for axis, degree in self.mesh.splits)
        return (
            f"pp {self.pp}, {data}, {splits}micro-batch {self.micro_batch} x {self.num_microbatches}, {self.schedule}"
        )


def configurations(
    num_blocks: int,
    num_devices: int,
    devices_per_node: int,
    global_batch: int,
    pins: Pins,
    *,
    may_pipeline: bool = True,
    may_split: bool = False,
    may_split_samples: bool = False,
) -> list[Configuration]:
    """Every configuration that the arithmetic allows, in a fixed order.

    Device counts are divisors of a node, such times as many ranks as share out the batch evenly, and whole nodes:
    divisors of their number, powers of two, and the most whose devices share out the batch evenly. Tensor-parallel
    ranks (if `may_split`) lie in one node, and so do context-parallel ones (if `may_split_samples`); a fixed `tp` or
    `cp` may be any that divides. Only the first variant is made.
    """
    result = []
    most = min(devices_per_node, num_devices)
    tensor_degrees = _split_degrees(most, pins.tp, may_split=may_split)
    context_degrees = _split_degrees(most, pins.cp, may_split=may_split_samples)
    degrees = [(tp, cp) for tp in tensor_degrees for cp in context_degrees if tp * cp <= num_devices]
    for devices in _device_counts(num_devices, devices_per_node, global_batch, [tp * cp for tp, cp in degrees], pins):
        meshes = [(pp, tp, cp) for pp in _divisors(devices) for tp, cp in degrees if devices // pp % (tp * cp) == 0]
        for pp, tp, cp in meshes:
            dp = devices // pp // tp // cp
            if pp > num_blocks or (pp > 1 and not may_pipeline) or global_batch % dp:
                continue
            if (pins.pp or pp) != pp or (pins.dp or dp) != dp or (pins.zero == 0 and cp > 1):
                continue
            for micro_batch in _divisors(global_batch // dp):
                count = global_batch // dp // micro_batch
                if (pins.micro_batch or micro_batch) != micro_batch or (pins.num_microbatches or count) != count:
                    continue
                schedules = ["1f1b", "gpipe"] if pp > 1 else [pins.schedule or "1f1b"]
                for schedule in schedules:
                    if (pins.schedule or schedule) != schedule or (schedule == "1f1b" and pp > 1 and count < pp):
                        continue
                    for dp_shard in _shard_degrees(dp, max(1, devices_per_node // (tp * cp)), pins, cp=cp):
                        result.append(
                            Configuration(
                                pp=pp, dp=dp, dp_shard=dp_shard, tp=tp, cp=cp, micro_batch=micro_batch,
                                num_microbatches=count, schedule=schedule,
                            )
                        )  # fmt: skip
    return sorted(result)


def _split_degrees(devices_per_node: int, pinned: int | None, *, may_split: bool) -> list[int]:
    """Over how many ranks tensors may be split: divisors of a node, whose ranks the fast link joins.

    >>> _split_degrees(8, None, may_split=True), _split_degrees(8, 3, may_split=True)
    ([1, 2, 4, 8], [3])
    """
    if pinned is not None:
        return [pinned]
    return _divisors(devices_per_node) if may_split else [1]


def _shard_degrees(dp: int, ranks_per_node: int, pins: Pins, *, cp: int = 1) -> list[int]:
    """Over how many of `dp` ranks parameters may be sharded: none, all, those of 1, 4, 16, ... nodes.

    A node's ranks are joined by its fast link; fewer of them hold more and send no less. Steps of 4: between two
    neighbours of a finer ladder the best plans of GPT-3 on 1,024 devices differ by 0.2 %. With `cp` ranks, which shard
    as well, none means these alone.

    >>> _shard_degrees(64, 8, Pins()), _shard_degrees(8, 8, Pins()), _shard_degrees(64, 8, Pins(zero=0))
    ([1, 8, 32, 64], [1, 8], [1])
    """
    degrees = {1, dp}
    degree = math.gcd(dp, ranks_per_node)
    while 1 < degree < dp and dp > ranks_per_node and dp % degree == 0:
        degrees.add(degree)
        degree *= 4
    if pins.dp_shard is not None:
        degrees = {pins.dp_shard} if dp % pins.dp_shard == 0 else set()
    if pins.zero is not None and dp > 1 and cp == 1:
        degrees = {degree for degree in degrees if (degree > 1) == (pins.zero > 0)}
    return sorted(degrees)


def _device_counts(
    num_devices: int, devices_per_node: int, global_batch: int, degrees: list[int], pins: Pins
) -> list[int]:
    if pins.devices is not None or (pins.pp is not None and pins.dp is not None):
        wanted = [pins.devices or (pins.pp or 1) * (pins.dp or 1) * degree for degree in degrees]
        if min(wanted) > num_devices:
            raise PlanError(f"the fixed choices need {min(wanted)} devices, the cluster has {num_devices}")
        return sorted({count for count in wanted if count <= num_devices})
    nodes = num_devices // devices_per_node
    most = min(devices_per_node, num_devices)
    counts = {dp * rest for rest in _divisors(most) for dp in _divisors(global_batch) if dp * rest <= most}
    even = [n * devices_per_node for n in range(1, nodes + 1) if global_batch % (n * devices_per_node) == 0]
    counts |= {*even[-1:]}
    counts |= {n * devices_per_node for n in _divisors(nodes)}
    counts |= {devices_per_node * 2**k for k in range(nodes.bit_length()) if 2**k <= nodes}
    fixed = (pins.tp or 1) * (pins.cp or 1)  # one that is fixed need not divide a node
    counts |= {count // fixed * fixed for count in counts} - {0}
    return sorted(counts)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
