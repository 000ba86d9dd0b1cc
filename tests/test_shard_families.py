"""Hugging Face families under shardings by chance, and under those that the program picks: the rules as they meet."""

import pytest

from planner.shard.localize import localize
from planner.shard.program import Prices, variants
from planner.shard.stored import restored, stored
from planner.trace import trace
from tests import families
from tests.float64 import explicit_float32_as_float64
from tests.sharded import Chance, assert_equal, run_localized, run_whole, values_of

MICRO_BATCH = 2
SLOW_ARITHMETIC = Prices(  # so that tiny models are split
    flop_per_second=1e9, bytes_per_second=2e12, kernel_seconds=0.0, micro_batch=MICRO_BATCH, num_microbatches=4,
    collective_seconds=lambda _, num_bytes: num_bytes / 1e12,
)  # fmt: skip


@pytest.mark.families
@pytest.mark.timeout(600)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_every_family_is_equal_in_many_shardings(name: str, degree: int) -> None:
    module, batch = families.make(name), families.batch(name, MICRO_BATCH)
    with explicit_float32_as_float64():
        graph = trace(module, batch, precision="fp64")
    values = values_of(graph, families.make(name), batch)
    wanted = run_whole(graph, values, MICRO_BATCH)
    shardings = [Chance(graph, degree, seed).shardings for seed in range(4)]
    planned = [variant.shardings for variant in variants(graph, degree, SLOW_ARITHMETIC)]
    assert any(option.share < 1 for sharding in planned[0] for option in sharding.options)
    for each in (*shardings, *planned):
        assert_equal(graph, run_localized(localize(graph, each, degree), degree, values, MICRO_BATCH), wanted)
        assert restored(graph, *stored(each), degree) == each
