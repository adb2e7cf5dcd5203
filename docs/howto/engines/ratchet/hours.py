"""Adds up the orders of each shop and hour, and sends each sum once, when the hour is over."""

from datetime import datetime

from ratchet import Json, Pipeline, postgres, sum_, tumbling

hours = Pipeline("hours", state=lambda step: postgres("postgresql://user:password@database/shop", step))
order = Json(shop=str, cents=int, placed=datetime)
orders = hours.read_kafka("orders", value=order, bootstrap_servers="broker:9092")
per_hour = orders.window(tumbling("1 h"), on="placed", late="10 min").group_by("shop").agg(cents=sum_("cents"))
per_hour.when_closed(name="closed").to_kafka("per_hour", key="shop")
