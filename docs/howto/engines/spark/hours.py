"""Adds up the orders of each shop and hour, and sends each sum once, when the hour is over."""

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json, sum, window

spark = SparkSession.builder.appName("hours").getOrCreate()
kafka = {"kafka.bootstrap.servers": "broker:9092", "startingOffsets": "earliest"}
records = spark.readStream.format("kafka").options(subscribe="orders", **kafka).load()
order = from_json(col("value").cast("string"), "shop STRING, cents BIGINT, placed TIMESTAMP").alias("order")
orders = records.select(order).select("order.*").withWatermark("placed", "10 minutes")
sums = orders.groupBy(window("placed", "1 hour"), "shop").agg(sum("cents").alias("cents"))
values = sums.selectExpr("shop AS key", "to_json(struct(window.start AS window_start, shop, cents)) AS value")
query = values.writeStream.format("kafka").options(topic="per_hour", checkpointLocation="/checkpoints/hours", **kafka)
query.start().awaitTermination()
