"""The documents of the page, and what each viewer is sent of them."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from framework.ui import documents
from framework.ui.cached_reads import Kept
from framework.ui.page_updates import Encoded, Viewer, encode
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.ui.sources import record


def told(news: bytes) -> dict[str, Any]:
    """The documents in some events, by name."""
    blocks = [each.split(b"\ndata: ") for each in news.split(b"\n\n") if each]
    return {name.removeprefix(b"event: ").decode(): json.loads(data) for name, data in blocks}


def test_a_row_of_the_time_line_says_what_its_columns_promise() -> None:
    closed = record(7, attempts=3, reason="away", bad_records=2, oldest_ms=1_000_000_006_850)
    found = dict(zip(documents.ROW, documents.row(closed), strict=True))
    assert found == {
        "txid": 7,
        "closed_at": 1e9 + 7.1,
        "attempts": 3,
        "rows": 100,
        "bad": 2,
        "processing_ms": 80.0,
        "waiting_ms": 5.0,
        "commit_ms": 15.0,
        "oldest_age_ms": 250,
        "reason": "away",
    }
    for no_time_ms in (0, -1):  # a producer without a clock, and one that gave no time
        assert documents.row(record(7, oldest_ms=no_time_ms))[documents.ROW.index("oldest_age_ms")] is None
    assert documents.row(record(7, oldest_ms=2_000_000_000_000))[documents.ROW.index("oldest_age_ms")] == 0


def test_edges_add_up_the_last_transactions_and_name_the_rows_of_the_last() -> None:
    closed = [replace(record(txid)) for txid in range(1, 151)]
    assert documents.edges(closed) == {
        "rows": {"lines->count": [10, 1000]},
        "busy_ms": {"count": [2.5, 250.0]},
        "transactions": 100,
        "seconds": 99.1,
    }
    assert documents.edges([]) == {"rows": {}, "busy_ms": {}, "transactions": 0, "seconds": 0.0}


def test_the_flow_of_a_core_topology_is_that_of_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(documents.time, "monotonic", lambda: now)
    flow = documents.Flow()

    def look(at: float, rows: int, busy_s: float) -> Any:
        nonlocal now
        now = at
        return flow.look({"edges": {"a->b": rows}, "components": {"b": {"busy_s": busy_s}}})

    assert look(0, 5, 1.0) == {
        "rows": {"a->b": [None, 0]},
        "busy_ms": {"b": [None, 0.0]},
        "transactions": None,
        "seconds": 0,
    }
    found = look(10, 25, 1.5)
    assert (found["rows"], found["busy_ms"], found["seconds"]) == ({"a->b": [None, 20]}, {"b": [None, 500.0]}, 10)
    look(40, 100, 2.0)
    found = look(50, 110, 2.5)  # since the look of 30 s ago or more
    assert (found["rows"]["a->b"][1], found["seconds"]) == (85, 40)
    found = look(51, 3, 0.1)  # another driver counts from 0
    assert (found["rows"]["a->b"][1], found["busy_ms"]["b"][1], found["seconds"]) == (0, 0.0, 0)
    assert flow.look({"edges": "?", "components": {"b": None}})["rows"] == {}


def test_failures_are_listed_with_the_latest_first_shortened_and_bounded() -> None:
    closed = [record(txid, attempts=3, reason="x" * 1_000) for txid in range(1, 101)]
    found = documents.failures(closed)
    assert len(found) == documents.FAILURES_SHOWN
    assert (found[0]["txid"], found[0]["attempt"], found[0]["attempts"]) == (100, 2, 2)
    assert len(found[0]["reason"]) == documents.REASON_MAX


def test_attempts_that_failed_for_other_reasons_are_listed_apart_and_cancelled_ones_not() -> None:
    one = record(1, attempts=4, reason="away")
    first, second, third, last = one.attempts
    other, cancelled = replace(second, reason="broken"), replace(third, outcome="cancelled", reason="txid 0 failed")
    found = documents.failures([replace(one, attempts=(first, other, cancelled, last))])
    assert [(each["reason"], each["attempt"], each["attempts"]) for each in found] == [("broken", 2, 1), ("away", 1, 1)]


def test_a_transaction_shows_traces_and_a_bounded_plan() -> None:
    plan = {f"words-{number}": {"first_offset": 1, "next_offset": 9} for number in range(3_000)}
    found = documents.transaction_document(record(1, attempts=2, reason="why", plan=plan), {1: "Traceback"})
    assert [each["trace"] for each in found["attempts"]] == ["Traceback", ""]
    assert (found["partitions"], len(found["plan"])) == (3_000, documents.PLAN_SHOWN)
    json.loads(encode(found))


def test_all_partitions_are_drawn_in_their_order_and_the_worst_listed() -> None:
    lags = {f"words/{number}": (number * 10, number, 0, 0) for number in range(1_000)}
    found = documents.partitions({**lags, "other/1": (None, 5, 0, 0)})
    assert found["total"] == 1_001
    assert found["all"][0] == ["other/1", None] and found["all"][11] == ["words/10", 100]
    assert [each[0] for each in found["worst"]][:2] == ["words/999", "words/998"]
    assert len(found["worst"]) == documents.WORST_SHOWN
    assert len(encode(found)) < 30_000


def test_a_thousand_transactions_are_sent_in_a_hundred_bytes_each() -> None:
    encoded = Encoded(1, documents.View({}, [record(txid) for txid in range(1, 1_001)]))
    assert len(encoded.transactions_since(-2)) < 100_000


def test_a_viewer_gets_everything_once_and_then_what_has_changed() -> None:
    viewer, closed = Viewer(), [record(1), record(2)]
    first = told(viewer.news(Encoded(1, documents.View({"live": {"a": 1}, "about": {"b": 2}}, closed))))
    assert first["live"] == {"a": 1} and first["about"] == {"b": 2}
    assert first["transactions"]["anew"] and [each[0] for each in first["transactions"]["rows"]] == [1, 2]
    closed = [*closed, record(3)]
    second = told(viewer.news(Encoded(2, documents.View({"live": {"a": 5}, "about": {"b": 2}}, closed))))
    assert set(second) == {"live", "transactions"}
    assert not second["transactions"]["anew"] and [each[0] for each in second["transactions"]["rows"]] == [3]
    assert viewer.news(Encoded(3, documents.View({"live": {"a": 5}, "about": {"b": 2}}, closed))) == b""


def test_a_viewer_whose_transactions_are_gone_gets_all_anew() -> None:
    viewer = Viewer()
    viewer.news(Encoded(1, documents.View({}, [record(txid) for txid in range(50, 60)])))
    begun_anew = told(viewer.news(Encoded(2, documents.View({}, [record(1)]))))["transactions"]
    assert begun_anew["anew"] and [each[0] for each in begun_anew["rows"]] == [1]
    far_on = told(viewer.news(Encoded(3, documents.View({}, [record(txid) for txid in range(500, 503)]))))[
        "transactions"
    ]
    assert far_on["anew"] and len(far_on["rows"]) == 3


def test_earlier_transactions_that_are_found_later_are_sent() -> None:
    """What the store kept of the runs before comes after what the run knows itself."""
    viewer = Viewer()
    viewer.news(Encoded(1, documents.View({}, [record(9)])))
    news = told(viewer.news(Encoded(2, documents.View({}, [record(8), record(9)]))))["transactions"]
    assert news["anew"] and len(news["rows"]) == 2


def test_documents_are_one_line_of_ascii_whatever_is_in_them() -> None:
    text = encode({"name": "<script>\n\u2028</script>", "rate": float("nan"), "at": object})
    assert b"\n" not in text and text.isascii()
    assert json.loads(text)["rate"] is None


def test_what_is_kept_is_read_when_somebody_looks_and_not_more_often_than_asked() -> None:
    reads: list[int] = []
    kept = Kept("numbers", lambda: reads.append(1), 3600.0)
    assert reads == []
    for _ in range(5):
        kept.look()
    wait_for(lambda: not kept.reading)
    assert (kept.look().number, len(reads)) == (1, 1)


def test_a_reading_that_hangs_delays_nobody_and_is_not_doubled() -> None:
    go_on, began = threading.Event(), []

    def read() -> str:
        began.append(1)
        go_on.wait(PATIENCE_S)
        return "done"

    kept = Kept("slow", read, 0.0)
    kept.look()
    wait_for(lambda: began)
    for _ in range(10):
        assert kept.look().value is None
        time.sleep(0.001)
    assert len(began) == 1
    go_on.set()
    wait_for(lambda: kept.look().value == "done")


def test_a_reading_that_fails_leaves_the_answer_before_it_in_place() -> None:
    error: list[Exception] = []

    def read() -> str:
        if error:
            raise error[0]
        return "good"

    kept = Kept("flaky", read, 0.0)
    wait_for(lambda: kept.look().value == "good")
    error.append(ValueError("x" * 10_000))
    wait_for(lambda: kept.look().error is not None)
    answer = kept.look()
    assert answer.value == "good" and answer.error is not None and answer.error.startswith("ValueError: xxx")
    assert len(answer.error) <= 500
    error.clear()
    wait_for(lambda: kept.look().error is None)
