"""The six jobs of ``examples/shop_pipeline.py``, with failures in between."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from examples.shop_pipeline import pipeline
from framework.testing import crash, fail_attempt, replay


def at(hour: int, minute: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, hour, minute, tzinfo=datetime.UTC)


def order(name: str, cents: int, time: datetime.datetime) -> dict[str, Any]:
    return {"order": name, "shop": "x", "cents": cents, "at": time}


ORDERS = [
    order("a", 5, at(10, 1)),
    order("b", 200_000, at(10, 4)),
    order("b", 200_000, at(10, 4)),
    order("a", 7, at(10, 2)),
    order("c", 1, at(10, 58)),
    order("d", 2, at(11, 40)),
    order("e", 3, at(10, 30)),
]
PAYMENTS = [{"order": "a", "paid": 7, "paid_at": at(10, 20)}, {"order": "z", "paid": 1, "paid_at": at(10, 0)}]


@pytest.mark.parametrize(
    "faults", [[], [replay(2), crash(3)], [crash(1, when="written"), fail_attempt(2)]], ids=["none", "replay", "crash"]
)
def test_each_of_six_jobs_gives_its_rows_once(faults: list[Any]) -> None:
    orders = [{**row, "timestamp_ms": at(12, minute)} for minute, row in enumerate(ORDERS)]
    records = {"orders": orders, "payments": PAYMENTS}
    shop = pipeline().test(records, take=2, faults=list(faults))
    assert list(shop["raw"]) == ORDERS
    newest = {row["order"]: row["cents"] for row in shop["orders-now"]}
    assert newest == {"a": 7, "b": 200_000, "c": 1, "d": 2, "e": 3} and len(shop["orders-now"]) == 5
    per_hour = [(row["window_start"], row["orders"], row["cents"]) for row in shop["per-hour"]]
    assert per_hour == [(at(10, 0), 6, 400_016), (at(11, 0), 1, 2)]
    # The order of 10:30 comes when its window has closed.
    closed = [(row["window_start"], row["cents"]) for row in shop["closed"]]
    assert closed == [(at(10, 0), 400_012), (at(10, 55), 1)]
    matched = sorted((row["order"], row["cents"], row["paid"]) for row in shop["lake"])
    assert matched == [("a", 5, 7), ("a", 7, 7)]
    assert [row["order"] for row in shop["large"]] == ["b"]
