"""Follows the changes of a table, as Debezium writes them, in a table of another database."""

import psycopg
from pyspark.sql import SparkSession
from pyspark.sql.functions import coalesce, col, from_json, max_by, struct

ENVELOPE = (
    "payload STRUCT<op: STRING, before: STRUCT<id: BIGINT>, after: STRUCT<id: BIGINT, shop: STRING, cents: BIGINT>>"
)
UPSERT = """INSERT INTO orders VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET shop = excluded.shop, cents = excluded.cents"""


def write(batch, batch_id):
    newest = batch.groupBy("id").agg(max_by(struct("op", "after"), "offset").alias("new")).select("id", "new.*")
    newest.foreachPartition(write_rows)


def write_rows(rows):
    with psycopg.connect("postgresql://user:password@database/shop") as connection:
        for row in rows:
            if row.op == "d":
                connection.execute("DELETE FROM orders WHERE id = %s", [row.id])
            else:
                connection.execute(UPSERT, row.after)


spark = SparkSession.builder.appName("changes").getOrCreate()
kafka = {"kafka.bootstrap.servers": "broker:9092", "startingOffsets": "earliest"}
records = spark.readStream.format("kafka").options(subscribe="shop.public.orders", **kafka).load()
change = from_json(col("value").cast("string"), ENVELOPE).alias("change")
changes = records.where("value IS NOT NULL").select("offset", change).select("offset", "change.payload.*")
keyed = changes.withColumn("id", coalesce("after.id", "before.id"))
query = keyed.writeStream.option("checkpointLocation", "/checkpoints/changes").foreachBatch(write)
query.start().awaitTermination()
