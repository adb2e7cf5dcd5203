"""Produces records with headers of any bytes, by librdkafka's C API: no client of Python's can."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka

Header = tuple[bytes, bytes | None]

_TOPIC, _PARTITION, _VALUE, _MESSAGE_FLAGS, _HEADERS = 1, 3, 4, 7, 10
_COPY = 2
_PRODUCER = 0


class _Memory(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Value(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int32),
        ("memory", _Memory),
        ("pointer", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("value", _Value))


def _library() -> Any:
    (path,) = Path(confluent_kafka.__file__).parent.parent.glob("confluent_kafka.libs/librdkafka-*")
    library = ctypes.CDLL(str(path))
    for name in ("conf_new", "new", "headers_new", "produceva"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    library.rd_kafka_error_string.restype = ctypes.c_char_p
    return library


def produce(bootstrap_servers: str, topic: str, records: Iterable[tuple[bytes, Sequence[Header]]]) -> None:
    """Produce values with headers into partition 0, and wait until all are delivered."""
    library = _library()
    reason = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    assert library.rd_kafka_conf_set(conf, b"bootstrap.servers", bootstrap_servers.encode(), reason, 512) == 0, reason
    client = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, reason, 512))
    assert client.value, reason.value
    for value, headers in records:
        made = ctypes.c_void_p(library.rd_kafka_headers_new(len(headers)))
        for name, data in headers:
            size = -1 if data is None else len(data)
            sizes = ctypes.c_ssize_t(len(name)), ctypes.c_ssize_t(max(size, 0))
            assert library.rd_kafka_header_add(made, name, sizes[0], data, sizes[1]) == 0
        arguments = (_Argument * 5)()
        for argument, kind in zip(arguments, (_TOPIC, _PARTITION, _VALUE, _MESSAGE_FLAGS, _HEADERS), strict=True):
            argument.kind = kind
        arguments[0].value.text = topic.encode()
        arguments[1].value.number = 0
        arguments[2].value.memory = _Memory(value, len(value))
        arguments[3].value.number = _COPY
        arguments[4].value.pointer = made.value
        error = library.rd_kafka_produceva(client, arguments, ctypes.c_size_t(5))
        assert error is None, library.rd_kafka_error_string(ctypes.c_void_p(error))
    assert library.rd_kafka_flush(client, 60_000) == 0
    library.rd_kafka_destroy(client)
