"""``ratchet dead-letters``: what was taken out is listed and shown (C20, C48)."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from integration import EmbeddedServers
from tests.kit.mended import Commands, settings_of
from tests.kit.topics import Topics

pytestmark = pytest.mark.integration

AT_MS = 1_700_000_000_000


@pytest.mark.parametrize("keeper", ["table", "topic"])
def test_dead_letters_are_counted_and_shown(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path, keeper: str
) -> None:
    topics.create(name)
    producer = topics.producer()
    for number, value in enumerate([b"a", b"bad\x1b[2J", b"\xff\xfe", b"bad\x1b[2J", b"a", b"\xff"]):
        headers = [("trace", b"t\x07"), ("none", None), ("error", b"mine")]
        producer.produce(name, value, key=b"k", headers=headers, timestamp=AT_MS + number * 1_000)
    producer.arrived()
    letters = keeper if keeper == "table" else topics.create(f"{name}-dead", 2)
    commands = Commands(settings_of(servers, name, tmp_path, "opaque", letters))
    commands.run()

    *groups, total = commands.documents("list")
    assert total == {"type": "dead_letters", "letters": 4}
    shown = {(each["component"], each["reason"]): each for each in groups}
    refused, undecoded = shown["picky", "'bad\\x1b[2J' is refused"], shown["spout", "invalid UTF-8 at byte 0"]
    assert (refused["letters"], refused["topic"], refused["partition"], refused["attempts"]) == (2, name, 0, 0)
    assert (undecoded["oldest_ms"], undecoded["newest_ms"]) == (AT_MS + 2_000, AT_MS + 5_000)

    def count(*options: str) -> Any:
        return commands.documents("list", *options)[-1]["letters"]

    assert count("--component", "picky") == count("--reason", "IS REFUSED") == 2
    assert count("--topic", "another") == count("--since", "1h") == 0
    assert count("--since", "2023-11-14T22:13:24", "--component", "spout") == 1

    (found,) = commands.documents("show", f"{name}/0/2")
    assert (found["topic"], found["partition"], found["offset"]) == (name, 0, 2)
    assert (found["timestamp_ms"], found["component"], found["attempts"]) == (AT_MS + 2_000, "spout", 0)
    assert (found["key"], found["value"]) == ("k", None)
    assert base64.b64decode(found["value_base64"]) == b"\xff\xfe"
    assert [(each["name"], each["value"]) for each in found["headers"]] == [
        ("trace", "t\x07"),
        ("none", None),
        ("error", "mine"),
    ]
    people = commands.ask("show", f"{name}/0/1")
    assert people.returncode == 0 and not {"\x1b", "\x07"} & {*people.stdout}
    assert "value: b'bad\\x1b[2J'" in people.stdout and "header error: b'mine'" in people.stdout
    assert "4 dead letters" in commands.ask("list").stdout
    missing = commands.ask("show", f"{name}/0/0")
    assert missing.returncode == 2 and "is no dead letter" in missing.stderr
    assert commands.ask("show", "orders").returncode == 2
    assert commands.ask("list", "--since", "soon").returncode == 2
