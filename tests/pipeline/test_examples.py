"""Each example runs and is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from examples import flights_data, global_count, word_count
from integration import EmbeddedServers


@pytest.mark.parametrize("executor", ["local", "spark"])
@pytest.mark.behaviour("1.14")
def test_global_count_counts_every_word_once(executor: str, tmp_path: Path, spark: str) -> None:
    assert global_count.count(tmp_path / "count.db", executor) == 19


@pytest.mark.integration
@pytest.mark.parametrize("executor", ["local", "spark"])
def test_word_count_matches_a_counter(executor: str, tmp_path: Path, servers: EmbeddedServers, spark: str) -> None:
    counts = word_count.count_words(servers, word_count.TEXT, tmp_path / "words.db", executor)
    lines = word_count.TEXT.read_text().splitlines()
    assert counts == Counter(word for line in lines for word in word_count.words_of(line))


def test_flights_file_holds_what_the_demo_says() -> None:
    carriers, routes = flights_data.expected()
    assert sum(row[0] for row in carriers.values()) == sum(routes.values()) == flights_data.FLIGHTS
    assert (len(carriers), len(routes)) == (16, 224)
