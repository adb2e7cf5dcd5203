"""Record batches as Arrow IPC streams, and buffers of them that spill into a temporary file
(ADR 124).

Invariants:

1. A buffer has at most ``MEMORY_BYTES`` of rows, and one more record batch, in memory.
2. The file has no name. It is in the folder ``TMPDIR``, and disappears with the last object that
   refers to it, also if the process is killed.
3. Each read of a buffer returns its rows unchanged, in the order in which they were appended.
4. Rows that wait in a file are pickled in the form of the file: encoded and compressed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Union

import pyarrow as pa

from framework.errors import RetryableError

#: The most bytes of rows that a buffer has in memory.
MEMORY_BYTES = 32 << 20

_IPC_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
#: Below this size, compression costs more than it saves.
_COMPRESS_FROM_BYTES = 4096


class SpillFile:
    """A file without a name, to which content is appended. ``what``: its content, for messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._file: Any = None
        self.end = 0

    def append(self, content: bytes) -> int:
        """Returns the offset of the content. Raises ``RetryableError`` if the disk does not take
        it."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="ratchet-rows-", buffering=0)  # noqa: SIM115 - __del__ closes it
            left = memoryview(content)
            while left:
                left = left[os.pwrite(self._file.fileno(), left, self.end + len(content) - len(left)) :]
        except OSError as error:
            raise RetryableError(
                f"{self._what} than fit in memory, and {tempfile.tempdir or 'no folder'} does not take them ({error}); free "
                "some space there, or set TMPDIR to another folder"
            ) from error
        start, self.end = self.end, self.end + len(content)
        return start

    def read(self, offset: int, length: int) -> bytes:
        """Raises ``RetryableError`` if the disk does not return it."""
        try:
            return os.pread(self._file.fileno(), length, offset)
        except OSError as error:
            raise RetryableError(f"{tempfile.tempdir} does not return rows that wait there: {error}") from error

    def __del__(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


@dataclass(frozen=True, slots=True)
class SpilledBatch:
    """An encoded record batch in a temporary file."""

    file: SpillFile
    offset: int
    length: int

    def read(self) -> bytes:
        return self.file.read(self.offset, self.length)


#: The rows of a record batch: themselves, encoded, or in a file.
Payload = Union[pa.RecordBatch, bytes, SpilledBatch]


class Spill:
    """Decides which payloads stay in memory, and writes the others into a file. ``what``: the
    beginning of a message about a full disk, such as "count: it emits more rows"."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bytes = 0
        self._file: SpillFile | None = None

    def keep(self, payload: Payload) -> Payload:
        """Returns the payload, or its place in the file. Raises ``RetryableError`` if the disk is
        full."""
        if isinstance(payload, SpilledBatch):
            return payload
        size = len(payload) if isinstance(payload, bytes) else payload.nbytes
        # Once rows are in the file, a few rows of a large batch would keep the whole batch in
        # memory.
        if self._file is None and self._bytes + size <= MEMORY_BYTES:
            self._bytes += size
            return payload
        if self._file is None:
            self._file = SpillFile(self._what)
        encoded = payload if isinstance(payload, bytes) else encode_batch(payload)
        return SpilledBatch(self._file, self._file.append(encoded), len(encoded))


class RowBuffer:
    """Record batches in the order in which they were appended. Can be read several times, and
    pickled. ``what``: as in ``Spill``. ``nbytes``: of the rows, as in Arrow."""

    def __init__(self, what: str, batches: Iterable[pa.RecordBatch] = ()) -> None:
        self.what = what
        self.nbytes = 0
        self._spill = Spill(what)
        self._kept: list[Payload] = []
        for each in batches:
            self.append(each)

    @classmethod
    def _of_payloads(cls, what: str, nbytes: int, payloads: Sequence[Payload]) -> RowBuffer:
        made = cls(what)
        made.nbytes = nbytes
        made._kept = list(map(made._spill.keep, payloads))
        return made

    def append(self, batch: pa.RecordBatch) -> None:
        self.nbytes += batch.nbytes
        self._kept.append(self._spill.keep(batch))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return map(decode_batch, self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_large(self) -> bool:
        """Whether the rows exceed the bound for memory."""
        return self.nbytes > MEMORY_BYTES

    def __reduce__(self) -> tuple[Any, ...]:
        payloads = [each.read() if isinstance(each, SpilledBatch) else each for each in self._kept]
        return RowBuffer._of_payloads, (self.what, self.nbytes, payloads)


def encode_batch(batch: pa.RecordBatch) -> bytes:
    """Encode one record batch with its schema as an Arrow IPC stream, compressed if that saves more
    than it costs."""
    sink = pa.BufferOutputStream()
    options = _IPC_OPTIONS if batch.nbytes >= _COMPRESS_FROM_BYTES else None
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def decode_batch(payload: Payload) -> pa.RecordBatch:
    if isinstance(payload, pa.RecordBatch):
        return payload
    with pa.ipc.open_stream(payload.read() if isinstance(payload, SpilledBatch) else payload) as reader:
        return reader.read_next_batch()
