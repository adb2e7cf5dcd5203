"""Counts the words of a topic, in a table."""

from ratchet import Pipeline, Text, count, postgres

words = Pipeline("words")
lines = words.read_kafka("lines", value=Text("line"), bootstrap_servers="broker:9092")
each = lines.flat_map(lambda row: row["line"].lower().split(), word=str, deterministic=True)
each.group_by("word").agg(n=count()).upsert_into(postgres("postgresql://user:password@database/shop", "counts"))
