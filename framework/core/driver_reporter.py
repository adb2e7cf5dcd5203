"""The status, counters and log lines that the driver of a core topology publishes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from framework.core.checkpoints import CheckpointStatus
from framework.core.plan import CorePlan
from framework.core.round_protocol import ComponentError, Counts, ErrorKind, RoundRecord, RoundReport
from framework.core.status import CoreStatus
from framework.core.totals import Totals
from framework.observe.logs import get_logger
from framework.observe.rate import RecentRate
from framework.observe.run_statistics import CoreFigures, CoreFiguresBuilder

_log = get_logger()

#: The most errors in user code that are kept for the status page.
ERRORS_KEPT = 50
#: The pause between two log lines about late tuples of one bolt.
_LATE_SHOWN_S = 60.0


class CoreReporter:
    """Written by the driver's thread, read from any thread. ``changed``: notified whenever the
    status may have changed."""

    def __init__(self, plan: CorePlan, clock: Callable[[], float]) -> None:
        self._plan, self._clock = plan.plan, clock
        self.changed = threading.Condition()
        self._figures = CoreFiguresBuilder()
        self._completed_rate = RecentRate()
        self._late: defaultdict[str, int] = defaultdict(int)  # late tuples that are not logged yet
        self._late_shown: dict[str, float] = {}
        self._status = CoreStatus(
            phase="starting",
            rounds=0,
            rounds_lost=0,
            components={each: Counts() for each in self._plan.components},
            trees=0,
            last_error=None,
        )
        #: The last errors in user code, with the moment of each in seconds since the epoch.
        self.recent_errors: deque[tuple[float, ComponentError]] = deque(maxlen=ERRORS_KEPT)

    # --- from any thread --------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self._status.phase

    def status(self) -> CoreStatus:
        with self.changed:
            return self._status

    def figures(self) -> CoreFigures:
        with self.changed:
            return self._figures.seen()

    def tuples_per_second(self) -> float:
        with self.changed:
            return self._completed_rate.per_second()

    # --- from the driver's ------------------------------------------------------------------------

    def leads(self) -> None:
        with self.changed:
            self._figures.leads()

    def preparing(self, txid: int, now: float) -> None:
        with self.changed:
            self._figures.preparing(txid, now)

    def completed(self, tuples: int) -> None:
        with self.changed:
            self._completed_rate.add(tuples)

    def errors(self, errors: Sequence[ComponentError]) -> None:
        for error in errors:
            say = _log.warning if error.kind in (ErrorKind.REPORTED, ErrorKind.AWAY) else _log.error
            say("component.error", component=error.component_id, task=error.task, error=error.message)
            with self.changed:
                self._figures.failed(error.component_id, error.kind.value)
            self.recent_errors.append((time.time(), error))

    def late(self, records: Sequence[RoundRecord]) -> None:
        """Log which bolts have dropped late tuples, at most once a minute per bolt."""
        for each in records:
            for (component_id, _), counts in each.counts.items() if isinstance(each, RoundReport) else ():
                if counts.late:
                    self._late[component_id] += counts.late
        now = self._clock()
        for component_id, late in list(self._late.items()):
            if now - self._late_shown.get(component_id, -_LATE_SHOWN_S) >= _LATE_SHOWN_S:
                self._late_shown[component_id] = now
                del self._late[component_id]
                _log.warning(
                    "tuples.late",
                    topology=self._plan.topology_id,
                    component=component_id,
                    tuples=late,
                    reason="too late for their windows, or too far ahead of the clock: they are on the stream late where the "
                    "bolt has late=, and left out otherwise",
                )

    def show(
        self,
        totals: Totals,
        checkpoint: CheckpointStatus | None,
        *,
        phase: str | None = None,
        rounds: int = 0,
        rounds_lost: int = 0,
        last_error: str | None = None,
    ) -> None:
        """Publish the status. ``rounds`` and ``rounds_lost``: how many to add."""
        components = totals.by_component()
        with self.changed:
            known = self._status
            if checkpoint is not None:
                self._figures.checkpoint(checkpoint.txid, self._clock(), checkpoint.recoveries)
            self._status = replace(
                known,
                phase=phase or known.phase,
                rounds=known.rounds + rounds,
                rounds_lost=known.rounds_lost + rounds_lost,
                components=components,
                edges=dict(totals.sent),
                trees=totals.trees,
                last_error=last_error or known.last_error,
                checkpoint=checkpoint,
            )
            self.changed.notify_all()
