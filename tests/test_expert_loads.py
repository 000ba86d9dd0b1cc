"""Tokens of experts: counted in training as the eager model's routers choose them, and fed back into the price."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from planner.cluster import Cluster
from planner.errors import PlanError
from planner.graph import Graph, Node, Ref, Tensor
from planner.runtime.experts import ExpertCounts
from planner.search import search, ways_to_split
from planner.shard.loads import check_expert_loads, expert_layers, worst_loads
from tests import expert_cases as cases
from tests.command_line import A100S, TWO_CORES, CommandLine
from tests.distributed_cases import Kind, graph_of
from tests.ranks import RankPool
from tests.test_shard_experts import DISPATCHED, MASKED, OWN
from tests.test_shard_experts import _mixtral as two_layers_of_mixtral

NAMES = [f"blocks.{i}.mlp" for i in range(4)]
EVEN, SKEWED = [10, 10, 10, 10], [8, 6, 1, 1]


# --- counted ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


OTHERS = pytest.mark.matrix  # not by default


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "form", "shorter"),
    [
        pytest.param(Kind(name="", tp=2, recompute=("full",)), DISPATCHED, False, id="tp dispatched"),
        pytest.param(Kind(name="", tp=2), DISPATCHED, True, id="tp dispatched, shorter", marks=OTHERS),
        pytest.param(Kind(name="", dp=2, zero=(3,), recompute=("none", "full")), None, False, id="dp"),
        pytest.param(Kind(name="", tp=2), MASKED, False, id="tp masked"),
        pytest.param(Kind(name="", tp=2), OWN, True, id="tp own tokens", marks=OTHERS),
        pytest.param(Kind(name="", dp=2, zero=(1,)), None, True, id="dp shorter", marks=OTHERS),
        pytest.param(Kind(name="", pp=2, recompute=("full",)), None, True, id="pp", marks=OTHERS),
        pytest.param(Kind(name="", cp=2, zero=(1,)), None, True, id="cp", marks=OTHERS),
    ],
)
def test_counts_are_those_of_the_eager_routers(two: RankPool, kind: Kind, form: str | None, shorter: bool) -> None:
    first, second = cases.batches(shorter=shorter)
    wanted = cases.directly(first)
    for seen, state in two.run(cases.counted, kind, form, shorter):
        assert seen[0] == wanted
        more = cases.directly(second, state)
        assert seen[1] == {name: [a + b for a, b in zip(wanted[name], more[name], strict=True)] for name in NAMES}
        assert seen[-1] == seen[1]  # an evaluation is no training


@pytest.mark.distributed
@pytest.mark.matrix
def test_data_ranks_of_split_experts_count_once(folder: Path) -> None:
    kind = Kind(name="", tp=2, dp=2, zero=(1,), recompute=("full", "none"))
    with RankPool(4, folder, timeout_seconds=100) as four:
        for seen, _ in four.run(cases.counted, kind, DISPATCHED, False):
            assert seen[0] == cases.directly(cases.batches(shorter=False)[0])


# --- fed back ---


@pytest.fixture(scope="module")
def mixtral() -> Graph:
    """Two layers of the sizes of Mixtral 8x7B at 4096 tokens."""
    graph: Graph = two_layers_of_mixtral()
    return graph


def test_layers_are_found_whatever_each_product_converts(mixtral: Graph) -> None:
    assert [layer.name for layer in expert_layers(mixtral)] == NAMES[:2]  # in bf16 each casts the ends
    assert [(layer.name, layer.num_experts) for layer in expert_layers(graph_of("moe"))] == [(n, 4) for n in NAMES]
    assert expert_layers(graph_of("gpt")) == ()


def test_layers_of_one_module_are_numbered_and_others_have_the_name_of_the_block() -> None:
    shapes = {0: (8, 2), 1: (4, 2, 2), 2: (4,), 3: (8, 2), 4: (3,), 5: (3, 2, 2), 6: (8, 2), 7: (4,), 8: (8, 2)}
    tensors = tuple(Tensor(name=str(t), shape=s, dtype="float64", kind="activation") for t, s in shapes.items())

    def product(matrices: int, ends: int, made: int, path: tuple[str, ...]) -> Node:
        operands = (Ref(0), Ref(matrices))
        return Node(
            name="", op="aten._grouped_mm.default", args=operands, kwargs=(("offs", Ref(ends)),), outputs=(made,),
            path=path,
        )  # fmt: skip

    nodes = (product(1, 2, 3, ("a", "a.b")), product(5, 4, 6, ("a", "a.b")), product(1, 7, 8, ()))
    whole = graph_of("moe")
    block = replace(whole.blocks[1], nodes=(0, 1, 2), name="part")
    found = expert_layers(replace(whole, tensors=tensors, nodes=nodes, blocks=(block,)))
    assert [(layer.name, layer.num_experts, layer.product) for layer in found] == [
        ("a.b", 4, 3), ("a.b (2)", 3, 6), ("part", 4, 8)
    ]  # fmt: skip


def test_the_worst_layer_of_those_that_can_be_spread_counts() -> None:
    assert worst_loads({"a": EVEN, "b": SKEWED}, 2) == (1.75, 1.125)
    assert worst_loads({"a": EVEN, "b": [5, 0, 0]}, 2) == (1.0, 1.0)
    assert worst_loads({"b": [5, 0, 0]}, 2) == (1.0, 1.0)
    assert worst_loads({"a": [6, 3, 5, 2, 4, 4]}, 2) == (14 / 12, 1.0)


def test_loads_decide_whether_experts_are_spread_and_what_it_costs(mixtral: Graph) -> None:
    cluster = Cluster.load("1x8xH100-80GB")

    def flop(graph: Graph) -> float:
        kernels = (k for block in graph.blocks for k in graph.classes[block.class_index].kernels)
        return sum(kernel.flop.per_sample for kernel in kernels if "grouped_mm" in kernel.op)

    def planned(loads: list[int]) -> tuple[float, bool, list[tuple[bool, float]]]:
        ways = cache(ways_to_split(mixtral, cluster, 64, "cuda", {NAMES[0]: [1] * 8, NAMES[1]: loads}))
        plan = search(mixtral, cluster, global_batch=64, pins={"tp": 8}, sharded=ways, top=1).plans[0]
        is_spread = any("S0[8]" in sharding.parameters for sharding in plan.shardings)
        ops = [{node.op for node in way.graph.nodes} for way in ways(("tp", 8))]
        work = [flop(way.graph) / flop(mixtral) * 8 for way in ways(("tp", 8))]
        return (
            plan.prediction.step_seconds,
            is_spread,
            [(bool({DISPATCHED, MASKED} & o), w) for o, w in zip(ops, work, strict=True)],
        )

    (mild, is_spread, ways) = planned([12, *[10] * 7])
    assert is_spread
    assert [work for spread, work in ways if spread] == [pytest.approx(96 / 82, rel=1e-3)] * 2  # of whole rows
    (skewed, is_spread, ways) = planned([4, *[1] * 7])
    assert not is_spread
    assert ways == [(False, 1.0)] * len(ways)
    assert mild < skewed < mild * (32 / 11) / (96 / 82)


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ({}, "must be a table"),
        ([1, 2], "must be a table"),
        (
            {"blocks.9.mlp": EVEN},
            r"'blocks.9.mlp', which is none of .*\(blocks.0.mlp, blocks.1.mlp, blocks.2.mlp, ...\)",
        ),
        ({NAMES[1]: [1, 2]}, "blocks.1.mlp has 4 experts, loads are given for 2"),
        ({NAMES[1]: [1, 2, -3, 4]}, "0 or more; blocks.1.mlp has"),
        ({NAMES[1]: [1, 2, 0.5, 4]}, "0 or more"),
        ({NAMES[1]: [1, 2, True, 4]}, "0 or more"),
        ({NAMES[1]: "1234"}, "0 or more"),
        ({NAMES[1]: 7}, "0 or more"),
        ({NAMES[1]: [0, 0, 0, 0]}, "all 0 for blocks.1.mlp"),
    ],
)
def test_other_loads_are_refused(loads: dict[str, list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_expert_loads(graph_of("moe"), loads)


def test_a_model_without_experts_has_no_loads() -> None:
    with pytest.raises(PlanError, match="has no grouped products"):
        check_expert_loads(graph_of("gpt"), {NAMES[0]: EVEN})


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def test_the_command_line_plans_by_a_file(cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    command = ("plan", "moe-tiny", "--cluster", A100S, "--seq", 32, "--global-batch", 8, "--expert-loads", file)

    def fixed(loads: object) -> tuple[object, ...]:
        file.write_text(json.dumps(loads))
        return (*command, "--fix", "tp=2,dp=1,pp=1", "--json", "--top", 1)

    (plan,) = cli(*fixed({NAMES[0]: EVEN, NAMES[3]: SKEWED})).json["plans"]
    (note,) = [note for note in plan["notes"] if "experts" in note]
    assert note.endswith("multiple of a fair share: 1.75 over 2 ranks of tp (1.12 over as many of ep, which reorders)")
    assert cli.error(*fixed({NAMES[0]: [1, 2]})) == (
        "blocks.0.mlp has 4 experts, loads are given for 2; measure this model"
    )
    file.write_text("{")
    assert cli.error(*command).endswith("loads.json is not JSON; give a file that autoplan run --count-experts wrote")
    file.unlink()
    assert "loads.json cannot be read: No such file" in cli.error(*command)


@pytest.mark.distributed
@OTHERS
def test_a_run_writes_a_file_that_a_plan_reads(cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    small = ("moe-tiny", "--cluster", TWO_CORES, "--seq", 32, "--global-batch", 4, "--fix", "dp=2,pp=1", "--json")
    ran = cli("run", *small, "--steps", 2, "--no-check", "--count-experts", file).json
    loads = json.loads(file.read_text())
    assert loads == ran["expert_loads"]
    assert [*loads] == NAMES
    assert all(sum(tokens) == 2 * 4 * 32 * 2 for tokens in loads.values())  # steps, samples, tokens, experts of each


@pytest.mark.distributed
@OTHERS
def test_a_run_refuses_to_count_experts_that_are_not_there(cli: CommandLine, tmp_path: Path) -> None:
    small = ("gpt-tiny", "--cluster", TWO_CORES, "--seq", 32, "--global-batch", 4, "--steps", 1, "--no-check")
    message = cli.error("run", *small, "--fix", "devices=1", "--json", "--count-experts", tmp_path / "loads.json")
    assert message == "gpt-tiny has no grouped products of experts to count; leave out --count-experts"
    assert cli.error("run", *small, "--count-experts", tmp_path).endswith("it is a folder")


def test_loads_that_nobody_counts_are_explained(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)

    gpt, moe = graph_of("gpt"), graph_of("moe")
    caplog.clear()

    assert ExpertCounts(gpt, torch.device("cpu")).read() == {}
    assert "the model has no grouped product of experts; multiply their tokens by torch._grouped_mm" in caplog.text
    assert "train a step first" not in caplog.text
    assert {*map(sum, ExpertCounts(moe, torch.device("cpu")).read().values())} == {0}
    assert "train a step first" in caplog.text
