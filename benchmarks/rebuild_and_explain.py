"""The costs of the tools: a state and a table of rows rebuilt beside a running topology, and one
key of a large state explained."""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import rows, workload
from framework import Topology, submit
from framework.config import Config
from framework.coordination.configured import store_of
from framework.coordination.store import CoordinationStore
from framework.inspect.explain import explain
from framework.inspect.rebuild import rebuild
from integration import EmbeddedServers, PostgresServer
from integration.folder_permissions import open_folder

#: Messages a second that come while a state is rebuilt.
STEADY = 1_000
_MIB = 1 << 20


def measure_rebuild(servers: EmbeddedServers, folder: Path, messages: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Records per second of a rebuild in a process of its own, while the topology commits what a
    producer sends steadily; beside the topology's own rate over the same messages. Raises
    ``RuntimeError`` if the exchanged rows are wrong."""
    name, topic = uuid.uuid4().hex[:6], workload.filled_topic(servers.bootstrap_servers, messages)
    arguments = (f"rebuilt-{name}", servers.bootstrap_servers, topic, folder / f"{name}.db")
    run = submit(workload.word_topology(*arguments), settings)
    try:
        run.wait_until_caught_up(300)
        own = messages / workload.span_of(run.events())
        with _steadily(servers.bootstrap_servers, topic) as sent:
            found = _in_a_process(_rebuild, servers.zookeeper, "count", workload.word_topology, *arguments)
        run.wait_until_caught_up(60)
    finally:
        run.stop()
    counts = sum(count for count, _ in workload.read_back(arguments[-1]).values())
    if found.pop("differences") or counts != messages + sent[0]:
        raise RuntimeError(f"{counts} messages are counted, and {messages + sent[0]} were sent: {found}")
    return {
        "workload": "rebuild",
        "messages": messages,
        "w1_records_per_s": round(own),
        "ratio_to_w1": round(found["records_per_s"] / own, 2),
        **found,
    }


def measure_rebuild_of_rows(servers: EmbeddedServers, messages: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The same for the table of W6, which PostgreSQL holds, while nothing comes. Raises
    ``RuntimeError`` if the exchanged rows are wrong."""
    name, topic = uuid.uuid4().hex[:6], rows.filled_topic(servers.bootstrap_servers, "W6", messages)
    with ExitStack() as stack:
        server = PostgresServer(stack.enter_context(open_folder()), settings=rows.POSTGRES)
        server.start()
        stack.callback(server.stop)
        arguments = (f"rebuilt-{name}", "W6", servers.bootstrap_servers, topic, server.dsn)
        run = submit(rows.topology(*arguments), settings)
        try:
            run.wait_until_caught_up(600)
            own = messages / workload.span_of(run.events())
            found = _in_a_process(_rebuild, servers.zookeeper, "rows", rows.topology, *arguments)
        finally:
            run.stop()
        rows.checked("W6", server.dsn, messages, found["seconds"])
    if found.pop("differences"):
        raise RuntimeError(f"the rebuilt rows differ: {found}")
    return {
        "workload": "rebuild of rows",
        "messages": messages,
        "w6_records_per_s": round(own),
        "ratio_to_w6": round(found["records_per_s"] / own, 2),
        **found,
    }


def measure_explain(
    servers: EmbeddedServers, folder: Path, keys: int, per_key: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Seconds and memory of the explanation of one key, in a process of its own. Each key has
    ``per_key`` messages."""
    name, topic = uuid.uuid4().hex[:6], f"keys-{uuid.uuid4().hex[:6]}"
    workload.create_topic(servers.bootstrap_servers, topic)
    workload.produce(servers.bootstrap_servers, topic, _of_keys(keys, per_key))
    arguments = (f"explained-{name}", servers.bootstrap_servers, topic, folder / f"{name}.db")
    run = submit(workload.word_topology(*arguments), settings)
    try:
        run.wait_until_caught_up(1_200)
        txid = run.status().committed_txid
    finally:
        run.stop()
    found = _in_a_process(_explain, servers.zookeeper, *arguments)
    return {"workload": "explain", "messages": keys * per_key, "keys": keys, "transactions": txid, **found}


def _of_keys(keys: int, per_key: int) -> Iterator[tuple[bytes, bytes]]:
    for number in range(keys * per_key):
        name = b"key%08d" % (number % keys)
        yield (
            name,
            b'{"id":%d,"word":"%s","user":"u%05d","amount":%d,"ts":0}' % (number, name, number % 10_000, number % 7),
        )


@contextmanager
def _steadily(bootstrap_servers: str, topic: str) -> Iterator[list[int]]:
    """Messages that come meanwhile; how many, when it is over."""
    sent, over = [0], threading.Event()

    def send() -> None:
        while not over.wait(0.1):
            workload.produce(bootstrap_servers, topic, workload.messages(STEADY // 10))
            sent[0] += STEADY // 10

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()


def _in_a_process(target: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=target, args=(*arguments, answers))
    process.start()
    found: dict[str, Any] = answers.get()
    process.join()
    return found


def _opened(
    zookeeper: str, make: Callable[..., Topology], arguments: tuple[Any, ...]
) -> tuple[Topology, CoordinationStore, Config]:
    config = Config.load(None, [f"transactional.zookeeper.servers={zookeeper}"])
    return make(*arguments), store_of(config), config


def _rebuild(zookeeper: str, state: str, make: Callable[..., Topology], *arguments: Any) -> None:
    *shape, answers = arguments
    topology, store, config = _opened(zookeeper, make, tuple(shape))
    began_s = time.process_time()
    found = rebuild(topology, store, config.for_components(), state=state, take_over=True)
    answers.put(
        {
            "records": found.records,
            "batches": found.batches,
            "seconds": round(found.seconds, 2),
            "cpu_s": round(time.process_time() - began_s, 2),
            "records_per_s": round(found.records / found.seconds),
            "peak_mib": _peak_mib(),
            "differences": found.difference.difference_count if found.difference is not None else -1,
        }
    )
    store.close()


def _explain(zookeeper: str, *arguments: Any) -> None:
    *shape, answers = arguments
    topology, store, config = _opened(zookeeper, workload.word_topology, tuple(shape))
    found = explain(topology, store, config.for_components(), state="count", key="key00000007")
    answers.put(
        {
            "changes": found.step_count,
            "agrees": found.agrees,
            "records": found.records,
            "batches": found.batches,
            "seconds": round(found.seconds, 1),
            "peak_mib": _peak_mib(),
        }
    )
    store.close()


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // _MIB
