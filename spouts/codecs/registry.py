"""Avro in the Schema Registry's wire format: a zero byte, the id of the writer's schema in four
bytes, and the value.

Source: Confluent Schema Registry, wire format.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.config import is_secret
from framework.errors import ConfigError, TopologyError
from framework.topology import Fields
from spouts.codecs.avro import AvroDecoder
from spouts.codecs.avro_arrow import arrow_schema
from spouts.codecs.avro_schema import DEPTH_MAX, AvroType, Schema, loaded, parsed, schema_of_text
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Values, joined
from spouts.codecs.registry_client import NotARegistryError, NotFoundError, RegistryClient

_HEADER = struct.Struct(">bI")
#: An id that the registry does not know is asked for again after these pauses: a node that follows
#: another one lags.
_PAUSES_S = (0.5, 2.5)
#: After that, its values are bad for this long without another question.
_UNUSABLE_S = 60.0
#: Ids that are remembered in a process, for one reader's schema.
_DECODERS_MAX, _UNUSABLE_MAX = 1_000, 100_000
#: Schemas that one schema refers to, also by way of others.
_REFERENCES_MAX = 256


class RegistryAvroCodec(PerValueCodec):
    """Avro values that name their schema in a Schema Registry.

    ``registry``: its address, or a mapping of settings for confluent-kafka's
    ``SchemaRegistryClient`` (``url``, ``basic.auth.user.info``, ``ssl.ca.location`` ...).

    Values are resolved from the writer's schema to one reader's schema, which gives the codec's
    fields. Give either ``schema``, the reader's schema itself, or ``subject``: then the reader's
    schema is the latest one of this subject when the codec is created.

    ``writer_subjects``: accept only schemas that the registry has under one of these subjects;
    None: any. Without it, whoever may register a schema under any subject chooses how the bytes of
    his records are read.

    A value is a bad record if the registry says, and says again seconds later, that it does not
    have the schema; if the schema does not resolve to the reader's; or if it is of another subject.
    If the registry does not answer, decoding raises ``RetryableError``; if what answers is not a
    registry, ``ConfigError``.
    """

    def __init__(
        self,
        registry: str | Mapping[str, Any],
        *,
        subject: str | None = None,
        schema: Schema | Path | None = None,
        writer_subjects: Sequence[str] | None = None,
    ) -> None:
        self._settings = {"url": registry} if isinstance(registry, str) else dict(registry)
        self._registry = RegistryClient(self._settings)
        if (subject is None) == (schema is None):
            raise TopologyError("RegistryAvroCodec needs subject= or schema=, one of them: what values are resolved to")
        if isinstance(writer_subjects, str) or (writer_subjects is not None and not writer_subjects):
            raise TopologyError("writer_subjects must be a list of subjects, or None: any")
        self._subjects = frozenset(writer_subjects) if writer_subjects is not None else None
        self._named: dict[str, Schema] = {}  # what the reader's schema refers to
        self._reader = loaded(schema) if schema is not None else self._latest(str(subject))
        self.fields = Fields.of_schema(arrow_schema(parsed(self._reader, self._named)))
        self._writers: _Writers | None = None

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        if self._writers is None:
            self._writers = _Writers.of(self._registry, self._reader, self._named, self._subjects)
        bodies: dict[int | None, list[bytes | None]] = {}  # by schema id; None: tombstones
        places: dict[int | None, list[int]] = {}
        bad: list[BadRecord] = []
        for index, value in enumerate(values):
            try:
                schema_id, body = _opened(value)
            except ValueError as error:
                bad.append(BadRecord(index, str(error)))
                continue
            bodies.setdefault(schema_id, []).append(body)
            places.setdefault(schema_id, []).append(index)
        decoders, unusable = self._writers.decoders(each for each in bodies if each is not None)
        batches: list[pa.RecordBatch] = []
        order: list[int] = []  # for each decoded row, the index of its value
        for schema_id, its in bodies.items():
            if schema_id in unusable:
                bad += [BadRecord(place, unusable[schema_id]) for place in places[schema_id]]
                continue
            decoder = self._writers.none if schema_id is None else decoders[schema_id]
            batch, undecodable = decoder.decode_good(its)
            gone = {each.index for each in undecodable}
            bad += [BadRecord(places[schema_id][each.index], each.reason) for each in undecodable]
            order += [place for position, place in enumerate(places[schema_id]) if position not in gone]
            batches.append(batch)
        bad.sort(key=lambda each: each.index)
        if len(batches) == 1:
            return batches[0], bad
        whole = joined([*batches, self._writers.none.decode_good([])[0]])
        return whole.take(pa.array(sorted(range(len(order)), key=order.__getitem__), pa.int64())), bad

    def _latest(self, subject: str) -> Schema:
        try:
            found = self._registry.latest(subject)
            _add_references(self._registry, found, self._named)
            return schema_of_text(found.schema_str)
        except (NotFoundError, TopologyError) as error:
            raise ConfigError(f"subject {subject!r}: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writers": None}  # the receiver's process has its own

    def __repr__(self) -> str:
        shown = {key: "***" if is_secret(key) or "auth" in key else value for key, value in self._settings.items()}
        return f"RegistryAvroCodec({ {**shown, 'url': self._registry.where} })"


class _Writers:
    """The writers' schemas that this process has met, for one reader's schema: a decoder each, and
    the ids that are of no use for now. Tasks come and go, so that a codec cannot keep them."""

    _all: dict[str, _Writers] = {}

    def __init__(
        self, registry: RegistryClient, reader: Schema, named: Mapping[str, Schema], subjects: frozenset[str] | None
    ) -> None:
        self._registry = registry
        self._subjects = subjects
        self._reader: AvroType = parsed(reader, named)
        self._target = arrow_schema(self._reader)
        self.none = AvroDecoder(self._reader, self._reader, self._target)  # for tombstones alone
        self._decoders: dict[int, AvroDecoder] = {}
        self._unusable: dict[int, tuple[float, str]] = {}  # until when, and why

    @classmethod
    def of(
        cls, registry: RegistryClient, reader: Schema, named: Mapping[str, Schema], subjects: frozenset[str] | None
    ) -> _Writers:
        key = f"{registry.key} {json.dumps([reader, dict(named)])} {sorted(subjects) if subjects is not None else None}"
        found = cls._all.get(key)
        if found is None:
            found = cls._all[key] = cls(registry, reader, named, subjects)
        return found

    def decoders(self, schema_ids: Iterable[int]) -> tuple[dict[int, AvroDecoder], dict[int, str]]:
        """A decoder for each id, or the reason why its values are bad. Waits seconds, at most, for
        ids that the registry does not know yet; however many they are, they wait together."""
        found: dict[int, AvroDecoder] = {}
        unusable: dict[int, str] = {}
        open_ids = list(schema_ids)
        for pause in (0.0, *_PAUSES_S):
            if open_ids and pause:
                time.sleep(pause)
            errors: dict[int, NotFoundError | NotARegistryError] = {}
            for each in open_ids:
                try:
                    found[each] = self._decoder(each)
                except (NotFoundError, NotARegistryError) as error:
                    errors[each] = error
                    if isinstance(error, NotARegistryError):
                        break  # the others get the same answer
                except ValueError as error:
                    unusable[each] = str(error)
            open_ids = [each for each in open_ids if each not in found and each not in unusable]
        for each, failure in errors.items():
            if isinstance(failure, NotARegistryError):
                raise failure
            unusable[each] = self._remembered(each, str(failure))
        return found, unusable

    def _decoder(self, schema_id: int) -> AvroDecoder:
        """Raises ``ValueError`` with the reason if the values of this schema are bad, also if it is
        a ``NotFoundError``: then the registry is to be asked again before that."""
        decoder = self._decoders.get(schema_id)
        if decoder is not None:
            return decoder
        until, reason = self._unusable.get(schema_id, (0.0, ""))
        if time.monotonic() < until:
            raise ValueError(reason)
        try:
            decoder = self._new_decoder(schema_id)
        except NotFoundError:
            if reason:  # as before
                raise ValueError(self._remembered(schema_id, reason)) from None
            raise
        except (TopologyError, ValueError) as error:
            raise ValueError(self._remembered(schema_id, f"schema id {schema_id}: {error}")) from error
        self._decoders[schema_id] = decoder
        _forget_oldest(self._decoders, _DECODERS_MAX)
        return decoder

    def _new_decoder(self, schema_id: int) -> AvroDecoder:
        found = self._registry.schema(schema_id)
        if (found.schema_type or "AVRO") != "AVRO":
            raise ValueError(f"it is {found.schema_type}, not Avro")
        if self._subjects is not None:
            its = self._registry.subjects(schema_id)
            if self._subjects.isdisjoint(its):
                raise ValueError(f"it is not of {', '.join(sorted(self._subjects))}, but of {', '.join(its)[:200]}")
        named: dict[str, Schema] = {}
        _add_references(self._registry, found, named)
        return AvroDecoder(parsed(schema_of_text(found.schema_str), named), self._reader, self._target)

    def _remembered(self, schema_id: int, reason: str) -> str:
        self._unusable.pop(schema_id, None)  # the newest is the last
        self._unusable[schema_id] = (time.monotonic() + _UNUSABLE_S, reason)
        _forget_oldest(self._unusable, _UNUSABLE_MAX)
        return reason


def _forget_oldest(known: dict[int, Any], most: int) -> None:
    while len(known) > most:
        known.pop(next(iter(known)), None)


def _add_references(registry: RegistryClient, schema: Any, named: dict[str, Schema]) -> None:
    """Add the types that a schema refers to. A type comes after the types that it refers to. Each
    schema has its own versions of them. Raises ``TopologyError`` if they do not end."""
    begun: set[str] = set()

    def add(schema: Any, depth: int) -> None:
        for reference in schema.references or ():
            if reference.name in begun:
                continue
            begun.add(reference.name)
            if depth > DEPTH_MAX or len(begun) > _REFERENCES_MAX:
                raise TopologyError(f"it refers to more than {_REFERENCES_MAX} schemas")
            found = registry.version(reference.subject, reference.version)
            add(found, depth + 1)
            named[reference.name] = schema_of_text(found.schema_str)

    add(schema, 0)


def _opened(value: bytes | None) -> tuple[int | None, bytes | None]:
    """The schema id and the body of a value. Raises ``ValueError`` if the value is not in the wire
    format."""
    if value is None:
        return None, None
    if len(value) < _HEADER.size:
        raise ValueError(f"{len(value)} bytes are too few for the Schema Registry's wire format")
    magic, schema_id = _HEADER.unpack_from(value)
    if magic != 0:
        raise ValueError(f"the first byte is {magic & 0xFF}, not 0: not in the Schema Registry's wire format")
    return schema_id, value[_HEADER.size :]
