"""The words of a text file, through Kafka, counted exactly once per word.

Each line becomes a record of a Kafka topic. The pipeline splits it into words, one row in and any
number of rows out, and keeps a row per word in SQLite.

    python -m examples.exactly_once_word_count [FILE]
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import tempfile
import uuid
from collections import Counter
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from framework.observe import configure_logging
from integration import EmbeddedServers
from ratchet import Pipeline, Text, count, sqlite
from ratchet.demo.sending import send

TEXT = Path(__file__).with_name("rain.txt")
PARTITIONS = 3


def words_of(line: str) -> list[str]:
    return re.findall(r"[a-z']+", line.lower())


def pipeline(bootstrap_servers: str, topic: str, database: Path) -> Pipeline:
    words = Pipeline(f"word-count-{topic}")
    lines = words.read_kafka(topic, value=Text("line"), bootstrap_servers=bootstrap_servers, parallelism=2)
    each = lines.flat_map(lambda row: words_of(row["line"]), deterministic=True, word=str)
    counts = each.group_by("word").agg(count=count())
    counts.upsert_into(sqlite(database, "words"), name="count", parallelism=2)
    return words


def send_lines(bootstrap_servers: str, topic: str, text: Path) -> None:
    """Send one record per line, to the partitions in turn."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    lines = text.read_text(encoding="utf-8").splitlines()
    send(bootstrap_servers, topic, [(line, None, number % PARTITIONS) for number, line in enumerate(lines)])


def count_words(servers: EmbeddedServers, text: Path, database: Path, executor: str = "spark") -> dict[str, int]:
    """Send the file, and run until all of it is counted. Returns the table."""
    topic = f"lines-{uuid.uuid4().hex[:8]}"
    send_lines(servers.bootstrap_servers, topic, text)
    config = {"transactional.zookeeper.servers": servers.zookeeper}
    built = pipeline(servers.bootstrap_servers, topic, database)
    built.run(config, executor=executor, timeout_s=120)
    with sqlite3.connect(database) as connection:
        return dict(connection.execute("SELECT word, count FROM words_live"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.exactly_once_word_count")
    parser.add_argument("file", type=Path, nargs="?", default=TEXT, help="a text file")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory() as folder, EmbeddedServers(Path(folder) / "servers") as servers:
        counts = count_words(servers, arguments.file, Path(folder) / "words.db")
    for word, times in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:10]:
        print(f"{times:6,}  {word}")
    expected = Counter(
        word for line in arguments.file.read_text(encoding="utf-8").splitlines() for word in words_of(line)
    )
    print(
        f"{len(counts):,} words; "
        + ("the same as counted here" if counts == expected else "NOT the same as counted here")
    )


if __name__ == "__main__":
    main()
