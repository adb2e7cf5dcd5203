"""The benchmarks' figures as a picture: ``python -m benchmarks.plots RESULTS FILE``, from JSON
lines as ``python -m benchmarks`` prints them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.observe.plots import picture

Bars = Sequence[tuple[str, float]]
#: Title, bars, and how their figures are written.
Group = tuple[str, Bars, str]


def draw(results: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Draw what there is of W1, W2, reading and states. Workloads without a picture are left
    out."""
    found = list(results)
    groups = [group for each in found if (group := _bars(each)) is not None]
    states = [each for each in found if each["workload"] == "state" and each["value_type"] == "opaque"]
    if states:
        bars = [(f"{each['store']}, {each['keys']:,} keys", each["ratio"]) for each in states]
        groups.append(("States, opaque values: ratio to the store's own upsert", bars, "{:.2f}"))
    if not groups:
        return
    with picture(file, "Ratchet's benchmarks", len(groups), width=8, height=2.2) as panels:
        for panel, (title, bars, form) in zip(panels, groups, strict=True):
            names, values = zip(*bars, strict=True)
            drawn = panel.barh(names, [value / max(values) for value in values], color="#2166ac", height=0.6)
            panel.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=8)
            panel.set_title(title, fontsize=9, loc="left")
            panel.grid(visible=False)
            panel.set_xlim(0, 1.2)
            panel.set_xticks([])
            panel.invert_yaxis()


def _bars(result: Mapping[str, Any]) -> Group | None:
    match result["workload"]:
        case "W1":
            bars = [
                ("Ratchet", result["records_per_s"]),
                ("with the Python reader", max(result["python_reader_runs"])),
                ("only reading", result["limit_records_per_s"]),
            ]
            return "W1, records/s", bars, "{:,.0f}"
        case "W2":
            warm = result["after_2s"]
            named = (("p50_ms", "p50"), ("p95_ms", "p95"), ("p99_ms", "p99"))
            bars = [(name, warm[key]) for key, name in named if key in warm]
            return "W2, latency in ms after the first two seconds", bars, "{:,.0f}"
        case "reading":
            bars = [(name, each["records_per_s"]) for name, each in result["codecs"].items()]
            return "Reading alone, records/s by codec", bars, "{:,.0f}"
    return None


def main() -> int:
    results, file = map(Path, sys.argv[1:])
    draw(map(json.loads, results.read_text(encoding="utf-8").splitlines()), file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
