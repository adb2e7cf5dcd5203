"""Drops the orders that repeat one of the day before."""

from datetime import datetime, timedelta

from quixstreams import Application


def placed(order, headers, timestamp, timestamp_type):
    return int(datetime.fromisoformat(order["placed"]).timestamp() * 1000)


def is_first(order, state):
    if state.exists("seen"):
        return False
    state.set("seen", True, ttl=timedelta(days=1))
    return True


app = Application(
    "broker:9092", consumer_group="once", auto_offset_reset="earliest", processing_guarantee="exactly-once"
)
orders = app.dataframe(app.topic("orders", timestamp_extractor=placed))
orders.filter(is_first, stateful=True).to_topic(app.topic("orders_once"))
app.run()
