"""The client of the task workers: carries rounds to them, from the driver or from the tasks of
Spark's jobs, and knows the settings of each worker."""

from __future__ import annotations

import itertools
import selectors
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from framework.core.plan import CorePlan
from framework.core.round_protocol import Addressed, Round, RoundRecord, WorkerLostError
from framework.errors import InvariantViolation, RetryableError
from framework.execution.level_walk import delivered, walk
from framework.execution.payload_encryption import encrypt
from framework.execution.process_channels import Channel, Credentials, Place, connect

#: The least time that a task worker gets for its part of a round, in seconds.
ANSWER_MIN_S = 60.0
#: How long a worker may take to accept a connection, and to answer a ping, in seconds.
CONNECT_S = 10.0
#: How long each of two attempts to reach a task worker may take. If both fail, Spark tasks carry
#: the rounds of the driver instead.
REACH_S = 10.0
#: How long components may take to close.
_CLOSE_S = 30.0
#: The most tasks that an error names.
_NAMES_MAX = 4


class Address(NamedTuple):
    """The address of a task worker: a path on this host, or a host and a port."""

    number: int
    place: Place
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings with which a worker starts.

    * ``plan``: pickled and encrypted.
    * ``answer_s``: how long the worker may take to answer. When no request comes for twice as long,
      its driver is gone, so the worker closes its tasks and ends.
    * ``driver_host``: None when the only executor is on the driver's host. Otherwise task workers
      listen on the interface from which that host is reachable, and ``credentials`` contain a
      certificate."""

    plan: bytes
    credentials: Credentials
    answer_s: float
    driver_host: str | None

    @classmethod
    def of(
        cls, plan: CorePlan, answer_s: float, driver_host: str | None, certificate: bytes | None = None
    ) -> WorkerSettings:
        credentials = Credentials.new(certificate)
        return cls(encrypt(cloudpickle.dumps(plan)), credentials, max(answer_s, ANSWER_MIN_S), driver_host)

    @property
    def lease_s(self) -> float:
        # while one task worker does not answer, the others get no requests
        return 2 * self.answer_s


class Channels:
    """Channels to workers, opened on demand and kept. Used by one thread at a time, because a
    worker answers the messages of a channel one after the other. Unpickled in a task, it becomes
    the object of that process."""

    def __init__(self) -> None:
        self._open: dict[Address, Channel] = {}

    def to(self, address: Address, credentials: Credentials) -> Channel:
        """The channel to a task worker. Raises as ``connect``."""
        found = self._open.get(address)
        if found is None:
            found = self._open[address] = connect(address.place, credentials, CONNECT_S)
        return found

    def known(self, address: Address) -> Channel | None:
        return self._open.get(address)

    def close(self, address: Address | None = None) -> None:
        """Close the channel to a task worker, or all channels."""
        for each in list(self._open) if address is None else [address]:
            found = self._open.pop(each, None)
            if found is not None:
                found.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_this_process, ()


_channels = Channels()


def _of_this_process() -> Channels:
    return _channels


#: Message numbers. An answer carries the number of its message, so a late answer to a killed task
#: is not taken for the answer to the next message.
_numbers = itertools.count()


class WorkerClient:
    """Carries messages to workers.

    * ``placed``: (level, partition) -> number of its worker.
    * ``answer_s``: a worker that does not answer within this time is told to end, and counts as
      lost.
    * ``names``: (level, partition) -> its components, for errors.
    * ``channels``: by default those that this process keeps for its Spark tasks."""

    def __init__(
        self,
        addresses: Sequence[Address],
        credentials: Credentials,
        placed: Mapping[tuple[int, int], int],
        answer_s: float,
        *,
        names: Mapping[tuple[int, int], str] = MappingProxyType({}),
        channels: Channels | None = None,
    ) -> None:
        self._addresses = {each.number: each for each in addresses}
        self._names = dict(names)
        self._credentials = credentials
        self._placed = placed
        self._answer_s = answer_s
        self._channels = _channels if channels is None else channels
        self._asked: dict[int, int] = {}

    def run_task(
        self, round_: Round, level: int, partition: int, records: Sequence[RoundRecord]
    ) -> Sequence[Addressed]:
        """Run one task of a level."""
        number = self._placed[(level, partition)]
        self._send(number, ("run", round_, level, [(partition, records)]))
        return self._answer(number, self._limit_s(round_), [(level, partition)])  # type: ignore[no-any-return]

    def walk(self, round_: Round, widths: Sequence[int]) -> list[RoundRecord]:
        """Run all levels of a round. On each level the task workers work concurrently."""

        def run_level(level: int, inboxes: Sequence[list[RoundRecord]]) -> list[Addressed]:
            arriving = delivered((self._placed[(level, task)], (task, records)) for task, records in enumerate(inboxes))
            for worker, tasks in arriving.items():
                self._send(worker, ("run", round_, level, tasks))
            if round_.spout_wait_s and not level:
                self._wake_after_the_first(round_, list(arriving))
            return [
                each
                for worker, tasks in arriving.items()
                for each in self._answer(worker, self._limit_s(round_), [(level, task) for task, _ in tasks])
            ]

        return walk(widths, run_level)

    def wake(self, number: int, workers: Iterable[int] | None = None) -> None:
        """End the wait for the spouts of workers (by default, of all) in round ``number``; for 0,
        in the round that waits now. A task worker that cannot be reached continues to wait."""
        for worker in self._addresses if workers is None else workers:
            try:
                with connect(self._addresses[worker].place, self._credentials, CONNECT_S) as channel:
                    channel.send((0, "wake", number), CONNECT_S)
                    channel.receive(CONNECT_S)  # the task worker has received the message
            except (OSError, EOFError):
                continue

    def _wake_after_the_first(self, round_: Round, workers: Sequence[int]) -> None:
        """Wait until one of the workers has answered, then wake the others, so that they stop
        waiting for their spouts."""
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                channel = self._channels.known(self._addresses[worker])
                if channel is not None:
                    selector.register(channel, selectors.EVENT_READ, worker)
            ready = {key.data for key, _ in selector.select(self._answer_s)}
        self.wake(round_.number, [worker for worker in workers if worker not in ready])

    def ask(self, number: int, *message: Any) -> Any:
        self._send(number, message)
        return self._answer(number, self._answer_s)

    def _limit_s(self, round_: Round) -> float:
        """How long a worker may take for a round. The limit is longer when the worker may have to
        finish another round first, so that the error names the round that hangs."""
        return self._answer_s * (1.5 if round_.follows else 1.0)

    def _send(self, number: int, message: tuple[Any, ...]) -> None:
        address = self._addresses[number]
        self._asked[number] = next(_numbers)
        try:
            self._channels.to(address, self._credentials).send((self._asked[number], *message), self._answer_s)
        except (OSError, EOFError) as error:
            self._lost(address, error)

    def _answer(self, number: int, limit_s: float, ran: Sequence[tuple[int, int]] = ()) -> Any:
        """Receive the answer to a message. ``ran``: the tasks that the task worker was to run."""
        address = self._addresses[number]
        try:
            channel = self._channels.to(address, self._credentials)
            answered = None
            while answered != self._asked[number]:
                try:
                    answered, outcome, result = channel.receive(limit_s)
                except TimeoutError:
                    self._end(address)
                    raise TimeoutError(f"it did not answer for {limit_s:g} s") from None
        except (OSError, EOFError) as error:
            self._lost(address, error, ran)
        if outcome == "lost":
            raise RetryableError(result)
        if outcome == "bug":
            raise InvariantViolation(result)
        return result

    def _end(self, address: Address) -> None:
        """Tell a worker to end its process, because a component may hang and would never end."""
        try:
            with connect(address.place, self._credentials, CONNECT_S) as channel:
                channel.send((0, "die"), CONNECT_S)
        except (OSError, EOFError):
            pass  # it has already ended, or is frozen

    def _lost(self, address: Address, error: BaseException, ran: Sequence[tuple[int, int]] = ()) -> NoReturn:
        self._channels.close(address)
        reason = str(error) or type(error).__name__
        names = [self._names[each] for each in ran if each in self._names]
        shown = ", ".join(names[:_NAMES_MAX]) + (", ..." if len(names) > _NAMES_MAX else "")
        during = f" while it ran {shown}" if names else ""
        raise WorkerLostError(f"task worker {address.number} (pid {address.pid}) is gone{during}: {reason}") from error


def unreachable(address: Address, credentials: Credentials) -> str | None:
    """The reason why this process cannot reach a task worker; None when it can. A process that
    stands still for some seconds may break one attempt."""
    reason = ""
    for _ in range(2):
        try:
            with connect(address.place, credentials, REACH_S) as channel:
                channel.send((0, "ping"), REACH_S)
                channel.receive(REACH_S)
        except (OSError, EOFError) as error:
            reason = str(error) or type(error).__name__
        else:
            return None
    return f"the driver does not reach task worker {address.number}: {reason}"


def close_worker(address: Address, credentials: Credentials) -> None:
    """Close a task worker's tasks and end it. Does nothing when it is gone."""
    channels = Channels()
    try:
        WorkerClient([address], credentials, {}, _CLOSE_S, channels=channels).ask(address.number, "close")
    except RetryableError:
        pass
    finally:
        channels.close()
