"""Each example runs and gives the right result."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from examples import (
    acker_trace,
    anchored_join,
    at_least_once_word_count,
    exactly_once_word_count,
    global_count,
    plane_sessions,
    stateful_word_count,
)
from framework.errors import RetryableError
from integration import EmbeddedServers, RedisServer
from ratchet.demo import flights_data, sending
from tests.kit.topics import Topics


@pytest.mark.parametrize("executor", ["local", "spark"])
@pytest.mark.behaviour("1.14")
def test_global_count_counts_every_word_once(executor: str, tmp_path: Path, spark: str) -> None:
    assert global_count.count(tmp_path / "count.db", executor) == 19


@pytest.mark.slow_for("spark")
@pytest.mark.integration
@pytest.mark.parametrize("executor", ["local", "spark"])
def test_word_count_matches_a_counter(executor: str, tmp_path: Path, servers: EmbeddedServers, spark: str) -> None:
    counts = exactly_once_word_count.count_words(servers, exactly_once_word_count.TEXT, tmp_path / "words.db", executor)
    lines = exactly_once_word_count.TEXT.read_text().splitlines()
    assert counts == Counter(word for line in lines for word in exactly_once_word_count.words_of(line))


@pytest.mark.slow
def test_the_flights_file_has_the_figures_that_the_demo_expects() -> None:
    carriers, routes = flights_data.expected()
    assert sum(row[0] for row in carriers.values()) == sum(routes.values()) == flights_data.FLIGHTS
    assert (len(carriers), len(routes)) == (16, 224)


@pytest.mark.quick_for("local-False")
@pytest.mark.integration
@pytest.mark.behaviour("4.2")
@pytest.mark.parametrize(("executor", "basic"), [("local", False), ("local", True), ("spark", False)])
def test_streaming_word_count_matches_a_counter(
    executor: str, basic: bool, tmp_path: Path, servers: EmbeddedServers, spark: str
) -> None:
    text, changes = at_least_once_word_count.TEXT, tmp_path / "changes"
    counts = at_least_once_word_count.count_words(servers, text, changes, basic=basic, executor=executor)
    lines = text.read_text().splitlines()
    assert counts == Counter(word for line in lines for word in exactly_once_word_count.words_of(line))


@pytest.mark.slow_for("spark")
@pytest.mark.behaviour("4.2", "4.8")
@pytest.mark.parametrize("executor", ["local", "spark"])
def test_joined_streams_replays_both_tuples_of_a_failed_pair(executor: str, spark: str) -> None:
    counts = anchored_join.run(executor)
    assert counts["impressions"] == counts["clicks"] == (12, 4)
    assert counts["billing"] == (0, 4)


@pytest.mark.behaviour("4.3")
def test_the_acker_trace_is_the_one_of_the_tutorial_text() -> None:
    lines = list(acker_trace.trace())
    numbers = [line.rsplit(": ", 1)[1] for line in lines[:8]]
    assert numbers == ["1010", "1011", "0110", "0111", "1100", "1100", "0000, complete", "0000, complete"]
    assert lines[8:] == ["sid1 is told that stid1 is fully processed", "sid2 is told that stid2 is fully processed"]


@pytest.mark.integration
@pytest.mark.behaviour("5.1", "5.2")
@pytest.mark.parametrize("provider", stateful_word_count.PROVIDERS)
def test_the_stateful_word_count_matches_a_counter_on_each_provider(
    servers: EmbeddedServers, redis_server: RedisServer, tmp_path: Path, provider: str
) -> None:
    settings = stateful_word_count.state_settings(provider, tmp_path, redis_server)
    counts = stateful_word_count.count_words(
        servers, exactly_once_word_count.TEXT, settings, tmp_path, executor="local"
    )
    lines = exactly_once_word_count.TEXT.read_text(encoding="utf-8").splitlines()
    assert counts == Counter(word for line in lines for word in exactly_once_word_count.words_of(line))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.behaviour("5.5")
def test_plane_sessions_match_those_computed_directly(tmp_path: Path) -> None:
    flights = list(islice(flights_data.departures(), 6_000))
    with EmbeddedServers(tmp_path / "servers") as own:
        plane_sessions.send_departures(own.bootstrap_servers, flights)
        found = plane_sessions.sessions(plane_sessions.settings_of(own, tmp_path), "local")
    assert found == plane_sessions.expected(flights)
    assert max(each.ended for each in found.values()) > 1


@pytest.mark.integration
def test_records_that_did_not_arrive_are_reported(topics: Topics, name: str) -> None:
    """A producer that has nothing in flight any more may have dropped records."""
    topics.create(name, 2)
    with pytest.raises(RetryableError, match=f"2 of 3 records did not arrive in topic '{name}'.*Unknown partition"):
        sending.send(topics.bootstrap_servers, name, [("a", None, 0), ("b", None, 2), ("c", "key", 7)])
    with pytest.raises(KafkaException, match="Unknown partition"):
        topics.send(name, [b"lost"], 2)
