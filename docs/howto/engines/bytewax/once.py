"""Drops the orders that repeat one of the day before."""

import json
from datetime import datetime, timedelta

import bytewax.operators as op
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow


def first(seen, record):
    placed = datetime.fromisoformat(json.loads(record.value)["placed"])
    if seen is not None and placed < seen + timedelta(days=1):
        return seen, []
    return placed, [KafkaSinkMessage(record.key, record.value)]


flow = Dataflow("once")
records = op.input("records", flow, KafkaSource(["broker:9092"], ["orders"]))
by_id = op.key_on("by-id", records, lambda record: record.key.decode())
op.output(
    "once",
    op.key_rm("messages", op.stateful_flat_map("first", by_id, first)),
    KafkaSink(["broker:9092"], "orders_once"),
)
