"""Ranks that the tests of one module share: they start with the first test that wants them and end with the module."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


def _pool(world_size: int, factory: pytest.TempPathFactory, timeout_seconds: float = 100) -> Iterator[RankPool]:
    with RankPool(world_size, factory.mktemp(f"ranks{world_size}"), timeout_seconds=timeout_seconds) as pool:
        yield pool


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(1, tmp_path_factory)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(4, tmp_path_factory)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(8, tmp_path_factory, timeout_seconds=200)


@pytest.fixture(scope="module")
def own_trace_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces of an earlier run must not stand in for those of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
