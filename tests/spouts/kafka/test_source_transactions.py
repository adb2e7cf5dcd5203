"""Batches that keep the transactions of a source together: a connector that is started again at any
time, partitions that become readable in any order, leaders that die."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from ratchet import Pipeline, sqlite
from spouts import OpaqueKafkaTransactionalSpout
from spouts.codecs.debezium_transaction_metadata import change_order, transaction_end
from spouts.kafka.consumer.lookahead_reader import Ahead
from spouts.kafka.partition_plan_entries import topic_and_number
from spouts.kafka.planning import batch_limits, source_transactions
from spouts.kafka.planning.source_transactions import SourceTransactions
from tests.kit.change_records import transaction_marker
from tests.kit.targets import examples

PARTITIONS = ["s.p.a/0", "s.p.b/0", "s.p.c/0", "s.p.c/1"]
ENDS = "s.transaction/0"
#: A record of a partition: what it is, for the test, and its value.
Entry = tuple[str, bytes | None]


class FakeLogs:
    """Logs of records, and what reads ahead of them. ``readable``: what is behind it can still be
    lost."""

    def __init__(self, records: Iterable[tuple[str, Entry]] = ()) -> None:
        self.logs: dict[str, list[Entry]] = {each: [] for each in (*PARTITIONS, ENDS)}
        for partition, entry in records:
            self.logs[partition].append(entry)
        self.readable = self.ends()
        self.places: dict[str, int] = {}

    def ends(self) -> dict[str, int]:
        return {each: len(log) for each, log in self.logs.items()}

    def begin(self, partition: str, offset: int) -> None:
        self.places[partition] = offset

    def end(self, partition: str) -> None:
        self.places.pop(partition, None)

    def beginning(self, partition: str) -> int:
        return 0

    def read(self) -> list[Ahead]:
        found = []
        for partition, place in self.places.items():
            end = self.readable[partition]
            self.places[partition] = until = min(place + 2, end)
            found += [Ahead(partition, at, self.logs[partition][at][1]) for at in range(place, until)]
            if until == end:
                found.append(Ahead(partition, end, None, is_end=True))
        return found

    def close(self) -> None:
        pass


def change(transaction: str | None, order: int) -> bytes:
    said = (
        {"id": f"{transaction}:{order + 50}", "total_order": 9, "data_collection_order": order} if transaction else None
    )
    return json.dumps({"op": "c", "after": {"transaction": {"id": "no"}}, "transaction": said}).encode()


def marker(status: str, transaction: str, changes: Mapping[str, int]) -> bytes:
    return transaction_marker(status, f"{transaction}:99", changes)


def emitted(chance: random.Random, transactions: int) -> list[tuple[str, Entry]]:
    """What a connector writes, in its order."""
    found: list[tuple[str, Entry]] = []
    for number in range(transactions):
        name = str(number)
        found.append((ENDS, ("", marker("BEGIN", name, {}))))
        counts: dict[str, int] = {}
        for _ in range(chance.randint(0, 6)):
            partition = chance.choice(PARTITIONS)
            table = topic_and_number(partition)[0].removeprefix("s.")
            counts[table] = counts.get(table, 0) + 1
            found.append((partition, (f"{name} {table} {counts[table]}", change(name, counts[table]))))
            if chance.random() < 0.2:
                found.append((partition, ("", None)))
            if chance.random() < 0.1:
                found.append((chance.choice(PARTITIONS), ("", change(None, 0))))
        # a table that is not read
        found.append((ENDS, (f"{name} end", marker("END", name, {**counts, "p.unread": 2}))))
    return found


class Copied:
    """What was planned: the names of changes, and which transactions they make."""

    def __init__(self, events: list[tuple[str, Entry]]) -> None:
        self.whole: dict[str, set[str]] = {}
        for partition, (name, _) in events:
            if name and partition != ENDS:
                self.whole.setdefault(name.split(" ")[0], set()).add(name)
        self.seen: set[str] = set()

    def add(self, logs: FakeLogs, offsets: Mapping[str, int], shares: Mapping[str, int]) -> None:
        for partition, share in shares.items():
            for name, _ in logs.logs[partition][offsets[partition] : offsets[partition] + share]:
                if name and partition != ENDS:
                    self.seen.add(name)
        for transaction, changes in self.whole.items():
            there = changes & self.seen
            assert there in (set(), changes), (
                f"transaction {transaction} is divided: {sorted(changes - there)} are missing"
            )


def made(logs: FakeLogs, is_new: Callable[[str], bool] = lambda topic: False) -> SourceTransactions:
    return SourceTransactions(logs, lambda: logs.logs, is_new)


def write(logs: FakeLogs, chance: random.Random, events: list[tuple[str, Entry]], at: int) -> int:
    """The connector writes some events, or is started again. Returns where it goes on."""
    if chance.random() < 0.3 and at:
        # What it sent last may be lost, in each partition by itself. It begins before all of it.
        again = chance.randint(max(at - 12, 0), at)
        lost = chance.randint(again, at)
        for partition, log in logs.logs.items():
            sent = sum(where == partition for where, _ in events[lost:at])
            gone = chance.randint(0, min(sent, len(log) - logs.readable[partition]))
            del log[len(log) - gone :]
        return again
    some = events[at : at + chance.randint(1, 8)]
    for where, entry in some:
        logs.logs[where].append(entry)
    return at + len(some)


@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(400), deadline=None)
def test_no_transaction_is_divided(seed: int) -> None:
    chance = random.Random(seed)
    events = emitted(chance, chance.randint(1, 12))
    logs, copied = FakeLogs(), Copied(events)
    offsets = dict.fromkeys(logs.logs, 0)
    before: list[tuple[dict[str, int], set[str]]] = []
    planning, at, records_max = made(logs), 0, chance.choice([1, 3, 10, 1_000])
    bytes_max = mock.patch.object(batch_limits, "TASK_ROWS_BYTES_MAX", chance.choice([100, 700, 1 << 30]))
    while True:
        at = write(logs, chance, events, at) if at < len(events) else at
        over = at == len(events)
        logs.readable = {
            each: end if over else chance.randint(logs.readable[each], end) for each, end in logs.ends().items()
        }
        if chance.random() < 0.2:
            planning, logs.places = made(logs), {}  # another leader
        available = {
            each: end - offsets[each] if over else chance.randint(0, end - offsets[each])
            for each, end in logs.readable.items()
        }
        if not over and chance.random() < 0.2:
            del available[chance.choice(PARTITIONS)]  # it has no leader
        with bytes_max:
            shares = planning.shares(offsets, available, records_max)
        assert all(0 <= share <= available[each] for each, share in shares.items())
        if over and not any(shares.values()):
            break
        if chance.random() < 0.8:  # otherwise the attempt fails, and is planned again
            before.append((offsets, set(copied.seen)))
            copied.add(logs, offsets, shares)
            offsets = {each: offset + shares.get(each, 0) for each, offset in offsets.items()}
        elif before and chance.random() < 0.3:  # so do those before it
            offsets, copied.seen = before[max(len(before) - chance.randint(1, 3), 0)]
    assert not any(log.highest for log in planning._logs.values())  # what is planned is forgotten
    assert copied.seen == set().union(*copied.whole.values())
    assert offsets == logs.ends()


def whole(transaction: str, changes: Mapping[str, int]) -> list[tuple[str, Entry]]:
    """The records of a transaction, by partition."""
    found = [
        (f"s.{table}/0", (f"{transaction} {order}", change(transaction, order)))
        for table, count in changes.items()
        for order in range(1, count + 1)
    ]
    return [*found, (ENDS, ("end", marker("END", transaction, changes)))]


def shares_of(logs: FakeLogs, records_max: int = 100, **options: Any) -> dict[str, int]:
    shares = made(logs, **options).shares(dict.fromkeys(logs.logs, 0), logs.ends(), records_max)
    return {each: share for each, share in shares.items() if share}


def test_a_large_transaction_is_one_batch() -> None:
    logs = FakeLogs([*whole("1", {"p.a": 2_000, "p.b": 3}), *whole("2", {"p.a": 1})])
    assert shares_of(logs, records_max=10) == {"s.p.a/0": 2_000, "s.p.b/0": 3, ENDS: 1}


def test_a_batch_has_as_many_transactions_as_fit() -> None:
    logs = FakeLogs(record for number in range(100) for record in whole(str(number), {"p.a": 4}))
    assert shares_of(logs, records_max=50) == {"s.p.a/0": 40, ENDS: 10}


def large(transaction: str | None, order: int) -> bytes:
    return change(transaction, order) + b" " * 100_000


def test_a_batch_has_as_many_transactions_as_fit_into_the_memory_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single one above that is a batch of its own."""
    monkeypatch.setattr(batch_limits, "TASK_ROWS_BYTES_MAX", 1_333_333)
    logs = FakeLogs()
    for number, changes in enumerate([4, 4, 4, 4, 30, 4]):
        for partition, entry in whole(str(number), {"p.a": changes}):
            value = entry[1] if partition == ENDS else large(str(number), int(entry[0].split()[1]))
            logs.logs[partition].append((entry[0], value))
    logs.readable = logs.ends()
    planning, offsets, found = made(logs), dict.fromkeys(logs.logs, 0), []
    while any(offsets[each] < end for each, end in logs.ends().items()):
        available = {each: end - offsets[each] for each, end in logs.ends().items()}
        shares = planning.shares(offsets, available, 1_000)
        found.append(shares["s.p.a/0"])
        offsets = {each: offset + shares[each] for each, offset in offsets.items()}
    assert found == [8, 8, 30, 4]


def test_records_without_a_transaction_are_divided_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_limits, "TASK_ROWS_BYTES_MAX", 1_333_333)
    logs = FakeLogs([("s.p.a/0", ("", large(None, 0)))] * 25)
    assert shares_of(logs, records_max=1_000) in ({"s.p.a/0": 9}, {"s.p.a/0": 10})
    logs = FakeLogs([("s.p.a/0", ("", large(None, 0) * 20)), ("s.p.a/0", ("", b"{}"))])
    assert shares_of(logs, records_max=1_000) == {"s.p.a/0": 1}


def test_a_batch_of_many_transactions_takes_no_longer_for_each() -> None:
    """The time of a batch once grew with the square of the number of its transactions."""
    logs = FakeLogs(record for number in range(20_000) for record in whole(str(number), {"p.a": 1}))
    assert shares_of(logs, records_max=100_000) == {"s.p.a/0": 20_000, ENDS: 20_000}


@pytest.mark.parametrize("has_transactions", [False, True])
def test_little_more_is_read_ahead_than_a_batch_has(has_transactions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many partitions, too: the memory of the driver does not grow with their number."""
    monkeypatch.setattr(source_transactions, "_STEP_MIN", 1)
    logs = FakeLogs()
    logs.logs = {ENDS: [], **{f"s.p.t{number}/0": [] for number in range(50)}}
    for number in range(5_000):
        if has_transactions:
            records = whole(str(number), {f"p.t{number % 50}": 1})
        else:
            records = [(f"s.p.t{number % 50}/0", ("", change(None, 0)))]
        for partition, entry in records:
            logs.logs[partition].append(entry)
    logs.readable = logs.ends()
    planning = made(logs)
    shares = planning.shares(dict.fromkeys(logs.logs, 0), logs.ends(), 500)
    assert sum(shares.values()) >= 500
    assert sum(read.read_to for read in (*planning._logs.values(), *planning._ends.values())) < 2_000


def test_topics_that_are_not_there_are_looked_up_once() -> None:
    """A transform renames them: each transaction names a topic that the pattern would match."""
    logs = FakeLogs(record for number in range(100) for record in whole(str(number), {"p.a": 1}))
    logs.logs[ENDS] = [("", marker("END", str(number), {"p.a": 1, "p.renamed": 1})) for number in range(100)]
    looked_up: list[str] = []

    def is_new(topic: str) -> bool:
        looked_up.append(topic)
        return False

    assert shares_of(logs, records_max=1_000, is_new=is_new) == {"s.p.a/0": 100, ENDS: 100}
    assert looked_up == ["s.p.renamed"]


def test_changes_wait_for_the_end_of_their_transaction() -> None:
    *changes, end = whole("1", {"p.a": 2, "p.b": 1})
    assert shares_of(FakeLogs(changes)) == {}
    assert shares_of(FakeLogs([*changes[:2], end])) == {}
    assert shares_of(FakeLogs([*changes, end])) == {"s.p.a/0": 2, "s.p.b/0": 1, ENDS: 1}


def test_the_beginning_of_a_transaction_is_no_batch() -> None:
    assert shares_of(FakeLogs([(ENDS, ("", marker("BEGIN", "1", {})))])) == {}


def test_a_transaction_of_which_a_part_was_planned_before_goes_on() -> None:
    """A record was refused, and the leader died between the halves of the batch."""
    assert shares_of(FakeLogs(whole("1", {"p.a": 3})[1:])) == {"s.p.a/0": 2, ENDS: 1}


def test_changes_that_a_transform_has_removed_are_not_waited_for() -> None:
    """Once a younger transaction is there, nothing of the older one can come any more."""
    first, *_ = whole("1", {"p.a": 2})
    *_, end = whole("1", {"p.a": 2})
    logs = FakeLogs([first, end])
    assert shares_of(logs) == {}
    assert shares_of(FakeLogs([first, end, *whole("2", {"p.a": 1})])) == {"s.p.a/0": 2, ENDS: 2}


def test_changes_whose_end_is_gone_are_planned_with_the_next_transaction() -> None:
    """Retention has removed it, or a new topology begins behind it."""
    changes = whole("1", {"p.a": 2})[:-1]
    younger, end = whole("2", {"p.a": 1})
    assert shares_of(FakeLogs([*changes, end])) == {}
    assert shares_of(FakeLogs([*changes, younger, end])) == {"s.p.a/0": 3, ENDS: 1}


def test_a_forged_change_between_those_of_a_transaction_stops_nothing() -> None:
    """Its transaction never ends. Once the planner waited for it for ever."""
    forged = ("s.p.a/0", ("", change("forged", 1)))
    first, second, end = whole("1", {"p.a": 2})
    assert shares_of(FakeLogs([first, forged, end])) == {}
    assert shares_of(FakeLogs([first, forged, second, end])) == {"s.p.a/0": 3, ENDS: 1}
    assert shares_of(FakeLogs([first, forged, second, end, *whole("2", {"p.a": 1})])) == {"s.p.a/0": 4, ENDS: 2}
    both = [("s.p.c/0", first[1]), ("s.p.c/1", second[1]), (ENDS, ("", marker("END", "1", {"p.c": 3})))]
    third = ("s.p.c/0", ("", change("1", 3)))
    assert shares_of(FakeLogs([both[0], ("s.p.c/0", forged[1]), third, *both[1:]])) == {
        "s.p.c/0": 3,
        "s.p.c/1": 1,
        ENDS: 1,
    }


def test_an_id_that_no_source_has_is_not_kept() -> None:
    """The planner once kept the ids of 900 kB of all records that it had read ahead."""
    long = "9" * 900_000
    logs = FakeLogs([("s.p.a/0", ("", change(long, 1))), (ENDS, ("", marker("END", long, {"p.a": 1})))])
    planning = made(logs)
    planning.shares(dict.fromkeys(logs.logs, 0), logs.ends(), 100)
    assert [run.transaction for log in planning._logs.values() for run in log.runs] == [None]
    assert not any(ends.ahead or ends.ended for ends in planning._ends.values())


def test_a_topic_that_has_just_been_created_is_waited_for() -> None:
    logs = FakeLogs(whole("1", {"p.a": 1}))
    logs.logs[ENDS] = [("", marker("END", "1", {"p.a": 1, "p.new": 1}))]
    assert shares_of(logs, is_new=lambda topic: topic == "s.p.new") == {}
    assert shares_of(logs) == {"s.p.a/0": 1, ENDS: 1}


def test_changes_of_a_topic_with_another_name_than_its_table_are_planned_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transform has renamed it, or somebody else writes to it: it stops no other topic."""
    said: list[Any] = []
    monkeypatch.setattr(
        source_transactions._log, "warning", lambda event, **fields: said.append((event, fields["topic"]))
    )
    logs = FakeLogs(whole("1", {"p.a": 1}))
    logs.logs[ENDS] = [("", marker("END", "1", {"p.renamed": 1}))]
    assert shares_of(logs) == {"s.p.a/0": 1, ENDS: 1}
    assert said == [("source.transactions_of_another_topic", "s.p.a")]


def test_a_table_may_be_named_transaction() -> None:
    table = "s.p.transaction/0"
    logs = FakeLogs()
    logs.logs[table] = []
    for partition, entry in [*whole("1", {"p.transaction": 2, "p.a": 1}), *whole("2", {"p.transaction": 1})]:
        logs.logs[partition].append(entry)
    logs.readable = logs.ends()
    assert shares_of(logs) == {"s.p.a/0": 1, table: 3, ENDS: 2}


def test_a_connector_may_have_the_prefix_of_another_one_and_more() -> None:
    ends = "s.p.transaction/0"
    logs = FakeLogs(whole("1", {"p.a": 1}))
    logs.logs |= {ends: [], "s.p.q.b/0": []}
    for partition, entry in whole("2", {"q.b": 2}):
        logs.logs[ends if partition == ENDS else partition.replace("s.", "s.p.", 1)].append(entry)
    logs.readable = logs.ends()
    logs.logs["s.p.a/0"] = logs.logs["s.p.a/0"][:0]  # prefix s has none of the other's tables
    logs.logs[ENDS], logs.readable = [], logs.ends()
    assert shares_of(logs) == {"s.p.q.b/0": 2, ends: 1}


def test_a_topic_of_transactions_with_several_partitions_is_refused() -> None:
    logs = FakeLogs(whole("1", {"p.a": 1}))
    logs.logs["s.transaction/1"] = [("", marker("END", "2", {}))]
    logs.readable = logs.ends()
    with pytest.raises(ConfigError, match=r"'s\.transaction' has several partitions"):
        shares_of(logs)


def test_a_log_that_was_replaced_is_read_again() -> None:
    """The topic was created again, or the log truncated: other records have the same offsets."""
    *changes, _ = whole("1", {"p.a": 2})
    logs = FakeLogs(changes)
    planning, offsets = made(logs), dict.fromkeys(logs.logs, 0)
    assert not any(planning.shares(offsets, logs.ends(), 10, {"s.p.a/0": "old"}).values())
    others = FakeLogs(whole("2", {"p.a": 2}))
    logs.logs, logs.readable = others.logs, others.readable
    shares = planning.shares(offsets, logs.ends(), 10, {"s.p.a/0": "new"})
    assert (shares["s.p.a/0"], shares[ENDS]) == (2, 1)


@pytest.mark.parametrize(
    "said",
    [b"{", b'{"id":"7:9"}', b'{"id":1,"data_collection_order":1e999}', b"[" * 100_000, b'{"a":' * 100_000, b"\xff{"],
)
def test_other_json_belongs_to_no_transaction(said: bytes) -> None:
    assert change_order(b'{"transaction":' + said) is None
    assert transaction_end(said) is None


def test_snapshots_and_topics_without_transactions_need_no_end() -> None:
    logs = FakeLogs([("s.p.a/0", ("", change(None, 0)))] * 30)
    assert shares_of(logs, records_max=10) == {"s.p.a/0": 10}


def test_what_is_waited_for_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(source_transactions._log, "warning", lambda event, **fields: said.append((event, fields)))
    *changes, end = whole("1", {"p.a": 3})
    logs = FakeLogs([*changes[:2], end])
    now = [0.0]
    planning = SourceTransactions(logs, lambda: logs.logs, lambda topic: False, lambda: now[0])
    for now[0] in (0.0, 30.0, 61.0, 62.0):
        planning.shares(dict.fromkeys(logs.logs, 0), logs.ends(), 10)
    assert said == [("source.waits_for_transaction", {"waits_for": "1 of 3 changes of transaction 1 in topic s.p.a"})]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"topics": ["s.p.a"]}, r"needs the topic <topic\.prefix>\.transaction among the topics"),
        ({"pattern": r"s\..*", "end": "latest"}, "keep_transactions and end cannot be had together"),
        ({"pattern": r"s\..*", "partition_records_max": 5}, "keep_transactions and partition_records_max"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        OpaqueKafkaTransactionalSpout(**options, keep_transactions=True, bootstrap_servers="nowhere:9092")


def test_a_mirror_says_at_its_line_what_is_wrong() -> None:
    with pytest.raises(Exception, match=r"provide\.transaction\.metadata=true"):
        Pipeline("copy").mirror("s.p.a", into=sqlite("copy.db"), keep_transactions=True, bootstrap_servers="nowhere:1")
