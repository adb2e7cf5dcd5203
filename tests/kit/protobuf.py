"""Messages of Protobuf for tests, without a compiler of Protobuf."""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.json_format import ParseDict

NUMBERS = ("int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64")
KINDS = ("double", "float", *NUMBERS, "bool", "string", "bytes")
WELL_KNOWN = ("timestamp", "duration", "wrappers", "struct", "any", "empty")


def field(name: str, number: int, kind: str, *, label: str = "optional", **more: Any) -> dict[str, Any]:
    """A field. ``kind``: a scalar, or a full name with a dot in front."""
    scalar = not kind.startswith(".")
    declared = {"type": f"TYPE_{kind.upper()}"} if scalar else {"type": "TYPE_MESSAGE", "typeName": kind}
    return {"name": name, "number": number, "label": f"LABEL_{label.upper()}", **declared, **more}


def message(name: str, *fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "field": list(fields), **more}


def map_of(name: str, key: str, value: str) -> dict[str, Any]:
    return message(name, field("key", 1, key), field("value", 2, value), options={"mapEntry": True})


def file_of(*messages: dict[str, Any], name: str = "t.proto", package: str = "t", **more: Any) -> FileDescriptorProto:
    document = {"name": name, "package": package, "syntax": "proto3", "messageType": list(messages), **more}
    found: FileDescriptorProto = ParseDict(document, FileDescriptorProto())
    return found


def set_of(*files: FileDescriptorProto) -> bytes:
    return bytes(FileDescriptorSet(file=files).SerializeToString())


def classes(*files: FileDescriptorProto) -> dict[str, Any]:
    """The classes of the files' messages, by full name."""
    pool = descriptor_pool.DescriptorPool()
    for each in (*_well_known(), *files):
        pool.Add(each)
    return {
        f"{file.package}.{each.name}": message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{file.package}.{each.name}")
        )
        for file in files
        for each in file.message_type
    }


def serialized(file: FileDescriptorProto) -> str:
    """A file as a Schema Registry gives it."""
    return base64.b64encode(file.SerializeToString()).decode()


def _well_known() -> list[FileDescriptorProto]:
    import importlib

    found = []
    for each in WELL_KNOWN:
        module = importlib.import_module(f"google.protobuf.{each}_pb2")
        proto = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        found.append(proto)
    return found


#: A message of every kind of field.
EVERYTHING = file_of(
    message("Inner", field("n", 1, "int64"), field("deep", 2, ".t.Inner")),
    message("Empty"),
    message(
        "Everything",
        *[field(f"a_{kind}", number, kind) for number, kind in enumerate(KINDS, 1)],
        *[field(f"many_{kind}", 20 + number, kind, label="repeated") for number, kind in enumerate(KINDS, 1)],
        *[
            field(f"maybe_{kind}", 40 + number, kind, oneofIndex=number, proto3Optional=True)
            for number, kind in enumerate(KINDS, 1)
        ],
        field("one_text", 60, "string", oneofIndex=0),
        field("one_inner", 61, ".t.Inner", oneofIndex=0),
        {"name": "color", "number": 62, "label": "LABEL_OPTIONAL", "type": "TYPE_ENUM", "typeName": ".t.Color"},
        {"name": "colors", "number": 63, "label": "LABEL_REPEATED", "type": "TYPE_ENUM", "typeName": ".t.Color"},
        field("inner", 64, ".t.Inner"),
        field("inners", 65, ".t.Inner", label="repeated"),
        field("counts", 66, ".t.Everything.CountsEntry", label="repeated"),
        field("named", 67, ".t.Everything.NamedEntry", label="repeated"),
        field("at", 68, ".google.protobuf.Timestamp"),
        field("took", 69, ".google.protobuf.Duration"),
        field("wrapped", 70, ".google.protobuf.Int64Value"),
        field("data", 71, ".google.protobuf.Struct"),
        field("empty", 72, ".t.Empty"),
        nestedType=[map_of("CountsEntry", "string", "int64"), map_of("NamedEntry", "int32", ".t.Inner")],
        oneofDecl=[{"name": "one"}, *[{"name": f"_maybe_{kind}"} for kind in KINDS]],
    ),
    enumType=[{"name": "Color", "value": [{"name": "RED", "number": 0}, {"name": "BLUE", "number": 5}]}],
    dependency=[f"google/protobuf/{each}.proto" for each in ("timestamp", "duration", "wrappers", "struct")],
)
