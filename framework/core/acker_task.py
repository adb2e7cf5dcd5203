"""A task of the acker: the trees that it tracks, and what it decides about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from framework.acking.acker import Acker
from framework.acking.ledger import LedgerPart, Roots, spout_task_of
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
        reset: set[int] = set()
        for record in records:
            if isinstance(record, LedgerPart):
                if record.round > self._heard.get(record.task, self._before):
                    self._heard[record.task] = record.round
                    reset.update(self._apply(record))
            else:
                passing.append((0, record))
        for _ in range(round_.rotations):
            self._acker.tick()
        decisions = Decisions(
            round_.number,
            self._number,
            completed=Roots.of(self._completed),
            failed=Roots.of(self._failed),
            reset=Roots.of(reset),
            expired=Roots.of(self._expired),
            trees=self._acker.pending,
        )
        for each in (self._completed, self._failed, self._expired):
            each.clear()
        return [*passing, (0, decisions)]

    def throw_away(self) -> None:
        """Keep what was decided: the next round tells it, because the spouts have not heard of
        it."""

    def close(self) -> None:
        """Nothing to release."""

    def _apply(self, part: LedgerPart) -> Iterable[int]:
        """Apply what a task says. Returns the trees whose timeout starts anew."""
        values = dict(zip(part.roots.tolist(), part.values.tolist(), strict=True))
        for root in part.failed.tolist():  # before anything that could complete the tree
            self._acker.fail(root)
            values.pop(root, None)
        for root in part.born.tolist():
            self._acker.init(root, spout_task_of(root), values.pop(root, 0))
        for root, value in values.items():
            self._acker.ack(root, value)
        for root in part.reset.tolist():
            self._acker.reset_timeout(root)
        return part.reset.tolist()  # type: ignore[no-any-return]
