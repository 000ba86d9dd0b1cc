"""Training by a plan equals training on one device, for every model and kind of plan (DESIGN, law 2).

Losses, gradient norms, gradients of the first step and parameters after three clipped steps, in float64 on gloo,
against the eager module in a process without planner. The table of pairs with the worst error is printed at the end.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.distributed_cases import KINDS, NUM_MICROBATCHES, TOLERANCE, train, worst_error
from tests.distributed_references import reference
from tests.eager_oracle import Reference
from tests.ranks import RankPool

# A covering subset: every kind of plan at least once, every model with ZeRO, with a pipeline and with recomputation.
QUICK = [
    ("gpt", "one device", "adamw"),
    ("resnet", "one device, recompute", "sgd"),
    ("gpt-tied", "ZeRO-0", "sgd"),
    ("hf-gpt2", "ZeRO-1", "adamw"),
    ("llama", "ZeRO-2", "sgd"),
    ("gpt-tied", "ZeRO-3", "adamw"),
    ("hf-llama", "ZeRO-3, recompute", "sgd"),
    ("gpt", "ZeRO-0, recompute", "sgd"),
    ("t5", "ZeRO-3", "adamw"),
    ("unet", "ZeRO-3", "sgd"),
    ("moe", "ZeRO-3", "adamw"),
    ("gpt-tied", "ZeRO 1/3/2 mixed", "sgd"),
    ("resnet", "ZeRO 1/3/2 mixed", "sgd"),
    ("llama", "PP2 1F1B", "adamw"),
    ("resnet", "PP2 1F1B", "sgd"),
    ("resnet", "PP2 GPipe, recompute", "sgd"),
    ("hf-gpt2", "PP2 1F1B, uneven", "sgd"),
    ("bert", "PP2 1F1B", "sgd"),
    ("t5", "PP2 1F1B", "sgd"),
    ("vit", "PP2 1F1B", "sgd"),
    ("unet", "PP2 GPipe, recompute", "sgd"),
    ("moe", "PP2 1F1B", "adamw"),
    ("gpt", "ZeRO-1 on 4", "adamw"),
    ("gpt", "HSDP 2x2 ZeRO-1", "adamw"),
    ("hf-gpt2", "HSDP 2x2 ZeRO-2, recompute", "sgd"),
    ("gpt-tied", "HSDP 2x2 ZeRO-3", "adamw"),
    ("llama", "HSDP 2x2 ZeRO 1/3/2 mixed, recompute", "sgd"),
    ("gpt-tied", "PP4 GPipe", "adamw"),
    ("hf-bert", "PP4 1F1B, uneven, recompute", "sgd"),
    ("hf-gpt2", "PP2xDP2 ZeRO-0", "sgd"),
    ("gpt-tied", "PP2xDP2 ZeRO-1", "sgd"),
    ("hf-bert", "PP2xDP2 ZeRO-2", "adamw"),
    ("gpt-tied", "PP2xDP2 ZeRO-3", "adamw"),
    ("hf-llama", "PP2xDP2 ZeRO 2/3 mixed, uneven, recompute", "sgd"),
    ("resnet", "PP2xDP2 GPipe ZeRO-1, recompute", "sgd"),
    ("bert", "PP2xDP2 ZeRO 2/3 mixed, uneven, recompute", "adamw"),
    ("t5", "PP2xDP2 ZeRO 2/3 mixed, uneven, recompute", "sgd"),
    ("vit", "PP2xDP2 GPipe ZeRO-1, recompute", "sgd"),
    ("unet", "PP2xDP2 ZeRO 2/3 mixed, uneven, recompute", "sgd"),
    ("moe", "PP2xDP2 ZeRO 2/3 mixed, uneven, recompute", "sgd"),
    ("hf-bert", "PP4xDP2 ZeRO-1", "sgd"),
    ("gpt-tied", "PP4xDP2 ZeRO-3", "adamw"),
    ("llama", "PP2xDP4 GPipe ZeRO-2", "sgd"),
    ("gpt", "PP2xHSDP 2x2 ZeRO-1", "sgd"),
    ("gpt-tied", "PP2xHSDP 2x2 ZeRO-3", "adamw"),
    ("llama", "TP2", "adamw"),
    ("t5", "TP2 lean, recompute", "sgd"),
    ("unet", "TP2 lean, recompute", "sgd"),
    ("vit", "TP4 leanest", "adamw"),
    ("gpt", "TP2xDP2 ZeRO-0", "sgd"),
    ("hf-gpt2", "TP2xDP2 ZeRO-1", "adamw"),
    ("resnet", "TP2xDP2 ZeRO-2", "sgd"),
    ("moe", "TP2xDP2 ZeRO-3, recompute", "sgd"),
    ("gpt-tied", "PP2xTP2 1F1B, recompute", "adamw"),
    ("resnet", "PP2xTP2 GPipe", "sgd"),
    ("bert", "PP2xDP2xTP2 ZeRO-1", "sgd"),
    ("gpt-tied", "PP2xDP2xTP2 ZeRO-3, recompute", "adamw"),
    ("llama", "HSDP 2x2xTP2 ZeRO 1/3/2 mixed", "sgd"),
    ("gpt", "CP2", "adamw"),
    ("t5", "CP2 lean, recompute", "sgd"),
    ("llama", "CP4", "sgd"),
    ("bert", "CP2xDP2 ZeRO-3", "adamw"),
    ("llama", "CP2xDP2 ZeRO-1 lean", "sgd"),
    ("gpt", "HSDP 2x1xCP2 ZeRO 1/3/2 mixed", "sgd"),
    ("gpt-tied", "PP2xCP2 1F1B ZeRO-1, recompute", "sgd"),
    ("bert", "PP2xCP2 GPipe ZeRO-3 lean", "sgd"),
    ("llama", "CP2xTP2 ZeRO-3 leanest", "adamw"),
    ("moe", "EP2 ZeRO-3, recompute", "adamw"),
    ("moe", "HSDP 2xEP2 ZeRO 1/3/2 mixed", "sgd"),
]
# Only some models have experts; what else these kinds do is among the quick ones.
WITH_EXPERTS, EXPERTS = {"moe"}, {name for name, kind in KINDS.items() if kind.ep > 1}
# Kinds whose parts are among the quick ones.
COMPOSED = {kind for kind in KINDS if "CP2xTP2" in kind} - {"CP2xTP2 ZeRO-3 leanest"}
WHOLE = [
    (m, k, o)
    for k in KINDS
    for m in (WITH_EXPERTS if k in EXPERTS else models.MODELS)
    for o in models.OPTIMIZERS
    if (m, k, o) not in QUICK
]


class Worlds:
    """Ranks of one world size at a time, references computed once, and the table of errors."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._references: dict[tuple[str, str, int], Reference] = {}
        self._eager = RankPool(1, tmp_path, groups=False, timeout_seconds=100)
        self._ranks: RankPool | None = None
        self.table: list[tuple[str, str, str, float, str]] = []

    def reference(self, model: str, optimizer: str, chunks: int) -> Reference:
        """Only batch normalisation depends on how the batch is cut into micro-batches."""
        if not models.MODELS[model].has_batch_norm:
            chunks = NUM_MICROBATCHES
        key = model, optimizer, chunks
        if key not in self._references:
            self._references[key] = self._eager.run(reference, *key)[0]
        return self._references[key]

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
            write = reporter.write_line
            write(f"\n{'model':10} {'plan':44} {'optimizer':9} worst relative error")
            for model, kind, optimizer, error, where in made.table:
                write(f"{model:10} {kind:44} {optimizer:9} {error:.1e} ({where})")


def check(worlds: Worlds, model: str, kind: str, optimizer: str) -> None:
    ranks = KINDS[kind]
    expected = worlds.reference(model, optimizer, ranks.dp * NUM_MICROBATCHES)
    results = worlds.ranks(ranks.world_size).run(train, model, kind, optimizer)
    error, where = worst_error(model, results, expected)
    worlds.table.append((model, kind, optimizer, error, where))

    assert error < TOLERANCE, where


def by_world(cases: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return sorted(cases, key=lambda case: KINDS[case[1]].world_size)


@pytest.mark.distributed
@pytest.mark.parametrize(("model", "kind", "optimizer"), by_world(QUICK))
def test_training_by_a_plan_equals_one_device(worlds: Worlds, model: str, kind: str, optimizer: str) -> None:
    check(worlds, model, kind, optimizer)


@pytest.mark.matrix
@pytest.mark.distributed
@pytest.mark.parametrize(("model", "kind", "optimizer"), by_world(WHOLE))
def test_the_whole_matrix_equals_one_device(worlds: Worlds, model: str, kind: str, optimizer: str) -> None:
    check(worlds, model, kind, optimizer)


def test_the_quick_cases_cover_every_model_and_every_kind() -> None:
    assert {model for model, _, _ in QUICK} == set(models.MODELS)
    assert {kind for _, kind, _ in QUICK} | EXPERTS == set(KINDS) - COMPOSED
