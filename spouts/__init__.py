"""Sources of tuples: spouts for Kafka, Redis streams and memory, and the codecs that decode
values."""

from typing import TYPE_CHECKING, Any

from spouts.codecs.avro import AvroCodec
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.cloud_events import CloudEventsCodec
from spouts.codecs.codec import BulkCodec, BytesCodec, Codec, TextCodec, UndecodableValueError
from spouts.codecs.compressed import CompressedCodec
from spouts.codecs.csv import CsvCodec
from spouts.codecs.debezium import DebeziumCodec
from spouts.codecs.debezium_changes import DebeziumChanges
from spouts.codecs.encoding_codec import EncodingCodec
from spouts.codecs.field_aliases import AliasedCodec
from spouts.codecs.finite_floats import FiniteCodec
from spouts.codecs.json import JsonCodec
from spouts.codecs.messagepack import MessagePackCodec
from spouts.codecs.protobuf import ProtobufCodec
from spouts.codecs.registry_avro import RegistryAvroCodec
from spouts.codecs.registry_json import RegistryJsonCodec
from spouts.codecs.registry_protobuf import RegistryProtobufCodec
from spouts.failed_tuple_retries import RetryPolicy
from spouts.kafka.core import KafkaSpout
from spouts.kafka.topic_streams import TopicStream
from spouts.kafka.transactional import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout
from spouts.memory import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout

if TYPE_CHECKING:
    from spouts.redis_streams import RedisStreamSpout

_LAZY = {"RedisStreamSpout": "spouts.redis_streams"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'spouts' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "AliasedCodec",
    "AvroCodec",
    "BadRecord",
    "BulkCodec",
    "BytesCodec",
    "CloudEventsCodec",
    "Codec",
    "CompressedCodec",
    "CsvCodec",
    "DebeziumChanges",
    "DebeziumCodec",
    "EncodingCodec",
    "FiniteCodec",
    "JsonCodec",
    "KafkaSpout",
    "KafkaTransactionalSpout",
    "MemoryTransactionalSpout",
    "MessagePackCodec",
    "OpaqueKafkaTransactionalSpout",
    "OpaqueMemoryTransactionalSpout",
    "ProtobufCodec",
    "RedisStreamSpout",
    "RegistryAvroCodec",
    "RegistryJsonCodec",
    "RegistryProtobufCodec",
    "RetryPolicy",
    "TextCodec",
    "TopicStream",
    "UndecodableValueError",
]
