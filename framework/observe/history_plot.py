"""Plots as SVG files. matplotlib draws them; it is in the extra ``plot``, and is imported only
here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import ConfigError
from framework.local_paths import local_path, new_file
from framework.observe.journal import TransactionRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The layers of the time line and their colours, which differ in brightness too.
_LAYERS = {
    "attempts that failed": "#b2182b",
    "processing": "#2166ac",
    "waiting": "#d9d9d9",
    "commit": "#f4a582",
}


@contextmanager
def picture(
    file: Path, title: str, panels: int = 1, *, width: float = 9.0, height: float = 3.0
) -> Iterator[list[Axes]]:
    """Draw a picture of ``panels`` below each other, which share their horizontal axis, and write
    it when the block ends. ``width``, and ``height`` of a panel: inches. The same data gives the
    same file, and a file is replaced as a whole. Raises ``ConfigError`` when matplotlib is missing
    or the file cannot be written."""
    local_path(file, "plot")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'ratchet-pipelines[plot]'") from error
    with rc_context({"svg.hashsalt": "ratchet", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(width, height * panels), layout="constrained")
        grid = figure.subplots(panels, 1, sharex=True, squeeze=False)
        figure.suptitle(title, fontsize=11, parse_math=False)
        axes: list[Axes] = list(grid[:, 0])
        yield axes
        try:
            with new_file(file) as made:
                figure.savefig(made, format="svg", metadata={"Date": None})
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or error}; give another file") from error


def plot_history(records: Sequence[TransactionRecord], file: Path, topology_id: str) -> int:
    """Plot the time of each transaction by phase, and its number of records. ``records``: oldest
    first, at least one. Returns how many of them did not succeed at the first attempt. Raises as
    ``picture``."""
    txids = [each.txid for each in records]
    layers = [_seconds(each) for each in records]
    failed = [(each.txid, sum(times)) for each, times in zip(records, layers, strict=True) if each.attempts_total > 1]
    title = f"{topology_id}: transactions {txids[0]:,} to {txids[-1]:,}"
    with picture(file, title, 2) as (times_panel, rows_panel):
        bottom = [0.0] * len(records)
        for number, (label, colour) in enumerate(_LAYERS.items()):
            top = [below + times[number] for below, times in zip(bottom, layers, strict=True)]
            times_panel.fill_between(
                txids, bottom, top, step="mid", label=label, color=colour, linewidth=0.6 if len(records) > 1 else 8
            )
            bottom = top
        if failed:
            label = f"not at the first attempt: {len(failed):,}"
            times_panel.plot(*zip(*failed, strict=True), "kx", markersize=5, label=label)
        times_panel.set_ylabel("seconds")
        times_panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=8)
        rows = [each.attempts[-1].source_rows if each.attempts else 0 for each in records]
        rows_panel.step(txids, rows, where="mid", color=_LAYERS["processing"], linewidth=1)
        rows_panel.set_ylabel("records")
        rows_panel.set_xlabel("transaction")
        for panel in (times_panel, rows_panel):
            panel.set_ylim(bottom=0)
    return len(failed)


def _seconds(record: TransactionRecord) -> tuple[float, ...]:
    """The time of each layer."""
    if not record.attempts:
        return (0.0,) * len(_LAYERS)
    last = record.attempts[-1]
    phases_ms = (last.processing_ms, last.waiting_ms, last.commit_ms)
    before_s = max(last.started_at - record.attempts[0].started_at, 0.0)
    return (before_s, *((each or 0.0) / 1000 for each in phases_ms))
