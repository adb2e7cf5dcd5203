"""Writes ``docs/configuration.md`` from the configuration itself, and ``docs/metrics.md`` from the
metrics: ``python -m tests.kit.reference``."""

from __future__ import annotations

from pathlib import Path

from framework.commands.settings_reference import config_keys
from framework.observe.metrics import METRICS, PARTITIONS_MAX

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "configuration.md"
METRICS_PAGE = DOCS / "metrics.md"


def page() -> str:
    """The page as it must be."""
    lines = [
        "# Configuration keys",
        "",
        "In a TOML file (`--config`), nested tables become dotted keys; `--set KEY=VALUE` overrides the",
        "file. `${NAME}` stands for an environment variable. `ratchet config` prints the same reference,",
        "and this page is made from it by `python -m tests.kit.reference`.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for each in config_keys():
        lines.append(f"| `{each['key']}` | {each['kind']} | {each['default']} | {each['text']} |")
    return "\n".join(lines) + "\n"


_TITLES = {
    "both": "Of every topology",
    "transactional": "Of transactional topologies",
    "core": "Of core topologies",
}


def metrics_page() -> str:
    """The page of the metrics as it must be."""
    lines = [
        "# Metrics",
        "",
        "With `metrics.prometheus.port` set, the driver serves these at `/metrics`. [Watching it](watching.md)",
        "says what exactly is measured, and has alerts and a board. `ratchet metrics` prints the same",
        "reference, and this page is made from it by `python -m tests.kit.reference`.",
        "",
        "In queries a counter has the suffix `_total`, a histogram `_bucket`, `_count` and `_sum`, a summary",
        "`_count` and `_sum`. Counters are of one process: they begin at 0 when it starts. Of more than",
        f"{PARTITIONS_MAX:,} partitions, only those with the greatest lag have figures of their own.",
    ]
    for kind, title in _TITLES.items():
        lines += ["", f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for each in METRICS.values():
            if each.topologies == kind:
                lines.append(f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    METRICS_PAGE.write_text(metrics_page(), encoding="utf-8")
