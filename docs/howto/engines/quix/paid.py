"""Joins orders with their payments, up to a day apart."""

from datetime import datetime, timedelta

from quixstreams import Application


def time_in(field):
    return lambda row, headers, timestamp, kind: int(datetime.fromisoformat(row[field]).timestamp() * 1000)


app = Application(
    "broker:9092", consumer_group="paid", auto_offset_reset="earliest", processing_guarantee="exactly-once"
)
orders = app.dataframe(app.topic("orders", timestamp_extractor=time_in("placed")))
payments = app.dataframe(app.topic("payments", timestamp_extractor=time_in("paid_at")))
day = timedelta(days=1)
pairs = orders.join_interval(payments, on_merge="keep-left", grace_ms=day, backward_ms=day, forward_ms=day)
pairs[["id", "shop", "cents", "paid"]].to_topic(app.topic("paid"))
app.run()
