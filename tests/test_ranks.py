import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool, run_alone, run_ranks

pytestmark = pytest.mark.distributed


def _sum_of_ranks(offset):
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads(), os.getpid()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()  # the others wait for it


def _die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _sleep(seconds):
    time.sleep(seconds)


def _modules():
    import sys

    return sorted(name for name in sys.modules if name.split(".")[0] == "planner")


def test_every_rank_returns_its_value(tmp_path):
    values = run_ranks(2, _sum_of_ranks, 10, tmp_path=tmp_path)

    assert [value[:2] for value in values] == [(21.0, 1), (21.0, 1)]


def test_a_pool_keeps_its_ranks_and_survives_every_kind_of_failure(tmp_path):
    with RankPool(2, tmp_path, timeout_seconds=30) as pool:
        first, second = pool.run(_sum_of_ranks, 0), pool.run(_sum_of_ranks, 1)

        assert [value[0] for value in second] == [3.0, 3.0]
        assert [value[2] for value in first] == [value[2] for value in second]

        started = time.monotonic()
        with pytest.raises(AssertionError, match=r"rank 1 failed(?s:.)*ValueError: no luck on 1"):
            pool.run(_fail_on, 1)
        with pytest.raises(AssertionError, match=r"rank 0 failed(?s:.)*exit code 7"):
            pool.run(_die_on, 0)
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] gave no result in 0.2 s"):
            pool.run(_sleep, 60, timeout_seconds=0.2)
        with pytest.raises(AssertionError, match="pickle"):
            pool.run(_unpicklable)

        assert time.monotonic() - started < 25
        assert [value[0] for value in pool.run(_sum_of_ranks, 0)] == [1.0, 1.0]


def _unpicklable():
    return lambda: None


def test_a_process_alone_has_no_planner():
    assert run_alone(_modules) == []
