"""Adds up the orders of each shop and hour, and sends each sum once, when the hour is over."""

import json
from datetime import UTC, datetime, timedelta

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow

EPOCH, HOUR = datetime(1970, 1, 1, tzinfo=UTC), timedelta(hours=1)


def message(total):
    shop, (window, cents) = total
    value = {"window_start": (EPOCH + window * HOUR).isoformat(), "shop": shop, "cents": cents}
    return KafkaSinkMessage(shop.encode(), json.dumps(value).encode())


flow = Dataflow("hours")
records = op.input("orders", flow, KafkaSource(["broker:9092"], ["orders"]))
orders = op.map("decoded", records, lambda record: json.loads(record.value))
by_shop = op.key_on("by-shop", orders, lambda order: order["shop"])
clock = win.EventClock(lambda order: datetime.fromisoformat(order["placed"]), timedelta(minutes=10))
hours = win.TumblingWindower(HOUR, align_to=EPOCH)
sums = win.fold_window("sums", by_shop, clock, hours, int, lambda cents, order: cents + order["cents"], int.__add__)
op.output("per-hour", op.map("encoded", sums.down, message), KafkaSink(["broker:9092"], "per_hour"))
