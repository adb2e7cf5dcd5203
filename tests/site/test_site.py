"""The documentation as a site: it is built without a warning, its links lead somewhere, and no page
asks another host for anything.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]  # it is built once


class Page(HTMLParser):
    """``links``: what it leads to. ``loads``: what a browser loads for it. ``anchors``: places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[each] for each in ("id", "name") if named.get(each)}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif tag == "link" and "href" in named and named.get("rel") not in ("canonical", "edit"):
            self.loads.append(named["href"])
        elif "src" in named:
            self.loads.append(named["src"])


@pytest.fixture(scope="module")
def site(built_site: Path) -> dict[Path, Page]:
    """Path of a built page -> the page."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in built_site.rglob("*.html")}


def test_every_page_of_the_navigation_is_built(site: dict[Path, Page]) -> None:
    names = {path.name for path in site}
    assert {"joins.html", "errors.html", "recover.html", "protocol.html"} <= names
    assert len(site) > 100


def test_every_link_within_the_site_leads_to_a_page_and_a_place(site: dict[Path, Page]) -> None:
    looked_at, wrong = 0, []
    for path, page in site.items():
        if path.name == "404.html":
            continue  # it may be shown for any address
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            looked_at += 1
            if not target.exists():
                wrong.append(f"{path.name}: {link}")
            elif parts.fragment and target in site and unquote(parts.fragment) not in site[target].anchors:
                wrong.append(f"{path.name}: {link}, a place that is not there")
    assert not wrong
    assert looked_at > 2_000


def test_no_page_loads_anything_from_another_host(site: dict[Path, Page]) -> None:
    foreign = {each for page in site.values() for each in page.loads if urlsplit(each).netloc}
    assert not foreign
