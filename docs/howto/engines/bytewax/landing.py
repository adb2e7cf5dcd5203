"""Writes each record of a topic as a row of a table, whose key recognises a repeated record."""

import json

import bytewax.operators as op
import psycopg
from bytewax.connectors.kafka import KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition

INSERT = """INSERT INTO orders VALUES (%(id)s, %(shop)s, %(cents)s, %(placed)s, %(partition)s, %(offset)s)
ON CONFLICT (kafka_partition, kafka_offset) DO NOTHING"""


class Writer(StatelessSinkPartition):
    def __init__(self):
        self.connection = psycopg.connect("postgresql://user:password@database/shop")

    def write_batch(self, items):
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(INSERT, items)


class Orders(DynamicSink):
    def build(self, step_id, worker_index, worker_count):
        return Writer()


def row(record):
    return {**json.loads(record.value), "partition": record.partition, "offset": record.offset}


flow = Dataflow("landing")
records = op.input("records", flow, KafkaSource(["broker:9092"], ["orders"]))
op.output("orders", op.map("rows", records, row), Orders())
