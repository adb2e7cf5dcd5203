"""Values in the Schema Registry's wire format: a zero byte, the id of the writer's schema in four
bytes, and the value.

Source: Confluent Schema Registry, wire format.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import pyarrow as pa

from framework.clients.client_cache import ClientCache
from framework.config import is_secret
from framework.errors import ConfigError, TopologyError, reason_of
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Values, joined
from spouts.codecs.encoding_codec import ColumnEncodingCodec, SchemaCodec
from spouts.codecs.registry_client import NotARegistryError, NotFoundError, RegistryClient
from spouts.codecs.registry_schema_usage import note_used
from spouts.codecs.schema_cache import SchemaCache
from spouts.codecs.writer_subjects import Find, SubjectNameStrategy, WriterSubjects

_HEADER = struct.Struct(">bI")
#: An id that the registry does not know is asked for again after these pauses: a node that follows
#: another one lags.
_PAUSES_S = (0.5, 2.5)
#: After that, its values are bad for this long without another question.
_UNUSABLE_S = 60.0
#: Ids whose values are bad, and digests, that are remembered in a process, for one reader's schema.
_UNUSABLE_MAX = 20_000
#: The factor by which the size of its schemas counts for a decoder, because a decoder takes up to
#: thirty times that memory.
_DECODER_WEIGHT = 4
#: Schemas that one schema refers to, also by way of others.
_REFERENCES_MAX, _REFERENCES_DEEP_MAX = 256, 64
_KINDS = {"AVRO": "Avro", "PROTOBUF": "Protobuf", "JSON": "JSON"}


class Decoder(Protocol):
    """Decodes values that were written with one schema."""

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """One row per value that can be decoded, and the bad values."""


class RegistryCodec(PerValueCodec, ColumnEncodingCodec, SchemaCodec):
    """Values that name their schema in a Schema Registry. Implement how values of a writer's schema
    are decoded, and how rows are encoded.

    ``registry``: its address, or a mapping of settings for confluent-kafka's
    ``SchemaRegistryClient`` (``url``, ``basic.auth.user.info``, ``ssl.ca.location`` ...).
    ``writer_subjects``: accept only schemas that the registry has under one of these subjects;
    None: any. Without it, any client that may register a schema under any subject chooses how the
    bytes of his records are read.

    A value is a bad record if the registry says, and says again seconds later, that it does not
    have the schema; if it does not fit the codec; or if it is of another subject. If the registry
    does not answer, decoding raises ``RetryableError``; if what answers is not a registry,
    ``ConfigError``.

    As ``value_codec`` or ``key_codec`` of a ``KafkaSink`` it encodes rows, either with the latest
    schema of ``subject`` when the codec is created, or with the schema that it is given. That one
    must be registered under ``subject``, or else under the subject that ``subject_name_strategy``
    makes: "topic" (``<topic>-value``, ``<topic>-key``), "record" (the schema's name) or
    "topic_record" (``<topic>-<name>``). ``register=True``: the driver registers it before the first
    batch, where it is missing; ``ratchet check`` finds out before whether the registry would refuse
    it. ``normalize``: let the registry compare schemas in its normal form. A refusal is a
    ``ConfigError`` with the registry's reason.
    """

    #: The registry's word for this kind of schema, and the form in which it is asked for.
    kind: ClassVar[str]
    form: ClassVar[str | None] = None

    def __init__(self, registry: str | Mapping[str, Any], writer_subjects: Sequence[str] | None) -> None:
        self._settings = {"url": registry} if isinstance(registry, str) else dict(registry)
        self._registry = RegistryClient(self._settings, self.form)
        if isinstance(writer_subjects, str) or (writer_subjects is not None and not writer_subjects):
            raise TopologyError("writer_subjects must be a list of subjects, or None: any")
        self._subjects = frozenset(writer_subjects) if writer_subjects is not None else None
        self._writers: _Writers | None = None
        self._written: WriterSubjects | None = None  # where the schema is that rows are encoded with
        self._id: int | None = None  # its id, once it is known

    @abstractmethod
    def reader_key(self) -> str:
        """A text that distinguishes this codec from others of its kind."""

    @abstractmethod
    def tombstones(self) -> Decoder:
        """A decoder for nulls alone."""

    @abstractmethod
    def decoder(self, schema: Any, references: Mapping[str, str]) -> Decoder:
        """A decoder for the values of a writer's schema, as the registry has it. ``references``:
        the text of each schema that it refers to. Raises ``ValueError`` or ``TopologyError`` with
        the reason if such values are bad."""

    def bodies(self, columns: Mapping[str, pa.Array], rows: int) -> Sequence[bytes]:
        """The bytes after the schema id in the value of each row. Raises ``ValueError``."""
        return self._row_writer.write(columns, rows)

    @abstractmethod
    def writer_schema(self, find: Find) -> Any:
        """The schema that rows are encoded with, as the registry's client takes it. ``find``: the
        version of a schema that it refers to."""

    def write_to(
        self,
        subject: str | None,
        strategy: SubjectNameStrategy,
        record: str | None,
        *,
        register: bool,
        normalize: bool,
    ) -> None:
        """Say where the schema is that rows are encoded with, unless it is the latest of a subject.
        ``record``: its name. Raises ``TopologyError``."""
        if register and self._id is not None:
            raise TopologyError(
                f"{type(self).__name__}: register=True registers the schema that is given: give it, too"
            )
        self._written = WriterSubjects(
            self._registry, subject, strategy, record, register=register, normalize=normalize
        )

    def for_topics(self, part: str, topics: Sequence[str]) -> Self:
        if self._id is not None or self._written is None:
            return self
        copied = copy.copy(self)
        copied._written = self._written.for_topics(part, topics)
        return copied

    def without_registry(self) -> Self:
        copied = copy.copy(self)
        copied._id = self._id or 0
        return copied

    def check_schema(self) -> None:
        if self._id is None and self._written is not None:
            self._id = self._written.check(self.writer_schema)

    def register_schema(self) -> None:
        if self._id is None and self._written is not None:
            self._id = self._written.register(self.writer_schema)

    def check_encodable(self, fields: Fields) -> None:
        if self._id is None and self._written is None:
            raise TopologyError(f"{type(self).__name__} decodes only, because it was given no schema to write with")
        super().check_encodable(fields)

    def encode_columns(self, columns: Mapping[str, pa.Array], rows: int) -> Sequence[bytes]:
        bodies = self.bodies(columns, rows)
        if self._id is None:
            if self._written is None:
                raise TopologyError(f"{type(self).__name__} decodes only")
            self._id = self._written.find(self.writer_schema, self.reader_key())
        header = _HEADER.pack(0, self._id)
        return [header + each for each in bodies]

    def latest(self, subject: str, read: Callable[[Any], Any]) -> Any:
        """What ``read`` makes of the latest schema of a subject. Rows are encoded with that schema.
        Raises ``ConfigError``."""
        try:
            self._id, _, found = self._registry.latest(subject)
            if (found.schema_type or "AVRO") != self.kind:
                raise TopologyError(f"its schema is of the kind {found.schema_type}, not {self.kind}")
            return read(found)
        except (ValueError, TopologyError) as error:
            raise ConfigError(f"subject {subject!r}: {error}") from error

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        if self._writers is None:
            self._writers = _Writers.of(self)
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
        batches: list[pa.RecordBatch] = []
        order: list[int] = []  # for each decoded row, the index of its value
        for schema_id, decoder in self._writers.decoders(bodies):
            if isinstance(decoder, str):
                bad += [BadRecord(place, decoder) for place in places[schema_id]]
                continue
            batch, undecodable = decoder.decode_good(bodies[schema_id])
            gone = {each.index for each in undecodable}
            bad += [BadRecord(places[schema_id][each.index], each.reason) for each in undecodable]
            order += [place for position, place in enumerate(places[schema_id]) if position not in gone]
            batches.append(batch)
        bad.sort(key=lambda each: each.index)
        if len(batches) == 1:
            return batches[0], bad
        whole = joined([*batches, self._writers.none.decode_good([])[0]])
        return whole.take(pa.array(sorted(range(len(order)), key=order.__getitem__), pa.int64())), bad

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_writers": None}  # the receiver's process has its own

    def __repr__(self) -> str:
        shown = {key: "***" if is_secret(key) or "auth" in key else value for key, value in self._settings.items()}
        return f"{type(self).__name__}({ {**shown, 'url': self._registry.where} })"


class _Writers:
    """The writers' schemas that this process has met, for one reader's schema: a decoder each, and
    the ids that are of no use for now. Tasks come and go, so that a codec cannot keep them."""

    _all: ClassVar[ClientCache[_Writers]] = ClientCache()

    def __init__(self, codec: RegistryCodec) -> None:
        self._codec = codec
        self._registry = codec._registry
        self.none = codec.tombstones()
        self._decoders: SchemaCache[Decoder] = SchemaCache()
        self._unusable: dict[int, tuple[float, str]] = {}  # until when, and why
        self._digests: dict[int, str] = {}

    @classmethod
    def of(cls, codec: RegistryCodec) -> _Writers:
        subjects = sorted(codec._subjects) if codec._subjects is not None else None
        key = f"{codec._registry.key} {type(codec).__qualname__} {codec.reader_key()} {subjects}"
        return cls._all.get(key, lambda: cls(codec))

    def decoders(self, schema_ids: Iterable[int | None]) -> Iterator[tuple[int | None, Decoder | str]]:
        """A decoder for each id, or the reason why its values are bad. Waits up to three seconds
        for all ids together that the registry does not know yet. Use each decoder immediately,
        because all of them may be larger than the cache."""
        open_ids = []
        for each in schema_ids:
            if each is None:
                yield None, self.none
            else:
                open_ids.append(each)
        for pause in (0.0, *_PAUSES_S):
            if open_ids and pause:
                time.sleep(pause)
            errors: dict[int, NotFoundError | NotARegistryError] = {}
            for place, each in enumerate(open_ids):
                found: Decoder | str
                try:
                    found = self._decoder(each)
                except NotFoundError as error:
                    errors[each] = error
                    continue
                except NotARegistryError as error:
                    errors |= dict.fromkeys(open_ids[place:], error)  # the others get the same answer
                    break
                except ValueError as error:
                    found = str(error)
                self._note_used(each)
                yield each, found
            open_ids = [*errors]
        for each, failure in errors.items():
            if isinstance(failure, NotARegistryError):
                raise failure
            self._note_used(each)
            yield each, self._remembered(each, str(failure))

    def _note_used(self, schema_id: int) -> None:
        note_used(f"{self._registry.where} id {schema_id}", self._digests.get(schema_id, ""))

    def _decoder(self, schema_id: int) -> Decoder:
        """Raises ``ValueError`` with the reason if the values of this schema are bad, also if it is
        a ``NotFoundError``: then the registry is to be asked again before that."""
        decoder: Decoder | None = self._decoders.get(schema_id)
        if decoder is not None:
            return decoder
        until, reason = self._unusable.get(schema_id, (0.0, ""))
        if time.monotonic() < until:
            raise ValueError(reason)
        try:
            decoder, size = self._new_decoder(schema_id)
        except NotFoundError:
            self._digests.pop(schema_id, None)
            if reason:  # as before
                raise ValueError(self._remembered(schema_id, reason)) from None
            raise
        except (TopologyError, ValueError) as error:
            raise ValueError(self._remembered(schema_id, f"schema id {schema_id}: {error}")) from error
        self._decoders.put(schema_id, decoder, size)
        return decoder

    def _new_decoder(self, schema_id: int) -> tuple[Decoder, int]:
        """A decoder, and the bytes that it counts for."""
        found = self._registry.schema(schema_id)
        references = dict(references_of(self._registry, found))
        self._digests[schema_id] = _digest(found, references)
        _forget_oldest(self._digests, _UNUSABLE_MAX)
        if (found.schema_type or "AVRO") != self._codec.kind:
            raise ValueError(f"it is {found.schema_type or 'AVRO'}, not {_KINDS[self._codec.kind]}")
        subjects = self._codec._subjects
        if subjects is not None:
            its = self._registry.subjects(schema_id)
            if subjects.isdisjoint(its):
                raise ValueError(f"it is not of {', '.join(sorted(subjects))}, but of {', '.join(its)[:200]}")
        size = sum(map(len, (found.schema_str, *references.values())))
        return self._codec.decoder(found, references), size * _DECODER_WEIGHT

    def _remembered(self, schema_id: int, reason: str) -> str:
        reason = reason_of(reason)
        self._unusable.pop(schema_id, None)  # the newest is the last
        self._unusable[schema_id] = (time.monotonic() + _UNUSABLE_S, reason)
        _forget_oldest(self._unusable, _UNUSABLE_MAX)
        return reason


def _digest(schema: Any, references: Mapping[str, str]) -> str:
    content = [schema.schema_type or "AVRO", schema.schema_str, sorted(references.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _forget_oldest(known: dict[int, Any], most: int) -> None:
    while len(known) > most:
        known.pop(next(iter(known)), None)


def references_of(registry: RegistryClient, schema: Any) -> Iterable[tuple[str, str]]:
    """The name and the text of each schema that a schema refers to, also by way of others, each
    after those that it refers to. Each schema has its own versions of them. Raises
    ``TopologyError`` if they do not end."""
    found: dict[str, str] = {}
    begun: set[str] = set()

    def add(schema: Any, depth: int) -> None:
        for reference in schema.references or ():
            if reference.name in begun:
                continue
            begun.add(reference.name)
            if depth > _REFERENCES_DEEP_MAX or len(begun) > _REFERENCES_MAX:
                raise TopologyError(f"it refers to more than {_REFERENCES_MAX} schemas")
            its = registry.version(reference.subject, reference.version)
            add(its, depth + 1)
            found[reference.name] = its.schema_str

    add(schema, 0)
    return found.items()


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
