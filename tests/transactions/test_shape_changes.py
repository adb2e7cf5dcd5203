"""A change of shape is told by the name of the step, in words."""

from __future__ import annotations

import copy
import datetime
import functools
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import submit
from framework.errors import ConfigError
from framework.transactions import MemoryStore
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import compared_outlines, differences_to_state
from framework.transactions.topology_change_messages import shape_changes, without_steps
from ratchet import Pipeline, Stream, Topology, count, parquet, sqlite, sum_, tumbling
from tests.kit.waiting import PATIENCE_S

ROWS = [{"shop": "x", "item": "i", "cents": 5, "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}]

HOURS = tumbling("1 h")


def pipeline(
    folder: Path,
    *,
    key: Any = ("shop",),
    aggregates: Any = None,
    name: str = "per-hour",
    parallelism: int = 1,
    window: str = "5 min",
    hours: Any = HOURS,
    table: str = "hours",
    condition: str | None = None,
    closed: Any = None,
) -> Pipeline:
    made = Pipeline("shop", state=lambda each: sqlite(folder / "state.db", each))
    read = made.read(ROWS, shop=str, item=str, cents=int, at=datetime.datetime)
    read = read if condition is None else read.filter(condition)
    per_hour = read.window(hours, on="at").filter("item <> ''").group_by(*key).agg(**(aggregates or {"n": count()}))
    per_hour.upsert_into(sqlite(folder / "shop.db", table), name=name, parallelism=parallelism)
    windows = read.window(tumbling(window), on="at").group_by("shop").agg(n=count() if closed is None else closed)
    windows.when_closed(name="closed").append_into(parquet(folder / "files"), name="files")
    return made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"key": ("shop", "item")},
            "'per-hour' has a new key: it was window_start, shop, and is window_start, shop, item; 'per-hour' emits item, "
            "which is new",
        ),
        ({"aggregates": {"n": sum_("cents"), "m": count()}}, "'per-hour' emits m, which is new"),
        ({"aggregates": {"m": count()}}, "'per-hour' emits m, which is new; 'per-hour' emits n no more"),
        ({"name": "totals"}, "component 'per-hour' is gone; component 'totals' is new"),
        ({"parallelism": 2}, "'per-hour' has 2 tasks, and had 1"),
        ({"window": "10 min"}, "'closed' has another option window: it was {'length': 300000000,"),
        ({"hours": tumbling("2 h")}, "'per-hour' has another option window: it was {'length': 3600000000,"),
        (
            {"hours": tumbling("1 h", origin="15 min")},
            "'per-hour' has another option window: it was {'length': 3600000000,",
        ),
        (
            {"aggregates": {"n": sum_("cents")}},
            "'per-hour' has another option aggregate n: it was 'Count', and is 'Sum'",
        ),
        ({"closed": sum_("cents")}, "'closed' has another option aggregate n: it was 'Count', and is 'Sum'"),
        ({"table": "totals"}, "'per-hour' keeps its state in table 'totals' of "),
    ],
)
def test_a_change_names_the_step_and_what_it_is(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    before = pipeline(tmp_path).build()
    assert changes(before, before) == []
    assert said in "; ".join(changes(before, pipeline(tmp_path, **change).build()))


def test_an_option_that_a_former_version_did_not_store_is_no_change(tmp_path: Path) -> None:
    built = pipeline(tmp_path).build()
    former: Any = copy.deepcopy(built.outline())
    for each in former["components"].values():
        each.pop("settings", None)
    before, now = compared_outlines({"outline": former}, built)
    assert before == now and shape_changes(before, now) == []


def changes(before: Topology, now: Topology) -> list[str]:
    """Those that a start finds in the stored outline of ``before``."""
    store = MemoryStore()
    leadership = store.lead(before.id, "test")
    assert leadership is not None
    TopologyDocuments(store, leadership, before).claim({})
    return list(differences_to_state(store, now))


Sales = Callable[[Stream], Stream]


def sales(folder: Path, *steps: Sales, sinks: str = "abc") -> Topology:
    """A table, a folder and a topic of the same rows, after these steps."""
    made = Pipeline("sales")
    rows = functools.reduce(
        lambda stream, step: step(stream), steps, made.read([{"shop": "x", "item": "i", "cents": 5}])
    )
    given: dict[str, Callable[[], object]] = {
        "a": lambda: rows.group_by("shop").agg(n=count()).upsert_into(sqlite(folder / "a.db", "a"), name="a"),
        "b": lambda: rows.select("shop", "cents").append_into(parquet(folder / "b"), name="b"),
        "c": lambda: rows.filter("cents > 1").append_into(sqlite(folder / "c.db", "c"), name="c"),
    }
    for each in sinks:
        given[each]()
    return made.build()


@pytest.mark.parametrize(
    "steps",
    [
        [lambda rows: rows.filter("cents > 1")],
        [lambda rows: rows.filter("item = 'i'")],  # a column that nothing else of some sinks needs
        [lambda rows: rows.with_columns(cents="cents + 1"), lambda rows: rows.filter("shop <> 'y'")],
        [lambda rows: rows.map(lambda row: row, shop=str, item=str, cents=int)],
    ],
)
@pytest.mark.parametrize("sinks", ["a", "b", "ab", "abc"])
def test_stateless_steps_come_and_go_without_a_change_of_shape(
    steps: Sequence[Sales], sinks: str, tmp_path: Path
) -> None:
    without, with_steps = sales(tmp_path, sinks=sinks), sales(tmp_path, *steps, sinks=sinks)
    assert changes(without, with_steps) == changes(with_steps, without) == []


def test_the_order_of_sinks_is_no_part_of_the_shape(tmp_path: Path) -> None:
    before, now = sales(tmp_path, sinks="bca"), sales(tmp_path, sinks="cab")
    assert before.digest() != now.digest()
    assert changes(before, now) == []


def test_a_sink_that_comes_or_goes_is_the_only_change(tmp_path: Path) -> None:
    before, now = sales(tmp_path, sinks="a"), sales(tmp_path, sinks="cab")
    assert changes(before, now) == ["component 'c' is new", "component 'b' is new"]
    assert changes(now, before) == ["component 'c' is gone", "component 'b' is gone"]


def test_a_column_that_a_sink_takes_is_a_change_of_the_sink(tmp_path: Path) -> None:
    before = sales(tmp_path, lambda rows: rows.filter("cents > 1"), sinks="c")
    more = sales(tmp_path, lambda rows: rows.with_columns(half="cents / 2.0"), sinks="c")
    other = sales(tmp_path, lambda rows: rows.cast(cents=str).cast(cents=float), sinks="c")
    assert changes(before, more) == ["'c' takes half, which is new"]
    assert changes(before, other) == ["'c' takes cents as double, and did as int64"]


def test_a_run_goes_on_after_a_step_came_without_being_told_to(tmp_path: Path) -> None:
    store = MemoryStore()
    for steps in ([], [lambda rows: rows.filter("item <> 'i'")], []):
        with submit(sales(tmp_path, *steps), {}, store, "local") as run:
            run.wait_until_caught_up(PATIENCE_S)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert connection.execute("SELECT n FROM a_live").fetchall() == [(1,)]


def test_a_start_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    store = MemoryStore()
    with submit(pipeline(tmp_path).build(), {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    changed = pipeline(tmp_path, key=("item",)).build()
    said = (
        "'per-hour' has a new key: it was window_start, shop, and is window_start, item; .*--accept-changed-topology.*"
    )
    with pytest.raises(ConfigError, match=said + "give another name to the step whose state no longer fits"):
        submit(changed, {}, store, "local").wait_until_caught_up(PATIENCE_S)


def outline(**component: Any) -> dict[str, Any]:
    return {"fields_hash": "1", "components": {"c": component}}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"committer": False}, {"committer": True}, "'c' is a committer now"),
        ({"committer": True}, {"committer": False}, "'c' is no committer any more"),
        ({"kind": 1}, {"kind": 2}, "'c' has another kind: it was 1, and is 2"),
        (
            {"inputs": ["a/default by ShuffleGrouping()"]},
            {"inputs": ["a/default by AllGrouping()"]},
            "'c' gets its rows by a/default by AllGrouping(), and got them by a/default by ShuffleGrouping()",
        ),
        (
            {"streams": {"late": "Fields(at: timestamp[us, tz=UTC], x: struct<a: int64, b: string>)"}},
            {"streams": {"late": "Fields(at: timestamp[us, tz=UTC], x: struct<a: int64, b: int64>)"}},
            "'c' emits x as struct<a: int64, b: int64>, and did as struct<a: int64, b: string> on stream 'late'",
        ),
        (
            {"streams": {"default": "Fields(a: int64, b: int64)"}},
            {"streams": {"default": "Fields(b: int64, a: int64)"}},
            "'c' emits its columns in another order",
        ),
        ({"inputs": ["?"]}, {"inputs": ["!"]}, "'c' differs"),
    ],
)
def test_every_part_of_an_outline_is_compared(before: Any, now: Any, said: str) -> None:
    assert shape_changes(outline(**before), outline(**now)) == [said]


ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.just("Fields(a: int64)")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
PARTS = st.dictionaries(
    st.sampled_from(["inputs", "streams", "states", "settings", "parallelism", "committer", "more"]), ANY, max_size=5
)


@given(part=PARTS)
def test_steps_are_taken_out_of_a_document_of_any_kind(part: dict[str, Any]) -> None:
    components = {"a": part, "b": {"inputs": ["a/default by ShuffleGrouping()"], **part}}
    assert "a" not in without_steps({"spout": "b", "components": components}, {"a"})["components"]


@given(before=PARTS, now=PARTS)
def test_a_document_of_any_kind_is_compared(before: dict[str, Any], now: dict[str, Any]) -> None:
    """It is from a store."""
    assert (shape_changes(outline(**before), outline(**now)) == []) == (before == now)
