"""Letters become the rows that their records would have become (C48)."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields
from framework.clients.kafka_settings import KafkaSettings
from framework.topology import DEAD_LETTER_STREAM
from framework.topology.dead_letters import Letter
from framework.topology.spouts import on_stream
from spouts import JsonCodec, TextCodec, TopicStream
from spouts.kafka.reader import KafkaReader
from spouts.kafka.topic_streams import Streams, checked_streams
from tests.kit.lettered import letter_of_record

pytestmark = pytest.mark.rule("C48")


def letter(topic: str, offset: int, value: bytes | None, **changes: Any) -> Letter:
    own = {"topic_id": f"id-{topic}", "topic": topic, "timestamp_ms": None, "error": "old", "key": b"k"}
    return letter_of_record(1, offset, value, **{**own, "headers": [("h", b"x"), ("h", None)], **changes})


def read(streams: Streams, *letters: Letter) -> tuple[dict[str, list[Any]], dict[tuple[str, int], str]]:
    reader = KafkaReader(KafkaSettings("nowhere:1", None), "group", streams, 0)
    rows: dict[str, list[Any]] = {}
    back: dict[tuple[str, int], str] = {}
    for stream, batch in map(on_stream, reader.read_letters(letters)):
        for row in batch.to_pylist():
            if stream == DEAD_LETTER_STREAM:
                back[row["topic_id"], row["offset"]] = row["error"]
            else:
                rows.setdefault(stream, []).append(row)
    assert reader.counts.records == len(letters) and reader.counts.bad_records == 0
    return rows, back


@pytest.mark.parametrize("policy", ["fail", "skip", "dead_letter"])
def test_letters_have_the_metadata_of_their_records_whatever_is_done_with_bad_ones(policy: str) -> None:
    names = ["topic", "partition", "offset", "timestamp_ms", "headers", "tombstone", "key"]
    streams = checked_streams(
        None, codec=TextCodec(), key_codec=None, header_codecs=None, metadata=names, on_bad_record=policy
    )
    rows, back = read(
        streams,
        letter("a", 9, b"nine"),
        letter("b", 3, b"\xff"),
        letter("a", 2, None, timestamp_ms=-1, topic_id="former"),
    )
    assert back == {("id-b", 3): "invalid UTF-8 at byte 0"}
    found = {row["offset"]: row for row in rows["default"]}
    headers = [{"key": "h", "value": b"x"}, {"key": "h", "value": None}]
    common = {"topic": "a", "partition": 1, "headers": headers, "key": b"k"}
    assert found == {
        9: {"value": "nine", "offset": 9, "timestamp_ms": None, "tombstone": False, **common},
        2: {"value": None, "offset": 2, "timestamp_ms": -1, "tombstone": True, **common},
    }


def test_each_letter_goes_to_the_stream_of_its_topic_and_one_without_a_stream_comes_back() -> None:
    streams = checked_streams(
        {"orders": JsonCodec(Fields(n=int)), "lines": TopicStream(TextCodec(), topic="shop.lines")},
        codec=None,
        key_codec=None,
        header_codecs=None,
        metadata=[],
        on_bad_record="fail",
    )
    rows, back = read(
        streams,
        letter("shop.lines", 1, b"line"),
        letter("orders", 2, b'{"n": 5}'),
        letter("gone", 3, b"x"),
        letter("orders", 4, b"no"),
    )
    assert rows == {"orders": [{"n": 5}], "lines": [{"value": "line"}]}
    assert back["id-gone", 3] == "topic 'gone' has no stream in the spout" and ("id-orders", 4) in back
