"""Writes each record of a topic as a row of a table."""

from datetime import datetime

from ratchet import Json, Pipeline, postgres

landing = Pipeline("landing")
order = Json(id=str, shop=str, cents=int, placed=datetime)
orders = landing.read_kafka("orders", value=order, bootstrap_servers="broker:9092")
orders.append_into(postgres("postgresql://user:password@database/shop", "orders"))
