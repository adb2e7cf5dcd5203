"""Counts the words of a topic, in a table."""

import psycopg
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, explode, lower, split

UPSERT = "INSERT INTO counts VALUES (%s, %s) ON CONFLICT (word) DO UPDATE SET n = excluded.n"


def upsert(rows):
    with psycopg.connect("postgresql://user:password@database/shop") as connection:
        connection.cursor().executemany(UPSERT, rows)


spark = SparkSession.builder.appName("words").getOrCreate()
kafka = {"kafka.bootstrap.servers": "broker:9092", "startingOffsets": "earliest"}
lines = spark.readStream.format("kafka").options(subscribe="lines", **kafka).load()
words = lines.select(explode(split(lower(col("value").cast("string")), r"\s+")).alias("word"))
query = (
    words.groupBy("word").count().writeStream.outputMode("update").option("checkpointLocation", "/checkpoints/words")
)
query.foreachBatch(lambda batch, batch_id: batch.foreachPartition(upsert)).start().awaitTermination()
