"""Dead letters are replayed exactly once, wherever drivers die and whatever fails (C48)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from framework.commands.dead_letter_request_submission import LetterRequests
from framework.config import Config
from framework.errors import CommitOutcomeUnknown, ConfigError, RetryableError, TopologyError
from framework.inspect.dead_letters import opened_letters
from framework.inspect.explain import explain
from framework.inspect.replay import replay as replay_batch
from framework.inspect.verify import verify
from framework.testing.simulation.virtual_threads import DriverDied
from framework.topology import dead_letter_replay
from framework.topology.dead_letter_replay import LETTERS_PARTITION, LetterRequest
from framework.topology.spouts import DROPPED, REPLAYED
from framework.transactions import MemoryStore
from framework.transactions.documents import committed_txid, read_letter_request, read_plan, write_letter_request
from framework.transactions.undo import undo
from ratchet.streams import dead_letters, parquet
from sinks import DeadLetterTable, MemoryBackend, NonTransactionalMapState, ParquetTable, SqliteBackend, SqliteTable
from tests.kit.lettered import World, drive

pytestmark = pytest.mark.rule("C48")

WORDS = {0: ["a", "raw-1", "bad", "raw-2", "a", "never"], 1: ["raw-1", "b", "bad", "never-2"]}
NEW = {0: ["raw-3", "c"], 1: ["a"]}
LETTERS = {(0, 1): 0, (0, 2): 0, (0, 3): 0, (0, 5): 0, (1, 0): 0, (1, 2): 0, (1, 3): 0}
FIRST = {"a": 2, "b": 1}
COUNTED = {**FIRST, "raw-1": 2, "raw-2": 1, "bad": 2}
MORE = {"a": 3, "c": 1, "raw-3": 1}
LEFT = {(0, 5): 1, (1, 3): 1}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_replay, "BATCH_LETTERS_MAX", 3)


class Replay:
    """A world with letters, new records, and a request for all letters."""

    def __init__(
        self,
        opaque: bool,
        action: str = REPLAYED,
        backend: Callable[[str], Any] = MemoryBackend,
        new: Mapping[int, list[str]] = NEW,
    ) -> None:
        self.world, self.store = World(opaque, WORDS, backend), MemoryStore()
        topology = self.world.topology(mended=False)
        self.goal = self.world.spout.planner({}, None).end()
        drive(topology, self.store, lambda driver: driver.covers(self.goal))
        assert self.world.counted() == FIRST and self.world.left() == LETTERS
        for partition, words in new.items():
            self.world.spout.append(partition, [[word] for word in words])
        self.goal = self.world.spout.planner({}, None).end()
        refs = [(["id", *place], 5) for place in self.world.left()]
        self.counted = {**(COUNTED if action == REPLAYED else FIRST), **(MORE if new else {})}
        self.left = LEFT if action == REPLAYED else {}
        self.request = LetterRequest("r", action, refs)
        write_letter_request(self.store, topology.id, self.request)

    def drive(self, die_at: int | None = None) -> int:
        topology = self.world.topology(mended=True)
        requests = LetterRequests(topology, self.store, Config.of({}), "local")
        return drive(
            topology,
            self.store,
            lambda driver: driver.covers(self.goal) and requests.is_done(self.request),
            die_at=die_at,
            config={"topology.max.spout.pending": 2},
        )

    def check(self) -> None:
        assert self.world.counted() == self.counted and self.world.left() == self.left


@pytest.mark.each_value_once
@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.parametrize("action", [REPLAYED, DROPPED])
def test_letters_end_once(opaque: bool, action: str) -> None:
    replay = Replay(opaque, action)
    replay.drive()
    replay.check()


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_driver_dies_at_any_step(opaque: bool, every: int) -> None:
    steps = Replay(opaque).drive()
    assert steps > 50
    for step in range(1, steps, every):
        replay = Replay(opaque)
        with pytest.raises(DriverDied):
            replay.drive(die_at=step)
        replay.drive()
        replay.check()


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [True, False])
def test_a_second_driver_dies_too(opaque: bool) -> None:
    steps = Replay(opaque).drive()
    for step in range(1, steps, 7):
        for second in range(5, steps, 31):
            replay = Replay(opaque)
            for die_at in (step, second):
                with pytest.raises(DriverDied):
                    replay.drive(die_at=die_at)
                    raise DriverDied  # the second one may have come to the end
            replay.drive()
            replay.check()


class Failing(MemoryBackend):
    """Fails one call that changes it, before or after it is done."""

    calls, fails_at, after = 0, -1, False

    def _fail(self, call: Callable[[], Any]) -> Any:
        Failing.calls += 1
        if Failing.calls != Failing.fails_at:
            return call()
        if Failing.after:
            call()
            raise CommitOutcomeUnknown("the answer is lost")
        raise RetryableError("nothing was done")

    def multi_put(self, *given: Any) -> None:
        self._fail(lambda: super(Failing, self).multi_put(*given))

    def raise_header(self, *given: Any) -> None:
        self._fail(lambda: super(Failing, self).raise_header(*given))

    def sweep(self, *given: Any) -> int:
        return int(self._fail(lambda: super(Failing, self).sweep(*given)))


@pytest.mark.quick_for("5-False-False")
@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_any_write_of_a_state_fails(opaque: bool, after: bool, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "after", after)

    def run(fails_at: int) -> int:
        replay = Replay(opaque, backend=Failing)
        monkeypatch.setattr(Failing, "calls", 0)
        monkeypatch.setattr(Failing, "fails_at", fails_at)
        replay.drive()
        calls = Failing.calls
        monkeypatch.setattr(Failing, "fails_at", -1)
        replay.check()
        return calls

    for number in range(1, run(-1), every):
        run(number)


@pytest.mark.each_value_once
@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.parametrize("action", [REPLAYED, DROPPED])
def test_the_tools_repeat_and_take_back_a_transaction_with_letters(opaque: bool, action: str) -> None:
    replay = Replay(opaque, action, new={})
    replay.drive()
    mended = action == REPLAYED  # else what was dropped would be decoded, and would be missing
    topology = replay.world.topology(mended)
    assert verify(topology, replay.store).right
    last = committed_txid(replay.store, topology.id)
    planned = read_plan(replay.store, topology.id, "spout", last)
    assert planned[1][LETTERS_PARTITION]["letters"]
    again = replay_batch(topology, replay.store, planned=planned)
    assert again.failure is None and again.agrees, again
    word = "raw-1" if action == REPLAYED else "a"
    found = explain(topology, replay.store, state="counts", key=word)
    assert found.agrees and found.held == {"n": replay.counted[word]}
    assert undo(topology, replay.store) == last
    assert replay.world.left() != replay.left
    replay.drive()
    replay.check()
    topology = replay.world.topology(mended)
    assert verify(topology, replay.store).right


def test_letters_are_listed_as_of_the_last_closed_transaction() -> None:
    """The table may hold the next one, which corrected code may repeat with other letters."""
    world, store = World(True, WORDS, MemoryBackend), MemoryStore()
    topology = world.topology(mended=False)
    goal = world.spout.planner({}, None).end()
    drive(topology, store, lambda driver: driver.covers(goal))
    reader = world.spout.letters.letter_reader({}, topology.id, "")
    last = committed_txid(store, topology.id)
    newest = {each.id for each in reader.letters(lambda: last)}
    before = {each.id for each in reader.letters(lambda: last - 1)}
    assert {each[1:] for each in newest} == set(LETTERS) and before < newest


def test_a_command_whose_letters_were_planned_meanwhile_says_so_and_withdraws_its_request() -> None:
    replay = Replay(True)
    topology = replay.world.topology(mended=True)
    requests = LetterRequests(topology, replay.store, Config.of({}), "local")
    reader = replay.world.spout.letters.letter_reader({}, topology.id, "")
    listed = list(reader.letters(partial(committed_txid, replay.store, topology.id)))
    requests._position = requests._planned()
    replay.drive()  # an earlier request ends the same letters
    with pytest.raises(RetryableError, match="call the command again"):
        requests.do(REPLAYED, listed)
    assert read_letter_request(replay.store, topology.id) is None
    replay.check()


def test_letters_that_a_command_cannot_read_are_refused_in_one_line() -> None:
    world = World(True, WORDS, MemoryBackend)
    with (
        pytest.raises(ConfigError, match=r"memory.*, which only its driver can read: give .* a state in a database$"),
        opened_letters(world.topology(mended=False), MemoryStore(), {}),
    ):
        pass


@pytest.mark.parametrize("table", [ParquetTable("rows"), SqliteTable("rows.db", "rows"), SqliteBackend("rows.db", "r")])
def test_a_table_that_cannot_delete_a_letter_is_refused_in_one_line(table: Any) -> None:
    with pytest.raises(
        TopologyError, match=f"^DeadLetterTable writes to a state, not to a {type(table).__name__}: give"
    ):
        DeadLetterTable(table)


def test_letters_in_files_are_refused_where_a_pipeline_names_them() -> None:
    with pytest.raises(
        TopologyError, match=r"dead_letters\(\.\.\.\): parquet\('rows'\): .* database or a Kafka topic only$"
    ):
        dead_letters(parquet("rows"))


def test_letters_in_a_state_without_transaction_ids_are_not_replayed(tmp_path: Path) -> None:
    state = NonTransactionalMapState(SqliteBackend(tmp_path / "x.db", "letters"))
    reader = DeadLetterTable(state).letter_reader({}, "t", "")
    with pytest.raises(ConfigError, match="may add a batch twice"):
        next(reader.letters(lambda: 1))
