"""A source of the page that says what a test tells it to, and pages over it on a real port."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from framework.config import Config
from framework.observe.journal import AttemptRecord, TransactionRecord
from framework.ui import documents
from framework.ui.server import serve_page
from integration.server import free_port
from tests.kit.waiting import PATIENCE_S

EVERY_S = 0.05


def record(txid: int, *, attempts: int = 1, plan: Any = None, reason: str = "", **changes: Any) -> TransactionRecord:
    """A transaction that was committed at its last attempt; those before failed over ``reason``."""
    times = {"processing_ms": 80.0, "waiting_ms": 5.0, "commit_ms": 15.0, "source_rows": 100, **changes}
    failed = [
        AttemptRecord(attempt_id=number, epoch=1, started_at=1e9 + txid, outcome="failed", reason=reason)
        for number in range(1, attempts)
    ]
    last = AttemptRecord(
        attempt_id=attempts,
        epoch=1,
        started_at=1e9 + txid,
        outcome="committed",
        rows={"lines->count": 10},
        component_ms={"count": 2.5},
        **times,
    )
    return TransactionRecord(txid, plan or {}, "digest", (*failed, last), attempts)


class Told:
    """What a test says of one topology. ``hangs``: seconds that an answer takes. ``looks``: how
    often somebody looked at the topology."""

    title = "/ratchet"
    every_s = EVERY_S

    def __init__(self, name: str = "words") -> None:
        self.name = name
        self.live: dict[str, Any] = {
            "topology": name,
            "kind": "transactional",
            "state": "running",
            "txid": 3,
            "committed_at": 1e9,
            "trouble": None,
            "drivers": [],
            "status": {},
        }
        self.parts: dict[str, Any] = {}
        self.closed = [record(1), record(2, attempts=2, reason="no such table"), record(3)]
        self.error: Exception | None = None
        self.hangs = 0.0
        self.looks = 0

    def topologies(self) -> list[documents.Document]:
        self._answer()
        return [self.live]

    def topology(self, topology_id: str) -> documents.View | None:
        self.looks += 1
        self._answer()
        if topology_id != self.name:
            return None
        live = {**self.live, "at": 1e9, "edges": documents.edges(self.closed)}
        return documents.View(
            {"live": live, "failures": documents.failures(self.closed), **self.parts}, list(self.closed)
        )

    def transaction(self, topology_id: str, txid: int) -> documents.Document | None:
        self._answer()
        found = next((each for each in self.closed if each.txid == txid), None)
        return None if found is None else documents.transaction_document(found, {1: "Traceback: here"})

    def _answer(self) -> None:
        if self.hangs:
            time.sleep(self.hangs)
        if self.error is not None:
            raise self.error


@contextmanager
def served(source: documents.Source, port: int | None = None, **settings: Any) -> Iterator[int]:
    """The page over a source on a port of this machine."""
    port = port or free_port()
    config = Config.of({"ui.port": port, **{f"ui.{key.replace('_', '.')}": value for key, value in settings.items()}})
    stop = serve_page(source, config)
    try:
        yield port
    finally:
        stop()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()


class Events:
    """A viewer of events, at its own pace."""

    def __init__(self, port: int, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._connection.request("GET", path)
        self._answer = self._connection.getresponse()
        self.status = self._answer.status

    def next(self, *names: str) -> Any:
        """The document of the next event of one of these names."""
        name = b""
        while True:
            line = self._answer.readline()
            if not line:
                raise EOFError("the stream has ended")
            if line.startswith(b"event: "):
                name = line[7:].strip()
            elif line.startswith(b"data: ") and name.decode() in names:
                return json.loads(line[6:])

    def trouble(self, reason: str | None) -> Any:
        """The next document about trouble with this reason. On a busy machine the page may say
        meanwhile that nothing answers."""
        while (found := self.next("trouble"))["reason"] != reason:
            pass
        return found

    def close(self) -> None:
        self._answer.close()
        self._connection.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
