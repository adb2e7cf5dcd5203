"""The benchmarks' figures as pictures: ``python -m benchmarks.plots RESULTS FILE``, from JSON lines
as ``python -m benchmarks`` prints them. Beside ``FILE`` come two of W2: its latencies as
histograms, and the time of a transaction by part."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts import PARTS
from framework.observe.history_plot import picture

#: Latencies beyond this are counted, not drawn.
SHOWN_TO_MS = 100
COLOURS = ("#2166ac", "#92c5de", "#d1e5f0", "#f4a582", "#d6604d", "#b2182b", "#bababa", "#878787", "#4d4d4d", "#e0e0e0")
Bars = Sequence[tuple[str, float]]
#: Title, bars, and how their figures are written.
Group = tuple[str, Bars, str]


def draw(results: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Draw what there is of W1, W2, reading, states, and what it costs to be watched. Workloads
    without a picture are left out."""
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


def draw_steady(results: Iterable[Mapping[str, Any]], file: Path) -> bool:
    """Draw the latencies of W2 as histograms, a panel for each variant, and the time of a
    transaction by part beside it where it was measured. Returns whether there was anything."""
    found = [each for each in results if each["workload"] == "W2" and "histogram" in each]
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for each in found:
        panels.setdefault(each.get("variant", "default"), []).append(each)
    if not panels:
        return False
    with picture(file, "W2: a thousand messages a second", len(panels), width=8, height=2.4) as drawn:
        for panel, (variant, runs) in zip(drawn, panels.items(), strict=True):
            counts = [
                sum(each) for each in itertools.zip_longest(*(run["histogram"]["counts"] for run in runs), fillvalue=0)
            ]
            bin_ms = runs[0]["histogram"]["bin_ms"]
            shown = counts[: SHOWN_TO_MS // bin_ms]
            beyond = sum(counts[len(shown) :])
            panel.bar([number * bin_ms for number in range(len(shown))], shown, bin_ms, align="edge", color="#2166ac")
            for name, colour in (("p50", "#666666"), ("p95", "#f4a582"), ("p99", "#b2182b")):
                at_ms = _percentile(counts, int(name[1:]) / 100) * bin_ms
                panel.axvline(at_ms, color=colour, linewidth=1.2, label=f"{name} {at_ms} ms")
            said = f", {beyond} beyond {SHOWN_TO_MS} ms" if beyond else ""
            runs_said = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
            panel.set_title(f"{variant}: {sum(counts):,} messages, {runs_said}{said}", fontsize=9, loc="left")
            panel.set_ylabel("messages")
            panel.set_xlim(0, SHOWN_TO_MS)
            panel.legend(loc="upper right", fontsize=8, frameon=False)
        drawn[-1].set_xlabel("ms from a message's sending until the store shows its transaction")
    return True


def draw_parts(results: Iterable[Mapping[str, Any]], file: Path) -> bool:
    """Draw the mean time of a transaction of W2 by part, a bar for each variant. Returns whether
    there was anything."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each in results:
        if "parts_ms" in each:
            found.setdefault(each.get("variant", "default"), []).append(each["parts_ms"])
    if not found:
        return False
    with picture(file, "W2: where the time of a transaction goes", 1, width=8, height=1.2 + 0.5 * len(found)) as (
        panel,
    ):
        left = dict.fromkeys(found, 0.0)
        for number, part in enumerate(part for part in PARTS if part != "gap"):
            means = {name: sum(run[part]["mean"] for run in runs) / len(runs) for name, runs in found.items()}
            label = f"{part} {', '.join(f'{mean:.1f}' for mean in means.values())}"
            colour = COLOURS[number % len(COLOURS)]
            panel.barh(
                list(found), list(means.values()), left=list(left.values()), color=colour, height=0.6, label=label
            )
            left = {name: left[name] + mean for name, mean in means.items()}
        panel.set_xlabel("ms, mean")
        panel.invert_yaxis()
        panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=7)
    return True


def _percentile(counts: Sequence[int], share: float) -> int:
    """The bar in which this share of all is reached."""
    wanted, seen = share * sum(counts), 0
    for number, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return number
    return len(counts)


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
        case "watched":
            bars = [("watched", max(result["records_per_s_watched"])), ("not watched", max(result["records_per_s"]))]
            return "W1 with a viewer and a scrape every second, records/s", bars, "{:,.0f}"
        case "page":
            shares = {name: 100 * share for name, share in result["share_of_a_core"].items()}
            return "A large topology with nothing to do, % of a core", [*shares.items()], "{:.1f}"
    return None


def main() -> int:
    results, file = map(Path, sys.argv[1:])
    draw_all([json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()], file)
    return 0


def draw_all(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the figures into ``file`` and, where W2 was measured, two more beside it."""
    draw(results, file)
    draw_steady(results, file.with_name(f"{file.stem}-latency{file.suffix}"))
    draw_parts(results, file.with_name(f"{file.stem}-parts{file.suffix}"))


if __name__ == "__main__":
    sys.exit(main())
