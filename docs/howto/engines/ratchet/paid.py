"""Joins orders with their payments, up to a day apart."""

from datetime import datetime

from ratchet import Json, Pipeline, postgres

paid = Pipeline("paid", state=lambda step: postgres("postgresql://user:password@database/shop", step))
order, payment = Json(id=str, shop=str, cents=int, placed=datetime), Json(id=str, paid=int, paid_at=datetime)
orders = paid.read_kafka("orders", value=order, bootstrap_servers="broker:9092")
payments = paid.read_kafka("payments", value=payment)
pairs = orders.join(payments, on="id", times=("placed", "paid_at"), within="1 day", late="1 h", name="pairs")
pairs.select("id", "shop", "cents", "paid").to_kafka("paid", key="id")
