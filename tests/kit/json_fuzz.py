"""A fuzzer of JSON values.

``python -m tests.kit.json_fuzz --minutes 60 --seed 1``: no value may do anything but become a row
or a bad record with a reason that a terminal shows as it is, the same alone and among others.
"""

from __future__ import annotations

import collections
import random

import pyarrow as pa

from framework.errors import REASON_BYTES_MAX, escaped
from spouts import JsonCodec
from tests.kit.comparing import plain_values
from tests.kit.fuzzing import Counts, any_value, go_on, other_bytes
from tests.kit.json_documents import SCHEMAS, Documents

VALUES = 40
_TYPED = pa.schema(
    [
        ("price", pa.decimal128(20, 4)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("data", pa.binary()),
    ]
)
_CHOICES = [*SCHEMAS.values(), _TYPED]
#: Values of the typed fields, and others.
_SCALARS = ["1.5", '"1.50"', '"2026-01-01T00:00:00Z"', '"9999-12-31"', '"AAA="', "1e18", '"+262142-01-01"', '"\\ud800"']


def fuzz(seed: int) -> Counts:
    """Values of one schema: damaged, or bytes of another form."""
    chance = random.Random(seed)
    schema = chance.choice(_CHOICES)
    counts: Counts = collections.Counter()
    codec = JsonCodec(schema)
    documents = Documents(seed, SCHEMAS["plain"] if schema is _TYPED else schema)
    values = [_value(chance, documents, schema) for _ in range(VALUES)]
    batch, bad = codec.decode_good(values)
    assert batch.num_rows + len(bad) == VALUES, seed
    batch.validate(full=True)
    alone = [codec.decode_good([each]) for each in values]
    places = [(number, found[0].reason) for number, (_, found) in enumerate(alone) if found]
    assert [(each.index, each.reason) for each in bad] == places, (seed, bad, places)
    for _, reason in places:
        assert len(reason.encode()) <= REASON_BYTES_MAX and reason == escaped(reason), (seed, reason)
    for place, column in enumerate(batch.columns):
        expected = [each for single, _ in alone for each in plain_values(single.column(place))]
        assert plain_values(column) == expected, (seed, batch.schema.names[place])
    counts["good values"] += batch.num_rows
    counts["bad values"] += len(bad)
    return counts


def _value(chance: random.Random, documents: Documents, schema: pa.Schema) -> bytes:
    form = chance.randrange(8)
    if form == 0:
        return chance.randbytes(chance.randrange(100))
    if form == 1:
        depth = chance.choice([10, 199, 201, 2_000, 20_000])
        opened = chance.choice(["[", '{"a":', '{"word":['])
        return (f'{{"word":{opened * depth}' + chance.choice(["", "1" + "]" * depth + "}"])).encode()
    if form == 2:
        return repr(any_value(chance)).replace("'", '"').encode("utf-8", "surrogatepass")
    if form == 3:
        fields = [f'"{each.name}":{chance.choice(_SCALARS)}' for each in schema]
        return "{{{}}}".format(",".join(fields)).encode()
    value = documents.usual() if form == 4 else documents.mutated()
    return other_bytes(chance, value) if form == 7 else value


if __name__ == "__main__":
    go_on(__doc__, fuzz)
