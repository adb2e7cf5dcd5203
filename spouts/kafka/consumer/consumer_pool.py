"""The consumer sessions of a process, and the choice between the two Kafka readers.

The native reader makes no Python object per record. The Python reader does the same through
confluent-kafka's consumer. ``kafka.reader`` selects one: "auto" (native if possible), "native" (or
a ``ConfigError``), "python".
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError
from framework.observe.logs import get_logger
from spouts.kafka.consumer.native_range_consumer import NativeSession, not_carried, why_not_native
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.consumer.record_chunk import RecordChunk
from spouts.kafka.partition_plan_entries import TopicPartition
from spouts.kafka.record_deserialization import Parts

_log = get_logger()

#: The most idle consumers per process: one per spout task that this worker has served recently.
SESSIONS_MAX = 8
#: An idle consumer continues to fetch: records that may never be needed, and up to fifty requests
#: per second if there are none, with the names of all its partitions. After this time it rests: it
#: keeps its connections, but no partitions. ...
REST_AFTER_S = 5.0
#: ... After this time it is closed.
CLOSE_AFTER_S = 300.0
_COST = "reading takes two to five times as much processor time as with the native reader"

#: The reasons for the choice that were logged.
_said: set[str | None] = set()


class Session(Protocol):
    """One consumer with its positions. Used by one read at a time."""

    def read(
        self,
        ranges: Mapping[TopicPartition, Range],
        parts: Parts,
        check_alive: Callable[[], None] = ...,
        takes_out: Callable[[str], bool] = ...,
    ) -> Iterator[RecordChunk]:
        """The records of all ranges, in chunks, with at least these parts.

        * ``check_alive``: called while no records arrive. If it raises, partitions without
          delivered records keep their position, so that the next read continues there.
        * ``takes_out``: whether bad records of a topic are left out. If so, an ``unreadable`` chunk
          takes the place of a batch that cannot be decompressed. Otherwise, such a batch raises
          ``DataLossError``."""

    def connect(self) -> None:
        """Open the connections that the first read needs."""

    def rest(self) -> None:
        """Stop fetching until the next read, which assigns its partitions again."""

    def close(self) -> None: ...


def reader_of(settings: KafkaSettings) -> tuple[str, str | None]:
    """("native" or "python", and the reason why it is not native). Raises ``ConfigError`` if only
    the native reader is wanted, and this process does not have it."""
    if settings.reader == "python":
        return "python", "kafka.reader says so"
    reason = why_not_native()
    setting = not_carried(settings) if reason is None else None
    if setting is not None:
        reason = f"the setting {setting!r} works with the Python reader only"
    if reason is not None and settings.reader == "native":
        raise ConfigError(f"kafka.reader is 'native', but {reason}; correct that, or set it to 'auto'")
    return ("native", None) if reason is None else ("python", reason)


def say_reader(settings: KafkaSettings) -> None:
    """Log one line per process: the reader that tasks use, and its cost."""
    name, reason = reader_of(settings)
    if reason in _said:
        return
    _said.add(reason)
    if reason is None:
        _log.info("source.reader", reader=name)
    else:
        _log.info("source.reader", reader=name, reason=reason, cost=_COST)


def say_fallback(settings: KafkaSettings) -> None:
    """Log one warning per process that reads in Python although the driver would read natively. The
    driver cannot know this: its own line names the native reader."""
    reason = why_not_native()
    if reason is None or reason in _said or settings.reader != "auto" or not_carried(settings) is not None:
        return
    _said.add(reason)
    _log.warning("source.reader_falls_back", host=socket.gethostname(), reason=reason, cost=_COST)


def _made(settings: KafkaSettings, group: str) -> Session:
    name, _ = reader_of(settings)
    return NativeSession(settings, group) if name == "native" else KafkaSession(settings, group)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Sessions with equal keys are interchangeable. ``slot``: the spout task, so that each task
    gets its own positions."""

    group: str
    fingerprint: str
    slot: int


@dataclass(slots=True)
class _Idle:
    session: Session
    since_s: float
    rests: bool = False


class KafkaSessions:
    """The idle sessions of this process. In a Spark worker, tasks run one after the other. In the
    in-process executor, several attempts read concurrently, and a cancelled one may still be
    reading.

    While there are sessions, a separate thread lets them rest, and closes them."""

    def __init__(self, rest_after_s: float = REST_AFTER_S, close_after_s: float = CLOSE_AFTER_S) -> None:
        self._rest_after_s, self._close_after_s = rest_after_s, close_after_s
        self._idle: dict[SessionKey, _Idle] = {}
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._process = os.getpid()

    @contextmanager
    def lend(self, settings: KafkaSettings, group: str, slot: int) -> Iterator[Session]:
        """A session for exclusive use within the block. Raises ``ConfigError`` if it cannot be
        created."""
        key = SessionKey(group, settings.fingerprint(), slot)
        self._forget_inherited()
        with self._lock:
            kept = self._idle.pop(key, None)
        session = kept.session if kept is not None else _made(settings, group)
        try:
            yield session
        finally:
            with self._lock:
                surplus = [self._idle.pop(key).session] if key in self._idle else []
                while len(self._idle) >= SESSIONS_MAX:
                    surplus.append(self._idle.pop(next(iter(self._idle))).session)
                self._idle[key] = _Idle(session, time.monotonic())
                if self._keeper is None:
                    self._keeper = threading.Thread(target=self._keeping, name="ratchet-sessions", daemon=True)
                    self._keeper.start()
            for each in surplus:
                each.close()

    def close(self, group: str | None = None) -> None:
        """Close the idle sessions of one group, or all idle sessions."""
        self._forget_inherited()
        with self._lock:
            keys = [key for key in self._idle if group is None or key.group == group]
            closing = [self._idle.pop(key).session for key in keys]
        for each in closing:
            each.close()

    def __len__(self) -> int:
        return len(self._idle)

    def _keeping(self) -> None:
        while True:
            with self._lock:
                closing, wait_s = self._looked_after(time.monotonic())
                if wait_s is None:
                    self._keeper = None
            for each in closing:
                each.close()
            if wait_s is None:
                return
            # sessions that become idle meanwhile are not due earlier
            time.sleep(min(wait_s, self._rest_after_s))

    def _looked_after(self, now_s: float) -> tuple[list[Session], float | None]:
        """Let due sessions rest. Returns those to close, and the seconds until the next one is due;
        None if none is left."""
        closing = []
        for key, idle in list(self._idle.items()):
            age_s = now_s - idle.since_s
            try:
                if not idle.rests and age_s >= self._rest_after_s:
                    idle.rests = True
                    idle.session.rest()
            except Exception as error:  # noqa: BLE001 - of a client; a new one takes its place
                _log.warning("source.session_dropped", reason=f"{type(error).__name__}: {error}")
                age_s = self._close_after_s
            if age_s >= self._close_after_s:
                closing.append(self._idle.pop(key).session)
        left = [
            idle.since_s + (self._close_after_s if idle.rests else self._rest_after_s) - now_s
            for idle in self._idle.values()
        ]
        return closing, min(left) if left else None

    def _forget_inherited(self) -> None:
        """Start over after a fork. The child must not use the parent's sessions, because
        librdkafka's threads exist only in the parent; and it needs a new lock, because the old one
        may have been held by a thread that does not exist in the child."""
        if self._process != os.getpid():
            self._process, self._lock, self._keeper = os.getpid(), threading.Lock(), None
            self._idle = {}


#: The sessions of this process. They are closed when it exits normally.
sessions = KafkaSessions()
atexit.register(sessions.close)
