"""A damaged batch in the log of a broker stops a topology, which names the place; going on after it
is a choice, and recorded as a gap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from framework import BaseBasicBolt, TopologyBuilder, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import RatchetError
from framework.transactions import MemoryStore
from integration import EmbeddedServers
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import KafkaSpout, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.consumer.damaged_batches import BatchProber, Damage, damage_from, find_damage
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]
#: Batches of five records; those of which a value is to be changed.
BATCHES, DAMAGED = 6, {"two": (2,), "first": (0,), "last": (5,), "row": (1, 2, 4)}


def value(batch: int, record: int) -> bytes:
    return b"value-%02d-%d" % (batch, record)


def sound(topic: str) -> list[str]:
    kept = [batch for batch in range(BATCHES) if batch not in DAMAGED[topic]]
    return [value(batch, record).decode() for batch in kept for record in range(5)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    with EmbeddedServers(tmp_path_factory.mktemp("damage")) as servers:
        topics = Topics(servers.bootstrap_servers)
        for topic in DAMAGED:
            topics.create(topic)
            for batch in range(BATCHES):
                producer = topics.producer(linger_ms=1_000, compression_type="none")
                for record in range(5):
                    producer.produce(topic, value(batch, record), partition=0)
                producer.arrived()
        kafka = servers.kafka
        kafka.stop()
        for topic, batches in DAMAGED.items():
            (log,) = (kafka.folder / "data").glob(f"{topic}-0/*.log")
            held = log.read_bytes()
            for batch in batches:
                assert held.count(value(batch, 1)) == 1
                held = held.replace(value(batch, 1), value(batch, 1).replace(b"a", b"A"))
            log.write_bytes(held)
        kafka.start()
        yield topics


def counted(name: str, spout: Any) -> tuple[Any, list[str]]:
    state = OpaqueMapState(MemoryBackend(name))
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        status = run.status()
    return status, sorted(key[0] for key, _ in state.backend.scan())


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [OpaqueKafkaTransactionalSpout, KafkaTransactionalSpout])
def test_a_damaged_batch_ends_the_topology(broker: Topics, name: str, reader: str, kind: Any) -> None:
    spout = kind(["two"], bootstrap_servers=broker.bootstrap_servers, codec=TextCodec(), settings={"reader": reader})
    with pytest.raises(
        RatchetError, match=r"partition two/0: the batch that holds offset 10 is damaged.*on_data_loss='skip'"
    ):
        counted(name, spout)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("topic", DAMAGED)
def test_the_choice_to_go_on_is_recorded_as_a_gap(broker: Topics, name: str, reader: str, topic: str) -> None:
    spout = OpaqueKafkaTransactionalSpout(
        [topic],
        bootstrap_servers=broker.bootstrap_servers,
        codec=TextCodec(),
        on_data_loss="skip",
        settings={"reader": reader},
    )
    status, values = counted(name, spout)
    assert values == sound(topic)
    assert status.lost_records == 5 * len(DAMAGED[topic])


def test_batches_that_are_read_ahead_are_damaged_too(broker: Topics, name: str) -> None:
    """To keep transactions together, the driver reads ahead: what a damaged batch leads to is the
    same."""
    options: dict[str, Any] = {
        "bootstrap_servers": broker.bootstrap_servers,
        "codec": TextCodec(),
        "keep_transactions": True,
    }
    with pytest.raises(RatchetError, match=r"partition two/0: the batch that holds offset 10 is damaged"):
        counted(f"{name}-fails", OpaqueKafkaTransactionalSpout(pattern="two", **options))
    for topic in DAMAGED:
        spout = OpaqueKafkaTransactionalSpout(pattern=topic, on_data_loss="skip", **options)
        status, values = counted(f"{name}-{topic}", spout)
        assert values == sound(topic)
        assert status.lost_records == 5 * len(DAMAGED[topic])


_seen: dict[str, list[str]] = {}


class Seen(BaseBasicBolt):
    def __init__(self, name: str) -> None:
        self._name = name

    def execute(self, tup: Any, collector: Any) -> None:
        _seen[self._name].append(tup["value"])

    def declare_output_fields(self, declarer: Any) -> None:
        pass


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("topic", ["row", "last", None])
def test_a_core_topology(broker: Topics, name: str, reader: str, topic: str | None) -> None:
    spout = KafkaSpout(
        [topic or "two"],
        bootstrap_servers=broker.bootstrap_servers,
        codec=TextCodec(),
        group=name,
        on_data_loss="skip" if topic else "fail",
        settings={"reader": reader},
    )
    _seen[name] = []
    builder = TopologyBuilder(name)
    builder.set_spout("spout", spout)
    builder.set_bolt("seen", Seen(name)).global_grouping("spout")
    if topic is None:
        with (
            pytest.raises(RatchetError, match=r"two/0: the batch that holds offset 10 is damaged.*on_data_loss='skip'"),
            submit(builder.build(), {}, None, "local") as run,
        ):
            run.wait_until_idle(PATIENCE_S)
        return
    with submit(builder.build(), {}, None, "local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert sorted(_seen[name]) == sound(topic)


def test_where_damage_begins_and_ends(broker: Topics) -> None:
    settings = KafkaSettings(broker.bootstrap_servers, None)
    expected = {
        "two/0": (Damage(10, 15),),
        "first/0": (Damage(0, 5),),
        "last/0": (Damage(25, 30),),
        "row/0": (Damage(5, 15), Damage(20, 25)),
    }
    # after a damaged batch, the consumer asks for any offset, and hears of it at a later position
    for _ in range(10):
        assert find_damage(settings, "g", {f"{topic}/0": (0, 30) for topic in DAMAGED}) == expected
    assert find_damage(settings, "g", {"two/0": (12, 14)}) == {"two/0": (Damage(12, 15),)}
    assert find_damage(settings, "g", {"two/0": (15, 30), "row/0": (0, 5)}) == {}
    with closing(BatchProber(settings, "g")) as prober:
        assert [batch.next for batch in damage_from(prober, ("row", 0), 7)] == [10, 15]
        assert damage_from(prober, ("row", 0), 15) == []
