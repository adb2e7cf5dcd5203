"""Requests to replay or drop dead letters. The running driver of the topology executes them;
without one, a driver in this process does (ADR 95)."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from framework.config import Config
from framework.coordination.election import identity_of_process
from framework.coordination.step_generators import Steps, perform
from framework.coordination.store import CoordinationStore
from framework.errors import ConfigError, RetryableError
from framework.observe.logs import get_logger
from framework.submission import submit
from framework.topology import Topology
from framework.topology.dead_letter_replay import (
    LETTERS_PARTITION,
    LetterRequest,
    is_outdated,
    position_of,
    takes_letters,
)
from framework.topology.dead_letters import ListedLetter
from framework.transactions.documents import committed_txid, read_letter_request, read_plan, write_letter_request
from framework.transactions.plans import Plan

#: The most letters of a request, which is a single document.
REQUEST_LETTERS_MAX = 5_000
_POLL_S = 0.2
#: How often the last plan is read again because another transaction was closed meanwhile.
_TRIES = 20
#: How long standby drivers have to take over after the leader has gone.
_NOBODY_LEADS_S = 2.0

_log = get_logger()


class LetterRequests:
    """The requests of one command, made by ``letter_requests``. ``alone``: raises when another
    command may have requests, too."""

    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        config: Config,
        executor: str,
        alone: Callable[[], None] = lambda: None,
    ) -> None:
        self._topology, self._store = topology, store
        self._config, self._executor = config, executor
        self._alone = alone
        #: The position at which a request for the present letters must begin.
        self._position: int | None = None

    def finish(self) -> None:
        """Finish the request of an interrupted command. Call it before the letters are listed that
        are passed to ``do``."""
        perform(self.finishing())

    def finishing(self) -> Steps[None]:
        """As ``finish``, in steps."""
        request = yield partial(read_letter_request, self._store, self._topology.id)
        if request is not None:
            yield from self._doing(request)
        self._position = yield self._planned

    def give_up(self) -> int:
        """Withdraw the request of an interrupted command, except for letters that are already
        planned. Returns how many letters it had."""
        request = read_letter_request(self._store, self._topology.id)
        write_letter_request(self._store, self._topology.id, None)
        return len(request.letters) if request is not None else 0

    def do(self, action: str, letters: Sequence[ListedLetter]) -> None:
        """Request that these letters be replayed or dropped, and wait until they are. Raises the
        error with which a run in this process ends; then the request stays, and ``finish``
        continues with it. Raises ``RetryableError`` if the request was withdrawn, or other letters
        were planned since the letters were listed."""
        perform(self.doing(action, letters))

    def doing(self, action: str, letters: Sequence[ListedLetter]) -> Steps[None]:
        """As ``do``, in steps."""
        for first in range(0, len(letters), REQUEST_LETTERS_MAX):
            its = [(each.ref, each.size) for each in letters[first : first + REQUEST_LETTERS_MAX]]
            position = self._position + first if self._position is not None else None
            request = LetterRequest(self._new_id(), action, its, position)
            yield partial(write_letter_request, self._store, self._topology.id, request)
            if not (yield from self._doing(request)):
                raise RetryableError(
                    "the request was withdrawn, or letters of an earlier request were replayed or dropped meanwhile; call the "
                    "command again, which continues with the letters that are left"
                )

    def _new_id(self) -> str:
        return uuid.uuid4().hex[:16]

    def _doing(self, request: LetterRequest) -> Steps[bool]:
        """Wait until the request is done. Returns False if it never will be."""
        alone_since: float | None = -math.inf
        while not (yield partial(self.is_done, request)):
            yield self._alone
            if not (yield partial(self._is_valid, request)):
                break
            if self._store.is_led(self._topology.id):
                alone_since = None
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > _NOBODY_LEADS_S:
                yield partial(self._run, request)
                continue
            yield self._pause
        done: bool = yield partial(self.is_done, request)
        current = yield partial(read_letter_request, self._store, self._topology.id)
        if current is not None and current.id == request.id:
            yield partial(write_letter_request, self._store, self._topology.id, None)
        return done

    def _pause(self) -> None:
        time.sleep(_POLL_S)

    def _run(self, request: LetterRequest) -> None:
        with submit(self._topology, self._config, self._store, self._executor) as run:
            while not self.is_done(request) and self._is_valid(request):
                self._alone()
                with suppress(TimeoutError):
                    run.wait_for_commit(run.status().committed_txid + 1, _POLL_S)

    def is_done(self, request: LetterRequest) -> bool:
        """Whether the last closed transaction is the last one of the request, or a later one."""
        plan = self._last_plan()
        if plan is None:
            return False
        entry = plan.get(LETTERS_PARTITION)
        if entry is None or entry["request"] != request.id:
            return not request.letters
        return int(entry["next"]) - int(entry["begin"]) >= len(request.letters)

    def _is_valid(self, request: LetterRequest) -> bool:
        """Whether drivers may still plan the request."""
        current = read_letter_request(self._store, self._topology.id)
        plan = self._last_plan()
        outdated = plan is not None and is_outdated(request, plan.get(LETTERS_PARTITION))
        return current is not None and current.id == request.id and not outdated

    def _planned(self) -> int | None:
        """The position after the letters of closed transactions; None if unknown."""
        for _ in range(_TRIES):
            plan = self._last_plan()
            if plan is not None:
                return position_of(plan.get(LETTERS_PARTITION))
        return None

    def _last_plan(self) -> Plan | None:
        """The plan of the last closed transaction; empty before the first. None when it is not
        recorded, or when another transaction has been closed meanwhile."""
        txid = committed_txid(self._store, self._topology.id)
        if txid == 0:
            return {}
        try:
            return read_plan(self._store, self._topology.id, self._topology.spout.id, txid)[1]
        except ConfigError:
            return None


def to_replay(letters: Sequence[ListedLetter], attempts_max: int) -> list[ListedLetter]:
    """The letters that may be replayed: complete letters with fewer than ``attempts_max``
    attempts."""
    return [each for each in letters if each.attempts < attempts_max and not each.is_cut]


@contextmanager
def letter_requests(
    topology: Topology, store: CoordinationStore, config: Config, executor: str
) -> Iterator[LetterRequests]:
    """The requests of this command, provided that no other command has any. Raises ``ConfigError``
    when the topology accepts none, and when another command is active."""
    if not takes_letters(topology.spout.instance):
        raise ConfigError(
            f"spout {topology.spout.id!r} cannot read dead letters again: a KafkaTransactionalSpout or an "
            "OpaqueKafkaTransactionalSpout with a DeadLetterTable or a DeadLetterTopic can"
        )
    lock = store.lead(
        f"{topology.id}/letter-requests",
        f"a command on {identity_of_process()}",
        timeout_s=config.zookeeper_election_timeout_secs,
    )
    if lock is None:
        raise ConfigError(f"another command replays or drops dead letters of topology {topology.id!r}: wait for it")

    def alone() -> None:
        if lock.lost:
            raise RetryableError("the connection to ZooKeeper was lost: ask again, which goes on with what is left")

    try:
        yield LetterRequests(topology, store, config, executor, alone)
    finally:
        lock.resign()
