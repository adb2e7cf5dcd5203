"""The pages of real runs, and of a root, without a browser."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from framework import Fields, Topology, TopologyBuilder, TransactionalTopologyBuilder, submit
from framework.config import HIDDEN
from framework.coordination import Put
from framework.errors import ConfigError, RetryableError
from framework.transactions import MemoryStore
from framework.transactions.history_reader import HistoryReader
from framework.ui import documents
from framework.ui.sources.root import RootSource, shape_in, told_shape
from framework.ui.sources.transactional_run import RunSource
from integration import EmbeddedServers
from integration.server import free_port
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.core_parts import Basic, ListSpout
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.ui.sources import Events, get

pytestmark = pytest.mark.behaviour("6.4")


class Flaky(OpaqueMapState):
    """Does not answer as often as ``left`` says."""

    left = 0

    def read_header(self) -> Any:
        return super().read_header()

    def raise_header(self, expected: Any, new: Any) -> None:
        if new.open is not None and type(self).left > 0:
            type(self).left -= 1
            raise RetryableError("the sink does not answer")
        super().raise_header(expected, new)


def topology(records: int = 5, state: Callable[..., OpaqueMapState] = OpaqueMapState) -> Topology:
    spout = OpaqueMemoryTransactionalSpout({0: [[f"w{number}"] for number in range(records)]}, Fields(word=str), 2)
    builder = TransactionalTopologyBuilder("words", "lines", spout)
    committer = StateCommitter(state(MemoryBackend("words")), ["word"], {"n": Count()})
    builder.set_bolt("count", committer, 2).global_grouping("lines")  # two tasks: its header is raised in a step
    return builder.build()


def read(port: int, path: str) -> Any:
    """What is there. Who asks too often waits for the answer, and asks again."""
    status, _, body = get(port, path)
    while status == 429:
        status, _, body = get(port, path)
    assert status == 200, body
    return json.loads(body)


def rows(port: int) -> list[int]:
    return [row[0] for row in read(port, "/api/topology?id=words")["transactions"]["rows"]]


def test_the_page_of_a_run_shows_its_graph_transactions_sinks_and_configuration() -> None:
    port = free_port()
    config = {"ui.port": port, "app.password": "canary", "app.level": 7, "kafka.sasl.password": "canary"}
    with submit(topology(), config, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: rows(port) == [1, 2, 3])
        found = read(port, "/api/topology?id=words")
        live, about = found["live"], found["about"]
        assert (live["state"], live["txid"], live["status"]["lag"]) == ("running", 3, 0)
        assert live["drivers"][0]["here"] and live["drivers"][0]["phase"] == "running"
        assert live["edges"]["rows"] == {"lines->count": [1, 5]}
        assert [each["id"] for each in about["graph"]["components"]] == ["lines", "count"]
        assert about["graph"]["edges"][0]["grouping"].startswith("GlobalGrouping")
        assert found["partitions"]["worst"] == [["0", 0, 5, 0, 0]]
        assert [(each["done"], each["open"]) for each in found["headers"]] == [(3, 3)]
        shown = {key: (value, was_set) for key, value, was_set in about["configuration"]}
        assert shown["app.password"] == (HIDDEN, True) and shown["app.level"] == ("7", True)
        assert shown["topology.max.spout.pending"] == ("not set", False)
        assert "canary" not in json.dumps(found)
        assert read(port, "/api/topology/transaction?id=words&txid=2")["plan"]
        assert [each["topology"] for each in read(port, "/api/topologies")["topologies"]] == ["words"]


def test_a_failure_is_shown_with_its_attempts_while_it_lasts_and_after_it() -> None:
    port = free_port()
    Flaky.left = 10**6
    with submit(topology(2, Flaky), {"ui.port": port}, executor="local") as run:
        wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] == "waiting")
        wait_for(lambda: bool(read(port, "/api/topology?id=words")["failures"]))
        found = read(port, "/api/topology?id=words")
        assert "does not answer" in found["live"]["trouble"] and "does not answer" in found["failures"][0]["reason"]
        assert found["live"]["status"]["failures_last_hour"] > 0
        Flaky.left = 0
        run.wait_for_commit(1, PATIENCE_S)
        wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] == "running")
        assert read(port, "/api/topology?id=words")["failures"][0]["txid"] == 1


def test_what_earlier_runs_did_is_shown_too() -> None:
    store, port, built = MemoryStore(), free_port(), topology(4)
    with submit(built, {}, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with submit(built, {"ui.port": port}, store=store, executor="local"):
        wait_for(lambda: rows(port) == [1, 2])


def test_a_store_that_hangs_does_not_keep_a_driver_from_showing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a driver reads the others, and its past, from the store."""
    go_on, store, port = threading.Event(), MemoryStore(), free_port()
    page = threading.local()

    def hangs(name: str) -> Any:
        real = getattr(store, name)

        def ask(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("ratchet-page-") and not hasattr(page, "free"):
                go_on.wait(PATIENCE_S)
            return real(*arguments)

        return ask

    for name in ("get", "children"):
        monkeypatch.setattr(store, name, hangs(name))
    with submit(topology(), {"ui.port": port}, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: rows(port) == [1, 2, 3])
        assert len(read(port, "/api/topology?id=words")["live"]["drivers"]) == 1
        go_on.set()


def test_a_page_that_breaks_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RunSource, topology_id: str) -> Any:
        raise ZeroDivisionError("a mistake in the page")

    monkeypatch.setattr(RunSource, "topology", broken)
    port = free_port()
    with submit(topology(), {"ui.port": port}, executor="local") as run:
        status, _, body = get(port, "/api/topology?id=words")
        assert (status, json.loads(body)["error"]) == (503, "ZeroDivisionError: a mistake in the page")
        run.wait_until_caught_up(PATIENCE_S)


def test_a_port_that_is_taken_is_said_before_anything_runs_and_nothing_is_left() -> None:
    port, store = free_port(), MemoryStore()
    with (
        submit(topology(), {"ui.port": port}, executor="local"),
        pytest.raises(ConfigError, match=f"ui.port {port} on 127.0.0.1"),
    ):
        submit(topology(), {"ui.port": port}, store=store, executor="local")
    assert store.children("words/drivers") == []
    assert not [each for each in threading.enumerate() if each.name == "ratchet-page"]


@pytest.mark.slow
def test_a_standby_says_that_it_stands_by_and_who_leads() -> None:
    store, port, built = MemoryStore(), free_port(), topology()
    with (
        submit(built, {}, store=store, executor="local"),
        submit(built, {"ui.port": port}, store=store, executor="local", standby=True),
    ):
        wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] == "standby")
        wait_for(lambda: rows(port) == [1, 2, 3])


@pytest.mark.slow
def test_a_deposed_leader_is_shown_as_standby() -> None:
    store, port = MemoryStore(), free_port()
    with submit(topology(), {"ui.port": port}, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        other = None
        store.depose("words")
        other = store.lead("words", "another", PATIENCE_S)
        assert other is not None
        wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] != "running")
        other.resign()
        wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] == "running")
        assert read(port, "/api/topology?id=words")["live"]["status"]["epoch"] >= 3


def test_the_page_of_a_core_topology_shows_what_its_components_did() -> None:
    port = free_port()
    builder = TopologyBuilder("numbers")
    builder.set_spout("numbers", ListSpout("page-core", [1, 2, 3]))
    builder.set_bolt("prints", Basic("page-core-prints", refused=(2,))).shuffle_grouping("numbers")
    with submit(builder.build(), {"ui.port": port}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        wait_for(lambda: read(port, "/api/topology?id=numbers")["live"]["status"]["components"]["prints"]["acked"] == 3)
        found = read(port, "/api/topology?id=numbers")
        assert found["live"]["kind"] == "core"
        assert [each["kind"] for each in found["about"]["graph"]["components"]] == ["spout", "bolt"]
        assert found["live"]["status"]["edges"] == {"numbers->prints": 4}  # one failed, and came again
        assert found["live"]["edges"]["rows"].keys() == {"numbers->prints"}
        assert found["live"]["edges"]["busy_ms"].keys() == {"numbers", "prints"}
        assert found["transactions"]["rows"] == []
        assert get(port, "/api/topology/transaction?id=numbers&txid=1")[0] == 404


@pytest.mark.slow
def test_the_root_shows_the_graph_of_a_core_topology_that_runs() -> None:
    builder = TopologyBuilder("numbers")
    builder.set_spout("numbers", ListSpout("root-core", [1, 2, 3]))
    builder.set_bolt("prints", Basic("root-core-prints")).shuffle_grouping("numbers")
    built, store = builder.build(), MemoryStore()
    source = RootSource(store, "/ratchet")

    def shown() -> documents.View:
        found = source.topology("numbers")
        assert found is not None
        return found

    with submit(built, {}, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        wait_for(lambda: source.topology("numbers") is not None)
        wait_for(lambda: shown().parts["live"].get("edges", {}).get("rows", {}).keys() == {"numbers->prints"})
        found = shown()
        assert found.parts["about"]["graph"] == built.shape()
        assert found.parts["live"]["edges"]["busy_ms"].keys() == {"numbers", "prints"}
        assert "graph" not in found.parts["live"]["status"]


@pytest.mark.parametrize("graph", [None, "x", [1], {"components": 1}, {"components": ["x", {"id": 3}], "edges": [{}]}])
def test_a_graph_that_is_none_is_not_drawn(graph: Any) -> None:
    assert told_shape(graph) == {"components": [], "edges": []}


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from framework.errors import ConfigError\n"
        "try:\n    import framework.ui.server\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == (
        "the page needs the package uvicorn: pip install 'ratchet-pipelines[ui]', or leave ui.port out"
    )


@pytest.mark.slow
def test_a_run_without_a_page_loads_none_of_it() -> None:
    code = "import sys, framework.submission, framework.inspect.topologies; print({'starlette', 'uvicorn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


# --- all topologies ---


def stopped_store(records: int = 5) -> MemoryStore:
    """A store with a topology that has run."""
    store = MemoryStore()
    with submit(topology(records), {}, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return store


def test_a_topology_that_is_stopped_keeps_its_graph_and_its_history_under_the_root() -> None:
    source = RootSource(stopped_store(), "/shop")
    (listed,) = source.topologies()
    assert (listed["topology"], listed["state"], listed["txid"]) == ("words", "stopped", 3)
    found = source.topology("words")
    assert found is not None
    assert [each.txid for each in found.closed] == [1, 2, 3]
    assert all(each.plan == {} for each in found.closed)
    assert {(each["source"], each["target"]) for each in found.parts["about"]["graph"]["edges"]} == {("lines", "count")}
    assert source.topology("nosuch") is None
    told = source.transaction("words", 3)
    assert told is not None and told["plan"]


def test_a_history_costs_what_is_new_and_begins_anew_with_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stopped_store()
    reader, reads = HistoryReader(store, "words"), []
    real = store.get
    monkeypatch.setattr(store, "get", lambda path: reads.append(path) or real(path))
    assert [each.txid for each in reader.read()] == [1, 2, 3]
    reads.clear()
    assert [each.txid for each in reader.read()] == [1, 2, 3]
    assert not [path for path in reads if "history" in path]
    store.apply([Put("words/incarnation", b'{"format": 1, "value": "another"}')])
    assert [each.txid for each in reader.read()] == [1, 2, 3]
    assert [path for path in reads if "history" in path]


def test_documents_that_nobody_wrote_break_neither_the_list_nor_the_page() -> None:
    store = stopped_store()
    store.apply(
        [
            Put("words/meta", b'{"format": 1, "value": {"outline": {"components": {"a": 7, "b": {"inputs": ["x"]}}}}}'),
            Put("words/history/002", b"not JSON"),
            Put("<script>alert(1)<script>/coordinator/currtx", b"\xff"),
        ]
    )
    source = RootSource(store, "/shop")
    assert {each["state"] for each in source.topologies()} == {"stopped", "unreadable"}
    found = source.topology("words")
    assert found is not None
    assert [each.txid for each in found.closed] == [1, 3]
    assert "words/history/002" in found.parts["live"]["trouble"]
    assert [each["id"] for each in found.parts["about"]["graph"]["components"]] == ["a", "b"]


def test_the_address_of_a_page_is_a_link_only_if_it_is_one() -> None:
    store = stopped_store()
    for number, page in enumerate(("javascript:alert(1)", "http://host:8470/", 7)):
        status = {"phase": "standby", "page": page}
        driver = {
            "kind": "transactional",
            "host": "h",
            "pid": number,
            "started_at": 1.0,
            "said_at": 2.0,
            "status": status,
        }
        store.apply([Put(f"words/drivers/{number}", json.dumps({"format": 1, "value": driver}).encode())])
    (listed,) = RootSource(store, "/shop").topologies()
    assert [each["page"] for each in listed["drivers"]] == [None, "http://host:8470/", None]


def test_an_outline_becomes_the_graph_that_the_driver_draws() -> None:
    built = topology()
    wanted = built.shape()
    for each in wanted["components"]:
        each["class"] = None
    assert shape_in(built.outline()) == wanted


@pytest.mark.integration
def test_ratchet_ui_serves_all_topologies_until_it_is_interrupted(servers: EmbeddedServers, name: str) -> None:
    settings = {"transactional.zookeeper.servers": servers.zookeeper, "transactional.zookeeper.root": f"/{name}"}
    port, own = free_port(), free_port()
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "ratchet", "ui", "--port", str(port), *words]
    with submit(topology(), {**settings, "ui.port": own}, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == (
                    f"http://127.0.0.1:{port}/ shows the topologies under /{name} (Ctrl-C ends it)\n"
                )
                with Events(port, "/api/topologies/events") as viewer:
                    (listed,) = viewer.next("topologies")["topologies"]
                    while listed["state"] == "starting":  # a driver tells every two seconds
                        (listed,) = viewer.next("topologies")["topologies"]
                    assert (listed["topology"], listed["state"]) == ("words", "running")
                    assert listed["drivers"][0]["page"] == f"http://127.0.0.1:{own}/"
                assert rows(port) == [1, 2, 3]
            finally:
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (0, "stopping\n")


@pytest.mark.integration
def test_ratchet_ui_without_a_store_or_with_others_looking_on_is_one_line(servers: EmbeddedServers) -> None:
    from tests.kit.command import call

    answer = call("ratchet", "ui")
    assert answer.returncode == 2 and "transactional.zookeeper.servers is not set" in answer.stderr
    zookeeper = f"transactional.zookeeper.servers={servers.zookeeper}"
    answer = call("ratchet", "ui", "--port", str(free_port()), "--set", zookeeper, "--set", "ui.host=0.0.0.0")
    assert answer.returncode == 2 and "set ui.token" in answer.stderr
