"""Hugging Face families by the graph path: block by block and on several ranks, equal to the eager module.

Every family is traced once; its blocks in sequence give the eager loss and gradients, and three clipped steps by a
plan with recomputation give the eager module's, in float64 on gloo. With tensor parallelism the plan that splits most
is taken, and one with hidden states split by tokens between blocks. By default one plan a family on two ranks and a few
with tensor parallelism; `-m families` runs all plans. The table of worst errors is printed at the end.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.graph import Graph
from planner.plan import Plan
from tests import families
from tests.distributed_cases import TOLERANCE, Result
from tests.eager_oracle import Reference
from tests.families import FAMILIES
from tests.family_cases import (
    KINDS,
    graph_of,
    num_microbatches,
    plan_of,
    shares_split,
    train,
    train_by_apply,
    worst_difference,
    worst_error,
)
from tests.ranks import RankPool
from tests.test_trace import assert_covered_once, assert_equals_eager

NAMES = list(FAMILIES)
OF_A_COUPLED = ("PP2, one micro-batch", "PP4, one micro-batch")
OF_OTHERS = ("ZeRO-3", "PP2", "ZeRO-3 on 4", "PP2xDP2")
SPLIT = (
    "TP2", "TP4", "TP2, by tokens", "PP2xTP2, by chance", "TP2xDP2 ZeRO-3", "PP2xDP2xTP2 ZeRO-1, by tokens",
    "PP2xDP2xTP2 ZeRO-3, by tokens",
)  # fmt: skip


def kinds_of(name: str) -> tuple[str, ...]:
    return OF_A_COUPLED if FAMILIES[name].couples_samples else OF_OTHERS


# Trained by other quick cases: three in tests.test_runtime_equality, two of experts here, by another plan or loss.
ELSEWHERE = ("gpt2", "llama", "bert", "mixtral", "qwen2-moe")
QUICK = [
    *(
        (name, kinds_of(name)[i % 2 if kinds_of(name) is OF_OTHERS else 0])
        for i, name in enumerate(NAMES)
        if name not in ELSEWHERE
    ),
    ("t5", "TP2, by tokens"),
    ("mixtral", "TP2"),
]
WHOLE = [
    (name, kind)
    for name in NAMES
    for kind in (*kinds_of(name), *SPLIT)
    if (name, kind) not in QUICK and (KINDS[kind].dp == 1 or not FAMILIES[name].couples_samples)
]


DROPPING = {"dropout": 0.2}
DROPPING_OUTSIDE = {"dropout": 0.2, "attn_implementation": "eager"}


@cache
def graph(name: str) -> Graph:
    return graph_of(name)


class Worlds:
    """Ranks of one world size at a time, references computed once, and the table of errors."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._references: dict[tuple[str, int], Reference] = {}
        self._dropped: dict[tuple[str, bool], tuple[Graph, Result]] = {}
        self._eager = RankPool(1, tmp_path, groups=False, timeout_seconds=100)
        self._ranks: RankPool | None = None
        self.table: list[tuple[str, str, float, str]] = []

    def reference(self, name: str, chunks: int) -> Reference:
        """Only a loss that is no mean over samples depends on how the batch is cut into micro-batches."""
        if FAMILIES[name].is_separable:
            chunks = num_microbatches(name)
        if (name, chunks) not in self._references:
            self._references[name, chunks] = self._eager.run(families.reference, name, chunks)[0]
        return self._references[name, chunks]

    def dropped(self, name: str, settings: dict[str, Any]) -> tuple[Graph, Result]:
        """A family that drops elements, and what one rank makes of it."""
        key = name, settings == DROPPING
        if key not in self._dropped:
            found = graph_of(name, **settings)
            assert found.dropout_nodes
            alone = self.ranks(1)
            (expected,) = alone.run(train, name, found, plan_of(name, found, "one device"), settings)
            (without,) = alone.run(train, name, graph(name), plan_of(name, graph(name), "one device"), {})
            assert abs(expected.losses[0] / without.losses[0] - 1) > 1e-6
            self._dropped[key] = found, expected
        return self._dropped[key]

    def ranks(self, world_size: int) -> RankPool:
        if self._ranks is None or self._ranks.world_size != world_size:
            if self._ranks is not None:
                self._ranks.close()
            self._ranks = RankPool(world_size, self._tmp_path, timeout_seconds=100)
        return self._ranks

    def close(self) -> None:
        self._eager.close()
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()
    if made.table:
        capture: Any = request.config.pluginmanager.get_plugin("capturemanager")
        reporter: Any = request.config.pluginmanager.get_plugin("terminalreporter")
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"\n{'family':18} {'plan, full recomputation':24} worst relative error")
            for name, kind, error, where in sorted(made.table):
                reporter.write_line(f"{name:18} {kind:24} {error:.1e} ({where})")


def check(worlds: Worlds, name: str, kind_name: str) -> None:
    kind = KINDS[kind_name]
    expected = worlds.reference(name, kind.dp * num_microbatches(name))
    results = worlds.ranks(kind.world_size).run(
        train, name, graph(name), checked_plan(name, graph(name), kind_name), {}
    )
    error, where = worst_error(results, expected)
    worlds.table.append((name, kind_name, error, where))

    assert error < TOLERANCE, where


def checked_plan(name: str, found: Graph, kind_name: str) -> Plan:
    """A plan that splits what its kind says: tiny models are not worth it unless they are asked to."""
    plan, kind = plan_of(name, found, kind_name), KINDS[kind_name]
    if kind.tp > 1:
        of_matrices, of_blocks = shares_split(found, plan)
        assert of_matrices > (0.8 if kind.variant != "chance" else 0)
        assert of_blocks >= 0.5 or kind.variant != "sequence"  # of two stacks, the length of one can be odd
    return plan


def by_world(cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(cases, key=lambda case: KINDS[case[1]].world_size)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_a_graph_whose_blocks_are_its_layers_and_equal_eager(name: str) -> None:
    found, model = graph(name), families.make(name)
    assert not found.fallbacks, found.fallbacks
    assert_covered_once(found)
    assert sorted(b.name for b in found.blocks if b.kind == "block") == sorted(families.layers(model))
    for samples in (2, 3, 4) if FAMILIES[name].couples_samples else (1, 2, 3):
        assert_equals_eager(found, model, families.batch(name, samples, step=samples), float64_mode=True)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "kind"), by_world(QUICK))
def test_a_family_trains_as_on_one_device(worlds: Worlds, name: str, kind: str) -> None:
    check(worlds, name, kind)


@pytest.mark.families
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "kind"), by_world(WHOLE))
def test_all_plans_of_a_family_train_as_on_one_device(worlds: Worlds, name: str, kind: str) -> None:
    check(worlds, name, kind)


def check_dropout(worlds: Worlds, name: str, kind_name: str) -> None:
    """The same elements are dropped whatever the plan: one rank is the reference.

    Where ranks split heads, attention must drop outside of its kernel, inside of which each draws for its own part.
    """
    settings = DROPPING if KINDS[kind_name].tp == 1 else DROPPING_OUTSIDE
    found, expected = worlds.dropped(name, settings)
    plan = checked_plan(name, found, kind_name)
    results = worlds.ranks(KINDS[kind_name].world_size).run(train, name, found, plan, settings)
    error, where = worst_difference(results, expected)
    worlds.table.append((f"{name}, dropout", kind_name, error, where))

    assert error < TOLERANCE, where


WITH_DROPOUT = ("gpt2", "t5", "bart")
WITH_SPLIT_DROPOUT = (*WITH_DROPOUT, "bert", "opt", "vit", "whisper")


@pytest.mark.distributed
def test_dropout_is_the_same_in_a_pipeline_with_recomputation(worlds: Worlds) -> None:
    check_dropout(worlds, "gpt2", "PP2")


@pytest.mark.distributed
def test_dropout_is_the_same_on_ranks_that_split_what_is_dropped(worlds: Worlds) -> None:
    check_dropout(worlds, "gpt2", "TP2")


@pytest.mark.families
@pytest.mark.distributed
@pytest.mark.parametrize("kind", OF_OTHERS)
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_is_the_same_in_every_plan(worlds: Worlds, name: str, kind: str) -> None:
    check_dropout(worlds, name, kind)


@pytest.mark.families
@pytest.mark.distributed
@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("name", WITH_SPLIT_DROPOUT)
def test_dropout_is_the_same_in_every_plan_that_splits(worlds: Worlds, name: str, kind: str) -> None:
    check_dropout(worlds, name, kind)


def check_apply(worlds: Worlds, name: str, kind_name: str) -> None:
    """As a user trains: every rank traces anew, the ranks are checked beside the eager module first."""
    plan, kind = checked_plan(name, graph(name), kind_name), KINDS[kind_name]
    found = worlds.ranks(kind.world_size).run(train_by_apply, name, plan, timeout_seconds=300)
    expected = worlds.reference(name, kind.dp * num_microbatches(name))
    error, where = worst_error([result for result, _ in found], expected)
    worlds.table.append((name, f"{kind_name}, apply", error, where))

    assert error < TOLERANCE, where
    for _, report in found:
        assert (report.ranks, report.skipped, report.replicated) == (kind.tp, "", ())


@pytest.mark.distributed
def test_a_split_family_is_traced_checked_and_trained_on_its_ranks(worlds: Worlds) -> None:
    check_apply(worlds, "opt", "TP2")


@pytest.mark.families
@pytest.mark.timeout(400)
@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name in NAMES if name != "opt"])
def test_every_split_family_is_traced_checked_and_trained_on_its_ranks(worlds: Worlds, name: str) -> None:
    check_apply(worlds, name, "TP2")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_familys_loss_does_with_samples_is_known(name: str) -> None:
    family, found = FAMILIES[name], graph(name)

    assert bool(found.couples_samples) == family.couples_samples
    assert bool(found.not_separable) == (family.couples_samples or not family.is_separable)
