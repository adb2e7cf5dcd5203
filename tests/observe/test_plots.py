"""Pictures of transactions and of the benchmarks."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.parts import PARTS, Trace, Used
from benchmarks.plots import draw, draw_all
from framework.errors import ConfigError
from framework.observe.history_plot import plot_history
from framework.observe.journal import AttemptRecord, TransactionRecord


def record(txid: int, *, attempts: int = 1, rows: int = 100) -> TransactionRecord:
    made = tuple(
        AttemptRecord(
            attempt_id=number,
            epoch=1,
            started_at=1_000.0 + txid + number * 0.5,
            processing_ms=20.0,
            waiting_ms=5.0,
            commit_ms=8.0 if number == attempts else None,
            source_rows=rows,
            outcome="committed" if number == attempts else "failed",
        )
        for number in range(1, attempts + 1)
    )
    return TransactionRecord(txid, {}, "digest", made, attempts)


def texts(file: Path) -> list[str]:
    return ["".join(each.itertext()) for each in ET.parse(file).getroot().iter("{http://www.w3.org/2000/svg}text")]


def test_the_time_line_has_every_phase_and_marks_what_did_not_succeed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "history.svg"
    records = [record(txid, attempts=3 if txid in (4, 9) else 1) for txid in range(1, 21)]
    assert plot_history(records, file, "orders") == 2
    shown = texts(file)
    assert "orders: transactions 1 to 20" in shown
    wanted = {"processing", "waiting", "commit", "attempts that failed", "not at the first attempt: 2", "seconds"}
    assert wanted <= set(shown)
    assert [each.name for each in tmp_path.iterdir()] == ["history.svg"]


def test_a_link_of_another_user_beside_the_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name was that of the process, which every user of the host can see."""
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    (own := tmp_path / "own").write_text("mine")
    (tmp_path / ".history.svg.4711").symlink_to(own)
    plot_history([record(1)], tmp_path / "history.svg", "orders")
    assert own.read_text() == "mine" and "seconds" in texts(tmp_path / "history.svg")


def test_the_same_figures_make_the_same_file_of_a_bounded_size(tmp_path: Path) -> None:
    records = [record(txid, rows=txid % 7) for txid in range(1, 1_001)]
    for name in ("a.svg", "b.svg"):
        plot_history(records, tmp_path / name, "orders")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").stat().st_size < 500_000


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a $x^ & b$", "größe"])
def test_a_name_is_text_whatever_it_contains(tmp_path: Path, name: str) -> None:
    file = tmp_path / "history.svg"
    plot_history([record(1)], file, name)
    assert f"{name}: transactions 1 to 1" in texts(file)
    assert not list(ET.parse(file).getroot().iter("{http://www.w3.org/2000/svg}script"))


def test_a_transaction_without_recorded_attempts_is_drawn_as_nothing(tmp_path: Path) -> None:
    assert plot_history([TransactionRecord(1, {}, "d"), record(2)], tmp_path / "h.svg", "orders") == 0


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/h.svg: No such file or directory; give another file"):
        plot_history([record(1)], tmp_path / "missing" / "h.svg", "orders")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'ratchet-pipelines\[plot\]'"):
        plot_history([record(1)], tmp_path / "h.svg", "orders")


def test_the_benchmarks_figures_are_bars_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "bench.svg"
    results = [
        {
            "workload": "W1",
            "records_per_s": 1_285_000,
            "python_reader_runs": [598_000, 612_000],
            "limit_records_per_s": 1_443_000,
        },
        {"workload": "W2", "after_2s": {"p50_ms": 34.0, "p95_ms": 55.0, "p99_ms": 166.0}},
        {"workload": "wide", "partitions": 1_000},
        {"workload": "watched", "records_per_s": [1, 1_300_000], "records_per_s_watched": [1_290_000, 2]},
        {"workload": "page", "share_of_a_core": {"no page": 0.015, "viewers: 100": 0.041}},
        {"workload": "state", "store": "redis", "keys": 1_000, "value_type": "opaque", "ratio": 0.86},
    ]
    draw(results, file)
    assert {"1,300,000", "1,290,000", "viewers: 100", "4.1"} <= set(texts(file))
    assert {"1,285,000", "612,000", "1,443,000", "166", "0.86", "redis, 1,000 keys"} <= set(texts(file))


def test_w2_is_drawn_as_histograms_and_its_parts_as_bars(tmp_path: Path) -> None:
    file = tmp_path / "bench.svg"
    runs = [
        {
            "workload": "W2",
            "variant": variant,
            "after_2s": {"p50_ms": 12.0},
            "histogram": {"bin_ms": 1, "counts": [0] * fast + [98, 1] + [0] * 150 + [1]},
            "parts_ms": {part: {"mean": mean} for part in PARTS},
        }
        for variant, fast, mean in (("default", 10, 1.5), ("default", 12, 2.5), ("jobs", 50, 4.0))
    ]
    draw_all(runs, file)
    latencies = set(texts(tmp_path / "bench-latency.svg"))
    assert "default: 200 messages, 2 runs, 2 beyond 100 ms" in latencies
    assert "jobs: 100 messages, 1 run, 1 beyond 100 ms" in latencies
    assert {"p50 12 ms", "p95 12 ms", "p50 50 ms"} <= latencies
    assert {"default", "jobs", "task 2.0, 4.0"} <= set(texts(tmp_path / "bench-parts.svg"))


def test_without_w2_there_is_no_picture_of_it(tmp_path: Path) -> None:
    draw_all([{"workload": "wide", "partitions": 1_000}], tmp_path / "bench.svg")
    assert list(tmp_path.iterdir()) == []


def used(part: str, all_ms: float, processor_ms: float = 0.0, queue_ms: float = 0.0) -> tuple[str, Used]:
    return part, Used(all_ms / 1000, processor_ms / 1000, queue_ms / 1000)


def test_the_tail_names_what_makes_slow_transactions_slow() -> None:
    """Of two hundred transactions two are slow: one waits for a processor, one for an answer."""
    trace = Trace()
    for number in range(200):
        trace.planned(0.0)
        queue_ms, answer_ms = (50.0 if number == 7 else 0.0), (30.0 if number == 9 else 3.0)
        for part, taken in (used("task", 4 + queue_ms, 4, queue_ms), used("close", answer_ms)):
            trace.took(part, taken)
        trace.closed((4 + queue_ms + answer_ms) / 1000)
    found = trace.tail()
    assert (found["transactions"], found["of"], found["median_ms"]) == (2, 200, 7.0)
    causes = {(each["part"], each["kind"]): (each["chief_of"], each["ms"]) for each in found["causes"]}
    assert causes == {("task", "queue"): (1, 25.0), ("close", "wait"): (1, 13.5)}
