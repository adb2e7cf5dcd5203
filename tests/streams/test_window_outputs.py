"""What closes, what changes and what is late, in pipelines, against plain Python."""

from __future__ import annotations

import datetime
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import TopologyError
from framework.testing import crash, replay
from ratchet import Pipeline, count, hopping, parquet, session, sqlite, sum_, tumbling
from ratchet.streams.notebook_tables import Tables

Row = dict[str, Any]
START = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)
LENGTH = datetime.timedelta(minutes=5)
NO_TIME = START - datetime.timedelta(days=1)
DRAWN = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 9), st.integers(0, 40)), max_size=14)


def minutes(number: int) -> datetime.timedelta:
    return datetime.timedelta(minutes=number)


def rows_of(drawn: list[tuple[str, int, int]]) -> list[Row]:
    return [{"shop": shop, "cents": cents, "at": START + minutes(minute)} for shop, cents, minute in drawn]


def pipeline_in(folder: Path) -> Pipeline:
    return Pipeline("shop", state=lambda name: sqlite(folder / "state.db", name))


def plain(rows: list[Row], take: int, late: int, allowed: int) -> dict[str, list[Row]]:
    """Windows that close, change and are late, transaction by transaction."""
    found: dict[str, list[Row]] = {"closed": [], "changed": [], "late": []}
    kept: dict[tuple[str, datetime.datetime], int] = {}
    after = NO_TIME
    for first in range(0, len(rows), take):
        batch = rows[first : first + take]
        before, after = after, max(after, *(row["at"] - minutes(late) for row in batch))
        came: dict[tuple[str, datetime.datetime], int] = defaultdict(int)
        for row in batch:
            came[row["shop"], START + (row["at"] - START) // LENGTH * LENGTH] += row["cents"]
        on_time = {key: cents for key, cents in came.items() if key[1] + LENGTH > before - minutes(allowed)}
        found["late"] += [shown(key, cents) for key, cents in came.items() if key not in on_time]
        for key, cents in on_time.items():
            kept[key] = kept.get(key, 0) + cents
        found["changed"] += [shown(key, kept[key]) for key in on_time]
        for key, cents in kept.items():
            end = key[1] + LENGTH
            if end <= after and (key in on_time or end > before):
                found["closed"].append(shown(key, cents) | ({"correction": end <= before} if allowed else {}))
        kept = {key: cents for key, cents in kept.items() if key[1] + LENGTH > after - minutes(allowed)}
    return found


def shown(key: tuple[str, datetime.datetime], cents: int) -> Row:
    return {"shop": key[0], "window_start": key[1], "window_end": key[1] + LENGTH, "cents": cents}


def in_order(rows: list[Any]) -> list[Row]:
    return sorted(({**row} for row in rows), key=repr)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    drawn=DRAWN,
    take=st.integers(1, 4),
    late=st.integers(0, 6),
    allowed=st.sampled_from([0, 7]),
    faults=st.lists(st.sampled_from([replay, crash]), max_size=2),
    parallelism=st.integers(1, 2),
)
def test_windows_close_change_and_are_late_as_in_plain_python(
    drawn: list[tuple[str, int, int]], take: int, late: int, allowed: int, faults: list[Any], parallelism: int
) -> None:
    rows = rows_of(drawn)
    with tempfile.TemporaryDirectory() as folder:
        shop = pipeline_in(Path(folder))
        read = shop.read(rows, shop=str, cents=int, at=datetime.datetime)
        windows = read.window(tumbling("5 min"), on="at", late=minutes(late))
        table = windows.group_by("shop").agg(cents=sum_("cents"))
        options: dict[str, Any] = {"allowed_lateness": minutes(allowed), "parallelism": parallelism}
        closed = table.when_closed(name="windows", **options)
        changed = table.when_changed(name="windows", **options)
        for name, stream in (("closed", closed), ("changed", changed), ("late", closed.late())):
            stream.append_into(parquet(Path(folder) / name), name=name)
            stream.filter("cents > 5").select("shop", five="cents - 5").append_into(
                parquet(Path(folder) / f"more-{name}"), name=f"more-{name}"
            )
        transactions = -(-len(rows) // take)
        tables = shop.test(
            take=take, faults=[fault(txid) for txid, fault in enumerate(faults, start=1) if txid <= transactions]
        )
    for name, expected in plain(rows, take, late, allowed).items():
        assert in_order(tables[name]) == in_order(expected), name
        more = [{"shop": row["shop"], "five": row["cents"] - 5} for row in expected if row["cents"] > 5]
        assert in_order(tables[f"more-{name}"]) == in_order(more), name


@pytest.mark.parametrize("page_bytes", [1, 1 << 20])
def test_the_windows_that_a_transaction_changes_come_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """So a table of newest rows keeps the last window, while some close and some come anew."""
    monkeypatch.setattr("sinks.event_time.windowed_committer.PAGE_BYTES", page_bytes)
    shop = pipeline_in(tmp_path)
    rows = shop.read(rows_of([("x", 1, 0), ("x", 2, 6), ("x", 4, 6), ("x", 8, 12), ("x", 16, 8), ("x", 32, 3)]))
    table = rows.window(hopping("4 min", "2 min"), on="at").group_by("shop").agg(cents=sum_("cents"))
    changed = table.when_changed(allowed_lateness="10 min")
    seen = tmp_path / "seen"

    def start_of(row: Row) -> Row:
        start = (row["window_start"] - START) // minutes(1)
        with seen.open("a") as file:  # a function is copied to its tasks
            file.write(f"{start} ")
        return {"start": start}

    changed.map(start_of, start=int).append_into(parquet(tmp_path / "all"), name="all")
    changed.latest_by("shop").upsert_into(sqlite(tmp_path / "newest.db", "newest"), name="newest")
    tables = shop.test(take=3)
    assert seen.read_text() == "-2 0 4 6 " + "0 2 6 8 10 12 "
    assert [(row["window_start"], row["cents"]) for row in tables["newest"]] == [(START + minutes(12), 8)]


def late_of(folder: Path, step: str, faults: list[Any]) -> Tables:
    shop = pipeline_in(folder)
    rows = shop.read(rows_of([("x", 1, 0), ("x", 2, 20), ("x", 3, 5), ("y", 4, 1)]))
    if step == "session":
        sessions = rows.window(session("5 min"), on="at").group_by("shop").agg(cents=sum_("cents"), n=count())
        late = sessions.when_closed(name="step").late()
    else:
        late = rows.deduplicate("shop", within="2 min", on="at", name="step").late()
    late.append_into(parquet(folder / "late"), name="late")
    return shop.test(take=2, faults=faults)


@pytest.mark.parametrize("faults", [[], [replay(2)], [crash(2)]])
@pytest.mark.parametrize("step", ["session", "deduplicate"])
def test_late_rows_of_a_session_and_of_repeats_come_once(step: str, faults: list[Any], tmp_path: Path) -> None:
    late = [(row["shop"], row["cents"]) for row in late_of(tmp_path, step, faults)["late"]]
    # The row of 10:05 is a repeat of that of 10:20, which is known.
    assert sorted(late) == ([("x", 3), ("y", 4)] if step == "session" else [("y", 4)])


@pytest.mark.parametrize("faults", [[], [replay(2)]])
def test_late_rows_of_a_join_come_by_side(faults: list[Any], tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(rows_of([("x", 1, 0), ("x", 9, 60), ("x", 2, 0), ("x", 8, 1)]))
    small, large = rows.filter("cents < 5"), rows.filter("cents >= 5").rename(cents="price")
    near = small.join(large, on="shop", times="at", within="2 min", name="near")
    near.late("left").append_into(parquet(tmp_path / "small"), name="small")
    near.late("right").append_into(parquet(tmp_path / "large"), name="large")
    tables = shop.test(take=2, faults=faults)
    assert [row["cents"] for row in tables["small"]] == [2]
    assert [row["price"] for row in tables["large"]] == [8]
    with pytest.raises(TopologyError, match=r"of two sides: late\('left'\)"):
        near.late()


def test_late_and_changed_rows_are_where_there_are_any(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(rows_of([("x", 1, 0)]))
    sessions = rows.window(session("5 min"), on="at").group_by("shop").agg(cents=sum_("cents"))
    windows = rows.window(tumbling("5 min"), on="at").group_by("shop").agg(cents=sum_("cents"))
    windows.when_changed(name="windows")
    for take, said in (
        (lambda: rows.late(), "only a step that goes by event time has late rows"),
        (lambda: windows.when_closed(name="windows").filter("cents > 1").late(), "only a step that goes by event"),
        (lambda: windows.when_closed(name="windows").late("left"), "only the late rows of a join have a side"),
        (lambda: windows.when_closed(name="windows", parallelism=2), "has other options: give both the same"),
        (lambda: sessions.when_closed(name="s", allowed_lateness="1 s"), "a session that is over stays over"),
        (lambda: sessions.when_changed(name="s"), "a session is known when it closes"),
    ):
        with pytest.raises(TopologyError, match=said):
            take()


def test_late_rows_and_changes_are_streams_of_the_committer(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(rows_of([("x", 1, 0)]))
    table = rows.window(tumbling("5 min"), on="at").group_by("shop").agg(cents=sum_("cents"))
    table.when_closed(name="closed").late().filter("cents > 0").append_into(parquet(tmp_path / "late"), name="late")
    table.when_changed(name="closed").append_into(parquet(tmp_path / "changed"), name="changed")
    topology = shop.build()
    assert [(each.component_id, each.stream) for each in topology["changed"].subscriptions] == [("closed", "changed")]
    (late,) = topology["late"].subscriptions
    assert late.component_id == "closed-late-steps"
    (above,) = topology["closed-late-steps"].subscriptions
    assert (above.component_id, above.stream) == ("closed", "late")
