"""A task of the acker: the trees that it tracks, and what it decides about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from framework.acking.ledger import NO_IDS, Ids, LedgerPart, Roots
from framework.acking.table import TreeTable
from framework.core.component_task import ROTATIONS_PER_TIMEOUT
from framework.core.flow_control import Budget
from framework.core.rounds import Addressed, Decisions, Round, RoundRecord


class AckerTask:
    """The task of one acker. It reports each decision in the round in which it decides.

    Invariant: what a task says of a round is applied once, and after that nothing that the task
    said of an earlier round. A tree that misses something for that reason times out; if something
    were applied twice, an incomplete tree could pass for complete. What is said of rounds before
    ``first_round`` is not applied either: nobody tracks those trees any more."""

    def __init__(self, number: int, first_round: int) -> None:
        self._number = number
        self._before = first_round - 1
        self._heard: dict[tuple[int, int], int] = {}  # task -> its last round that was applied
        # What was decided, and not told yet.
        self._completed: list[Ids] = []
        self._failed: list[Ids] = []
        self._expired: list[Ids] = []
        self._acker = TreeTable(ROTATIONS_PER_TIMEOUT + 1)
        self._shared: dict[int, int] = {}  # root -> the XOR of its open edges that are part of several trees

    def begin(self, round_: Round) -> None:
        """Nothing to do before the round."""

    def run(self, round_: Round, records: Sequence[RoundRecord], budget: Budget) -> Sequence[Addressed]:
        passing: list[Addressed] = []
        parts: list[LedgerPart] = []
        for record in records:
            if not isinstance(record, LedgerPart):
                passing.append((0, record))
            elif record.round > self._heard.get(record.task, self._before):
                self._heard[record.task] = record.round
                parts.append(record)
        if round_.rotates:
            self._acker.age()
        reset = self._apply(parts) if parts else set()
        shared = self._with_shared(round_)
        if round_.rotates:
            self._expired.append(self._acker.expire())
        decisions = Decisions(
            round_.number,
            self._number,
            completed=_told(self._completed),
            failed=_told(self._failed),
            reset=Roots.of(reset),
            expired=_told(self._expired),
            trees=self._acker.trees,
            shared=shared,
        )
        return [*passing, (0, decisions)]

    def throw_away(self) -> None:
        """Keep what was decided: the next round tells it, because the spouts have not heard of
        it."""

    def close(self) -> None:
        """Nothing to release."""

    def _with_shared(self, round_: Round) -> Roots:
        """The trees with an open tuple that is part of several trees; asked when trees may time
        out."""
        if not round_.rotates or not self._shared:
            return Roots()
        self._shared = {root: value for root, value in self._shared.items() if self._acker.value(root) is not None}
        return Roots.of(self._shared)

    def _apply(self, parts: Sequence[LedgerPart]) -> set[int]:
        """Apply what tasks say. Returns the trees whose timeout starts anew."""
        decided = self._acker.apply(
            born=np.concatenate([part.born for part in parts]),
            roots=np.concatenate([part.roots for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            failed=np.concatenate([part.failed for part in parts]),
        )
        for part in parts:
            for root, value in zip(part.shared_roots.tolist(), part.shared_values.tolist(), strict=True):
                if left := self._shared.pop(root, 0) ^ value:
                    self._shared[root] = left
        self._completed.append(decided.completed)
        self._failed.append(decided.failed)
        reset = np.concatenate([part.reset for part in parts])
        self._acker.reset(reset)
        return set(reset.tolist())


def _told(decided: list[Ids]) -> Roots:
    """All of what was decided, which is told now."""
    roots = Roots.of(np.concatenate([NO_IDS, *decided]))
    decided.clear()
    return roots
