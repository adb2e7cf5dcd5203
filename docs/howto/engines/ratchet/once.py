"""Drops the orders that repeat one of the day before."""

from datetime import datetime

from ratchet import Json, Pipeline, postgres

once = Pipeline("once", state=lambda step: postgres("postgresql://user:password@database/shop", step))
order = Json(id=str, shop=str, cents=int, placed=datetime)
orders = once.read_kafka("orders", value=order, bootstrap_servers="broker:9092")
first = orders.deduplicate("id", within="1 day", on="placed", late="1 h", name="seen")
first.to_kafka("orders_once", key="id")
