"""Counts the words of a topic, in a table."""

import bytewax.operators as op
import psycopg
from bytewax.connectors.kafka import KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition

UPSERT = "INSERT INTO counts VALUES (%s, %s) ON CONFLICT (word) DO UPDATE SET n = excluded.n"


class Writer(StatelessSinkPartition):
    def __init__(self):
        self.connection = psycopg.connect("postgresql://user:password@database/shop")

    def write_batch(self, items):
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(UPSERT, items)


class Counts(DynamicSink):
    def build(self, step_id, worker_index, worker_count):
        return Writer()


def count(n, word):
    return ((n or 0) + 1,) * 2


flow = Dataflow("words")
lines = op.input("lines", flow, KafkaSource(["broker:9092"], ["lines"]))
words = op.flat_map("words", lines, lambda line: line.value.decode().lower().split())
counts = op.stateful_map("count", op.key_on("by-word", words, str), count)
op.output("counts", counts, Counts())
