"""Every line of the behaviour document's first five sections is held by a test that says so."""

from __future__ import annotations

import re
from pathlib import Path

MARK = re.compile(r"pytest\.mark\.behaviour\(([^)]*)\)")
TRANSACTIONAL = {f"1.{number}" for number in range(1, 16)}
SINKS = {f"3.{number}" for number in range(1, 8)}
GUARANTEED = {f"4.{number}" for number in range(1, 10)}
STATE = {f"5.{number}" for number in range(1, 6)}
KAFKA = {f"2.{number}" for number in range(1, 14)}


def named() -> set[str]:
    found: set[str] = set()
    for file in Path(__file__).parent.rglob("test_*.py"):
        for lines in MARK.findall(file.read_text(encoding="utf-8")):
            found |= set(re.findall(r"\d+\.\d+", lines))
    return found


def test_every_line_of_transactional_topologies_has_a_test() -> None:
    assert sorted(TRANSACTIONAL - named()) == []


def test_every_line_of_kafka_spouts_has_a_test() -> None:
    assert sorted(KAFKA - named()) == []


def test_every_line_of_sinks_has_a_test() -> None:
    assert sorted(SINKS - named()) == []


def test_every_line_of_guaranteed_message_processing_has_a_test() -> None:
    assert sorted(GUARANTEED - named()) == []


def test_every_line_of_state_management_has_a_test() -> None:
    assert sorted(STATE - named()) == []
