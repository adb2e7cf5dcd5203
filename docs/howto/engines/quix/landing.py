"""Writes each record of a topic as a row of a table, whose key recognises a repeated record."""

from quixstreams import Application, message_context
from quixstreams.sinks.community.postgresql import PostgreSQLSink


def place(order):
    order["kafka_partition"], order["kafka_offset"] = message_context().partition, message_context().offset


app = Application("broker:9092", consumer_group="landing", auto_offset_reset="earliest")
key = ["kafka_partition", "kafka_offset"]
table = PostgreSQLSink(
    "database", 5432, "shop", "user", "password", "orders", primary_key_columns=key, upsert_on_primary_key=True
)
app.dataframe(app.topic("orders")).update(place).sink(table)
app.run()
