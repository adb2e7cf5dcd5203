"""Joins of a stream with a table, as of the time of each row and as of now, against plain code."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import TopologyError
from framework.testing import crash, fail_attempt, replay
from ratchet import Pipeline, count, parquet, sqlite

Row = dict[str, Any]
START = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)
FAULTS = [replay, crash, fail_attempt]


def minutes(number: int) -> datetime.timedelta:
    return datetime.timedelta(minutes=number)


ROWS = st.lists(
    st.builds(
        lambda price, item, n, minute: {"price": price, "item": item, "n": n, "at": START + minutes(minute)},
        st.booleans(),
        st.sampled_from("ab"),
        st.integers(0, 9),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=12,
)


def joined(rows: list[Row], take: int, late: int, within: int | None, how: str) -> list[tuple[Any, ...]]:
    """A row is joined when the watermark has passed it, with the newest price of its time that has
    come by then. A price that is late counts for what is joined later, where it is the newest."""
    out: list[tuple[Any, ...]] = []
    waiting: list[Row] = []
    prices: list[Row] = []
    after = START - minutes(10_000)
    for first in range(0, len(rows), take):
        batch = rows[first : first + take]
        before, after = after, max(after, *(row["at"] - minutes(late) for row in batch))
        prices += [row for row in batch if row["price"]]
        waiting += [row for row in batch if not row["price"] and row["at"] >= before]
        for row in [each for each in waiting if each["at"] < after]:
            known = [each for each in prices if each["item"] == row["item"] and each["at"] <= row["at"]]
            newest = max(known, key=lambda each: each["at"]) if known else None
            if newest is not None:  # of equal times, the last one that came
                newest = [each for each in known if each["at"] == newest["at"]][-1]
            if newest is not None and within is not None and row["at"] - newest["at"] > minutes(within):
                newest = None
            if newest is not None or how == "left":
                out.append((row["item"], row["n"], row["at"], newest["n"] if newest is not None else None))
        waiting = [each for each in waiting if each["at"] >= after]
    return sorted(out, key=repr)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    rows=ROWS,
    take=st.integers(1, 4),
    late=st.sampled_from([0, 5, 40]),
    within=st.sampled_from([None, 6]),
    how=st.sampled_from(["inner", "left"]),
    faults=st.lists(st.sampled_from(FAULTS), max_size=3),
    parallelism=st.integers(1, 2),
)
def test_a_row_is_joined_with_the_price_of_its_time(
    rows: list[Row],
    take: int,
    late: int,
    within: int | None,
    how: Literal["inner", "left"],
    faults: list[Any],
    parallelism: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shop = Pipeline("shop", state=lambda name: sqlite(Path(folder) / "state.db", name))
        read = shop.read(rows, price=bool, item=str, n=int, at=datetime.datetime)
        prices = read.filter("price").select("item", "at", cents="n").latest_by("item")
        read.filter("not price").drop("price").join(
            prices,
            on="item",
            times="at",
            within=minutes(within) if within is not None else None,
            how=how,
            late=minutes(late),
            name="priced",
            parallelism=parallelism,
        ).append_into(parquet(Path(folder) / "out"), name="out")
        transactions = -(-len(rows) // take)
        done = shop.test(take=take, faults=[fault(n) for n, fault in enumerate(faults, start=1) if n <= transactions])
    found = sorted(((row["item"], row["n"], row["at"], row["cents"]) for row in done["out"]), key=repr)
    assert found == joined(rows, take, late, within, how)


def test_a_table_that_has_no_row_of_a_moment_is_refused(tmp_path: Path) -> None:
    shop = Pipeline("shop", state=lambda name: sqlite(tmp_path / "state.db", name))
    read = shop.read([], item=str, n=int, at=datetime.datetime)
    options: dict[str, Any] = {"on": "item", "times": "at", "name": "j"}
    for make, more, said in (
        (lambda: read.latest_by("item", "n"), {}, r"the table has a row per item, n: give the same columns as on="),
        (lambda: read.latest_by("item", sequence_by="n"), {}, r"the newest by 'at', and the table goes by 'n'"),
        (lambda: read.latest_by("item", delete_when="n = 0"), {}, r"leave delete_when out"),
        (lambda: read.latest_by("item"), {"times": None, "how": "outer"}, r"with a table, give 'inner' or 'left'"),
        (
            lambda: read.latest_by("item"),
            {"times": None, "within": 5},
            r"no timestamp of a record of a topic: say which column is the time, as in times='at'",
        ),
        (
            lambda: read.latest_by("item"),
            {"times": None, "late": 5},
            r"no time to compare: leave late, max_ahead, idle_after and advance_when_idle out",
        ),
        (lambda: read.select("item").latest_by("item"), {"times": None}, r"the table has no column beside its key"),
        (lambda: read.group_by("item").agg(n=count()), {}, r"is a AggregatesTable: .* its latest_by\(...\) is a table"),
        (lambda: read.filter("n > 1"), {"times": None}, r"say how far apart the rows of a pair may be"),
        (lambda: read.latest_by("item"), {"how": "outer"}, r"with a table, give 'inner' or 'left'"),
        (lambda: read.filter("n > 1"), {}, r"say how far apart the rows of a pair may be"),
    ):
        with pytest.raises(TopologyError, match=said):
            read.join(make(), **{**options, **more})


NOW_ROWS = st.lists(
    st.builds(
        lambda kind, customer, n, version: {"kind": kind, "customer": customer, "n": n, "version": version},
        st.sampled_from(["order", "order", "customer", "gone"]),
        st.sampled_from("ab"),
        st.integers(0, 9),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=14,
)


def joined_now(rows: list[Row], take: int, how: str, *, ordered: bool, deletes: bool) -> list[tuple[Any, ...]]:
    """A row is joined with what the table holds after all rows of its transaction."""
    out: list[tuple[Any, ...]] = []
    table: dict[str, Row] = {}
    for first in range(0, len(rows), take):
        batch = rows[first : first + take]
        for row in batch:
            held = table.get(row["customer"])
            if row["kind"] != "order" and not (ordered and held is not None and row["version"] < held["version"]):
                table[row["customer"]] = row
        for row in batch:
            if row["kind"] == "order":
                held = table.get(row["customer"])
                if held is not None and deletes and held["kind"] == "gone":
                    held = None
                if held is not None or how == "left":
                    out.append((row["customer"], row["n"], held["n"] if held is not None else None))
    return sorted(out, key=repr)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    rows=NOW_ROWS,
    take=st.integers(1, 5),
    how=st.sampled_from(["inner", "left"]),
    ordered=st.booleans(),
    deletes=st.booleans(),
    faults=st.lists(st.sampled_from([*FAULTS, lambda txid: crash(txid, when="written")]), max_size=3),
    parallelism=st.integers(1, 2),
)
def test_a_row_is_joined_with_what_its_key_has_now(
    rows: list[Row],
    take: int,
    how: Literal["inner", "left"],
    ordered: bool,
    deletes: bool,
    faults: list[Any],
    parallelism: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shop = Pipeline("shop", state=lambda name: sqlite(Path(folder) / "state.db", name))
        read = shop.read(rows, kind=str, customer=str, n=int, version=int)
        customers = read.filter("kind <> 'order'").latest_by(
            "customer",
            sequence_by="version" if ordered else None,
            delete_when="kind = 'gone'" if deletes else None,
        )
        read.filter("kind = 'order'").select("customer", "n").join(
            customers, on="customer", how=how, name="known", parallelism=parallelism
        ).append_into(parquet(Path(folder) / "out"), name="out")
        transactions = -(-len(rows) // take)
        done = shop.test(take=take, faults=[fault(n) for n, fault in enumerate(faults, start=1) if n <= transactions])
    found = sorted(((row["customer"], row["n"], row["n_right"]) for row in done["out"]), key=repr)
    assert found == joined_now(rows, take, how, ordered=ordered, deletes=deletes)
    assert len(done["known"]) == len(found)


def test_what_says_that_a_row_is_deleted_is_no_column_of_the_join(tmp_path: Path) -> None:
    shop = Pipeline("shop", state=lambda name: sqlite(tmp_path / "state.db", name))
    read = shop.read([], kind=str, customer=str, n=int)
    customers = (
        read.filter("kind = 'customer'").select("customer", city="kind").latest_by("customer", delete_when="city = ''")
    )
    joined = read.select("customer", "n").join(customers, on="customer", name="known")
    assert joined.schema.names == ["customer", "n", "city"]


def test_a_table_of_aggregates_is_joined_by_its_changes(tmp_path: Path) -> None:
    shop = Pipeline("shop", state=lambda name: sqlite(tmp_path / "state.db", name))
    read = shop.read([{"item": item, "n": n} for n, item in enumerate("aabab")], item=str, n=int)
    totals = read.group_by("item").agg(rows=count()).upsert_into(sqlite(tmp_path / "a.db", "totals"), name="totals")
    read.join(totals.latest_by("item"), on="item", name="known").append_into(parquet(tmp_path / "out"), name="out")
    done = shop.test(take=2, faults=[replay(1), crash(2, when="written")])
    assert sorted((row["n"], row["rows"]) for row in done["out"]) == [(0, 2), (1, 2), (2, 1), (3, 3), (4, 2)]
