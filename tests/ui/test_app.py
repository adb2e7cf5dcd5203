"""JSON and events of the page, over real connections, and its cost."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from framework.config import Config
from framework.errors import ConfigError
from framework.ui import app, documents
from framework.ui.server import serve_page
from tests.kit.own_logs import own_logs
from tests.kit.waiting import wait_for
from tests.ui.sources import Events, Told, get, record, served

pytestmark = pytest.mark.behaviour("6.4")


def read(port: int, path: str) -> Any:
    status, _, body = get(port, path)
    return json.loads(body) if status == 200 else status


def test_topologies_and_one_of_them_are_told_as_json() -> None:
    with served(Told()) as port:
        assert [each["topology"] for each in read(port, "/api/topologies")["topologies"]] == ["words"]
        found = read(port, "/api/topology?id=words")
        assert found["live"]["state"] == "running"
        assert [row[0] for row in found["transactions"]["rows"]] == [1, 2, 3]
        assert read(port, "/api/topology?id=nosuch") == 404
        assert read(port, "/api/topology") == 404


def test_a_transaction_is_told_whole_and_an_unknown_one_is_not_found() -> None:
    with served(Told()) as port:
        found = read(port, "/api/topology/transaction?id=words&txid=2")
        assert [each["outcome"] for each in found["attempts"]] == ["failed", "committed"]
        assert found["attempts"][0]["trace"] == "Traceback: here"
        for wrong in ("99", "x", "-1", "9" * 30, ""):
            assert read(port, f"/api/topology/transaction?id=words&txid={wrong}") == 404


def test_pages_and_files_are_served_and_nothing_outside_their_folder() -> None:
    with served(Told()) as port:
        for path in ("/", "/topology?id=words", "/static/page.js", "/static/page.css"):
            assert get(port, path)[0] == 200, path
        for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/nosuch"):
            assert get(port, path)[0] == 404, path


def test_events_begin_with_everything_and_go_on_with_what_is_new() -> None:
    source = Told()
    with served(source) as port, Events(port, "/api/topology/events?id=words") as viewer:
        assert viewer.next("live")["topology"] == "words"
        assert len(viewer.next("transactions")["rows"]) == 3
        source.closed = [*source.closed, record(4)]
        news = viewer.next("transactions")
        assert (news["anew"], [row[0] for row in news["rows"]]) == (False, [4])


def test_the_events_of_the_list_tell_every_topology() -> None:
    source = Told()
    with served(source) as port, Events(port, "/api/topologies/events") as viewer:
        assert viewer.next("topologies")["topologies"][0]["state"] == "running"
        source.live = {**source.live, "state": "stopped"}
        assert viewer.next("topologies")["topologies"][0]["state"] == "stopped"


def test_what_cannot_be_read_is_said_beside_what_was_read_last() -> None:
    source = Told()
    # The thread that reads logs, and it may have begun with the page.
    with own_logs() as lines, served(source) as port, Events(port, "/api/topology/events?id=words") as viewer:
        assert viewer.next("live")["state"] == "running"
        assert viewer.trouble(None)["age_s"] == 0
        assert lines == []
        source.error = ConnectionError("the store is away")
        assert viewer.trouble("ConnectionError: the store is away")
        looked = source.looks
        wait_for(lambda: source.looks > looked + 5)
        assert [line["event"] for line in lines] == ["page.unread"]  # once
        source.error = None
        assert viewer.trouble(None)


def test_a_source_that_never_answered_is_an_error_and_no_empty_page() -> None:
    source = Told()
    source.error = ConnectionError("the store is away")
    with served(source) as port:
        status, _, body = get(port, "/api/topologies")
        assert (status, json.loads(body)) == (503, {"error": "ConnectionError: the store is away"})


def test_nothing_is_read_when_nobody_looks() -> None:
    source = Told()
    with served(source) as port:
        with Events(port, "/api/topology/events?id=words") as viewer:
            viewer.next("live")
            wait_for(lambda: source.looks >= 3)
        before = -1
        while before != source.looks:  # the stream has noticed that its viewer has left
            before = source.looks
            threading.Event().wait(20 * source.every_s)
        assert source.looks == before


def test_all_viewers_of_a_topology_share_one_reading_and_one_too_many_is_told() -> None:
    source = Told()
    source.every_s = 0.5
    with served(source) as port, ExitStack() as viewers:
        watching = [
            viewers.enter_context(Events(port, "/api/topology/events?id=words")) for _ in range(app.VIEWERS_MAX)
        ]
        assert all(each.next("live")["topology"] == "words" for each in watching)
        assert source.looks < app.VIEWERS_MAX / 2
        status, headers, body = get(port, "/api/topology/events?id=words")
        assert (status, headers["retry-after"]) == (503, "10")
        assert body.startswith(b"100 viewers look already")
        assert read(port, "/api/topologies")["topologies"]
        watching[0].close()
        wait_for(lambda: _can_watch(port))


def _can_watch(port: int) -> bool:
    with Events(port, "/api/topology/events?id=words") as viewer:
        return viewer.status == 200


def test_a_document_is_made_once_for_all_who_ask_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = Told(), []

    def rows(record: Any) -> Any:
        made.append(record.txid)
        return documents.row(record)

    monkeypatch.setattr(source, "every_s", 60.0)
    monkeypatch.setattr(app, "row", rows)
    with served(source) as port:
        answers = {get(port, "/api/topology?id=words")[2] for _ in range(20)}
    assert len(answers) == 1 and made == [1, 2, 3]


def test_transactions_are_opened_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "OPENED_BURST", 5)
    monkeypatch.setattr(app, "OPENED_PER_SECOND", 0.001)
    with served(Told()) as port:
        statuses = [get(port, "/api/topology/transaction?id=words&txid=1")[0] for _ in range(8)]
    assert statuses == [200] * 5 + [429] * 3


def test_a_viewer_that_takes_nothing_is_dropped_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STUCK_S", 0.5)
    monkeypatch.setattr(app, "VIEWERS_MAX", 2)
    source, letters = Told(), itertools.cycle("abc")
    source.parts = {"about": {"text": "x" * 500_000}}
    with served(source) as port, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", port))
        stuck.sendall(b"GET /api/topology/events?id=words HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with Events(port, "/api/topology/events?id=words") as viewer:

            def dropped() -> bool:
                """Whether its place is free; the other viewer gets its news all the while."""
                source.parts = {"about": {"text": next(letters) * 500_000}}
                assert viewer.next("about")["text"]
                return _can_watch(port)

            wait_for(dropped)


def test_a_source_that_hangs_lets_the_page_end_at_once() -> None:
    source = Told()
    with served(source) as port:
        assert read(port, "/api/topology?id=words")["live"]
        source.hangs = 3600.0
        with Events(port, "/api/topology/events?id=words") as viewer:
            assert viewer.next("live")["state"] == "running"
            assert viewer.trouble(None)["age_s"] == 0
            assert viewer.trouble("what is asked does not answer")
    assert not [each for each in threading.enumerate() if each.name == "ratchet-page"]


def test_a_port_that_is_taken_is_one_line() -> None:
    with served(Told()) as port, pytest.raises(ConfigError, match=f"ui.port {port} on 127.0.0.1: .*; take another"):
        serve_page(Told(), Config.of({"ui.port": port}))
