"""Cuts a record to the size limit of a topic."""

from __future__ import annotations

from framework.topology.dead_letters import CUT_HEADER
from sinks.kafka.delivery import KafkaRecord

#: The most bytes that the protocol adds to a record and its batch, and to each header.
_OVERHEAD_BYTES, _HEADER_BYTES = 256, 10
#: The smallest part that is cut, the shown length of a header's name, and the most headers that are
#: cut.
_CUT_MIN, _NAME_SHOWN, _HEADERS_CUT_MAX = 200, 60, 10


def fitted(record: KafkaRecord, bytes_max: int) -> KafkaRecord:
    """The record, or, if it is larger than ``bytes_max``, a copy whose largest parts are cut and
    listed in ``CUT_HEADER``. If that is not enough, the first headers are left out. Other parts are
    unchanged.

    >>> record = fitted(KafkaRecord(b"k", b"v" * 2_000, [("h", b"1")]), 1_000)
    >>> record.key, len(record.value) < 1_000, record.headers[-1]
    (b'k', True, ('ratchet.cut', b'value of 2000 bytes'))
    """
    parts: list[bytes | None] = [record.value, record.key, *(value for _, value in record.headers)]
    names = ["value", "key", *(f"header {name[:_NAME_SHOWN]}" for name, _ in record.headers)]
    sizes = [len(part) if part is not None else 0 for part in parts]
    header_bytes = [_HEADER_BYTES + len(name.encode()) for name, _ in record.headers]
    over = sum(sizes) + sum(header_bytes) + _OVERHEAD_BYTES - bytes_max
    if over <= 0:
        return record
    over += _HEADER_BYTES + len(CUT_HEADER)
    cut: list[str] = []
    large_headers = sorted(range(2, len(parts)), key=lambda each: -sizes[each])[:_HEADERS_CUT_MAX]
    for index in sorted([0, 1, *large_headers], key=lambda each: -sizes[each]):
        part = parts[index]
        if over <= 0 or part is None or len(part) < _CUT_MIN:
            break
        cut.append(f"{names[index]} of {sizes[index]} bytes")
        over += len(cut[-1].encode()) + 2
        parts[index] = part[: max(len(part) - over, 0)]
        over -= len(part) - len(parts[index] or b"")
    left_out = 0
    if over > 0:
        over += _NAME_SHOWN  # the size of the note about the cut
        while over > 0 and left_out < len(record.headers):
            over -= header_bytes[left_out] + len(parts[2 + left_out] or b"")
            left_out += 1
        cut.append(f"the first {left_out} headers")
    headers = [(name, value) for (name, _), value in zip(record.headers, parts[2:], strict=True)][left_out:]
    headers.append((CUT_HEADER, ", ".join(cut).encode()))
    return record._replace(key=parts[1], value=parts[0], headers=headers)
