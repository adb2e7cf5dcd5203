"""Requests to replay or drop dead letters. The running driver of the topology executes them;
without one, a driver in this process does (ADR 95)."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from framework.config import Config
from framework.coordination.election import identity_of_process
from framework.coordination.store import CoordinationStore
from framework.errors import ConfigError, RetryableError
from framework.observe.logs import get_logger
from framework.submission import submit
from framework.topology import Topology
from framework.topology.dead_letter_replay import LETTERS_PARTITION, LetterRequest, takes_letters
from framework.topology.dead_letters import Letter
from framework.transactions.documents import committed_txid, read_letter_request, read_plan, write_letter_request

#: The most letters of a request, which is a single document.
REQUEST_LETTERS_MAX = 5_000
_POLL_S = 0.2
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

    def finish(self) -> None:
        """Finish the request of an interrupted command."""
        request = read_letter_request(self._store, self._topology.id)
        if request is not None:
            self._do(request)

    def give_up(self) -> int:
        """Withdraw the request of an interrupted command, except for letters that are already
        planned. Returns how many letters it had."""
        request = read_letter_request(self._store, self._topology.id)
        write_letter_request(self._store, self._topology.id, None)
        return len(request.letters) if request is not None else 0

    def do(self, action: str, letters: Sequence[Letter]) -> None:
        """Request that these letters be replayed or dropped, and wait until they are. Raises the
        error with which a run in this process ends; then the request stays, and ``finish``
        continues with it."""
        for first in range(0, len(letters), REQUEST_LETTERS_MAX):
            its = [(each.ref, each.size) for each in letters[first : first + REQUEST_LETTERS_MAX]]
            request = LetterRequest(uuid.uuid4().hex[:16], action, its)
            write_letter_request(self._store, self._topology.id, request)
            self._do(request)

    def _do(self, request: LetterRequest) -> None:
        alone_since: float | None = -math.inf
        while not self.is_done(request):
            self._alone()
            if self._store.is_led(self._topology.id):
                alone_since = None
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > _NOBODY_LEADS_S:
                self._run(request)
                continue
            time.sleep(_POLL_S)
        write_letter_request(self._store, self._topology.id, None)

    def _run(self, request: LetterRequest) -> None:
        with submit(self._topology, self._config, self._store, self._executor) as run:
            while not self.is_done(request):
                self._alone()
                with suppress(TimeoutError):
                    run.wait_for_commit(run.status().committed_txid + 1, _POLL_S)

    def is_done(self, request: LetterRequest) -> bool:
        """Whether the last closed transaction is the last one of the request, or a later one."""
        txid = committed_txid(self._store, self._topology.id)
        try:
            _, plan = read_plan(self._store, self._topology.id, self._topology.spout.id, txid)
        except ConfigError:
            return False  # another transaction has been closed meanwhile
        entry = plan.get(LETTERS_PARTITION)
        if entry is None or entry["request"] != request.id:
            return not request.letters
        return int(entry["next"]) - int(entry["begin"]) >= len(request.letters)


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
