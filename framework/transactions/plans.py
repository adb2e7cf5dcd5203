"""Plans: the ranges that a batch reads of each partition, and their stored form.

The canonical text of a plan is its JSON with sorted keys and no spaces. The digest is a hash of
that text, so the same ranges have the same digest, whatever their order. A short plan is stored as
readable JSON. A longer one is stored compressed: a plan has an entry for every partition, with much
repetition (ADR 44).

A plan never changes once it is made: if a planner might modify its result, it is copied
(``own_copy``). A wide plan may share the entries of unmoved partitions with the previous plan. So
the text of each wide plan, and of each shared entry, is made only once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Union

#: Partition -> its entry.
Plan = Mapping[str, Mapping[str, Any]]
#: A plan as stored in a document: plain or packed.
StoredPlan = Union[Plan, str]

#: Plans whose text is longer are packed.
PLAIN_BYTES_MAX = 4_096
#: The largest valid packed plan: ten times the size that fits into a znode.
TEXT_BYTES_MAX = 64 << 20
#: The texts of plans with this many partitions are cached; that of a narrow plan is quickly made
#: again.
WIDE_PARTITIONS = 64
#: Enough for the plans in flight, and the last committed one.
_KNOWN_MAX = 8
_LEVEL = 1  # a higher level takes twice the time, for a tenth fewer bytes
_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class _Written(NamedTuple):
    plan: Plan
    digest: str
    stored: StoredPlan


class _Texts:
    """The texts of the last wide plans, and of the entries of the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._known: deque[_Written] = deque(maxlen=_KNOWN_MAX)

    def of(self, plan: Plan) -> _Written:
        if len(plan) < WIDE_PARTITIONS:
            return _written(plan, _json(plan))
        with self._lock:
            for each in self._known:
                if each.plan is plan:
                    return each
            written = _written(plan, self._text(plan))
            self._known.append(written)
            return written

    def _text(self, plan: Plan) -> str:
        known, entries = self._entries, {}
        parts = []
        for partition, meta in sorted(plan.items()):
            entry = known.get(partition)
            if entry is None or entry[0] is not meta:
                entry = meta, f"{_json(partition)}:{_json(meta)}"
            entries[partition] = entry
            parts.append(entry[1])
        self._entries = entries
        return f"{{{','.join(parts)}}}"


def _written(plan: Plan, canonical: str) -> _Written:
    text = canonical.encode()
    packed = len(text) > PLAIN_BYTES_MAX
    stored = base64.b64encode(zlib.compress(text, _LEVEL)).decode() if packed else plan
    return _Written(plan, hashlib.sha256(text).hexdigest()[:16], stored)


_texts = _Texts()


def own_copy(plan: Plan) -> Plan:
    """A private copy of a plan, in the form in which it will be read from the store. Raises
    ``TypeError`` or ``ValueError`` for values that are not JSON-able."""
    copy: Plan = json.loads(json.dumps(plan, allow_nan=False))
    return copy


def plan_digest(plan: Plan) -> str:
    """Hash a plan. The same ranges give the same hash, whatever their order."""
    return _texts.of(plan).digest


def stored_plan(plan: Plan) -> StoredPlan:
    """The form of a plan in a document: unchanged when it is short, else its text, compressed, in
    base64."""
    return _texts.of(plan).stored


def plan_of(stored: Any) -> Plan:
    """The reverse of ``stored_plan``. Raises ``ValueError`` when it is not a plan."""
    plan: Any = stored
    if isinstance(stored, str):
        try:
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(base64.b64decode(stored, validate=True), TEXT_BYTES_MAX)
        except (zlib.error, binascii.Error) as error:
            raise ValueError(f"not a packed plan: {error}") from error
        if not unpacking.eof:
            raise ValueError("not a packed plan: it is cut off, or too large")
        try:
            plan = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"not a packed plan: {error}") from error
    if not isinstance(plan, dict):
        raise ValueError(f"not a plan, but {type(plan).__name__}")
    return plan
