"""Writes each record of a topic as a row of a table, whose key recognises a repeated record."""

import psycopg
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

INSERT = """INSERT INTO orders VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT (kafka_partition, kafka_offset) DO NOTHING"""


def insert(rows):
    with psycopg.connect("postgresql://user:password@database/shop") as connection:
        connection.cursor().executemany(INSERT, rows)


spark = SparkSession.builder.appName("landing").getOrCreate()
kafka = {"kafka.bootstrap.servers": "broker:9092", "startingOffsets": "earliest"}
records = spark.readStream.format("kafka").options(subscribe="orders", **kafka).load()
order = from_json(col("value").cast("string"), "id STRING, shop STRING, cents BIGINT, placed TIMESTAMP").alias("order")
rows = records.select(order, "partition", "offset").select("order.*", "partition", "offset")
query = rows.writeStream.option("checkpointLocation", "/checkpoints/landing")
query.foreachBatch(lambda batch, batch_id: batch.foreachPartition(insert)).start().awaitTermination()
