"""The simulator against known schedules and, on 1,000 random plans, against the program's objective."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Cluster
from planner.costs import Costs, Strategy
from planner.memory import Working
from planner.plan import Mesh
from planner.problem import Choice, Problem, evaluate
from planner.schedule import actions, in_flight
from planner.simulate import Stage, model_flop_utilisation, peak_bytes, run_pipeline, simulate
from tests.test_costs import GPT, gpt_graph, priced

# What the search allows for: see `planner.search`.
DELTA = 0.06


def even_stages(num_stages, forward=1.0, backward=2.0, send=0.0):
    return [Stage(forward_seconds=forward, backward_seconds=backward, send_seconds=send)] * num_stages


def split(num_blocks, num_stages, strategy=0):
    cuts = [round(p * num_blocks / num_stages) for p in range(num_stages + 1)]
    return [[(i, strategy) for i in range(a, b)] for a, b in pairwise(cuts)]


def test_a_stage_keeps_what_it_receives_in_the_buffer_that_it_came_in():
    costs = replace(priced(mesh=Mesh(pp=2, dp_shard=8), schedule="gpipe"), gradient_bytes=None)
    hidden = costs.hop_bytes[2]
    strategy = next(i for i, s in enumerate(costs.strategies) if s.recompute)
    stages = split(6, 2, strategy)

    counted_twice = peak_bytes(replace(costs, received_bytes=None), stages)
    peaks = peak_bytes(costs, stages)

    assert peaks[0] == counted_twice[0]
    assert peaks[1] == pytest.approx(counted_twice[1] - 4 * hidden)  # four micro-batches in flight


# --- the pipeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [8, 11, 32])
def test_even_stages_take_m_plus_p_minus_1_turns(schedule, num_stages, m):
    pipeline = run_pipeline(even_stages(num_stages), schedule, m)

    assert max(pipeline.end_seconds) == pytest.approx((m + num_stages - 1) * 3.0)


def test_two_stages_of_1f1b_by_hand():
    # Stage 0: F 1, B 2; stage 1: F 3, B 4; each message 0.5; m = 2.
    stages = [
        Stage(forward_seconds=1.0, backward_seconds=2.0, send_seconds=0.5),
        Stage(forward_seconds=3.0, backward_seconds=4.0),
    ]
    pipeline = run_pipeline(stages, "1f1b", 2)
    spans = [(e.stage, e.phase[0], e.micro_batch, e.start_seconds, e.end_seconds) for e in pipeline.events]

    # Stage 1 receives at 1.5, is done with f0 and b0 at 8.5; then gradient 0 and activation 1 pass together.
    assert sorted(spans) == [
        (0, "b", 0, 9.0, 11.0), (0, "b", 1, 16.5, 18.5), (0, "f", 0, 0.0, 1.0), (0, "f", 1, 1.0, 2.0),
        (1, "b", 0, 4.5, 8.5), (1, "b", 1, 12.0, 16.0), (1, "f", 0, 1.5, 4.5), (1, "f", 1, 9.0, 12.0),
    ]  # fmt: skip
    assert pipeline.end_seconds == (18.5, 16.5)


def test_gpipe_by_hand():
    pipeline = run_pipeline(even_stages(2, send=0.25), "gpipe", 2)

    # f0 arrives at 1.25; stage 1 takes f1 when it is done with f0, at 2.25 + 0.25, and ends at 3.5; its b0 5.5, b1 7.5.
    # Stage 0 waits for the gradients: 5.5 + 0.25 + 2, 7.75 + 0.25 + 2.
    assert pipeline.end_seconds == pytest.approx((10.0, 8.0))


def test_messages_cost_every_turn_of_1f1b():
    slow, fast = (max(run_pipeline(even_stages(4, send=s), "1f1b", 32).end_seconds) for s in (0.1, 0.0))

    # An inner stage exchanges with both neighbours in every turn.
    assert slow - fast == pytest.approx(2 * 0.1 * 32, rel=0.2)


@given(
    st.lists(st.tuples(*[st.floats(0.01, 1.0)] * 3), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from(["gpipe", "1f1b"]),
)
def test_no_stage_is_in_two_places_and_nothing_comes_too_early(times, m, schedule):
    stages = [Stage(forward_seconds=f, backward_seconds=b, send_seconds=s) for f, b, s in times]
    pipeline = run_pipeline(stages, schedule, m)
    end = {(e.stage, e.phase, e.micro_batch): e.end_seconds for e in pipeline.events}
    start = {(e.stage, e.phase, e.micro_batch): e.start_seconds for e in pipeline.events}

    for p in range(len(stages)):
        order = [(p, a.phase, a.micro_batch) for a in actions(schedule, p, len(stages), m)]
        assert all(end[a] <= start[b] for a, b in pairwise(order))
        for i in range(m):
            if p:
                assert start[p, "forward", i] >= end[p - 1, "forward", i] + stages[p - 1].send_seconds - 1e-9
                assert start[p - 1, "backward", i] >= end[p, "backward", i] + stages[p - 1].send_seconds - 1e-9


@given(st.integers(2, 6), st.integers(1, 12), st.sampled_from(["gpipe", "1f1b"]))
def test_more_micro_batches_make_the_bubble_smaller(num_stages, m, schedule):
    few, many = (max(run_pipeline(even_stages(num_stages), schedule, k).end_seconds) / k for k in (m, m + 1))

    assert many < few


# --- a whole step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_even_stages_is_the_known_one(schedule):
    costs = synthetic(4, 8, 12, schedule)

    result = simulate(costs, split(8, 4), schedule, 12)

    assert result.bubble == pytest.approx(3 / (12 + 3))


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(dp_shard=8), Mesh(pp=2, dp_replicate=2, dp_shard=4), Mesh(pp=2, dp_replicate=4)]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_parts_add_up_to_the_step(mesh, schedule):
    costs = priced(gpt_graph(tied=True), mesh=mesh, schedule=schedule)
    for strategy in range(len(costs.strategies)):
        result = simulate(costs, split(6, mesh.pp, strategy), schedule, 4)

        assert sum(seconds for _, seconds in result.parts_seconds) == pytest.approx(result.step_seconds)
        assert all(seconds >= 0 for _, seconds in result.parts_seconds)


def test_one_stage_is_the_objective_itself():
    costs = priced(mesh=Mesh(dp_shard=8))
    stages = [[(i, 2 * (i % 3)) for i in range(6)]]

    assert simulate(costs, stages, "1f1b", 4).step_seconds == pytest.approx(objective(costs, stages))


def test_gradients_of_a_tied_parameter_wait_for_both_stages():
    untied = priced(gpt_graph(tied=True), mesh=Mesh(pp=2, dp_shard=8))
    free = replace(untied, tie_groups=())
    with_ties, without = (simulate(c, split(6, 2), "1f1b", 4) for c in (untied, free))

    assert with_ties.step_seconds - without.step_seconds == pytest.approx(untied.tie_seconds[0, 0])


def test_stages_hold_no_more_than_the_program_believes():
    for mesh in (Mesh(dp_replicate=2, dp_shard=8), Mesh(pp=3, dp_shard=4), Mesh(pp=3, dp_replicate=4)):
        for schedule in ("gpipe", "1f1b"):
            costs = priced(mesh=mesh, schedule=schedule)
            for strategy in range(len(costs.strategies)):
                stages = split(6, mesh.pp, strategy)
                held = evaluate(problem_of(costs), choice_of(stages)).stage_bytes
                believed = np.array(held) + costs.stage_bytes

                assert (np.array(peak_bytes(costs, stages)) <= believed * (1 + 1e-12)).all()


def test_utilisation_counts_no_recomputation():
    cluster = Cluster.load("1x8xA100-80GB")
    peak = cluster.device.peak_flop_per_second["bfloat16"]

    assert model_flop_utilisation(GPT, cluster, num_devices=8, global_batch=16, step_seconds=2.0) == pytest.approx(
        GPT.flop_per_sample() * 16 / (8 * peak * 2.0)
    )


def test_the_same_plan_gives_the_same_events():
    costs = priced(mesh=Mesh(pp=3, dp_shard=2))

    assert simulate(costs, split(6, 3), "1f1b", 4) == simulate(costs, split(6, 3), "1f1b", 4)


@pytest.mark.parametrize(
    ("stages", "schedule", "words"),
    [
        ([[(0, 0)], []], "1f1b", "2 nonempty stages are needed"),
        ([[(0, 0)], [(2, 0), (1, 0), (3, 0), (4, 0), (5, 0)]], "1f1b", "every block once and in order"),
        (split(6, 2), "gpipe", "priced for 1f1b with m = 4, not for gpipe"),
    ],
    ids=["empty", "order", "schedule"],
)
def test_a_plan_that_is_none_is_refused(stages, schedule, words):
    with pytest.raises(ValueError, match=words):
        simulate(priced(mesh=Mesh(pp=2, dp_shard=2)), stages, schedule, 4)


# --- the program's objective ----------------------------------------------------------------------


def problem_of(costs):
    names = (
        "num_stages", "num_microbatches", "seconds", "sync_seconds", "state_bytes", "activation_bytes",
        "transient_bytes", "cut_seconds", "cut_bytes", "in_flight", "capacity_bytes", "strategy_zero",
        "strategy_recompute", "stage_seconds", "fixed_seconds", "tie_groups",
    )  # fmt: skip
    return Problem(**{name: getattr(costs, name) for name in names})


def choice_of(stages):
    return Choice(
        stages=tuple(p for p, part in enumerate(stages) for _ in part),
        strategies=tuple(strategy for part in stages for _, strategy in part),
    )


def objective(costs, stages):
    return evaluate(problem_of(costs), choice_of(stages)).seconds


def synthetic(num_stages, num_blocks, m, schedule):
    """Equal blocks of 1 s forward and 2 s backward, 3 s with recomputation; all else is free."""
    one, none = np.ones((num_blocks, 2)), np.zeros((num_blocks, 2))
    names = ("gathered", "gradient", "reduce_input", "reduction", "summed", "forward", "backward")
    return Costs(
        mesh=Mesh(pp=num_stages, dp_shard=2), micro_batch=1, num_microbatches=m, schedule=schedule, precision="bf16",
        optimizer="adamw", strategies=(Strategy(1, 0), Strategy(1, 1)),
        forward_seconds=one, backward_seconds=one * [2.0, 3.0], exposed_seconds=none, exposed_forward_seconds=none,
        gather_seconds=none,
        reduce_seconds=none, optimizer_seconds=none, tie_seconds=none, state_bytes=none, activation_bytes=none,
        transient_bytes=none, working=Working(**dict.fromkeys(names, none)), hop_seconds=np.zeros(num_blocks - 1),
        hop_bytes=np.zeros(num_blocks - 1), prelude_seconds=0.0, pass_seconds=0.0, prelude_bytes=0.0, input_bytes=0.0,
        unused_bytes=0.0, norm_seconds=0.0,
        in_flight=np.array([in_flight(schedule, p, num_stages, m) for p in range(num_stages)]), capacity=1.0,
        tie_groups=(),
    )  # fmt: skip


def random_costs(rng, num_stages, num_blocks, m, schedule):
    """An embedding, equal layers and a head; messages to 10 %, gathers to 200 % of a layer's forward pass."""
    costs = synthetic(num_stages, num_blocks, m, schedule)
    work, width = np.ones((num_blocks, 1)), np.ones((num_blocks, 1))
    work[0], work[-1] = rng.uniform(0.0, 0.3), rng.uniform(0.3, 4.0)
    width[0] = width[-1] = rng.uniform(0.2, 4.0)
    ratio = rng.uniform(1.8, 2.2)
    gather = np.repeat(rng.uniform(0.0, 2.0) * width, 2, axis=1)
    return replace(
        costs,
        forward_seconds=np.repeat(work, 2, axis=1),
        backward_seconds=work * [ratio, ratio + 1],
        hop_seconds=np.full(num_blocks - 1, rng.uniform(0.0, 0.1) if num_stages > 1 else 0.0),
        gather_seconds=gather,
        reduce_seconds=2 * gather,
        optimizer_seconds=rng.uniform(0.0, 0.3) * gather,
    )


def best_cuts(costs, strategy):
    """Stage limits that make the slowest stage fastest, which is what the program looks for."""
    num_blocks, num_stages = len(strategy), costs.num_stages
    done = np.concatenate([[0.0], np.cumsum(costs.seconds[np.arange(num_blocks), strategy])])
    cut = np.concatenate([[0.0], costs.cut_seconds])
    best = {0: (0.0, [0])}
    for p in range(1, num_stages + 1):
        ends = [num_blocks] if p == num_stages else range(p, num_blocks)
        best = {
            end: min((max(slowest, done[end] - done[a] + cut[a]), [*limits, end])
                     for a, (slowest, limits) in best.items() if a < end)
            for end in ends if min(best) < end
        }  # fmt: skip
    return best[num_blocks][1]


def random_plan(rng, *, solved):
    num_stages = int(rng.choice([1, 2, 4, 8]))
    num_blocks = int(rng.integers(3 * num_stages, 10 * num_stages)) + 3
    m = int(rng.integers(max(2, num_stages), 8 * num_stages + 1))
    costs = random_costs(rng, num_stages, num_blocks, m, str(rng.choice(["gpipe", "1f1b"])))
    kind = rng.integers(0, 3)  # all without recomputation, all with it, mixed
    strategy = rng.integers(0, 2, num_blocks) if kind == 2 else np.full(num_blocks, kind)
    inner = sorted(rng.choice(np.arange(1, num_blocks), num_stages - 1, replace=False).tolist())
    limits = best_cuts(costs, strategy) if solved else [0, *inner, num_blocks]
    return costs, [[(i, int(strategy[i])) for i in range(a, b)] for a, b in pairwise(limits)]


def differences(seed, count, *, solved):
    rng = np.random.default_rng(seed)
    plans = [random_plan(rng, solved=solved) for _ in range(count)]
    return np.array(
        [objective(c, s) / simulate(c, s, c.schedule, c.num_microbatches).step_seconds - 1 for c, s in plans]
    )


@pytest.mark.timeout(300)
def test_the_objective_agrees_with_the_simulator_on_1000_random_plans(record_property, capsys):
    solved = differences(0, 1000, solved=True)
    anywhere = differences(1, 300, solved=False)
    with capsys.disabled():
        for name, found in (("cut where the program would", solved), ("cut anywhere", anywhere)):
            low, p1, middle, p99, high = 100 * np.percentile(found, [0, 1, 50, 99, 100])
            print(  # noqa: T201
                f"\nobjective / simulator - 1, {len(found)} plans {name}: min {low:.2f} %, 1st percentile {p1:.2f} %, "
                f"median {middle:.2f} %, 99th {p99:.2f} %, max {high:.2f} %"
            )
    record_property("delta", float(np.abs(solved).max()))

    assert np.abs(solved).max() <= DELTA
    assert np.percentile(np.abs(solved), 99) <= 0.035
    assert anywhere.min() >= -DELTA
    assert np.median(np.abs(anywhere)) <= DELTA / 2
