"""Other numbers of tasks, deaths and undo, with all that goes by event time pending (C43, C44)."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.observe.logs import no_logs
from sinks import PostgresBackend, RedisBackend
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from tests.kit.event_time_chains import chains, one_clock
from tests.kit.rescaled_event_time import World

pytestmark = pytest.mark.rule("C44")

WORLDS = 40
#: What the worlds of a test must have met.
FAULTS = {"died", "no answer", "undone", "verified", "partition added", "partition away"}


def run(
    seed: int, folder: Path, backend: Any = None, shape: Any = one_clock, kind: Callable[..., World] = World
) -> Counter[str]:
    folder.mkdir()
    world = kind(seed, folder, backend, shape)
    with no_logs():
        try:
            world.run()
        except AssertionError as error:
            told = "\n".join([f"World({seed}): {world.shape}: {error}", *world.trace])
            raise AssertionError(told) from error
    return world.struck


@pytest.fixture(params=["postgres", "redis", "both"])
def store(request: pytest.FixtureRequest) -> Callable[[str], Callable[[str], Any]]:
    """A part of the names of tables -> what makes their backends. In "both", the states of a
    topology are in two stores."""
    postgres = request.getfixturevalue("postgres") if request.param != "redis" else None
    redis = request.getfixturevalue("redis_server") if request.param != "postgres" else None

    def named(name: str) -> Callable[[str], Any]:
        def backend(table: str) -> Any:
            place = f"{name}_{table}".replace("-", "_")
            if redis is None or (postgres is not None and zlib.crc32(table.encode()) % 2):
                return PostgresBackend(postgres.dsn, place)  # type: ignore[union-attr]
            return RedisBackend(redis.url, place)

        return backend

    return named


@pytest.mark.parametrize("shape", [one_clock, chains])
@pytest.mark.parametrize("number", range(2))
def test_each_transaction_sends_once_what_its_records_say(number: int, shape: Any, seed: int, tmp_path: Path) -> None:
    run(seed + number, tmp_path / "world", shape=shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [one_clock, chains])
def test_each_transaction_of_many_worlds_sends_once_what_its_records_say(shape: Any, seed: int, tmp_path: Path) -> None:
    struck: Counter[str] = Counter()
    for number in range(seed, seed + WORLDS):
        struck += run(number, tmp_path / str(number), shape=shape)
    assert set(struck) >= FAULTS
    if shape is chains:
        assert set(struck) >= {f"{join} with 2 watermarks" for join in ("pairs", "valued")}
        assert any(" below " in each for each in struck)


def highest_watermark(patch: pytest.MonkeyPatch) -> None:
    """The watermark of the faster stream counts."""
    finish = WatermarkedCommitter.finish_batch

    def highest(self: WatermarkedCommitter) -> Any:
        self._told = [Watermarks(*map(max, zip(*self._told, strict=True)))] * len(self._told)
        return finish(self)

    patch.setattr(WatermarkedCommitter, "finish_batch", highest)


def watermark_of_one_stream(patch: pytest.MonkeyPatch) -> None:
    """A committer of two watermarks waits for both, and uses the one that arrives last."""
    finish = WatermarkedCommitter.finish_batch

    def last(self: WatermarkedCommitter) -> Any:
        self._told = self._told[-1:] * len(self._told)
        return finish(self)

    patch.setattr(WatermarkedCommitter, "finish_batch", last)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [highest_watermark, watermark_of_one_stream])
def test_the_worlds_notice_a_committer_that_does_not_wait_for_the_slowest_watermark(
    mutation: Callable[[pytest.MonkeyPatch], None], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="has sent"):
        for number in itertools.islice(itertools.count(seed), WORLDS):
            run(number, tmp_path / str(number), shape=chains)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("shape", [one_clock, chains])
def test_they_do_in_other_stores(shape: Any, seed: int, name: str, tmp_path: Path, store: Any) -> None:
    for number in range(seed, seed + WORLDS // 8):
        run(number, tmp_path / str(number), store(f"{name}_{number}"), shape)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.spark
def test_they_do_on_spark(spark: str, seed: int, name: str, tmp_path: Path, store: Any) -> None:
    from tests.kit.rescaled_on_spark import SparkWorld

    struck: Counter[str] = Counter()
    for number in range(seed, seed + WORLDS // 8):
        struck += run(number, tmp_path / str(number), store(f"{name}_{number}"), chains, SparkWorld)
    assert struck["died"]
    assert struck["worker killed"]
