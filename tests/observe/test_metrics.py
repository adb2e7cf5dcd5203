"""The metrics of a run, as Prometheus sees them."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.core.checkpoints import CheckpointStatus
from framework.core.round_protocol import Counts
from framework.core.status import CoreStatus
from framework.errors import ConfigError
from framework.execution.failures import FailureKind
from framework.observe import metrics_server
from framework.observe.journal import Journal
from framework.observe.metrics import (
    METRICS,
    PARTITIONS_MAX,
    CoreRunCollector,
    RunCollector,
)
from framework.observe.metrics_server import _CLIENTS_MAX, _Handler, _Scraped, health_of, serve_metrics
from framework.observe.run_statistics import CoreFiguresBuilder
from framework.topology import PartitionProgress, StateSize
from framework.transactions import MemoryStore
from integration.server import free_port
from integration.server_programs import find_program
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.reference import METRICS_PAGE, metrics_page
from tests.kit.waiting import PATIENCE_S, wait_for

KINDS = [each.value for each in FailureKind]
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Seen:
    """A status, as far as it becomes metrics."""

    topology_id: str = "orders"
    phase: str = "running"
    epoch: int = 3
    committed_txid: int = 7
    in_flight: dict[int, str] = field(default_factory=lambda: {8: "1 processing"})
    lag: int | None = 12
    read_rows: int = 100
    committed_rows: int = 90
    bad_records: int = 2
    waiting_for: str | None = None
    partitions: dict[str, PartitionProgress] = field(
        default_factory=lambda: {"orders/0": PartitionProgress(20, 8, 4, 1), "orders/1": PartitionProgress(None, 5)}
    )


def worked() -> Journal:
    """A journal with one committed transaction, which failed once, and one that is tried again."""
    journal = Journal()
    journal.leads()
    now_ms = int(time.time() * 1000)
    journal.emitted(1, 1, 3, {}, "digest")
    journal.failed(1, 1, "down", kind="retryable", component="totals")
    journal.emitted(1, 2, 3, {}, "digest")
    journal.processed(
        1,
        2,
        {},
        {"totals": 0.25},
        {"rows-steps/city_of": {"asked": 4, "cached": 6, "missing": 1, "failed": 2, "seconds": 0.5}},
        source_rows=50,
        source_bytes=5_000,
        oldest_ms=now_ms - 20_000,
        newest_ms=now_ms - 2_000,
    )
    journal.committing(1, 2)
    busy = {"totals": 0.5, "words": 0.125}
    journal.commit_phase_done(1, 2, {}, busy, late_records={"totals": 3}, left_out_rows={"totals": 2})
    journal.committed(1)
    journal.emitted(2, 1, 3, {}, "digest")
    journal.failed(2, 1, "still down", kind="retryable", component="totals")
    return journal


def exposed(collector: Collector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def samples(collector: Collector) -> Found:
    return {
        (sample.name, tuple(sorted((key, value) for key, value in sample.labels.items() if key != "topology"))): (
            sample.value
        )
        for family in text_string_to_metric_families(exposed(collector))
        for sample in family.samples
    }


def core_parts() -> tuple[CoreStatus, CoreFiguresBuilder]:
    figures = CoreFiguresBuilder()
    figures.leads()
    figures.failed("split", "died")
    figures.preparing(4, 10.0)
    figures.preparing(4, 11.0)  # its marker goes out again
    figures.checkpoint(4, 12.0, 1)
    counts = Counts(emitted=10, completed=8, latency_s=0.4, pending=2, busy_s=1.5)
    status = CoreStatus(
        phase="running",
        rounds=5,
        rounds_lost=1,
        components={"sentences": counts, "split": Counts(executed=8, acked=7, failed=1)},
        trees=2,
        last_error=None,
        checkpoint=CheckpointStatus(
            txid=4,
            phase="COMMITTED",
            guarantee="exactly-once",
            recoveries=1,
            last_failure=None,
            states={"split": StateSize(1_000, 10, 250)},
        ),
    )
    return status, figures


# --- what is measured ---


def test_a_committed_transaction_is_in_every_distribution() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    for name in ("processing_seconds", "waiting_seconds", "commit_seconds", "batch_records", "batch_bytes"):
        assert found[(f"ratchet_{name}_count", ())] == 1
        assert found[(f"ratchet_{name}_bucket", (("le", "+Inf"),))] == 1
    assert found[("ratchet_batch_records_sum", ())] == 50
    assert found[("ratchet_batch_records_bucket", (("le", "10.0"),))] == 0
    assert found[("ratchet_batch_records_bucket", (("le", "100.0"),))] == 1


def test_the_time_of_each_component_is_that_of_both_phases() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    name = "ratchet_component_busy_seconds_total"
    assert found[(name, (("component", "totals"),))] == 0.75
    assert found[(name, (("component", "words"),))] == 0.125


def test_late_records_of_committed_transactions_are_counted() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    assert found[("ratchet_late_records_total", (("component", "totals"),))] == 3


def test_lookups_of_committed_transactions_are_counted() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    labels = (("component", "rows-steps"), ("function", "city_of"))
    for answer, count in (("asked", 4), ("cached", 6), ("missing", 1)):
        assert found[("ratchet_lookup_keys_total", (("answer", answer), *labels))] == count
    assert found[("ratchet_lookup_failures_total", labels)] == 2
    assert found[("ratchet_lookup_seconds_total", labels)] == 0.5


def test_rows_that_a_component_of_a_committed_transaction_refused_are_counted() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    assert found[("ratchet_left_out_rows_total", (("component", "totals"),))] == 2


def test_latency_is_the_age_of_the_oldest_and_of_the_newest_record_at_the_end() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    name = "ratchet_end_to_end_latency_seconds"
    assert found[(f"{name}_sum", (("record", "oldest"),))] >= 20
    assert 2 <= found[(f"{name}_sum", (("record", "newest"),))] < 20
    assert found[(f"{name}_bucket", (("le", "10.0"), ("record", "oldest")))] == 0


def test_a_record_from_the_future_or_without_a_time_spoils_no_sum() -> None:
    journal = Journal()
    for txid, stamp_ms in ((1, int(time.time() * 1000) + 3_600_000), (2, 0), (3, None)):
        journal.emitted(txid, 1, 1, {}, "d")
        journal.processed(txid, 1, {}, source_rows=1, oldest_ms=stamp_ms, newest_ms=stamp_ms)
        journal.committed(txid)
    seen = journal.figures()
    assert (seen.oldest_s.count, seen.oldest_s.sum) == (1, 0.0)
    assert seen.outcomes == {"committed": 3}


def test_attempts_and_failures_are_counted_by_kind_and_every_kind_is_there_at_once() -> None:
    found = samples(RunCollector(Seen, worked().figures, KINDS))
    assert found[("ratchet_attempts_total", (("outcome", "committed"),))] == 1
    assert found[("ratchet_attempts_total", (("outcome", "failed"),))] == 2
    assert found[("ratchet_attempts_total", (("outcome", "cancelled"),))] == 0
    assert found[("ratchet_attempts_failed_total", (("kind", "retryable"),))] == 2
    assert {key[1][0][1] for key in found if key[0] == "ratchet_attempts_failed_total"} == set(KINDS)


def test_what_is_retried_is_shown_with_its_beginning_until_a_transaction_is_committed() -> None:
    journal = worked()
    labels = (("component", "totals"), ("kind", "retryable"))
    name = "ratchet_retrying_since_timestamp_seconds"
    began = samples(RunCollector(Seen, journal.figures, KINDS))[(name, labels)]
    journal.emitted(2, 2, 3, {}, "digest")
    journal.failed(2, 2, "still down", kind="retryable", component="totals")
    assert samples(RunCollector(Seen, journal.figures, KINDS))[(name, labels)] == began
    journal.emitted(2, 3, 3, {}, "digest")
    journal.committed(2)
    assert (name, labels) not in samples(RunCollector(Seen, journal.figures, KINDS))


def test_a_standby_says_so_and_serves_nothing_that_only_a_leader_knows() -> None:
    found = samples(RunCollector(lambda: Seen(phase="standby", committed_txid=0), Journal().figures, KINDS))
    assert (found[("ratchet_leading", ())], found[("ratchet_standby", ())]) == (0, 1)
    names = {name for name, _ in found}
    assert "ratchet_committed_txid" not in names
    assert not {
        each for each in names if each.startswith(("ratchet_epoch", "ratchet_source", "ratchet_lag", "ratchet_last"))
    }
    assert found[("ratchet_rows_committed_total", ())] == 90  # a counter is of the process


def test_a_leader_that_has_committed_nothing_serves_no_txid() -> None:
    found = samples(RunCollector(lambda: Seen(committed_txid=0), Journal().figures, KINDS))
    assert ("ratchet_committed_txid", ()) not in found
    assert ("ratchet_last_commit_timestamp_seconds", ()) not in found
    assert found[("ratchet_epoch", ())] == 3


def test_the_partitions_with_the_greatest_lag_have_figures_when_there_are_too_many() -> None:
    many = {f"wide/{number}": PartitionProgress(number, 0) for number in range(10_000)}
    found = samples(RunCollector(lambda: Seen(partitions=many, lag=49_995_000), Journal().figures, KINDS))
    lags = {key[1][0][1]: value for key, value in found.items() if key[0] == "ratchet_source_lag"}
    assert len(lags) == PARTITIONS_MAX
    assert min(lags.values()) == 10_000 - PARTITIONS_MAX
    assert found[("ratchet_source_partitions", ())] == 10_000
    assert found[("ratchet_lag_records", ())] == 49_995_000


@pytest.mark.parametrize("name", ['a"b\\c\nd', "größe 数", "half \ud83d", "{x=1} # y"])
def test_a_name_with_odd_characters_is_a_label(name: str) -> None:
    partitions = {f"{name}/0": PartitionProgress(9, 4)}
    text = exposed(RunCollector(lambda: Seen(topology_id=name, partitions=partitions), Journal().figures, KINDS))
    shown = name.encode("utf-8", "backslashreplace").decode()
    found = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "ratchet_source_lag"
    ]
    assert [(each.labels, each.value) for each in found] == [({"topology": shown, "partition": f"{shown}/0"}, 5.0)]


def test_a_core_topology_shows_pending_trees_latency_errors_and_checkpoints() -> None:
    status, figures = core_parts()
    found = samples(CoreRunCollector("words", lambda: status, figures.seen))
    assert found[("ratchet_trees", ())] == 2
    assert found[("ratchet_component_errors_total", (("component", "split"), ("kind", "died")))] == 1
    assert found[("ratchet_complete_latency_seconds_count", (("component", "sentences"),))] == 8
    assert found[("ratchet_complete_latency_seconds_sum", (("component", "sentences"),))] == 0.4
    assert (found[("ratchet_checkpoint_seconds_count", ())], found[("ratchet_checkpoint_seconds_sum", ())]) == (1, 2)
    assert found[("ratchet_recoveries_total", ())] == 1
    split = (("component", "split"),)
    sizes = [found[(f"ratchet_{name}", split)] for name in ("state_keys", "checkpoint_keys", "checkpoint_bytes")]
    assert sizes == [1_000, 10, 250]
    assert found[("ratchet_component_busy_seconds_total", (("component", "sentences"),))] == 1.5
    waiting = samples(CoreRunCollector("words", lambda: replace(status, phase="standby"), figures.seen))
    assert waiting[("ratchet_standby", ())] == 1
    assert ("ratchet_checkpoint", ()) not in waiting


def test_the_recoveries_of_a_former_leadership_are_not_forgotten() -> None:
    _, figures = core_parts()
    figures.leads()
    figures.checkpoint(4, 13.0, 0)
    figures.checkpoint(5, 14.0, 2)
    assert figures.seen().recoveries == 3
    assert figures.seen().leaderships == 2


def test_everything_that_is_served_is_described_and_everything_described_is_served() -> None:
    status, figures = core_parts()
    served = {name for name, _ in samples(RunCollector(Seen, worked().figures, KINDS))}
    served_by_core = {name for name, _ in samples(CoreRunCollector("words", lambda: status, figures.seen))}
    described: dict[str, set[str]] = {"transactional": set(), "core": set(), "both": set()}
    for each in METRICS.values():
        described[each.topologies].update(each.series)
    assert served == described["transactional"] | described["both"]
    assert served_by_core == described["core"] | described["both"]


def test_the_page_of_the_metrics_is_the_reference() -> None:
    assert METRICS_PAGE.read_text(encoding="utf-8") == metrics_page(), "run python -m tests.kit.reference"


@pytest.mark.slow  # Debian's package of Prometheus is installed for it
def test_promtool_has_no_advice(tmp_path: Path) -> None:
    status, figures = core_parts()
    tool = find_program("promtool", "prometheus")
    for text in (
        exposed(RunCollector(Seen, worked().figures, KINDS)),
        exposed(CoreRunCollector("words", lambda: status, figures.seen)),
    ):
        done = subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- how it is served ---


class Broken(Collector):
    def collect(self) -> Any:
        raise RuntimeError("it has no figures")


@dataclass
class Served:
    url: str
    phase: str = "running"

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def served() -> Iterator[Served]:
    port = free_port()
    it = Served(f"http://127.0.0.1:{port}")
    stop = serve_metrics(
        RunCollector(lambda: Seen(phase=it.phase), worked().figures, KINDS),
        "127.0.0.1",
        port,
        lambda: health_of("orders", it.phase),
        ["metrics.example"],
    )
    yield it
    stop()


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9", 200),
        ("localhost", 200),
        ("10.0.0.7:9108", 200),  # a scraper of a pod; an address is no name
        ("metrics.example", 200),
        ("Metrics.Example:9108", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/nosuch"])
def test_a_name_that_is_none_of_this_host_reads_nothing(served: Served, path: str, host: str, status: int) -> None:
    """Another site's script can have its own name lead to this port."""
    address = served.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == (404 if path == "/nosuch" and status == 200 else status)
        assert status == 200 or answer.read() == b""


@pytest.mark.parametrize(
    ("phase", "health", "ready"),
    [("starting", 200, 503), ("running", 200, 200), ("standby", 200, 200), ("failed", 503, 503), ("stopped", 503, 503)],
)
def test_health_and_readiness_follow_the_phase(served: Served, phase: str, health: int, ready: int) -> None:
    served.phase = phase
    said = {"topology": "orders", "phase": phase}
    for path, wanted in (("/healthz", health), ("/readyz", ready)):
        status, body = served.get(path)
        assert (status, json.loads(body)) == (wanted, said)


def test_metrics_stand_at_their_path_and_nothing_else_is_there(served: Served) -> None:
    status, text = served.get("/metrics")
    assert status == 200
    assert 'ratchet_leading{topology="orders"} 1.0' in text
    assert served.get("/secret")[0] == 404
    request = urllib.request.Request(f"{served.url}/metrics", data=b"x=1")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_a_client_that_says_nothing_delays_no_other(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET /met")
        assert served.get("/metrics")[0] == 200


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n" + b"a" * 70_000 + b": b\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200]
)
def test_what_a_client_breaks_off_or_has_too_much_of_leaves_no_trace_in_the_log(
    served: Served, sent: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Handler, "timeout", 0.2)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(sent)
        if sent:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
        else:
            assert client.recv(1) == b""
    wait_for(lambda: not any("process_request_thread" in each.name for each in threading.enumerate()))
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_hundreds_of_clients_that_say_nothing_hold_few_threads_and_delay_no_other(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S)) for _ in range(300)
        ]
        assert served.get("/metrics")[0] == 200
        assert sum("process_request_thread" in each.name for each in threading.enumerate()) <= 2 * _CLIENTS_MAX
        for each in silent[:200]:
            assert each.recv(1) == b""  # it gave way to later ones


def test_scrapes_take_a_share_of_a_core_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, slept, now = 0.0, [], 0.0
    monkeypatch.setattr(metrics_server.time, "thread_time", lambda: spent)
    monkeypatch.setattr(metrics_server.time, "monotonic", lambda: now)
    monkeypatch.setattr(metrics_server.time, "sleep", slept.append)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        nonlocal spent, now
        spent, now = spent + 0.05, now + 0.05
        return [b"figures"]

    scraped = _Scraped(app)
    assert [scraped({}, None), scraped({}, None)] == [[b"figures"]] * 2
    assert slept == [0.0, pytest.approx(0.2)]


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.prometheus.port {port} on 127.0.0.1: .*; take another"):
            serve_metrics(Broken(), "127.0.0.1", port, lambda: health_of("orders", "running"))


def test_a_standby_takes_over_while_it_is_scraped(tmp_path: Path) -> None:
    """No scrape fails, and none of the standby's has a txid before it leads."""

    def topology() -> Topology:
        spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 20}, Fields(word=str), 1)
        builder = TransactionalTopologyBuilder("words", "lines", spout)
        state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
        builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("lines")
        return builder.build()

    store, ports, done, seen = MemoryStore(), [free_port(), free_port()], threading.Event(), []

    def scrape() -> None:
        while not done.is_set():
            text = urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/metrics", timeout=PATIENCE_S).read().decode()
            found = {
                sample.name: sample.value for each in text_string_to_metric_families(text) for sample in each.samples
            }
            seen.append((found["ratchet_leading"], found["ratchet_standby"], found.get("ratchet_committed_txid")))

    with (
        submit(topology(), {"metrics.prometheus.port": ports[0]}, store, "local") as leader,
        submit(topology(), {"metrics.prometheus.port": ports[1]}, store, "local", standby=True) as standby,
    ):
        leader.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: standby.status().phase == "standby", what="the standby")
        scraper = threading.Thread(target=scrape)
        scraper.start()
        wait_for(lambda: seen, what="a scrape of the standby")
        leader.stop()
        wait_for(lambda: seen[-1] == (1, 0, 20), what="the standby to lead")
        done.set()
        scraper.join()
    assert seen[0] == (0, 1, None)
    assert {txid for leading, _, txid in seen if not leading} == {None}


def test_scrapes_while_transactions_go_on_see_counters_that_never_fall() -> None:
    """Leaderships begin and end meanwhile."""
    journal, done = Journal(), threading.Event()

    def work() -> None:
        for txid in range(1, 1_500):
            journal.leads()
            journal.emitted(txid, 1, 1, {}, "d")
            journal.processed(txid, 1, {}, source_rows=3, source_bytes=30)
            journal.failed(txid, 1, "down", kind="error", component="c")
            journal.emitted(txid, 2, 1, {}, "d")
            journal.processed(txid, 2, {}, source_rows=3, source_bytes=30)
            journal.committing(txid, 2)
            journal.commit_phase_done(txid, 2, {})
            journal.committed(txid)
            journal.forget_open()
        done.set()

    collector = RunCollector(Seen, journal.figures, KINDS)
    rising = [series for each in METRICS.values() if each.kind in ("counter", "histogram") for series in each.series]
    worker = threading.Thread(target=work)
    worker.start()
    before: Found = {}
    while not done.is_set():
        now = samples(collector)
        for key, value in before.items():
            assert key[0] not in rising or now[key] >= value
        before = now
    worker.join()
    assert samples(collector)[("ratchet_batch_records_count", ())] == 1_499
