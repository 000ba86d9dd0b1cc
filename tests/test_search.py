import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
import torch

from planner import Plan, PlannerError, autoplan, ranked_plans
from planner.cluster import Cluster
from planner.costs import price
from planner.errors import InfeasibleError, ModelError, PlanError
from planner.plan import Mesh
from planner.problem import Choice, evaluate, formulate
from planner.report import sharding_text
from planner.search import engine, ways_to_split
from planner.search.choices import Configuration, Pins, configurations
from planner.search.engine import Sharded, search
from planner.search.sharded import ShardedGraph
from planner.shard.stored import restored, stored
from planner.simulate import model_flop_utilisation
from planner.trace import trace
from planner.units import parse_bytes
from planner.zoo import build
from planner.zoo.mlp import MLP, MLPConfig
from planner.zoo.registry import batch_of_module

TIGHT = "1x4xA100-40GB"


@pytest.fixture(scope="module")
def graph():
    module, batch = build("gpt-tiny", device="meta")
    return trace(module, batch, precision="bf16", name="gpt-tiny")


@pytest.fixture(scope="module")
def large():
    module, batch = build("gpt3-6.7b", device="meta")
    return trace(module, batch, precision="bf16", name="gpt3-6.7b")


def test_configurations_use_up_the_global_batch_and_come_in_a_fixed_order():
    found = configurations(6, 8, 8, 12, Pins())

    assert found == sorted(set(found))
    assert all(c.dp * c.micro_batch * c.num_microbatches == 12 for c in found)
    assert {c.devices for c in found} == {1, 2, 3, 4, 6, 8}
    assert {c.pp for c in found} == {1, 2, 3, 4, 6}  # 8 stages would need 8 blocks
    assert all(c.num_microbatches >= c.pp for c in found if c.schedule == "1f1b" and c.pp > 1)


def test_device_counts_are_parts_of_a_node_and_whole_nodes():
    found = configurations(4, 24, 8, 48, Pins())

    assert {c.devices for c in found} == {1, 2, 3, 4, 6, 8, 16, 24}


def test_devices_that_share_out_the_batch_evenly_are_tried():
    """63 samples: seven of eight devices take nine each, where all eight would have to split tensors or layers."""

    def counts(num_devices: int, batch: int, pins: str = "") -> set[int]:
        return {c.devices for c in configurations(4, num_devices, 8, batch, Pins.of(pins), may_split=True)}

    assert counts(8, 64) == {1, 2, 4, 8}
    assert counts(8, 63) == {1, 2, 3, 4, 6, 7, 8}
    assert counts(8, 63, "dp=7") == {7}
    assert counts(56, 48 * 8) == {1, 2, 3, 4, 6, 8, 16, 32, 48}  # six of seven nodes


def test_pins_are_read_from_text_and_name_every_fault():
    assert Pins.of("pp=4, zero=1,recompute=full") == Pins(pp=4, zero=1, recompute="full")
    with pytest.raises(PlanError) as error:
        Pins.of("pp=0,zero=9,recompute=some,width=2,dp")

    for part in ("pp must be", "zero must be", "recompute must be", "'width' is none of", "'dp' has no value"):
        assert part in str(error.value)


def test_every_pin_holds_in_every_ranked_plan(graph):
    cluster = Cluster.load("1x8xA100-80GB")
    fixed = {"dp": 2, "zero": 3, "recompute": "full", "micro_batch": 2}

    plans = search(graph, cluster, global_batch=32, pins=fixed).plans

    assert plans
    for plan in plans:
        assert plan.mesh.dp == 2
        assert plan.micro_batch == 2
        assert all(b.zero == 3 and b.recompute == "full" for b in plan.block_plans)


def test_ranked_plans_are_of_different_configurations_best_first_and_within_the_gap(large):
    found = search(large, Cluster.load(TIGHT), global_batch=64)

    times = [plan.prediction.step_seconds for plan in found.plans]
    keys = [(p.mesh, p.micro_batch, p.num_microbatches, p.schedule) for p in found.plans]
    assert len(found.plans) == 5
    assert times == sorted(times)
    assert len(set(keys)) == len(keys)
    assert all(p.prediction.fits and p.prediction.gap <= 1e-3 for p in found.plans)
    assert found.statistics.gap <= 1e-3


def test_what_was_not_solved_is_closed_before_it_is_ranked(large, monkeypatch):
    """As if only the simulator's margin brought any of them in."""
    cluster = Cluster.load(TIGHT)
    exact = search(large, cluster, global_batch=64, top=3)
    limits = engine._Searcher._limits
    monkeypatch.setattr(
        engine._Searcher, "_limits", lambda self, candidates: replace(limits(self, candidates), last=0.0)
    )

    found = search(large, cluster, global_batch=64, top=3)

    assert [(p.mesh, p.micro_batch) for p in found.plans] == [(p.mesh, p.micro_batch) for p in exact.plans]
    assert [p.prediction.step_seconds for p in found.plans] == pytest.approx(
        [p.prediction.step_seconds for p in exact.plans], rel=engine.GAP
    )
    assert all(p.prediction.gap <= engine.GAP for p in found.plans)


@pytest.mark.parametrize("cluster", [TIGHT, "2x8xA100-40GB"])
def test_solving_whatever_could_rank_changes_no_ranking(large, cluster, monkeypatch):
    place = Cluster.load(cluster)
    found = search(large, place, global_batch=64)
    monkeypatch.setattr(engine, "RATIO_MARGIN", 1.0)  # then every candidate is closed

    every = search(large, place, global_batch=64)

    assert every.statistics.solved_exactly >= found.statistics.solved_exactly
    assert [(p.mesh, p.micro_batch) for p in found.plans] == [(p.mesh, p.micro_batch) for p in every.plans]
    assert [p.prediction.step_seconds for p in found.plans] == pytest.approx(
        [p.prediction.step_seconds for p in every.plans], rel=engine.GAP
    )


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_the_search_finds_the_best_of_all_configurations_and_choices(share):
    """Brute force over everything: configurations x cuts x strategies, on a cluster where memory binds."""
    module = MLP(MLPConfig(features=64, width=64, layers=2, classes=8))
    graph = trace(module, batch_of_module(module), precision="fp32", name="mlp")
    cluster = _with_memory(graph, share)
    found = search(graph, cluster, global_batch=4, precision="fp32", top=1)

    best = min(_brute_force(graph, cluster, c) for c in configurations(len(graph.blocks), 2, 2, 4, Pins()))

    assert _value(graph, cluster, found.plans[0]) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(("share", "axis"), [(0.2, "tp"), (1.0, "tp"), (1.1, "cp"), (2.0, "cp")])
def test_the_search_finds_the_best_way_to_split_the_model_too(share, axis):
    """Brute force over configurations x variants x cuts x strategies."""
    module = MLP(MLPConfig(features=64, width=64, layers=1, classes=8))
    graph = trace(module, batch_of_module(module), precision="fp32", name="mlp")
    cluster = _with_memory(graph, share)
    if axis == "cp":  # whole parameters on every rank need more
        cluster = _with_bytes(cluster, share * cluster.capacity_bytes)
    # ways for a slow device, which splits even a tiny model; the first may be to split nothing at this size
    peaks = {dtype: peak / 1e6 for dtype, peak in cluster.device.peak_flop_per_second.items()}
    slow = replace(cluster, device=replace(cluster.device, peak_flop_per_second=peaks)) if axis == "cp" else cluster
    sharded = functools.cache(ways_to_split(graph, slow, 4, "cuda"))
    assert all(way.divides for way in sharded((axis, 2))[1:])
    ways = [index for index, way in enumerate(sharded((axis, 2))) if way.divides]
    assert ways
    useful = functools.cache(lambda *splits: tuple(sharded(*splits)[way] for way in ways))
    free = {} if axis == "tp" else {axis: 2}  # samples are short
    found = search(graph, cluster, global_batch=4, precision="fp32", top=8, sharded=sharded, pins=free)

    split = configurations(len(graph.blocks), 2, 2, 4, Pins.of({axis: 2}), may_split=True)
    assert {c.devices for c in split} == {2}
    best = min(
        _brute_force(graph, cluster, replace(c, variant=variant), useful) for c in split for variant in range(len(ways))
    )
    plans = [plan for plan in found.plans if getattr(plan.mesh, axis) == 2]
    times = [
        _value(graph, cluster, plan, useful, variant) for plan in plans for variant in range(len(ways))
        if stored(useful((axis, 2))[variant].splits[0].shardings, axis)[0] == _bare(plan)
    ]  # fmt: skip
    assert plans
    assert min(times) == pytest.approx(best, rel=1e-3)


def test_tensor_parallel_plans_say_how_every_block_is_split(graph):
    cluster = Cluster.load("1x8xA100-80GB")
    sharded = ways_to_split(graph, cluster, 16, "cuda")
    pins = {"tp": 2, "pp": 2, "dp": 2, "zero": 3}
    plan = search(graph, cluster, global_batch=16, pins=pins, sharded=sharded).plans[0]
    per_block = [block.shardings for block in plan.block_plans]

    assert plan.mesh == Mesh(pp=2, dp_shard=2, tp=2)
    assert Plan.loads(plan.dumps()) == plan
    assert {len(indices) for indices in per_block} == {1}
    assert restored(graph, plan.shardings, [index for (index,) in per_block], 2) in [
        way.splits[0].shardings for way in sharded(("tp", 2))
    ]
    assert plan.prediction.mfu == pytest.approx(
        model_flop_utilisation(
            graph, cluster, num_devices=8, global_batch=16, step_seconds=plan.prediction.step_seconds
        )
    )
    text = sharding_text(plan)
    assert "features split 2 ways" in text
    assert "all_" in text


def test_a_fixed_degree_that_divides_no_node_uses_as_many_devices_as_it_can():
    found = configurations(6, 16, 8, 12, Pins(tp=3), may_split=True)

    assert {c.tp for c in found} == {3}
    assert max(c.devices for c in found) == 15  # 5 stages
    assert all(c.pp * c.dp * c.tp == c.devices for c in found)


def test_a_way_to_split_that_fails_is_left_out_with_the_reason_or_refused_if_it_is_fixed(graph):
    def sharded(*splits):
        raise PlanError(f"no luck with {splits[0][1]}")

    cluster = Cluster.load("1x2xA100-80GB")
    found = search(graph, cluster, global_batch=8, sharded=sharded).plans

    assert "tp=2 is left out: no luck with 2" in found[0].notes
    with pytest.raises(PlanError, match="no luck with 2"):
        search(graph, cluster, global_batch=8, sharded=sharded, pins="tp=2")


def _bare(plan: Plan):
    """The shardings without the words for people."""
    return tuple(replace(sharding, words=(), collectives=()) for sharding in plan.shardings)


def _with_memory(graph, share: float) -> Cluster:
    """Two devices with memory between what the leanest plan and what the fastest plan needs."""
    cluster = Cluster.load("1x2xA100-40GB")
    needed = max(search(graph, cluster, global_batch=4, precision="fp32", top=1).plans[0].prediction.peak_bytes)
    with pytest.raises(InfeasibleError) as error:
        search(graph, _with_bytes(cluster, 1), global_batch=4, precision="fp32")
    told = re.search(r"needs ([0-9.]+ \w+) on a device", str(error.value))
    assert told
    least = parse_bytes(told[1]) * 1.05
    return _with_bytes(cluster, least + share * max(0.0, needed - least))


def _with_bytes(cluster: Cluster, num_bytes: float) -> Cluster:
    table = cluster.to_dict()
    table["device"] = {
        **cluster.device.to_dict(),
        "memory_bytes": round(num_bytes),
        "context_bytes": 0,
        "communicator_bytes": 0,
        "allocator_slack_fraction": 0.0,
    }
    return Cluster.from_dict(table)


def _problem(graph, cluster: Cluster, configuration: Configuration, sharded: Sharded | None = None):
    local = (
        ShardedGraph(name="", graph=graph)
        if sharded is None or not configuration.mesh.splits
        else sharded(*configuration.mesh.splits)[configuration.variant]
    )
    costs = price(
        local.graph, cluster, splits=local.splits, mesh=configuration.mesh, micro_batch=configuration.micro_batch,
        num_microbatches=configuration.num_microbatches, schedule=configuration.schedule,
        precision="fp32", optimizer="adamw",
    )  # fmt: skip
    return costs, formulate(costs)


def _brute_force(graph, cluster: Cluster, configuration: Configuration, sharded: Sharded | None = None) -> float:
    _, problem = _problem(graph, cluster, configuration, sharded)
    blocks = problem.num_blocks
    best = float("inf")
    for cuts in itertools.combinations(range(1, blocks), configuration.pp - 1):
        stages = tuple(sum(c <= i for c in cuts) for i in range(blocks))
        for strategies in itertools.product(range(problem.num_strategies), repeat=blocks):
            evaluation = evaluate(problem, Choice(stages=stages, strategies=strategies))
            if evaluation.feasible:
                best = min(best, evaluation.seconds)
    return best


def _value(graph, cluster: Cluster, plan: Plan, sharded: Sharded | None = None, variant: int = 0) -> float:
    """A plan's seconds by the program."""
    configuration = Configuration(
        pp=plan.mesh.pp, dp=plan.mesh.dp, dp_shard=plan.mesh.dp_shard, micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches, schedule=plan.schedule, tp=plan.mesh.tp, cp=plan.mesh.cp,
        variant=variant,
    )  # fmt: skip
    costs, problem = _problem(graph, cluster, configuration, sharded)
    index = {(s.zero, "full" if s.recompute else "none"): i for i, s in enumerate(costs.strategies)}
    evaluation = evaluate(
        problem,
        Choice(
            stages=tuple(i for i, s in enumerate(plan.stages) for _ in s.blocks),
            strategies=tuple(index[b.zero, b.recompute] for b in plan.block_plans),
        ),
    )
    assert evaluation.feasible
    return evaluation.seconds


def test_a_cluster_on_which_nothing_fits_is_told_the_least_memory_that_would():
    module, batch = build("gpt3-175b", device="meta")
    graph = trace(module, batch, precision="bf16", name="gpt3-175b")

    with pytest.raises(InfeasibleError, match=r"gpt3-175b does not fit on .* needs [0-9.]+ (GiB|TiB) on a device") as e:
        search(graph, Cluster.load("1x2xA10G"), global_batch=4)

    assert "\n" not in str(e.value)


def _unfit(module, batch, cluster: Cluster, **options) -> str:
    with pytest.raises(InfeasibleError) as error:
        search(trace(module, batch, precision="bf16", name="m"), cluster, global_batch=8, **options)
    return str(error.value)


def test_a_block_that_fits_nowhere_is_named_with_what_it_needs():
    class Wide(torch.nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(64, w), torch.nn.Linear(w, 64)) for w in (64, 64, wide, 64)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    with torch.device("meta"):
        batch = {"x": torch.randn(4, 64)}
        wide, narrow = Wide(500_000), Wide(64)
    cluster = _with_bytes(Cluster.load("1x4xA100-40GB"), 200e6)

    said = _unfit(wide, batch, cluster)
    # 64 M parameters on 4 ranks: a shard of 16 bytes each is 256 MB; its copy, gradient and reduction come to more.
    assert re.search(r"on a device, which has 190.7 MiB; block layers\.2 alone takes [0-9.]+ MiB or more", said), said
    assert "whatever is chosen (least with ZeRO-3" in said
    assert search(trace(narrow, batch, precision="bf16", name="m"), cluster, global_batch=8, top=1).plans


def test_where_every_block_fits_alone_the_heaviest_part_of_the_leanest_plan_is_named():
    module, batch = build("gpt3-6.7b", device="meta")

    said = _unfit(module, batch, Cluster.load("1x2xA100-40GB"), pins="recompute=none")
    assert "and recompute=none fixed: the leanest plan (" in said
    assert re.search(r"[0-9]+% of it is parameters, gradients and optimizer state; use more or larger devices", said)


def test_a_fully_pinned_plan_that_does_not_fit_is_priced_and_says_so(large):
    pins = "pp=1,dp=1,zero=0,recompute=none,micro_batch=8"

    plan = search(large, Cluster.load("1x1xA10G"), global_batch=8, pins=pins).plans[0]

    assert not plan.prediction.fits
    assert any("do not fit" in note for note in plan.notes)


def test_fewer_devices_than_given_is_an_answer():
    # Two nodes joined by slow Ethernet: reducing the gradients of 1.6 billion parameters takes longer than the batch.
    module, batch = build("gpt2-xl", device="meta")
    graph = trace(module, batch, precision="bf16", name="gpt2-xl")
    cluster = Cluster.load("2x4xA10G")

    plan = search(graph, cluster, global_batch=8, top=1, pins="pp=1").plans[0]

    assert plan.devices < cluster.num_devices


def test_hybrid_sharding_is_chosen_where_the_network_is_slow_and_a_device_too_small_for_whole_copies(large):
    table = Cluster.load("2x8xA100-80GB").to_dict()
    table["inter_node_link"] = {**Cluster.load("2x4xA10G").inter_node_link.to_dict(), "bytes_per_second": 3e9}
    cluster = Cluster.from_dict({**table, "nics_per_node": 1})

    found = search(large, cluster, global_batch=512, top=1).plans[0]
    pure = search(large, cluster, global_batch=512, pins="dp_shard=16", top=1).plans[0]
    whole = search(large, cluster, global_batch=512, pins="pp=1,dp=16,zero=0,recompute=full,micro_batch=1", top=1)

    assert (found.mesh.pp, found.mesh.dp_replicate, found.mesh.dp_shard) == (1, 2, 8)
    assert found.prediction.fits
    # Gathers across nodes are hidden behind much computing, which a slow network hardly slows down: 1.4 % are left at
    # the rates of matrix products that training runs reach.
    assert found.prediction.step_seconds < 0.99 * pure.prediction.step_seconds
    assert not whole.plans[0].prediction.fits
    assert Plan.loads(found.dumps()) == found


def test_the_shard_degree_can_be_fixed(graph):
    cluster = Cluster.load("1x8xA100-80GB")

    plans = search(graph, cluster, global_batch=32, pins="dp_shard=2,dp=8").plans

    assert {(p.mesh.dp_replicate, p.mesh.dp_shard) for p in plans} == {(4, 2)}
    assert all(b.zero > 0 for p in plans for b in p.block_plans)


def test_device_seconds_prefers_fewer_devices(large):
    cluster = Cluster.load("2x8xA100-80GB")

    quick = search(large, cluster, global_batch=64, top=1).plans[0]
    cheap = search(large, cluster, global_batch=64, top=1, objective="device-seconds").plans[0]

    assert cheap.devices < quick.devices
    assert cheap.devices * cheap.prediction.step_seconds < quick.devices * quick.prediction.step_seconds


def test_a_batch_that_the_pins_do_not_divide_is_refused_with_the_multiple_to_use(graph):
    with pytest.raises(PlanError, match="a global batch of 7 is not divisible by 2"):
        search(graph, Cluster.load("1x8xA100-80GB"), global_batch=7, pins="dp=2")


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        ("zero=3,dp=1", "zero=3 shards over data-parallel ranks"),
        ("zero=3,dp_shard=1", "zero=3 shards over data-parallel ranks, but dp_shard is fixed to 1"),
        ("zero=0,dp_shard=2", "zero=0 keeps whole copies, but dp_shard=2 shards"),
        ("dp=8,dp_shard=3", "dp_shard=3 is no divisor of dp=8"),
        ("pp=99", "pp=99 needs as many blocks"),
        ("pp=4,dp=4", "need 16 devices, the cluster has 8"),
        ("dp=16", "need 16 devices, the cluster has 8"),
        ("tp=2", "tp=2 is not possible: no way to split the model is given"),
        ("dp=2,pp=2,devices=6", "pp=2 x dp=2 does not divide devices=6"),
    ],
)
def test_contradicting_pins_are_refused(graph, pins, sentence):
    with pytest.raises(PlanError, match=sentence):
        search(graph, Cluster.load("1x8xA100-80GB"), global_batch=16, pins=pins)


def test_a_plan_survives_its_file(graph, tmp_path):
    plan = search(graph, Cluster.load("1x8xA100-80GB"), global_batch=32).plans[0]
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True


def test_autoplan_infers_the_batch_of_zoo_and_hugging_face_models_and_states_the_global_batch():
    from transformers import GPT2Config, GPT2LMHeadModel

    module, _ = build("gpt-tiny", device="meta")
    other = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=96, n_positions=16))

    for model in (module, other):
        plan = autoplan(model, "1x4xA100-40GB", fix="tp=1")
        assert plan.global_batch == 32
        assert any("no global batch was given: 32" in note for note in plan.notes)
    assert len(ranked_plans(module, "1x4xA100-40GB", global_batch=8, top=3, fix="tp=1")) == 3


def test_a_model_that_does_not_tell_its_batch_needs_one():
    from torch import nn

    with pytest.raises(ModelError, match="cannot be inferred; give an example"):
        autoplan(nn.Linear(2, 2), "1x4xA100-40GB")
    assert issubclass(ModelError, PlannerError)


@pytest.mark.parametrize(("divides", "may_pipeline"), [(True, False), (False, True)])
def test_a_buffer_that_forward_updates_and_reads_rules_a_pipeline_out(divides, may_pipeline):
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.count: torch.Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            for layer in self.layers:
                x = layer(x).tanh()
            return (x / self.count if divides else x).square().mean()

    graph = trace(Counting(), {"x": torch.randn(4, 8)}, precision="bf16")
    cluster = Cluster.load("1x4xA100-40GB")

    assert bool(graph.reads_updates) != may_pipeline
    if may_pipeline:
        assert search(graph, cluster, global_batch=8, pins="pp=2").plans
    else:
        assert all(plan.mesh.pp == 1 for plan in search(graph, cluster, global_batch=8).plans)
        with pytest.raises(PlanError, match=r"test_search.py:\d+ reads a buffer that forward updates"):
            search(graph, cluster, global_batch=8, pins="pp=2")
