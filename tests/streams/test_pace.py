"""The pace that a pipeline says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import Config
from framework.errors import TopologyError
from framework.transactions import MemoryStore
from ratchet import Pipeline, sqlite
from tests.kit.waiting import PATIENCE_S


def orders(folder: Path) -> Pipeline:
    shop = Pipeline("shop")
    shop.read([{"id": number} for number in range(20)]).append_into(sqlite(folder / "shop.db", "orders"), name="table")
    return shop


@pytest.mark.parametrize(
    ("config", "interval"), [({}, 0.1), ({"topology.commit.interval": "2 s"}, 2.0)], ids=["said", "configured"]
)
def test_a_pipeline_says_its_pace_and_the_configuration_wins(config: Any, interval: float, tmp_path: Path) -> None:
    shop = orders(tmp_path).every("100 ms").at_most(6_000_000, per="min")
    assert shop.build().settings == {"topology.commit.interval": 0.1, "topology.rate.records.per.second": 100_000}
    with shop.submit(config, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        pace = run.status().pace
    assert pace == {"topology.commit.interval": interval, "topology.rate.records.per.second": 100_000.0}


def test_batches_are_options_of_the_spout() -> None:
    shop = Pipeline("shop")
    shop.read_kafka("orders", bootstrap_servers="broker:9092")
    shop.batches(max_records=1_000, max_bytes=1 << 20)
    with pytest.raises(TopologyError, match="batch_records_max"):
        shop.batches(max_records=0)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (r"every\('soon'\): the interval is 'soon'", lambda shop: shop.every("soon")),
        (r"at_most\(0, per='1 s'\): 0 records: give a number above 0", lambda shop: shop.at_most(0)),
        ("per is 'fortnight'|per is '1 fortnight'", lambda shop: shop.at_most(5, per="fortnight")),
        (r"say it after read_kafka\(...\)", lambda shop: shop.batches(max_records=5)),
    ],
)
def test_mistakes_are_named(message: str, wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=message):
        wrong(orders(tmp_path))


def test_defaults_do_not_replace_what_is_set() -> None:
    given = Config.of({"topology.max.spout.pending": 4})
    merged = given.with_defaults({"topology.max.spout.pending": 9, "topology.commit.interval": 5})
    assert (merged.max_spout_pending, merged.commit_interval_s) == (4, 5.0)
    assert given.commit_interval_s is None and given.with_defaults({}) is given
