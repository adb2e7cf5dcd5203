"""Six jobs over the orders of shops, as one pipeline.

It lands each order, keeps the newest row of each, corrects hourly totals for ever, sends each
window of five minutes once, joins orders with their payments into a folder of Parquet files, and
announces large orders once.

    ratchet run examples.shop_pipeline:topology --set app.kafka=127.0.0.1:9092
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ratchet import Json, Pipeline, Topology, count, parquet, sqlite, sum_, tumbling


def pipeline(servers: str = "127.0.0.1:9092", folder: str = ".") -> Pipeline:
    """The six jobs. Tables and files are in ``folder``; use ``postgres(dsn, ...)`` for a server."""
    store = f"{folder}/shop.db"
    p = Pipeline("shop", state=lambda name: sqlite(f"{folder}/state.db", name))
    order = Json(order=str, shop=str, cents=int, at=datetime)
    orders = p.read_kafka("orders", value=order, bootstrap_servers=servers)
    paid = p.read_kafka("payments", value=Json(order=str, paid=int, paid_at=datetime))

    # 1. Each order is a row.
    orders.append_into(sqlite(store, "raw_orders"), name="raw")

    # 2. The newest row of each order.
    orders.latest_by("order", sequence_by="at").upsert_into(sqlite(store, "orders"), name="orders-now")

    # 3. Totals per hour, which late orders correct for ever.
    hours = orders.window(tumbling("1 h"), on="at").group_by("shop").agg(orders=count(), cents=sum_("cents"))
    hours.upsert_into(sqlite(store, "per_hour"), name="per-hour")

    # 4. Each window of five minutes, sent once, when it closes.
    windows = orders.window(tumbling("5 min"), on="at", late="10 min").group_by("shop").agg(cents=sum_("cents"))
    windows.when_closed().to_kafka("closed", key="shop", name="closed")

    # 5. Orders with their payments.
    matched = orders.join(paid, on="order", times=("at", "paid_at"), within="30 days", name="matched", late="1 day")
    matched.append_into(parquet(f"{folder}/matched"), name="lake")

    # 6. Large orders, each once in a day by the timestamps of their records.
    first = orders.deduplicate("order", within="1 day", late="1 h", name="seen")
    first.filter("cents > 100000").to_kafka("large", key="order", name="large")
    return p


def topology(app: Mapping[str, Any]) -> Topology:
    return pipeline(app["app.kafka"]).build()
