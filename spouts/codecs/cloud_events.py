"""CloudEvents: the attributes of an event beside the columns of its data.

Source: CloudEvents 1.0, JSON format, Kafka protocol binding.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.errors import BadRecordError, TopologyError
from framework.topology import Fields
from framework.topology.json_values import json_encoder
from framework.topology.tuples import rows_of
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Codec, PerValueCodec, TextCodec, Values
from spouts.codecs.encoding_codec import WrappingCodec, encoder
from spouts.codecs.iso8601 import moments

#: The prefix of an attribute's header in binary mode, and of its field here.
PREFIX = "ce_"
ATTRIBUTES = ("id", "source", "type", "subject", "time")
_REQUIRED = ("id", "source", "type")
_VERSION = "1.0"
#: The content type of an event in structured mode.
_STRUCTURED = b"application/cloudevents+json; charset=UTF-8"
_TIME = pa.timestamp("us", "UTC")
_TEXT_OF_TIME = json_encoder(_TIME)
_SPACE = " \t\n\r"
_SHOWN = 80


class CloudEventsCodec(PerValueCodec, WrappingCodec):
    """Events of CloudEvents 1.0, whose data ``codec`` decodes.

    ``mode="structured"``: the value is a JSON document that holds attributes and data. The fields
    are those of ``codec``, then ``ce_id`` and the like for ``attributes``, which may name
    extensions; all are text, and ``ce_time`` is a moment. Data that is not JSON is text, or base64
    in ``data_base64``: its bytes are given to ``codec``. An event without data has null fields.

    ``mode="binary"``: the value is the data, and the attributes are headers. Give the spout
    ``header_codecs=codec.header_codecs()``, which makes the same fields, all of text.

    Errors of structured mode: a value that is not a JSON object, another ``specversion``, a missing
    ``id``, ``source`` or ``type``, a ``time`` that is not a time, and data that ``codec`` refuses.

    ``KafkaSink(value_codec=...)`` writes events of the fields ``ce_id``, ``ce_source``, ``ce_type``
    and the other ``attributes`` that the rows have. Give it ``headers=codec.headers()``, too.
    ``content_type``: of the data that is written.

    >>> from spouts import JsonCodec
    >>> codec = CloudEventsCodec(JsonCodec(Fields(n=int)), attributes=["id", "type"])
    >>> event = b'{"specversion":"1.0","id":"1","source":"/a","type":"t","data":{"n":7}}'
    >>> codec.decode([event]).to_pylist()
    [{'n': 7, 'ce_id': '1', 'ce_type': 't'}]
    """

    def __init__(
        self,
        codec: Codec,
        *,
        mode: Literal["structured", "binary"] = "structured",
        attributes: Sequence[str] = ATTRIBUTES,
        content_type: str = "application/json",
    ) -> None:
        if not isinstance(codec, Codec):
            raise TopologyError(f"CloudEventsCodec: {codec!r} is no codec: give the one for the data")
        if mode not in ("structured", "binary"):
            raise TopologyError(f"CloudEventsCodec: mode must be 'structured' or 'binary', not {mode!r}")
        if isinstance(attributes, str) or not all(isinstance(each, str) and each for each in attributes):
            raise TopologyError(f"CloudEventsCodec: attributes={attributes!r}: give a list of names")
        self._codec, self._is_binary, self._attributes = codec, mode == "binary", tuple(attributes)
        self._content_type = content_type
        types = {name: codec.fields.type_of(name) for name in codec.fields}
        if not self._is_binary:
            for name in self._attributes:
                if PREFIX + name in types:
                    raise TopologyError(f"CloudEventsCodec: the data has a field {PREFIX + name!r}, too: leave one out")
                types[PREFIX + name] = _TIME if name == "time" else pa.string()
        self.fields = Fields.of(types)

    def header_codecs(self) -> dict[str, Codec]:
        """The codecs of the headers, for the spout: in binary mode, of the attributes."""
        return {PREFIX + name: TextCodec(PREFIX + name) for name in self._attributes} if self._is_binary else {}

    def headers(self, **shared: str) -> dict[str, str | bytes]:
        """The headers that ``KafkaSink(headers=...)`` adds, by which other libraries recognise the
        mode. In binary mode, the fields of the attributes are text, and ``shared`` are attributes
        that are the same in all events: ``headers(source="/shop")``. Raises ``TopologyError`` for
        events without ``id``, ``source`` or ``type``."""
        if not self._is_binary:
            if shared:
                raise TopologyError(
                    f"CloudEventsCodec: {min(shared)} is no header in structured mode: make it a column"
                )
            return {"content-type": _STRUCTURED}
        missing = [each for each in _REQUIRED if each not in self._attributes and not shared.get(each)]
        if missing:
            raise TopologyError(
                f"CloudEventsCodec: an event needs {missing[0]}: name it in attributes, or give one for all: "
                f"headers({missing[0]}='...')"
            )
        fixed = {"specversion": _VERSION, **shared}
        made: dict[str, str | bytes] = {PREFIX + name: value.encode() for name, value in fixed.items()}
        made |= {PREFIX + name: PREFIX + name for name in self._attributes}
        return {**made, "content-type": self._content_type.encode()}

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        if self._is_binary:
            return self._codec.decode_good(values)
        bad: list[BadRecord] = []
        places: list[int] = []
        data: list[bytes | None] = []
        attributes: list[Mapping[str, str | None]] = []
        for place, value in enumerate(values):
            try:
                its, body = self._opened(value) if value is not None else ({}, None)
            except ValueError as error:
                bad.append(BadRecord(place, str(error)))
                continue
            places.append(place)
            data.append(body)
            attributes.append(its)
        batch, undecodable = self._codec.decode_good(data)
        gone = {each.index for each in undecodable}
        bad += [BadRecord(places[each.index], f"data: {each.reason}") for each in undecodable]
        kept = [each for index, each in enumerate(attributes) if index not in gone]
        columns = [*batch.columns]
        for name in self._attributes:
            column = pa.array([each.get(name) for each in kept], pa.string())
            columns.append(moments(column, _TIME) if name == "time" else column)
        return pa.RecordBatch.from_arrays(columns, names=[*self.fields]), sorted(bad, key=lambda each: each.index)

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that are no event."""
        ours = self._own(fields.names)
        encoder(self._codec).check_encodable(fields.select([each for each in fields if each not in ours]))
        missing = [PREFIX + each for each in _REQUIRED if PREFIX + each not in ours]
        if missing and not self._is_binary:
            raise TopologyError(f"CloudEventsCodec: an event needs the fields {', '.join(missing)}")

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value for each row. Raises ``BadRecordError`` for a row that is no event."""
        ours = self._own(batch.schema.names)
        data = encoder(self._codec).encode(batch.select([each for each in batch.schema.names if each not in ours]))
        rows = [dict(zip(ours, row, strict=True)) for row in rows_of(batch.select(ours))] if ours else []
        for row in rows:
            _check_required(row)
        if self._is_binary:
            return data
        return pa.array(
            [self._event(row, each.as_py()) for row, each in zip(rows, data, strict=True)], pa.large_binary()
        )

    def _own(self, names: Sequence[str]) -> list[str]:
        return [each for each in names if each.startswith(PREFIX) and each.removeprefix(PREFIX) in self._attributes]

    def _event(self, row: Mapping[str, Any], data: bytes | None) -> bytes:
        document: dict[str, Any] = {"specversion": _VERSION}
        for name, value in row.items():
            attribute = name.removeprefix(PREFIX)
            if value is not None:
                document[attribute] = _TEXT_OF_TIME(value) if attribute == "time" else value
        document["datacontenttype"] = self._content_type
        if data is None:
            return _dumped(document)
        if not _is_json(self._content_type):
            return _dumped({**document, "data_base64": base64.b64encode(data).decode()})
        return _dumped(document)[:-1] + b',"data":' + data + b"}"

    def _opened(self, value: bytes) -> tuple[dict[str, str | None], bytes | None]:
        """The attributes and the data of an event. Raises ``ValueError`` with the reason."""
        members = _members(value)
        version = members.get("specversion", ("", None))[1]
        if version != _VERSION:
            raise ValueError(f"specversion is {version!r:.{_SHOWN}}, not {_VERSION!r}: no event of CloudEvents")
        for name in _REQUIRED:
            if not members.get(name, ("", None))[1]:
                raise ValueError(f"the event has no {name}")
        found = {name: _attribute(name, members[name][1]) for name in self._attributes if name in members}
        time = found.get("time")
        if time is not None and moments(pa.array([time]), _TIME).null_count:
            raise ValueError(f"time is {time!r:.{_SHOWN}}, which is no moment of RFC 3339")
        return found, _data_of(members)


def _check_required(row: Mapping[str, Any]) -> None:
    """Raise ``BadRecordError`` for a row without an attribute that every event must have."""
    for name in _REQUIRED:
        if PREFIX + name in row and not row[PREFIX + name]:
            raise BadRecordError(f"{PREFIX}{name} is {row[PREFIX + name]!r}, and an event needs it")


def _data_of(members: Mapping[str, tuple[str, Any]]) -> bytes | None:
    encoded = members.get("data_base64", ("", None))[1]
    raw, data = members.get("data", ("", None))
    if encoded is not None:
        if data is not None or not isinstance(encoded, str):
            raise ValueError("data_base64 is not the text of base64, or data is there, too")
        return base64.b64decode(encoded, validate=True)
    if data is None:
        return None
    content_type = members.get("datacontenttype", ("", None))[1] or "application/json"
    if isinstance(content_type, str) and not _is_json(content_type) and isinstance(data, str):
        return data.encode()
    return raw.encode()


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind.endswith(("/json", "+json"))


def _attribute(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int)):
        return json.dumps(value)
    raise ValueError(f"attribute {name} is {json.dumps(value)[:_SHOWN]}, not text, a whole number or a truth")


def _members(value: bytes) -> dict[str, tuple[str, Any]]:
    """The members of a JSON object: the text of each as it is there, so that a number keeps its
    digits, and its value. Raises ``ValueError``."""
    try:
        text = value.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from None
    decoder = json.JSONDecoder()
    found: dict[str, tuple[str, Any]] = {}
    at = _after(text, 0, "{")
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            try:
                key, at = decoder.raw_decode(text, at)
                if not isinstance(key, str):
                    raise ValueError("a name is no text")
                begin = _after(text, at, ":")
                its, at = decoder.raw_decode(text, begin)
            except RecursionError:
                raise ValueError("nested too deep") from None
            if key in found:
                raise ValueError(f"{key!r:.{_SHOWN}} is there twice")
            found[key] = (text[begin:at], its)
            at = _skipped(text, at)
            if text[at : at + 1] == "}":
                at += 1
                break
            at = _after(text, at, ",")
    if _skipped(text, at) != len(text):
        raise ValueError(f"{len(text) - at:,} characters are left after the object")
    return found


def _after(text: str, at: int, wanted: str) -> int:
    """The place of what follows ``wanted``. Raises ``ValueError``."""
    at = _skipped(text, at)
    if text[at : at + 1] != wanted:
        raise ValueError(f"no JSON object: {wanted!r} is missing at character {at}")
    return _skipped(text, at + 1)


def _skipped(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _dumped(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
