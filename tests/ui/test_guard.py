"""Who may look, and what a browser may do with the page."""

from __future__ import annotations

import re
import ssl
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from framework.config import Config
from framework.errors import ConfigError
from framework.ui import guard
from framework.ui.app import STATIC, Page
from framework.ui.guard import ADDRESSES_MAX, BURST, WRONG_BURST, Buckets, Guard, Token
from framework.ui.server import serve_page
from integration.server import free_port
from tests.kit.certificates import make_certificates
from tests.kit.waiting import PATIENCE_S
from tests.ui.sources import Told, served
from tests.ui.vendor import FOLDER, SUMS, VENDORED, sums

pytestmark = pytest.mark.behaviour("6.4")

TOKEN = "a-token-of-some-length"
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|\beval\(|"
    r"\bnew Function\("
)
NAMES = ("localhost", "127.0.0.1", "page.example")


def client(token: str | None = None, **options: Any) -> TestClient:
    """A browser of the page; it follows no redirection."""
    shown = Token(token, 80) if token is not None else None
    guarded = Guard(Page(Told(), shown).app, names=NAMES, token=shown)
    return TestClient(guarded, base_url="http://localhost", follow_redirects=False, **options)


def test_every_answer_forbids_what_a_page_of_ours_never_does() -> None:
    for path in ("/", "/static/page.js", "/api/topologies", "/nosuch"):
        headers = client().get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy and "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_the_page_can_only_be_read(method: str) -> None:
    for path in ("/", "/api/topology?id=words", "/api/topology/transaction?id=words&txid=1", "/static/page.js"):
        assert client().request(method, path).status_code == 405


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:80", "", "127.0.0.2", "169.254.169.254", "a@localhost"],
)
def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    """Somebody else's DNS may name this machine."""
    assert client().get("/api/topologies", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8470", "127.0.0.1:8470", "page.example"])
def test_a_host_that_is_ours_is_answered(host: str) -> None:
    assert client().get("/api/topologies", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:81"},
        {"Origin": "https://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_what_another_site_asks_for_is_refused(headers: dict[str, str]) -> None:
    assert client().get("/api/topologies", headers=headers).status_code == 403


def test_a_link_on_another_page_leads_here() -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client().get("/topology?id=words", headers=headers).status_code == 200
    assert client().get("/api/topologies", headers={"Origin": "http://localhost"}).status_code == 200


def test_without_the_token_nothing_is_shown_but_the_form() -> None:
    browser = client(TOKEN)
    assert browser.get("/").headers["location"] == "/enter"
    for path in ("/api/topologies", "/api/topology/events?id=words", "/static/page.js", "/nosuch"):
        assert browser.get(path).status_code == 401, path
    assert "password" in browser.get("/enter").text
    assert browser.get("/static/page.css").status_code == 200


def test_the_token_opens_the_page_by_the_form_and_by_a_header() -> None:
    browser = client(TOKEN)
    assert browser.post("/enter", data={"token": "wrong"}).status_code == 403
    assert browser.get("/api/topologies").status_code == 401
    answer = browser.post("/enter", data={"token": TOKEN}, headers={"Origin": "http://localhost"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and TOKEN not in cookie
    assert browser.get("/api/topologies").status_code == 200
    assert client(TOKEN).get("/api/topologies", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", "Bearer é"):
        refused = client(TOKEN).get("/api/topologies", headers={b"Authorization": wrong.encode("latin-1")})
        assert refused.status_code == 401


def test_a_cookie_of_another_process_opens_nothing() -> None:
    other = client(TOKEN)
    other.post("/enter", data={"token": TOKEN})
    assert client(TOKEN, cookies=dict(other.cookies)).get("/api/topologies").status_code == 401


@pytest.fixture
def slow_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that do not fill again during a test: on a busy machine it asks slowly."""
    for each in ("PER_SECOND", "WRONG_PER_SECOND"):
        monkeypatch.setattr(guard, each, 0.001)


@pytest.mark.usefixtures("slow_buckets")
def test_wrong_tokens_are_slowed_down_and_long_ones_not_read() -> None:
    browser = client(TOKEN)
    statuses = [browser.post("/enter", data={"token": "x"}).status_code for _ in range(WRONG_BURST + 1)]
    assert statuses == [403] * WRONG_BURST + [429]
    assert browser.post("/enter", data={"token": TOKEN}).status_code == 429
    assert client(TOKEN).post("/enter", data={"token": "x" * 100_000}).status_code == 413


@pytest.mark.slow
@pytest.mark.usefixtures("slow_buckets")
def test_wrong_tokens_in_a_header_count_as_those_of_the_form_do() -> None:
    browser = client(TOKEN)
    program = TestClient(browser.app, base_url="http://localhost", follow_redirects=False)
    wrong, right = {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}"}
    browser.post("/enter", data={"token": TOKEN})
    statuses = [program.get("/api/topologies", headers=wrong).status_code for _ in range(WRONG_BURST + 1)]
    assert statuses == [401] * WRONG_BURST + [429]
    assert program.get("/api/topologies", headers=right).status_code == 429
    assert program.post("/enter", data={"token": TOKEN}).status_code == 429
    assert browser.get("/api/topologies", headers=wrong).status_code == 200  # its cookie opens the page


@pytest.mark.slow
@pytest.mark.usefixtures("slow_buckets")
def test_an_address_that_asks_too_often_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_TOO_OFTEN_S", 0.0)
    browser = client()
    statuses = {browser.get("/nosuch").status_code for _ in range(2 * BURST)}
    assert statuses == {404, 429}


def test_buckets_fill_again_and_remember_few_addresses() -> None:
    now = [0.0]
    buckets = Buckets(2, 1, clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    now[0] += 1.0
    assert [buckets.take("a") for _ in range(2)] == [True, False]
    for number in range(2 * ADDRESSES_MAX):
        buckets.take(str(number))
    assert len(buckets._left) == ADDRESSES_MAX


def test_an_address_that_others_reach_needs_a_token_or_certificates() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match=r"ui\.host is .*, which others can reach: set ui\.token"):
            serve_page(Told(), Config.of({"ui.port": free_port(), "ui.host": host}))
    with pytest.raises(ConfigError, match=r"ui\.token: must have at least 16 characters"):
        Config.of({"ui.token": "short"})
    with pytest.raises(ConfigError, match=r"ui\.tls\.certificate is not set"):
        serve_page(Told(), Config.of({"ui.port": free_port(), "ui.tls.client.ca": "ca.pem"}))
    with pytest.raises(ConfigError, match=r"ui\.tls: .*check certificate"):
        serve_page(Told(), Config.of({"ui.port": free_port(), "ui.tls.certificate": "nosuch.pem"}))


def test_viewers_show_a_certificate_where_one_is_asked_for(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    settings = {"tls_certificate": str(made.broker), "tls_client_ca": str(made.authority)}
    with served(Told(), **settings) as port:

        def ask(context: ssl.SSLContext) -> int:
            with closing(HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_S)) as connection:
                connection.request("GET", "/api/topologies", headers={"Host": "localhost"})
                return int(connection.getresponse().status)

        nobody = ssl.create_default_context(cafile=made.authority)
        nobody.check_hostname = False
        with pytest.raises(OSError):
            ask(nobody)
        known = ssl.create_default_context(cafile=made.authority)
        known.check_hostname = False
        known.load_cert_chain(made.broker)
        assert ask(known) == 200


def test_no_data_becomes_markup() -> None:
    """Whatever a topic, a component or an error is called, it is text."""
    for file in STATIC.rglob("*.js"):
        assert MARKUP.search(file.read_text(encoding="utf-8")) is None, file
    for file in STATIC.glob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert re.search(r"<script(?![^>]* src=)|\son\w+=|style=|https?://|javascript:", text) is None, file


@pytest.mark.parametrize("line", ["a.innerHTML = b", "a.insertAdjacentHTML(b)", "document.write(b)", "eval(b)"])
def test_what_would_make_markup_of_data_is_noticed(line: str) -> None:
    assert MARKUP.search(line)


def test_nothing_is_asked_of_another_machine() -> None:
    for file in [*STATIC.glob("*.js"), *STATIC.glob("*.css")]:
        found = set(re.findall(r"https?://[\w.]*", file.read_text(encoding="utf-8")))
        assert found <= {"http://www.w3.org"}, file


def test_libraries_are_those_whose_sums_are_written_down_and_bring_their_licences() -> None:
    assert SUMS.read_text(encoding="utf-8") == sums()
    named = {name for files in VENDORED.values() for name in files.values()}
    assert {each.name for each in FOLDER.iterdir()} == {*named, SUMS.name}
    assert any(name.endswith("LICENSE") for name in named)
