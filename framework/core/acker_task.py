"""The task of one acker: the tuple trees that it tracks, and the decisions that it makes about
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from framework.acking.ack_reports import NO_IDS, Ids, LedgerPart, Roots
from framework.acking.table import TreeTable
from framework.core.component_task import ROTATIONS_PER_TIMEOUT
from framework.core.round_budget import Budget
from framework.core.round_protocol import Addressed, Decisions, Round, RoundRecord


class AckerTask:
    """The task of one acker. It reports each decision in the round in which it decides.

    Invariant: an acker applies each task's report on a round at most once, and in the order of the
    rounds. A report that comes late is dropped, and so is any report on a round before
    ``first_round``, whose trees no acker tracks any more. A dropped report makes its tree time out.
    Applying a report twice could make an incomplete tree look complete."""

    def __init__(self, number: int, first_round: int) -> None:
        self._number = number
        self._before = first_round - 1
        self._heard: dict[tuple[int, int], int] = {}  # task -> its last round that was applied
        # Decided, not yet reported to the spouts.
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
        """Keep the decisions: the spouts have not received them, so the next round reports them."""

    def close(self) -> None:
        """Nothing to release."""

    def _with_shared(self, round_: Round) -> Roots:
        """The trees with an open tuple that is part of several trees. Reported only when trees may
        time out."""
        if not round_.rotates or not self._shared:
            return Roots()
        self._shared = {root: value for root, value in self._shared.items() if self._acker.value(root) is not None}
        return Roots.of(self._shared)

    def _apply(self, parts: Sequence[LedgerPart]) -> set[int]:
        """Apply the reports of tasks. Returns the trees whose timeout restarts."""
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
    """Take everything that was decided, and empty the list."""
    roots = Roots.of(np.concatenate([NO_IDS, *decided]))
    decided.clear()
    return roots
