"""A pipeline that every kind of sink of a pipeline is in, for runs in processes of their own."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from ratchet import Json, Pipeline, count, sqlite, sum_, tumbling


def pipeline(app: Any) -> Pipeline:
    """``app.topic`` is read and ``app.topic``-closed written; the rest is in ``app.folder``."""
    topic, file = app["app.topic"], Path(app["app.folder"]) / "orders.db"
    shop = Pipeline(topic, state=lambda name: sqlite(file, name.removeprefix(topic.replace("-", "_") + "_")))
    orders = shop.read_kafka(
        topic,
        value=Json(order=str, shop=str, cents=int, at=datetime.datetime),
        metadata=["topic", "partition"],
        bootstrap_servers=app["app.kafka"],
    ).filter("cents > 0")
    orders.drop("topic", "partition").append_into(sqlite(file, "raw"), name="raw")
    newest = orders.select("order", "cents").latest_by("order", sequence_by="cents", delete_when="cents = 9")
    newest.upsert_into(sqlite(file, "newest"), name="newest")
    windows = orders.window(tumbling("5 min"), on="at").group_by("shop").agg(n=count(), cents=sum_("cents"))
    windows.when_closed(name="closed").to_kafka(f"{topic}-closed", key="shop", name="sent")
    first = orders.deduplicate("order", within="1 day", on="at", name="seen")
    first.select("order").append_into(sqlite(file, "first"), name="first")
    return shop
