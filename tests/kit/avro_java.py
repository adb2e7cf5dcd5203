"""Compares the Avro codec with Apache Avro's own implementation, in Java, which PySpark's jars
contain, and with fastavro.

``python -m tests.kit.avro_java --pairs 50000 --values 20 --seed 1`` prints how often each outcome
came. It ends with an error if a value is read differently, is refused for a reason that is not in
``STRICTER``, or is read although Java refuses it for a reason that is not in ``WIDER``.
"""

from __future__ import annotations

import argparse
import collections
import decimal
import io
import json
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import fastavro
import pyarrow as pa

from framework.errors import TopologyError
from integration.jars import find_jars
from integration.java import find_java
from spouts import AvroCodec
from spouts.codecs.avro_schema import AvroType, parsed
from tests.kit.avro_pairs import Pairs, double_bits
from tests.kit.comparing import NAN, Difference, bits, plain_values
from tests.kit.waiting import PATIENCE_S

PROGRAM = Path(__file__).with_name("AvroReference.java")
JARS = ("avro-1*", "jackson-core-2*", "jackson-databind-2*", "jackson-annotations-2*", "slf4j-api-2*", "commons-*")
#: Values that Java reads and the codec does not, by a part of the reason.
STRICTER = (
    "is not a boolean",
    "more than 32 bits",
    "more than 64 bits",
    "not valid UTF-8",
    "do not take the bytes that it names",
    "is not a time of day",
    "a decimal of no bytes",
    "more digits than decimal",
    "a decimal of",
    "items of arrays and maps take no bytes",
)
#: A block of -2^63 items has 2^63, but Java negates the number to itself, and reads none.
LEAST_LONG = b"\xff" * 9 + b"\x01"
#: Pairs of schemas that Java calls compatible and the codec refuses, by a part of the reason.
REFUSED = ("which is not read as", "the default is not valid", "a record without fields has no columns")
#: Values that the codec reads and Java does not, by Java's reason: it compares names with their
#: namespaces before it applies the aliases of fields, and in a reader's union.
WIDER = re.compile(r"missing required field renamed_|Found (?:\S*\.)?(\w+), expecting union\[.*\b\1\b.*\]")


class Java:
    """Apache Avro, as a process."""

    def __enter__(self) -> Java:
        self._start()
        return self

    def _start(self) -> None:
        jars = ":".join(str(each) for each in find_jars(JARS))
        command = [find_java(), "-Xmx512m", "-XX:+UseSerialGC", "-cp", jars, str(PROGRAM)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()  # type: ignore[union-attr]

    def answer(self, writer: Any, reader: Any, values: Sequence[bytes]) -> dict[str, Any] | None:
        """What Java makes of the values. None where it does not end; it is started again then."""
        question = {"writer": writer, "reader": reader, "values": [each.hex() for each in values]}
        self._process.stdin.write(json.dumps(question) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        ending = threading.Timer(PATIENCE_S, self._process.kill)
        ending.start()
        try:
            line = self._process.stdout.readline()  # type: ignore[union-attr]
        finally:
            ending.cancel()
        if not line:
            self._process.wait(PATIENCE_S)
            self._start()
            return None
        found: dict[str, Any] = json.loads(line)
        return found


def compare(java: Java, pairs: Pairs, values: int, counts: collections.Counter[str]) -> None:
    """One pair of schemas, and values of the writer's, a third of them damaged."""
    writer, reader = pairs.pair()
    encoded = [pairs.value(writer) for _ in range(values)]
    damaged = [pairs.chance.random() < 0.33 for _ in range(values)]
    encoded = [pairs.damaged(each) if bad else each for each, bad in zip(encoded, damaged, strict=True)]
    answer = java.answer(writer, reader, encoded)
    case = f"writer {json.dumps(writer)}\nreader {json.dumps(reader)}\n"
    if answer is None:
        counts["schemas: Java does not end"] += 1
        return
    if "invalid" in answer:
        counts["schemas: not valid, says Java"] += 1
        return
    try:
        codec = AvroCodec(writer, reader)
    except TopologyError as error:
        _check_refused(str(error), answer, case, counts)
        return
    counts[f"schemas: accepted, {answer['compatible'].lower()} says Java"] += 1
    together = _outcomes(codec, encoded)
    if codec._decoder is not None and codec._decoder._bulk is not None:
        counts["schemas: of plain types"] += 1
    target = parsed(reader)
    for value, bad, found, theirs in zip(encoded, damaged, together, answer["values"], strict=True):
        where = f"{case}value {value.hex()}\n"
        alone = _outcomes(codec, [value])[0]
        if alone != found:
            raise Difference(f"{where}alone {alone}\ntogether {found}")
        kind = "damaged" if bad else "whole"
        failed = _is_error(theirs)
        if not found[0]:
            stricter = [each for each in STRICTER if each in found[1]]
            if not failed and LEAST_LONG in value:
                stricter.append("a block of -2^63 items")
            if not failed and not stricter and _is_error(java.answer(writer, writer, [value])["values"][0]):
                stricter.append("damage in what the reader skips, into which Java does not look")
            if not failed and not stricter:
                raise Difference(f"{where}refused: {found[1]}\nJava {theirs}")
            counts[f"values, {kind}: bad{'' if failed else ', good says Java'}"] += 1
            if not failed:
                counts[f"stricter: {stricter[0]}"] += 1
        elif failed and WIDER.search(theirs["error"]):
            counts[f"values, {kind}: good, bad says Java"] += 1
        elif failed:
            raise Difference(f"{where}found {found[1]}\nJava {theirs}")
        elif found[1] != (expected := _comparable(target, theirs)):
            raise Difference(f"{where}found {found[1]}\nJava  {expected}")
        else:
            counts[f"values, {kind}: equal"] += 1
            if not bad:
                _compare_fastavro(writer, reader, value, found[1], counts)


def _is_error(answer: Any) -> bool:
    return isinstance(answer, dict)


def _check_refused(reason: str, answer: dict[str, Any], case: str, counts: collections.Counter[str]) -> None:
    if answer["compatible"] == "COMPATIBLE" and not any(each in reason for each in REFUSED):
        raise Difference(f"{case}refused: {reason}\nJava: compatible")
    counts[f"schemas: refused, {answer['compatible'].lower()} says Java"] += 1
    if answer["compatible"] == "COMPATIBLE":
        counts["refused: " + " ".join(reason.partition(": ")[2].split()[:12])[:80]] += 1


def _outcomes(codec: AvroCodec, values: Sequence[bytes]) -> list[tuple[bool, Any]]:
    """For each value whether it is good, and its row or the reason."""
    batch, bad = codec.decode_good(values)
    reasons = {each.index: each.reason for each in bad}
    rows = iter(list(zip(*(plain_values(column) for column in batch.columns), strict=True)))
    if not batch.num_columns:
        rows = iter([()] * (len(values) - len(bad)))
    return [(False, reasons[n]) if n in reasons else (True, next(rows)) for n in range(len(values))]


def _comparable(schema: AvroType, value: Any) -> Any:
    """Java's value as ``plain_values`` gives it."""
    if schema.kind == "union":
        others = [each for each in schema.branches if each.kind != "null"]
        return None if value is None or not others else _comparable(others[0], value)
    if schema.kind == "record":
        return tuple(_comparable(each.type, part) for each, part in zip(schema.fields, value, strict=True))
    if schema.items is not None:
        items = schema.items
        if schema.kind == "map":
            return tuple(sorted((key, _comparable(items, part)) for key, part in value))
        return tuple(_comparable(items, part) for part in value)
    if schema.kind in ("bytes", "fixed"):
        raw = bytes.fromhex(value)
        if schema.logical is None:
            return raw
        return decimal.Decimal(int.from_bytes(raw, "big", signed=True)).scaleb(-schema.logical.scale)
    nans = {"float": struct.unpack("<i", b"\0\0\xc0\x7f")[0], "double": double_bits(float("nan"))}
    return NAN if schema.kind in nans and value == nans[schema.kind] else value


def _compare_fastavro(writer: Any, reader: Any, value: bytes, found: Any, counts: collections.Counter[str]) -> None:
    """fastavro is wrong in known ways, so that a difference is counted only."""
    try:
        plain = fastavro.parse_schema(_without_logical(reader))
        row = fastavro.schemaless_reader(io.BytesIO(value), fastavro.parse_schema(_without_logical(writer)), plain)
        expected = _of_fastavro(parsed(reader), row)
    except Exception as error:  # noqa: BLE001 - it is counted
        counts[f"fastavro: {type(error).__name__}"] += 1
        return
    counts["fastavro: equal" if expected == found else "fastavro: another value"] += 1


def _of_fastavro(schema: AvroType, value: Any) -> Any:
    if schema.kind == "union":
        others = [each for each in schema.branches if each.kind != "null"]
        return None if value is None or not others else _of_fastavro(others[0], value)
    if schema.kind == "record":
        return tuple(_of_fastavro(each.type, value[each.name]) for each in schema.fields)
    if schema.kind == "map" and schema.items is not None:
        return tuple(sorted((key, _of_fastavro(schema.items, part)) for key, part in value.items()))
    if schema.kind == "array" and schema.items is not None:
        return tuple(_of_fastavro(schema.items, part) for part in value)
    if schema.kind in ("float", "double"):
        return bits(value, pa.float32() if schema.kind == "float" else pa.float64())
    if schema.logical is not None and schema.logical.name == "decimal":
        return decimal.Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-schema.logical.scale)
    return value


def _without_logical(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_logical(each) if key in ("type", "items", "values", "fields") else each
        for key, each in schema.items()
        if key != "logicalType"
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--pairs", type=int, default=1_000)
    arguments.add_argument("--values", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    with Java() as java:
        for number in range(chosen.pairs):
            seed = chosen.seed * 10**9 + number
            try:
                compare(java, Pairs(seed), chosen.values, counts)
            except Difference as difference:
                sys.exit(f"pair {number} of seed {chosen.seed} ({seed}):\n{difference}")
    print("\n".join(f"{name}: {count:,}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
