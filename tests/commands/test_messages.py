"""What a new user's mistakes are answered with: the whole of what ``ratchet run`` prints on
standard error.

``make test`` runs most of them in this process, and ``make test-all`` each as a process of its own.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from integration import EmbeddedServers
from tests.kit.command import Answer, call
from tests.kit.processes import ROOT
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

BASE = """\
from framework import *
from sinks import *
from spouts import *

class Split(BaseBasicBolt):
    def execute(self, tup, collector):
        collector.emit([tup["line"]])

    def declare_output_fields(self, declarer):
        declarer.declare(Fields(word=str))

def build(bolt, spout=None):
    spout = spout or OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(line=str), 10)
    builder = TransactionalTopologyBuilder("orders", "lines", spout)
    builder.set_bolt("split", bolt).shuffle_grouping("lines")
    state = OpaqueMapState(SqliteBackend("words.db", "words"))
    committer = StateCommitter(state, ["word"], {"n": Count()})
    builder.set_bolt("count", committer).fields_grouping("split", Fields("word"))
    return builder.build()

def kafka(app, codec=TextCodec("line")):
    return OpaqueKafkaTransactionalSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=codec)
"""
#: What is wrong with ``mine.py``, which begins with ``from base import *``, and what is printed.
#: Nothing else is: these are found before anything starts.
FOUND_FIRST = {
    "a function for a bolt": (
        "def topology():\n    return build(lambda tup: None)\n",
        "error: bolt 'split' is a function that needs arguments (missing a required argument: 'tup'): subclass "
        "BaseBasicBolt\n",
    ),
    "a key of [app] that is not set": (
        "def topology(app):\n    return build(Split(), kafka({**app, 'app.kafka': app['app.kafak']}))\n",
        "error: app.kafak is not set; there is app.kafka: is one of the two misspelt?\n",
    ),
    "a length of time that is none": (
        "from ratchet import tumbling\n\ndef topology():\n    return tumbling('5 parsecs')\n",
        "error: mine.py:5: tumbling('5 parsecs'): the length of a window is '5 parsecs': give a length of time, "
        "such as '30 s', '5 min', '1 h', '1 day', or seconds as a number\n",
    ),
    "a spout of a topic that cannot be": (
        "def topology():\n    return kafka({'app.topic': 'a b', 'app.kafka': 'here:9092'})\n",
        'error: {folder}/base.py:22: return OpaqueKafkaTransactionalSpout([app["app.topic"]], '
        "bootstrap_servers=app[\"app.kafka\"], codec=codec): 'a b' is not a Kafka topic name: 1 to 249 letters, digits, "
        "'.', '_' and '-'\n",
    ),
    "a syntax error": (
        "def topology(:\n",
        "error: mine:topology: {folder}/mine.py:2: invalid syntax: def topology(:\n",
    ),
    "an import that fails": (
        "import nowhere\n",
        "error: mine:topology: {folder}/mine.py:2: import nowhere: ModuleNotFoundError: No module named 'nowhere'\n",
    ),
    "a forgotten return": (
        "def topology():\n    build(Split())\n",
        'error: mine:topology returned None: is "return builder.build()" missing?\n',
    ),
    "a forgotten build()": (
        "def topology():\n    return TopologyBuilder('t')\n",
        "error: mine:topology returned a builder: call its build()\n",
    ),
    "a bolt with another signature": (
        "class Wrong(Split):\n    def execute(self, tup): pass\n\ndef topology():\n    return build(Wrong())\n",
        "error: bolt 'split': Wrong.execute(self, tup) cannot be called as it is: write execute(self, tup, collector)\n",
    ),
}
#: What goes wrong while it runs, with Kafka, and what is printed after the logs.
WHILE_IT_RUNS = {
    "sys.exit in a bolt": (
        "import sys\nclass Ends(Split):\n    def execute(self, tup, collector):\n        sys.exit(3)\n\n"
        "def topology():\n    return build(Ends())\n",
        "error: component 'split', task 0: SystemExit: 3\n  at {folder}/mine.py:5: sys.exit(3)\n  with line='a'\n"
        "  next: ratchet find-poison mine:topology {options}\n",
    ),
    "a record that is not JSON": (
        "def topology(app):\n    return build(Split(), kafka(app, JsonCodec(Fields(line=str))))\n",
        "error: component 'lines', task 0: topic '{topic}', partition 0, offset 0: not a JSON object\n"
        "  with value b'plain text'\n"
        "  next: mend the record's source, or give the spout on_bad_record='dead_letter' or 'skip'\n",
    ),
    "JSON read as Avro": (
        "schema = {'type': 'record', 'name': 'V', 'fields': [{'name': 'line', 'type': 'string'}]}\n"
        "def topology(app):\n    return build(Split(), kafka(app, AvroCodec(schema)))\n",
        "error: component 'lines', task 0: topic '{topic}', partition 0, offset 0: not written with this schema: the value ends "
        "early, after 10 bytes\n  with value b'plain text'\n"
        "  next: mend the record's source, or give the spout on_bad_record='dead_letter' or 'skip'\n",
    ),
    "a topic that is missing": (
        "def topology(app):\n    return build(Split(), kafka({**app, 'app.topic': 'nosuch'}))\n",
        "error: topic 'nosuch' does not exist at {kafka}; there are: {topic}\n",
    ),
    "a broker that does not answer": (
        "def topology(app):\n    return build(Split(), kafka({**app, 'app.kafka': '127.0.0.1:1'}))\n",
        "error: nothing answers at 127.0.0.1:1: 127.0.0.1:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: "
        "Connection refused (after 0ms in state CONNECT); check the address, and that Kafka runs\n",
    ),
}


class User:
    """Somebody who types ``ratchet run`` in a folder."""

    def __init__(self, folder: Path, in_processes: bool) -> None:
        self.folder = folder
        self._in_processes = in_processes
        (folder / "base.py").write_text(BASE)

    def runs(self, name: str, *options: str, **environment: str) -> Answer:
        words = ("run", name, "--until-caught-up", *options)
        if not self._in_processes and not environment:
            return call("ratchet", *words, cwd=self.folder)
        answer = subprocess.run(
            [sys.executable, "-m", "ratchet", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        return Answer(answer.returncode, answer.stdout, answer.stderr)

    def writes(self, text: str) -> None:
        (self.folder / "mine.py").write_text(f"from base import *\n{text}")


@pytest.fixture
def user(tmp_path: Path, in_all: bool) -> User:
    return User(tmp_path, in_all)


@pytest.mark.parametrize("mistake", FOUND_FIRST)
def test_a_mistake_in_the_module_is_told_in_one_line(user: User, mistake: str) -> None:
    text, message = FOUND_FIRST[mistake]
    user.writes(text)
    answer = user.runs("mine:topology", "--set", "app.kafka=there")
    assert answer.stderr == message.replace("{folder}", str(user.folder))
    assert (answer.returncode, answer.stdout) == (2, "")


@pytest.mark.parametrize(("name", "meant"), [("mine.py:topology", "mine:topology"), ("./mine:topology",) * 2])
def test_a_file_for_a_module_is_told_what_to_write(user: User, name: str, meant: str) -> None:
    user.writes("")
    assert user.runs(name).stderr == f"error: {name!r}: write {meant.removeprefix('./')}\n"


def test_a_misspelt_setting_of_kafka_is_told_with_the_right_one(user: User) -> None:
    (user.folder / "r.toml").write_text('[kafka]\nbootstrap.severs = "there"\n')
    user.writes("def topology():\n    return build(Split(), OpaqueKafkaTransactionalSpout(['t'], codec=TextCodec()))\n")
    expected = "error: unknown key 'kafka.bootstrap.severs': did you mean 'kafka.bootstrap.servers'?\n"
    assert user.runs("mine:topology", "--config", "r.toml").stderr == expected


def test_a_folder_that_hides_a_package_is_named(user: User) -> None:
    (user.folder / "sinks").mkdir()
    answer = user.runs("mine:topology")
    assert answer.stderr == f"error: {user.folder / 'sinks'} hides Ratchet's package 'sinks': rename it\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "Java 17 or newer is needed, and there is no java on the PATH: install it, or set JAVA_HOME"),
        ("1.8.0_402", "{folder}/bin/java is Java 8, and Java 17 or newer is needed: install it, or set JAVA_HOME"),
    ],
)
def test_a_java_that_spark_cannot_use_is_told_before_spark_starts(user: User, version: str, message: str) -> None:
    user.writes("def topology():\n    return build(Split())\n")
    path = user.folder / "bin"
    path.mkdir()
    if version:
        (path / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        (path / "java").chmod(0o755)
    answer = user.runs("mine:topology", PATH=f"{path}:/bin" if version else str(path), JAVA_HOME="")
    assert answer.stderr.splitlines()[-1] == f"error: {message}".replace("{folder}", str(user.folder))
    assert answer.returncode == 2


@pytest.mark.slow_for("sys.exit in a bolt")
@pytest.mark.quick_for("sys.exit in a bolt", "a record that is not JSON", "a topic that is missing")
@pytest.mark.integration
@pytest.mark.parametrize("mistake", WHILE_IT_RUNS)
def test_what_goes_wrong_while_it_runs_is_told_at_the_end(user: User, topics: Topics, name: str, mistake: str) -> None:
    text, message = WHILE_IT_RUNS[mistake]
    user.writes(text)
    topics.create(name, 1)
    topics.send(name, [b"plain text"])
    patience = f"topology.start.timeout.secs={1 if '127.0.0.1:1' in text else PATIENCE_S:g}"
    settings = (f"app.topic={name}", f"app.kafka={topics.bootstrap_servers}", patience)
    options = [word for setting in settings for word in ("--set", setting)]
    answer = user.runs("mine:topology", *options, "--executor", "local")
    places = {
        "{folder}": str(user.folder),
        "{topic}": name,
        "{kafka}": topics.bootstrap_servers,
        "{options}": f"--set app.topic=... --set app.kafka=... --set {patience}",  # app.* may be secret
    }
    for place, meant in places.items():
        message = message.replace(place, meant)
    shown = re.sub(r"after \d+ms", "after 0ms", answer.stderr[answer.stderr.index("error: ") :])
    if "there are: " in message:  # the first topics of all tests
        shown = re.sub(r"there are: \w.*", f"there are: {name}", shown)
    assert shown == message
    assert answer.returncode == (2 if "nosuch" in text else 1)


@pytest.mark.integration
def test_a_table_whose_transactions_are_recorded_elsewhere_asks_for_those_servers(
    user: User, servers: EmbeddedServers, name: str
) -> None:
    user.writes("def topology():\n    return build(Split())\n")
    zookeeper = (f"transactional.zookeeper.servers={servers.zookeeper}", f"transactional.zookeeper.root=/{name}")
    options = ("--executor", "local")
    there = user.runs("mine:topology", *options, "--set", zookeeper[0], "--set", zookeeper[1])
    assert there.returncode == 0, there.stderr
    answer = user.runs("mine:topology", *options)
    assert answer.stderr.splitlines()[-1] == (
        f"error: transactional.zookeeper.servers is not set, and table 'words' of {user.folder}/words.db has state of "
        "topology 'orders': name the servers that its transactions are recorded on"
    )
    assert answer.returncode == 2


@pytest.mark.slow
@pytest.mark.integration
def test_two_topologies_on_a_topic_that_was_created_again_go_on_as_they_are_told(
    user: User, topics: Topics, servers: EmbeddedServers, name: str
) -> None:
    user.writes(
        "def topology(app):\n    return build(Split(), kafka(app))\n"
        "def other(app):\n    builder = TransactionalTopologyBuilder('other', 'lines', kafka(app))\n"
        "    state = OpaqueMapState(SqliteBackend('words.db', 'lines'))\n"
        "    builder.set_bolt('count', StateCommitter(state, ['line'], {'n': Count()})).global_grouping('lines')\n"
        "    return builder.build()\n"
    )
    values = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "transactional.zookeeper.root": f"/{name}",
        "app.topic": name,
        "app.kafka": topics.bootstrap_servers,
    }
    options = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    topics.send(topics.create(name), [b"old"])
    both = ("mine:topology", "mine:other")
    for each in both:
        assert user.runs(each, "--executor", "local", *options).returncode == 0
    topics.recreate(name)
    topics.send(name, [b"new", b"new"])
    for each in both:
        stopped = user.runs(each, "--executor", "local", *options)
        assert stopped.returncode == 1
        advice = re.search(r"run `ratchet (.*?)`", stopped.stderr)
        assert advice is not None, stopped.stderr
        words = advice[1].replace("MODULE:TOPOLOGY", each).split()
        assert call("ratchet", *words, *options, cwd=user.folder).returncode == 0
        assert user.runs(each, "--executor", "local", *options).returncode == 0
    with closing(sqlite3.connect(user.folder / "words.db")) as database:
        assert set(database.execute("SELECT word, n FROM words_live")) == {("old", 1), ("new", 2)}
        assert set(database.execute("SELECT line, n FROM lines_live")) == {("old", 1), ("new", 2)}
