"""Pipelines: their sources, formats, aggregates and places, joined to the compiler of
``framework.streams``."""

from framework.streams import Stream, Table
from ratchet.streams.aggregates import (
    collect,
    count,
    count_distinct,
    first,
    last,
    max_,
    mean,
    min_,
    quantile,
    reduce,
    sum_,
)
from ratchet.streams.formats import (
    Avro,
    Bytes,
    Debezium,
    Json,
    Protobuf,
    RegistryAvro,
    RegistryJson,
    RegistryProtobuf,
    Text,
)
from ratchet.streams.pipeline import Pipeline
from ratchet.streams.targets import dead_letters, delta, mysql, parquet, postgres, redis, sqlite

__all__ = [
    "Avro",
    "Bytes",
    "Debezium",
    "Json",
    "Pipeline",
    "Protobuf",
    "RegistryAvro",
    "RegistryJson",
    "RegistryProtobuf",
    "Stream",
    "Table",
    "Text",
    "collect",
    "count",
    "count_distinct",
    "dead_letters",
    "delta",
    "first",
    "last",
    "max_",
    "mean",
    "min_",
    "mysql",
    "parquet",
    "postgres",
    "quantile",
    "redis",
    "reduce",
    "sqlite",
    "sum_",
]
