"""The page in Debian's Chromium: what people see, with which keys and on which screens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

from framework import submit
from framework.ui import documents
from integration import EmbeddedServers
from integration.server import free_port
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.ui.browser import PATIENT_MS, Watched, chromium, too_wide, violations
from tests.ui.sources import Told, record, served
from tests.ui.test_runs import topology
from tests.ui.worlds import TROUBLE, World

pytestmark = pytest.mark.behaviour("6.4")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`${1}&lt;\u202e\u0000{{7*7}}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def sees(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until somebody sees it."""
    expect(page.locator(selector).first).to_contain_text(text, timeout=PATIENT_MS)


def shown(tab: Watched, port: int, path: str) -> Page:
    tab.page.goto(f"http://127.0.0.1:{port}{path}")
    sees(tab.page, ".badge", re.compile(r"\w"))
    return tab.page


def figure(page: Page, name: str) -> str:
    return page.locator(".figures > div", has=page.get_by_text(name, exact=True)).locator("dd").first.inner_text()


def all_of_it() -> Told:
    """A topology that has something of everything, each text of which is hostile."""
    source = Told(HOSTILE)
    names = [f"{HOSTILE}{number}" for number in range(4)]
    source.closed = [record(txid, attempts=1 + txid % 3, reason=HOSTILE) for txid in range(1, 200)]
    source.live["trouble"] = HOSTILE
    source.live["state"] = "waiting"
    source.live["drivers"] = [
        {"host": HOSTILE, "pid": 1, "phase": "running", "started_at": 1e9, "said_at": 1e9, "page": "http://h:1/"}
    ]
    counts = {"lag": 7, "committed_rows": 5, "epoch": 1, "rows_per_second": 2.0, "attempts_failed": 3}
    source.live["status"] = {
        **counts,
        "bad_records": 1,
        "lost_records": 0,
        "repeating": HOSTILE,
        "failures_last_hour": 3,
    }
    source.live["in_flight"] = [{"txid": 200, "attempt": HOSTILE, "phase": HOSTILE, "since_s": 1.0}]
    kinds = ["spout", "bolt", "bolt", "committer"]
    source.parts = {
        "about": {
            "graph": {
                "components": [
                    {"id": name, "kind": kind, "class": HOSTILE, "parallelism": 2, "states": [HOSTILE]}
                    for name, kind in zip(names, kinds, strict=True)
                ],
                "edges": [
                    {"source": names[0], "stream": HOSTILE, "target": each, "grouping": HOSTILE} for each in names[1:]
                ],
            },
            "configuration": [[HOSTILE, HOSTILE, True], ["ui.port", "1", False]],
        },
        "partitions": {"total": 2, "all": [[HOSTILE, 3], ["b", None]], "worst": [[HOSTILE, 3, 1, 1, 0]]},
        "headers": [{"location": HOSTILE, "done": 3, "open": 4, "epoch": 1}],
    }
    return source


def large() -> Told:
    """As much as a page has to bear."""
    source = Told()
    source.closed = [record(txid, attempts=1 + (txid % 90 == 0), reason="away") for txid in range(1, 1_001)]
    lags = [[f"words-{number}", number % 977] for number in range(1_000)]
    components = [
        {
            "id": f"component-{number}",
            "kind": "bolt" if number else "spout",
            "class": "B",
            "parallelism": 4,
            "states": [],
        }
        for number in range(50)
    ]
    edges = [
        {"source": f"component-{number // 2}", "stream": "default", "target": f"component-{number}", "grouping": "G()"}
        for number in range(1, 50)
    ]
    worst = [[name, lag, 1, 2, 0] for name, lag in lags[-20:]]
    source.parts = {
        "about": {"graph": {"components": components, "edges": edges}},
        "partitions": {"total": 1_000, "all": lags, "worst": worst},
    }
    return source


def accessible(page: Page) -> list[str]:
    """What is wrong, in the words of axe-core."""
    return [f"{each['id']}: {[node['html'][:120] for node in each['nodes'][:3]]}" for each in violations(page)]


@pytest.mark.slow
def test_a_run_is_shown_with_its_transactions_and_one_of_them_opens(browser: Browser) -> None:
    port = free_port()
    with submit(topology(), {"ui.port": port}, executor="local") as run, Watched(browser) as tab:
        run.wait_until_caught_up(PATIENCE_S)
        page = shown(tab, port, "/topology?id=words")
        sees(page, ".verdict", "It runs, and has committed all that the source holds.")
        sees(page, ".title", "running")
        assert figure(page, "Committed up to") == "3" and figure(page, "Lag") == "0"
        expect(page.locator(".graph .node")).to_have_count(2)
        page.locator(".plot.tall").focus()
        for key in ("End", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        sees(page, "dialog", "Attempt 1: committed")
        sees(page, "dialog h2", "Transaction 2")
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_be_hidden()
        assert tab.errors == []
        assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in tab.requested)


@pytest.mark.slow
@pytest.mark.integration
def test_topologies_run_wait_fail_and_stop_before_the_eyes_of_a_viewer(
    browser: Browser, servers: EmbeddedServers, name: str, tmp_path: Path
) -> None:
    """Two topologies over real servers, their own pages and the page of all."""
    with World(servers, name, tmp_path) as world, Watched(browser) as tab, Watched(browser) as all_of_them:
        orders, port = world.start("orders")
        other, _ = world.start("returns")
        root = shown(all_of_them, world.root_page(), "/")
        world.send("orders", 2_000)
        world.send("returns", 50)
        page = shown(tab, port, "/topology?id=orders")
        sees(page, ".verdict", "It runs")
        sees(root, ".verdict", "2 topologies at work, none in trouble.")
        world.send_unreadable("orders")
        sees(page, "section:has-text('Is it right')", "1 dead letter in the last hundred transactions")
        sees(page, "section:has-text('Is it right')", "1 record could not be decoded")
        sees(page, "section:has-text('Is it right')", "table 'refused' of")
        sees(page, "section:has-text('Where do the rows go')", "time per row")
        sees(page, ".chart:has-text('How old records are')", "p99")

        TROUBLE[world.topic("orders")] = "away"
        world.send("orders", 100)
        sees(page, ".verdict", "It fails and is repeated: words[")
        sees(page, ".verdict", "connection refused")
        sees(page, ".title", "waiting")
        sees(root, ".verdict", "1 topology needs a look: orders.")
        sees(root, "tr", "state")
        sees(root, ".state-waiting", "waiting")

        TROUBLE[world.topic("orders")] = "no price for <b>apples</b>"
        sees(page, ".verdict", "no price for <b>apples</b>")
        del TROUBLE[world.topic("orders")]
        sees(page, ".verdict", "It runs, and has committed all that the source holds.")
        sees(page, "section:has-text('What failed')", "ValueError: no price for <b>apples</b>")
        # Attempts of other transactions failed over what was away, which has no trace.
        page.locator("tr", has_text="ValueError: no price for").first.locator("button.link").click()
        sees(page, "dialog pre", "raise ValueError(trouble)")
        page.keyboard.press("Escape")

        other.stop()
        sees(root, ".state-stopped", "stopped")
        root.get_by_role("link", name="returns").click()
        sees(root, ".verdict", "Nobody runs it.")
        expect(root.locator(".graph .node")).to_have_count(5)
        assert all_of_them.errors == []

        orders.stop()
        sees(page, "#connection", "not connected")
        sees(page, ".verdict", "the driver may have ended")
        assert [each for each in tab.errors if "ERR_CONNECTION" not in each and "ERR_INCOMPLETE" not in each] == []


@pytest.mark.slow
@pytest.mark.integration
def test_a_core_topology_is_shown_with_what_its_components_did(
    browser: Browser, servers: EmbeddedServers, name: str, tmp_path: Path
) -> None:
    with World(servers, name, tmp_path) as world, Watched(browser) as tab:
        _, port = world.start_core(count=500)
        page = shown(tab, port, "/topology?id=numbers")
        wait_for(lambda: figure(page, "Completed") == "500")
        assert figure(page, "Failed") == "10"
        expect(page.locator(".graph .node")).to_have_count(3)
        sees(page, "section:has-text('States, as of the last checkpoint')", "rests")
        sees(page, "section:has-text('Time of each component')", "time per row")
        assert tab.errors == [] and accessible(page) == []


@pytest.mark.slow
def test_hostile_names_stay_text(browser: Browser) -> None:
    with served(all_of_it()) as port, Watched(browser) as tab:
        page = shown(tab, port, "/")
        page.locator("td a").first.click()
        sees(page, ".verdict", "<script>alert(2)</script>")
        expect(page.locator(".graph .node")).to_have_count(4)
        page.locator("button.link").first.click()
        sees(page, "dialog", "<script>alert(2)</script>")
        assert page.locator("main img, main script, main iframe").count() == 0
        assert tab.errors == []
        assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in tab.requested)


@pytest.mark.slow
@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_the_page_is_accessible_and_fits(browser: Browser, look: str) -> None:
    source = all_of_it()
    with served(source) as port, Watched(browser, dark=look == "dark", phone=look == "phone") as tab:
        page = shown(tab, port, "/")
        assert accessible(page) == [] and too_wide(page) <= 0
        page.locator("td a").first.click()
        expect(page.locator(".graph .node")).to_have_count(4)
        page.get_by_role("button", name="Explain", exact=True).click()
        for each in page.locator("summary").all():
            each.click()
        assert accessible(page) == [] and too_wide(page) <= 0
        page.locator("button.link").first.click()
        sees(page, "dialog", "Attempt 1")
        assert accessible(page) == [] and too_wide(page) <= 0


@pytest.mark.slow
def test_a_page_of_a_thousand_partitions_and_transactions_is_drawn(browser: Browser) -> None:
    source = large()
    with served(source) as port, Watched(browser) as tab:
        page = shown(tab, port, "/topology?id=words")
        expect(page.locator(".graph .node")).to_have_count(50)
        page.locator(".strip").hover()
        sees(page, ".chart:has(.strip) .readout", re.compile(r"words-\d+: \d+ records? behind"))
        page.locator(".plot.tall").hover()
        sees(page, ".plot.tall ~ .readout", re.compile(r"Transaction [\d,]+ at"))
        assert page.evaluate("document.querySelectorAll('*').length") < 3_000
        assert accessible(page) == [] and too_wide(page) <= 0 and tab.errors == []


def test_a_rate_falls_to_0_and_an_axis_has_each_tick_once(browser: Browser) -> None:
    """Ten minutes after the last commit."""
    source = Told("words")
    source.closed = [record(txid) for txid in range(1, 40)]
    last = source.closed[-1].closed_at
    assert last is not None
    counts = {"lag": 1, "committed_rows": 5, "epoch": 1, "rows_per_second": 0.0, "attempts_failed": 0}
    source.live["status"] = {**counts, "bad_records": 0, "lost_records": 0, "failures_last_hour": 0}
    with served(source) as port, Watched(browser) as tab:
        page = shown(tab, port, "/topology?id=words")
        wait_for(lambda: figure(page, "Rate") == "0")
        for axis in page.locator(".plot .axes").all():
            ticks = axis.locator("text.end").all_text_contents()
            assert len(ticks) == len(set(ticks)), ticks


@pytest.mark.slow
def test_the_pace_and_the_time_to_the_next_plan_are_shown(browser: Browser) -> None:
    source = Told("words")
    counts = {"lag": 1, "committed_rows": 5, "epoch": 1, "rows_per_second": 0.0, "attempts_failed": 0}
    pace = {
        "topology.commit.interval": 120,
        "topology.commit.records.min": 500,
        "topology.commit.bytes.min": 100_000,
        "topology.rate.records.per.second": 15,
    }
    source.live["status"] = {
        **counts, "bad_records": 0, "lost_records": 0, "failures_last_hour": 0, "pace": pace, "planned_in_s": 42.0
    }  # fmt: skip
    with served(source) as port, Watched(browser) as tab:
        page = shown(tab, port, "/topology?id=words")
        wait_for(lambda: figure(page, "Pace") == "42 s")
        words = "interval 120, records.min 500, bytes.min 100K, rate.records.per.second 15"
        assert words in page.locator("body").inner_text()


class Many(Told):
    """A root with twenty topologies. ``lag``: of each of them, now. ``turn``: which are in
    trouble."""

    lag = 100
    turn = 0

    def topologies(self) -> list[documents.Document]:
        states = ["running", "running", "waiting", "stopped", "running"]
        return [
            {
                **self.live,
                "topology": f"topology-{number}",
                "state": states[(number + self.turn) % 5],
                "trouble": "PostgreSQL does not answer" if number % 5 == 2 else None,
                "status": {"lag": self.lag + number, "rows_per_second": 10.5, "failures_last_hour": number},
            }
            for number in range(20)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("look", ["light", "phone"])
def test_twenty_topologies_are_listed_with_those_in_trouble_first(browser: Browser, look: str) -> None:
    source = Many()
    with served(source) as port, Watched(browser, phone=look == "phone") as tab:
        page = shown(tab, port, "/")
        sees(page, ".verdict", "4 topologies need a look: topology-2, topology-7, topology-12, topology-17. 4 stopped.")
        assert page.title() == "(4) /ratchet: Ratchet"
        names = page.locator("td a").all_inner_texts()
        assert len(names) == 20 and names[:5] == [*(f"topology-{each}" for each in (2, 7, 12, 17)), "topology-0"]
        expect(page.locator(".spark")).to_have_count(20, timeout=PATIENT_MS)
        assert accessible(page) == [] and too_wide(page) <= 0

        page.get_by_role("link", name="topology-7").focus()
        source.lag = 5_000_000
        sees(page, "tr:has-text('topology-7')", "5M")
        expect(page.get_by_role("link", name="topology-7")).to_be_focused()
        page.get_by_role("link", name="topology-6").focus()
        source.turn = 1  # it comes from the middle to the top
        sees(page, "tr:first-child td:nth-child(2)", "topology-1")
        sees(page, "tbody tr:nth-child(2)", "topology-6")
        expect(page.get_by_role("link", name="topology-6")).to_be_focused()
        source.turn = 0
        sees(page, "tr:first-child td:nth-child(2)", "topology-2")

        page.get_by_role("searchbox").fill("TOPOLOGY-1")
        expect(page.locator("td a")).to_have_count(11)
        page.get_by_role("searchbox").fill("nothing like it")
        sees(page, "main", "No topology is called so.")
        assert tab.errors == []


@pytest.mark.slow
def test_what_a_figure_means_is_told_to_the_pointer_and_to_keys(browser: Browser) -> None:
    with served(all_of_it()) as port, Watched(browser) as tab:
        page = shown(tab, port, f"/topology?id={quote(HOSTILE)}")
        page.get_by_text("Lag", exact=True).hover()
        sees(page, ".tip", "Records in the source that are not committed yet.")
        page.keyboard.press("Escape")
        expect(page.locator(".tip")).to_be_hidden()
        page.locator("#explain").focus()
        page.keyboard.press("Tab")
        sees(page, ".tip", "Records in the source that are not committed yet.")
        assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
        for key, text in (("ArrowRight", "Source rows committed per second"), ("End", "Grows with every election")):
            page.keyboard.press(key)
            sees(page, ".tip", text)
        page.keyboard.press("Tab")
        expect(page.locator(".tip")).to_be_hidden()
        without = page.locator(".figures > div:not([data-why]), .legend li:not([data-why])")
        expect(without).to_have_count(0)
        assert tab.errors == []


@pytest.mark.slow
def test_phases_differ_without_colour(browser: Browser) -> None:
    """By their lightness: the ratio of two neighbours is at least 1.6."""
    for dark in (False, True):
        with served(Told()) as port, Watched(browser, dark=dark) as tab:
            page = shown(tab, port, "/topology?id=words")
            colours = [
                page.locator(f".swatch.phase-{phase}").evaluate("each => getComputedStyle(each).backgroundColor")
                for phase in ("processing", "waiting", "commit")
            ]
            light = [luminance(each) for each in colours]
            for one, other in pairwise([*light, light[0]]):
                assert max(one, other) / min(one, other) > 1.6, (dark, colours, light)


def luminance(colour: str) -> float:
    """As of WCAG 2, with the 0.05 of its contrast. ``colour``: ``rgb(1, 2, 3)``."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05


@pytest.mark.slow
def test_what_somebody_has_opened_stays_open_while_figures_come(browser: Browser) -> None:
    source = large()
    with served(source) as port, Watched(browser) as tab:
        page = shown(tab, port, "/topology?id=words")
        page.get_by_text("The 20 that lag most").click()
        row = page.locator("tr", has_text="words-999")
        expect(row).to_be_visible()
        partitions = source.parts["partitions"]
        source.parts["partitions"] = {**partitions, "worst": [["words-999", 777_777, 1, 2, 0]]}
        sees(page, "tr:has-text('words-999')", "777,777")
        expect(row).to_be_visible()
        sees(page, "summary", "The 1 that lag most, of 1,000")


@pytest.mark.slow
def test_a_page_that_was_lost_comes_back_by_itself(browser: Browser) -> None:
    source, port = Told(), 0
    with Watched(browser) as tab:
        with served(source) as port:
            page = shown(tab, port, "/topology?id=words")
            sees(page, "#connection", "live")
        sees(page, "#connection", "not connected")
        sees(page, ".verdict", "Nothing answers")
        source.live["state"] = "stopped"
        with served(source, port=port):
            sees(page, "#connection", "live")
            sees(page, ".title", "stopped")


@pytest.mark.slow
def test_what_is_not_current_says_since_when_and_why(browser: Browser) -> None:
    source = Told()
    with served(source) as port, Watched(browser) as tab:
        page = shown(tab, port, "/topology?id=words")
        source.error = ConnectionError("ZooKeeper does not answer")
        sees(page, "#connection", "not current")
        sees(page, ".verdict", "Not current: ConnectionError: ZooKeeper does not answer.")
        sees(page, "#connection", re.compile(r"not current, \d+ s old"))
        source.error = None
        sees(page, "#connection", "live")
        sees(page, ".verdict", "It runs")
        assert tab.errors == []


@pytest.mark.slow
def test_an_unknown_topology_is_said_to_be_unknown(browser: Browser) -> None:
    with served(Told()) as port, Watched(browser) as tab:
        tab.page.goto(f"http://127.0.0.1:{port}/topology?id=nosuch")
        sees(tab.page, ".verdict", "There is no such topology here.")


@pytest.mark.slow
def test_a_token_is_asked_for_once(browser: Browser) -> None:
    with served(Told(), token="a-token-of-some-length") as port, Watched(browser) as tab:
        page = tab.page
        page.goto(f"http://127.0.0.1:{port}/topology?id=words")
        assert accessible(page) == []
        for token in ("wrong", "a-token-of-some-length"):
            page.get_by_label("The token of this page").fill(token)
            page.get_by_role("button").click()
        sees(page, ".badge", "running")
        page.goto(f"http://127.0.0.1:{port}/topology?id=words")
        sees(page, ".badge", "running")
        assert [each for each in tab.errors if "403" not in each] == []


@pytest.mark.slow
def test_without_scripts_the_page_says_which_command_shows_the_same(browser: Browser) -> None:
    with served(Told()) as port, Watched(browser, script=False) as tab:
        tab.page.goto(f"http://127.0.0.1:{port}/")
        assert "ratchet list and ratchet status ID show the same" in tab.page.inner_text("body")
