"""Homes in processes of their own, next to Spark's executors, and the couriers that carry rounds to them.

Spark gives a task to whichever worker process is free, and ends workers as it likes; a spout that holds a connection and pending
tuples needs a place that stays. So each home is a process that a Spark task has started, on the executor's host; tasks of the
rounds carry to it what is for it, and carry away what it gives. It ends when it is told to, when its executor is gone, and when
it has not been heard of for too long; and when a round of it takes too long, since a component may have hung.

A home answers one message after the other per channel, and a task does one round after the other. Nobody is let in without the
run's key (``channels.py``).
"""

from __future__ import annotations

import itertools
import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, cast

import cloudpickle

from framework.core.channels import Channel, Credentials, Place, Server, connect
from framework.core.rounds import Addressed, Round, RoundRecord
from framework.core.segment_task import CorePlan, Home
from framework.errors import InvariantViolation, RetryableError

#: How long a home may take over its part of a round, at least.
ANSWER_MIN_S = 60.0
_WATCH_S = 1.0
#: How long a home may take to let somebody in, and to answer when it is only asked whether it is there.
_CONNECT_S = 10.0
#: How long components may take to close.
_CLOSE_S = 30.0


class Address(NamedTuple):
    """Where a home is: a path on this host, or a host and a port."""

    number: int
    place: Place
    pid: int


@dataclass(frozen=True, slots=True)
class HomeSettings:
    """What a home is started with. ``answer_s``: how long it may take to answer; when it has not been asked for twice as long, its
    driver is gone: it closes its tasks and ends. ``driver_host``: None when there is one executor, on the driver's host;
    otherwise homes listen on the interface from which that host is reached, and ``credentials`` have a certificate. ``plan``:
    pickled."""

    plan: bytes
    credentials: Credentials
    answer_s: float
    driver_host: str | None

    @classmethod
    def of(
        cls, plan: CorePlan, answer_s: float, driver_host: str | None, certificate: bytes | None = None
    ) -> HomeSettings:
        credentials = Credentials.new(certificate)
        return cls(cloudpickle.dumps(plan), credentials, max(answer_s, ANSWER_MIN_S), driver_host)

    @property
    def lease_s(self) -> float:
        return 2 * self.answer_s  # while one home does not answer, the others are not asked


# --- where the tasks of a round run -----------------------------------------------------------------------------


class HomeLostError(RetryableError):
    """A home does not answer."""


_channels: dict[Address, Channel] = {}
#: Numbers of messages: the answer to one carries its number, so that what a task which was killed did not wait for is not taken
#: for the answer to the next.
_numbers = itertools.count()


def _channel_to(address: Address, credentials: Credentials) -> Channel:
    found = _channels.get(address)
    if found is None:
        found = _channels[address] = connect(address.place, credentials, _CONNECT_S)
    return found


class HomeClient:
    """Carries messages to homes, from a Spark task. ``placed``: (level, partition) -> number of its home. ``answer_s``: a home that
    has not answered for so long is told to end itself, and counts as lost."""

    def __init__(
        self,
        addresses: Sequence[Address],
        credentials: Credentials,
        placed: Mapping[tuple[int, int], int],
        answer_s: float,
    ) -> None:
        self._addresses = {each.number: each for each in addresses}
        self._credentials = credentials
        self._placed = placed
        self._answer_s = answer_s
        self._asked: dict[int, int] = {}

    def run_task(
        self, round_: Round, level: int, partition: int, records: Sequence[RoundRecord]
    ) -> Sequence[Addressed]:
        """One task of a level."""
        number = self._placed[(level, partition)]
        self._send(number, ("run", round_, level, [(partition, records)]))
        return self._answer(number, self._limit_s(round_))  # type: ignore[no-any-return]

    def walk(self, round_: Round, widths: Sequence[int]) -> list[RoundRecord]:
        """All levels of a round; the homes work side by side in each."""
        inboxes: dict[int, list[RoundRecord]] = {}
        for level, width in enumerate(widths):
            by_home: dict[int, list[tuple[int, Sequence[RoundRecord]]]] = {}
            for partition in range(width):
                by_home.setdefault(self._placed[(level, partition)], []).append((partition, inboxes.get(partition, [])))
            for number, tasks in by_home.items():
                self._send(number, ("run", round_, level, tasks))
            inboxes = {}
            if round_.spout_wait_s and not level:
                self._hurry_after_the_first(round_, list(by_home))
            for number in by_home:
                for target, record in self._answer(number, self._limit_s(round_)):
                    inboxes.setdefault(target, []).append(record)
        return [record for partition in sorted(inboxes) for record in inboxes[partition]]

    def wake(self, number: int, homes: Iterable[int] | None = None) -> None:
        """Have the spouts of homes wait no longer in a round; in any, when it is 0. What cannot be reached waits."""
        for home in self._addresses if homes is None else homes:
            try:
                with connect(self._addresses[home].place, self._credentials, _CONNECT_S) as channel:
                    channel.send((0, "wake", number), _CONNECT_S)
                    channel.receive(_CONNECT_S)  # it has been heard
            except (OSError, EOFError):
                continue

    def _hurry_after_the_first(self, round_: Round, homes: Sequence[int]) -> None:
        """Wait until one of the homes has answered; the others need not wait for a spout then."""
        with selectors.DefaultSelector() as selector:
            for home in homes:
                channel = _channels.get(self._addresses[home])
                if channel is not None:
                    selector.register(channel, selectors.EVENT_READ, home)
            ready = {key.data for key, _ in selector.select(self._answer_s)}
        self.wake(round_.number, [home for home in homes if home not in ready])

    def ask(self, number: int, *message: Any) -> Any:
        self._send(number, message)
        return self._answer(number, self._answer_s)

    def _limit_s(self, round_: Round) -> float:
        """How long a home may take over a round: longer when it may have to do another one first, so that of two rounds the one
        that hangs is told."""
        return self._answer_s * (1.5 if round_.follows else 1.0)

    def _send(self, number: int, message: tuple[Any, ...]) -> None:
        address = self._addresses[number]
        self._asked[number] = next(_numbers)
        try:
            _channel_to(address, self._credentials).send((self._asked[number], *message), self._answer_s)
        except (OSError, EOFError) as error:
            self._lost(address, error)

    def _answer(self, number: int, limit_s: float) -> Any:
        address = self._addresses[number]
        try:
            channel = _channel_to(address, self._credentials)
            answered = None
            while answered != self._asked[number]:
                try:
                    answered, outcome, result = channel.receive(limit_s)
                except TimeoutError:
                    self._end(address)
                    raise TimeoutError(f"it did not answer for {limit_s:g} s") from None
        except (OSError, EOFError) as error:
            self._lost(address, error)
        if outcome == "lost":
            raise RetryableError(result)
        if outcome == "bug":
            raise InvariantViolation(result)
        return result

    def _end(self, address: Address) -> None:
        """A component may have hung: only its process can be ended."""
        try:
            with connect(address.place, self._credentials, _CONNECT_S) as channel:
                channel.send((0, "die"), _CONNECT_S)
        except (OSError, EOFError):
            pass  # it is gone already, or does not move at all

    def _lost(self, address: Address, error: BaseException) -> NoReturn:
        found = _channels.pop(address, None)
        if found is not None:
            found.close()
        reason = str(error) or type(error).__name__
        raise HomeLostError(f"home {address.number} (pid {address.pid}) is gone: {reason}") from error


def ensure_home(settings: HomeSettings, number: int, known: Address | None) -> Address:
    """The home's address if it answers; otherwise that of a new one on this host. Called in a Spark task."""
    if known is not None:
        try:
            HomeClient([known], settings.credentials, {}, _CONNECT_S).ask(number, "ping")
            return known
        except RetryableError:
            pass
    return start_home(settings, number)


def start_home(settings: HomeSettings, number: int) -> Address:
    """Start a process for a home. Raises ``RetryableError`` when it does not come up."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-m", "framework.core.homes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # what is sent to the worker's group is not for it
    )
    try:
        with cast(IO[bytes], process.stdin) as out:
            pickle.dump((settings, number, _executor_pid()), out)
        with cast(IO[bytes], process.stdout) as answer:
            return pickle.load(answer)  # type: ignore[no-any-return]
    except (OSError, EOFError) as error:
        process.kill()
        raise RetryableError(f"home {number} did not start: see the executor's stderr") from error


def close_home(address: Address, credentials: Credentials) -> None:
    """Close a home's tasks and end it; nothing when it is gone."""
    try:
        HomeClient([address], credentials, {}, _CLOSE_S).ask(address.number, "close")
    except RetryableError:
        pass
    finally:
        channel = _channels.pop(address, None)
        if channel is not None:
            channel.close()


def _executor_pid() -> int:
    """The JVM above this worker; this process's parent where that cannot be told."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        if name == "java":
            return pid
        pid = int(fields[1])
    return os.getppid()


# --- in the home's process ---------------------------------------------------------------------------------------


class HomeServer:
    """Serves one home. ``serve`` returns when it was told to end."""

    def __init__(self, settings: HomeSettings, number: int, executor_pid: int) -> None:
        self._home = Home(pickle.loads(settings.plan), encode=True)
        self._settings = settings
        self._executor_pid = executor_pid
        self._folder = tempfile.TemporaryDirectory(prefix="ratchet-home-")
        place: Place = f"{self._folder.name}/home"
        if settings.driver_host is not None:
            place = (_own_host(settings.driver_host), 0)
        self._server = Server(place, settings.credentials, self._answer, _CONNECT_S)
        self.address = Address(number, self._server.place, os.getpid())
        self._working = 0
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def serve(self) -> None:
        """Answer until told to end, until the executor is gone, or until nobody has been heard for the lease."""
        self._server.start()
        while not self._ended.wait(_WATCH_S):
            with self._lock:
                silent = not self._working and time.monotonic() - self._heard_at > self._settings.lease_s
            if silent or not _alive(self._executor_pid):
                self._home.close()
                break
        self._server.close()
        self._folder.cleanup()

    def _answer(self, channel: Channel) -> None:
        try:
            while True:
                number, *message = channel.receive(None)
                with self._lock:
                    self._working += 1
                try:
                    outcome = number, "ok", self._do(*message)
                except RetryableError as error:
                    outcome = number, "lost", str(error)
                except BaseException:  # noqa: BLE001 - user code's errors stay inside; this is a bug, and who asks waits
                    outcome = number, "bug", traceback.format_exc()
                finally:
                    with self._lock:
                        self._working -= 1
                        self._heard_at = time.monotonic()
                channel.send(outcome, self._settings.answer_s)
                if message[0] == "close":
                    self._ended.set()
        except (OSError, EOFError):
            channel.close()  # the worker is gone, or was told of another home

    def _do(self, what: str, *arguments: Any) -> Any:
        if what == "run":
            return self._home.run_tasks(*arguments)
        if what == "wake":
            self._home.wake(*arguments)
        elif what == "close":
            self._home.close()
        elif what == "die":
            os._exit(1)
        return None


def _own_host(driver_host: str) -> str:
    """The address of this host as the driver's host sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((driver_host, 9))  # nothing is sent: this only chooses the interface
        return str(probe.getsockname()[0])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def main() -> None:
    settings, number, executor_pid = pickle.load(sys.stdin.buffer)
    server = HomeServer(settings, number, executor_pid)
    pickle.dump(server.address, sys.stdout.buffer)
    sys.stdout.flush()
    os.dup2(2, 1)  # what components print goes where the executor's errors go
    server.serve()
    os._exit(0)  # threads of user code must not keep it


if __name__ == "__main__":
    # What is pickled here must be found by its real name there.
    from framework.core import homes

    homes.main()
