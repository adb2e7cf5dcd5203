"""What the fuzzers share: damaged documents, the memory of the process, and the loop that goes on
for hours."""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

#: How much more memory than at its beginning a fuzzed process may need.
MEMORY_MAX_MB = 512
Counts = collections.Counter[str]

_TEXTS = ["", "a", "\x1b]0;x\x07", "a\nerror: forged", "\0", "\ud800", "²", "-1", "../..", "x" * 5_000, "{}", "é"]
_NUMBERS = [0, 1, 2, 7, -1, True, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")]
_PARTS = [b"", b"[", b"}", b"null", b"\xff", b'"', b"9" * 5_000, b"[" * 5_000, b"\\ud800", b'{"a":', b"-1", b"\0", b","]


def any_value(chance: random.Random, depth: int = 0) -> Any:
    """A value of JSON that no program of ours expects."""
    form = chance.randrange(6 if depth < 3 else 3)
    if form == 0:
        return chance.choice(_NUMBERS)
    if form == 1:
        return chance.choice(_TEXTS)
    if form == 2:
        return chance.choice([None, True, False, [], {}])
    if form == 3:
        return [any_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if form == 4:
        return {chance.choice(_TEXTS): any_value(chance, depth + 1) for _ in range(chance.randrange(4))}
    nested: Any = chance.choice(_NUMBERS)
    for _ in range(chance.choice([3, 70, 400])):
        nested = [nested] if chance.random() < 0.5 else {"a": nested}
    return nested


def other_value(chance: random.Random, value: Any) -> Any:
    """The value with one part changed, left out, or put in."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        name = chance.choice(sorted(value))
        if chance.random() < 0.15:
            return {key: each for key, each in value.items() if key != name}
        if chance.random() < 0.1:
            return {**value, chance.choice(_TEXTS): any_value(chance)}
        return {**value, name: other_value(chance, value[name])}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        return [*value[:place], other_value(chance, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.3:
        return value + chance.choice([-1, 1, 10])
    return any_value(chance)


def other_bytes(chance: random.Random, data: bytes) -> bytes:
    """The bytes with a few changes, cut off, or others altogether."""
    form = chance.randrange(5)
    if form == 0:
        return chance.randbytes(chance.randrange(200))
    if form == 1:
        return data[: chance.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.randrange(3)] = chance.choice(_PARTS)
    return bytes(changed)


def other_document(chance: random.Random, data: bytes) -> bytes:
    """A document with other values, or other bytes."""
    if chance.random() < 0.3:
        return other_bytes(chance, data)
    if chance.random() < 0.02:
        return b'{"format":1,"value":' + chance.choice([b"[" * 300_000, b'"' + b"x" * 900_000 + b'"}'])
    try:
        return json.dumps(other_value(chance, json.loads(data))).encode()
    except ValueError:
        return other_bytes(chance, data)


def memory_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def go_on(what: str | None, fuzz: Callable[[int], Counts]) -> None:
    """Fuzz with one seed after the other, for as many minutes as the command line says. A line each
    ten seconds names the seed that is under way, in case one hangs."""
    arguments = argparse.ArgumentParser(description=(what or "").partition("\n")[0])
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    fuzz(0)
    before, begun, said = memory_mb(), time.monotonic(), 0.0
    counts: Counts = collections.Counter()
    first = seed = chosen.seed * 10**9
    while time.monotonic() - begun < chosen.minutes * 60:
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"seed {seed}: {dict(counts)}, {memory_mb() - before:.0f} MB more", flush=True)
        try:
            counts += fuzz(seed)
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        if memory_mb() - before > MEMORY_MAX_MB:
            sys.exit(f"seed {seed}: {memory_mb() - before:.0f} MB more than at the beginning")
        seed += 1
    print(f"{seed - first:,} seeds: {dict(counts)}, {memory_mb() - before:.0f} MB more")
