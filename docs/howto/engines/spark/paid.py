"""Joins orders with their payments, up to a day apart."""

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

spark = SparkSession.builder.appName("paid").getOrCreate()
kafka = {"kafka.bootstrap.servers": "broker:9092", "startingOffsets": "earliest"}


def read(topic, columns):
    records = spark.readStream.format("kafka").options(subscribe=topic, **kafka).load()
    return records.select(from_json(col("value").cast("string"), columns).alias("row")).select("row.*")


orders = read("orders", "id STRING, shop STRING, cents BIGINT, placed TIMESTAMP").withWatermark("placed", "1 hour")
payments = read("payments", "id STRING, paid BIGINT, paid_at TIMESTAMP").withWatermark("paid_at", "1 hour")
near = "paid_at BETWEEN placed - INTERVAL 1 DAY AND placed + INTERVAL 1 DAY"
pairs = orders.join(payments, "id").where(near)
values = pairs.selectExpr("id AS key", "to_json(struct(id, shop, cents, paid)) AS value")
query = values.writeStream.format("kafka").options(topic="paid", checkpointLocation="/checkpoints/paid", **kafka)
query.start().awaitTermination()
