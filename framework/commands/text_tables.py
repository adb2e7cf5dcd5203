"""Text in columns, and times in readable form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence


def in_columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Format rows as aligned columns. ``right``: columns to align to the right, by position.

    >>> list(in_columns([("topic", "lag"), ("words", "7")], right=[1]))
    ['topic  lag', 'words    7']
    """
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def ago(at: float | None) -> str:
    """The time since a moment, given in seconds since the epoch.

    >>> ago(time.time() - 90), ago(None)
    ('90 s ago', '-')
    """
    if at is None:
        return "-"
    past_s = max(time.time() - at, 0)
    for limit, unit, name in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if past_s < limit:
            return f"{past_s / unit:.0f} {name} ago"
    return f"{past_s / 86_400:.0f} days ago"


def number(value: object) -> str:
    """A count, or a dash if it is unknown. A damaged document's value that is no number is shown
    unchanged."""
    return "-" if value is None else f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def local_time(at: float) -> str:
    """A moment in local time, to the second; as a number if no calendar has it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return str(at)
