"""The benchmark of plans on this machine: which plans it takes, what it makes of figures, what a failure costs."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import compare_plans as bench
from planner.plan import BlockPlan, Mesh, Plan, Prediction, StagePlan


def plan(seconds: float, *, zero: int = 1, micro_batch: int = 1, mesh: Mesh | None = None) -> Plan:
    mesh = mesh or Mesh(dp_shard=2)
    blocks = tuple(BlockPlan(name=name, zero=zero, recompute="none") for name in "ab")
    return Plan(
        model="m", cluster="local", graph_fingerprint="0", cluster_fingerprint="0", precision="fp32",
        optimizer="adamw", global_batch=16, micro_batch=micro_batch,
        num_microbatches=16 // mesh.dp // micro_batch, schedule="1f1b", mesh=mesh,
        stages=(StagePlan(blocks=blocks),),
        prediction=Prediction(
            step_seconds=seconds, bubble=0.0, peak_bytes=(100.0,), capacity_bytes=1e9, gap=0.0, mfu=0.1
        ),
    )  # fmt: skip


def test_plans_are_spread_over_the_predicted_time_and_over_kinds():
    plans = [plan(1.0 * 2 ** (i / 10), zero=1 + i % 3) for i in range(60)]

    chosen = bench.spread(plans, 6)

    times = [p.prediction.step_seconds for p in chosen]
    assert len(chosen) == 6
    assert times[0] == 1.0
    assert times == sorted(times)
    ratios = [b / a for a, b in pairwise(times)]
    assert max(ratios) / min(ratios) < 2.5
    assert [bench.kind(p) for p in chosen].count(bench.kind(plans[0])) == 2
    assert chosen == bench.spread(plans, 6)
    assert bench.spread(plans[:4], 6) == plans[:4]


def test_plans_that_run_alike_are_one():
    one = plan(1.0)

    assert bench.executed(one) == bench.executed(replace(one, schedule="gpipe", notes=("told",)))
    assert bench.executed(one) != bench.executed(plan(1.0, zero=2))
    assert bench.executed(one) != bench.executed(plan(1.0, micro_batch=2))


def test_every_mesh_of_the_ranks_is_looked_at():
    pins = list(bench.all_pins(4, [1, 2]))

    assert {(p["devices"], p["dp"], p["tp"], p["pp"]) for p in pins} == {
        (1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)
    }  # fmt: skip
    assert {p["zero"] for p in pins if p["dp"] == 2} == {0, 1, 2, 3}
    assert {p["micro_batch"] for p in pins if p["dp"] == 2} == {1, 2}
    assert {p["schedule"] for p in pins if p["pp"] == 2} == {"1f1b", "gpipe"}


class FakeRanks:
    """Ranks that take a plan's micro-batch in seconds; what is asked for is noted."""

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.asked = failing, list[str]()

    def ask(self, command: str, *arguments: Any, limit_seconds: float) -> list[Any]:
        self.asked.append(command)
        size = Plan.loads(arguments[0]).micro_batch
        if size == self.failing:
            raise bench.RankError("rank 1: out of memory")
        if command == "memory":
            return [90, 110]
        if size == 8:
            raise KeyboardInterrupt
        return [[(2.0 * size, 0.001)] * arguments[1], [(3.0 * size, 0.002)] * arguments[1]]


def rows(*sizes: int) -> list[bench.Row]:
    found = [bench.Row(name=str(n), plan=plan(1.5 * n, micro_batch=n)) for n in sizes]
    found[0].is_choice = True
    return found


def test_the_slowest_rank_counts_and_figures_are_of_the_median():
    found, pool = rows(2, 1, 4), FakeRanks()

    bench.measure(found, {2: pool}, 4, lambda what: None, with_memory=True, pace=0.001)
    figures = bench.summary(found)

    more = bench.CLOSE_TURNS  # steps of the choice and of the fastest
    assert [row.clock_seconds for row in found] == [[6.0] * (4 + more), [3.0] * (4 + more), [12.0] * 4]
    # At half the pace it takes twice.
    assert [row.seconds for row in found] == [[3.0] * (4 + more), [1.5] * (4 + more), [6.0] * 4]
    assert figures["by_clock"]["median_error"] == pytest.approx(0.5)
    assert figures["by_clock"]["regret"] == pytest.approx(1.0)
    assert found[0].error == pytest.approx(0.0)
    assert found[0].memory_errors == pytest.approx([100 / 90 - 1, 100 / 110 - 1])
    assert figures["measured"] == 3
    assert figures["median_error"] == pytest.approx(0.0)
    assert figures["regret"] == pytest.approx(1.0)  # the choice takes 3 s, the best 1.5
    assert figures["memory_within_10_percent"] == pytest.approx(0.5)
    assert pool.asked == ["train"] * (3 * bench.TURNS + 2 * more) + ["memory"] * 3


def test_the_choice_and_what_is_close_to_the_fastest_by_one_of_the_clocks_is_run_more_often():
    found = rows(1, 2, 3, 4, 5)
    times = [(1.3, 1.6), (1.0, 1.4), (1.14, 1.4), (1.2, 1.1), (1.2, 1.0)]
    for row, (seconds, clock) in zip(found, times, strict=True):
        row.seconds, row.clock_seconds = [seconds], [clock]

    assert [row.name for row in bench.close(found)] == ["1", "2", "3", "4", "5"]
    assert [row.name for row in bench.close(found[:3])] == ["1", "2", "3"]
    found[2].seconds = [1.16]
    assert [row.name for row in bench.close([*found[1:3], found[4]])] == ["2", "5"]
    assert bench.close(rows(1, 2)) == []


def test_a_plan_that_fails_is_a_row_with_the_reason_and_is_not_run_again():
    found, pool = rows(1, 2, 4), FakeRanks(failing=2)

    bench.measure(found, {2: pool}, 4, lambda what: None, with_memory=False, pace=0.001)

    assert found[1].failure == "rank 1: out of memory"
    assert [len(row.seconds) for row in found] == [4, 0, 4]
    assert len(pool.asked) == 2 * bench.TURNS + 1
    assert bench.summary(found)["failed"] == 1


def test_what_is_known_when_it_is_interrupted_is_printed(capsys):
    found = rows(1, 8)

    with pytest.raises(KeyboardInterrupt):
        bench.measure(found, {2: FakeRanks()}, 4, lambda what: None, with_memory=True, pace=0.001)
    bench._print(found, {**bench.summary(found), "other_load_cores": 0.25})

    out = capsys.readouterr().out
    assert "<- chosen" in out
    assert "time of 1 plans at one pace: median error 0.0%" in out
    assert "by the clock: median error 50.0%" in out
    assert "memory: median error" not in out  # it comes after the times
