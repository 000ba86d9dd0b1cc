"""Seconds of kernels by a roofline over the device's measured efficiency curves, and of whole eager phases.

A kernel is bound by arithmetic, by memory or by its launch (Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model", CACM 2009). An eager phase is bound by its kernels or by the processor that sends them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cluster import Curve, Device
from planner.errors import ClusterError
from planner.graph import Affine, Kernel

Floats = NDArray[np.float64]

# Kernel.kind and phase -> the efficiency curve of the device.
_CURVE = {
    ("matmul", "forward"): "matmul",
    ("matmul", "backward"): "matmul",
    ("attention", "forward"): "attention_forward",
    ("attention", "backward"): "attention_backward",
    ("convolution", "forward"): "convolution",
    ("convolution", "backward"): "convolution",
}


def check_dtype(device: Device, dtype: str) -> None:
    """Refuse a compute dtype that the device has no arithmetic for.

    Raises:
        ClusterError: the device lacks it.
    """
    if not device.supports(dtype):
        raise ClusterError(
            f"device {device.name} does not compute in {dtype}, only in "
            f"{', '.join(sorted(device.peak_flop_per_second))}; "
            "choose another precision or another device"
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
    """Seconds of each kernel: max(FLOP / (peak efficiency(FLOP)), bytes / (bandwidth efficiency(bytes)), launch).

    A kernel of kind "memory" is priced by its bytes alone: elementwise arithmetic never binds.

    Raises:
        ClusterError: a kernel computes in a dtype that the device lacks.
    """
    if not kernels:
        return np.zeros(0)
    for dtype in sorted({kernel.dtype for kernel in kernels if kernel.kind != "memory"}):
        check_dtype(device, dtype)
    seconds = np.maximum(
        memory_seconds(device, _at([kernel.num_bytes for kernel in kernels], micro_batch)),
        device.kernel_launch_seconds,
    )
    flop = _at([kernel.flop for kernel in kernels], micro_batch)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.kind != "memory":
            groups.setdefault((_CURVE[kernel.kind, kernel.phase], kernel.dtype), []).append(index)
    for (curve, dtype), members in groups.items():
        work = flop[members]
        rate = device.peak_flop_per_second[dtype] * curve_at(device.efficiency[curve], work)
        seconds[members] = np.maximum(seconds[members], work / rate)
    return seconds


def phase_seconds(
    device: Device,
    sum_of_kernels: ArrayLike,
    num_kernels: ArrayLike,
    num_wrappers: ArrayLike = 0,
    num_blocks: ArrayLike = 0,
) -> Floats:
    """Seconds of eager phases whose kernels take `sum_of_kernels` and are sent one by one.

    A GPU works while the processor sends the next kernel: the slower of the two counts. Where the processor itself
    computes, both add up. `num_wrappers` are the passes through FSDP2-wrapped modules, `num_blocks` through blocks.
    """
    kernels = np.asarray(sum_of_kernels, float)
    sending = (
        np.asarray(num_kernels, float) * device.dispatch_seconds
        + np.asarray(num_wrappers, float) * device.wrapper_seconds
        + np.asarray(num_blocks, float) * device.block_seconds
    )
    return np.asarray(kernels + sending if device.synchronous_dispatch else np.maximum(kernels, sending))


def _at(quantities: Sequence[Affine], micro_batch: int) -> Floats:
    return np.array([quantity.at(micro_batch) for quantity in quantities], float)
