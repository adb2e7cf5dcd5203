"""Six jobs over the orders of shops, as one pipeline.

It lands each order, keeps the newest row of each, corrects hourly totals for ever, sends each
window of five minutes once, joins orders with what was paid into a folder of Parquet files, and
announces large orders once.

    [kafka]
    bootstrap.servers = "127.0.0.1:9092"
    [postgres]
    url = "postgresql://ratchet:${DB_PASSWORD}@127.0.0.1/shop"
    [registry]
    url = "http://127.0.0.1:8081"

    ratchet run examples.shop_pipeline:p --config shop.toml
"""

from datetime import datetime

from ratchet import Json, Pipeline, RegistryAvro, count, parquet, postgres, sum_, tumbling

p = Pipeline("shop")
orders = p.read_kafka("orders", value=Json(order=str, shop=str, cents=int, at=datetime))

# 1. Each order is a row.
orders.append_into(postgres("raw_orders"), name="raw")

# 2. The newest row of each order.
orders.latest_by("order").upsert_into(postgres("orders"), name="orders")

# 3. Totals per hour, which late orders correct for ever.
per_hour = orders.window(tumbling("1h"), on="at").group_by("shop").agg(orders=count(), cents=sum_("cents"))
per_hour.upsert_into(postgres("per_hour"), name="per-hour")

# 4. Each window of five minutes, sent once, when it closes.
windows = orders.window(tumbling("5 min"), on="at", late="10 min").group_by("shop").agg(cents=sum_("cents"))
windows.when_closed().to_kafka("closed", key="shop", name="closed")

# 5. Orders with what was paid for them up to then, by the timestamps of the records.
paid = p.read_kafka("payments", value=RegistryAvro("payments-value")).latest_by("order", name="paid")
orders.join(paid, on="order", within="30 days", name="matched").append_into(parquet("matched"), name="lake")

# 6. Large orders, each once in a day.
first = orders.deduplicate("order", within="1 day", name="seen")
first.filter("cents > 100000").to_kafka("large", key="order", name="large")
