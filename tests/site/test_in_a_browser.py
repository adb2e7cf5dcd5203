"""The site in Debian's Chromium, from a disk and without a network: what people see, on which
screens, and what they find.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import PATIENT_MS, Watched, chromium, too_wide, violations

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

#: A page of each kind: the first one, code, wide tables, pictures, errors, the API.
KINDS = (
    "index.html",
    "tutorial.html",
    "configuration.html",
    "benchmarks.html",
    "concepts/index.html",
    "reference/errors.html",
    "reference/api/spouts.html",
    "faults.html",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def shown(tab: Watched, path: Path) -> Page:
    tab.page.goto(path.as_uri())
    expect(tab.page.locator("article h1").first).to_be_visible(timeout=PATIENT_MS)
    return tab.page


@pytest.mark.parametrize("phone", [True, False], ids=["phone", "desk"])
def test_no_page_is_wider_than_the_screen_or_asks_for_anything_that_is_not_there(
    browser: Browser, built_site: Path, phone: bool
) -> None:
    wide = []
    with Watched(browser, phone=phone) as tab:
        for path in sorted(built_site.rglob("*.html")):
            if path.name == "404.html":
                continue  # its links begin at the root of a server
            page = shown(tab, path)
            if (pixels := too_wide(page)) > 0:
                wide.append((str(path.relative_to(built_site)), pixels))
        assert not tab.errors
        assert tab.requested
        assert not [each for each in tab.requested if not each.startswith(("file:", "data:", "blob:"))]
    assert not wide


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", KINDS)
def test_everybody_can_read_it(browser: Browser, built_site: Path, name: str, dark: bool) -> None:
    """Axe finds nothing serious: contrast, names of links and buttons, order of headings."""
    with Watched(browser, dark=dark) as tab:
        page = shown(tab, built_site / name)
        serious = [
            (each["id"], node["target"], node["failureSummary"])
            for each in violations(page)
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]
        assert not serious


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [
        ("StaleWriterError", "errors"),
        ("max.spout.pending", "configuration"),
        ("exactly once sink", "sinks"),
    ],
)
def test_what_is_searched_is_found_and_opens(browser: Browser, built_site: Path, words: str, leads_to: str) -> None:
    with Watched(browser) as tab:
        page = shown(tab, built_site / "index.html")
        page.get_by_role("textbox", name="Search").click()
        page.keyboard.type(words)
        found = page.locator(".md-search-result__link")
        expect(found.first).to_be_visible(timeout=PATIENT_MS)
        links = [each.get_attribute("href") or "" for each in found.all()]
        assert any(leads_to in link for link in links), links
        found.first.click()
        expect(page.locator("article h1").first).to_be_visible(timeout=PATIENT_MS)
        assert page.url != (built_site / "index.html").as_uri()
        assert not tab.errors
