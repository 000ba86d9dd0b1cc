"""Seconds of kernels by a roofline over the device's measured efficiency curves, and of whole eager phases.

A kernel is bound by arithmetic, by memory or by its launch (Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model", CACM 2009). An eager phase is bound by its kernels or by the processor that sends them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cluster import Curve, Device
from planner.errors import ClusterError
from planner.graph import Affine, BlockClass, Graph, Kernel

Floats = NDArray[np.float64]

# The exponent of the norm by which a device's seconds and those of the processor beside it add up: 1 would be their
# sum, infinity the slower one. Kernels are of unequal length, and each of the two waits for the other now and then.
# By fits with 3, 4 and 5 in its place (`python -m benchmarks.fit`) what is left differs little: the middle one.
BESIDE = 4.0
# Elements of 16 bits in 16 bytes: tensor cores are fastest where sizes are multiples of that (NVIDIA, Matrix
# Multiplication Background User's Guide).
ALIGNED = 8

# Kernel.kind and phase -> the efficiency curve of the device.
_CURVE = {
    ("matmul", "forward"): "matmul",
    ("matmul", "backward"): "matmul",
    ("attention", "forward"): "attention_forward",
    ("attention", "backward"): "attention_backward",
    ("convolution", "forward"): "convolution",
    ("convolution", "backward"): "convolution",
}


_PRECISIONS = (("bf16", "bfloat16"), ("fp32", "float32"), ("fp64", "float64"))  # those that can be planned


def check_dtype(device: Device, dtype: str) -> None:
    """Refuse a compute dtype that the device has no arithmetic for.

    Raises:
        ClusterError: the device lacks it.
    """
    if not device.supports(dtype):
        known = [name for name, other in _PRECISIONS if device.supports(other)]
        raise ClusterError(
            f"device {device.name} does not compute in {dtype}; "
            f"choose precision {' or '.join(known)}, or another device"
        )


def curve_at(curve: Curve, sizes: ArrayLike) -> Floats:
    """`Curve.at` of many sizes at once.

    >>> curve = Curve(points=((1e6, 0.1), (1e8, 0.4)))
    >>> [float(x) for x in curve_at(curve, [1e3, 1e7, 1e12]).round(6)]
    [0.1, 0.2, 0.4]
    """
    points = np.log(np.array(curve.points))
    logs = np.log(np.maximum(np.asarray(sizes, float), 1e-300))
    return np.asarray(np.exp(np.interp(logs, points[:, 0], points[:, 1])))


def memory_seconds(device: Device, num_bytes: ArrayLike) -> Floats:
    """Seconds of kernels that only move `num_bytes` (read plus written); nothing to move takes no time."""
    moved = np.asarray(num_bytes, float)
    rate = device.memory_bytes_per_second * curve_at(device.efficiency["memory"], moved)
    return np.where(moved > 0, np.maximum(moved / rate, device.kernel_launch_seconds), 0.0)


def kernel_seconds(device: Device, kernels: Sequence[Kernel], micro_batch: int) -> Floats:
    """Seconds of each kernel: measured, if a profile has it, else by the roofline.

    Where it was measured for other micro-batches only, the roofline is corrected by what it was off there: between two
    by a power law, outside as at the nearest. All that a plan is compared with is priced alike so.

    Raises:
        ClusterError: a kernel computes in a dtype that the device lacks.
    """
    seconds = roofline_seconds(device, kernels, micro_batch)
    known = [index for index, kernel in enumerate(kernels) if kernel.measured]
    if not known:
        return seconds
    some = [kernels[index] for index in known]
    sizes = sorted({size for kernel in some for size, _ in kernel.measured})
    before = {size: roofline_seconds(device, some, size) for size in sizes}
    for place, (index, kernel) in enumerate(zip(known, some, strict=True)):
        factors = [(size, value / max(float(before[size][place]), 1e-12)) for size, value in kernel.measured]
        seconds[index] *= _factor_at(factors, micro_batch)
    return seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelTable:
    """Kernels at one micro-batch as arrays [K]; `rates` are the distinct (curve, dtype), `rate` their index, -1: none.

    A kernel without a rate is bound by its bytes alone.
    """

    flop: Floats
    num_bytes: Floats
    rate: NDArray[np.int64]
    is_misaligned: NDArray[np.bool_]
    rates: tuple[tuple[str, str], ...]


def kernel_table(kernels: Sequence[Kernel], micro_batch: int) -> KernelTable:
    """The kernels of a list, in its order."""
    keys = [(_CURVE[k.kind, k.phase], k.dtype) if k.kind != "memory" else None for k in kernels]
    rates = tuple(dict.fromkeys(key for key in keys if key is not None))
    return KernelTable(
        flop=_at([kernel.flop for kernel in kernels], micro_batch),
        num_bytes=_at([kernel.num_bytes for kernel in kernels], micro_batch),
        rate=np.array([-1 if key is None else rates.index(key) for key in keys], np.int64),
        rates=rates,
        is_misaligned=np.array([_is_misaligned(kernel) for kernel in kernels], bool),
    )


def _is_misaligned(kernel: Kernel) -> bool:
    """Whether a row of a matrix does not begin where tensor cores read best: sizes are no multiples of 16 bytes."""
    if kernel.kind != "matmul" or kernel.dtype not in ("bfloat16", "float16"):
        return False
    matrices = [operand for operand in kernel.operands if len(operand.shape) == 2]
    return any(isinstance(size, int) and size % ALIGNED for operand in matrices for size in operand.shape)


def roofline_seconds(device: Device, kernels: Sequence[Kernel], micro_batch: int) -> Floats:
    """Seconds of each kernel: max(FLOP / (peak efficiency(FLOP)), bytes / (bandwidth efficiency(bytes)), launch).

    A kernel of kind "memory" is priced by its bytes alone: elementwise arithmetic never binds.

    Raises:
        ClusterError: a kernel computes in a dtype that the device lacks.
    """
    return table_seconds(device, kernel_table(kernels, micro_batch))


def table_seconds(device: Device, table: KernelTable) -> Floats:
    """`roofline_seconds` of kernels as arrays.

    Raises:
        ClusterError: a kernel computes in a dtype that the device lacks.
    """
    if not len(table.flop):
        return np.zeros(0)
    for dtype in sorted({dtype for _, dtype in table.rates}):
        check_dtype(device, dtype)
    seconds = np.maximum(memory_seconds(device, table.num_bytes), device.kernel_launch_seconds)
    for index, (curve, dtype) in enumerate(table.rates):
        members = table.rate == index
        work = table.flop[members]
        rate = device.peak_flop_per_second[dtype] * curve_at(device.efficiency[curve], work)
        rate = rate * np.where(table.is_misaligned[members], device.misaligned_matmul or 1.0, 1.0)
        seconds[members] = np.maximum(seconds[members], work / rate)
    return seconds


def class_seconds(device: Device, kind: BlockClass, micro_batch: int) -> tuple[Floats, Floats]:
    """[2] seconds of the kernels of a block, forward and backward, and [2] how many dispatches sending them takes.

    Whole passes that a profile has come before single kernels; other micro-batches are corrected as in
    `kernel_seconds`. Of a rank's part of a block, kernels that were not measured are as far from the roofline as those
    of the whole block.

    Raises:
        ClusterError: a kernel computes in a dtype that the device lacks.
    """
    each = kernel_seconds(device, kind.kernels, micro_batch)
    whole = kind.part_of if not kind.measured else None
    if whole is not None and whole.measured:
        kernels, host = _measured_factors(device, whole, micro_batch, roofline_seconds)
        off = np.array([1.0 if k.measured else kernels[int(k.phase == "backward")] for k in kind.kernels])
        seconds, number = _summed(kind.kernels, each * off)
        return seconds, number * host
    seconds, number = _summed(kind.kernels, each)
    if not kind.measured:
        return seconds, number
    kernels, host = _measured_factors(device, kind, micro_batch, kernel_seconds)
    return seconds * kernels, number * host


def _measured_factors(
    device: Device,
    kind: BlockClass,
    micro_batch: int,
    expected_seconds: Callable[[Device, Sequence[Kernel], int], Floats],
) -> tuple[Floats, Floats]:
    """[2] and [2] what the measured passes are of what was expected: of kernels, and of dispatch."""
    kernels: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
    host: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
    for passes in kind.measured:
        expected, number = _summed(kind.kernels, expected_seconds(device, kind.kernels, passes.micro_batch))
        for phase, value in enumerate((passes.forward_seconds, passes.backward_seconds)):
            kernels[phase].append((passes.micro_batch, value / max(float(expected[phase]), 1e-12)))
        for phase, value in enumerate((passes.forward_host_seconds, passes.backward_host_seconds)):
            # What the call of a block takes is counted where blocks are.
            rest = max(value - device.block_seconds, 0.1 * value)
            host[phase].append((passes.micro_batch, rest / max(float(number[phase]) * device.dispatch_seconds, 1e-12)))
    factors = np.array([_factor_at(points, micro_batch) for points in (*kernels, *host)])
    return factors[:2], factors[2:] if device.dispatch_seconds > 0 else np.ones(2)


def measured_seconds(device: Device, kind: BlockClass, micro_batch: int) -> float:
    """Of a block's kernels, forward and backward, the seconds that rest on rows of a profile.

    Those between two measured micro-batches count, those outside do not.
    """
    sizes = [passes.micro_batch for passes in kind.measured]
    if sizes and min(sizes) <= micro_batch <= max(sizes):
        return float(class_seconds(device, kind, micro_batch)[0].sum())
    seconds = kernel_seconds(device, kind.kernels, micro_batch)
    return sum(
        float(value)
        for kernel, value in zip(kind.kernels, seconds, strict=True)
        if kernel.measured and kernel.measured[0][0] <= micro_batch <= kernel.measured[-1][0]
    )


def phase_seconds(
    device: Device,
    sum_of_kernels: ArrayLike,
    num_kernels: ArrayLike,
    num_wrappers: ArrayLike = 0,
    num_blocks: ArrayLike = 0,
) -> Floats:
    """Seconds of eager phases whose kernels take `sum_of_kernels` and are sent one by one.

    A GPU works while the processor sends the next kernel: the slower of the two counts, and where both are nearly as
    slow each waits for the other at times (the norm of the two, see `BESIDE`). Where the processor itself computes,
    both add up. `num_wrappers` are the passes through FSDP2-wrapped modules, `num_blocks` through blocks.
    """
    kernels = np.asarray(sum_of_kernels, float)
    sending = (
        np.asarray(num_kernels, float) * device.dispatch_seconds
        + np.asarray(num_wrappers, float) * device.wrapper_seconds
        + np.asarray(num_blocks, float) * device.block_seconds
    )
    if device.synchronous_dispatch:
        return np.asarray(kernels + sending)
    slower, faster = np.maximum(kernels, sending), np.minimum(kernels, sending)
    share = np.divide(faster, slower, out=np.zeros_like(slower), where=slower > 0)
    return np.asarray(slower * (1 + share**BESIDE) ** (1 / BESIDE))


def measured_share(device: Device, graph: Graph, micro_batch: int) -> float:
    """Of the seconds of all kernels of a graph's blocks, the share that rests on rows of a profile."""
    counts = Counter(block.class_index for block in graph.blocks)
    if not any(kind.measured or any(kernel.measured for kernel in kind.kernels) for kind in graph.classes):
        return 0.0
    measured, every = 0.0, 0.0
    for index, count in counts.items():
        measured += count * measured_seconds(device, graph.classes[index], micro_batch)
        every += count * float(class_seconds(device, graph.classes[index], micro_batch)[0].sum())
    return min(1.0, measured / every) if every > 0 else 0.0


def _summed(kernels: Sequence[Kernel], seconds: Floats) -> tuple[Floats, Floats]:
    """[2] sums over the kernels of forward and of backward, and [2] how many they are."""
    is_forward = np.array([kernel.phase == "forward" for kernel in kernels], bool)
    sums = np.array([seconds[is_forward].sum(), seconds[~is_forward].sum()])
    return sums, np.array([is_forward.sum(), (~is_forward).sum()], float)


def _factor_at(points: Sequence[tuple[int, float]], micro_batch: int) -> float:
    """A factor between the (micro-batch, factor) that are known, by a power law; outside that of the nearest."""
    sizes, factors = (np.log(np.maximum(values, 1e-12)) for values in zip(*points, strict=True))
    return float(np.exp(np.interp(np.log(micro_batch), sizes, factors)))


def _at(quantities: Sequence[Affine], micro_batch: int) -> Floats:
    return np.array([quantity.at(micro_batch) for quantity in quantities], float)
