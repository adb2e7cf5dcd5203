"""Recomputes what the sinks should hold, and names every key that differs.

The topology may run meanwhile: rows are compared as of one transaction, by their previous values;
rows that have moved on further are compared as of a later one. If the source has removed input, the
answer is *unverifiable*, never right. ``recompute`` says what is read, and how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.errors import ConfigError
from framework.inspect.comparison import compare, hold
from framework.inspect.full_recomputation import Recomputation
from framework.inspect.sandbox import recounting, shadow_of
from framework.local_paths import held_temporary_folder
from framework.topology import Difference, FencedState, InspectableState, Topology
from framework.topology.inspectable import inspectable
from framework.transactions import CoordinationStore
from framework.transactions.documents import committed_or_refused, read_joined
from framework.transactions.history_archive import HistoryTarget

#: How many differences of one state are shown. All are counted.
DIFFERENCES_SHOWN = 100


@dataclass(slots=True)
class StateReport:
    """One state: how many keys (rows, for a table of files) were compared, and what differs."""

    location: str
    compared: int = 0
    difference_count: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference) -> None:
        self.difference_count += 1
        if len(self.differences) < DIFFERENCES_SHOWN:
            self.differences.append(difference)


@dataclass(slots=True)
class VerifyReport:
    """``txid``: the last transaction that was recomputed. ``recorded_batches``: whether all batches
    were the recorded ones. ``not_verified``: components that were left out, and why."""

    topology_id: str
    txid: int
    recorded_batches: bool
    states: list[StateReport]
    not_verified: list[str]

    @property
    def right(self) -> bool:
        return not any(each.difference_count for each in self.states)

    def lines(self) -> list[str]:
        """Lines for a person."""
        batches = "its recorded batches" if self.recorded_batches else "batches over the recorded offsets"
        shown = [f"topology {self.topology_id!r}, recomputed to transaction {self.txid} in {batches}"]
        for each in self.states:
            verdict = f"{each.difference_count} differ" if each.difference_count else "all agree"
            shown.append(f"{each.location}: {each.compared} compared, {verdict}")
            shown += [f"  {difference}" for difference in each.differences]
            if each.difference_count > len(each.differences):
                shown.append(f"  and {each.difference_count - len(each.differences)} more")
        return [*shown, *(f"not verified: {each}" for each in self.not_verified)]


def verify(
    topology: Topology,
    store: CoordinationStore,
    conf: Mapping[str, Any] | None = None,
    *,
    archive: HistoryTarget | None = None,
) -> VerifyReport:
    """Recompute and compare. ``archive``: the table of records, where the topology has one. Raises
    ``Unverifiable``; ``RetryableError`` when source, store or a sink does not answer, or when the
    topology moves on too fast; ``ConfigError`` for a state that cannot be compared, or when nothing
    is committed yet."""
    with held_temporary_folder("ratchet-verify-") as folder:
        return _Audit(topology, store, conf or {}, folder, archive).run()


class _Audit:
    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        conf: Mapping[str, Any],
        folder: Path,
        archive: HistoryTarget | None,
    ) -> None:
        self._topology, self._store = topology, store
        self._shadow, left_out = shadow_of(
            topology, folder, recounting, joined=read_joined(store, topology.id), strict=False
        )
        self._not_verified = [str(each) for each in left_out]
        if not self._shadow.states:
            raise ConfigError(
                f"topology {topology.id!r} has no state that could be compared: {'; '.join(self._not_verified)}"
            )
        self._copy = Recomputation(topology, store, conf, shadow=self._shadow, archive=archive)

    def run(self) -> VerifyReport:
        committed = committed_or_refused(self._store, self._topology.id)
        with self._copy as copy:
            copy.advance(committed)
            compared = compare_following(copy, list(zip(self._watched, self._shadow.states, strict=True)))
        reports = [each for each in map(self._undoubted, self._watched, compared) if each is not None]
        return VerifyReport(self._topology.id, copy.txid, copy.is_recorded, reports, self._not_verified)

    def _undoubted(self, state: InspectableState, report: StateReport) -> StateReport | None:
        """The report; None where its differences show nothing about the topology."""
        why = state.doubts(report.differences) if report.difference_count else ""
        if not why:
            return report
        self._not_verified.append(
            f"{report.location}: {report.difference_count} of {report.compared} differ, and {why}"
        )
        return None

    @property
    def _watched(self) -> list[InspectableState]:
        """The states that are compared, in the order of their shadows."""
        states = [state for each in self._shadow.components for state in self._topology[each.id].states]
        return [inspectable(state, purpose="be compared") for state in states]


def compare_following(copy: Recomputation, pairs: Sequence[tuple[InspectableState, FencedState]]) -> list[StateReport]:
    """Compare states with their copies. Rows that a running topology changes meanwhile are read
    again as they are then, recomputed up to there, and compared. Raises as ``Recomputation``."""
    reports = [StateReport(state.location) for state, _ in pairs]
    moved: list[tuple[int, list[Any]]] = []
    for number, (state, shadow) in enumerate(pairs):
        later: list[Any] = []
        reports[number].compared += compare(state, shadow, copy.txid, reports[number].add, later.append)
        if later:
            moved.append((number, later))
    held = sorted(
        ((number, *hold(pairs[number][0], keys)) for number, keys in moved), key=lambda each: (each[1], each[0])
    )
    for number, txid, values in held:
        copy.await_commit(txid)
        copy.advance(txid)
        state, shadow = pairs[number]
        reports[number].compared += state.compare(values, shadow, reports[number].add)
    return reports
