"""What a batch reads of each partition, and how that is written down.

The canonical text of a plan is its JSON with sorted keys and no spaces. The digest is a hash of
that text, so the same ranges have the same digest, whatever their order. A short plan is stored as
JSON that anybody can read. A longer one is stored compressed: a plan has an entry for every
partition, and most of it repeats (ADR 44).

A plan is never changed once it is made: where a planner may change what it has returned, there is
a copy (``own_copy``). A wide plan may share the entries of unmoved partitions with the plan before
it. So the text of a wide plan is made once, and that of a shared entry once.
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
#: How a document has a plan: as it is, or packed.
StoredPlan = Union[Plan, str]

#: Plans whose text is longer are packed.
PLAIN_BYTES_MAX = 4_096
#: A packed plan that is larger than this is none of ours: ten times what would fit into a znode.
TEXT_BYTES_MAX = 64 << 20
#: The texts of plans of so many partitions are remembered; that of a narrow one is soon made again.
WIDE_PARTITIONS = 64
#: The plans in flight, and the last one that was committed.
_KNOWN_MAX = 8
_LEVEL = 1  # a higher one takes twice the time, for a tenth of the bytes
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
    """A copy of a plan that nobody else can change, as it will be read from the store. Raises
    ``TypeError`` or ``ValueError`` for what is not JSON-able."""
    copy: Plan = json.loads(json.dumps(plan, allow_nan=False))
    return copy


def plan_digest(plan: Plan) -> str:
    """Hash a plan. The same ranges give the same hash, whatever their order."""
    return _texts.of(plan).digest


def stored_plan(plan: Plan) -> StoredPlan:
    """A plan as a document has it: itself when it is short, else its text, compressed, in
    base64."""
    return _texts.of(plan).stored


def plan_of(stored: Any) -> Plan:
    """The reverse of ``stored_plan``. Raises ``ValueError`` for what is not a plan."""
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
