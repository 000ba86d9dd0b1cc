"""Cores change their speed: what was measured at several paces is scaled to one."""

import itertools
import time

import torch.distributed as dist

from planner.measure import local, pace


def test_the_pace_of_a_piece_of_work_is_the_mean_of_before_and_after(monkeypatch):
    paces = iter([1.0, 3.0, 5.0])
    monkeypatch.setattr(pace, "pace_seconds", lambda: next(paces))
    paced = pace.Paced()

    assert paced.measure(lambda: "first") == ("first", 2.0)
    assert paced.measure(lambda: "second") == ("second", 4.0)


def test_the_pace_is_that_of_a_fixed_piece_of_work():
    seconds = [pace.pace_seconds() for _ in range(5)]

    assert 1e-5 < min(seconds) < max(seconds) < 1.0


def test_a_collective_takes_its_mean_not_what_most_calls_take(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, rank: None)
    calls = itertools.count()

    def communicate():
        if next(calls) % 5 == 0:
            time.sleep(0.02)

    monkeypatch.setattr(local, "_BETWEEN_PRODUCTS", 0)
    assert local._added_seconds(communicate) > 0.003
