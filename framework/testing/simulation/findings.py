"""The findings of a simulation, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from framework.testing.simulation.schedule import Schedule

#: The most lines of a schedule that are shown.
_STORY_MAX = 40


class Broken(Enum):
    """A broken promise."""

    ROWS = "rows"
    STATE = "state"
    OUTSIDE = "outside"
    STOPPED = "stopped"


#: Advice for each broken promise.
_ADVICE = {
    Broken.ROWS: (
        "make its rows depend on its input alone: take the time from the record, sort what has no order, keep nothing on the "
        "class or in the module between two batches; where that cannot be, set deterministic = False and use opaque states"
    ),
    Broken.STATE: (
        "let finish_batch() begin with begin_commit(), read by multi_get() or multi_update() of that commit, write only by the "
        "state, and keep nothing else that it counts with"
    ),
    Broken.OUTSIDE: (
        "what leaves the state cannot be taken back: write it so that a second time changes nothing (by a key of txid and record, "
        "refusing lower txids), or write it to a state or a topic of Ratchet, and let something behind that send it"
    ),
    Broken.STOPPED: "let each attempt at a batch begin from nothing: it finds what an earlier one has left behind",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault that breaks exactly-once.

    * ``what``: in a sentence.
    * ``details``: the found values, and the values after one commit of each batch.
    * ``story``: the shortest schedule that shows it, as it happened.
    * ``keeps``: the parts of the component's memory that changed meanwhile."""

    broken: Broken
    component: str
    what: str
    details: tuple[str, ...] = ()
    story: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    schedule: Schedule

    @property
    def seed(self) -> int:
        return self.schedule.seed

    @property
    def advice(self) -> str:
        return _ADVICE[self.broken]

    def lines(self) -> Iterator[str]:
        """Lines for display."""
        yield self.what
        yield from (f"    {each}" for each in self.details)
        if self.keeps:
            yield f"    changed in memory meanwhile: {', '.join(self.keeps)}"
        yield "  the shortest schedule that shows it:"
        numbered = [f"  {number:3}. {each}" for number, each in enumerate(self.story, 1)]
        if len(numbered) > _STORY_MAX:
            half = _STORY_MAX // 2
            numbered[half:-half] = [f"  ... and {len(numbered) - 2 * half:,} lines more ..."]
        yield from numbered
        yield f"  what to do: {self.advice}"
        yield f"  seed {self.seed}"

    def document(self) -> dict[str, Any]:
        return {
            "type": "finding",
            "broken": self.broken.value,
            "component": self.component,
            "what": self.what,
            "details": list(self.details),
            "keeps": list(self.keeps),
            "schedule": list(self.story),
            "records": len(self.schedule.kept),
            "faults": [[each.kind.name.lower(), each.txid, each.pick] for each in self.schedule.faults],
            "advice": self.advice,
            "seed": self.seed,
        }


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a simulation.

    * ``schedules``: how many were run.
    * ``met``: fault -> how often it struck.
    * ``left_out``: component -> why it was not simulated.
    * ``notes``: the parts that were not checked, and why."""

    topology_id: str
    seed: int
    schedules: int = 0
    records: int = 0
    findings: list[Finding] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Lines for display."""
        yield (
            f"topology {self.topology_id!r}: {self.schedules:,} schedules over {self.records:,} records, seed {self.seed}: "
            + (f"{len(self.findings)} found" if self.findings else "nothing found")
        )
        for number, each in enumerate(self.findings, 1):
            first, *rest = each.lines()
            yield ""
            yield f"{number}. {first}"
            yield from rest
        if self.findings and (self.left_out or self.notes):
            yield ""
        yield from (f"not simulated: bolt {component!r}: {why}" for component, why in self.left_out.items())
        yield from (f"note: {each}" for each in self.notes)

    def document(self) -> dict[str, Any]:
        return {
            "type": "simulate",
            "topology": self.topology_id,
            "seed": self.seed,
            "schedules": self.schedules,
            "records": self.records,
            "findings": len(self.findings),
            "met": self.met,
            "left_out": dict(self.left_out),
            "notes": self.notes,
        }
