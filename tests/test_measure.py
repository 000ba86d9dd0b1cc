import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from planner.cluster import Cluster
from planner.collectives import all_reduce_seconds, axis_group, send_recv_seconds
from planner.errors import ClusterError
from planner.measure import local as measure
from planner.measure.wrappers import OPTIMIZERS
from planner.runtime.machine import num_cores

# What one rank measured: [(size, seconds)], sizes in FLOP or bytes.
RANK = {
    "resident_bytes": 2e8,
    "matmul_float32": [[1e6, 1e-4], [1e9, 1e-2]],
    "matmul_float64": [[1e9, 2e-2]],
    "matmul_bfloat16": [[1e9, 3e-2]],
    "memory": [[1e5, 1e-5], [1e8, 2e-2]],
    "copy": [[6e7, 6e-3]],
    "dispatch": [[1, 5e-6]],
    "block": [[1, 4.5e-5]],
    "attention_forward": [[1e8, 2e-3]],
    "attention_backward": [[1e8, 4e-3]],
    "convolution": [[1e8, 2e-3]],
    "all_reduce": [[4096, 1e-4], [1e7, 1e-2]],
    "all_gather": [[4096, 1e-4], [1e7, 1e-2]],
    "reduce_scatter": [[4096, 1e-4], [1e7, 1e-2]],
    "all_to_all": [[4096, 1e-4], [1e7, 1e-2]],
    "send_recv": [[4096, 1e-4], [1e7, 1e-2]],
    "hooks": [[1, 2e-4], [8, 3e-4]],
    "gather": [[1, 5e-4], [8, 6.4e-4]],
    "reduce": [[1, 4e-4], [8, 3.9e-4]],
    "message": [[1, 1e-4]],
    "pass": [[1, 1e-3]],
    "checkpoint": [[4, 2.4e-4], [40, 6e-4]],
    "pace": [[1, 1.5e-3]],
    # 1e-9 s for a byte, 30 us for each of 16 tensors, 250 us if they are sharded.
    **{
        f"optimizer_{name}": [[65536, 16 * 30e-6 + 65536e-9], [16777216, 16 * 30e-6 + 16777216e-9]]
        for name in OPTIMIZERS
    },
    **{f"sharded_{name}": [[32768, 16 * 250e-6 + 32768e-9]] for name in OPTIMIZERS},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPLAN_CACHE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "cache" / "autoplan"


def test_the_slowest_rank_counts():
    slow = {**RANK, "matmul_float32": [[1e6, 2e-4], [1e9, 1e-2]]}

    device = measure._cpu_cluster(2, [RANK, slow]).device

    assert device.flop_per_second("float32", "matmul", 1e6) == pytest.approx(5e9)
    assert device.flop_per_second("float32", "matmul", 1e9) == pytest.approx(1e11)
    assert device.peak_flop_per_second == {"float32": 1e11, "float64": 5e10}
    assert device.copy_bytes_per_second(1e8) == pytest.approx(5e9)
    assert device.synchronous_dispatch
    assert device.dispatch_seconds == 5e-6


def test_collectives_are_priced_as_they_were_measured():
    cluster = measure._cpu_cluster(2, [RANK, RANK])
    group = axis_group(cluster, {"dp": 2}, "dp")

    assert all_reduce_seconds(1e7, group) == pytest.approx(1e-2, rel=1e-3)
    assert all_reduce_seconds(4096, group) == pytest.approx(1e-4, rel=0.15)
    assert send_recv_seconds(1e7, group) == pytest.approx(1e-2, rel=1e-3)


def test_fsdp_costs_hooks_in_each_pass_and_its_own_code_around_each_collective():
    device = measure._cpu_cluster(2, [RANK, RANK]).device

    assert device.wrapper_seconds == pytest.approx(3e-4)
    assert device.sharding_seconds is not None
    assert tuple(device.sharding_seconds) == pytest.approx((4.8e-4, 2e-5, 4e-4, 0.0))  # more tensors never cost less
    assert measure._cpu_cluster(1, [RANK]).device.sharding_seconds is None


def test_recomputing_costs_something_for_each_block_and_each_kernel():
    device = measure._cpu_cluster(1, [RANK]).device

    assert device.checkpoint_seconds is not None
    assert tuple(device.checkpoint_seconds) == pytest.approx((2e-4, 1e-5))
    assert Cluster.from_dict(json.loads(measure._cpu_cluster(1, [RANK]).to_json())).device == device


def test_an_optimizer_takes_its_time_for_bytes_and_for_tensors_and_more_for_sharded_ones():
    device = measure._cpu_cluster(2, [RANK, RANK]).device

    assert device.optimizer_seconds is not None
    assert set(device.optimizer_seconds) == set(OPTIMIZERS)
    assert tuple(device.optimizer_seconds["adamw"]) == pytest.approx((1e-9, 30e-6, 250e-6), rel=1e-3)
    again = Cluster.from_dict(json.loads(measure._cpu_cluster(2, [RANK, RANK]).to_json()))
    assert again.device.optimizer_seconds == device.optimizer_seconds
    assert again.device.sharding_seconds == device.sharding_seconds


def test_small_products_are_not_faster_than_large_ones():
    glitch = {**RANK, "matmul_float32": [[1e3, 1e-10], [1e6, 1e-4], [1e9, 1e-2]]}

    assert measure._cpu_cluster(1, [glitch]).device.peak_flop_per_second["float32"] == pytest.approx(1e11)


def test_a_pass_of_a_pipeline_is_what_its_message_and_its_block_do_not_explain():
    device = measure._cpu_cluster(2, [RANK, RANK]).device

    assert device.block_seconds == pytest.approx(4e-5)
    assert device.pass_seconds == pytest.approx(1e-3 - 1e-4 - 4.5e-5)


def test_noise_that_makes_more_work_faster_is_smoothed():
    noisy = {**RANK, "memory": [[1e5, 1e-4], [1e6, 5e-5]]}

    device = measure._cpu_cluster(1, [noisy]).device

    assert 1e6 / device.copy_bytes_per_second(1e6) >= 1e5 / device.copy_bytes_per_second(1e5)


def test_bfloat16_counts_only_where_it_is_fast():
    fast = {**RANK, "matmul_bfloat16": [[1e9, 5e-3]]}

    assert not measure._cpu_cluster(1, [RANK]).device.supports("bfloat16")
    assert measure._cpu_cluster(1, [fast]).device.supports("bfloat16")


def test_a_measurement_is_kept_and_read_again(monkeypatch, cache):
    calls: list[int] = []

    def fake(count, progress):
        calls.append(count)
        return [RANK] * count

    monkeypatch.setattr(measure, "_measure_cpu", fake)

    first = measure.local_cluster(num_processes=2)
    second = measure.local_cluster(num_processes=2)
    other = measure.local_cluster(num_processes=1)
    (path,) = [path for path in cache.iterdir() if Cluster.load(str(path)).num_devices == 2]

    assert first == second == Cluster.load(str(path))
    assert first.fingerprint == Cluster.load(str(path)).fingerprint
    assert other.num_devices == 1
    assert calls == [2, 1]
    assert not list(cache.glob("*.tmp"))


def test_a_broken_cache_is_measured_again(monkeypatch, cache):
    monkeypatch.setattr(measure, "_measure_cpu", lambda count, progress: [RANK] * count)
    cluster = measure.local_cluster(num_processes=2)
    (path,) = cache.iterdir()
    path.write_text("{")

    assert measure.local_cluster(num_processes=2).num_devices == 2
    assert Cluster.load(str(path)).device.name == cluster.device.name


def test_the_cache_can_be_off_or_unwritable(monkeypatch, tmp_path, cache):
    monkeypatch.setattr(measure, "_measure_cpu", lambda count, progress: [RANK] * count)
    monkeypatch.setenv("AUTOPLAN_CACHE", "off")
    measure.local_cluster(num_processes=2)
    assert not cache.exists()

    monkeypatch.delenv("AUTOPLAN_CACHE")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measure.local_cluster(num_processes=2).num_devices == 2


def test_the_value_has_no_host_name_and_no_clock(monkeypatch):
    monkeypatch.setattr(measure, "_measure_cpu", lambda count, progress: [RANK] * count)
    monkeypatch.setattr(measure, "available_bytes", lambda: 8 * 10**9)

    text = measure.local_cluster(num_processes=2, use_cache=False).to_json()

    assert os.uname().nodename not in text
    assert text == measure.local_cluster(num_processes=2, use_cache=False).to_json()


def start_with(code, started):
    def start(rank, num_processes, folder):
        with (Path(folder) / f"errors-{rank}").open("w") as errors:
            worker = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        started.append(worker)
        return worker

    return start


def test_a_worker_that_fails_is_named_and_all_end(monkeypatch):
    started: list[subprocess.Popen[str]] = []
    code = "import sys; print('start', flush=True); sys.exit('no more threads')"
    monkeypatch.setattr(measure, "_start", start_with(code, started))

    with pytest.raises(ClusterError, match="measuring this machine failed: no more threads"):
        measure._measure_cpu(2, lambda fraction, text: None)

    assert all(worker.poll() is not None for worker in started)


def test_workers_that_hang_are_killed(monkeypatch):
    started: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(measure, "_start", start_with("import time; time.sleep(600)", started))
    monkeypatch.setattr(measure, "_TIMEOUT_SECONDS", 0.5)
    begin = time.monotonic()

    with pytest.raises(ClusterError, match="took more than"):
        measure._measure_cpu(2, lambda fraction, text: None)

    assert all(worker.poll() is not None for worker in started)
    assert time.monotonic() - begin < 10


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ClusterError, match="at least 1, got 0"):
        measure.local_cluster(num_processes=0)
    with pytest.raises(ClusterError, match=r"more than a machine of .* cores can measure with; take at most"):
        measure.local_cluster(num_processes=max(num_cores(), 16) + 1)  # at once, not after minutes


def test_this_machine_has_cores_and_memory():
    assert num_cores() >= 1
    assert measure.available_bytes() > 10**8


def test_a_cuda_device_is_matched_to_its_profile(monkeypatch):
    properties = dataclasses.make_dataclass("P", ["name", "total_memory", "major", "minor"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: properties("NVIDIA A100-SXM4-80GB", 85 * 10**9, 8, 0)
    )

    cluster = measure.local_cluster()

    assert cluster.device.name == "A100-80GB"
    assert cluster.device.memory_bytes == 85 * 10**9
    assert cluster.num_devices == 4
    assert measure.local_cluster(num_processes=2).num_devices == 2
    with pytest.raises(ClusterError, match="5 processes need a CUDA device each, there are 4"):
        measure.local_cluster(num_processes=5)


@pytest.mark.distributed
def test_measuring_two_processes_gives_a_usable_cluster_in_time():
    told: list[float] = []
    begin = time.monotonic()

    cluster = measure.local_cluster(num_processes=2, use_cache=False, progress=lambda share, what: told.append(share))

    assert time.monotonic() - begin < 60  # 11 s on two idle cores
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert Cluster.from_dict(json.loads(cluster.to_json())).fingerprint == cluster.fingerprint
    assert 1e8 < cluster.device.peak_flop_per_second["float64"] < 1e13
    assert 1e-7 < cluster.device.dispatch_seconds < 1e-3
    assert 1e-5 < cluster.device.wrapper_seconds < 1e-1
    assert 1e6 < cluster.intra_node_link.bytes_per_second < 1e12
