"""Where batches come from: Kafka and memory, and the codecs that decode values."""

from spouts.codecs import BytesCodec, Codec, JsonCodec, TextCodec, UndecodableValueError
from spouts.kafka import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout
from spouts.memory import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout

__all__ = [
    "BytesCodec",
    "Codec",
    "JsonCodec",
    "KafkaTransactionalSpout",
    "MemoryTransactionalSpout",
    "OpaqueKafkaTransactionalSpout",
    "OpaqueMemoryTransactionalSpout",
    "TextCodec",
    "UndecodableValueError",
]
