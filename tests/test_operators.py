from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Cluster
from planner.errors import ClusterError
from planner.graph import Affine, Batch, Kernel, Operand
from planner.operators import curve_at, kernel_seconds, memory_seconds, phase_seconds

DEVICE = Cluster.load("1x8xA100-80GB").device


def kernel(kind="matmul", dtype="bfloat16", flop=0.0, num_bytes=0.0, phase="forward"):
    return Kernel(
        op="op", phase=phase, kind=kind, dtype=dtype, flop=Affine(0.0, flop), num_bytes=Affine(0.0, num_bytes)
    )


def test_a_large_matmul_is_bound_by_arithmetic():
    flop = 2.0 * 8192**3
    expected = flop / (DEVICE.peak_flop_per_second["bfloat16"] * DEVICE.efficiency["matmul"].at(flop))

    assert kernel_seconds(DEVICE, [kernel(flop=flop, num_bytes=1e6)], 1) == pytest.approx([expected])


def test_a_kernel_that_moves_much_is_bound_by_memory():
    expected = 2e9 / DEVICE.copy_bytes_per_second(2e9)

    assert kernel_seconds(DEVICE, [kernel(kind="memory", num_bytes=1e9)], 2) == pytest.approx([expected])


def test_a_tiny_kernel_takes_its_launch():
    assert kernel_seconds(DEVICE, [kernel(flop=1.0, num_bytes=8.0)], 1) == pytest.approx([DEVICE.kernel_launch_seconds])


def test_many_kernels_at_once_equal_one_by_one():
    kernels = [
        kernel(flop=1e12, num_bytes=1e8),
        kernel(kind="attention", flop=1e11, num_bytes=1e7),
        kernel(kind="attention", flop=1e11, num_bytes=1e7, phase="backward"),
        kernel(kind="convolution", dtype="float32", flop=1e10),
        kernel(kind="memory", dtype="int64", num_bytes=1e7),
    ]
    one_by_one = [kernel_seconds(DEVICE, [k], 3)[0] for k in kernels]

    assert kernel_seconds(DEVICE, kernels, 3) == pytest.approx(one_by_one)
    assert kernel_seconds(DEVICE, [], 3).shape == (0,)


@given(st.floats(1.0, 1e16))
def test_the_vectorised_curve_is_the_curve(size):
    curve = DEVICE.efficiency["matmul"]

    assert curve_at(curve, [size])[0] == pytest.approx(curve.at(size))


@given(st.floats(1e3, 1e15), st.floats(1.0, 100.0))
def test_more_work_never_takes_less_time(flop, factor):
    less, more = kernel_seconds(DEVICE, [kernel(flop=flop), kernel(flop=flop * factor)], 1)

    assert more >= less * (1 - 1e-12)


def test_nothing_to_move_takes_no_time():
    assert memory_seconds(DEVICE, [0.0, 1.0]).tolist() == [0.0, DEVICE.kernel_launch_seconds]


def test_a_precision_that_the_device_lacks_is_named():
    v100 = Cluster.load("1x8xV100-32GB").device

    with pytest.raises(ClusterError, match="does not compute in bfloat16; choose precision fp32 or fp64"):
        kernel_seconds(v100, [kernel(flop=1e9)], 1)


def test_a_gpu_hides_dispatch_and_a_cpu_does_not():
    kernels = 100 * DEVICE.dispatch_seconds
    cpu = replace(DEVICE, synchronous_dispatch=True)

    assert phase_seconds(DEVICE, kernels, 10) == pytest.approx(kernels, rel=1e-4)
    assert phase_seconds(DEVICE, kernels, 1000) == pytest.approx(10 * kernels, rel=1e-4)
    assert phase_seconds(DEVICE, kernels, 1000, 1) == pytest.approx(10 * kernels + DEVICE.wrapper_seconds, rel=1e-4)
    # As slow as each other, each waits for the other at times: the norm with exponent 4.
    assert phase_seconds(DEVICE, kernels, 100) == pytest.approx(kernels * 2 ** (1 / 4))
    assert phase_seconds(DEVICE, [0.0, kernels], [0, 0]).tolist() == [0.0, kernels]
    assert phase_seconds(cpu, kernels, 50) == pytest.approx(1.5 * kernels)
    assert phase_seconds(cpu, np.array([kernels, 0.0]), np.array([0, 100])) == pytest.approx([kernels, kernels])


def test_sizes_that_are_no_multiples_of_eight_slow_tensor_cores_down():
    def product(*sizes, dtype="bfloat16"):
        operands = (Operand(dtype, (Batch(1023), sizes[0])), Operand(dtype, sizes, is_strided=True))
        return replace(kernel(dtype=dtype, flop=1e12), operands=operands)

    device = replace(DEVICE, misaligned_matmul=0.5)
    even, odd, wide = (product(1024, 50304), product(1024, 50257), product(1024, 50257, dtype="float32"))
    assert kernel_seconds(device, [odd], 1) == pytest.approx(
        2 * kernel_seconds(device, [even], 1)
    )  # tokens: any number
    assert kernel_seconds(device, [wide], 1) == pytest.approx(
        kernel_seconds(replace(device, misaligned_matmul=None), [wide], 1)
    )
    assert kernel_seconds(replace(device, misaligned_matmul=None), [odd], 1) == pytest.approx(
        kernel_seconds(device, [even], 1)
    )
    assert all(0 < (Cluster.load(f"1x1x{name}").device.misaligned_matmul or 1) < 1 for name in ("A100", "H100", "T4"))
