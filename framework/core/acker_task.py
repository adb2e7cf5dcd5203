"""A task of the acker: the trees that it tracks, and what it decides about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from framework.acking.acker import Acker
from framework.acking.ledger import LedgerPart, Roots, fold, spout_task_of
from framework.core.budget import Budget
from framework.core.component_task import ROTATIONS_PER_TIMEOUT
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
        self._completed: list[int] = []
        self._failed: list[int] = []
        self._expired: list[int] = []
        self._acker: Acker[int, int] = Acker(
            on_complete=lambda root, task: self._completed.append(root),
            on_fail=lambda root, task: self._failed.append(root),
            buckets=ROTATIONS_PER_TIMEOUT + 1,
            on_expire=lambda root, task: self._expired.append(root),
        )

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
        if round_.rotates:
            self._acker.expire()
        decisions = Decisions(
            round_.number,
            self._number,
            completed=Roots.of(self._completed),
            failed=Roots.of(self._failed),
            reset=Roots.of(reset),
            expired=Roots.of(self._expired),
            trees=self._acker.trees,
        )
        for each in (self._completed, self._failed, self._expired):
            each.clear()
        return [*passing, (0, decisions)]

    def throw_away(self) -> None:
        """Keep what was decided: the next round tells it, because the spouts have not heard of
        it."""

    def close(self) -> None:
        """Nothing to release."""

    def _apply(self, parts: Sequence[LedgerPart]) -> set[int]:
        """Apply what tasks say, folded: most trees begin and end in one round, and cost one look
        then. Returns the trees whose timeout starts anew."""
        failed = {root for part in parts for root in part.failed.tolist()}
        for root in failed:  # before anything that could complete the tree
            self._acker.fail(root)
        born = np.concatenate([part.born for part in parts])
        roots, values = fold(
            np.concatenate([part.roots for part in parts]), np.concatenate([part.values for part in parts])
        )
        open_ = (values != 0) | ~np.isin(roots, born)
        told = dict(zip(roots[open_].tolist(), values[open_].tolist(), strict=True))
        for root in failed:
            told.pop(root, None)
        for root in born.tolist():
            self._acker.init(root, spout_task_of(root), told.pop(root, 0))
        for root, value in told.items():
            self._acker.ack(root, value)
        reset = {root for part in parts for root in part.reset.tolist()}
        for root in reset:
            self._acker.reset_timeout(root)
        return reset
