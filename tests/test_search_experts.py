"""Expert parallelism over data ranks in the search: what is tried, what it costs, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from planner.cluster import Cluster
from planner.collectives import all_gather_seconds, all_to_all_seconds, axis_group
from planner.costs import Strategy, price
from planner.graph import Graph
from planner.memory import PRECISIONS, elements, state_bytes
from planner.operators import memory_seconds
from planner.plan import Mesh, Plan
from planner.report import describe_layout
from planner.search import ways_to_split
from planner.search.choices import Configuration, Pins
from planner.search.experts import with_experts_spread
from planner.search.sharded import ShardedGraph
from tests.command_line import A100S, TWO_CORES, CommandLine
from tests.distributed_cases import graph_of

MOE = ("plan", "moe-tiny", "--cluster", A100S, "--seq", 32, "--global-batch", 8)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.load("2x4xA100-80GB")


@pytest.fixture(scope="module")
def way(cluster: Cluster) -> ShardedGraph:
    (found,) = ways_to_split(graph_of("moe"), cluster, 64, "cuda")(("ep", 2))
    return found


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def test_elements_of_two_numbers_of_ranks_add_up() -> None:
    both = elements([[((10, 3), True)]], 4) + elements([[((8, 2), True), ((2,), False)]], 2)
    assert [float(x[0]) for x in (both.full, both.shard, both.gathered, both.reduced)] == [48, 9 + 9, 36 + 18, 36 + 16]
    assert float(both.largest[0]) == 30


def test_owners_of_one_expert_have_a_part_each() -> None:
    """Two owners of matrices [1, 6, 4]: along the first dim one of them would have all."""
    shapes = [[((1, 6, 4), True), ((1, 5), True)]]
    assert float(elements(shapes, 2).shard[0]) == 24 + 5
    assert float(elements(shapes, 2, are_experts=True).shard[0]) == 12 + 5
    assert float(elements(shapes, 2, are_experts=True).gathered[0]) == 24 + 10


def test_experts_are_held_and_gathered_by_their_owners_alone(cluster: Cluster, way: ShardedGraph) -> None:
    """dp_shard 2 x ep 2: of experts a rank gathers a half over 2 ranks, of all else the whole over 4."""
    graph = graph_of("moe")
    common = {"micro_batch": 1, "num_microbatches": 8, "schedule": "1f1b", "precision": "bf16", "optimizer": "adamw"}
    plain = price(graph, cluster, mesh=Mesh(dp_shard=4), **common)  # type: ignore[arg-type]
    spread = price(way.graph, cluster, mesh=Mesh(dp_shard=2, ep=2), splits=way.splits, **common)  # type: ignore[arg-type]
    block = next(b for b in graph.blocks if b.name == "blocks.1")
    index = graph.blocks.index(block)
    experts = sum(
        graph.tensors[p].num_elements.fixed for p in block.parameters if graph.tensors[p].name.endswith(("up", "down"))
    )
    at = {str(s): number for number, s in enumerate(plain.strategies)}
    held = {name: plain.state_bytes[index, i] - spread.state_bytes[index, i] for name, i in at.items()}
    assert held["ZeRO-3"] == 0  # all is shared out among 4 ranks either way
    assert held["ZeRO-2"] == 2 * experts / 2  # the gathered copy in bf16
    assert held["ZeRO-1"] == (2 + 4) * experts / 2  # and the gradients that are added up in fp32
    assert spread.working.gathered[index, at["ZeRO-3"]] == plain.working.gathered[index, at["ZeRO-3"]] - experts


def test_an_expert_is_gathered_over_its_owners_alone(way: ShardedGraph) -> None:
    """On a CPU nothing hides a gather: with ep 2 on two ranks, experts have one owner and are gathered by nobody."""
    cluster, graph = Cluster.load(TWO_CORES), graph_of("moe")
    common = {"micro_batch": 1, "num_microbatches": 2, "schedule": "1f1b", "precision": "fp32", "optimizer": "sgd"}
    plain = price(graph, cluster, mesh=Mesh(dp_shard=2), **common)  # type: ignore[arg-type]
    spread = price(way.graph, cluster, mesh=Mesh(ep=2), splits=way.splits, **common)  # type: ignore[arg-type]
    index, zero_1 = 1, plain.strategies.index(Strategy(1, 0))
    sizes = {graph.tensors[p].name: graph.tensors[p].num_elements.fixed for p in graph.blocks[index].parameters}
    experts = sum(size for name, size in sizes.items() if name.endswith(("up", "down")))
    group = axis_group(cluster, {"dp_shard": 2}, "dp_shard")
    everything = sum(sizes.values())

    def seconds(gathered: float, sent: float) -> float:
        copied = memory_seconds(cluster.device, np.array([8 * everything / 2 + 8 * gathered]))
        return float(copied[0]) + all_gather_seconds(4 * sent, group)

    assert plain.gather_seconds[index, zero_1] == pytest.approx(seconds(everything, everything))
    assert spread.gather_seconds[index, zero_1] == pytest.approx(
        seconds(everything - experts / 2, everything - experts)
    )


def test_rows_travel_over_the_ranks_of_ep(cluster: Cluster, way: ShardedGraph) -> None:
    """The first-order difference of a block's forward pass is what its all-to-alls take."""
    near = price_forward(cluster, way, Mesh(dp_shard=2, ep=2))
    kinds = [way.graph.classes[b.class_index] for b in way.graph.blocks]
    group = axis_group(cluster, {"dp_shard": 2, "ep": 2}, "ep")
    assert group.num_nodes == 1
    wanted = [
        sum(all_to_all_seconds(c.num_bytes.at(1), group) for c in kind.collectives if c.phase == "forward")
        for kind in kinds
    ]
    assert all(c.axis == "ep" and c.collective == "all_to_all" for kind in kinds for c in kind.collectives)
    assert_allclose(near, wanted)
    assert sum(wanted) > 0


def price_forward(cluster: Cluster, way: ShardedGraph, mesh: Mesh) -> np.ndarray:
    """Seconds in which a rank waits for collectives in backward with recomputation, less those without."""
    costs = price(
        way.graph, cluster, mesh=mesh, micro_batch=1, num_microbatches=2, schedule="1f1b", precision="fp32",
        optimizer="sgd", splits=way.splits,
    )  # fmt: skip
    again = costs.strategies.index(Strategy(1, 1))
    once = costs.strategies.index(Strategy(1, 0))
    found: np.ndarray = costs.exposed_seconds[:, again] - costs.exposed_seconds[:, once]  # recomputation sends again
    return found


def test_degrees_divide_experts_and_lie_in_a_node(cluster: Cluster) -> None:
    one = Configuration(pp=1, dp=8, dp_shard=8, micro_batch=1, num_microbatches=1, schedule="1f1b")
    four = Configuration(pp=1, dp=2, dp_shard=2, tp=4, micro_batch=1, num_microbatches=1, schedule="1f1b")

    def degrees(graph: Graph, *pins: str) -> list[tuple[int, int]]:
        found = with_experts_spread([one, four], graph, cluster, Pins.of(",".join(pins)), may_split=True)
        return [(c.tp, c.ep) for c in found]

    assert degrees(graph_of("gpt")) == [(4, 1), (1, 1)]
    assert sorted(degrees(graph_of("moe"))) == [(1, 1), (1, 2), (1, 4), (4, 1)]
    assert sorted(degrees(graph_of("moe"), "ep=2")) == [(1, 2), (4, 2)]
    assert sorted(degrees(graph_of("moe"), "ep=1")) == [(1, 1), (4, 1)]


def test_a_fixed_degree_is_planned_and_shown(cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    (plan,) = cli(*MOE, "--fix", "ep=2,dp=4,pp=1,zero=3", "--top", 1, "--json", "--out", file).json["plans"]
    assert plan["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "ep": 2, "tp": 1}
    loaded = Plan.load(file)
    assert {sharding.axis for sharding in loaded.shardings} == {"ep"}
    assert not any("alike" in note for note in loaded.notes)
    text = cli("show", file, "--sharding").out
    assert "split over 2 expert-parallel ranks" in text
    assert "mlp.gate_up: experts split 2 ways" in text
    assert "4 devices (dp_shard 2, ep 2)" in cli("show", file).out
    assert describe_layout(loaded) == "dp 4 (ep 2)"


def test_measured_loads_say_which_experts_a_rank_has(cli: CommandLine, tmp_path: Path) -> None:
    file, out = tmp_path / "loads.json", tmp_path / "plan.json"
    file.write_text(json.dumps({"blocks.1.mlp": [8, 6, 1, 1]}))
    given = (*MOE, "--fix", "ep=2,dp=4,pp=1,zero=1", "--expert-loads", file, "--top", 1, "--out", out)
    assert "1.75 over 2 ranks of tp (1.12 over as many of ep, which reorders)" in cli(*given).out
    plan = Plan.load(out)
    (second,) = (plan.shardings[block.shardings[0]] for block in plan.block_plans if block.name == "blocks.1")
    assert second.parameters.count("S0[4@0.3.1.2]") == 2
    assert "mlp.gate_up: experts split 2 ways, in the order 0 3 1 2" in second.words
    assert len(plan.shardings) == 4  # tokens, blocks.1, the other blocks, norm and head


@pytest.mark.parametrize(
    ("model", "fixed", "message"),
    [
        ("gpt-tiny", "ep=2", "ep=2 spreads experts, and gpt-tiny has no grouped product of experts"),
        ("moe-tiny", "ep=3,dp=3", "ep=3 does not divide the 4 experts of moe-tiny; fix another ep"),
        ("moe-tiny", "ep=2,cp=2", "ep=2 and cp=2 cannot be in one plan yet; fix one of them"),
        ("moe-tiny", "ep=2,zero=0", "zero=0 keeps whole copies, but the ranks of ep=2 share out the states"),
        ("moe-tiny", "ep=2,dp=3", "ep=2 is no divisor of dp=3"),
        ("moe-tiny", "ep=8,tp=2", "the fixed choices need 16 devices"),
    ],
)
def test_fixed_degrees_that_contradict_are_refused(cli: CommandLine, model: str, fixed: str, message: str) -> None:
    given = ("plan", model, *MOE[2:], "--fix", fixed)
    if fixed == "ep=8,tp=2":
        given = ("plan", "moe-tiny", "--cluster", A100S, "--seq", 32, "--global-batch", 8, "--fix", "ep=4,tp=4")
    assert message in cli.error(*given)


def test_states_by_hand() -> None:
    """AdamW in bf16 of 8 elements of an expert on 2 of 4 owners, and 8 of a norm on 8 ranks, under ZeRO-3."""
    both = elements([[((8,), True)]], 2) + elements([[((8,), True)]], 8)
    assert state_bytes(both, 3, PRECISIONS["bf16"], "adamw", 4, wrapped=True)[0] == 16 * (4 + 1)
    assert all_gather_seconds(0.0, axis_group(Cluster.load("1x4xA100-80GB"), {"dp_shard": 1, "ep": 4}, "dp_shard")) == 0
