"""Protobuf messages that name their schema in a Schema Registry.

In front of the message stand its indexes: which message of the schema it is, then which within
that one, and so on, as zigzag varints with their number in front. A single 0 is the first message.

Source: Confluent Schema Registry, wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.avro_binary import read_long
from spouts.codecs.avro_writer import long_bytes
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Values
from spouts.codecs.protobuf import ProtobufDecoder
from spouts.codecs.protobuf_schema import Files, file_of_text, file_set, files_of, imported, set_of, text_of_file
from spouts.codecs.protobuf_writer import MessageWriter
from spouts.codecs.registry_client import new_schema
from spouts.codecs.registry_codec import RegistryCodec, references_of
from spouts.codecs.writer_subjects import Find, SubjectNameStrategy

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Messages within messages that an index may name.
_INDEXES_MAX = 32
#: Files that every registry knows, under these folders.
_BUILT_IN = ("google/protobuf/", "google/type/", "confluent/")


class RegistryProtobufCodec(RegistryCodec):
    """Protobuf messages of one type that name their schema in a Schema Registry; ``RegistryCodec``
    says more.

    Give either ``subject``: the type is the first message of its latest schema when the codec is
    created, or that named by ``message``; or ``message`` alone: a generated class, or a name in
    ``descriptor_set``, as for ``ProtobufCodec``. Fields that a writer's schema adds are ignored,
    and those that it lacks are absent, as Protobuf does. A value whose message has another full
    name is a bad record. Rows are encoded as by ``ProtobufCodec``. With ``register=True``, the
    files that the schema imports are registered, too, under subjects that are called as they are.

    The registry must serve serialized schemas (``format=serialized``).
    """

    kind = "PROTOBUF"
    form = "serialized"

    def __init__(
        self,
        registry: str | Mapping[str, Any],
        *,
        subject: str | None = None,
        message: type[Message] | str | None = None,
        descriptor_set: bytes | str | Path | None = None,
        writer_subjects: Sequence[str] | None = None,
        subject_name_strategy: SubjectNameStrategy = "topic",
        register: bool = False,
        normalize: bool = False,
    ) -> None:
        imported()
        super().__init__(registry, writer_subjects)
        of_class, of_set = isinstance(message, type), isinstance(message, str) and descriptor_set is not None
        if (descriptor_set is not None and not of_set) or not (of_class or of_set or subject is not None):
            raise TopologyError(
                "RegistryProtobufCodec needs subject=, or a generated class as message=, or message= and descriptor_set="
            )
        if of_class or of_set:
            self._files = file_set(message if isinstance(message, type) else descriptor_set)  # type: ignore[arg-type]
        else:
            self._files = self.latest(
                str(subject), lambda found: _files_of(found, dict(references_of(self._registry, found)))
            )
        files = Files(self._files)
        if isinstance(message, type):
            self._name = str(message.DESCRIPTOR.full_name)
        elif message is not None:
            self._name = message
        elif messages := files.messages():
            self._name = str(messages[0].full_name)
        else:
            raise TopologyError(f"subject {subject!r}: its schema has no message")
        self.fields = Fields.of_schema(ProtobufDecoder(files, self._name).schema)
        self._indexes = _indexes_of(files.message(self._name))
        self.write_to(subject, subject_name_strategy, self._name, register=register, normalize=normalize)

    def reader_key(self) -> str:
        return f"{self._name} {self._files.hex()}"

    def tombstones(self) -> ProtobufDecoder:
        return ProtobufDecoder(Files(self._files), self._name)

    def decoder(self, schema: Any, references: Mapping[str, str]) -> _Indexed:
        return _Indexed(Files(_files_of(schema, references)).messages(), self.tombstones())

    def bodies(self, columns: Mapping[str, pa.Array], rows: int) -> Sequence[bytes]:
        return [self._indexes + each for each in super().bodies(columns, rows)]

    def writer_schema(self, find: Find) -> Any:
        files = files_of(self._files)

        def schema(name: str) -> Any:
            imports = [each for each in files[name].dependency if not each.startswith(_BUILT_IN)]
            references = [(each, each, find(each, schema(each)).version) for each in imports]
            return new_schema(text_of_file(files[name]), self.kind, references)

        return schema(Files(self._files).message(self._name).file.name)

    def _new_writer(self) -> MessageWriter:
        return MessageWriter(Files(self._files), self._name)


def _indexes_of(message: Any) -> bytes:
    """Which message of its file it is, as it stands in front of a value."""
    indexes: list[int] = []
    while message is not None:
        around = message.containing_type
        its = around.nested_types if around is not None else message.file.message_types_by_name.values()
        indexes.insert(0, [each.full_name for each in its].index(message.full_name))
        message = around
    if indexes == [0]:
        return b"\x00"
    return b"".join(map(long_bytes, (len(indexes), *indexes)))


def _files_of(schema: Any, references: Mapping[str, str]) -> bytes:
    """A schema of the registry and those that it imports. Raises ``ValueError``."""
    texts = [*references.items(), ("", schema.schema_str)]
    files = []
    for name, text in texts:
        file = file_of_text(text)
        file.name = name or "the schema"  # an import names it
        files.append(file)
    return set_of(files)


class _Indexed:
    """Decodes messages behind their indexes. ``messages``: those of the writer's schema."""

    def __init__(self, messages: Sequence[Any], decoder: ProtobufDecoder) -> None:
        self._messages = messages
        self._decoder = decoder
        self._names: dict[tuple[int, ...], str] = {}

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        bodies: list[bytes | None] = []
        places: list[int] = []
        bad: list[BadRecord] = []
        for place, value in enumerate(values):
            try:
                bodies.append(None if value is None else self._body(value))
                places.append(place)
            except ValueError as error:
                bad.append(BadRecord(place, str(error)))
        batch, undecodable = self._decoder.decode_good(bodies)
        bad += [BadRecord(places[each.index], each.reason) for each in undecodable]
        return batch, sorted(bad, key=lambda each: each.index)

    def _body(self, value: bytes) -> bytes:
        """Raises ``ValueError`` for a message of another name."""
        try:
            count, at = read_long(value, 0)
            if not 0 <= count <= _INDEXES_MAX:
                raise ValueError(f"{count} indexes of messages")
            indexes: list[int] = []
            for _ in range(count):
                index, at = read_long(value, at)
                indexes.append(index)
        except IndexError:
            raise ValueError("the value ends within its indexes of messages") from None
        name = self._named(tuple(indexes) or (0,))
        if name != self._decoder.name:
            raise ValueError(f"it is a message {name}, not {self._decoder.name}")
        return value[at:]

    def _named(self, indexes: tuple[int, ...]) -> str:
        """The name of the message that has these indexes."""
        found = self._names.get(indexes)
        if found is None:
            its, message = self._messages, None
            for index in indexes:
                if not 0 <= index < len(its):
                    raise ValueError(f"its schema has no message with the indexes {list(indexes)}")
                message = its[index]
                its = message.nested_types
            found = self._names[indexes] = str(message.full_name) if message is not None else ""
        return found
