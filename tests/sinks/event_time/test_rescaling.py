"""Other numbers of tasks, deaths and undo, with all that goes by event time pending (C43, C44)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from framework.observe.logs import no_logs
from sinks import PostgresBackend, RedisBackend
from tests.kit.event_time_chains import chains, one_clock
from tests.kit.rescaled_event_time import World

pytestmark = pytest.mark.rule("C44")

WORLDS = 40


def run(seed: int, folder: Path, backend: Any = None, shape: Any = one_clock) -> Counter[str]:
    folder.mkdir()
    world = World(seed, folder, backend, shape)
    with no_logs():
        try:
            world.run()
        except AssertionError as error:
            told = "\n".join([f"World({seed}): {world.shape}: {error}", *world.trace])
            raise AssertionError(told) from error
    return world.struck


@pytest.mark.parametrize("number", range(2))
def test_each_transaction_sends_once_what_its_records_say(number: int, seed: int, tmp_path: Path) -> None:
    run(seed + number, tmp_path / "world")


@pytest.mark.slow
def test_each_transaction_of_many_worlds_sends_once_what_its_records_say(seed: int, tmp_path: Path) -> None:
    struck: Counter[str] = Counter()
    for number in range(seed, seed + WORLDS):
        struck += run(number, tmp_path / str(number))
    assert {"died", "no answer", "undone", "partition added", "partition away"} <= set(struck)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_they_do_in_other_stores(
    store: str, seed: int, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("postgres" if store == "postgres" else "redis_server")
    for number in range(seed, seed + WORLDS // 8):

        def backend(table: str, own: str = f"{name}_{number}".replace("-", "_")) -> Any:
            place = f"{own}_{table}"
            return PostgresBackend(server.dsn, place) if store == "postgres" else RedisBackend(server.url, place)

        run(number, tmp_path / str(number), backend)
