"""Access control of the page: who may read it, how often, and what browsers may do with it.

Invariants:

1. Only GET and HEAD, without a body, reach the pages; the only POST is the form for the token.
2. A request with a foreign Host header is refused, so that another site's DNS name that points here
   reads nothing.
3. A request made by another site's script is refused.
4. If a token is set, only the form and its style are shown without it.
5. The memory about viewers is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from framework.observe.allowed_hosts import AllowedHosts

#: Requests of one address: the burst, and the permanent rate per second. A page takes about twenty
#: requests.
BURST = 300
PER_SECOND = 25
#: The most addresses in memory.
ADDRESSES_MAX = 1_000
#: How long the refusal of too frequent requests is delayed.
_TOO_OFTEN_S = 1.0
#: Wrong tokens of one address before it has to wait.
WRONG_BURST = 10
WRONG_PER_SECOND = 0.2
#: The paths that need no token.
OPEN_PATHS = ("/enter", "/static/page.css", "/static/icon.svg")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Buckets:
    """Token buckets, one per address: a burst, and a rate per second."""

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, count: float = 1.0) -> bool:
        """Take from an address's bucket. Returns False, and takes nothing, when it is empty."""
        left = self.left(address)
        enough = left >= 1.0
        self._left[address] = (left - count if enough else left, self._clock())
        self._left.move_to_end(address)
        if len(self._left) > ADDRESSES_MAX:
            self._left.popitem(last=False)
        return enough

    def left(self, address: str) -> float:
        left, at_s = self._left.get(address, (self._burst, 0.0))
        return min(self._burst, left + (self._clock() - at_s) * self._per_second)


class Token:
    """The token of a page. Browsers keep a cookie derived from it, which is valid until the process
    ends. ``port``: of the page; part of the cookie's name, because all ports of a host share
    cookies."""

    def __init__(self, token: str, port: int) -> None:
        self.cookie_name = f"ratchet-viewer-{port}"
        self._digest = hashlib.sha256(token.encode()).digest()
        self._key = secrets.token_bytes(32)
        self.cookie = hmac.new(self._key, b"viewer", hashlib.sha256).hexdigest()
        self._wrong = Buckets(WRONG_BURST, WRONG_PER_SECOND)

    def must_wait(self, address: str) -> bool:
        """Whether an address has shown too many wrong tokens, in the form or in a header."""
        return self._wrong.left(address) < 1.0

    def fits(self, token: str, address: str) -> bool:
        """Compare a token in constant time. A wrong one is counted."""
        right = hmac.compare_digest(hashlib.sha256(token.encode()).digest(), self._digest)
        if not right:
            self._wrong.take(address)
        return right

    def in_cookie(self, headers: Headers) -> bool:
        """Whether a request has the cookie."""
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.cookie.encode())


class Guard:
    """The guard in front of the app. ``names``: the allowed host names, without port; the connected
    address is allowed too."""

    def __init__(self, app: ASGIApp, *, names: Collection[str], token: Token | None) -> None:
        self._app = app
        self._hosts = AllowedHosts(names)
        self._token = token
        self._requests = Buckets(BURST, PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None and refusal.status_code == 429:
            # otherwise the answer would cost more than the request
            await asyncio.sleep(_TOO_OFTEN_S)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        client = scope.get("client")
        address = client[0] if client else ""
        if not self._requests.take(address):
            return PlainTextResponse(
                "too many requests: wait a second", 429, {"Retry-After": "1", "Connection": "close"}
            )
        if method not in ("GET", "HEAD") and (method, path) != ("POST", "/enter"):
            return PlainTextResponse("this page can only be read", 405, {"Allow": "GET, HEAD"})
        if method != "POST" and _has_body(headers):
            return PlainTextResponse("ask without a body", 413, {"Connection": "close"})
        if not self._is_ours(headers.getlist("host"), scope.get("server")):
            return PlainTextResponse("this host is not known here: see ui.allowed.hosts", 421)
        if not _same_site(headers, scope["scheme"], path):
            return PlainTextResponse("another site asked for this", 403)
        if self._token is None or path in OPEN_PATHS or self._token.in_cookie(headers):
            return None
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            if self._token.must_wait(address):
                return too_many_wrong()
            if self._token.fits(token.strip(), address):
                return None
        if path in ("/", "/topology"):
            return RedirectResponse("/enter", 303)
        return PlainTextResponse("show the token", 401, {"WWW-Authenticate": "Bearer"})

    def _is_ours(self, hosts: list[str], server: tuple[str, int | None] | None) -> bool:
        return len(hosts) == 1 and self._hosts.allow(hosts[0], server[0] if server is not None else "")


def too_many_wrong() -> Response:
    """The answer to an address that has shown too many wrong tokens."""
    return PlainTextResponse("too many wrong tokens: wait a minute", 429, {"Retry-After": "60"})


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _same_site(headers: Headers, scheme: str, path: str) -> bool:
    """Whether the request comes from our own page or from a person: a link on another page may only
    open a page here."""
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"{scheme}://{headers['host']}".lower():
        return False
    site = headers.get("sec-fetch-site", "none")
    return site in ("none", "same-origin") or (
        headers.get("sec-fetch-mode") == "navigate" and not path.startswith("/api")
    )
