"""Follows the changes of a table, as Debezium writes them, in a table of another database."""

import json

import bytewax.operators as op
import psycopg
from bytewax.connectors.kafka import KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition

UPSERT = """INSERT INTO orders VALUES (%(id)s, %(shop)s, %(cents)s)
ON CONFLICT (id) DO UPDATE SET shop = excluded.shop, cents = excluded.cents"""


class Writer(StatelessSinkPartition):
    def __init__(self):
        self.connection = psycopg.connect("postgresql://user:password@database/shop")

    def write_batch(self, items):
        with self.connection.transaction(), self.connection.cursor() as cursor:
            for change in items:
                if change["op"] == "d":
                    cursor.execute("DELETE FROM orders WHERE id = %(id)s", change["before"])
                else:
                    cursor.execute(UPSERT, change["after"])


class Orders(DynamicSink):
    def build(self, step_id, worker_index, worker_count):
        return Writer()


def decoded(record):
    return json.loads(record.value)["payload"] if record.value is not None else None


flow = Dataflow("changes")
records = op.input("changes", flow, KafkaSource(["broker:9092"], ["shop.public.orders"]))
op.output("orders", op.filter_map("decoded", records, decoded), Orders())
