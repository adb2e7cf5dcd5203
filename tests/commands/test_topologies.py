"""``ratchet list``, ``status``, ``history``, ``check`` and ``topic``, with real servers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from framework import Config, Fields, Topology, TopologyBuilder, TransactionalTopologyBuilder, submit
from framework.coordination import Put, store_of
from framework.coordination.presence import read_drivers
from framework.coordination.transactional_state import encode_document
from framework.errors import RetryableError
from framework.topology import BaseBasicBolt
from framework.transactions import ZooKeeperStore
from integration import EmbeddedServers
from integration.server import free_port
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout, TextCodec
from tests.kit.command import Answer, call
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration


class Words:
    """A topology of one partition, and the commands about it."""

    def __init__(self, servers: EmbeddedServers, name: str, folder: Path) -> None:
        self.root = f"/{name}"
        self.settings = {
            "transactional.zookeeper.servers": servers.zookeeper,
            "transactional.zookeeper.root": self.root,
            "transactional.zookeeper.session.timeout.secs": 2,
        }
        self.folder = folder
        self.spout = OpaqueMemoryTransactionalSpout({0: [["a"], ["b"], ["a"]]}, Fields(word=str), 2)

    def topology(self) -> Topology:
        builder = TransactionalTopologyBuilder("words", "lines", self.spout)
        state = OpaqueMapState(SqliteBackend(self.folder / "x.db", "words"))
        builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("lines")
        return builder.build()

    def ask(self, command: str, *words: str) -> Answer:
        options = [part for key, value in self.settings.items() for part in ("--set", f"{key}={value}")]
        return call("ratchet", command, *words, *options)

    def documents(self, command: str, *words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ask(command, *words, "--json").stdout.splitlines()]


@pytest.fixture
def words(servers: EmbeddedServers, name: str, tmp_path: Path) -> Iterator[Words]:
    yield Words(servers, name, tmp_path)


def test_a_root_without_topologies_is_empty_and_an_unknown_topology_is_named(words: Words) -> None:
    assert words.ask("list").stdout == "no topology has run under this root\n"
    answer = words.ask("status", "words")
    assert answer.returncode == 2
    assert "no topology 'words' has run under this root; there are: none" in answer.stderr


def test_a_topology_that_cannot_be_read_does_not_hide_the_others(words: Words) -> None:
    with submit(words.topology(), words.settings, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with closing(store_of(Config.of(words.settings))) as store:
        store.apply([Put("broken/coordinator/currtx", b"not JSON")])
        store.apply([Put("brackets/coordinator/currtx", b"[" * 200_000)])
        driver = {"kind": "transactional", "host": "a", "pid": 1, "started_at": 1.0, "said_at": 2.0}
        status = {"phase": "running", "lag": "much", "rows_per_second": [1]}
        store.apply([Put("odd/drivers/1", encode_document({**driver, "status": status}, "odd"))])
        waited = store.lead("waited", "here", PATIENCE_S)
        assert waited is not None
        waited.resign()  # it was stopped before it wrote anything
    answer = words.ask("list")
    assert answer.returncode == 1
    rows = {line.split()[0]: line for line in answer.stdout.splitlines()[1:]}
    assert rows["words"].split()[1:3] == ["transactional", "stopped"]
    assert rows["broken"].split()[1:3] == ["unknown", "unreadable"]
    assert "broken/coordinator/currtx" in rows["broken"]
    assert rows["brackets"].split()[1:3] == ["unknown", "unreadable"]
    assert rows["odd"].split()[1:3] == ["transactional", "running"] and "much" in rows["odd"]
    assert rows["waited"].split()[1:3] == ["unknown", "stopped"]


@pytest.mark.slow
def test_a_topology_is_listed_while_it_runs_with_its_standby_and_after_it(words: Words) -> None:
    with submit(words.topology(), words.settings, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        with submit(words.topology(), words.settings, executor="local", standby=True):
            wait_for(
                lambda: [each["phase"] for each in words.documents("list")[0]["drivers"]] == ["running", "standby"]
            )
            (listed,) = words.documents("list")
            assert (listed["type"], listed["topology"], listed["kind"]) == ("topology", "words", "transactional")
            assert (listed["state"], listed["txid"]) == ("running", 2)
            wait_for(lambda: words.documents("list")[0]["status"]["committed_rows"] == 3)
            shown = words.ask("status", "words")
            assert shown.returncode == 0
            lines = [line.split() for line in shown.stdout.splitlines()]
            assert ["state", "running"] in lines
            assert [line[0] for line in lines if line[0] == "standby"] == ["standby"]
    (listed,) = words.documents("list")
    assert (listed["state"], listed["drivers"], listed["txid"]) == ("stopped", [], 2)
    assert words.ask("status", "words").returncode == 1


@pytest.mark.slow
def test_a_topology_that_waits_says_for_what(words: Words) -> None:
    class Away(SqliteBackend):
        def raise_header(self, expected: Any, new: Any) -> None:
            raise RetryableError("the sink does not answer")

    def topology() -> Topology:
        builder = TransactionalTopologyBuilder("words", "lines", words.spout)
        state = OpaqueMapState(Away(words.folder / "x.db", "words"))
        builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("lines")
        return builder.build()

    with submit(topology(), words.settings, executor="local"):
        wait_for(lambda: "does not answer" in (words.ask("list").stdout))


@pytest.mark.slow
def test_the_driver_of_a_core_topology_is_listed_too(words: Words) -> None:
    class Prints(BaseBasicBolt):
        def execute(self, tup: Any, collector: Any) -> None:
            pass

    from tests.kit.core_parts import ListSpout

    builder = TopologyBuilder("numbers")
    builder.set_spout("numbers", ListSpout("numbers", [1, 2, 3]))
    builder.set_bolt("prints", Prints()).shuffle_grouping("numbers")
    with submit(builder.build(), words.settings, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        wait_for(lambda: words.documents("list") != [] and words.documents("list")[0]["state"] == "running")
        assert words.documents("list")[0]["kind"] == "core"
        assert "prints" in words.ask("status", "numbers").stdout
    assert words.documents("list")[0]["state"] == "stopped"


def test_a_driver_that_dies_is_gone_with_its_session(words: Words, servers: EmbeddedServers) -> None:
    driver = ZooKeeperStore(servers.zookeeper, words.root, session_timeout_s=2)
    driver.announce("words/drivers/1", b'{"format": 1, "value": {}}')
    other = ZooKeeperStore(servers.zookeeper, words.root)
    assert other.children("words/drivers") == ["1"]
    driver.close()
    wait_for(lambda: read_drivers(other, "words") == [])
    other.close()


@pytest.mark.slow
def test_history_shows_transactions_and_one_of_them_whole(words: Words) -> None:
    with submit(words.topology(), words.settings, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    records = words.documents("history", "words")
    assert [(each["type"], each["txid"], each["attempts_total"]) for each in records] == [
        ("transaction", 1, 1),
        ("transaction", 2, 1),
    ]
    assert len(words.ask("history", "words", "--limit", "1").stdout.splitlines()) == 2
    whole = words.ask("history", "words", "--txid", "2").stdout
    assert "transaction 2, 1 attempts" in whole
    assert "lines->count: 1 rows" in whole
    assert words.ask("history", "words", "--failed").stdout == "no transaction failed\n"
    assert words.ask("history", "words", "--txid", "2", "--failed").stdout == whole
    picture = words.folder / "history.svg"
    drawn = words.ask("history", "words", "--plot", str(picture))
    assert drawn.stdout == f"wrote {picture}: 2 transactions, 0 of them not at the first attempt\n"
    assert "words: transactions 1 to 2" in picture.read_text()
    both = words.ask("history", "words", "--plot", str(picture), "--txid", "2")
    assert (both.returncode, "leave one of the two out" in both.stderr) == (2, True)
    answer = words.ask("history", "words", "--txid", "3")
    assert answer.returncode == 2
    assert "no record of transaction 3" in answer.stderr


# --- check ---


def kafka_topology(servers: str, topic: str, folder: Path) -> str:
    (folder / "mine.py").write_text(
        "from framework import *\nfrom sinks import *\nfrom spouts import *\n"
        f"spout = OpaqueKafkaTransactionalSpout([{topic!r}], bootstrap_servers={servers!r}, codec=TextCodec())\n"
        f"b = TransactionalTopologyBuilder({topic!r}, 'lines', spout)\n"
        f"s = OpaqueMapState(SqliteBackend({str(folder / 'x.db')!r}, 'words'))\n"
        "b.set_bolt('count', StateCommitter(s, ['value'], {'n': Count()})).global_grouping('lines')\n"
        "topology = b.build()\n"
    )
    return "mine:topology"


def checked(words: Words, topology: str) -> tuple[int, dict[str, dict[str, Any]]]:
    options = [part for key, value in words.settings.items() for part in ("--set", f"{key}={value}")]
    answer = call("ratchet", "check", topology, "--json", *options, cwd=words.folder)
    return answer.returncode, {each["subject"]: each for each in map(json.loads, answer.stdout.splitlines())}


def test_check_finds_nothing_wrong_and_changes_nothing(words: Words, topics: Topics, name: str) -> None:
    topics.create(name, 3)
    status, findings = checked(words, kafka_topology(topics.bootstrap_servers, name, words.folder))
    assert status == 0
    assert findings["source lines"]["text"] == "3 partitions"
    assert "exactly-once" in findings["sink count"]["text"]
    assert not (words.folder / "x.db").exists()
    assert words.ask("list").stdout == "no topology has run under this root\n"
    observer = ZooKeeperStore(words.settings["transactional.zookeeper.servers"], "/zookeeper")
    assert observer._client.exists(words.root) is None  # a root that is misspelt is not created
    observer.close()


def test_check_names_a_topic_that_is_missing_and_those_that_there_are(words: Words, topics: Topics, name: str) -> None:
    topics.create(f"{name}-other", 1)
    status, findings = checked(words, kafka_topology(topics.bootstrap_servers, name, words.folder))
    assert status == 1
    text = findings["source lines"]["text"]
    assert f"topic {name!r} does not exist at {topics.bootstrap_servers}; there are: " in text
    assert not findings["source lines"]["ok"]
    assert findings["sink count"]["ok"]


@pytest.mark.slow
def test_check_names_a_broker_that_does_not_answer(words: Words, name: str) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    status, findings = checked(words, kafka_topology(nobody, name, words.folder))
    assert status == 1
    assert nobody in findings["source lines"]["text"]


def test_check_names_a_table_of_another_topology(words: Words, topics: Topics, name: str) -> None:
    with submit(words.topology(), words.settings, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    topics.create(name, 1)
    status, findings = checked(words, kafka_topology(topics.bootstrap_servers, name, words.folder))
    assert status == 1
    assert "belongs to topology 'words'" in findings["sink count"]["text"]


def test_check_asks_for_the_servers_that_the_transactions_of_a_table_are_recorded_on(words: Words) -> None:
    with submit(words.topology(), words.settings, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    (words.folder / "mine.py").write_text(
        "from framework import *\nfrom sinks import *\nfrom spouts import *\n"
        "spout = OpaqueMemoryTransactionalSpout({0: []}, Fields(word=str), 1)\n"
        "b = TransactionalTopologyBuilder('words', 'lines', spout)\n"
        f"s = OpaqueMapState(SqliteBackend({str(words.folder / 'x.db')!r}, 'words'))\n"
        "b.set_bolt('count', StateCommitter(s, ['word'], {'n': Count()})).global_grouping('lines')\n"
        "topology = b.build()\n"
    )
    answer = call("ratchet", "run", "mine:topology", "--executor", "local", cwd=words.folder)
    assert answer.returncode == 2
    assert "transactional.zookeeper.servers is not set, and table 'words'" in answer.stderr
    assert "has state of topology 'words'" in answer.stderr


def test_a_run_over_a_topic_that_does_not_exist_fails_before_it_starts(words: Words, topics: Topics, name: str) -> None:
    """A scheduled job with a misspelt topic must not report success."""
    topology = kafka_topology(topics.bootstrap_servers, name, words.folder)
    options = [part for key, value in words.settings.items() for part in ("--set", f"{key}={value}")]
    answer = call("ratchet", "run", topology, "--until-caught-up", "--executor", "local", *options, cwd=words.folder)
    assert answer.returncode == 2
    assert f"error: topic {name!r} does not exist at" in answer.stderr


def test_catching_up_with_a_topic_that_does_not_exist_is_an_error(topics: Topics, name: str, tmp_path: Path) -> None:
    builder = TransactionalTopologyBuilder(name, "lines", _kafka_spout(topics.bootstrap_servers, name))
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("lines")
    from framework.errors import ConfigError

    with submit(builder.build(), executor="local") as run, pytest.raises(ConfigError, match="does not exist"):
        run.wait_until_caught_up(PATIENCE_S)


def _kafka_spout(servers: str, topic: str) -> Any:
    from spouts import OpaqueKafkaTransactionalSpout

    return OpaqueKafkaTransactionalSpout([topic], bootstrap_servers=servers, codec=TextCodec())


CORE = """\
from framework import *
from sinks import KafkaSink
from spouts import *
class Reads(BaseBasicBolt):
    def execute(self, tup, collector):
        pass
def core(app):
    b = TopologyBuilder(app["app.topic"])
    b.set_spout("lines", KafkaSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec()))
    b.set_bolt("reads", Reads()).shuffle_grouping("lines")
    return b.build()
def sink(app):
    spout = OpaqueMemoryTransactionalSpout({0: []}, Fields(value=str), 1)
    b = TransactionalTopologyBuilder(app["app.topic"], "lines", spout)
    b.set_bolt("sink", KafkaSink(app["app.topic"], bootstrap_servers=app["app.kafka"])).shuffle_grouping("lines")
    return b.build()
"""


def test_a_core_topology_over_a_topic_that_does_not_exist_fails_too(words: Words, topics: Topics, name: str) -> None:
    (words.folder / "mine.py").write_text(CORE)
    options = ("--set", f"app.topic={name}", "--set", f"app.kafka={topics.bootstrap_servers}", "--executor", "local")
    for command in (("check",), ("run", "--until-caught-up")):
        answer = call("ratchet", *command, "mine:core", *options, cwd=words.folder)
        assert answer.returncode == (1 if command == ("check",) else 2)
        assert f"topic {name!r} does not exist at {topics.bootstrap_servers}" in answer.stdout + answer.stderr
    topics.create(name, 1)
    assert call("ratchet", "run", "--until-caught-up", "mine:core", *options, cwd=words.folder).returncode == 0


@pytest.mark.slow
def test_check_names_the_broker_of_a_sink_that_does_not_answer(words: Words, name: str) -> None:
    (words.folder / "mine.py").write_text(CORE)
    nobody = f"127.0.0.1:{free_port()}"
    options = ("--set", f"app.topic={name}", "--set", f"app.kafka={nobody}", "--executor", "local")
    answer = call("ratchet", "check", "mine:sink", *options, cwd=words.folder)
    assert answer.returncode == 1
    assert [line for line in answer.stdout.splitlines() if line.startswith("✗ bolt sink") and nobody in line]


# --- topics ---


@pytest.mark.slow
def test_records_are_written_to_a_topic_and_looked_at(topics: Topics, name: str, tmp_path: Path) -> None:
    def topic(*words: str) -> Answer:
        return call("ratchet", "topic", *words, "--kafka", topics.bootstrap_servers)

    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"who": "ann", "n": 1}\n\n{"who": "bob", "n": 2}\n')
    assert topic("create", name, "--partitions", "1").stdout == f"topic {name} has 1 partition\n"
    assert topic("produce", name, str(lines), "--key", "who").stdout == f"2 records written to {name}\n"
    shown = [json.loads(line) for line in topic("peek", name, "--json").stdout.splitlines()]
    assert [(each["offset"], each["key"], each["value"]) for each in shown] == [
        (0, "ann", '{"who": "ann", "n": 1}'),
        (1, "bob", '{"who": "bob", "n": 2}'),
    ]
    assert topic("peek", name, "-n", "1").stdout == '0/1  bob  {"who": "bob", "n": 2}\n'
    again = topic("create", name)
    assert again.returncode != 0 and "already exists" in again.stderr
    keyless = topic("produce", name, str(lines), "--key", "nobody")
    assert keyless.returncode == 2 and "line 1 is not a JSON object with a field 'nobody'" in keyless.stderr
    assert topic("peek", f"{name}-no").returncode == 2
    misspelt = topic("produce", f"{name}-no", str(lines))
    assert misspelt.returncode == 2 and f"topic '{name}-no' does not exist; there are: " in misspelt.stderr
    reads, writes = os.pipe()
    os.write(writes, b"x\ny\n")
    os.close(writes)
    assert topic("produce", name, f"/dev/fd/{reads}").stdout == f"2 records written to {name}\n"
    os.close(reads)
    assert topic("produce", name, str(tmp_path / "none")).returncode == 2


# --- records that cannot be decoded ---


@pytest.mark.parametrize(
    ("codec", "value", "reason"),
    [
        ("JsonCodec(Fields(value=str))", "no JSON at all, and " + "long " * 30, "not a JSON object"),
        (
            "AvroCodec({'type': 'record', 'name': 'V', 'fields': [{'name': 'value', 'type': 'string'}]})",
            '{"value": "a"}',
            "not written with this schema",
        ),
    ],
)
def test_a_record_that_cannot_be_decoded_is_shown_with_what_to_do(
    words: Words, topics: Topics, name: str, codec: str, value: str, reason: str
) -> None:
    topics.create(name, 1)
    topics.send(name, [value.encode()])
    topology = kafka_topology(topics.bootstrap_servers, name, words.folder)
    module = words.folder / "mine.py"
    module.write_text(module.read_text().replace("TextCodec()", codec))
    options = [part for key, each in words.settings.items() for part in ("--set", f"{key}={each}")]
    answer = call("ratchet", "run", topology, "--executor", "local", *options, cwd=words.folder)
    assert answer.returncode == 1
    error = answer.stderr[answer.stderr.index("error: ") :].splitlines()
    assert f"topic {name!r}, partition 0, offset 0: " in error[0] and reason in error[0]
    assert error[1] == f"  with value {value.encode()[:80]!r}"
    assert error[2].startswith("  next: ") and "on_bad_record=" in error[2]
    assert value[:60] not in answer.stderr[: answer.stderr.index("error: ")]  # in no log


@pytest.mark.slow
def test_the_last_records_are_found_behind_the_marks_of_transactions(topics: Topics, name: str) -> None:
    topics.create(name, 2)
    producer = Producer({"bootstrap.servers": topics.bootstrap_servers, "transactional.id": name})
    producer.init_transactions()
    for number in range(20):
        producer.begin_transaction()
        producer.produce(name, str(number), partition=0)
        producer.flush()
        if number % 2:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    shown = call("ratchet", "topic", "peek", name, "-n", "6", "--kafka", topics.bootstrap_servers).stdout
    assert [line.split()[1] for line in shown.splitlines()] == ["14", "16", "18"]


def test_a_topic_is_not_created_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from spouts.kafka import topic_command

    monkeypatch.setattr(topic_command, "_TIMEOUT_S", 1.0)
    nobody = f"127.0.0.1:{free_port()}"
    answer = call("ratchet", "topic", "create", "words", "--kafka", nobody)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"error: Kafka at {nobody}: ")
    assert answer.stderr != f"error: Kafka at {nobody}: \n"


@pytest.mark.slow
@pytest.mark.rule("C45")
def test_a_pace_that_is_set_is_seen_by_the_leader_and_by_the_next_one(words: Words) -> None:
    refused = words.ask("set", "words", "topology.commit.interval=3600")
    assert refused.returncode == 2
    assert "no topology 'words' has run under this root" in refused.stderr
    with submit(words.topology(), {**words.settings, "topology.commit.interval": "1 h"}, executor="local") as run:
        run.wait_for_commit(1, PATIENCE_S)
        run.wait_until_caught_up(PATIENCE_S)  # no interval delays a bounded run
        words.spout.append(0, ["b"])
        assert run.status().pace == {"topology.commit.interval": 3600.0}
        answer = words.ask("set", "words", "topology.commit.interval=off", "topology.rate.records.per.second=50")
        assert answer.stdout == "topology.commit.interval = off\ntopology.rate.records.per.second = 50\n"
        run.wait_for_commit(3, PATIENCE_S)
        wait_for(lambda: run.status().pace == {"topology.rate.records.per.second": 50.0}, what="the pace to be seen")
        wait_for(
            lambda: "topology.rate.records.per.second = 50" in words.ask("status", "words").stdout,
            what="status to show it",
        )
    with submit(words.topology(), words.settings, executor="local") as run:
        wait_for(
            lambda: run.status().pace == {"topology.rate.records.per.second": 50.0}, what="the next leader to see it"
        )
    assert "cannot be changed while a topology runs" in words.ask("set", "words", "topology.max.attempts=3").stderr
    assert words.ask("set", "words", "topology.rate.records.per.second=-1").returncode == 2
    words.ask("set", "words", "topology.commit.interval=default", "topology.rate.records.per.second=default")
    assert words.ask("set", "words").stdout == "nothing is changed: the configuration holds\n"
