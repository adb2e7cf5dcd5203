"""Where batches come from: Kafka and memory, and the codecs that decode values."""

from spouts.avro_codec import AvroCodec
from spouts.bad_records import BadRecord
from spouts.codecs import BulkCodec, BytesCodec, Codec, TextCodec, UndecodableValueError
from spouts.json_codec import JsonCodec
from spouts.kafka import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout
from spouts.kafka_core import KafkaSpout
from spouts.memory import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from spouts.retries import RetryPolicy
from spouts.schema_registry import RegistryAvroCodec

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
    "RegistryAvroCodec",
    "RetryPolicy",
    "TextCodec",
    "UndecodableValueError",
]
