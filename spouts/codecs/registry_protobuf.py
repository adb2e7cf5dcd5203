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
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Values
from spouts.codecs.protobuf import ProtobufDecoder
from spouts.codecs.protobuf_schema import Files, file_of_text, file_set, imported, set_of
from spouts.codecs.registry import RegistryCodec, references_of
from spouts.codecs.registry_client import RegistryClient

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Messages within messages that an index may name.
_INDEXES_MAX = 32


class RegistryProtobufCodec(RegistryCodec):
    """Protobuf messages of one type that name their schema in a Schema Registry; ``RegistryCodec``
    says more.

    Give either ``subject``: the type is the first message of its latest schema when the codec is
    created, or that named by ``message``; or ``message`` alone: a generated class, or a name in
    ``descriptor_set``, as for ``ProtobufCodec``. Fields that a writer's schema adds are ignored,
    and those that it lacks are absent, as Protobuf does. A value whose message has another full
    name is a bad record.

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
    ) -> None:
        imported()
        super().__init__(registry, writer_subjects)
        if isinstance(message, type):
            given = subject is None and descriptor_set is None
        else:
            given = (subject is None) == (message is not None and descriptor_set is not None)
        if not given or (subject is not None and descriptor_set is not None):
            raise TopologyError(
                "RegistryProtobufCodec needs subject=, or a generated class as message=, or message= and descriptor_set="
            )
        if subject is not None:
            self._files = self.latest(subject, lambda found: _files_of(found, self._registry))
        else:
            self._files = file_set(message if isinstance(message, type) else descriptor_set)  # type: ignore[arg-type]
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

    def reader_key(self) -> str:
        return f"{self._name} {self._files.hex()}"

    def tombstones(self) -> ProtobufDecoder:
        return ProtobufDecoder(Files(self._files), self._name)

    def decoder(self, schema: Any, registry: RegistryClient) -> _Indexed:
        return _Indexed(Files(_files_of(schema, registry)).messages(), self.tombstones())


def _files_of(schema: Any, registry: RegistryClient) -> bytes:
    """A schema of the registry and those that it imports. Raises ``ValueError``."""
    texts = [*references_of(registry, schema), ("", schema.schema_str)]
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
