"""Hooks of the site: they list the decisions, from their files, weigh pages in a search, and name
the theme's dialog for those who hear the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_DECISIONS = "internals/decisions.md"
#: Beginnings of pages, and how much their words weigh in a search: beside other pages, long tables
#: would count too little, and decisions and docstrings too much.
_WEIGHTS = {"configuration.md": 8, "adr/": 0.2, "reference/api/": 0.4}
_SEARCH = 'data-md-component="search" role="dialog" aria-label="Search"'


def on_config(config: Any) -> Any:
    """The decisions follow their overview in the navigation."""
    for section in config["nav"]:
        for pages in section.values():
            if isinstance(pages, list):
                for page in pages:
                    if isinstance(page, dict) and isinstance(page.get("Decisions"), list):
                        page["Decisions"] += [{title: f"adr/{path.name}"} for title, path in _decisions(config)]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    weight = next((each for begin, each in _WEIGHTS.items() if page.file.src_uri.startswith(begin)), None)
    if weight is not None:
        page.meta["search"] = {"boost": weight}
    if page.file.src_uri != _DECISIONS:
        return markdown
    return markdown + "\n" + "\n".join(f"* [{title}](../adr/{path.name})" for title, path in _decisions(config)) + "\n"


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    return output.replace('data-md-component="search" role="dialog"', _SEARCH)


def _decisions(config: Any) -> list[tuple[str, Path]]:
    """Number and title of each decision, and its file."""
    paths = sorted((Path(config["docs_dir"]) / "adr").glob("[0-9]*.md"))
    return [(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), path) for path in paths]
