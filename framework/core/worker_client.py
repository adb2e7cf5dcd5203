"""Carries rounds to homes, from the driver or in the tasks of Spark's jobs, and holds what it must
know of each home."""

from __future__ import annotations

import itertools
import selectors
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from framework.core.plan import CorePlan
from framework.core.rounds import Addressed, HomeLostError, Round, RoundRecord
from framework.errors import InvariantViolation, RetryableError
from framework.execution.channels import Channel, Credentials, Place, connect
from framework.execution.encryption import encrypt
from framework.execution.stages import delivered, walk

#: How long a home may take for its part of a round, at least.
ANSWER_MIN_S = 60.0
#: How long a home may take to admit a connection, and to answer when it is only asked whether it is
#: there.
CONNECT_S = 10.0
#: How long the driver tries to reach a home before it has Spark tasks carry its rounds.
REACH_S = 3.0
#: How long components may take to close.
_CLOSE_S = 30.0
#: How many tasks an error names.
_NAMES_MAX = 4


class Address(NamedTuple):
    """Where a home is: a path on this host, or a host and a port."""

    number: int
    place: Place
    pid: int


@dataclass(frozen=True, slots=True)
class HomeSettings:
    """What a home is started with. ``plan``: pickled and encrypted. ``answer_s``: how long the home
    may take to answer. When nobody has asked it anything for twice as long, its driver is gone, so
    it closes its tasks and ends. ``driver_host``: None when there is one executor, on the driver's
    host; otherwise homes listen on the interface from which that host is reached, and
    ``credentials`` have a certificate."""

    plan: bytes
    credentials: Credentials
    answer_s: float
    driver_host: str | None

    @classmethod
    def of(
        cls, plan: CorePlan, answer_s: float, driver_host: str | None, certificate: bytes | None = None
    ) -> HomeSettings:
        credentials = Credentials.new(certificate)
        return cls(encrypt(cloudpickle.dumps(plan)), credentials, max(answer_s, ANSWER_MIN_S), driver_host)

    @property
    def lease_s(self) -> float:
        return 2 * self.answer_s  # while one home does not answer, the others are not asked


class Channels:
    """Channels to homes, opened when they are needed and kept. Used by one thread at a time: a home
    answers the messages of a channel one after the other. A task that gets one by pickle gets that
    of its process."""

    def __init__(self) -> None:
        self._open: dict[Address, Channel] = {}

    def to(self, address: Address, credentials: Credentials) -> Channel:
        """The channel to a home. Raises as ``connect``."""
        found = self._open.get(address)
        if found is None:
            found = self._open[address] = connect(address.place, credentials, CONNECT_S)
        return found

    def known(self, address: Address) -> Channel | None:
        return self._open.get(address)

    def close(self, address: Address | None = None) -> None:
        """Close the channel to a home, or all channels."""
        for each in list(self._open) if address is None else [address]:
            found = self._open.pop(each, None)
            if found is not None:
                found.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_this_process, ()


_channels = Channels()


def _of_this_process() -> Channels:
    return _channels


#: Numbers of messages. An answer carries the number of its message. So an answer that a killed task
#: did not wait for is not taken for the answer to the next message.
_numbers = itertools.count()


class HomeClient:
    """Carries messages to homes. ``placed``: (level, partition) -> number of its home.
    ``answer_s``: a home that has not answered for this long is told to end itself, and counts as
    lost. ``names``: (level, partition) -> what lives there, for errors. ``channels``: by default
    those that this process keeps for its Spark tasks."""

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
        """Run all levels of a round. The homes work side by side on each level."""

        def run_level(level: int, inboxes: Sequence[list[RoundRecord]]) -> list[Addressed]:
            arriving = delivered((self._placed[(level, task)], (task, records)) for task, records in enumerate(inboxes))
            for home, tasks in arriving.items():
                self._send(home, ("run", round_, level, tasks))
            if round_.spout_wait_s and not level:
                self._wake_after_the_first(round_, list(arriving))
            return [
                each
                for home, tasks in arriving.items()
                for each in self._answer(home, self._limit_s(round_), [(level, task) for task, _ in tasks])
            ]

        return walk(widths, run_level)

    def wake(self, number: int, homes: Iterable[int] | None = None) -> None:
        """End the wait for the spouts of homes (by default, of all) in round ``number``; when that
        is 0, in the round that waits now. Homes that cannot be reached go on waiting."""
        for home in self._addresses if homes is None else homes:
            try:
                with connect(self._addresses[home].place, self._credentials, CONNECT_S) as channel:
                    channel.send((0, "wake", number), CONNECT_S)
                    channel.receive(CONNECT_S)  # the home has taken the message
            except (OSError, EOFError):
                continue

    def _wake_after_the_first(self, round_: Round, homes: Sequence[int]) -> None:
        """Wait until one of the homes has answered, then wake the others: they need not wait for a
        spout any more."""
        with selectors.DefaultSelector() as selector:
            for home in homes:
                channel = self._channels.known(self._addresses[home])
                if channel is not None:
                    selector.register(channel, selectors.EVENT_READ, home)
            ready = {key.data for key, _ in selector.select(self._answer_s)}
        self.wake(round_.number, [home for home in homes if home not in ready])

    def ask(self, number: int, *message: Any) -> Any:
        self._send(number, message)
        return self._answer(number, self._answer_s)

    def _limit_s(self, round_: Round) -> float:
        """How long a home may take for a round. It gets longer when it may have to do another round
        first, so that the error names the round that hangs."""
        return self._answer_s * (1.5 if round_.follows else 1.0)

    def _send(self, number: int, message: tuple[Any, ...]) -> None:
        address = self._addresses[number]
        self._asked[number] = next(_numbers)
        try:
            self._channels.to(address, self._credentials).send((self._asked[number], *message), self._answer_s)
        except (OSError, EOFError) as error:
            self._lost(address, error)

    def _answer(self, number: int, limit_s: float, ran: Sequence[tuple[int, int]] = ()) -> Any:
        """``ran``: the tasks that the home was to run."""
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
        """Tell a home to end its process. A component may have hung, and nothing else would end
        it."""
        try:
            with connect(address.place, self._credentials, CONNECT_S) as channel:
                channel.send((0, "die"), CONNECT_S)
        except (OSError, EOFError):
            pass  # it has ended already, or is frozen

    def _lost(self, address: Address, error: BaseException, ran: Sequence[tuple[int, int]] = ()) -> NoReturn:
        self._channels.close(address)
        reason = str(error) or type(error).__name__
        names = [self._names[each] for each in ran if each in self._names]
        shown = ", ".join(names[:_NAMES_MAX]) + (", ..." if len(names) > _NAMES_MAX else "")
        during = f" while it ran {shown}" if names else ""
        raise HomeLostError(f"home {address.number} (pid {address.pid}) is gone{during}: {reason}") from error


def unreachable(address: Address, credentials: Credentials) -> str | None:
    """The reason why this process cannot talk to a home; None when it can."""
    try:
        with connect(address.place, credentials, REACH_S) as channel:
            channel.send((0, "ping"), REACH_S)
            channel.receive(REACH_S)
    except (OSError, EOFError) as error:
        return f"the driver does not reach home {address.number}: {str(error) or type(error).__name__}"
    return None


def close_home(address: Address, credentials: Credentials) -> None:
    """Close a home's tasks and end it. Does nothing when it is gone."""
    channels = Channels()
    try:
        HomeClient([address], credentials, {}, _CLOSE_S, channels=channels).ask(address.number, "close")
    except RetryableError:
        pass
    finally:
        channels.close()
