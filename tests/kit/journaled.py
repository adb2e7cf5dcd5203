"""Components that write down what they do, for tests that run them in other processes and kill
those.

The source is a queue like Kestrel: a message that was handed out but not acked is handed out again
to the next spout that opens the queue. The queue is a folder. Its file ``acked`` has one line per
message that is done; each other file has one line per event that a component saw.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework import BaseBasicBolt, BaseRichBolt, BaseRichSpout, CoreTopology, Fields, TopologyBuilder, Tuple

WORDS = ("the", "cow", "jumped", "over", "moon")


def sentence_of(number: int) -> str:
    """Two to four words, the same for a number every time."""
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 3))


def note(folder: str, name: str, line: object) -> None:
    """Append a line in one write, so that a killed process never leaves half a line."""
    handle = os.open(Path(folder) / name, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def noted(folder: Path, name: str) -> list[str]:
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


class Queue(BaseRichSpout):
    """Messages 0 to ``count - 1``, a share of them per task."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = str(folder), count

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.task = collector, context.task_index
        done = set(map(int, noted(Path(self.folder), "acked")))
        mine = range(self.task, self.count, context.task_count)
        self.waiting = [number for number in mine if number not in done][::-1]
        self.open_ids: set[int] = set()
        note(self.folder, "opened", f"{self.task} {os.getpid()} {id(self)}")
        note(self.folder, "collector", f"{gc.get_threshold()[0]} {gc.get_freeze_count()}")

    def next_tuple(self) -> None:
        if self.waiting:
            number = self.waiting.pop()
            self.open_ids.add(number)
            self.collector.emit([number, sentence_of(number)], message_id=number)

    def ack(self, message_id: int) -> None:
        self.open_ids.remove(message_id)  # raises when another object had emitted it
        note(self.folder, "acked", message_id)

    def fail(self, message_id: int) -> None:
        self.open_ids.remove(message_id)
        note(self.folder, "failed", message_id)
        self.waiting.append(message_id)

    def close(self) -> None:
        note(self.folder, "closed", self.task)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(number=int, sentence=str))


class Split(BaseRichBolt):
    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        for place, word in enumerate(tup["sentence"].split()):
            self.collector.emit([word, tup["number"], place], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, number=int, place=int))


class CountWords(BaseBasicBolt):
    """Counts in its own attributes, and writes down what it has counted when it is cleaned up."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any, batch_id: Any) -> None:
        self.counts: Counter[str] = Counter()

    def execute(self, tup: Tuple, collector: Any) -> None:
        self.counts[tup["word"]] += 1
        note(self.folder, "seen", f"{tup['number']} {tup['place']} {tup['word']}")

    def cleanup(self) -> None:
        for word, count in self.counts.items():
            note(self.folder, "counts", f"{word} {count}")


def word_count(folder: Path, count: int, *, spouts: int = 2) -> CoreTopology:
    builder = TopologyBuilder("journaled")
    builder.set_spout("queue", Queue(folder, count), spouts)
    builder.set_bolt("split", Split(), 2).shuffle_grouping("queue")
    builder.set_bolt("count", CountWords(folder), 3).fields_grouping("split", Fields("word"))
    return builder.build()


def topology(app: Mapping[str, Any]) -> CoreTopology:
    """For the command line."""
    return word_count(Path(app["app.folder"]), int(app["app.count"]))


def check_every_word_was_seen(folder: Path, count: int) -> int:
    """The oracle: each word of each message was counted at least once, and no other word was.

    Returns the number of repetitions.
    """
    expected = {
        f"{number} {place} {word}" for number in range(count) for place, word in enumerate(sentence_of(number).split())
    }
    found = Counter(noted(folder, "seen"))
    assert set(found) == expected
    assert set(map(int, noted(folder, "acked"))) == set(range(count))
    return sum(times - 1 for times in found.values())
