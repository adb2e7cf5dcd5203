"""Descriptors of Protobuf messages, and the Arrow types of their fields.

=========================  =========================================================================
int32, int64, ...          the integer of this width, signed or not
float, double, bool        float32, float64, bool
string, bytes              string, binary
enum                       string: the name of the value; its number where it has no name
repeated, map              list, map
message                    struct; null where it is absent
google.protobuf.Timestamp  timestamp of microseconds in UTC; further digits are cut, as in JSON
google.protobuf.Duration   duration of microseconds; further digits are cut
Int64Value and the like    the value; null where it is absent
Struct, Value, ListValue   string: JSON
=========================  =========================================================================

A field that is absent is null where Protobuf tells absence (``optional``, members of a ``oneof``,
messages), unless the schema has a default value for it. Elsewhere it is 0, false or empty. A
message that contains itself, and a message deeper than ``DEPTH_MAX``, is kept as its bytes.

Source: Protocol Buffers, language guide (proto3), and field presence.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from framework.errors import ConfigError, TopologyError
from framework.local_paths import local_path

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import Message

#: Levels of messages that become structs.
DEPTH_MAX = 32
#: Columns of a message, those of nested messages included.
LEAVES_MAX = 10_000
_WELL_KNOWN = "google.protobuf."
_WRAPPERS = {
    f"{_WELL_KNOWN}{each}Value"
    for each in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
_JSON = {f"{_WELL_KNOWN}{each}" for each in ("Struct", "Value", "ListValue")}
TIMESTAMP, DURATION = f"{_WELL_KNOWN}Timestamp", f"{_WELL_KNOWN}Duration"


def imported() -> None:
    """Raise ``ConfigError`` where the package is missing."""
    try:
        from google.protobuf import message  # noqa: F401
    except ImportError:
        raise ConfigError("Protobuf needs a package: pip install 'ratchet-pipelines[protobuf]'") from None


def file_set(given: type[Message] | bytes | str | Path) -> bytes:
    """A serialized ``FileDescriptorSet``, each file after those that it imports: that of a
    generated class, or what ``protoc --include_imports --descriptor_set_out=FILE`` has written.
    Raises ``TopologyError``."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    if isinstance(given, type):
        files: dict[str, FileDescriptorProto] = {}
        _add_file(given.DESCRIPTOR.file, files)
        return bytes(FileDescriptorSet(file=files.values()).SerializeToString(deterministic=True))
    try:
        data = given if isinstance(given, bytes) else local_path(given, "descriptor set").read_bytes()
        if not FileDescriptorSet.FromString(data).file:
            raise TopologyError(f"{_named(given)} is an empty descriptor set")
    except OSError as error:
        raise TopologyError(f"the descriptor set cannot be read: {error}") from error
    except DecodeError:
        raise TopologyError(
            f"{_named(given)} is no descriptor set: make one by protoc --include_imports --descriptor_set_out=FILE"
        ) from None
    return data


def _named(given: bytes | str | Path) -> str:
    return "what was given" if isinstance(given, bytes) else str(given)


def _add_file(file: Any, files: dict[str, FileDescriptorProto]) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    if file.name in files:
        return
    for each in file.dependencies:
        _add_file(each, files)
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    files[file.name] = proto


def file_of_text(text: str) -> FileDescriptorProto:
    """A file as a Schema Registry serves it, in base64. Raises ``ValueError``."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        return FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError):
        raise ValueError("the Schema Registry has given no serialized schema for it: it is too old") from None


def text_of_file(file: FileDescriptorProto) -> str:
    """A file as a Schema Registry takes it, in base64."""
    return base64.b64encode(file.SerializeToString(deterministic=True)).decode()


def files_of(data: bytes) -> dict[str, FileDescriptorProto]:
    """The files of a serialized set, by name."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    return {each.name: each for each in FileDescriptorSet.FromString(data).file}


def set_of(files: Iterable[FileDescriptorProto]) -> bytes:
    """A serialized set of these files."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    return bytes(FileDescriptorSet(file=files).SerializeToString(deterministic=True))


class Files:
    """The messages of a serialized ``FileDescriptorSet``. Raises ``TopologyError`` for one that is
    not whole, or contradicts itself. ``google/protobuf/*.proto`` may be missing."""

    def __init__(self, data: bytes) -> None:
        from google.protobuf import descriptor_pool

        self._pool = descriptor_pool.DescriptorPool()
        files = files_of(data)
        self._added: set[str] = set()
        self._last = ""
        for each in files:
            self._add(each, files, 0)

    def _add(self, name: str, files: Mapping[str, FileDescriptorProto], depth: int) -> None:
        if name in self._added:
            return
        self._added.add(name)
        proto = files.get(name) or _well_known_file(name)
        if proto is None:
            raise TopologyError(f"the descriptor set lacks {name!r}: give protoc --include_imports")
        if depth > LEAVES_MAX:
            raise TopologyError(f"{name!r} imports too many files")
        for each in proto.dependency:
            self._add(each, files, depth + 1)
        try:
            self._pool.AddSerializedFile(proto.SerializeToString())
        except (TypeError, ValueError) as error:
            raise TopologyError(f"{name!r} is no file of Protobuf: {str(error)[:200]}") from None
        self._last = name

    def message(self, name: str) -> Descriptor:
        """The message with this full name. Raises ``TopologyError``."""
        try:
            return self._pool.FindMessageTypeByName(name)
        except KeyError:
            there = ", ".join(each.full_name for each in self.messages()[:10])
            raise TopologyError(f"there is no message {name!r}; there are: {there or 'none'}") from None

    def messages(self) -> list[Descriptor]:
        """The messages of the last file, those within others excepted."""
        found = self._pool.FindFileByName(self._last) if self._last else None
        return list(found.message_types_by_name.values()) if found is not None else []


def _well_known_file(name: str) -> FileDescriptorProto | None:
    if not name.startswith("google/protobuf/"):
        return None
    import importlib

    from google.protobuf import descriptor_pool
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    try:
        importlib.import_module(f"{name.removesuffix('.proto').replace('/', '.')}_pb2")
        found = FileDescriptorProto()
        descriptor_pool.Default().FindFileByName(name).CopyToProto(found)
    except (ImportError, KeyError, ValueError):
        return None
    return found


def is_json(message: Descriptor) -> bool:
    return message.full_name in _JSON


def is_wrapper(message: Descriptor) -> bool:
    return message.full_name in _WRAPPERS


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def arrow_schema(message: Descriptor) -> pa.Schema:
    """The columns of a message. Raises ``TopologyError`` for a message without fields, or with too
    many."""
    leaves = [0]
    fields = [pa.field(each.name, arrow_type(each, (message.full_name,), leaves)) for each in message.fields]
    if not fields:
        raise TopologyError(f"message {message.full_name!r} has no fields")
    return pa.schema(fields)


def arrow_type(field: FieldDescriptor, within: tuple[str, ...], leaves: list[int] | None = None) -> pa.DataType:
    """The type of a field. ``within``: the messages around it. ``leaves``: counts the columns."""
    if is_map(field):
        key, value = (field.message_type.fields_by_name[each] for each in ("key", "value"))
        return pa.map_(arrow_type(key, within, leaves), arrow_type(value, within, leaves))
    one = _type_of_one(field, within, leaves)
    return pa.list_(one) if is_repeated(field) else one


def _type_of_one(field: FieldDescriptor, within: tuple[str, ...], leaves: list[int] | None) -> pa.DataType:
    if leaves is not None:
        leaves[0] += 1
        if leaves[0] > LEAVES_MAX:
            raise TopologyError(f"message {within[0]!r} has more than {LEAVES_MAX:,} fields, nested ones included")
    message = field.message_type
    if message is None:
        return _scalar(field)
    if message.full_name == TIMESTAMP:
        return pa.timestamp("us", tz="UTC")
    if message.full_name == DURATION:
        return pa.duration("us")
    if is_json(message):
        return pa.string()
    if is_wrapper(message):
        return _scalar(message.fields[0])
    if is_opaque(message, within):
        return pa.binary()
    inner = (*within, message.full_name)
    return pa.struct([pa.field(each.name, arrow_type(each, inner, leaves)) for each in message.fields])


def is_opaque(message: Descriptor, within: tuple[str, ...]) -> bool:
    """Whether a message is kept as its bytes."""
    return message.full_name in within or len(within) >= DEPTH_MAX or not message.fields


def _scalar(field: FieldDescriptor) -> pa.DataType:
    if field.cpp_type == _STRING:
        return pa.binary() if field.type == field.TYPE_BYTES else pa.string()
    return _SCALARS[field.cpp_type]


# The numbers of FieldDescriptor.CPPTYPE_*, which are a part of its interface.
_INT32, _INT64, _UINT32, _UINT64, _DOUBLE, _FLOAT, _BOOL, _ENUM, _STRING = range(1, 10)
_SCALARS = {
    _INT32: pa.int32(),
    _INT64: pa.int64(),
    _UINT32: pa.uint32(),
    _UINT64: pa.uint64(),
    _DOUBLE: pa.float64(),
    _FLOAT: pa.float32(),
    _BOOL: pa.bool_(),
    _ENUM: pa.string(),
}
