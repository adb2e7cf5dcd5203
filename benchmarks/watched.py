"""What it costs to be watched: a run with the page, a viewer, and a scrape of the metrics every
second; the page of as large a topology as it has to bear; ``ratchet ui`` over many topologies."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from typing import Any

import psutil

from framework import BaseBasicBolt, Fields, Topology, TransactionalTopologyBuilder, submit
from integration.server import free_port, wait_until
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout

TOPOLOGIES = 20
#: Transactions of the first topology, which is looked at; and of each of the others.
TRANSACTIONS, OF_OTHERS = 1_000, 20
#: Of the topology that is large.
PARTITIONS, COMPONENTS = 1_000, 50
#: Who looks at it at once.
VIEWERS = 100
_FOR_S = 20.0


@contextlib.contextmanager
def watched(topology_id: str) -> Iterator[dict[str, Any]]:
    """Yields the configuration of a run that processes of their own watch until the end: a viewer
    of its page, and somebody who scrapes its metrics."""
    page, metrics = free_port(), free_port()
    with (
        _beside(_view, f"http://127.0.0.1:{page}/api/topology/events?id={topology_id}"),
        _beside(_scrape, f"http://127.0.0.1:{metrics}/metrics"),
    ):
        yield {"ui.port": page, "metrics.prometheus.port": metrics}


@contextlib.contextmanager
def _beside(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _view(url: str) -> None:
    """Read all events of a page."""
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as events:
            for _ in events:
                pass
        time.sleep(0.1)


def _view_often(url: str, viewers: int) -> None:
    """As many viewers."""
    for _ in range(viewers):
        threading.Thread(target=_view, args=(url,), daemon=True).start()
    threading.Event().wait()


def _scrape(url: str) -> None:
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            answer.read()
        time.sleep(1)


def page() -> dict[str, Any]:
    """Shares of a core that a driver takes which has nothing to do, with ``PARTITIONS`` partitions,
    ``COMPONENTS`` components and ``TRANSACTIONS`` transactions: without a page, with one at which
    nobody, one and ``VIEWERS`` look."""
    found = {}
    spawn = multiprocessing.get_context("spawn")
    for is_shown in (False, True):
        port, ready = free_port(), spawn.Event()
        process = spawn.Process(target=_large, args=(port if is_shown else None, ready), daemon=True)
        process.start()
        try:
            wait_until(lambda: ready.is_set() or not process.is_alive(), 300, "the large topology")  # noqa: B023
            if not process.is_alive():
                raise RuntimeError("the large topology does not run")
            assert process.pid is not None
            found["nobody looks" if is_shown else "no page"] = _share(process.pid)
            for viewers in (1, VIEWERS) if is_shown else ():
                with _beside(_view_often, f"http://127.0.0.1:{port}/api/topology/events?id=large", viewers):
                    time.sleep(5)
                    found[f"viewers: {viewers}"] = _share(process.pid)
        finally:
            process.kill()
            process.join()
    return {
        "workload": "page",
        "partitions": PARTITIONS,
        "components": COMPONENTS,
        "transactions": TRANSACTIONS,
        "share_of_a_core": found,
    }


class _Same(BaseBasicBolt):
    """Hands each word on."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def _large(port: int | None, ready: Event) -> None:
    """Run until this process is killed."""
    words = {number: [["word"]] * (1 if number else TRANSACTIONS) for number in range(PARTITIONS)}
    builder = TransactionalTopologyBuilder("large", "c0", OpaqueMemoryTransactionalSpout(words, Fields(word=str), 1))
    for number in range(1, COMPONENTS - 1):
        builder.set_bolt(f"c{number}", _Same()).shuffle_grouping(f"c{(number - 1) // 2}")
    state = StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"count": Count()})
    builder.set_bolt("count", state).fields_grouping("c1", Fields("word"))
    settings = {} if port is None else {"ui.port": port}
    with submit(builder.build(), settings, executor="local") as run:
        run.wait_until_caught_up(280)
        ready.set()
        threading.Event().wait()


def root(zookeeper: str) -> dict[str, Any]:
    """Shares of a core that ``ratchet ui`` takes for ``TOPOLOGIES`` running topologies: when nobody
    looks, when somebody has the list open, and when somebody has a topology open."""
    config = {
        "transactional.zookeeper.servers": zookeeper,
        "transactional.zookeeper.root": f"/ui-{uuid.uuid4().hex[:6]}",
    }
    with contextlib.ExitStack() as stack:
        for number in range(TOPOLOGIES):
            topology = _topology(number, OF_OTHERS if number else TRANSACTIONS)
            stack.enter_context(submit(topology, config, executor="local")).wait_until_caught_up(600)
        port = free_port()
        settings = [part for key, value in config.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "ratchet", "ui", "--port", str(port), *settings]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            base = f"http://127.0.0.1:{port}/api"
            wait_until(lambda: _answers(f"{base}/topologies"), 60, "the page")
            found = {"nobody": _share(process.pid)}
            for name, path in (("list", "topologies/events"), ("topology", "topology/events?id=t0")):
                with _beside(_view, f"{base}/{path}"):
                    time.sleep(2)
                    found[name] = _share(process.pid)
        finally:
            process.terminate()
            process.wait()
    return {"workload": "ui", "topologies": TOPOLOGIES, "transactions": TRANSACTIONS, "share_of_a_core": found}


def _topology(number: int, transactions: int) -> Topology:
    words = [[f"word{each % 7}"] for each in range(transactions)]
    builder = TransactionalTopologyBuilder(
        f"t{number}", "lines", OpaqueMemoryTransactionalSpout({0: words}, Fields(word=str), 1)
    )
    state = StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"count": Count()})
    builder.set_bolt("count", state).fields_grouping("lines", Fields("word"))
    return builder.build()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _share(pid: int) -> float:
    process = psutil.Process(pid)
    before, since = process.cpu_times(), time.monotonic()
    time.sleep(_FOR_S)
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return round(spent / (time.monotonic() - since), 4)
