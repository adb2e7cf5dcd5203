"""The status of a run of a core topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from framework.core.checkpoints import CheckpointStatus
from framework.core.round_protocol import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStatus:
    """A snapshot of a core topology.

    * ``components``: the counters of each since the start, summed over its tasks; ``pending``,
      ``behind`` and ``waiting`` are as of the last round.
    * ``held``: per bolt, the tuples that it has executed and neither acked nor failed.
    * ``trees``: how many trees the ackers track.
    * ``checkpoint``: of the states; None without state.
    * ``edges``: label of an edge -> rows sent over it since the start."""

    phase: str
    rounds: int
    rounds_lost: int
    components: Mapping[str, Counts]
    trees: int
    last_error: str | None
    checkpoint: CheckpointStatus | None = None
    edges: Mapping[str, int] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Pending spout tuples and ticks."""
        return sum(each.pending for each in self.components.values())

    def rows_done(self) -> int:
        """Spout tuples that are fully processed. The rate of progress is computed from this
        count."""
        return sum(each.completed for each in self.components.values())

    def progress_line(self, rate: float) -> str:
        """One line of text for display. ``rate``: tuples fully processed per second, recently."""
        counts = self.components.values()
        parts = [
            self.phase,
            f"executed {sum(each.executed for each in counts):,}",
            f"pending {self.pending:,}",
            f"completed {self.rows_done():,}",
            f"{rate:,.0f} tuples/s",
        ]
        failed = sum(each.failed for each in counts)
        timed_out = sum(each.timed_out for each in counts)
        if failed:
            parts.append(f"{failed:,} failed ({timed_out:,} timed out)")
        if late := sum(each.late for each in counts):
            parts.append(f"{late:,} late")
        if self.checkpoint is not None:
            parts.append(f"checkpoint {self.checkpoint.txid} ({self.checkpoint.guarantee})")
            if self.checkpoint.recoveries:
                parts.append(f"{self.checkpoint.recoveries} recoveries")
        if self.rounds_lost:
            parts.append(f"{self.rounds_lost} rounds lost")
        if self.last_error:
            parts.append(f"last error: {self.last_error}")
        return " | ".join(parts)

    def document(self) -> dict[str, Any]:
        """All fields as JSON-able values."""
        return {**asdict(self), "pending": self.pending, "held": self.held}

    def summary(self) -> dict[str, Any]:
        """As ``document``: a core topology has few components."""
        return self.document()

    @property
    def held(self) -> dict[str, int]:
        return {
            name: each.executed - each.acked - each.failed
            for name, each in self.components.items()
            if each.executed > each.acked + each.failed
        }
