"""A state, opened for reading all rows as of one transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from framework.topology.fencing import Header

if TYPE_CHECKING:
    import pyarrow.dataset as ds


@dataclass(frozen=True, slots=True)
class HeldFile:
    """One Parquet file of a table. ``path``: absolute. ``size``: in bytes. ``partition``: the
    values of the partition columns, which the file itself does not have, as text; None: null."""

    path: Path
    rows: int
    size: int
    partition: dict[str, str | None] = field(default_factory=dict)


class StateReading(ABC):
    """A state that is open for reading. Made by ``InspectableState.reading``, and used by one
    thread."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns: of a map the key, then the value. Raises ``ConfigError`` if they have no
        types."""

    @abstractmethod
    def header(self) -> Header:
        """The header of the reading: as of its opening, if the store supports that."""

    @abstractmethod
    def rows(self, txid: int, keys: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows as transaction ``txid`` left them, in any order. ``keys``: only these, as
        ``KeyedState.key_of`` takes them; a key without a value has no row.

        Raises ``MovedOnError``, possibly at the very end, when the state no longer holds them: so
        use no row before the end."""

    def files(self, txid: int) -> list[HeldFile] | None:
        """The files that hold the rows as of ``txid``; None if the state is no table of files.
        Raises as ``rows``."""
        return None

    def dataset(self, files: Sequence[HeldFile]) -> ds.Dataset:
        """These files as a pyarrow dataset, with the partition columns filled in."""
        raise NotImplementedError
