"""The seconds of blocks as a training system runs them: kernels of the traced graph under its constants.

An engine (`planner.engine`) moves other bytes in its elementwise chains, takes other times to send a kernel, and hides
other communication than plain PyTorch; the rest is `planner.costs`. The same code prices published rows
(`planner.validate`) and a user's plan for an engine (`engine_costs`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster, Device
from planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    axis_group,
    reduce_scatter_seconds,
    send_recv_seconds,
)
from planner.costs import Costs, inside_seconds, strategy_seconds
from planner.engine import Engine
from planner.graph import Affine, Graph, Kernel
from planner.inside import Same, inside, split_groups
from planner.memory import Precision, precision_named
from planner.operators import KernelTable, kernel_table, phase_seconds, table_seconds
from planner.plan import AXES, Mesh
from planner.shard.placement import R

Floats = NDArray[np.float64]

USUAL_DISPATCH_SECONDS = 8e-6  # PyTorch eager with autograd, 5 to 10 us (NVIDIA, Getting Started with CUDA Graphs)
ATTENTION_PASS = "attention."  # begins the names of kernels between the products of attention that is not fused
# SOFTMAX: between the products of attention that is not fused; HEAD: elementwise chains outside of layers.
GEMM, ATTENTION, MEMORY, SOFTMAX, FP8, HEAD = range(6)

# What vocab_parallel_cross_entropy (Megatron-LM core/tensor_parallel/cross_entropy.py) does to each logit in float32,
# in bytes: a copy of it, its maximum, less that, the exponential, their sum, divided by that; then times the gradient,
# and a copy of that.
_LOSS: Mapping[str, tuple[int, ...]] = {
    "aten._log_softmax.default": (6, 4, 8, 8, 4, 8),
    "aten.nll_loss_forward.default": (),
    "aten.nll_loss_backward.default": (),
    "aten._log_softmax_backward_data.default": (8, 6),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassWork:
    """The kernels of a block class at one micro-batch, as arrays [K]."""

    table: KernelTable
    kind: NDArray[np.int64]  # GEMM, ATTENTION, MEMORY, SOFTMAX, FP8 or HEAD
    phase: NDArray[np.int64]  # 0 forward, 1 backward


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The blocks of one rank and what they communicate; `kinds` are their classes."""

    classes: tuple[ClassWork, ...]
    kinds: NDArray[np.int64]  # [L]
    calls: Floats  # [L] of layers: what an engine's processor does for one as such
    prelude: ClassWork


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSeconds:
    """Arrays [L] of one strategy under an engine, one micro-batch; names as in `planner.costs.Costs`."""

    forward: Floats
    backward: Floats
    exposed: Floats
    exposed_forward: Floats
    gather: Floats
    reduce: Floats
    by_kind: Floats  # [3, L, 2] matrix products, attention, other kernels; forward and backward


def work_of(
    graph: Graph, micro_batch: int, *, fp8: bool = False, loss_in_parts: bool = False, calls: Floats | None = None
) -> Work:
    """The kernels of a graph's classes at a micro-batch; those of layers that are matrix products may be in FP8.

    `calls` [L] are the layers that a block is, less than 1 of a part of one; without it a block that repeats is one.
    """
    if calls is None:
        calls = np.array([block.kind == "block" for block in graph.blocks], float)
    kinds = np.array([block.class_index for block in graph.blocks], np.int64)
    layers = set(kinds[calls > 0].tolist())
    classes = [kind.kernels for kind in graph.classes]
    if loss_in_parts:
        classes = [tuple(part for kernel in each for part in _parts(kernel)) for each in classes]
    return Work(
        classes=tuple(
            _class_work(kernels, micro_batch, fp8=fp8 and index in layers, is_layer=index in layers)
            for index, kernels in enumerate(classes)
        ),
        kinds=kinds,
        calls=calls,
        prelude=_class_work(graph.prelude.kernels, micro_batch),
    )


def _parts(kernel: Kernel) -> Sequence[Kernel]:
    """The kernels of Megatron-LM's loss for one of PyTorch's."""
    if kernel.op not in _LOSS:
        return (kernel,)
    # The soft-max reads and writes a logit, its gradient reads two and writes one.
    width = 4 if kernel.dtype == "float32" else 2
    logits = width * (2 if kernel.phase == "forward" else 3)
    return [
        replace(
            kernel,
            num_bytes=Affine(kernel.num_bytes.fixed * each / logits, kernel.num_bytes.per_sample * each / logits),
        )
        for each in _LOSS[kernel.op]
    ]


def _class_work(kernels: Sequence[Kernel], micro_batch: int, *, fp8: bool = False, is_layer: bool = True) -> ClassWork:
    kinds = {
        "matmul": FP8 if fp8 else GEMM,
        "convolution": GEMM,
        "attention": ATTENTION,
        "memory": MEMORY if is_layer else HEAD,
    }
    return ClassWork(
        table=kernel_table(kernels, micro_batch),
        kind=np.array([SOFTMAX if k.op.startswith(ATTENTION_PASS) else kinds[k.kind] for k in kernels], np.int64),
        phase=np.array([int(k.phase == "backward") for k in kernels], np.int64),
    )


def block_seconds(
    work: Work, costs: Costs, device: Device, engine: Engine, column: int, *, compiled: bool = False
) -> BlockSeconds:
    """Seconds of all blocks if each takes the strategy of a column of `costs`."""
    each = [_class_seconds(kind, device, engine, compiled) for kind in work.classes]
    within = engine.collectives * inside_seconds(costs)
    sums = np.array([seconds for seconds, _ in each]).reshape(-1, 3, 2)[work.kinds]
    numbers = np.array([number for _, number in each], float).reshape(-1, 2)[work.kinds]
    found = strategy_seconds(
        engine_device(device, engine, costs.mesh.tp),
        costs,
        costs.strategies[column],
        sums.sum(axis=1),
        numbers,
        inside=within,
        overlap=engine.overlap,
        overlaps=engine.overlaps_gathers,
        apart=not engine.by_block,
        called=1.0 if engine.by_block else work.calls,
    )
    backward, exposed, in_forward = found.backward, found.exposed, found.exposed_forward
    strategy = costs.strategies[column]
    if not engine.by_block and strategy.zero < 2:  # no FSDP, none of its copies
        waiting = within @ np.array([1.0 + strategy.recompute, 1.0])
        backward, exposed, in_forward = backward - (exposed - waiting), waiting, within[:, 0]
    return BlockSeconds(
        forward=found.forward,
        backward=backward,
        exposed=exposed,
        exposed_forward=in_forward,
        gather=found.gather,
        reduce=found.reduce,
        by_kind=np.moveaxis(sums, 1, 0),
    )


def prelude_seconds(work: Work, device: Device, engine: Engine, *, compiled: bool = False) -> float:
    """Seconds of what every stage computes from the inputs."""
    seconds, number = _class_seconds(work.prelude, device, engine, compiled)
    return float(phase_seconds(engine_device(device, engine, 1), seconds.sum(), number.sum()))


def on_processor(device: Device, seconds: float) -> float:
    """Seconds of an engine on the processor beside a device: its constants are for one that sends a kernel in 8 us."""
    return seconds * device.dispatch_seconds / USUAL_DISPATCH_SECONDS


@lru_cache(maxsize=256)
def engine_device(device: Device, engine: Engine, tp: int) -> Device:
    """The device with the processor's time of an operation under an engine, of the slowest of `tp` ranks."""
    slowest = 1 + engine.straggling * math.log2(max(1, tp))
    return replace(
        device,
        dispatch_seconds=device.dispatch_seconds * engine.dispatch * slowest,
        block_seconds=device.dispatch_seconds * engine.block_dispatches * slowest,
        wrapper_seconds=device.wrapper_seconds if engine.by_block else 0.0,
    )


@lru_cache(maxsize=4096)
def _class_seconds(work: ClassWork, device: Device, engine: Engine, compiled: bool) -> tuple[Floats, Floats]:
    """[3, 2] seconds of matrix products, attention and others in forward and backward, and [2] number of kernels."""
    traffic = engine.compiled_memory_traffic if compiled else engine.memory_traffic
    outside = engine.compiled_memory_traffic if compiled else engine.head_traffic
    moved = np.array([1.0, 1.0, traffic, engine.attention_passes, 1.0, outside])[work.kind]
    faster = engine.matmul_speed, engine.attention_speed, 1.0, 1.0, engine.matmul_speed * engine.fp8_speed, 1.0
    done = 1 / np.array(faster)[work.kind]
    table = replace(work.table, num_bytes=work.table.num_bytes * moved)
    seconds = table_seconds(device, table) * done
    result = np.zeros((3, 2))
    np.add.at(result, (np.array([GEMM, ATTENTION, MEMORY, MEMORY, GEMM, MEMORY])[work.kind], work.phase), seconds)
    return result, np.bincount(work.phase, minlength=2) * np.array([1.0, engine.backward_dispatch])


def in_one_piece(
    elements: float,
    zero: int,
    engine: Engine,
    policy: Precision,
    groups: "DataGroups",
    *,
    forward_seconds: float,
    backward_seconds: float,
) -> tuple[float, float]:
    """Seconds before the first pass and after the last one of a stage that communicates its parameters all at once.

    Args:
        elements: Trainable parameters of a rank.
        zero: 0 or 1; what is sharded further is reduced block by block in every engine.
        engine: Whose widths and overlaps count.
        policy: Bytes of parameters, and of gradients where the engine does not say.
        groups: Who shares them.
        forward_seconds: Of one micro-batch, beside which parameters may be gathered.
        backward_seconds: Of one micro-batch, beside which gradients may be reduced.
    """
    width = engine.gradient_bytes or policy.compute_bytes
    if zero == 0:
        reduced = all_reduce_seconds(width * elements, groups.everyone)
        gathered = 0.0
    else:
        reduced = reduce_scatter_seconds(width * elements, groups.shards)
        reduced += all_reduce_seconds(width * elements / groups.shards.num_ranks, groups.replicas)
        gathered = all_gather_seconds(policy.compute_bytes * elements, groups.shards)
    if engine.overlaps_gradients:
        reduced = max(0.1 * reduced, reduced - engine.hidden * backward_seconds)
    if engine.overlaps_gathers:
        gathered = max(0.1 * gathered, gathered - engine.hidden * forward_seconds)
    return gathered, reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """Ranks that share parameters: over which states are sharded, over which they are whole, and both together."""

    shards: Group
    replicas: Group
    everyone: Group


def data_groups(cluster: Cluster, mesh: Mesh) -> DataGroups:
    """Those of a mesh. Ranks of `cp` and `ep` shard, too."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    sharding = ("dp_shard", "cp", "ep")
    return DataGroups(
        shards=axis_group(cluster, sizes, sharding),
        replicas=axis_group(cluster, sizes, "dp_replicate"),
        everyone=axis_group(cluster, sizes, ("dp_replicate", *sharding)),
    )


def scattered_seconds(costs: Costs, graph: Graph, cluster: Cluster) -> Floats:
    """[L - 1] one message over a cut, of which ranks of tp send in parts what all of them have; it is gathered behind.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
    """
    mesh, basis = costs.mesh, costs.basis
    if basis is None:
        raise ValueError("only costs that were priced can be priced for an engine")
    if mesh.tp == 1 or mesh.pp == 1:
        return costs.hop_seconds
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    pipe, tensor = axis_group(cluster, sizes, "pp"), axis_group(cluster, sizes, "tp")
    shardings = next(split.shardings for split in basis.splits if split.axis == "tp")
    is_whole = {
        value: placement == R
        for block, sharding in zip(graph.blocks, shardings, strict=True)
        for value, placement in zip(block.outputs, sharding.outputs, strict=True)
    }
    found: dict[tuple[float, float], float] = {}
    result = []
    for cut, every in zip(graph.carried, costs.hop_bytes.tolist(), strict=True):
        whole = sum(graph.tensors[value].num_bytes.at(costs.micro_batch) for value in cut if is_whole[value])
        if (every, whole) not in found:
            sent = every - whole * (1 - 1 / mesh.tp)
            found[every, whole] = send_recv_seconds(sent, pipe) + all_gather_seconds(whole, tensor)
        result.append(found[every, whole])
    return np.array(result, float)


def engine_costs(costs: Costs, graph: Graph, cluster: Cluster, engine: Engine) -> Costs:
    """Priced costs with the seconds of an engine; bytes stay those of stock PyTorch.

    Where an engine communicates all at once, a block has its share by parameters, as if its stage was one of equal
    ones and all of it took the same strategy.
    """
    if costs.basis is None:
        raise ValueError("only costs that were priced can be priced for an engine")
    work, device, mesh = _work(Same(graph), costs.micro_batch, engine.loss_in_parts), cluster.device, costs.mesh
    policy, groups = precision_named(costs.precision), data_groups(cluster, mesh)
    elements = costs.basis.count.trainable
    total = max(1.0, float(elements.sum()))
    columns = []
    for index, strategy in enumerate(costs.strategies):
        found = block_seconds(work, costs, device, engine, index)
        if not engine.by_block and strategy.zero < 2:
            stage = in_one_piece(
                total / mesh.pp, strategy.zero, engine, policy, groups,
                forward_seconds=float(found.forward.sum()) / mesh.pp,
                backward_seconds=float(found.backward.sum()) / mesh.pp,
            )  # fmt: skip
            gather, reduce = (seconds * elements / (total / mesh.pp) for seconds in stage)
            found = replace(found, gather=gather, reduce=reduce)
        columns.append(found)

    def stacked(name: str) -> Floats:
        return np.stack([getattr(found, name) for found in columns], axis=1)

    return replace(
        costs,
        forward_seconds=stacked("forward"),
        backward_seconds=stacked("backward"),
        exposed_seconds=stacked("exposed"),
        exposed_forward_seconds=stacked("exposed_forward"),
        gather_seconds=stacked("gather"),
        reduce_seconds=stacked("reduce") + costs.basis.partial[:, None],
        optimizer_seconds=engine.optimizer_traffic * costs.optimizer_seconds,
        hop_seconds=engine.hop_seconds
        + (scattered_seconds(costs, graph, cluster) if engine.scatters_messages else costs.hop_seconds),
        prelude_seconds=prelude_seconds(work, device, engine),
        pass_seconds=on_processor(device, engine.pass_seconds)
        + (costs.pass_seconds if engine.receives_all_at_once else 0.0),
        norm_seconds=costs.norm_seconds + on_processor(device, engine.step_seconds),
        agreement_seconds=0.0,
    )


def least_engine_seconds(graph: Graph, cluster: Cluster, *, engine: Engine, mesh: Mesh, micro_batch: int) -> float:
    """`costs.least_seconds` under an engine: no strategy takes less."""
    device, key = cluster.device, Same(graph)
    work = _work(key, micro_batch, engine.loss_in_parts)
    within = inside(key, split_groups(cluster, mesh), micro_batch)
    each = [_class_seconds(kind, device, engine, False) for kind in work.classes]
    seconds = np.array([found.sum(axis=0) for found, _ in each]).reshape(-1, 2)[work.kinds]
    numbers = np.array([number for _, number in each], float).reshape(-1, 2)[work.kinds]
    passes = phase_seconds(
        engine_device(device, engine, mesh.tp), seconds + engine.collectives * within.seconds,
        numbers + within.number, 0, 1.0 if engine.by_block else work.calls[:, None],
    )  # fmt: skip
    return float(passes.sum()) + prelude_seconds(work, device, engine) + 2 * on_processor(device, engine.pass_seconds)


@lru_cache(maxsize=1024)
def _work(graph: Same, micro_batch: int, loss_in_parts: bool) -> Work:
    return work_of(graph.value, micro_batch, loss_in_parts=loss_in_parts)
