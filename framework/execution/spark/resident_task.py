"""A Spark task that stays, and runs small batches one after the other.

A Spark job costs 20 to 40 ms, whatever it does. The resident task connects to the driver and waits
for messages, so the next batch costs one message and its answer (ADR 43).

States of a stay, which is one such job with its task::

                 connects            an attempt
    LAUNCHING ────────────> IDLE ──────────────────> BUSY
        │                   │  ^ ──────────────────── │
        │                   │         its answer      │
        │      given back,  │                         │ lost, cancelled,
        └───────────────> ENDED <─────────────────────┘ or its answer while given back

Invariants:

1. A task has one attempt at a time. An attempt is sent once, to one task: when no answer comes, the
   attempt has failed, and is not sent again.
2. A task lasts no longer than its channel. When the driver closes the channel or is gone, a waiting
   task returns; Spark kills the worker of a busy one, as for any cancelled job.
3. No task stays while a job wants its slot: the slot is given back before such a job begins, and no
   other resident task is launched until the job has ended.
4. Over all runs of this process, fewer tasks stay than the executors have slots. Only a run that is
   alone in its Spark may take the last slot. When executors are lost, tasks leave within seconds.
5. While there is another slot, no batch waits for a task longer than a job costs: neither for a
   busy task, nor for a starting one, which may never connect.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import cloudpickle

from framework.errors import ConfigError, InvariantViolation, RetryableError
from framework.execution.process_channels import Channel, ChannelServer, Credentials, Place, connect
from framework.execution.spark.certificate import new_certificate
from framework.execution.spark.spark_context import PROCESSING_POOL, Spark
from framework.observe.logs import get_logger

_log = get_logger()

#: How long an idle task keeps its slot when others may want it.
IDLE_S = 60.0
#: How long a batch waits for the task to start or become free while there is another slot: as long
#: as a job would cost.
JOB_S = 0.05
#: How long a task may take to connect and identify itself.
CONNECT_S = 10.0
#: How long a waiting task may take to receive a message.
SEND_S = 60.0
#: How long Spark may take to report why a task is gone.
REASON_S = 10.0
#: How long the end of a run waits for its task to end.
CLOSE_S = 10.0
_WATCH_S = 1.0

#: The function that a task runs on a message. Called in the task; the answer is pickled.
Work = Callable[[Any], Any]


@dataclass(frozen=True)
class StayingTask:
    """The resident task. Its result is empty, or says why it could not connect to the driver. An
    error of ``work`` ends it, and so becomes the error of the Spark job. ``prepare`` is called
    first."""

    number: int
    place: Place
    credentials: Credentials
    prepare: Callable[[], Any]
    work: Work

    def __call__(self, items: Iterable[Any]) -> Iterator[str]:
        list(items)  # a task that leaves input unread costs its worker
        self.prepare()
        try:
            channel = connect(self.place, self.credentials, CONNECT_S)
        except (OSError, EOFError) as error:
            yield f"{type(error).__name__}: {error}"
            return
        with channel:
            asked = _exchanged(channel, self.number, CONNECT_S)
            while asked is not None:
                key, pickled = asked
                # Outside of the try: an OSError of user code does not mean that the channel has
                # ended.
                answer = self.work(pickle.loads(pickled))
                asked = _exchanged(channel, (key, answer), SEND_S)


def _exchanged(channel: Channel, answer: Any, within_s: float) -> Any:
    """Send the answer to the driver, and receive its next message; None when the channel has
    ended."""
    try:
        channel.send(answer, within_s)
        return channel.receive(None)
    except (OSError, EOFError):
        return None


class _State(Enum):
    LAUNCHING = "launching"
    IDLE = "idle"
    BUSY = "busy"
    ENDED = "ended"


@dataclass(eq=False, kw_only=True)
class _Stay:
    """One resident task with its Spark job.

    * ``working_on``: the attempt that it got last.
    * ``over``: set when the Spark job has ended, with ``error`` if it failed.
    * ``unwanted``: this process ended it on purpose."""

    number: int
    group: str
    state: _State = _State.LAUNCHING
    channel: Channel | None = None
    working_on: Hashable = None
    idle_since: float = 0.0
    unwanted: bool = False
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """End the channel. While the task is BUSY, the thread that waits for its answer
        closes it."""
        if self.channel is not None and self.state is not _State.ENDED:
            self.channel.sever()
            if self.state is not _State.BUSY:
                self.channel.close()
        self.state = _State.ENDED


class _Slots:
    """Counts the tasks that stay, over all runs of this process (invariant 4)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, most: int) -> bool:
        with self._lock:
            free = self._taken < most
            self._taken += free
            return free

    def put_back(self) -> None:
        with self._lock:
            self._taken -= 1

    def exceed(self, most: int) -> bool:
        with self._lock:
            return self._taken > most


_slots = _Slots()


class ResidentTask:
    """The resident task as a run's executor sees it. Methods may be called from any thread.

    * ``prepare``: called when a task begins; pickled.
    * ``work``: called for each message; pickled.
    * ``dead``: the cancelled attempts; each is added before ``cancel`` is called for it.
    * ``idle_s``: how long an idle task keeps its slot. By default ``IDLE_S``, and for ever in a
      local Spark of the run's own, where no other program wants the slot."""

    def __init__(
        self,
        spark: Spark,
        name: str,
        *,
        prepare: Callable[[], Any],
        work: Work,
        dead: Container[Hashable],
        idle_s: float | None = None,
    ) -> None:
        self._spark = spark
        self._name = name
        self._prepare = prepare
        self._work = work
        self._dead = dead
        self._idle_s = idle_s
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._stay: _Stay | None = None  # gets the batches
        self._living: list[_Stay] = []  # including those that are leaving
        self._waiting: set[Hashable] = set()  # attempts that wait for a task
        self._jobs = 0  # number of jobs that want the slot
        self._slots = 1
        self._usable = False
        self._closed = threading.Event()
        self._opening = threading.Lock()
        self._server: ChannelServer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._credentials = Credentials.new(None)

    def start(self) -> None:
        """Launch a task as soon as one may stay. Does not wait for it. Called once, when the
        executors have run a job, and no other job wants their slots."""
        self._slots = self._spark.slots
        threading.Thread(target=self._keep, name="ratchet-keeper", daemon=True).start()
        with self._changed:
            self._usable = True
            if not self._jobs and not self._closed.is_set():
                self._launch()

    def run(self, attempt: Hashable, message: Any) -> Any:
        """Send a message and return the answer, which is never None. Returns None when no task may
        stay now: then nothing was sent, and the caller should run a job.

        Raises the error of the Spark job when the task was lost or failed, and ``RetryableError``
        when only its channel was lost, or the attempt was cancelled."""
        stay = self._taken(attempt)
        if stay is None:
            return None
        channel = stay.channel
        if channel is None:
            raise InvariantViolation("a task without a channel was taken for idle")
        try:
            # pickled as Spark pickles job functions
            channel.send((attempt, cloudpickle.dumps(message)), SEND_S)
            answered, answer = channel.receive(None)
            if answered != attempt:
                raise InvariantViolation(f"the task was sent {attempt} and answered {answered}")
        except BaseException as error:
            with self._changed:
                self._end(stay)
            channel.close()
            if isinstance(error, (OSError, EOFError)):
                raise self._reason(stay, error) from error
            raise
        self._put_back(stay)
        return answer

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Give the slot to a job. A busy task leaves after its answer; until then the job waits in
        Spark's queue."""
        with self._changed:
            self._jobs += 1
            self._dismiss()
        try:
            yield
        finally:
            with self._changed:
                self._jobs -= 1

    def cancel(self, attempt: Hashable) -> None:
        """End the task that works on an attempt, or the task whose launch the attempt waits for.
        Spark kills the worker if it does not end. Returns without waiting."""
        with self._changed:
            ended = [each for each in self._living if each.state is _State.BUSY and each.working_on == attempt]
            if attempt in self._waiting and self._stay is not None and self._stay.state is _State.LAUNCHING:
                ended.append(self._stay)  # its worker may hang before it connects
            for stay in ended:
                stay.unwanted = True
                self._end(stay)
            self._changed.notify_all()
        self._cancel_jobs(ended)

    def close(self) -> None:
        """End the task, and wait for its end. Safe to call twice."""
        with self._changed:
            self._closed.set()
            self._dismiss()
            living = list(self._living)
            working = [each for each in living if each.state is not _State.ENDED]
            for stay in working:
                self._end(stay)
        self._cancel_jobs(working)
        until = time.monotonic() + CLOSE_S
        for stay in living:
            stay.over.wait(max(until - time.monotonic(), 0))
        with self._opening:
            if self._server is not None:
                self._server.close()
            if self._folder is not None:
                self._folder.cleanup()
            self._server = self._folder = None

    # --- which task an attempt goes to ------------------------------------------------------------

    def _taken(self, attempt: Hashable) -> _Stay | None:
        """The task, made BUSY with the attempt; None when the attempt should run as a job. Waits
        for a launch or a busy task: for a moment if there is another slot, otherwise without limit.
        """
        until = time.monotonic() + JOB_S
        with self._changed:
            self._waiting.add(attempt)
            try:
                while self._usable and not self._jobs and not self._closed.is_set():
                    if attempt in self._dead:
                        raise RetryableError(f"{attempt} was cancelled while it waited for a task")
                    stay = self._stay
                    if stay is not None and stay.channel is not None and stay.state is _State.IDLE:
                        if not stay.channel.has_ended():
                            stay.state, stay.working_on = _State.BUSY, attempt
                            return stay
                        self._end(stay)  # the task was lost while it was idle
                        stay = None
                    stay = stay or self._launch()
                    if stay is None:
                        return None
                    left = until - time.monotonic() if self._slots > 1 else None
                    if left is not None and left <= 0:
                        return None
                    self._changed.wait(left)
                    if stay.error is not None and stay.channel is None and not stay.unwanted:
                        raise stay.error  # the task did not start
                return None
            finally:
                self._waiting.discard(attempt)

    def _put_back(self, stay: _Stay) -> None:
        with self._changed:
            if stay.state is _State.BUSY:
                stay.state, stay.idle_since = _State.IDLE, time.monotonic()
                if stay is not self._stay:
                    stay.end()  # its slot is wanted
            self._changed.notify_all()

    def _dismiss(self) -> None:
        """End the task after its current answer. The caller holds the lock."""
        stay, self._stay = self._stay, None
        if stay is not None:
            stay.unwanted = True
            if stay.state is not _State.BUSY:
                stay.end()
        self._changed.notify_all()

    def _end(self, stay: _Stay) -> None:
        """Stop sending to a task, and end its channel. The caller holds the lock."""
        if stay is self._stay:
            self._stay = None
        stay.end()
        self._changed.notify_all()

    def _reason(self, stay: _Stay, error: BaseException) -> BaseException:
        """Why a task is gone. Spark may need a moment to report it."""
        stay.over.wait(0 if stay.unwanted else REASON_S)
        return stay.error or RetryableError(
            f"the channel to Spark's task was lost: {str(error) or type(error).__name__}"
        )

    # --- stays, each with a Spark job in a thread of its own --------------------------------------

    def _launch(self) -> _Stay | None:
        """Launch a resident task, if one is allowed. The caller holds the lock."""
        if not _slots.take(self._stays_max):
            return None
        number = next(self._numbers)
        self._stay = stay = _Stay(number=number, group=f"{self._name} stays {number}")
        self._living.append(stay)
        threading.Thread(target=self._hold, args=(stay,), name=f"ratchet-{stay.group}", daemon=True).start()
        return stay

    @property
    def _stays_max(self) -> int:
        return self._slots - 1 if self._slots > 1 else int(self._spark.alone)

    def _hold(self, stay: _Stay) -> None:
        """Run a resident task's job to its end."""
        unreachable = ""
        try:
            self._slots = self._spark.slots
            task = StayingTask(stay.number, self._open(), self._credentials, self._prepare, self._work)
            context = self._spark.context
            context.setJobGroup(stay.group, stay.group, True)
            context.setLocalProperty("spark.scheduler.pool", PROCESSING_POOL)
            unreachable = "".join(context.parallelize([stay.number], 1).mapPartitions(task).collect())
        except (OSError, ConfigError) as error:
            unreachable = str(error)
        except Exception as error:  # noqa: BLE001 - Spark wraps every error; the thread that waits for the task raises it
            stay.error = error
        with self._changed:
            wanted = not (stay.unwanted or self._closed.is_set())
            if wanted and unreachable:
                self._usable = False
                _log.warning("resident.unreachable", run=self._name, reason=unreachable, instead="jobs")
            elif wanted:
                _log.warning("resident.lost", run=self._name)
            self._living.remove(stay)
            stay.over.set()
            self._end(stay)
        _slots.put_back()

    def _open(self) -> Place:
        """The place where tasks connect to this process. Raises ``OSError`` or ``ConfigError`` when
        no socket can be opened."""
        with self._opening:
            if self._closed.is_set():
                raise ConnectionAbortedError("the run is over")
            if self._server is None:
                place: Place
                if self._spark.local:
                    self._folder = tempfile.TemporaryDirectory(prefix="ratchet-task-")
                    place = f"{self._folder.name}/driver"
                else:
                    self._credentials = Credentials.new(new_certificate())
                    place = (self._spark.bind_address, 0)
                self._server = ChannelServer(place, self._credentials, self._arrived, CONNECT_S)
                self._server.start()
            bound = self._server.place
            return bound if isinstance(bound, str) else (self._spark.driver_host, bound[1])

    def _arrived(self, channel: Channel) -> None:
        """Called when a task has connected. Ends it if it is not wanted any more."""
        try:
            number = channel.receive(CONNECT_S)
        except (OSError, EOFError):
            number = None
        with self._changed:
            stay = self._stay
            if stay is not None and stay.number == number and stay.state is _State.LAUNCHING:
                stay.channel, stay.state, stay.idle_since = channel, _State.IDLE, time.monotonic()
                self._changed.notify_all()
                return
        channel.sever()
        channel.close()

    def _keep(self) -> None:
        """Give the slot back after some idle time, and when the run may not keep it any more. When
        executors are lost, a job may need the slot."""
        while not self._closed.wait(_WATCH_S):
            before = slots = self._slots
            with contextlib.suppress(Exception):  # Spark may be stopped meanwhile
                if not self._spark.local:
                    slots = self._spark.slots
            with self._changed:
                self._slots = slots
                stay = self._stay
                if stay is None:
                    continue
                idle_s = time.monotonic() - stay.idle_since if stay.state is _State.IDLE else 0.0
                if idle_s > self._idle_max_s or slots < before or _slots.exceed(self._stays_max):
                    self._dismiss()

    @property
    def _idle_max_s(self) -> float:
        if self._idle_s is not None:
            return self._idle_s
        return math.inf if self._spark.alone and self._spark.local else IDLE_S

    def _cancel_jobs(self, stays: Iterable[_Stay]) -> None:
        context = self._spark.active
        if context is not None:
            for stay in stays:
                context.cancelJobGroup(stay.group)
