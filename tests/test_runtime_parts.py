"""Parameters and buffers that tensor parallelism splits: cut, read, drawn, trained, gathered, written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from planner.cluster import device_named
from planner.errors import PlanError
from planner.runtime.peers import usual_prices
from planner.shard.pieces import check_splits, original, pieces, stored_order
from planner.shard.placement import Placement
from planner.trace.parallel import piece_of
from tests import parts_cases
from tests.parts_cases import Case
from tests.ranks import RankPool
from tests.test_runtime_weights import untied, write

PATTERNS = ["S0[8]", "S0*3[4]", "S0[8,4,4]", "S0*2[4,8]", "S0*3[8,4,12]"]
COVERING = [
    (Case(model="mixed", tp=2), "own"),
    (Case(model="mixed", tp=2), "file"),
    (Case(model="mixed", tp=2), "drawn"),
    (Case(model="hf-gpt2", tp=2), "file"),
]
ON_FOUR = [
    (Case(model="mixed", tp=2, dp=2, zero=3), "file"),
    (Case(model="mixed", tp=2, dp=2, zero=1), "drawn"),
    (Case(model="mixed", tp=2, dp=2, zero=0), "file"),
    (Case(model="mixed", tp=4), "own"),
    (Case(model="hf-gpt2", tp=2, dp=2, zero=3), "own"),
]


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("degree", [2, 4])
def test_pieces_are_those_that_a_rank_computes_with(text: str, degree: int) -> None:
    placement = Placement.parse(text)
    size = placement.repeats * sum(placement.parts)  # type: ignore[arg-type, operator]
    dim = torch.arange(size)

    def at(spans: Any) -> torch.Tensor:
        return torch.cat([dim[start:stop] for start, stop in spans])

    held = [at(pieces(placement, degree, rank)) for rank in range(degree)]

    for rank in range(degree):
        computed = piece_of(dim, 0, placement.parts, placement.repeats, rank, degree)  # type: ignore[arg-type]
        assert torch.equal(held[rank], computed)
    stored = torch.cat(held)
    assert torch.equal(at(stored_order(placement, degree)), stored)
    assert stored.sort().values.equal(dim)
    for start in range(size):
        for stop in range(start + 1, size + 1):
            assert torch.equal(at(original(placement, degree, start, stop)), stored[start:stop])
    assert original(placement, degree, 3, 3) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("P", "the plan gives w the placement P; it must be whole or split: plan again"),
        ("S0[6]", r"splits w by S0\[6\], and its shape is \[8, 4\]"),
        ("S2[4]", r"splits w by S2\[4\], and its shape is \[8, 4\]"),
        ("S0[6,2]", r"splits w by S0\[6,2\] over 4 ranks, which do not divide it"),
        ("S0*B[8]", r"splits w by S0\*B\[8\], and its shape is \[8, 4\]"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_splits("w", (8, 4), Placement.parse(text), 4)
    check_splits("w", (8, 4), Placement.parse("S0[4,4]"), 4)


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "source"), COVERING, ids=lambda value: getattr(value, "name", value))
def test_split_weights_on_two_ranks(two: RankPool, tmp_path: Path, case: Case, source: str) -> None:
    _check(two, tmp_path, case, source)


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "source"), ON_FOUR, ids=lambda value: getattr(value, "name", value))
def test_split_weights_on_four_ranks(four: RankPool, tmp_path: Path, case: Case, source: str) -> None:
    _check(four, tmp_path, case, source)


@pytest.mark.distributed
@pytest.mark.matrix
@pytest.mark.parametrize(("source", "zero"), [("own", 1), ("file", 3), ("drawn", 3)])
def test_split_weights_on_eight_ranks_with_replicas(eight: RankPool, tmp_path: Path, source: str, zero: int) -> None:
    _check(eight, tmp_path, Case(model="mixed", tp=2, dp=4, shards=2, zero=zero), source)


def _check(pool: RankPool, tmp_path: Path, case: Case, source: str) -> None:
    """The values of one device, bit by bit, wherever they come from and after every step; exact bytes."""
    if source == "file":
        write(untied(parts_cases.made(case.model)), tmp_path / "given")

    results = pool.run(parts_cases.held, case, source, tmp_path)

    for result in results:
        assert result["start"] == []
        assert result["gradients"] == []
        assert result["end"] == []
    model = parts_cases.made(case.model)
    names = {name for name, _ in model.named_parameters()}
    if source == "file":
        buffers = sum(b.nbytes for b in model.buffers()) * 2  # the state's and a stage's
        spare = sum(p.nbytes for name, p in model.named_parameters() if name == "spare")
        assert [r["read"] - r["own"] for r in results] == [buffers + spare] * len(results)
    stored = {n: v for file in results[0]["saved"] if file.suffix != ".json" for n, v in load_file(file).items()}
    assert names <= stored.keys()
    assert all(torch.equal(value, results[0]["state"][name]) for name, value in stored.items())
    largest = max(p.nbytes for p in model.parameters())
    assert all(r["held"] <= r["own"] + 3 * largest for r in results)  # gathered, put together, the one before


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (
            {"odd.weight": "S0[3]"},
            "PlanError: the plan splits odd.weight by S0[3] over 2 ranks, which do not divide it",
        ),
        ({"qkv.bias": "S0[8]"}, "PlanError: the plan splits qkv.bias by S0[8], and its shape is [16]"),
        ({"norm.running_mean": "S0*3[4]"}, "PlanError: the plan splits norm.running_mean by S0*3[4], and its shape is"),
    ],
)
def test_placements_that_do_not_fit_the_model_are_refused(two: RankPool, mapping: dict[str, str], said: str) -> None:
    for sentence in two.run(parts_cases.refused, mapping):
        assert sentence.startswith(said)


@pytest.mark.distributed
def test_a_rank_reads_and_holds_its_part_and_one_tensor(four: RankPool, tmp_path: Path) -> None:
    given = str(write(untied(parts_cases.made("gpt")), tmp_path / "given"))
    case = Case(model="gpt", tp=2, dp=2, zero=3)

    for held in four.run(parts_cases.held_while_starting, case, given):
        assert held["read"] == held["own"] < held["model"] * 0.27
        assert held["most"] <= held["own"] * 1.15 + held["largest tensor"]
    for held in four.run(parts_cases.held_while_starting, case, None):
        assert held["most"] <= held["own"] * 1.15 + 2 * held["largest module"]


@pytest.mark.parametrize("degree", [2, 3, 16])
def test_prices_for_other_batch_shapes_are_those_of_a_known_device(degree: int) -> None:
    prices, device = usual_prices(degree), device_named("H100-80GB")

    assert prices.flop_per_second == device.peak_flop_per_second["bfloat16"]
    assert prices.bytes_per_second == device.memory_bytes_per_second
    assert 0 < prices.collective_seconds("all_gather", 1e6) < prices.collective_seconds("all_gather", 1e8)
