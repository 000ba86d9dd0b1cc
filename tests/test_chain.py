"""Graphs that two axes split one after the other: on a grid of ranks they give the loss and gradients of one device."""

from dataclasses import replace

import pytest

from planner.shard.chain import AxisSplit, chained
from planner.shard.placement import Sharding
from planner.shard.program import Prices, variants
from planner.trace import trace
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.registry import batch_of_module
from tests import models
from tests.distributed_cases import PRICES
from tests.float64 import explicit_float32_as_float64
from tests.sharded import Chance, assert_equal, run_chained, run_whole, values_of

DEGREE = 2


def _split(axis: str, shardings: tuple[Sharding, ...]) -> AxisSplit:
    return AxisSplit(axis=axis, degree=DEGREE, shardings=shardings)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if (name, seed) == ("gpt", 0) else pytest.mark.matrix)
        for name in ("gpt", "llama", "bert", "t5", "vit")
        for seed in range(4)
    ],
)
def test_ways_that_nobody_would_choose_are_right(name: str, seed: int) -> None:
    model, batch = models.build(name), models.batch(name, 2, step=0)
    graph = trace(model, batch, precision="fp64", name=name, device_kind="cpu")
    values = values_of(graph, model, batch)
    (outer,) = chained(graph, [_split("cp", Chance(graph, DEGREE, seed).shardings)])
    inner = chained(outer.local.graph, [_split("tp", Chance(outer.local.graph, DEGREE, seed + 9).shardings)])
    nodes = inner[0].local.graph.nodes
    assert {dict(node.kwargs).get("axis") for node in nodes if node.op.startswith("planner.")} == {"cp", "tp"}

    assert_equal(graph, run_chained((outer, *inner), values, 2), run_whole(graph, values, 2))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5", "hf-gpt2", "hf-llama"])
def test_ways_that_are_found_are_right(name: str) -> None:
    with explicit_float32_as_float64():
        model, batch = models.build(name), models.batch(name, 2, step=0)
        graph = trace(model, batch, precision="fp64", name=name, device_kind="cpu")
        values = values_of(graph, model, batch)
        wanted = run_whole(graph, values, 2)
        for first in variants(graph, DEGREE, PRICES, whole_parameters=True):
            (outer,) = chained(graph, [_split("cp", first.shardings)])
            for second in variants(outer.local.graph, DEGREE, PRICES):
                inner = chained(outer.local.graph, [_split("tp", second.shardings)])
                assert_equal(graph, run_chained((outer, *inner), values, 2), wanted)


def test_the_vocabulary_is_split_where_the_sequence_is() -> None:
    """Over cp tokens, the tied weight whole; over tp its rows, and the classes of a part of the targets."""
    model = GPT(GPTConfig(vocabulary=16, context=8, width=8, layers=2, heads=4)).double()
    batch = batch_of_module(model)
    assert batch is not None
    graph = trace(model, batch, precision="fp64", name="gpt", device_kind="cpu")
    values = values_of(graph, model, batch)
    (outer,) = chained(graph, [_split("cp", variants(graph, DEGREE, PRICES, whole_parameters=True)[0].shardings)])
    lean = next(one for one in variants(outer.local.graph, DEGREE, PRICES) if one.name == "lean")
    (inner,) = chained(outer.local.graph, [_split("tp", lean.shardings)])
    table = next(i for i, tensor in enumerate(graph.tensors) if tensor.name == "tokens.weight")

    assert [str(link.local.placements[table]) for link in (outer, inner)] == ["Q", "S0[16]"]
    ops = {node.op: dict(node.kwargs) for node in inner.local.graph.nodes}
    assert ops["planner.embedding.default"] == {"axis": "tp"}
    assert ops["planner.cross_entropy.default"] == {"counted_over": "cp", "axis": "tp"}
    assert_equal(graph, run_chained((outer, inner), values, 2), run_whole(graph, values, 2))


def test_what_the_first_axis_sends_counts_in_how_the_second_splits() -> None:
    """Where it is dear, tensors that cp gathers are split over tp before."""
    model, batch = models.build("gpt"), models.batch("gpt", 2, step=0)
    graph = trace(model, batch, precision="fp64", name="gpt", device_kind="cpu")
    (outer,) = chained(graph, [_split("cp", variants(graph, DEGREE, PRICES, whole_parameters=True)[0].shardings)])

    def gathered_bytes(prices: Prices) -> float:
        (inner,) = chained(outer.local.graph, [_split("tp", variants(outer.local.graph, DEGREE, prices)[0].shardings)])
        local = inner.local.graph
        made = [
            t for node in local.nodes if node.op == "planner.gather.default" and dict(node.kwargs)["axis"] == "cp"
            for t in node.outputs if t is not None
        ]  # fmt: skip
        return sum(local.tensors[t].num_bytes.at(2) for t in made)

    slow = replace(PRICES, collective_seconds=lambda _, num_bytes: 3e-8 * num_bytes)  # over tp
    dear = replace(slow, outer_seconds={"cp": lambda _, num_bytes: 1e-5 * num_bytes})
    assert gathered_bytes(dear) == pytest.approx(gathered_bytes(slow) / 2)
