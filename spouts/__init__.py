"""Where batches come from: Kafka and memory, and the codecs that decode values."""

from typing import TYPE_CHECKING, Any

from spouts.avro_codec import AvroCodec
from spouts.bad_records import BadRecord
from spouts.codecs import BulkCodec, BytesCodec, Codec, TextCodec, UndecodableValueError
from spouts.json_codec import JsonCodec
from spouts.kafka import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout
from spouts.kafka_core import KafkaSpout
from spouts.memory import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from spouts.retries import RetryPolicy
from spouts.schema_registry import RegistryAvroCodec

if TYPE_CHECKING:
    from spouts.redis_streams import RedisStreamSpout

_LAZY = {"RedisStreamSpout": "spouts.redis_streams"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'spouts' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "AvroCodec",
    "BadRecord",
    "BulkCodec",
    "BytesCodec",
    "Codec",
    "JsonCodec",
    "KafkaSpout",
    "KafkaTransactionalSpout",
    "MemoryTransactionalSpout",
    "OpaqueKafkaTransactionalSpout",
    "OpaqueMemoryTransactionalSpout",
    "RedisStreamSpout",
    "RegistryAvroCodec",
    "RetryPolicy",
    "TextCodec",
    "UndecodableValueError",
]
