"""Six jobs beside the same in other engines: the rows of Ratchet's programs, their lines, and what
their mistakes are told."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from framework.errors import TopologyError
from framework.testing import crash, fail_attempt, replay
from ratchet import sum_
from tests.kit import engine_programs
from tests.kit.engine_programs import ENGINES, FILES, JOBS, lines, pipeline_of, programs

PAGE = (ENGINES.parent / "from-other-engines.md").read_text(encoding="utf-8")
EVERY_FILE = [path for engine in FILES for job in JOBS for path in programs(engine, job)]
Row = Mapping[str, Any]


def at(day: int, hour: int, minute: int = 0) -> datetime.datetime:
    return datetime.datetime(2026, 1, day, hour, minute, tzinfo=datetime.UTC)


def order(id: str, cents: int, placed: datetime.datetime) -> dict[str, Any]:
    return {"id": id, "shop": "x", "cents": cents, "placed": placed}


def of_topic(topic: str, rows: Sequence[Row], *left_out: str) -> list[Row]:
    return [{k: v for k, v in row.items() if k not in left_out} | {"topic": topic, "partition": 0} for row in rows]


IN_AN_HOUR = [order("a", 5, at(1, 10)), order("b", 6, at(1, 10, 59)), order("c", 7, at(1, 12))]
PAID = [{"id": "a", "paid": 5, "paid_at": at(1, 11)}, {"id": "b", "paid": 6, "paid_at": at(4, 11)}]
REPEATED = [order("a", 5, at(1, 10)), order("a", 5, at(1, 11)), order("b", 5, at(1, 11)), order("a", 5, at(3, 11))]
CHANGES = [
    {"op": "c", "id": 1, "shop": "x", "cents": 5},
    {"op": "c", "id": 2, "shop": "x", "cents": 6},
    {"op": "u", "id": 1, "shop": "x", "cents": 7},
    {"op": "d", "id": 2},
]
#: A job -> its rows, the sink, and what the sink holds.
GIVEN: Mapping[str, tuple[Mapping[str, Sequence[Row]], str, Sequence[Row]]] = {
    "words": (
        {"lines": [{"line": "to be or not"}, {"line": "To be"}]},
        "counts",
        [{"word": word, "n": n} for word, n in (("be", 2), ("not", 1), ("or", 1), ("to", 2))],
    ),
    "hours": (
        {"orders": of_topic("orders", IN_AN_HOUR, "id")},
        "per_hour",
        [{"shop": "x", "window_start": at(1, 10), "window_end": at(1, 11), "cents": 11}],
    ),
    "paid": (
        {"orders": of_topic("orders", IN_AN_HOUR), "payments": of_topic("payments", PAID)},
        "paid",
        [{"id": "a", "shop": "x", "cents": 5, "paid": 5}],
    ),
    "changes": ({"shop.public.orders": CHANGES}, "orders", [{"id": 1, "shop": "x", "cents": 7}]),
    "landing": ({"orders": REPEATED}, "orders", REPEATED),
    "once": (
        {"orders": of_topic("orders", REPEATED)},
        "orders_once",
        [order("a", 5, at(1, 10)), order("b", 5, at(1, 11)), order("a", 5, at(3, 11))],
    ),
}
FAULTS = {"none": [], "replay": [replay()], "crash": [crash(1, when="written"), fail_attempt(2)]}


@pytest.mark.each_value_once
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("job", JOBS)
def test_a_program_gives_its_rows_once(job: str, faults: str) -> None:
    records, sink, expected = GIVEN[job]
    assert list(pipeline_of(job).test(records, take=1, faults=list(FAULTS[faults]))[sink]) == expected


@pytest.mark.parametrize(
    ("job", "written", "mistake", "told"),
    [
        ("words", 'group_by("word")', 'group_by("wrd")', "there is no column 'wrd'; is it 'word'?"),
        ("words", "agg(n=count())", "agg(n=sum_('word'))", "Sum('word') needs a number"),
        ("hours", 'sum_("cents")', 'sum_("cent")', "there is no column 'cent'; is it 'cents'?"),
        ("hours", "orders.window", "orders.filter('shop > 5').window", "cannot compare string with numeric type"),
        ("hours", 'key="shop"', 'key="shp"', "needs field 'shp', which its input does not have"),
        ("hours", "placed=datetime", "placed=str", "column 'placed' is string, and windows need a timestamp"),
        ("paid", 'on="id"', 'on="order"', "there is no column 'order'"),
        ("paid", "paid_at=datetime", "paid_at=int", "the times differ"),
        ("changes", "op = 'd'", "opp = 'd'", "there is no column 'opp'; is it 'op'?"),
        ("changes", 'latest_by("id")', 'latest_by("ids")', "there is no column 'ids'; is it 'id'?"),
        ("landing", "orders.append_into", "orders.select('ids').append_into", "there is no column 'ids'; is it 'id'?"),
        ("once", 'on="placed"', 'on="cents"', "cents"),
    ],
)
def test_a_mistake_in_a_program_is_told_with_its_line_when_the_pipeline_is_built(
    job: str, written: str, mistake: str, told: str
) -> None:
    (path,) = programs("Ratchet", job)
    text = path.read_text(encoding="utf-8")
    assert written in text
    with pytest.raises(TopologyError, match=rf"{path.name}:\d+: .*{re.escape(told)}"):
        exec(compile(text.replace(written, mistake), str(path), "exec"), {"sum_": sum_})


def test_the_table_of_the_page_has_the_lines_of_the_files() -> None:
    assert engine_programs.table() in PAGE


@pytest.mark.parametrize("other", ["Flink SQL", "Quix"])
@pytest.mark.parametrize("job", JOBS)
def test_no_program_is_longer_than_in(job: str, other: str) -> None:
    ours, theirs = (sum(map(lines, programs(engine, job))) for engine in ("Ratchet", other))
    assert 0 < ours <= theirs


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(ENGINES)))
def test_a_program_is_as_wide_as_all_others(path: Any) -> None:
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120
    if path.suffix == ".py":
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


def test_every_program_is_in_the_table() -> None:
    assert {path for path in ENGINES.rglob("*.*") if path.is_file()} == set(EVERY_FILE)


def test_what_the_page_shows_of_a_program_is_the_file() -> None:
    shown = re.findall(r"<!-- (?:compiled only: )?(engines/\S+) -->\n```\w+\n(.*?)```", PAGE, re.S)
    assert len(shown) == len(FILES)
    for path, text in shown:
        assert text == (ENGINES.parent / path).read_text(encoding="utf-8"), path


def test_lines_are_counted_without_blank_ones_comments_docstrings_and_imports(tmp_path: Any) -> None:
    written = {
        "a.py": '"""A."""\n\nfrom b import (\n    c,\n)\n\n\ndef f():  # counts\n    """F."""\n    # no\n    return """x\n\ny"""\n',
        "a.sql": "-- A.\n\nSELECT 1,\n  2; -- counts\n",
        "a.java": "// A.\nimport b.C;\n\nclass A {\n}\n",
        "a.properties": "# A.\na=b\n",
    }
    counted = {}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
        counted[name] = lines(tmp_path / name)
    assert counted == {"a.py": 4, "a.sql": 2, "a.java": 2, "a.properties": 1}
