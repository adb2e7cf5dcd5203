"""Leader election for a topology: between drivers, which lead as long as they can, and commands
that need the topology stopped."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from framework.coordination.step_generators import Steps
from framework.coordination.store import CoordinationStore, Leadership
from framework.errors import ConfigError, LeadershipLostError, RetryableError, StaleWriterError
from framework.observe.logs import get_logger
from framework.observe.wait_log import Waits

_log = get_logger()

#: How long a command waits for the leadership. Must be longer than the session of a leader that has
#: just died. Overridden by ``transactional.zookeeper.election.timeout.secs``.
ELECTION_TIMEOUT_S = 15.0
#: How long a candidate waits in one call. Between calls it checks for a stop request.
_TURN_S = 0.5
#: How often a standby driver checks whether another one leads.
_POLL_S = 0.1
#: How long a candidate waits before it stands again. The wait doubles each time that its leadership
#: ended in a ``RetryableError`` without progress.
_PAUSE_S = 0.2
_PAUSE_MAX_S = 2.0


class Candidate:
    """Stands for election, leads, and stands again when it no longer leads.

    * ``lead``: returns the steps of one leadership; their result says whether the topology has
      ended.
    * ``stand_by``: called while this driver does not lead, with the error that ended its
      leadership, or None.
    * ``progress``: a number that rises when the topology makes progress.
    * ``standby``: wait until another driver has led first.
    """

    def __init__(
        self,
        store: CoordinationStore,
        topology_id: str,
        stop_requested: threading.Event,
        *,
        lead: Callable[[Leadership], Steps[bool]],
        stand_by: Callable[[Exception | None], None],
        progress: Callable[[], int] = lambda: 0,
        standby: bool = False,
    ) -> None:
        self._store = store
        self._topology_id = topology_id
        self._stop_requested = stop_requested
        self._lead = lead
        self._stand_by = stand_by
        self._progress = progress
        self._lets_another_lead = standby
        self._waits = Waits(topology=topology_id)

    def running(self) -> Steps[None]:
        """Run until a stop is requested or the topology is over. Raises the errors of ``lead``,
        except ``StaleWriterError``, ``LeadershipLostError`` and ``RetryableError``, after which it
        stands again."""
        pause_s, reached = _PAUSE_S, self._progress()
        while not self._stop_requested.is_set():
            repeating = False
            try:
                if (yield from self._leading()):
                    return
            except (StaleWriterError, LeadershipLostError, RetryableError) as error:
                self._waits.again("driver.stepped_down", str(error))
                self._stand_by(error)
                repeating = isinstance(error, RetryableError)
            got_on, reached = self._progress() > reached, self._progress()
            if got_on:
                self._waits.over()
            pause_s = min(2 * pause_s, _PAUSE_MAX_S) if repeating and not got_on else _PAUSE_S
            yield partial(self._stop_requested.wait, pause_s)

    def _leading(self) -> Steps[bool]:
        """Run one leadership, from its election to its end. Returns True when the candidate must
        not stand again."""
        leadership = yield from self._elected()
        if leadership is None:
            return True
        try:
            return (yield from self._lead(leadership))
        finally:
            leadership.resign()

    def _elected(self) -> Steps[Leadership | None]:
        """Stand for election until it is won. Returns None when a stop was requested."""
        if self._lets_another_lead:
            yield from self._awaiting_leader()
        announced = False
        while not self._stop_requested.is_set():
            leadership: Leadership | None = yield partial(
                self._store.lead, self._topology_id, identity_of_process(), timeout_s=_TURN_S
            )
            if leadership is not None:
                return leadership
            if not announced:
                announced = True
                self._announce("another driver leads, or its session lasts")
        return None

    def _awaiting_leader(self) -> Steps[None]:
        """Wait until another driver leads. A standby driver does this once."""
        self._announce("waits for another driver to lead")
        while not (yield partial(self._store.is_led, self._topology_id)):
            if (yield partial(self._stop_requested.wait, _POLL_S)):
                return
        self._lets_another_lead = False

    def _announce(self, reason: str) -> None:
        self._stand_by(None)
        _log.info("driver.standby", topology=self._topology_id, reason=reason)


def identity_of_process() -> str:
    """The name of this process as a candidate, shown in an election."""
    return f"{socket.gethostname()}:{os.getpid()}"


@contextmanager
def leadership_of(
    topology_id: str, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S
) -> Iterator[Leadership]:
    """Hold the topology's leadership while the block runs. Raises ``ConfigError`` when a driver
    still leads after ``timeout_s``."""
    identity = f"a command on {identity_of_process()}"
    leadership = store.lead(topology_id, identity, timeout_s=timeout_s)
    if leadership is None:
        raise ConfigError(f"a driver runs topology {topology_id!r}: stop it first, and its standby drivers too")
    try:
        yield leadership
    finally:
        leadership.resign()
