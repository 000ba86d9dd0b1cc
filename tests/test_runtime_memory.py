"""What FSDP2 holds and sends under each ZeRO stage: the formulas of `memory`, byte for byte, and a step's counts."""

from typing import Any

import pytest

from planner.memory import PRECISIONS, held_bytes
from tests.distributed_cases import Kind, held_and_collectives
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed

BLOCKS = 6  # of the test GPT
M = 3
# Of each step besides ZeRO's: the samples of every rank, the counts of valid targets, and loss with gradient norm.
OWN = 3


def expected(found: dict[str, Any], dp: int, precision: str, moment: Any) -> list[dict[str, int]]:
    return [
        held_bytes(parameters, zero, dp, PRECISIONS[precision], moment, M)
        for parameters, zero in zip(found["parameters"], found["zero"], strict=True)
    ]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_block_holds_what_memory_predicts(two: RankPool, zero: int, precision: str) -> None:
    for found in two.run(held_and_collectives, Kind(name="", dp=2, zero=(zero,)), precision, M):
        assert found["moments"]["between"] == expected(found, 2, precision, "between")
        assert found["moments"]["last"] == expected(found, 2, precision, "last")
        assert all(block["p_full"] == block["g_full"] == 0 for block in found["moments"]["after"])


@pytest.mark.parametrize("zero", [1, 3])
def test_a_padded_shard_holds_what_memory_predicts(four: RankPool, zero: int) -> None:
    # 61 rows on 4 ranks: 16, 16, 16 and 13, all held as 16
    for found in four.run(held_and_collectives, Kind(name="", dp=4, zero=(zero,)), "fp64", M):
        assert found["moments"]["between"] == expected(found, 4, "fp64", "between")
        assert found["moments"]["last"] == expected(found, 4, "fp64", "last")


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_holds_what_its_shard_degree_predicts(four: RankPool, zero: int, precision: str) -> None:
    for found in four.run(held_and_collectives, Kind(name="", dp=4, shards=2, zero=(zero,)), precision, M):
        assert found["moments"]["between"] == expected(found, 2, precision, "between")
        assert found["moments"]["last"] == expected(found, 2, precision, "last")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_block_of_a_pipeline_holds_what_memory_predicts(four: RankPool, zero: int) -> None:
    last_stage = four.run(held_and_collectives, Kind(name="", pp=2, dp=2, zero=(zero,)), "fp64", M)[2:]

    for found in last_stage:
        assert found["moments"]["between"] == expected(found, 2, "fp64", "between")
        last = expected(found, 2, "fp64", "last")
        if zero < 2:  # the schedule drops the gathered copy when it reduces
            last = [block | {"p_full": 0} for block in last]
        assert found["moments"]["last"] == last


@pytest.mark.parametrize(
    ("zero", "counts"),
    [
        (0, {"allreduce": BLOCKS + OWN}),
        (1, {"allgather_base": BLOCKS, "reduce_scatter_base": BLOCKS, "allreduce": OWN}),
        (2, {"allgather_base": BLOCKS, "reduce_scatter_base": BLOCKS * M, "allreduce": OWN}),
        (3, {"allgather_base": 2 * BLOCKS * M, "reduce_scatter_base": BLOCKS * M, "allreduce": OWN}),
    ],
)
def test_a_step_communicates_as_often_as_its_zero_stage_says(two: RankPool, zero: int, counts: dict[str, int]) -> None:
    for found in two.run(held_and_collectives, Kind(name="", dp=2, zero=(zero,)), "fp64", M):
        assert found["collectives"] == counts


@pytest.mark.parametrize(
    ("zero", "counts"),
    [
        (1, {"allgather_base": BLOCKS, "reduce_scatter_base": BLOCKS}),
        (2, {"allgather_base": BLOCKS, "reduce_scatter_base": BLOCKS * M}),
        (3, {"allgather_base": 2 * BLOCKS * M, "reduce_scatter_base": BLOCKS * M}),
    ],
)
def test_hybrid_sharding_sums_replicas_once_a_step(four: RankPool, zero: int, counts: dict[str, int]) -> None:
    for found in four.run(held_and_collectives, Kind(name="", dp=4, shards=2, zero=(zero,)), "fp64", M):
        assert found["collectives"] == counts | {"allreduce": BLOCKS + OWN}


@pytest.mark.parametrize(
    ("zero", "counts"),
    [
        (0, {"allreduce": 3 + OWN}),
        (1, {"allgather_base": 3, "reduce_scatter_base": 3, "allreduce": OWN}),
        (2, {"allgather_base": 3, "reduce_scatter_base": 3 * M, "allreduce": OWN}),
    ],
)
def test_a_pipeline_stage_communicates_as_often_as_its_zero_stage_says(
    four: RankPool, zero: int, counts: dict[str, int]
) -> None:
    for found in four.run(held_and_collectives, Kind(name="", pp=2, dp=2, zero=(zero,)), "fp64", M):
        collectives = {k: v for k, v in found["collectives"].items() if k not in ("send", "recv")}

        assert collectives == counts


def test_recomputation_gathers_no_more_often(two: RankPool) -> None:
    plain = two.run(held_and_collectives, Kind(name="", dp=2, zero=(3,)), "fp64", M)
    again = two.run(held_and_collectives, Kind(name="", dp=2, zero=(3,), recompute=("full",)), "fp64", M)

    assert [r["collectives"] for r in again] == [r["collectives"] for r in plain]
