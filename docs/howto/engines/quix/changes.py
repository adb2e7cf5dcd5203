"""Follows the changes of a table, as Debezium writes them, in a table of another database."""

import psycopg2
from quixstreams import Application
from quixstreams.sinks import BatchingSink

UPSERT = """INSERT INTO orders VALUES (%(id)s, %(shop)s, %(cents)s)
ON CONFLICT (id) DO UPDATE SET shop = excluded.shop, cents = excluded.cents"""


class Orders(BatchingSink):
    def setup(self):
        self.connection = psycopg2.connect("postgresql://user:password@database/shop")

    def write(self, batch):
        with self.connection, self.connection.cursor() as cursor:
            for change in (item.value["payload"] for item in batch):
                if change["op"] == "d":
                    cursor.execute("DELETE FROM orders WHERE id = %(id)s", change["before"])
                else:
                    cursor.execute(UPSERT, change["after"])


app = Application("broker:9092", consumer_group="changes", auto_offset_reset="earliest")
changes = app.dataframe(app.topic("shop.public.orders"))
changes.filter(lambda change: change is not None).sink(Orders())
app.run()
