"""Writes ``docs/configuration.md`` from the configuration itself: ``python -m
tests.kit.reference``."""

from __future__ import annotations

from pathlib import Path

from framework.commands.reference import config_keys

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


def page() -> str:
    """The page as it must be."""
    lines = [
        "# Configuration keys",
        "",
        "In a TOML file (`--config`), nested tables become dotted keys; `--set KEY=VALUE` wins over the",
        "file. `${NAME}` stands for an environment variable. `ratchet config` prints the same reference,",
        "and this page is made from it by `python -m tests.kit.reference`.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for each in config_keys():
        lines.append(f"| `{each['key']}` | {each['kind']} | {each['default']} | {each['text']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
