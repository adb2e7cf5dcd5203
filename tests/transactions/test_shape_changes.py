"""A change of shape is told by the name of the step, in words."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import submit
from framework.errors import ConfigError
from framework.transactions import MemoryStore
from framework.transactions.topology_change_messages import shape_changes
from ratchet import Pipeline, count, parquet, sqlite, sum_, tumbling
from tests.kit.waiting import PATIENCE_S

ROWS = [{"shop": "x", "item": "i", "cents": 5, "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}]


def pipeline(
    folder: Path,
    *,
    key: Any = ("shop",),
    aggregates: Any = None,
    name: str = "per-hour",
    parallelism: int = 1,
    window: str = "5 min",
    table: str = "hours",
    condition: str | None = None,
) -> Pipeline:
    made = Pipeline("shop", state=lambda each: sqlite(folder / "state.db", each))
    read = made.read(ROWS, shop=str, item=str, cents=int, at=datetime.datetime)
    read = read if condition is None else read.filter(condition)
    hours = read.window(tumbling("1 h"), on="at").group_by(*key).agg(**(aggregates or {"n": count()}))
    hours.upsert_into(sqlite(folder / "shop.db", table), name=name, parallelism=parallelism)
    windows = read.window(tumbling(window), on="at").group_by("shop").agg(n=count())
    windows.when_closed(name="closed").append_into(parquet(folder / "files"), name="files")
    return made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"key": ("shop", "item")},
            "'per-hour' has a new key: it was window_start, shop, and is window_start, shop, item; 'per-hour' emits item, "
            "which is new; 'rows' emits item, which is new; 'rows-steps' emits item, which is new",
        ),
        ({"aggregates": {"n": sum_("cents"), "m": count()}}, "'per-hour' emits m, which is new; 'rows' emits cents"),
        ({"aggregates": {"m": count()}}, "'per-hour' emits m, which is new; 'per-hour' emits n no more"),
        ({"name": "totals"}, "component 'per-hour' is gone; component 'totals' is new"),
        ({"parallelism": 2}, "'per-hour' has 2 tasks, and had 1"),
        ({"window": "10 min"}, "'closed' has another option window: it was {'length': 300000000,"),
        ({"table": "totals"}, "'per-hour' keeps its state in table 'totals' of "),
        (
            {"condition": "shop <> 'y'"},
            "'closed' reads rows-steps/closed-watermark, closed-watermark/default, and read rows/default, closed-w",
        ),
    ],
)
def test_a_change_names_the_step_and_what_it_is(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    before = pipeline(tmp_path).build().outline()
    assert shape_changes(before, before) == []
    assert said in "; ".join(shape_changes(before, pipeline(tmp_path, **change).build().outline()))


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


@given(before=PARTS, now=PARTS)
def test_a_document_of_any_kind_is_compared(before: dict[str, Any], now: dict[str, Any]) -> None:
    """It is from a store."""
    assert (shape_changes(outline(**before), outline(**now)) == []) == (before == now)
