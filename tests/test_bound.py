import time
from dataclasses import replace

import numpy as np
import pytest

from planner.bound import balanced, bound, compute_only, least_bytes, relax, windows
from planner.problem import Choice, evaluate
from tests.brute_force import program, small_cases, try_all

ABOVE = 1 + 1e-9


def test_bounds_are_never_above_the_optimum_and_close(capsys):
    tight, cheap = [], []
    for problem, tried in small_cases():
        found, first = bound(problem), relax(problem)

        assert compute_only(problem) <= tried.seconds_without_memory * ABOVE
        assert balanced(problem) <= tried.seconds * ABOVE
        assert relax(problem, cutoff=balanced(problem)).seconds <= tried.seconds * ABOVE
        assert first.seconds <= tried.seconds * ABOVE
        assert found.seconds <= tried.seconds * ABOVE
        if tried.choice is not None:
            tight.append(found.seconds / tried.seconds)
            cheap.append(first.seconds / tried.seconds)
        else:
            assert found.stages is None
    with capsys.disabled():
        print(  # noqa: T201
            f"\nbound / optimum, median (least): {np.median(tight):.6f} ({min(tight):.4f}), "
            f"of the relaxation alone {np.median(cheap):.4f} ({min(cheap):.4f})"
        )

    assert np.median(tight) >= 0.95
    assert np.median(cheap) >= 0.95


def test_plans_of_the_bound_fit_and_cost_what_it_says():
    gaps = []
    for problem, tried in small_cases():
        for found in (bound(problem), relax(problem)):
            if found.stages is not None and found.strategies is not None:
                judged = evaluate(problem, Choice(stages=found.stages, strategies=found.strategies))

                assert judged.feasible, judged.broken
                assert judged.seconds == pytest.approx(found.plan_seconds, rel=1e-9)
        if tried.choice is not None:
            gaps.append(bound(problem).plan_seconds / tried.seconds - 1)
    assert np.median(gaps) <= 1e-4


def test_windows_hold_every_plan_within_the_limit():
    for problem, tried in small_cases():
        if tried.choice is None:
            continue
        frame = windows(problem, tried.seconds)
        stages = np.array(tried.choice.stages)

        assert frame is not None
        assert (frame.first_stage <= stages).all()
        assert (stages <= frame.last_stage).all()
        if problem.num_stages > 1:
            slowest = max(evaluate(problem, tried.choice).stage_seconds)
            assert slowest <= frame.most_seconds


def test_least_bytes_is_where_plans_begin_to_fit():
    for problem, _ in small_cases()[:60]:
        untied = replace(problem, tie_groups=())
        least = least_bytes(untied)
        alike = np.full(problem.num_stages, least)

        enough = try_all(replace(untied, capacity_bytes=alike * ABOVE))
        too_small = try_all(replace(untied, capacity_bytes=alike * (1 - 1e-9)))

        assert enough.choice is not None
        assert too_small.choice is None


def test_a_cutoff_is_answered_by_a_bound_or_a_better_plan():
    for problem, tried in small_cases():
        if tried.choice is None:
            continue
        below = bound(problem, cutoff=tried.seconds * 0.999)
        above = bound(problem, cutoff=tried.seconds * 1.001)

        assert below.seconds >= tried.seconds * 0.999 * (1 - 1e-4)
        assert above.plan_seconds <= tried.seconds * 1.001


@pytest.mark.parametrize("num_ties", [2, 3])
def test_many_tie_groups_keep_the_bound_valid(num_ties):
    rng = np.random.default_rng(num_ties)
    found_plan = 0
    for _ in range(20):
        problem = program(
            rng,
            num_blocks=6,
            num_stages=2,
            zeros=(0, 1, 2, 3),
            recompute=(0,),
            num_ties=num_ties,
            tightness=0.6,
        )
        tried, found = try_all(problem), bound(problem)
        found_plan += found.stages is not None

        assert found.seconds <= tried.seconds * ABOVE
        assert found.plan_seconds >= tried.seconds / ABOVE
    assert found_plan >= 10


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("zeros", [(0, 1), (1, 2, 3)])
def test_large_models_are_proven_within_a_thousandth(num_stages, zeros):
    rng = np.random.default_rng(num_stages)
    problem = program(
        rng,
        num_blocks=82,
        num_stages=num_stages,
        zeros=zeros,
        num_kinds=3,
        tightness=0.7,
        num_microbatches=4 * num_stages,
    )
    start = time.process_time()
    found = bound(problem)
    seconds = time.process_time() - start

    assert found.seconds >= found.plan_seconds * (1 - 1e-3)
    assert seconds < 10  # usually below one


def test_the_same_program_gives_the_same_bound():
    problem, _ = small_cases()[0]

    assert bound(problem) == bound(problem)
