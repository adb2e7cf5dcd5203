"""Drops the orders that repeat one of the day before."""

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

spark = SparkSession.builder.appName("once").getOrCreate()
kafka = {"kafka.bootstrap.servers": "broker:9092", "startingOffsets": "earliest"}
records = spark.readStream.format("kafka").options(subscribe="orders", **kafka).load()
order = from_json(col("value").cast("string"), "id STRING, placed TIMESTAMP").alias("order")
orders = records.select("key", "value", order).select("key", "value", "order.*").withWatermark("placed", "1 day")
first = orders.dropDuplicatesWithinWatermark(["id"]).select("key", "value")
query = first.writeStream.format("kafka").options(topic="orders_once", checkpointLocation="/checkpoints/once", **kafka)
query.start().awaitTermination()
