from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.problem import Choice, Problem, canonical, evaluate, thin
from tests.brute_force import program, small_cases, try_all


def two_stages(**changes: Any) -> Problem:
    """Three blocks on two stages, four micro-batches; strategies: ZeRO-0, ZeRO-0 with recomputation, ZeRO-3."""
    problem = Problem(
        num_stages=2,
        num_microbatches=4,
        seconds=np.array([[1.0, 2.0, 4.0], [3.0, 5.0, 6.0], [7.0, 9.0, 8.0]]),
        sync_seconds=np.array([[0.5, 0.25, 0.0], [1.0, 1.0, 0.0], [2.0, 2.0, 0.0]]),
        state_bytes=np.array([[10.0, 10.0, 5.0]] * 3),
        activation_bytes=np.array([[4.0, 1.0, 4.0]] * 3),
        transient_bytes=np.array([[1.0, 3.0, 2.0], [1.0, 1.0, 1.0], [6.0, 7.0, 8.0]]),
        cut_seconds=np.array([100.0, 0.5]),
        cut_bytes=np.array([1000.0, 3.0]),
        stage_seconds=0.25,
        stage_bytes=2.0,
        fixed_seconds=0.125,
        in_flight=np.array([2, 1]),
        capacity_bytes=np.array([35.0, 25.0]),
        strategy_zero=np.array([0, 0, 3]),
        strategy_recompute=np.array([0, 1, 0]),
    )
    return replace(problem, **changes)


def test_step_and_bytes_by_hand():
    result = evaluate(two_stages(), Choice(stages=(0, 0, 1), strategies=(1, 0, 0)))

    # stage 0: 2 + 3 + 0.25; stage 1: 7 + 0.5 (cut) + 0.25
    assert result.stage_seconds == (5.25, 7.75)
    # stage 0: 20 + 2 * 5 + 3 + 2; stage 1: 10 + 4 + 6 + 3 + 2
    assert result.stage_bytes == (35.0, 25.0)
    # 13 + 3 * 7.75 + max(1.25, 2) + 0.125
    assert result.seconds == 38.375
    assert result.feasible


@pytest.mark.parametrize("p", [0, 1])
def test_one_byte_too_many_does_not_fit(p):
    capacity = np.array([35.0, 25.0])
    capacity[p] -= 1

    result = evaluate(two_stages(capacity_bytes=capacity), Choice(stages=(0, 0, 1), strategies=(1, 0, 0)))

    assert not result.feasible
    assert result.broken == f"stage {p} needs {capacity[p] + 1:.0f} bytes and has {capacity[p]:.0f}"
    assert result.seconds == 38.375  # priced all the same


def test_rules_are_named_when_broken():
    roomy = {"capacity_bytes": np.array([1e9, 1e9])}
    mixed = evaluate(two_stages(**roomy), Choice(stages=(0, 0, 1), strategies=(0, 2, 0)))
    tied = evaluate(two_stages(tie_groups=((0, 2),), **roomy), Choice(stages=(0, 0, 1), strategies=(0, 0, 2)))
    pinned = np.ones((3, 3), bool)
    pinned[1, 0] = False
    forbidden = evaluate(two_stages(allowed=pinned, **roomy), Choice(stages=(0, 0, 1), strategies=(0, 0, 0)))

    assert mixed.broken == "stage 0 mixes classes of ZeRO stages"
    assert tied.broken == "tied blocks (0, 2) differ in their ZeRO stage"
    assert forbidden.broken == "strategy 0 is not allowed for block 1"


def test_without_a_pipeline_any_mix_is_one_class():
    problem = program(np.random.default_rng(0), num_blocks=4, num_stages=1, tightness=0)

    assert evaluate(problem, Choice(stages=(0,) * 4, strategies=(0, 2, 4, 6))).feasible


@pytest.mark.parametrize("stages", [(0, 1, 0), (1, 1, 1), (0, 0, 0), (0, 0, 2), (0, 1)])
def test_stages_out_of_order_are_refused(stages):
    with pytest.raises(ValueError, match=r"stages must be|a choice for 3 blocks"):
        evaluate(two_stages(), Choice(stages=stages, strategies=(0,) * len(stages)))


def test_arrays_are_checked_and_read_only():
    with pytest.raises(ValueError, match=r"seconds must have the shape \(3, 3\)"):
        two_stages(sync_seconds=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="finite"):
        two_stages(cut_bytes=np.array([np.nan, 0.0]))
    with pytest.raises(ValueError, match="do not make 4 nonempty stages"):
        two_stages(num_stages=4)
    with pytest.raises(ValueError, match="read-only"):
        two_stages().seconds[0, 0] = 1.0


def test_the_oracle_and_the_evaluator_agree():
    for problem, tried in small_cases():
        if tried.choice is not None:
            judged = evaluate(problem, tried.choice)

            assert judged.feasible
            assert judged.seconds == pytest.approx(tried.seconds, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_thinning_costs_at_most_epsilon(epsilon):
    removed = 0
    for problem, tried in small_cases():
        thinned = thin(problem, epsilon)
        removed += int(problem.allowed.sum() - thinned.allowed.sum())
        after = try_all(thinned).seconds

        assert tried.seconds <= after <= tried.seconds * (1 + epsilon) * (1 + 1e-12)
    assert removed > 50


def test_equal_blocks_of_a_stage_are_put_in_order():
    rng = np.random.default_rng(0)
    problem = program(rng, num_blocks=6, num_stages=2, num_kinds=1, tightness=0)
    choice = Choice(stages=(0, 0, 0, 1, 1, 1), strategies=(1, 0, 1, 7, 4, 5))

    ordered = canonical(problem, choice)

    assert ordered == Choice(stages=(0, 0, 0, 1, 1, 1), strategies=(0, 1, 1, 4, 5, 7))
    assert evaluate(problem, ordered).seconds == pytest.approx(evaluate(problem, choice).seconds)
