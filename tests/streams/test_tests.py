"""What ``pipeline.test`` proves: the committers are the real ones."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework.errors import BadRecordError, ConfigError
from framework.testing import crash, fail_attempt, replay
from framework.transactions.run import TopologyFailed
from ratchet import Json, Pipeline, dead_letters, postgres, sqlite
from sinks.rows.transactional_table import RowTable

BROKER = "127.0.0.1:1"
DSN = "host=127.0.0.1 port=1 dbname=nowhere"
FAULTS: list[list[Any]] = [[], [replay(2)], [crash(2)], [crash(2, when="written")], [fail_attempt(2), replay(1)]]


def orders_of(shop: Pipeline, **types: Any) -> Any:
    return shop.read_kafka("orders", value=Json(order=str, n=int, **types), bootstrap_servers=BROKER)


ROWS = [
    {"order": "a", "n": 1, "op": "c"},
    {"order": "a", "n": 3, "op": "u"},
    {"order": "a", "n": 2, "op": "u"},
    {"order": "b", "n": 5, "op": "d"},
    {"order": "b", "n": 4, "op": "u"},
    {"order": "c", "n": 1, "op": "c"},
    {"order": "c", "n": 1, "op": "u"},
]


@pytest.mark.each_value_once
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("target", [postgres(DSN, "orders"), sqlite("nowhere/orders.db", "orders")])
def test_the_newest_row_is_that_of_the_committer(target: Any, faults: list[Any]) -> None:
    shop = Pipeline("shop")
    orders = orders_of(shop, op=str)
    orders.latest_by("order", sequence_by="n", delete_when="op = 'd'").upsert_into(target, name="newest")
    orders.latest_by("order").upsert_into(postgres(DSN, "arrived"), name="arrived", parallelism=2)
    orders.append_into(postgres(DSN, "raw"), name="raw")
    tables = shop.test({"orders": ROWS}, take=2, faults=list(faults))
    # The deletion of b has a sequence, which the older change does not undo.
    assert [(each["order"], each["n"], each["op"]) for each in tables["newest"]] == [("a", 3, "u"), ("c", 1, "u")]
    assert sorted((each["order"], each["n"]) for each in tables["arrived"]) == [("a", 2), ("b", 4), ("c", 1)]
    assert list(tables["raw"]) == ROWS


@pytest.mark.parametrize("faults", [[replay(2)], [crash(2, when="written")]])
def test_a_committer_that_takes_nothing_back_is_seen(faults: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowTable, "_take_back", lambda self, connection, txid: self._forget(connection) or 0)
    shop = Pipeline("shop")
    orders_of(shop, op=str).append_into(postgres(DSN, "raw"), name="raw")
    assert len(shop.test({"orders": ROWS}, take=2, faults=list(faults))["raw"]) > len(ROWS)


@pytest.mark.parametrize("faults", FAULTS[:3])
def test_values_that_sqlite_lacks_come_back(faults: list[Any]) -> None:
    shop = Pipeline("shop")
    rows = shop.read([], id=pa.uint64(), price=float, tags=pa.list_(pa.int64()), raw=bytes, day=pa.date32())
    rows.latest_by("id").upsert_into(postgres(DSN, "wide"), name="wide")
    given = [
        {"id": 2**64 - 1, "price": math.inf, "tags": [1, 2], "raw": b"\0", "day": datetime.date(2026, 1, 1)},
        {"id": 7, "price": None, "tags": None, "raw": None, "day": None},
        {"id": 7, "price": -0.5, "tags": [], "raw": b"", "day": datetime.date(1, 1, 1)},
    ]
    found = shop.test({"rows": given}, take=2, faults=list(faults))["wide"]
    assert sorted(found, key=lambda row: row["id"]) == [given[2], given[0]]


def test_numbers_that_sqlite_lacks_are_keys() -> None:
    shop = Pipeline("shop")
    rows = shop.read([], price=float, n=int)
    rows.latest_by("price").upsert_into(postgres(DSN, "prices"), name="prices")
    given = [{"price": price, "n": n} for n, price in enumerate([math.nan, 0.0, math.nan, -0.0, 1.5])]
    found = shop.test({"rows": given}, take=2, faults=[replay(2)])["prices"]
    assert sorted((repr(row["price"]), row["n"]) for row in found) == [("0.0", 3), ("1.5", 4), ("nan", 2)]


def test_a_record_that_a_topic_refuses_fails_in_a_test() -> None:
    shop = Pipeline("shop")
    orders_of(shop).to_kafka("out", key=lambda row: row["order"], name="out")
    with pytest.raises(TopologyFailed, match="key or value returned a str, not bytes"):
        shop.test({"orders": [{"order": "a", "n": 1}]})


@pytest.mark.parametrize("faults", FAULTS)
def test_a_topic_gets_each_row_once(faults: list[Any]) -> None:
    shop = Pipeline("shop")
    orders_of(shop).filter("n > 1").to_kafka("out", key="order", value=["n"], name="out")
    rows = [{"order": str(n), "n": n} for n in range(6)]
    assert list(shop.test({"orders": rows}, take=2, faults=list(faults))["out"]) == rows[2:]


def test_a_test_writes_nowhere(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    orders = orders_of(shop)
    orders.latest_by("order").upsert_into(sqlite(tmp_path / "a.db", "newest"))
    orders.append_into(sqlite(tmp_path / "b.db", "raw"))
    shop.test({"orders": [{"order": "a", "n": 1}]})
    assert not list(tmp_path.iterdir())


def _without_bad_ones(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] == 3:
        raise BadRecordError("three")
    return row


def _refusing(policy: Any) -> Pipeline:
    shop = Pipeline("shop")
    read = shop.read_kafka("orders", value=Json(order=str, n=int), bootstrap_servers=BROKER, on_bad_record=policy)
    read.append_into(sqlite("nowhere.db", "raw"), name="raw")
    orders = read.map(_without_bad_ones, order=str, n=int)
    orders.latest_by("order").upsert_into(sqlite("nowhere.db", "newest"), name="newest")
    return shop


BAD = [{"order": order, "n": n} for order, n in [("a", 1), ("b", 3), (None, 2), ("c", 4), ("d", 3), ("a", 5)]]


@pytest.mark.each_value_once
@pytest.mark.rule("C51")
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("take", [1, 4, 100, [1, 3, 2]])
@pytest.mark.parametrize("policy", ["skip", dead_letters(sqlite("nowhere.db", "letters"))])
def test_a_bad_row_is_left_out_of_all_sinks(policy: Any, take: Any, faults: list[Any]) -> None:
    struck = [each for each in faults if each.txid == 1 or take != 100]
    tables = _refusing(policy).test({"orders": BAD}, take=take, faults=struck)
    assert list(tables["raw"]) == [BAD[0], BAD[3], BAD[5]]
    assert [(each["order"], each["n"]) for each in tables["newest"]] == [("a", 5), ("c", 4)]


def test_a_bad_row_fails_a_test_where_nothing_is_said() -> None:
    with pytest.raises(BadRecordError, match="three"):
        _refusing("fail").test({"orders": BAD[:2]})


@pytest.mark.parametrize("bad_topic", ["orders", "payments"])
def test_a_bad_row_goes_as_its_topic_says(bad_topic: str) -> None:
    shop = Pipeline("shop")
    orders = shop.read_kafka("orders", value=Json(order=str, n=int), bootstrap_servers=BROKER, on_bad_record="skip")
    payments = shop.read_kafka("payments", value=Json(order=str, n=int))
    both = orders.merge(payments).map(_without_bad_ones, order=str, n=int)
    both.append_into(sqlite("nowhere.db", "raw"), name="raw")
    given = {"orders": [{"order": "a", "n": 1}], "payments": [{"order": "b", "n": 2}]}
    given[bad_topic].append({"order": "c", "n": 3})
    if bad_topic == "payments":
        with pytest.raises(BadRecordError, match="three"):
            shop.test(given)
    else:
        assert sorted(each["n"] for each in shop.test(given)["raw"]) == [1, 2]


def test_the_sizes_of_the_first_batches_can_be_given() -> None:
    shop = Pipeline("shop")
    sizes = orders_of(shop).map_batches(
        lambda table: table.slice(0, 1).select(["n"]).set_column(0, "n", [[table.num_rows]]), n=int
    )
    sizes.append_into(sqlite("nowhere.db", "sizes"), name="sizes")
    rows = [{"order": "a", "n": n} for n in range(12)]
    assert [each["n"] for each in shop.test({"orders": rows}, take=[3, 1, 4])["sizes"]] == [3, 1, 4, 4]
    with pytest.raises(ConfigError, match="take must be 1 or more"):
        shop.test({"orders": rows}, take=[2, 0])
