"""Joins orders with their payments, up to a day apart: in sessions, for there are no intervals."""

import json
from datetime import datetime, timedelta

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow


def read(topic, time):
    records = op.input(topic, flow, KafkaSource(["broker:9092"], [topic]))
    rows = op.map(f"{topic}-decoded", records, lambda record: json.loads(record.value))
    timed = op.map(f"{topic}-timed", rows, lambda row: {**row, "time": datetime.fromisoformat(row[time])})
    return op.key_on(f"{topic}-by-id", timed, lambda row: row["id"])


def message(pair):
    key, (_, (order, payment)) = pair
    value = {"id": key, "shop": order["shop"], "cents": order["cents"], "paid": payment["paid"]}
    return KafkaSinkMessage(key.encode(), json.dumps(value).encode())


flow = Dataflow("paid")
clock = win.EventClock(lambda row: row["time"], timedelta(hours=1))
sessions = win.SessionWindower(gap=timedelta(days=1))
sides = read("orders", "placed"), read("payments", "paid_at")
pairs = win.join_window("pairs", clock, sessions, *sides, emit_mode="complete", ordered=False)
op.output("paid", op.map("encoded", pairs.down, message), KafkaSink(["broker:9092"], "paid"))
