"""A user's plan with the times of another training system: those of `autoplan validate`, by the same code."""

import json
from dataclasses import replace

import numpy as np
import pytest

from planner.cli import main
from planner.cluster import Cluster
from planner.costs import inside_seconds, least_seconds, price
from planner.engine import STOCK, engine_named
from planner.engine_seconds import engine_costs, least_engine_seconds
from planner.errors import ClusterError, PlanError
from planner.interval import with_interval
from planner.plan import Mesh, Plan
from planner.profile import Profile
from planner.runtime.machine import this_machine
from planner.search import ranked_plans, search, search_model
from planner.shard.chain import AxisSplit
from planner.simulate import simulate
from planner.trace import trace
from planner.validate.cases import case_of
from planner.validate.models import rank_graph
from planner.validate.price import predict, shares
from planner.zoo import build
from tests.command_line import TWO_CORES
from tests.published_rows import OWN_ROW

ENGINES = ("ddp", "deepspeed", "internevo", "megatron", "megatron-core", "megatron-core-tests", "stock")
pytestmark = pytest.mark.usefixtures("own_trace_cache")
ROW = OWN_ROW


@pytest.fixture(scope="module")
def graph():
    module, batch = build("gpt-tiny", device="meta")
    return trace(module, batch, precision="bf16", name="gpt-tiny")


def both(engine, mesh, zero, recompute, **changes):
    """Seconds of a step by `validate`, and by the tables of a plan."""
    full = "full" if recompute else "none"
    case = case_of(replace(ROW, zero_stage=zero, activation_recompute=full, **changes))
    case = replace(case, engine=engine_named(engine))
    rank = rank_graph(case.key(case.stages[0]), case.spec.layers)
    costs = price(
        rank.graph, case.cluster, mesh=mesh, micro_batch=2, num_microbatches=case.num_microbatches, schedule="1f1b",
        precision="bf16", optimizer="adamw",
    )  # fmt: skip
    costs = engine_costs(costs, rank.graph, case.cluster, case.engine)
    column = {(s.zero, s.recompute): index for index, s in enumerate(costs.strategies)}
    chosen = [
        (index, column[zero, recompute * (block.kind == "block")]) for index, block in enumerate(rank.graph.blocks)
    ]
    half = len(chosen) // 2
    stages = [chosen] if mesh.pp == 1 else [chosen[:half], chosen[half:]]
    return predict(case).seconds, simulate(costs, stages, "1f1b", case.num_microbatches).step_seconds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("mesh", "zero", "recompute"),
    [(Mesh(dp_replicate=4), 0, 0), (Mesh(dp_shard=4), 1, 1), (Mesh(dp_shard=4), 2, 0), (Mesh(dp_shard=4), 3, 1)],
    ids=str,
)
def test_a_plan_takes_what_validate_says_of_the_engine(engine, mesh, zero, recompute):
    validated, planned = both(engine, mesh, zero, recompute)
    assert planned == pytest.approx(validated, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_of_a_pipeline_too(engine):
    validated, planned = both(engine, Mesh(pp=2, dp_replicate=2), 0, 0, pp=2, dp=2, global_batch=32)
    assert planned == pytest.approx(validated, rel=0.02)  # stages of unequal parameters, which come in one piece each


def test_of_a_pipeline_of_split_layers_too():
    """Messages in parts: the tables of a plan and a row have the same."""
    row = replace(ROW, pp=2, tp=2, dp=1, hidden=2048, heads=16, seq_len=2048, gpus_per_node=2)
    case = replace(case_of(row), engine=replace(engine_named("megatron"), hop_seconds=0.0))
    rank, mesh = rank_graph(case.key(case.stages[0]), case.spec.layers), Mesh(pp=2, tp=2)
    costs = price(
        rank.graph, case.cluster, mesh=mesh, micro_batch=2, num_microbatches=4, schedule="1f1b", precision="bf16",
        optimizer="adamw", splits=[AxisSplit(axis=a, degree=d, shardings=rank.shardings) for a, d in mesh.splits],
    )  # fmt: skip
    parts = engine_costs(costs, rank.graph, case.cluster, case.engine).hop_seconds
    whole = engine_costs(costs, rank.graph, case.cluster, replace(case.engine, scatters_messages=False)).hop_seconds
    np.testing.assert_array_equal(whole, costs.hop_seconds)
    np.testing.assert_array_equal(parts, shares(case)[0].priced.scattered_seconds)
    assert (parts < whole).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_shard=4), Mesh(pp=2, dp_replicate=2)], ids=str)
def test_no_strategy_is_faster_than_the_bound(engine, mesh, graph):
    cluster, software = Cluster.load("1x4xA100-80GB"), engine_named(engine)
    costs = price(
        graph, cluster, mesh=mesh, micro_batch=2, num_microbatches=4, schedule="1f1b", precision="bf16",
        optimizer="adamw",
    )  # fmt: skip
    changed = engine_costs(costs, graph, cluster, software)
    least = least_engine_seconds(graph, cluster, engine=software, mesh=mesh, micro_batch=2)
    passes = changed.seconds.sum(axis=0) + changed.stage_seconds
    assert least <= passes.min() * (1 + 1e-12)
    if not software.by_block and mesh.shards == 1:  # nothing but the passes
        assert least == pytest.approx(passes.min())
    if engine != STOCK:
        assert least != least_seconds(graph, cluster, mesh=mesh, micro_batch=2)
    np.testing.assert_array_equal(changed.state_bytes, costs.state_bytes)  # bytes stay


@pytest.mark.parametrize("engine", ["megatron", "megatron-core", "deepspeed"])
def test_collectives_inside_of_blocks_take_an_engines_time_in_the_bound(engine):
    software, mesh = engine_named(engine), Mesh(dp_replicate=2, tp=2)
    case = case_of(replace(ROW, dp=2, tp=2))
    rank = rank_graph(case.key(case.stages[0]), case.spec.layers)
    # Without the processor's time, that of collectives shows.
    quick = replace(software, dispatch=0.0, block_dispatches=0.0)
    costs = price(
        rank.graph, case.cluster, mesh=mesh, micro_batch=2, num_microbatches=4, schedule="1f1b", precision="bf16",
        optimizer="adamw",
        splits=[AxisSplit(axis=axis, degree=degree, shardings=rank.shardings) for axis, degree in mesh.splits],
    )  # fmt: skip
    changed = engine_costs(costs, rank.graph, case.cluster, quick)
    passes = changed.seconds.sum(axis=0) + changed.stage_seconds
    least = least_engine_seconds(rank.graph, case.cluster, engine=quick, mesh=mesh, micro_batch=2)
    assert least == pytest.approx(passes.min())
    twice = replace(quick, collectives=2 * quick.collectives)
    inside = inside_seconds(costs).sum()
    assert least_engine_seconds(
        rank.graph, case.cluster, engine=twice, mesh=mesh, micro_batch=2
    ) - least == pytest.approx(quick.collectives * inside)


def test_the_search_finds_the_best_plan_of_an_engine(graph):
    cluster, megatron = Cluster.load("1x2xA100-80GB"), engine_named("megatron")
    free = search(graph, cluster, global_batch=4, top=1, engine=megatron).plans[0]
    each = [
        search(graph, cluster, global_batch=4, top=1, engine=megatron, pins=pins).plans[0].prediction.step_seconds
        for pins in (
            {"devices": 1, "num_microbatches": 1}, {"dp": 2, "zero": 0, "num_microbatches": 1}, {"pp": 2},
            {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3},
        )
    ]  # fmt: skip
    assert free.engine == "megatron"
    assert free.prediction.step_seconds <= min(each) * (1 + 1e-3)
    assert free.prediction.step_seconds == pytest.approx(min(each), rel=1e-3)
    stock = search(graph, cluster, global_batch=4, top=1).plans[0]
    assert stock.engine == "stock"
    assert stock.prediction.step_seconds != free.prediction.step_seconds


def test_stock_is_what_is_planned_without_an_engine():
    module, batch = build("mlp-tiny", device="meta")
    without = ranked_plans(module, "1x2xA100-80GB", batch=batch, global_batch=8)
    assert ranked_plans(module, "1x2xA100-80GB", batch=batch, global_batch=8, engine="stock") == without
    assert "engine" not in without[0].to_dict()


def test_a_plan_states_its_engine(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["plan", "mlp-tiny", "--cluster", "1x2xA100-80GB", "--global-batch", "8", "--engine", "megatron"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert "note: the times are those of megatron" in capsys.readouterr().out
    assert Plan.load(out).engine == "megatron"
    assert main(["show", str(out)]) == 0
    assert ", times of megatron\n" in capsys.readouterr().out
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["engine"] == "megatron"
    with pytest.raises(PlanError, match="engine must be text"):
        Plan.loads(json.dumps({**data, "engine": 3}))


def test_what_has_no_times_of_an_engine_is_refused():
    module, batch = build("mlp-tiny", device="meta")
    with pytest.raises(ClusterError, match=r"no engine is named 'megaton'; known are .*megatron"):
        search_model(module, "1x2xA100-80GB", batch=batch, engine="megaton")
    with pytest.raises(PlanError, match="known on GPUs only"):
        search_model(module, Cluster.load(TWO_CORES), batch=batch, engine="megatron")
    profile = Profile(machine=this_machine("cpu", 1))
    with pytest.raises(PlanError, match="leave out one of the two"):
        search_model(module, "1x2xA100-80GB", batch=batch, engine="megatron", profile=profile)


def test_the_run_of_a_plan_of_another_engine_says_so(tmp_path, capsys, monkeypatch):
    cluster = Cluster.load(TWO_CORES)
    module, batch = build("mlp-tiny", device="meta")
    plan = ranked_plans(module, cluster, batch=batch, global_batch=8, top=1, name="mlp-tiny", fix="devices=1")[0]
    plan = replace(plan, engine="megatron", prediction=with_interval(plan.prediction))
    plan.save(tmp_path / "plan.json")

    def launch(*_arguments, **_options):
        raise PlanError("the test ends here")

    monkeypatch.setattr("planner.cli.launch", launch)
    assert main(["run", "mlp-tiny", "--cluster", TWO_CORES, "--plan", str(tmp_path / "plan.json")]) == 1
    assert "warning: the plan has the times of megatron; stock PyTorch, which runs it" in capsys.readouterr().err
