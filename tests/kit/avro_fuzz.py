"""Fuzzers of Avro values and of a Schema Registry's answers.

``python -m tests.kit.avro_fuzz --minutes 60 --seed 1``: no value may do anything but become a row
or a bad record, the same alone and among others, and no answer may do anything but end in rows, bad
records or an error of ours. The process must not need more than ``MEMORY_MAX_MB`` more than at its
beginning.
"""

from __future__ import annotations

import collections
import json
import random
from http.server import BaseHTTPRequestHandler
from typing import Any

from framework.errors import ConfigError, RetryableError, TopologyError
from spouts import AvroCodec, RegistryAvroCodec
from spouts.codecs import registry_codec
from tests.kit.avro import encoded, framed
from tests.kit.avro_pairs import Pairs
from tests.kit.comparing import plain_values
from tests.kit.fuzzing import Counts, go_on
from tests.kit.registry_answers import answering, send

VALUES = 40
#: What the reader does not want, and must pass over: it contains itself, and items without bytes.
NESTED = {
    "type": "record",
    "name": "Nested",
    "fields": [
        {"name": "left", "type": ["null", "Nested"]},
        {"name": "sons", "type": {"type": "array", "items": "Nested"}},
        {"name": "nulls", "type": {"type": "array", "items": "null"}},
    ],
}
WORD = {"type": "record", "name": "Word", "fields": [{"name": "word", "type": "string"}]}
_PARTS = [b"", b"[", b"}", b"null", b"\xff", b'"', b"9" * 5_000, b"[" * 5_000, b"\\ud800", b'{"type":', b"-1"]


def fuzz_values(seed: int) -> collections.Counter[str]:
    """Values of a random pair of schemas: damaged, or random bytes from the beginning."""
    pairs = Pairs(seed)
    writer, reader = pairs.pair()
    if pairs.chance.random() < 0.3:
        writer["fields"].insert(pairs.chance.randrange(2), {"name": "nested", "type": NESTED})
    counts: collections.Counter[str] = collections.Counter()
    try:
        codec = AvroCodec(writer, reader)
    except TopologyError:
        counts["refused schemas"] += 1
        return counts
    values = [_value(pairs, writer) for _ in range(VALUES)]
    batch, bad = codec.decode_good(values)
    places = {each.index for each in bad}
    assert batch.num_rows + len(bad) == VALUES
    rows = [codec.decode_good([each]) for each in values]
    alone = [n for n, (_, found) in enumerate(rows) if found]
    assert sorted(places) == alone, (seed, sorted(places), alone)
    assert [each.reason for each in bad] == [found[0].reason for _, found in rows if found]
    for place, column in enumerate(batch.columns):
        expected = [each for single, _ in rows for each in plain_values(single.column(place))]
        assert plain_values(column) == expected, (seed, batch.schema.names[place])
    counts["good values"] += batch.num_rows
    counts["bad values"] += len(bad)
    return counts


def _value(pairs: Pairs, writer: Any) -> bytes:
    chance = pairs.chance
    form = chance.randrange(4)
    if form == 0:
        return chance.randbytes(chance.randrange(100))
    if form == 1:
        return bytes(chance.choice([0, 1, 2, 3, 0x80, 0xFF]) for _ in range(chance.randrange(3_000)))
    good = b"" if any(each["name"] == "nested" for each in writer["fields"]) else pairs.value(writer)
    return pairs.damaged(good) if form == 2 else good


def fuzz_answers(seed: int, questions: int) -> collections.Counter[str]:
    """Answers that are changed at random, for as many schema ids as there are ``questions``."""
    chance = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    good = encoded(WORD, {"word": "dog"})[0]

    def answer(request: BaseHTTPRequestHandler, _: int) -> None:
        body = bytearray(json.dumps({"schema": json.dumps(WORD)}).encode())
        for _change in range(chance.randrange(4)):
            at = chance.randrange(len(body) + 1)
            body[at : at + chance.randrange(3)] = chance.choice(_PARTS)
        send(request, chance.choice([200, 200, 200, 200, 404, 500, 301, 204]), bytes(body))

    with answering(answer) as (url, _):
        codec = RegistryAvroCodec({"url": url, "max.retries": 0}, schema=WORD)
        for schema_id in range(questions):
            try:
                batch, bad = codec.decode_good(framed(schema_id, good))
                assert batch.num_rows + len(bad) == 1
                counts["rows" if batch.num_rows else "bad"] += 1
            except (ConfigError, RetryableError) as error:
                assert url in str(error)
                assert len(str(error)) < 1_000
                counts["errors"] += 1
    return counts


def fuzz(seed: int) -> Counts:
    registry_codec._PAUSES_S = (0.001, 0.001)
    counts = fuzz_values(seed)
    if seed % 200 == 0:
        counts += fuzz_answers(seed, 50)
    return counts


if __name__ == "__main__":
    go_on(__doc__, fuzz)
