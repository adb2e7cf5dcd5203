"""The sessions that a process keeps, and the choice between the two readers of Kafka.

The native reader makes no Python object per record. The Python reader does the same through
confluent-kafka's consumer. ``kafka.reader`` says which: "auto" (native where it can), "native" (or
a ``ConfigError``), "python".
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from framework.clients.kafka import KafkaSettings
from framework.errors import ConfigError
from framework.observe.logs import get_logger
from spouts.kafka.chunk import RecordChunk
from spouts.kafka.format import Parts
from spouts.kafka.native_session import NativeSession, not_carried, why_not_native
from spouts.kafka.partitions import TopicPartition
from spouts.kafka.session import KafkaSession, Range

_log = get_logger()

#: Idle consumers to keep per process: one per spout task that this worker has served lately.
SESSIONS_MAX = 8
#: An idle consumer still fetches records that may never be wanted. It is closed after this time.
IDLE_MAX_S = 300.0
_COST = "reading takes two to five times as much processor time as with the native reader"

#: The reasons for a choice that were logged.
_said: set[str | None] = set()


class Session(Protocol):
    """One consumer with its positions. Used by one read at a time."""

    def read(self, ranges: Mapping[TopicPartition, Range], parts: Parts) -> Iterator[RecordChunk]:
        """The records of all ranges, in chunks, with at least these parts."""

    def connect(self) -> None:
        """Open the connections that the first read needs."""

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
    """Log one line per process: which reader tasks use, and what that costs."""
    name, reason = reader_of(settings)
    if reason in _said:
        return
    _said.add(reason)
    if reason is None:
        _log.info("source.reader", reader=name)
    else:
        _log.info("source.reader", reader=name, reason=reason, cost=_COST)


def say_fallback(settings: KafkaSettings) -> None:
    """Log one warning per process if it reads in Python what the driver would read natively. The
    driver cannot know: its own line names the native reader."""
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
    finds its own positions."""

    group: str
    fingerprint: str
    slot: int


class KafkaSessions:
    """The idle sessions of this process. In a Spark worker, tasks run one after the other. In the
    in-process executor, several attempts read at once, and a cancelled one may still be reading."""

    def __init__(self) -> None:
        self._idle: dict[SessionKey, tuple[Session, float]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    @contextmanager
    def lend(self, settings: KafkaSettings, group: str, slot: int) -> Iterator[Session]:
        """A session for exclusive use until the block ends. Raises ``ConfigError`` if it cannot be
        created."""
        key = SessionKey(group, settings.fingerprint(), slot)
        with self._lock:
            self._forget_inherited()
            kept = self._idle.pop(key, None)
        session = kept[0] if kept is not None else _made(settings, group)
        try:
            yield session
        finally:
            now = time.monotonic()
            with self._lock:
                surplus = [self._idle.pop(key)[0]] if key in self._idle else []
                for other in [each for each, (_, since) in self._idle.items() if now - since > IDLE_MAX_S]:
                    surplus.append(self._idle.pop(other)[0])
                while len(self._idle) >= SESSIONS_MAX:
                    surplus.append(self._idle.pop(next(iter(self._idle)))[0])
                self._idle[key] = session, now
            for each in surplus:
                each.close()

    def close(self, group: str | None = None) -> None:
        """Close the idle sessions of one group, or all idle sessions."""
        with self._lock:
            self._forget_inherited()
            keys = [key for key in self._idle if group is None or key.group == group]
            closing = [self._idle.pop(key)[0] for key in keys]
        for each in closing:
            each.close()

    def __len__(self) -> int:
        return len(self._idle)

    def _forget_inherited(self) -> None:
        """Forget the parent's sessions after a fork. They must not be used here, because
        librdkafka's threads exist only in the parent."""
        if self._process != os.getpid():
            self._idle.clear()
            self._process = os.getpid()


#: The sessions of this process. They are closed when it exits normally.
sessions = KafkaSessions()
atexit.register(sessions.close)
