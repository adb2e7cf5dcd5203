"""Adds up the orders of each shop and hour, and sends each sum once, when the hour is over."""

from datetime import datetime, timedelta

from quixstreams import Application
from quixstreams.dataframe.windows.aggregations import Sum


def placed(order, headers, timestamp, timestamp_type):
    return int(datetime.fromisoformat(order["placed"]).timestamp() * 1000)


app = Application(
    "broker:9092", consumer_group="hours", auto_offset_reset="earliest", processing_guarantee="exactly-once"
)
orders = app.dataframe(app.topic("orders", timestamp_extractor=placed)).group_by("shop")
windows = orders.tumbling_window(timedelta(hours=1), grace_ms=timedelta(minutes=10)).agg(cents=Sum("cents"))
windows.final().to_topic(app.topic("per_hour"))
app.run()
