"""Letters in plans: each once, in the order of the request; halved, and carried on (C48)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from framework.errors import DataLossError
from framework.topology import DEAD_LETTER_STREAM, TopologyContext, TransactionAttempt
from framework.topology.dead_letter_replay import (
    BATCH_BYTES_MAX,
    CUT_REASON,
    LETTERS_PARTITION,
    LetterRequest,
    LettersPlanner,
    with_letters,
)
from framework.topology.dead_letters import CUT_HEADER, Letter, LetterReader
from framework.topology.extra_partition_spout_wrapper import unwrapped
from framework.topology.spouts import LEFT_OUT, REFUSED, REPLAYED, on_stream
from tests.kit.lettered import FIELDS, OpaqueLetteredSpout, letter_of_record

CONTEXT = TopologyContext("t", "spout", 0, 1, {}, parallelisms={})


class Kept(LetterReader):
    def __init__(self, letters: Sequence[Letter | None]) -> None:
        self._letters = letters

    def letters(self, closed: Any) -> Any:
        return iter(self._letters)

    def fetched(self, refs: Sequence[Sequence[Any]], txid: int) -> list[Letter | None]:
        return [self._letters[each] for (each,) in refs]

    def close(self) -> None:
        pass


def letter(number: int, word: str, **changes: Any) -> Letter:
    own = {"error": "old", "key": b"k", "headers": [("h", b"1")], "ref": [number]}
    return letter_of_record(0, number, word.encode(), **{**own, **changes})


def planner(letters: int, size: int = 5) -> tuple[Any, LettersPlanner]:
    spout = OpaqueLetteredSpout({0: [["a"], ["b"]], 1: [["c"]]}, FIELDS, 1)
    made = with_letters(spout).planner({}, CONTEXT)
    assert isinstance(made, LettersPlanner)
    made.request = lambda: LetterRequest("r", REPLAYED, [([number], size) for number in range(letters)])
    return spout, made


def test_a_request_is_planned_once_after_the_first_plan_and_then_carried_on() -> None:
    spout, made = planner(2)
    first = made.plan({})
    assert first is not None and LETTERS_PARTITION not in first
    second = made.plan(first)
    assert second is not None
    assert second[LETTERS_PARTITION] == {
        "request": "r", "action": REPLAYED, "begin": 0, "first": 0, "next": 2, "letters": [[0], [1]],
    }  # fmt: skip
    assert second["0"] == {"first": 1, "next": 1} and made.record_count(second) == 2
    third = made.plan(second)
    assert third is not None and third["0"] == {"first": 1, "next": 2}
    assert third[LETTERS_PARTITION] == {"request": "r", "begin": 0, "first": 2, "next": 2}
    assert made.plan(third) is None and made.empty_plan(third) is not None
    made.request = lambda: LetterRequest("s", REPLAYED, [([7], 5)])
    made._looked_s = None
    fourth = made.plan(third)
    assert fourth is not None
    assert {name: fourth[LETTERS_PARTITION][name] for name in ("request", "begin", "first", "next", "letters")} == {
        "request": "s", "begin": 2, "first": 2, "next": 3, "letters": [[7]],
    }  # fmt: skip
    assert unwrapped(with_letters(spout)) is spout


def test_a_request_begins_only_where_its_letters_were_listed() -> None:
    """Otherwise a plan of a withdrawn request, still in flight, ends the same letters (C48)."""
    _, made = planner(2)
    before = made.plan({}) or {}
    withdrawn = made.plan(before) or {}
    assert withdrawn[LETTERS_PARTITION]["next"] == 2
    again = LetterRequest("s", REPLAYED, [([0], 5), ([1], 5)], 0)  # listed before that plan was closed
    made.request, made._looked_s = lambda: again, None
    assert LETTERS_PARTITION in (made.plan({**withdrawn, "0": {"first": 0, "next": 0}}) or {})
    later = made.plan({**withdrawn, "0": {"first": 0, "next": 0}}) or {}
    assert "letters" not in later[LETTERS_PARTITION]
    made.request, made._looked_s = lambda: again._replace(position=2), None
    assert (made.plan(withdrawn) or {})[LETTERS_PARTITION]["letters"] == [[0], [1]]


def test_batches_of_letters_are_bounded_by_bytes_and_by_the_pace() -> None:
    _, made = planner(9, BATCH_BYTES_MAX // 2)
    before = made.plan({})
    assert before is not None
    plan = made.plan(before)
    assert plan is not None and plan[LETTERS_PARTITION]["letters"] == [[0], [1]]
    made.records_max = 1
    plan = made.plan(plan)
    assert plan is not None and plan[LETTERS_PARTITION]["letters"] == [[2]]
    _, made = planner(1, BATCH_BYTES_MAX * 2)
    plan = made.plan(before)
    assert plan is not None and plan[LETTERS_PARTITION]["letters"] == [[0]]


def test_letters_are_halved_and_joined_as_offsets_are() -> None:
    _, made = planner(5)
    before = made.plan({})
    plan = made.plan(before or {})
    assert plan is not None
    ranges, entry = made.ranges, plan[LETTERS_PARTITION]
    halves = ranges.split(LETTERS_PARTITION, entry)
    assert halves is not None
    assert [each["letters"] for each in halves] == [[[0], [1]], [[2], [3], [4]]]
    assert ranges.joined(halves[0], entry, after=True) == halves[1]
    assert ranges.joined(entry, entry, after=True) == {"request": "r", "begin": 0, "first": 5, "next": 5}
    assert ranges.joined({**entry, "first": 0, "next": 0}, halves[1], after=True) is None  # two are not in it
    assert ranges.beginning(entry) == {"request": "r", "begin": 0, "first": 0, "next": 0}
    assert ranges.offsets(entry) == range(5) and ranges.takes_out(LETTERS_PARTITION)
    assert ranges.split(LETTERS_PARTITION, {**entry, "next": 1, "letters": [[0]]}) is None
    assert ranges.stages(plan)[-1] == {LETTERS_PARTITION: entry}


def test_each_letter_that_is_there_ends_or_comes_back() -> None:
    spout, made = planner(6)
    spout.mended = False
    kept = [
        letter(0, "good"),
        letter(1, "raw"),
        None,  # it has ended meanwhile
        letter(3, "refused", attempts=2),
        letter(4, "part", headers=[(CUT_HEADER, b"value of 9 bytes")]),
        letter(5, "good", kept_in=1),
    ]
    made.keeper = Kept(kept)
    plan = made.plan(made.plan({}) or {})
    assert plan is not None
    entry = {**plan[LETTERS_PARTITION], LEFT_OUT: [3], REFUSED: {"3": "picky: no"}}
    reader = with_letters(spout).reader({}, CONTEXT)
    read = made.for_transaction(7, LETTERS_PARTITION, entry)
    rows: list[str] = []
    letters: list[dict[str, Any]] = []
    for stream, batch in map(on_stream, reader.read_all(TransactionAttempt(7, 1), {LETTERS_PARTITION: read})):
        if stream == DEAD_LETTER_STREAM:
            letters += batch.to_pylist()
        else:
            rows += batch.column("value").to_pylist()
    assert rows == ["good", "good"]
    shown = {each["offset"]: (each["settled"], each["attempts"], each["error"]) for each in letters}
    assert shown == {
        0: ("replayed", 0, "old"),
        1: (None, 1, "it is raw"),
        3: (None, 3, "picky: no"),
        4: (None, 1, CUT_REASON),
        5: ("replayed", 0, "old"),
    }
    assert letters[1]["value"] == b"raw" and letters[1]["headers"] == [{"key": "h", "value": b"1"}]
    assert letters[4]["kept_in"] == 1 and all(each["timestamp_ms"] == 5 for each in letters)
    made.keeper = None
    with pytest.raises(DataLossError, match="not kept here"):
        made.for_transaction(7, LETTERS_PARTITION, entry)


def test_a_bounded_source_is_not_finished_before_the_letters_that_are_asked_for() -> None:
    _, made = planner(1)
    made._planner.finished = lambda plan: True  # type: ignore[method-assign]
    before = made.plan({}) or {}
    made.look()
    assert not made.finished(before)
    plan = made.plan(before) or {}
    assert plan[LETTERS_PARTITION]["next"] == 1 and made.finished(plan)
    made.request = lambda: None
    made.look()
    assert made.finished(before)
