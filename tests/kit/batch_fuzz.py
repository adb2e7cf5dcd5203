"""A fuzzer of record batches: a proxy before a real broker changes what consumers fetch.

``python -m tests.kit.batch_fuzz --minutes 60 --seed 1``: bytes that the checksum of a batch covers
are changed, and the reader that is native and the one that is not end in an error of ours, or with
what was sent. Nothing proves a change of other bytes, and librdkafka 2.16 ends the process at some
(an assertion in ``rd_slice_narrow_copy``): a broker is trusted for them.
"""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import DataLossError, RetryableError
from integration import EmbeddedServers
from integration.folder_permissions import open_folder
from spouts.kafka.consumer import range_consumer as limits
from spouts.kafka.consumer.native_range_consumer import NativeSession, why_not_native
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.fuzzing import Counts, go_on
from tests.kit.topics import Topics

#: The readers that there are: the compiled one is optional.
SESSIONS = [NativeSession, KafkaSession] if why_not_native() is None else [KafkaSession]
RECORDS = 200
_BATCH = 20
#: What a batch has before the bytes that its checksum covers, and before its records.
_BEFORE_CHECKSUM, _BEFORE_RECORDS = 21, 61
_FETCH, _METADATA, _FIND_COORDINATOR = 1, 3, 10


def expected() -> list[bytes]:
    return [b"value %d " % number + b"x" * (number % 50) for number in range(RECORDS)]


def fill(topics: Topics, topic: str) -> None:
    """Make the topic, and write into it what is expected."""
    topics.create(topic)
    for first in range(0, RECORDS, _BATCH):
        topics.send(topic, expected()[first : first + _BATCH])


class LyingBroker:
    """Forwards one broker's answers, and changes some of what was fetched."""

    def __init__(self, target: str, chance: random.Random) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._chance = (host, int(port)), chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.changed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, 60)
            except OSError:
                return
            server.settimeout(None)
            kinds: dict[int, int] = {}
            threading.Thread(target=self._requests, args=(client, server, kinds), daemon=True).start()
            threading.Thread(target=self._answers, args=(server, client, kinds), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, kinds: dict[int, int]) -> None:
        for frame in _frames(client):
            kind, _, number = struct.unpack_from(">hhi", frame)
            kinds[number] = kind
            _send(server, frame)
        _end(server)

    def _answers(self, server: socket.socket, client: socket.socket, kinds: dict[int, int]) -> None:
        for frame in _frames(server):
            kind = kinds.pop(struct.unpack_from(">i", frame)[0], -1)
            if kind in (_METADATA, _FIND_COORDINATOR):
                frame = frame.replace(struct.pack(">i", self._target[1]), struct.pack(">i", self.port))
            elif kind == _FETCH:
                frame = self._lie(bytearray(frame))
            _send(client, frame)
        _end(client)

    def _lie(self, frame: bytearray) -> bytes:
        found = [at for at in range(len(frame) - _BEFORE_RECORDS) if _is_batch(frame, at)]
        if not found or self._chance.random() < 0.2:
            return bytes(frame)
        self.changed += 1
        for _ in range(self._chance.choice([1, 1, 2, 8])):
            batch = self._chance.choice(found)
            end = batch + 12 + struct.unpack_from(">i", frame, batch + 8)[0]
            at = self._chance.randrange(batch + _BEFORE_CHECKSUM, end)
            frame[at] = self._chance.choice([0, 1, 0x7F, 0x80, 0xFF, self._chance.randrange(256)])
        return bytes(frame)


def _is_batch(frame: bytearray, at: int) -> bool:
    """Whether a batch of this topic begins there."""
    offset, size = struct.unpack_from(">qi", frame, at)
    (last,), (records,) = struct.unpack_from(">i", frame, at + 23), struct.unpack_from(">i", frame, at + 57)
    known = 0 <= offset < RECORDS and 0 < records <= _BATCH and last == records - 1
    return known and frame[at + 16] == 2 and 49 <= size <= len(frame) - at - 12


def _frames(source: socket.socket) -> Iterator[bytes]:
    try:
        stream = source.makefile("rb")
        while head := stream.read(4):
            yield stream.read(struct.unpack(">i", head)[0])
    except (OSError, struct.error):
        return
    finally:
        source.close()


def _end(connection: socket.socket) -> None:
    """Close it, and wake the thread that reads from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _send(to: socket.socket, frame: bytes) -> None:
    try:
        to.sendall(struct.pack(">i", len(frame)) + frame)
    except OSError:
        return


def fuzz(servers: str, topic: str, seed: int) -> Counts:
    """One read by a lying broker."""
    chance = random.Random(seed)
    reader = chance.choice(SESSIONS)
    broker = LyingBroker(servers, chance)
    session = reader(KafkaSettings(f"127.0.0.1:{broker.port}", {}), "g")
    values: list[bytes] = []
    ended = "right data"
    try:
        for chunk in session.read({(topic, 0): Range(0, RECORDS)}, EVERYTHING):
            raw = chunk.raw("value")
            values += raw if isinstance(raw, list) else raw.to_pylist()
    except (DataLossError, RetryableError) as error:
        ended = type(error).__name__
    finally:
        session.close()
        broker.close()
    full = expected() if ended == "right data" else expected()[: len(values)]
    assert values == full, f"seed {seed}: {len(values)} values, which are not those that were sent"
    if broker.changed:
        ended += " after changes"
    return collections.Counter([f"{reader.__name__}: {ended}"])


if __name__ == "__main__":
    limits.SILENCE_MAX_S = 1.0  # an attempt that waits for a broker that lies is an error soon
    with open_folder() as folder, EmbeddedServers(folder) as servers:
        fill(Topics(servers.bootstrap_servers), "fuzzed")
        go_on(__doc__, lambda seed: fuzz(servers.bootstrap_servers, "fuzzed", seed))
