"""Counts the words of a topic, in a table."""

from quixstreams import Application
from quixstreams.sinks.community.postgresql import PostgreSQLSink


def count(word, state):
    state.set("n", state.get("n", 0) + 1)
    return {"word": word, "n": state.get("n")}


app = Application(
    "broker:9092", consumer_group="words", auto_offset_reset="earliest", processing_guarantee="exactly-once"
)
table = PostgreSQLSink(
    "database", 5432, "shop", "user", "password", "counts", primary_key_columns="word", upsert_on_primary_key=True
)
lines = app.dataframe(app.topic("lines", value_deserializer="str"))
words = lines.apply(lambda line: line.lower().split(), expand=True).group_by(lambda word: word, name="word")
words.apply(count, stateful=True).sink(table)
app.run()
