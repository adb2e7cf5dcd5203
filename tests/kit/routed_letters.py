"""Routes records to several topics of Kafka, the refused ones to dead letters, and replays those,
under many kills; and the oracle.

``python -m tests.kit.routed_letters --kills 40`` kills the driver, the broker and the commands that
replay, and prints the counts. The first half of the kills meets code that refuses records, the
second half the corrected code and replays.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework import BaseBasicBolt, Fields, Topology, TransactionalTopologyBuilder
from framework.errors import BadRecordError
from framework.transactions import ZooKeeperStore, committed_txid
from framework.transactions.documents import read_letter_request
from integration import EmbeddedServers
from sinks import DeadLetterTable, DeadLetterTopic, KafkaSink, OpaqueMapState, SqliteBackend
from spouts import Codec, JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.kills import TOPIC, Kills, kill_often
from tests.kit.oracle import is_stable, read_topics
from tests.kit.processes import ROOT
from tests.kit.topics import Topics

TOPOLOGY = "tests.kit.routed_letters:topology"
#: The parts to kill, by weight, in each half. "replaying" waits until letters are replayed.
REFUSING = {"driver": 3, "broker": 2}
CORRECTED = {"driver": 3, "broker": 2, "replaying+command": 2, "replaying+driver": 1}
#: The topics that records name. The last one does not exist.
ROUTES = ("routed-a", "routed-b", "routed-c")
NOWHERE = "routed-nowhere"
LETTERS = "routed-letters"
#: The records that a bolt or the sink refuses: each costs several attempts until it is found.
REFUSED_EVERY = 400
REFUSED = {50: "bad", 100: "never", 150: "nowhere"}
FIELDS = Fields(to=str, n=int, grade=str)
#: A record that begins with this byte can be decoded by the corrected code only.
MARK = b"\xff"


def record(number: int) -> bytes:
    """The record of a number."""
    grade = REFUSED.get(number % REFUSED_EVERY, "marked" if number % 7 == 0 else "good")
    to = NOWHERE if grade == "nowhere" else ROUTES[number % len(ROUTES)]
    return MARK * (grade == "marked") + json.dumps({"to": to, "n": number, "grade": grade}).encode()


class MarkedJson(Codec):
    """JSON, also behind a mark."""

    def __init__(self) -> None:
        self._json = JsonCodec(FIELDS)
        self.fields = FIELDS

    def decode(self, values: Any) -> pa.RecordBatch:
        return self._json.decode([None if each is None else each.removeprefix(MARK) for each in values])


class Graded(BaseBasicBolt):
    """Refuses rows of these grades."""

    deterministic = True

    def __init__(self, *grades: str) -> None:
        self._grades = grades

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["grade"] in self._grades:
            raise BadRecordError(f"grade {tup['grade']}")
        collector.emit([tup["to"], tup["n"], tup["grade"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.keeper``: "table" or "topic". The code is the corrected one as soon as the file
    "corrected" is in ``app.folder``."""
    corrected = _corrected(Path(app["app.folder"])).exists()
    letters: Any = DeadLetterTopic(LETTERS, bootstrap_servers=app["app.kafka"])
    if app["app.keeper"] == "table":
        letters = DeadLetterTable(OpaqueMapState(SqliteBackend(Path(app["app.folder"]) / "letters.db", "letters")))
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]],
        bootstrap_servers=app["app.kafka"],
        codec=MarkedJson() if corrected else JsonCodec(FIELDS),
        batch_records_max=150,
        on_bad_record="dead_letter",
        dead_letters=letters,
        bad_record_share_max=None,
    )
    builder = TransactionalTopologyBuilder("routed", "records", spout, 2)
    graded = Graded("never") if corrected else Graded("bad", "never")
    builder.set_bolt("graded", graded, 2).shuffle_grouping("records")
    sink = KafkaSink(topic_from="to", pattern="routed-[a-z]", value=["n"], bootstrap_servers=app["app.kafka"])
    builder.set_bolt("routes", sink, 2).fields_grouping("graded", Fields("to"))
    return builder.build()


@dataclass
class Outcome:
    """The kills. ``expected`` and ``found``: (topic, number) -> records. ``letters``: numbers
    of the dead letters that must be left, and that are."""

    seen: Kills
    expected: Counter[tuple[str, int]] = field(default_factory=Counter)
    found: Counter[tuple[str, int]] = field(default_factory=Counter)
    letters_expected: Counter[int] = field(default_factory=Counter)
    letters: Counter[int] = field(default_factory=Counter)
    replayed: int = 0
    met: int = 0  # the kills that met a replay

    def problems(self) -> list[str]:
        """A line for each kind of record that is missing, or there too often."""
        lines = []
        for name, wanted, there in (
            ("records", self.expected, self.found),
            ("letters", self.letters_expected, self.letters),
        ):
            for what, much in (("missing", wanted - there), ("too many", there - wanted)):  # type: ignore[operator]
                if much:
                    lines.append(f"{name} {what}: {much.total()}, such as {sorted(much)[:5]}")
        return lines

    def summary(self) -> dict[str, Any]:
        counts = {
            "records": self.expected.total(),
            "replayed": self.replayed,
            "met": self.met,
            "letters": self.letters.total(),
        }
        return {**self.seen.summary(), **counts}


def order_of(kills: int, chance: random.Random) -> list[str]:
    """Half of the kills, the deployment of the correction, and the other half, which meets a replay
    first of all: then there are many letters."""
    halves = [chance.choices(list(each), list(each.values()), k=k) for each, k in
              ((REFUSING, kills // 2), (CORRECTED, kills - kills // 2))]  # fmt: skip
    return [*halves[0], "deploy", *(["replaying+command", "replaying+driver", *halves[1]][: len(halves[1])])]


def run(folder: Path, order: Sequence[str], chance: random.Random, keeper: str, *, per_second: int = 10) -> Outcome:
    """Kill what ``order`` says: of ``REFUSING`` and ``CORRECTED``; "deploy" is the moment of the
    correction. The driver is stopped there, not killed: a commit that the old code has opened must
    be finished by it."""
    with EmbeddedServers(folder / "servers") as servers:
        topics = Topics(servers.bootstrap_servers)
        for topic in (*ROUTES, LETTERS):
            topics.create(topic, 2)
        settings = {
            "app.keeper": keeper,
            "transactional.zookeeper.servers": servers.zookeeper,
            "transactional.zookeeper.session.timeout.secs": 2,
            "topology.max.spout.pending": 4,
            "topology.max.attempts": 1_000,
        }
        app = {"app.topic": TOPIC, "app.kafka": servers.bootstrap_servers, "app.folder": folder}
        with (
            closing(ZooKeeperStore(servers.zookeeper, "/ratchet")) as coordination,
            _Replays(
                folder,
                {**app, **settings, "topology.start.timeout.secs": 300},
                lambda: read_letter_request(coordination, "routed") is not None,
            ) as commands,
        ):

            def correct() -> None:
                _corrected(folder).touch()
                commands.again()

            seen = kill_often(
                folder,
                TOPOLOGY,
                settings,
                order,
                lambda: committed_txid(coordination, "routed"),
                servers,
                per_second=per_second,
                more={"replaying": commands.meet, "command": commands.again},
                deploy=correct,
                record=record,
                executor="local",
                chance=chance,
            )
            commands.end()
            replayed = commands.finish()
        assert is_stable(servers.bootstrap_servers, [*ROUTES, LETTERS], 120), "a kafka_txn stays open"
        outcome = Outcome(seen, replayed=replayed, met=commands.met)

        def expect(message: Any) -> None:
            document = json.loads(message.value().removeprefix(MARK))
            if document["grade"] in ("never", "nowhere"):
                outcome.letters_expected[document["n"]] += 1
            else:
                outcome.expected[(document["to"], document["n"])] += 1

        def find(message: Any) -> None:
            outcome.found[(message.topic(), json.loads(message.value())["n"])] += 1

        read_topics(servers.bootstrap_servers, [TOPIC], expect)
        read_topics(servers.bootstrap_servers, ROUTES, find)
        outcome.letters = commands.letters(topics, outcome.letters_expected)
        return outcome


class _Replays:
    """``ratchet dead-letters`` about the topology, in processes that may be killed. ``replaying``:
    whether the topology has a request. ``met``: how often ``meet`` met one."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], replaying: Callable[[], bool]) -> None:
        self.met = 0
        self._replaying = replaying
        self._log = folder / "replays.log"
        self._words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Replays:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def again(self) -> None:
        """Kill the command that replays, and start another one."""
        self.end()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command("replay", "--executor", "local"), cwd=ROOT, stdout=log, stderr=log
            )

    def meet(self) -> None:
        """Begin a replay; return in the middle of it, or when there was nothing to replay."""
        self.again()
        assert self._process is not None
        while self._process.poll() is None:
            if self._replaying():
                self.met += 1
                return
            time.sleep(0.01)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def finish(self) -> int:
        """Replay what is left. Returns the number of letters that the replay ended."""
        answer = self._asked("replay", "--executor", "local", "--json", status=(0, 3))
        return int(answer[-1]["replayed"])

    def letters(self, topics: Topics, numbers: Counter[int]) -> Counter[int]:
        """The numbers of the letters that are left."""
        total = self._asked("list", "--json")[-1]["letters"]
        if not total:
            return Counter()
        places: list[str] = []

        def place(message: Any) -> None:
            if json.loads(message.value().removeprefix(MARK))["n"] in numbers:
                places.append(f"{message.topic()}/{message.partition()}/{message.offset()}")

        read_topics(topics.bootstrap_servers, [TOPIC], place)
        shown = self._asked("show", *places, "--json", status=(0, 2))
        left = Counter(json.loads(each["value"])["n"] for each in shown if each["type"] == "dead_letter")
        left[-1] = total - left.total()  # letters of other records
        return +left

    def _asked(self, *words: str, status: Sequence[int] = (0,)) -> list[dict[str, Any]]:
        answer = subprocess.run(
            self._command(*words), cwd=ROOT, capture_output=True, text=True, timeout=1_800, check=False
        )
        assert answer.returncode in status, answer.stderr[-4_000:]
        return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ratchet", "dead-letters", words[0], TOPOLOGY, *words[1:], *self._words]


def _corrected(folder: Path) -> Path:
    return folder / "corrected"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keeper", choices=["table", "topic"], default="topic")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="ratchet-kills-") as folder:
        outcome = run(Path(folder), order_of(arguments.kills, chance), chance, arguments.keeper)
    print(json.dumps(outcome.summary(), indent=1))
    print("\n".join(outcome.problems()) or "every record is there once")
    return 1 if outcome.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
