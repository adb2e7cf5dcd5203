"""The page as a web application: two pages, their files, JSON, and events."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from framework.observe.logs import get_logger
from framework.ui.cached_reads import Answer, Kept
from framework.ui.documents import ROW, Source, View, now, row
from framework.ui.guard import Buckets, Token, too_many_wrong
from framework.ui.page_updates import Encoded, Viewer, encode

STATIC = Path(__file__).parent / "static"
#: The most browsers that get events at the same time.
VIEWERS_MAX = 100
#: The most topologies whose last view is cached.
TOPOLOGIES_MAX = 50
#: How long a request waits for a first answer, in seconds.
FIRST_S = 10.0
#: How long a viewer's next update waits for a read that is under way, in seconds.
NEXT_S = 0.5
#: A viewer that accepts no data for this long, in seconds, is dropped.
STUCK_S = 20.0
#: After this many seconds without news, a viewer gets a keep-alive.
ALIVE_S = 10.0
#: Limit of opened transactions, over all viewers: each needs a read of its own, maybe from the
#: store.
OPENED_BURST = 30
OPENED_PER_SECOND = 10
#: The longest form that is accepted, in bytes.
FORM_MAX = 4_096
_POLL_S = 0.02

T = TypeVar("T")
_log = get_logger()


class Page:
    """The application over one source. Used from one event loop."""

    def __init__(self, source: Source, token: Token | None = None) -> None:
        self._source = source
        self._token = token
        self._opened = Buckets(OPENED_BURST, OPENED_PER_SECOND)
        self._viewers = 0
        self._list: Watched[View] = Watched("topologies", self._read_list, source.every_s)
        self._watched: OrderedDict[str, Watched[View | None]] = OrderedDict()
        routes = [
            Route("/", _shell),
            Route("/topology", _shell),
            Route("/enter", self._enter, methods=["GET", "POST"]),
            Route("/api/topologies", self._topologies),
            Route("/api/topologies/events", self._list_events),
            Route("/api/topology", self._topology),
            Route("/api/topology/events", self._topology_events),
            Route("/api/topology/transaction", self._transaction),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        self.app = Starlette(routes=routes, exception_handlers={Exception: _failed})

    def _read_list(self) -> View:
        return View({"topologies": {"title": self._source.title, "at": now(), "topologies": self._source.topologies()}})

    # --- JSON -------------------------------------------------------------------------------------

    async def _topologies(self, request: Request) -> Response:
        answer = await self._list.first()
        if answer.value is None:
            return _unread(answer)
        return Response(self._list.body(answer, _of_list), media_type="application/json")

    async def _topology(self, request: Request) -> Response:
        watched = await self._watched_by(request)
        if watched is None:
            return _unknown()
        answer = await watched.first()
        if answer.value is None:
            return _unknown() if answer.number else _unread(answer)
        return Response(watched.body(answer, _of_topology), media_type="application/json")

    async def _transaction(self, request: Request) -> Response:
        watched = await self._watched_by(request)
        text = request.query_params.get("txid", "")
        if watched is None or not text.isdecimal() or len(text) > 18:
            return _unknown()
        if not self._opened.take("all"):
            return PlainTextResponse("too many transactions at once: wait a second", 429, {"Retry-After": "1"})
        read = partial(self._source.transaction, request.query_params["id"], int(text))
        answer = await Watched("transaction", read, 0.0).first()
        if answer.value is None:
            return _unknown() if answer.number else _unread(answer)
        return Response(encode(answer.value), media_type="application/json")

    async def _watched_by(self, request: Request) -> Watched[View | None] | None:
        """The topology in a request; None if it does not exist."""
        name = request.query_params.get("id", "")
        known = self._watched.get(name)
        if known is None:
            listed = (await self._list.first()).value
            found = listed.parts["topologies"]["topologies"] if listed is not None else []
            if name not in [each["topology"] for each in found]:
                return None
            known = self._watched[name] = Watched(
                "topology", partial(self._source.topology, name), self._source.every_s
            )
        self._watched.move_to_end(name)
        if len(self._watched) > TOPOLOGIES_MAX:
            self._watched.popitem(last=False)
        return known

    # --- events -----------------------------------------------------------------------------------

    async def _list_events(self, request: Request) -> Response:
        return self._events(self._list)

    async def _topology_events(self, request: Request) -> Response:
        watched = await self._watched_by(request)
        return _unknown() if watched is None else self._events(watched)

    def _events(self, watched: Watched[Any]) -> Response:
        if self._viewers >= VIEWERS_MAX:
            text = f"{VIEWERS_MAX} viewers look already: close a page, or come again later"
            return PlainTextResponse(text, 503, {"Retry-After": "10"})
        return _Events(watched, self._source.every_s, self._count)

    def _count(self, change: int) -> None:
        self._viewers += change

    # --- the token --------------------------------------------------------------------------------

    async def _enter(self, request: Request) -> Response:
        if request.method != "POST":
            return FileResponse(STATIC / "enter.html")
        address = request.client.host if request.client else ""
        if self._token is not None and self._token.must_wait(address):
            return too_many_wrong()
        form = b""
        try:
            async with asyncio.timeout(FIRST_S):
                async for chunk in request.stream():
                    form += chunk
                    if len(form) > FORM_MAX:
                        return PlainTextResponse("too long", 413)
        except TimeoutError:
            return PlainTextResponse("too slow", 408, {"Connection": "close"})
        token = parse_qs(form.decode("utf-8", "replace")).get("token", [""])[0]
        if self._token is None or not self._token.fits(token.strip(), address):
            return FileResponse(STATIC / "enter.html", 403)
        answer = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(self._token.cookie_name, self._token.cookie, httponly=True, samesite="lax", secure=secure)
        return answer


class Watched(Generic[T]):
    """A ``Kept`` for coroutines, with its last value in encoded form."""

    def __init__(self, what: str, read: Callable[[], T], every_s: float) -> None:
        self._kept = Kept(what, read, every_s)
        self._encoded: Encoded | None = None
        self._body: tuple[int, bytes] = (0, b"")

    async def first(self) -> Answer[T]:
        """The last answer; waits for the first one."""
        return await self._until(FIRST_S, lambda answer: answer.number > 0 or answer.error is not None)

    async def next(self, number: int) -> Answer[T]:
        """An answer newer than ``number``, if one comes soon; otherwise the last one."""
        return await self._until(NEXT_S if number else FIRST_S, lambda answer: answer.number > number)

    async def _until(self, wait_s: float, enough: Callable[[Answer[T]], bool]) -> Answer[T]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        self._kept.look()
        while True:
            # check before the look, so that the look sees a read that completes in between
            reading = self._kept.reading
            answer = self._kept.look()
            if enough(answer) or not reading or loop.time() >= end:
                return answer
            await asyncio.sleep(_POLL_S)

    def encoded(self, answer: Answer[View]) -> Encoded | None:
        if answer.value is not None and (self._encoded is None or self._encoded.number != answer.number):
            self._encoded = Encoded(answer.number, answer.value)
        return self._encoded

    def body(self, answer: Answer[T], document: Callable[[Any], Any]) -> bytes:
        """The answer as one JSON document, encoded once."""
        if self._body[0] != answer.number:
            self._body = (answer.number, encode(document(answer.value)))
        return self._body[1]


class _Events(Response):
    """Server-sent events for one viewer: the changed parts of a view, and ``trouble``: why there is
    no newer data, and the age of the shown data."""

    def __init__(self, watched: Watched[Any], every_s: float, count: Callable[[int], None]) -> None:
        super().__init__(media_type="text/event-stream")
        self._watched = watched
        self._every_s = every_s
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del self.headers["content-length"]
        self._count(1)
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            async with asyncio.timeout(STUCK_S):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._tell(gone, send)
        except TimeoutError:
            _log.info("page.viewer_dropped", reason=f"it took nothing for {STUCK_S:g} s")
        finally:
            gone.cancel()
            self._count(-1)

    async def _tell(self, gone: asyncio.Future[None], send: Send) -> None:
        viewer, number, trouble, quiet_s = Viewer(), 0, b"", 0.0
        while not gone.done():
            answer = await self._watched.next(number)
            encoded = self._watched.encoded(answer)
            news = viewer.news(encoded) if encoded is not None and answer.number != number else b""
            number = answer.number
            said = _problem(answer, self._every_s)
            if said != trouble:
                news, trouble = news + said, said
            quiet_s = 0.0 if news else quiet_s + self._every_s
            if quiet_s >= ALIVE_S:
                news, quiet_s = b": alive\n\n", 0.0
            if news:
                async with asyncio.timeout(STUCK_S):
                    await send({"type": "http.response.body", "body": news, "more_body": True})
            await asyncio.wait((gone,), timeout=self._every_s)


def _problem(answer: Answer[Any], every_s: float) -> bytes:
    """The age is rounded to five seconds, so that the text does not change all the time."""
    old = answer.age_s > 3 * every_s + NEXT_S
    error = answer.error or ("what is asked does not answer" if old else None)
    age_s = int(answer.age_s // 5 * 5) if old and answer.number else 0
    return b"event: trouble\ndata: %s\n\n" % encode({"reason": error, "age_s": age_s})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _shell(request: Request) -> Response:
    return FileResponse(STATIC / "page.html")


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("page.failed", path=request.url.path, exc_info=error)
    return PlainTextResponse("the page failed; its log says why", 500)


def _of_list(view: View) -> Any:
    return view.parts["topologies"]


def _of_topology(view: View) -> dict[str, Any]:
    rows = [row(each) for each in view.closed]
    return {**view.parts, "transactions": {"anew": True, "columns": ROW, "rows": rows}}


def _unknown() -> Response:
    return Response(encode({"error": "there is no such thing"}), 404, media_type="application/json")


def _unread(answer: Answer[Any]) -> Response:
    reason = answer.error or f"nothing answered within {FIRST_S:g} s"
    return Response(encode({"error": reason}), 503, media_type="application/json")
