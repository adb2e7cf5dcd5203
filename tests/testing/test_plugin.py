"""The fixtures of pytest, as a user's project has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import ROOT

TESTS = """
from tests.testing.mistakes import RECORDS, RunningCount, Words, counting

def test_sound(simulate):
    assert simulate(counting(Words()), RECORDS).schedules == 7

def test_mistaken(simulate):
    simulate(counting(RunningCount()), RECORDS)
"""


ON_SERVERS = """
from framework import Fields, TransactionalTopologyBuilder, submit
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec

def test_words_are_counted(ratchet_topic, ratchet_servers, ratchet_postgres):
    topic = ratchet_topic([b"dog", (b"a key", b"cat"), b"dog"], partitions=2)
    spout = OpaqueKafkaTransactionalSpout([topic], bootstrap_servers=ratchet_servers.bootstrap_servers, codec=TextCodec("word"))
    builder = TransactionalTopologyBuilder("words", "spout", spout)
    state = OpaqueMapState(PostgresBackend(ratchet_postgres.dsn, "words"))
    builder.set_bolt("counts", StateCommitter(state, ["word"], {"n": Count()})).fields_grouping("spout", Fields("word"))
    config = {"transactional.zookeeper.servers": ratchet_servers.zookeeper}
    with submit(builder.build(), config, executor="local") as run:
        run.wait_until_caught_up(240)
    assert (state.get("dog"), state.get("cat")) == (2, 1)

def test_a_topic_is_of_one_test(ratchet_topic):
    assert ratchet_topic() != ratchet_topic()

def test_the_others_are_there(ratchet_redis, ratchet_registry):
    assert ratchet_redis.url.startswith("redis://")
    assert ratchet_registry.register("words", "string") > 0
"""
CONFTEST = 'pytest_plugins = ["framework.testing.plugin", "integration.plugin"]\n'


@pytest.mark.slow
@pytest.mark.integration
def test_servers_are_there_for_the_tests_that_ask_for_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text(ON_SERVERS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_fixture_fails_a_test_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--simulate-schedules=7", "--simulate-seed=3", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "SimulationFailed: topology 'mistaken': 7 schedules over 10 records, seed 3: 1 found" in done.stdout
    assert "the shortest schedule that shows it" in done.stdout
