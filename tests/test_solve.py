import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.bound import bound, relax
from planner.errors import InfeasibleError, SolverError, TimeLimitError
from planner.problem import Choice, Problem, evaluate
from planner.solve import solve, solve_together
from tests.brute_force import program, small_cases, small_programs, try_all

ROOT = Path(__file__).parents[1]


def test_the_small_cases_are_the_mix_that_was_asked_for(capsys):
    cases = small_cases()
    infeasible = sum(tried.choice is None for _, tried in cases)
    binding = sum(
        tried.choice is not None and tried.seconds > tried.seconds_without_memory * (1 + 1e-9) for _, tried in cases
    )
    tied = sum(bool(problem.tie_groups) for problem, _ in cases)
    with capsys.disabled():
        print(f"\n{len(cases)} cases: {binding} memory-bound, {infeasible} infeasible, {tied} tied")  # noqa: T201

    assert len(cases) == 200
    assert binding >= 60
    assert infeasible >= 20
    assert tied >= 40


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bounded": False, "form": "counts"},
        {"bounded": False, "form": "assignment"},
    ],
    ids=["bound and solver", "counts alone", "assignment alone"],
)
def test_solve_equals_trying_all(how):
    for problem, tried in small_cases():
        if tried.choice is None:
            with pytest.raises(InfeasibleError, match="no plan fits"):
                solve(problem, **how)
            continue
        solution = solve(problem, gap=0.0, **how)

        assert solution.seconds == pytest.approx(tried.seconds, rel=1e-6)
        assert solution.lower_bound_seconds <= tried.seconds * (1 + 1e-9)
        assert solution.status == "optimal"
        judged = evaluate(problem, solution.choice)
        assert judged.feasible
        assert judged.seconds == solution.seconds


def test_a_wrong_model_would_be_noticed():
    # Without the ties, or with one class for all, many optima differ: the oracle sees both.
    ties = sum(
        try_all(replace(problem, tie_groups=())).seconds < tried.seconds * (1 - 1e-6)
        for problem, tried in small_cases()
        if problem.tie_groups and tried.choice is not None
    )

    assert ties >= 5


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "one program"])
def test_solving_together_gives_the_best_of_all(bounded):
    rng = np.random.default_rng(5)
    problems = small_programs(60, seed=3)
    infeasible = 0
    for case in range(10):
        group = [problems[int(i)] for i in rng.choice(len(problems), 4, replace=False)]
        weights = [1.0] * 4 if case % 2 else [float(w) for w in rng.integers(1, 9, 4)]
        values = [w * try_all(p).seconds for w, p in zip(weights, group, strict=True)]
        infeasible += sum(np.isinf(values))
        index, solution = solve_together(group, gap=0.0, weights=weights, bounded=bounded)

        assert weights[index] * solution.seconds == pytest.approx(min(values), rel=1e-6)
        assert weights[index] * solution.lower_bound_seconds <= min(values) * (1 + 1e-9)
        assert evaluate(group[index], solution.choice).feasible
    assert infeasible > 0


def test_together_nothing_fits_only_when_nothing_fits():
    none = [problem for problem, tried in small_cases() if tried.choice is None][:3]

    with pytest.raises(InfeasibleError, match=r"a device needs at least .* and has"):
        solve_together(none)
    with pytest.raises(InfeasibleError):
        solve_together(none, bounded=False)


@pytest.mark.parametrize("seed", range(8))
def test_counts_assignment_and_bound_agree_on_longer_chains(seed):
    rng = np.random.default_rng(seed)
    problem = program(
        rng,
        num_blocks=int(rng.integers(12, 25)),
        num_stages=int(rng.integers(1, 4)),
        zeros=((0, 1), (2, 3), (1, 3))[seed % 3],
        num_kinds=int(rng.integers(2, 4)),
        num_ties=seed % 2,
        tightness=0.7,
    )
    known = bound(problem, gap=1e-5)
    results = [solve(problem, gap=1e-4, bounded=False, form=form) for form in ("counts", "assignment")]
    results.append(solve(problem, gap=1e-5))

    # Every method's lower bound against every other's plan: a wrong big-M shows here.
    best = min(known.plan_seconds, *(result.seconds for result in results))
    assert known.seconds <= best * (1 + 1e-9)
    for result in results:
        assert result.lower_bound_seconds <= best * (1 + 1e-7)
        assert result.seconds <= best * (1 + 2e-4)


def hard() -> tuple[Problem, Choice]:
    """A program that HiGHS alone does not finish at once, and a plan for it."""
    rng = np.random.default_rng(3)
    problem = program(rng, num_blocks=18, num_stages=4, zeros=(0, 3), tightness=0.75, num_microbatches=24)
    found = relax(problem)
    assert found.stages is not None
    assert found.strategies is not None
    return problem, Choice(stages=found.stages, strategies=found.strategies)


def test_a_stopped_search_is_not_called_best():
    problem, known = hard()

    solution = solve(problem, gap=1e-4, incumbent=known, node_limit=1, bounded=False)

    assert solution.status == "stopped"
    assert solution.lower_bound_seconds < solution.seconds * (1 - 1e-4)
    assert solution.gap > 1e-4


def test_not_found_in_time_is_not_infeasible():
    problem, known = hard()

    with pytest.raises(TimeLimitError, match="one may exist"):
        solve(problem, time_limit_seconds=0.0, bounded=False)
    stopped = solve(problem, incumbent=known, time_limit_seconds=0.0, bounded=False)
    assert stopped.status == "stopped"


def test_the_solver_confirms_what_the_bound_has_proven():
    rng = np.random.default_rng(7)
    large = [
        program(rng, num_blocks=82, num_stages=p, zeros=(1, 2, 3), num_kinds=3, tightness=0.7, num_microbatches=4 * p)
        for p in (1, 2, 4)
    ]
    small = [problem for problem, tried in small_cases()[:60] if tried.choice is not None]
    asked = 0
    for problem in large + small:
        by_bound = solve(problem)
        confirmed = solve(problem, confirm=True)
        asked += confirmed.nodes > 0

        assert confirmed.seconds <= by_bound.seconds
        assert confirmed.lower_bound_seconds <= by_bound.seconds
        assert confirmed.gap <= 1e-4
    assert asked >= 3  # the others its presolve answers


def test_what_is_known_is_used():
    problem, tried = next(case for case in small_cases() if case[1].choice is not None)
    known = solve(problem, incumbent=tried.choice, lower_bound=tried.seconds * (1 - 1e-5), bounded=False)

    assert known.nodes == 0
    assert known.status == "gap"
    assert known.lower_bound_seconds == tried.seconds * (1 - 1e-5)


def test_a_capacity_met_to_the_byte_is_used():
    for problem, tried in small_cases()[:60]:
        if tried.choice is None:
            continue
        held = evaluate(problem, tried.choice).stage_bytes
        exact = replace(problem, capacity_bytes=np.array(held))
        solution = solve(exact, gap=0.0)

        assert evaluate(exact, solution.choice).feasible
        assert solution.seconds == pytest.approx(tried.seconds, rel=1e-6)


def test_what_the_solver_rounds_is_judged_to_the_byte():
    # HiGHS takes a kilobyte too much for nothing: such a plan is refused, and the bound stays honest.
    refused = 0
    for problem, tried in small_cases()[:60]:
        if tried.choice is None:
            continue
        held = np.array(evaluate(problem, tried.choice).stage_bytes)
        short = replace(problem, capacity_bytes=held - 1)
        best = try_all(short)
        try:
            solution = solve(short, gap=0.0, bounded=False)
        except (InfeasibleError, SolverError):
            assert best.choice is None or best.seconds > tried.seconds * (1 + 1e-6)
            continue
        refused += solution.seconds > tried.seconds * (1 + 1e-6)

        assert evaluate(short, solution.choice).feasible
        assert solution.lower_bound_seconds <= best.seconds * (1 + 1e-9)
    assert refused >= 10


SCRIPT = """
from tests.brute_force import small_programs
from planner.errors import InfeasibleError
from planner.solve import solve, solve_together
for problem in small_programs(12, seed=11):
    for bounded in (True, False):
        try:
            print(repr(solve(problem, bounded=bounded)))
        except InfeasibleError as error:
            print(error)
print(repr(solve_together(small_programs(4, seed=12), bounded=False)))
"""


def test_every_process_gives_the_same_bytes_and_no_banner():
    outputs = []
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT],
            capture_output=True,
            cwd=ROOT,
            env=environment,
            check=True,
        )
        outputs.append(run.stdout)

        assert run.stderr == b""
    assert outputs[0] == outputs[1]
    lines = outputs[0].decode().splitlines()
    assert len(lines) == 25
    assert all(line.startswith(("Solution(", "no plan fits", "(")) for line in lines)
