"""TransactionalWords: two tables that agree with each other after any crash (1.14)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import transactional_words
from framework import FailedException, submit
from integration import EmbeddedServers
from tests.kit.runners import start
from tests.kit.targets import Often
from tests.kit.waiting import PATIENCE_S

EXPECTED = dict.fromkeys(transactional_words.WORDS, 0)
for _rows in transactional_words.data().values():
    for (_word,) in _rows:
        EXPECTED[_word] += 1


class Failing(transactional_words.Bucketize):
    """Runs between the two committers; by a seed, it fails attempts or ends the process."""

    def __init__(self, seed: int, probability: float, *, exits: bool = False) -> None:
        self.seed, self.probability, self.exits = seed, probability, exits

    def execute(self, tup: Any, collector: Any) -> None:
        chance = random.Random(f"{self.seed} {tup.attempt} {tup['word']}")
        if chance.random() < self.probability:
            if self.exits:
                os._exit(9)
            raise FailedException("as asked")
        super().execute(tup, collector)


@pytest.mark.each_value_once
@pytest.mark.slow_for("spread")
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.behaviour("1.14")
@pytest.mark.rule("C6")
def test_words_and_histogram_agree_over_failures_between_their_commits(
    runner: Any, tmp_path: Path, opaque: bool
) -> None:
    database = tmp_path / "words.db"
    topology = transactional_words.topology(database, opaque=opaque, bucketize=Failing(3, 0.05))
    with start(topology, runner, **{"topology.max.spout.pending": 2}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed >= 2
    words, buckets = transactional_words.tables(database)
    assert words == EXPECTED
    assert buckets == transactional_words.histogram(words)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("opaque", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.behaviour("1.14")
def test_words_and_histogram_agree_after_the_process_died_between_their_commits(
    servers: EmbeddedServers, name: str, tmp_path: Path, opaque: bool, often: Often
) -> None:
    """Again and again the process ends at once when one table is written and the other is not."""
    database = tmp_path / "words.db"
    died, lives = 0, often(2, 10)
    for seed in range(30):
        answer = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.pipeline.test_words",
                servers.zookeeper,
                name,
                str(database),
                str(seed),
                str(lives),
                str(opaque),
            ],
            cwd=Path(__file__).parent.parent.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        if answer.returncode == 0:
            break
        assert answer.returncode == 9, answer.stderr
        died += 1
    assert died >= lives // 2
    words, buckets = transactional_words.tables(database)
    assert words == EXPECTED
    assert buckets == transactional_words.histogram(words)


def run_until_death(zookeeper: str, root: str, database: str, seed: str, lives: str, opaque: str) -> None:
    bucketize = Failing(int(seed), 0.2 if int(seed) < int(lives) else 0.0, exits=True)
    topology = transactional_words.topology(Path(database), opaque=opaque == "True", bucketize=bucketize)
    config = {
        "transactional.zookeeper.servers": zookeeper,
        "transactional.zookeeper.root": f"/{root}",
        "transactional.zookeeper.session.timeout.secs": 1.0,
    }
    with submit(topology, config, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)


if __name__ == "__main__":
    run_until_death(*sys.argv[1:])
