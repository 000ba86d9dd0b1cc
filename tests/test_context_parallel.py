"""Planning with context parallelism: what is split, what it costs, when the search looks at it and what it says."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from planner import ranked_plans
from planner.cluster import Cluster
from planner.costs import price
from planner.errors import PlanError
from planner.plan import Mesh, Plan
from planner.report import describe_layout, sharding_text
from planner.search import ways_to_split
from planner.search.choices import Configuration, Pins, configurations
from planner.search.engine import search
from planner.search.sharded import ShardedGraph, has_long_samples
from planner.shard.localize import localize
from planner.shard.placement import Q, R
from planner.shard.program import resharded, variants
from planner.shard.stored import restored
from planner.trace import trace
from planner.zoo import build
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.llama import Llama, LlamaConfig
from planner.zoo.registry import batch_of_module
from tests.distributed_cases import PRICES
from tests.sharded import Chance, assert_equal, run_localized, run_whole, values_of

GATHERED, EXCHANGED = ("planner.gather.default", "planner.gather_sum.default"), "planner.exchange.default"
LONG = 262_144


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.up.weight.requires_grad_(False)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(self.up(self.table(x)).relu()), y)


@functools.cache
def llama(layers, length):
    config = LlamaConfig(
        vocabulary=128, context=length, width=2048, layers=layers, heads=16, key_value_heads=4, hidden=4096
    )
    with torch.device("meta"):
        module = Llama(config)
    return trace(module, batch_of_module(module), precision="bf16", name="llama")


@functools.cache
def long_plan() -> Plan:
    graph, cluster = llama(4, LONG), Cluster.load("1x2xH100-80GB")
    assert has_long_samples(graph, cluster, 1)
    assert not has_long_samples(graph, cluster, 2)
    return search(graph, cluster, global_batch=1, sharded=ways_to_split(graph, cluster, 1, "cuda")).plans[0]


def placements(shardings):
    return {p for sharding in shardings for p in (*sharding.parameters, *sharding.buffers)}


@pytest.mark.parametrize(
    ("heads", "exchange_cost", "is_gathered"),
    [(4, 1.0, False), (4, 10.0, True), (6, 1.0, True)],
    ids=["heads for tokens", "by price", "heads that four ranks cannot divide"],
)
def test_keys_and_values_are_gathered_or_heads_exchanged_for_tokens(heads, exchange_cost, is_gathered):
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=16, context=32, width=4 * heads, layers=2, heads=heads))
    graph = trace(model, batch_of_module(model), precision="fp32", name="gpt")
    prices = replace(
        PRICES,
        collective_seconds=lambda kind, num_bytes: 1e-9 * num_bytes * {"all_to_all": exchange_cost}.get(kind, 1.0),
    )
    found = variants(graph, 4, prices, whole_parameters=True)
    ops = {node.op for node in localize(graph, found[0].shardings, 4, axis="cp").graph.nodes}

    assert all(placements(variant.shardings) == {Q} for variant in found)
    assert (EXCHANGED in ops) == (not is_gathered)
    assert any(op in GATHERED for op in ops) or not is_gathered
    assert placements(resharded(graph, 4, prices, {}, whole_parameters=True)) == {Q}


def test_frozen_parameters_are_whole_without_a_gradient():
    batch = {"x": torch.zeros(2, 4, dtype=torch.long), "y": torch.zeros(2, 4, 8)}
    graph = trace(Frozen(), batch, precision="fp32", name="frozen", device_kind="cpu")
    for variant in variants(graph, 2, PRICES, whole_parameters=True):
        for block, sharding in zip(graph.blocks, variant.shardings, strict=True):
            for parameter, placement in zip(block.parameters, sharding.parameters, strict=True):
                trains = graph.tensors[parameter].requires_grad
                assert placement == (Q if trains else R) or (not trains and placement == Q)


@pytest.mark.parametrize("degree", [2, 4])
def test_parts_of_a_sample_give_the_loss_and_gradients_of_all_of_it(degree):
    model = GPT(GPTConfig(vocabulary=16, context=8, width=8, layers=2, heads=4)).double()
    batch = batch_of_module(model)
    assert batch is not None
    graph = trace(model, batch, precision="fp64", name="gpt", device_kind="cpu")
    values = values_of(graph, model, batch)
    for variant in variants(graph, degree, PRICES, whole_parameters=True):
        localized = localize(graph, variant.shardings, degree)
        assert_equal(graph, run_localized(localized, degree, values, 2), run_whole(graph, values, 2))


# --- costs ---


def test_context_parallel_ranks_shard_states_as_data_parallel_ones_do():
    graph, cluster = llama(2, 4096), Cluster.load("1x8xH100-80GB")
    way = ways_to_split(graph, cluster, 8, "cuda")(("cp", 2))[0]

    def priced(local, mesh, splits=()):
        return price(
            local, cluster, mesh=mesh, micro_batch=1, num_microbatches=2, schedule="1f1b", precision="bf16",
            optimizer="adamw", splits=splits,
        )  # fmt: skip

    split = priced(way.graph, Mesh(dp_shard=2, cp=2), way.splits)
    data = priced(graph, Mesh(dp_shard=4))

    assert [str(s) for s in split.strategies] == [str(s) for s in data.strategies]
    assert split.state_bytes == pytest.approx(data.state_bytes, rel=1e-3)
    assert split.optimizer_seconds == pytest.approx(data.optimizer_seconds)
    assert (split.activation_bytes[1:, 0] < 0.75 * data.activation_bytes[1:, 0]).all()
    assert (split.exposed_seconds[1, ::2] > data.exposed_seconds[1, ::2]).all()  # attention communicates


# --- search ---


def test_configurations_have_both_axes_that_split_tensors():
    found = configurations(4, 8, 8, 8, Pins(), may_split=True, may_split_samples=True)

    assert {(c.tp, c.cp) for c in found} == {(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8}
    assert all(c.pp * c.dp * c.tp * c.cp == c.devices == c.mesh.num_devices for c in found)
    assert {c.cp for c in configurations(4, 8, 8, 8, Pins(), may_split=True)} == {1}
    assert {c.cp for c in configurations(4, 8, 8, 8, Pins(cp=4, zero=0), may_split=True)} == set()
    assert {(c.dp, c.dp_shard) for c in configurations(1, 8, 8, 8, Pins(cp=2, zero=1, devices=8))} == {(4, 1), (4, 4)}
    assert str(Configuration(pp=1, dp=1, dp_shard=1, micro_batch=1, num_microbatches=1, schedule="1f1b", cp=2)) == (
        "pp 1, dp 1, cp 2, micro-batch 1 x 1, 1f1b"
    )


def test_layouts_tell_whether_data_ranks_replicate_or_shard():
    plan = long_plan()

    layouts = [describe_layout(replace(plan, mesh=Mesh(cp=2, **{axis: 2}))) for axis in ("dp_shard", "dp_replicate")]

    assert layouts == ["dp 2 x cp 2", "dp 2x1 x cp 2"]


def test_a_long_sample_is_split_over_the_devices_and_the_plan_says_so():
    plan = long_plan()

    assert plan.mesh == Mesh(cp=2)
    assert all(block.zero in (1, 2, 3) for block in plan.block_plans)
    assert describe_layout(plan) == "cp 2"
    assert Plan.loads(plan.dumps()) == plan
    text = sharding_text(plan)
    assert "split over 2 context-parallel ranks" in text
    assert "hands on what it makes: split along dim 1" in text
    assert "all_to_all" in text or "all_gather" in text
    graph = llama(4, LONG)
    assert placements(restored(graph, plan.shardings, [b.shardings[0] for b in plan.block_plans], 2)) <= {Q, R}


@functools.cache
def two_axes() -> tuple[Plan, tuple[ShardedGraph, ...]]:
    graph, cluster = llama(4, 32_768), Cluster.load("1x4xH100-80GB")
    sharded = ways_to_split(graph, cluster, 2, "cuda")
    plan = search(graph, cluster, global_batch=2, sharded=sharded, pins="cp=2,tp=2,zero=3").plans[0]
    return plan, tuple(sharded(("cp", 2), ("tp", 2)))


def test_a_plan_has_both_axes_and_says_of_each_block_how_each_splits_it():
    plan, ways = two_axes()

    assert plan.mesh == Mesh(cp=2, tp=2)
    assert plan.mesh.splits == (("cp", 2), ("tp", 2))
    assert Plan.loads(plan.dumps()) == plan
    graph = llama(4, 32_768)
    found = []
    for position, axis in enumerate(("cp", "tp")):
        indices = [block.shardings[position] for block in plan.block_plans]
        assert {plan.shardings[i].axis for i in indices} == {axis}
        shardings = restored(graph, plan.shardings, indices, 2)
        assert axis == "tp" or placements(shardings) <= {Q, R}
        found.append(shardings)
        graph = localize(graph, shardings, 2, axis=axis).graph
    assert found in [[split.shardings for split in way.splits] for way in ways]
    text = sharding_text(plan)
    assert "split over 2 context-parallel ranks, each of them over 2 tensor-parallel ranks" in text
    assert text.count("    over cp\n") == text.count("    over tp\n") >= 3
    assert {c.collective for s in plan.shardings if s.axis == "cp" for c in s.collectives} >= {"all_to_all"}


def test_what_the_first_axis_sends_is_less_where_the_second_splits_it():
    """Heads are split over tp, so of what cp exchanges or gathers each of its ranks has a part."""
    graph, cluster = llama(4, 32_768), Cluster.load("1x4xH100-80GB")
    alone = ways_to_split(graph, cluster, 2, "cuda")(("cp", 2))[0].graph

    def sent(rank):
        kinds = [rank.classes[block.class_index] for block in rank.blocks if block.kind == "block"]
        return sum(made.num_bytes.at(1) for kind in kinds for made in kind.collectives if made.axis == "cp")

    assert min(sent(way.graph) for way in two_axes()[1]) < 0.7 * sent(alone)  # half of it where heads are split


def test_short_samples_are_not_split_unless_it_is_asked_for():
    graph, cluster = llama(2, 1024), Cluster.load("1x2xH100-80GB")
    asked: list[str] = []

    def sharded(*splits: tuple[str, int]) -> tuple[ShardedGraph, ...]:
        asked.extend(axis for axis, _ in splits)
        return tuple(ways_to_split(graph, cluster, 2, "cuda")(*splits))

    assert not has_long_samples(graph, cluster, 1)
    free = search(graph, cluster, global_batch=2, sharded=sharded).plans
    assert set(asked) == {"tp"}
    assert all(plan.mesh.cp == 1 for plan in free)
    fixed = search(graph, cluster, global_batch=2, sharded=sharded, pins="cp=2,zero=3").plans
    assert all(plan.mesh == Mesh(cp=2) for plan in fixed)
    assert all(block.zero == 3 for plan in fixed for block in plan.block_plans)


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        ("cp=2,zero=0", "zero=0 keeps whole copies, but the ranks of cp=2 share out the states of all parameters"),
        ("cp=16", "the fixed choices need 16 devices, the cluster has 8"),
    ],
)
def test_fixed_choices_that_cannot_be_are_refused(pins, sentence):
    module, batch = build("gpt-tiny", device="meta")
    with pytest.raises(PlanError, match=sentence):
        ranked_plans(module, "1x8xA100-80GB", batch=batch, global_batch=16, fix=pins)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0].clamp(-1e-4, 1e-4)


class ClampedGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(self.up(Clamped.apply(self.norm(x))).tanh()), y)


def test_a_backward_of_the_users_own_sees_whole_gradients():
    torch.manual_seed(0)
    model = ClampedGradient().double()
    batch = {"x": torch.randn(2, 6, 8, dtype=torch.float64), "y": torch.randn(2, 6, 8, dtype=torch.float64)}
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    values = values_of(graph, model, batch)
    for variant in variants(graph, 2, PRICES):
        localized = localize(graph, variant.shardings, 2)
        assert_equal(graph, run_localized(localized, 2, values, 2), run_whole(graph, values, 2))

    with pytest.raises(PlanError, match=r"cp=2 is not possible: .*test_context_parallel.py:.*; leave cp out"):
        ranked_plans(model, "8xH100-80GB", batch=batch, global_batch=8, precision="fp64", fix={"cp": 2})


def test_a_plan_whose_shardings_are_of_another_axis_is_refused():
    data = long_plan().to_dict()
    assert data["mesh"]["cp"] == 2
    for change, sentence in (
        ({"cp": 1, "dp_shard": 2}, "shardings has 1 entries, but mesh.cp, mesh.ep, mesh.tp are 1"),
        ({"tp": 2}, "shardings has 1 entries, but mesh.cp is 2 and mesh.tp is 2: one for each"),
        ({"cp": 1, "tp": 2}, "shardings has 0 for tp, which is of cp"),
    ):
        changed = replace(long_plan(), mesh=Mesh(**(data["mesh"] | change)))
        with pytest.raises(PlanError, match=sentence):
            Plan.loads(changed.dumps())


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_llama3_8b_at_131072_tokens_splits_its_samples():
    module, batch = build("llama3-8b", device="meta", sequence_length=131_072)
    plan = ranked_plans(module, "1x8xH100-80GB", batch=batch, global_batch=4)[0]

    assert plan.mesh.cp > 1
    assert plan.prediction.fits
    assert "hands on what it makes: split along dim 1" in sharding_text(plan)


@pytest.mark.parametrize(("fix", "is_told"), [({"zero": 3, "tp": 2}, True), ({"zero": 3, "dp": 2}, False)])
def test_a_fixed_zero_stage_that_has_nothing_to_shard_over_is_told(fix, is_told):
    model, batch = build("gpt-tiny")
    plan = ranked_plans(model, "2xA100-80GB", batch=batch, global_batch=4, fix={**fix, "devices": 2}, top=1)[0]

    assert any("zero=3 has nothing to shard over" in note for note in plan.notes) == is_told


def test_a_copy_in_place_is_never_made_another_operator():
    """`aten.copy` has no derivative."""

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x, y):
            hidden = self.up(x)
            hidden[:, :, :] = self.up(x).tanh()
            return nn.functional.mse_loss(self.down(hidden), y)

    torch.manual_seed(0)
    model = Copies().double()
    batch = {"x": torch.randn(2, 4, 8, dtype=torch.float64), "y": torch.randn(2, 4, 8, dtype=torch.float64)}
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    values = values_of(graph, model, batch)
    for variant in variants(graph, 2, PRICES):
        localized = localize(graph, variant.shardings, 2)
        assert_equal(graph, run_localized(localized, 2, values, 2), run_whole(graph, values, 2))

    with pytest.raises(PlanError, match="without writing in place it has no derivative"):
        localize(graph, Chance(graph, 2, 0).shardings, 2)
