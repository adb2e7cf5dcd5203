"""The reports of a term: the journal of its attempts, the status of the run, and the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.execution.failures import TaskFailure
from framework.execution.ports import PhaseResult
from framework.observe.journal import AttemptRecord
from framework.observe.logs import get_logger
from framework.observe.wait_log import Waits
from framework.transactions.coordinator import Cancel
from framework.transactions.driver_context import DriverContext
from framework.transactions.narrowing import Refused

_log = get_logger()
#: The number of further records whose places the log names, when several are refused together.
REFUSED_SHOWN = 9


class TermReport:
    """Reports the progress of each attempt to all observers. The protocol does not depend on it.
    Used from the driver's thread, except for reports about fences."""

    def __init__(self, context: DriverContext) -> None:
        self._topology_id = context.topology.id
        self._journal = context.journal
        self._traces = context.traces
        self._history = context.history
        self.update = context.update
        self._waits = Waits(topology=self._topology_id)
        self._fences = Waits(topology=self._topology_id)

    def leads(self, epoch: int, currtx: int) -> None:
        self._journal.leads()
        self.update(phase="running", epoch=epoch, committed_txid=currtx - 1, in_flight={})
        _log.info("driver.leads", topology=self._topology_id, epoch=epoch, next_txid=currtx)

    def small_files(self, location: str) -> None:
        _log.warning(
            "commit.interval_not_set",
            topology=self._topology_id,
            state=location,
            reason="each transaction leaves files of its own; set topology.commit.interval, such as '5 min', for fewer and larger "
            "ones",
        )

    def finished(self, txid: int) -> None:
        """The source is bounded, and all its records are committed."""
        _log.info("topology.finished", topology=self._topology_id, txid=txid)

    def closed(self, txid: int) -> None:
        """The transaction is closed in the store."""
        attempt = self._journal.committed(txid)
        if self._traces is not None:
            self._traces.closed(txid, attempt)
        if attempt is not None:
            self._log_committed(txid, attempt)
        self._waits.over()
        self.update(committed_txid=txid, repeating=None)
        if self._history is not None:
            self._history.closed()

    def cancelled(self, command: Cancel) -> None:
        if self._journal.cancelled(command.txid, command.attempt_id, command.reason):
            self._trace_ended(command.txid, command.attempt_id)
            _log.info(
                "batch.cancelled",
                topology=self._topology_id,
                txid=command.txid,
                attempt=command.attempt_id,
                reason=command.reason,
            )

    def refused(self, records: Sequence[Refused]) -> None:
        """The values of records were refused: the next attempt leaves them out. One line, with the
        first one, the number of all, and where some of the others are."""
        (partition, offset, reason), *others = records
        also = {"records": len(records), "also": [f"{each}@{at}" for each, at, _ in others[:REFUSED_SHOWN]]}
        _log.warning(
            "record.refused",
            topology=self._topology_id,
            partition=partition,
            offset=offset,
            reason=reason,
            **(also if others else {}),
        )

    def attempt_failed(self, failure: TaskFailure, txid: int, attempt_id: int) -> None:
        """A failure that repeats is logged once, with its trace."""
        where = f"at {failure.where}\n" if failure.where else ""
        self._journal.failed(
            txid,
            attempt_id,
            str(failure),
            kind=failure.kind.value,
            component=failure.component_id,
            trace=f"{where}{failure.trace}".rstrip(),
        )
        self._trace_ended(txid, attempt_id)
        self.update(last_error=str(failure), repeating=str(failure))
        self._waits.again(
            "batch.failed",
            str(failure),
            txid=txid,
            attempt=attempt_id,
            kind=failure.kind.value,
            **({"at": failure.where} if failure.where else {}),
            **({"exception": failure.trace.rstrip()} if failure.trace else {}),
        )

    def processed(self, txid: int, attempt_id: int, result: PhaseResult) -> None:
        read = result.read
        self._journal.processed(
            txid,
            attempt_id,
            rows_received(result),
            result.spent_s,
            _documents(result),
            source_rows=read.records,
            source_bytes=read.bytes,
            bad_records=read.bad_records,
            oldest_ms=read.oldest_ms,
            newest_ms=read.newest_ms,
        )

    def committed(self, txid: int, attempt_id: int, result: PhaseResult) -> None:
        """The sinks hold the attempt; the transaction is not closed yet."""
        rows, lookups = rows_received(result), _documents(result)
        self._journal.commit_phase_done(
            txid,
            attempt_id,
            rows,
            result.spent_s,
            late_records=result.late,
            left_out_rows=result.left_out,
            lookups=lookups,
        )

    def rolled_back(self, txid: int, attempt_id: int) -> None:
        self._journal.rolled_back(txid, attempt_id)
        self._trace_ended(txid, attempt_id)
        _log.warning("batch.rolled_back", topology=self._topology_id, txid=txid, attempt=attempt_id)

    def topology_failed(self, failure: TaskFailure) -> None:
        _log.warning(
            "topology.failed",
            topology=self._topology_id,
            kind=failure.kind.value,
            component=failure.component_id,
            task=failure.task,
            reason=failure.message,
        )

    def phases_abandoned(self, names: list[str]) -> None:
        _log.warning("phase.abandoned", topology=self._topology_id, threads=names)

    def fence_left(self, attempt: str, error: BaseException, *, stale: bool) -> None:
        """A fence was not closed: another leader has closed it, or the next attempt will. Every
        attempt at an unreachable sink leaves one, so a repeated cause is logged once."""
        if stale:
            _log.info("fence.stale", topology=self._topology_id, attempt=attempt, reason=str(error))
        else:
            self._fences.again("fence.open", str(error), attempt=attempt)

    def fence_closed(self) -> None:
        self._fences.over()

    def _trace_ended(self, txid: int, attempt_id: int) -> None:
        """End the trace of an attempt that has ended without a close."""
        record = self._journal.record(txid) if self._traces is not None else None
        if self._traces is not None and record is not None:
            ended = [each for each in record.attempts if each.attempt_id == attempt_id]
            self._traces.ended(txid, ended[0] if ended else None)

    def _log_committed(self, txid: int, attempt: AttemptRecord) -> None:
        """Write the one log line of an attempt that succeeded."""
        _log.debug(
            "batch.committed",
            topology=self._topology_id,
            txid=txid,
            attempt=attempt.attempt_id,
            epoch=attempt.epoch,
            rows=attempt.source_rows,
            bad_records=attempt.bad_records,
            processing_ms=attempt.processing_ms,
            waiting_ms=attempt.waiting_ms,
            commit_ms=attempt.commit_ms,
        )


def _documents(result: PhaseResult) -> Mapping[str, Mapping[str, float]]:
    """The lookups of a phase, JSON-able."""
    return {name: counts._asdict() for name, counts in result.lookups.items()}


def rows_received(result: PhaseResult) -> Mapping[str, Any]:
    """Rows received per edge."""
    return {label: received for label, (_, received) in result.rows.items()}
