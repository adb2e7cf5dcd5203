"""The driver's side of a commit: headers up, tasks, sweep, ``done``.

Order (C1, C2, C5), for each attempt whose turn it is:

1. raise the header of every state to this attempt, by compare-and-set;
2. run the commit tasks, which write under that header;
3. if the txid had been opened before: sweep the opaque states;
4. set ``done`` in every state. Only then does the transaction close in ZooKeeper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from framework.errors import ConfigError, InvariantViolation, StaleWriterError
from framework.execution.ports import BatchExecutor, PhaseResult
from framework.execution.records import AttemptHeader, TaskFailure
from framework.topology.fencing import FencedState, Header, OpenCommit, ValueType


class CommitPhase:
    """The states of one topology under one leader. Used from one thread at a time."""

    def __init__(self, topology_id: str, states: Sequence[FencedState], executor: BatchExecutor, epoch: int) -> None:
        self._topology_id = topology_id
        self._states = states
        self._executor = executor
        self._epoch = epoch
        self._headers: dict[int, Header] = {}

    def open(self, currtx: int, digests: Mapping[int, str]) -> bool:
        """Prepare every state and hold its header against ZooKeeper's. Returns whether the commit of ``currtx`` was
        opened before: then its plan is binding. Raises ``ConfigError`` saying which of the two is ahead (C2)."""
        opened = not self._states and currtx in digests  # without a header to ask, the plan counts as opened
        for index, state in enumerate(self._states):
            header = state.prepare(self._topology_id)
            self._headers[index] = header
            if header.epoch > self._epoch:
                raise ConfigError(
                    f"{state.location} was written by epoch {header.epoch}, and ZooKeeper is at epoch {self._epoch}: "
                    "ZooKeeper's state is older than the sink; restore it, or give topology and sink new names"
                )
            if header.done not in (currtx - 1, currtx):
                ahead = "ahead of" if header.done > currtx else "behind"
                raise ConfigError(
                    f"{state.location} holds transactions up to {header.done}, and ZooKeeper says that {currtx} is next: "
                    f"the sink is {ahead} the topology {self._topology_id!r}; restore the one that was lost, or give "
                    "topology and sink new names"
                )
            if header.open is None or header.open.txid < currtx:
                continue
            if header.open.txid > currtx or header.open.plan_digest != digests.get(currtx):
                raise ConfigError(
                    f"{state.location} was opened for txid {header.open.txid} with plan {header.open.plan_digest}, and "
                    f"ZooKeeper holds plan {digests.get(currtx)} for txid {currtx}: one of the two was restored from a "
                    "backup; restore the other one too"
                )
            opened = True
        return opened

    def run(self, attempt: AttemptHeader, *, replay: bool) -> PhaseResult:
        """Steps 1 to 4. What goes wrong is in the result; ``StaleWriterError`` is raised for a higher epoch only."""
        try:
            for index in range(len(self._states)):
                self._raise(index, attempt)
            result = self._executor.commit(attempt)
            if result.failure is None:
                for index in range(len(self._states)):
                    self._finish(index, attempt, replay=replay)
        except StaleWriterError as error:
            if error.epoch is not None and error.epoch > self._epoch:
                raise
            return PhaseResult(TaskFailure.of(error, "commit", 0))
        except Exception as error:  # noqa: BLE001 - the driver's boundary: the coordinator decides what follows
            return PhaseResult(TaskFailure.of(error, "commit", 0))
        return result

    def close(self) -> None:
        for state in self._states:
            state.close()

    def _raise(self, index: int, attempt: AttemptHeader) -> None:
        current = self._current(index)
        if current.done > attempt.txid:
            raise InvariantViolation(
                f"{self._states[index].location} is done with {current.done}, {attempt} would follow"
            )
        new = current.opened(self._epoch, OpenCommit(attempt.txid, attempt.attempt_id, attempt.plan_digest))
        self._replace(index, current, new)

    def _finish(self, index: int, attempt: AttemptHeader, *, replay: bool) -> None:
        current = self._current(index)
        state = self._states[index]
        if replay and state.value_type is ValueType.OPAQUE:
            state.sweep(current)
        if current.done != attempt.txid:
            self._replace(index, current, current.finished(attempt.txid))

    def _current(self, index: int) -> Header:
        """The header as last written here, or, when an outcome is unknown, as it is."""
        if index not in self._headers:
            found = self._states[index].read_header()
            if found.epoch > self._epoch:
                raise StaleWriterError(
                    f"{self._states[index].location}: epoch {found.epoch} writes there, this is epoch {self._epoch}",
                    found.epoch,
                )
            self._headers[index] = found
        return self._headers[index]

    def _replace(self, index: int, current: Header, new: Header) -> None:
        del self._headers[index]  # whatever is raised now, the next attempt reads what is there
        self._states[index].raise_header(current, new)
        self._headers[index] = new
