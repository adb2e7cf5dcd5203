"""A source's knowledge of planned ranges: for tools, and for leaving single records out of a
batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A plan's entry for one partition: a JSON-able mapping, persisted unchanged.
Meta = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A record in the source's form. ``timestamp_ms``: since the Unix epoch."""

    partition: str
    offset: int
    timestamp_ms: int | None = None
    key: bytes | None = None
    value: bytes | None = None


class SourceRanges:
    """Operations on the entries of plans. Each method is optional: the default says that this
    source does not support it. All are called on the driver or in a tool; only ``peek`` does I/O.
    """

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        """Split a range into two halves, in order. None when it is a single record, or cannot be
        split."""
        return None

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta | None:
        """Return the range from the start of ``first``, or with ``after`` from the end of
        ``first``, to the end of ``last``. Both are ranges of one partition. None when this source
        cannot join ranges, or when they are not of one log without a gap. For ``verify``."""
        return None

    def beginning(self, meta: Meta) -> Meta | None:
        """Return the empty range that ends where ``meta`` begins: the entry of an earlier plan that
        had read up to there. None, the default, when this source cannot tell."""
        return None

    def narrowed(self, whole: Mapping[str, Meta], part: Mapping[str, Meta]) -> Mapping[str, Meta]:
        """Adapt the information in the entries of ``part`` about the plan as a whole. ``part``
        holds the first records of ``whole``, with the ``beginning`` of each range that it lacks.
        The default changes nothing."""
        return part

    def stages(self, ranges: Mapping[str, Meta]) -> Sequence[Mapping[str, Meta]]:
        """Return the same ranges in reading order, if some are read before others. The default
        reads all concurrently. For ``verify`` and ``rebuild``."""
        return [ranges]

    def offsets(self, meta: Meta) -> range | None:
        """Return the offsets of a range, if this source can leave out single records; None, the
        default, if it cannot. A source that can must copy ``LEFT_OUT`` and ``LEFT_OUT_FROM`` from
        each entry to that of the next plan (``leaving_out_too``), including in ``joined`` and
        ``split``, and its reader must emit no row for the offsets in ``LEFT_OUT``."""
        return None

    def takes_out(self, partition: str) -> bool:
        """Whether a record of this partition may be left out because its value was refused: the
        user set ``on_bad_record="skip"`` or ``"dead_letter"``. If true, ``offsets``, ``split``,
        ``joined`` and ``beginning`` must work, and the reader counts records with a reason in
        ``REFUSED`` as bad, and makes them dead letters if these are configured."""
        return False

    def peek(self, partition: str, meta: Meta) -> SourceRecord | None:
        """Return the first record of a range in the source's form, for display. None when there is
        none, or this source cannot show it. Raises ``RetryableError`` when the source does not
        answer. For ``explain``."""
        return None
