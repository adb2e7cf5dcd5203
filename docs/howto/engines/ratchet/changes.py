"""Follows the changes of a table, as Debezium writes them, in a table of another database."""

from ratchet import Debezium, Fields, Pipeline, postgres

changes = Pipeline("changes")
row = Debezium(Fields(id=int, shop=str, cents=int), metadata=["op"])
orders = changes.read_kafka("shop.public.orders", value=row, bootstrap_servers="broker:9092")
newest = orders.with_columns(tombstone="op = 'd'").drop("op").latest_by("id")
newest.upsert_into(postgres("postgresql://user:password@database/shop", "orders"))
