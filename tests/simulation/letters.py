"""Simulated topologies whose bad records become dead letters, which commands replay, drop and
withdraw (C48, C51).

The drivers, their store and their sinks are those of the protocol (``world.py``, ``drivers.py``).
Real besides: the planner and the reader of letters, both committers of letters with their readers,
the requests and the steps of a command. A codec, a bolt or a sink refuses some records: some until
they were replayed once or twice, some for ever, and fewer after the topology has another version.
Commands ask for all letters or for some; they die, are withdrawn, and are finished by later ones.

The oracle is a fold over the closed plans that knows no attempt: each record is in the sinks, or
has one letter, or was dropped.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa

from framework import Config, Fields
from framework.commands import dead_letter_request_submission
from framework.commands.dead_letter_request_submission import LetterRequests
from framework.errors import ConfigError, CorruptStateError, RetryableError
from framework.execution.failures import TaskFailure
from framework.execution.messages import AttemptHeader
from framework.execution.ports import PhaseResult, ProcessingJob
from framework.topology import DEAD_LETTER_STREAM, Topology, dead_letter_replay
from framework.topology.dead_letter_replay import LETTERS_PARTITION, LetterRequest
from framework.topology.dead_letters import Letter, LetterReader, ListedLetter
from framework.topology.extra_partition_spout_wrapper import unwrapped, without
from framework.topology.spouts import DROPPED, LEFT_OUT, REFUSED, REPLAYED, on_stream
from framework.transactions.documents import LETTERS as REQUEST
from framework.transactions.documents import committed_txid, read_incarnation
from framework.transactions.spout_dead_letter_reader import letter_reader_of
from sinks import DeadLetterTable
from sinks.kafka.dead_letter_reader import HEADER, TopicLetters
from sinks.kafka.markers import Marker
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.lettered import Lettered, LetteredReader
from tests.simulation.drivers import SimDriver, SimExecutor, build_topology
from tests.simulation.kafka import LETTERS, SimKafka, SimLetters, SimMessage, commit_letters
from tests.simulation.schedule import Coverage, Outcome, run_world
from tests.simulation.world import REASON, TOPOLOGY, Oracle, SimBackend, SimStore, Violation, World

CODEC = "codec"
CANNOT_DECODE = "it cannot be decoded"
NEVER = 99
REQUEST_NODE = f"{TOPOLOGY}/{REQUEST}"
#: The last version of the topology.
VERSION_MAX = 1
#: The letters of a plan, so that a request takes several.
BATCH_LETTERS_MAX = 3
#: How many times faster than in a run the planner's clock goes: steps are faster here, too.
CLOCK_SPEED = 5
#: How often a command looks whether its request is done.
POLL_MS = 40
#: How often it is interrupted there.
INTERRUPTED = 0.03
#: A letter's coordinates.
Id = tuple[str, int, int]

_worlds: WeakValueDictionary[int, LettersWorld] = WeakValueDictionary()


class Kept(NamedTuple):
    """What the reference knows of a letter. ``record``: its number."""

    record: int
    attempts: int
    error: str

    @property
    def value(self) -> tuple[Any, ...]:
        """The columns of its row in a table."""
        return "rows", 5, self.error, None, str(self.record).encode(), "[]", self.attempts


class LettersWorld(World):
    """``keeper``: "table" or "topic". ``version``: of the topology that is started next."""

    oracle: LettersOracle
    kafka: LettersKafka

    def __init__(self, seed: int, coverage: Coverage, *, tells: bool = False) -> None:
        super().__init__(seed, coverage, tells=tells)
        chance, shape = self.chance, self.shape
        self.keeper = chance.choice(("table", "table", "topic"))
        losses = chance.choice((0, 0, 0, 1)) if shape.opaque else 0
        self.shape = replace(
            shape,
            **dict.fromkeys(("moody", "deletes", "renames", "large", "one_step", "moves", "tries"), False),
            **dict.fromkeys(("merges", "joins", "back"), ""),
            **dict.fromkeys(("topic_tasks", "interval_ms"), 0),
            states=chance.choice((1, 1, 2)),
            letters=self.keeper == "topic",
            losses=losses,
            refuses=chance.choice(("", "bolt", "sink")),
        )
        self.names = (*self.shape.names, *[LETTERS] * (self.keeper == "table"))
        self.joined, self.version, self.next_id = True, 0, 0
        self.commands_left, self.a_command_runs = chance.choice((1, 2, 3, 4, 5)), False
        self.requests: dict[str, LetterRequest] = {}  # by id, and how often their letters may have come back
        self.attempts_max: dict[str, int] = {}
        self.drivers: Sequence[SimDriver] = ()
        _worlds[id(self)] = self
        self.store = LettersStore(self)
        self.backends = [SimBackend(self, index, name) for index, name in enumerate(self.names)]
        self.kafka = LettersKafka(self)
        self.oracle = LettersOracle(self)
        rows = {each: [self.record() for _ in range(self.shape.records)] for each in range(self.shape.partitions)}
        options: dict[str, Any] = {"on_data_loss": "skip"} if self.shape.opaque else {}
        kind: Any = OpaqueLettersSpout if self.shape.opaque else LettersSpout
        self.spout = kind(rows, Fields(record=int), self.shape.take, on_bad_record="skip", **options)
        self.spout.world = self
        self.spout.letters = (
            LettersTopic(self) if self.keeper == "topic" else DeadLetterTable(self.state(self.names.index(LETTERS)))
        )

    def __reduce__(self) -> Any:
        return _living, (id(self),)  # a copy of a component is one of this world

    def refuser(self, record: int, replays: int, version: int) -> str:
        """What refuses a record that is read, or replayed for the ``replays``-th time: "codec",
        "bolt" or "sink"; "" if nothing does."""
        mixed = record * 2654435761 >> 7
        until = (1, 2, 3, NEVER)[mixed >> 4 & 3]
        who = (CODEC, self.shape.refuses, self.shape.refuses, "", "")[mixed % 5]
        return who if replays + version < until else ""

    def may_be_left_out(self, record: int, replays: int) -> bool:
        """Whether some version of the topology has refused its value."""
        return any(self.refuser(record, replays, version) not in ("", CODEC) for version in range(self.version + 1))

    def trouble_letters(self, tries: int = 300) -> None:
        """As soon as the next transaction to close has letters, or its commit is open, perhaps let
        the driver die, or the commit fail, or more go wrong."""
        if self.finished or not tries or (tries == 300 and self.chance.random() < 0.3):
            return
        plan = self.store.plan(self.store.currtx()) or {}
        if "letters" not in plan.get(LETTERS_PARTITION, {}) or self.chance.random() < 0.8:
            self.at(3, partial(self.trouble_letters, tries - 1))
            return
        is_open = "its commit is open" if self.is_open(self.store.currtx()) else "it is planned"
        what = self.chance.choice(("crash", "failing commit", "more faults"))
        self.coverage[(f"letters: {what}", is_open)] += 1
        self.faults_left = max(self.faults_left, self.chance.choice((0, 1, 2)))
        if what == "crash":
            for driver in self.drivers:
                if driver.leadership is not None:
                    driver.crash()
        elif what == "failing commit":
            self.failing_commits = 1
        else:
            self.faults_left = max(self.faults_left, 3)

    def deploy(self) -> None:
        """Make the next version of the topology."""
        source, self.spout = self.spout._source, copy(self.spout)
        self.spout._source, self.spout.version = source, self.spout.version + 1
        self.version += 1

    def rows(self, plan: dict[str, Any], committer: str) -> list[Any]:
        return self.oracle.letters_of_last

    def all_read(self) -> bool:
        """Whether every record of the source is committed, or lost."""
        return super().done()

    def done(self) -> bool:
        over = self.all_read() and not self.commands_left and not self.a_command_runs
        return over and not self.is_open(self.store.currtx())

    def end_when_done(self) -> None:
        """End the schedule as soon as all is done, after the last command."""
        if not self.commands_left and not self.finished:
            self.finished = self.done()
            self.at(POLL_MS, self.end_when_done)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Let planners look for requests by virtual time."""
        real = dead_letter_replay.time, dead_letter_replay.BATCH_LETTERS_MAX
        dead_letter_replay.time = self  # type: ignore[assignment]
        dead_letter_replay.BATCH_LETTERS_MAX = BATCH_LETTERS_MAX
        try:
            yield
        finally:
            dead_letter_replay.time, dead_letter_replay.BATCH_LETTERS_MAX = real

    def monotonic(self) -> float:
        return self.now * CLOCK_SPEED / 1_000


def _living(number: int) -> LettersWorld:
    return _worlds[number]


# --- the parts of the topology --------------------------------------------------------------------


class _LettersSpout(Lettered):
    world: LettersWorld
    version = 0

    def reader(self, conf: Mapping[str, Any], context: Any) -> LetteredReader:
        return LetteredReader(partial(_decoded, self.world, self.version))


class LettersSpout(_LettersSpout, MemoryTransactionalSpout):
    pass


class OpaqueLettersSpout(_LettersSpout, OpaqueMemoryTransactionalSpout):
    pass


def _decoded(world: LettersWorld, version: int, letter: Letter) -> pa.RecordBatch | str:
    record = int(letter.value or b"")
    if world.refuser(record, letter.attempts + bool(letter.ref), version) == CODEC:
        return CANNOT_DECODE
    return pa.record_batch({"record": [record]})


class LettersTopic(SimLetters):
    """The committer of letters to a topic, and its real reader."""

    def __init__(self, world: LettersWorld) -> None:
        super().__init__(world.kafka)
        self._world = world

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kafka": None}

    def letter_reader(self, conf: Mapping[str, Any], topology_id: str, incarnation: str) -> LetterReader:
        return SimTopicLetters(self._world, incarnation)


class SimTopicLetters(TopicLetters):
    """Reads the simulated topic."""

    def __init__(self, world: LettersWorld, incarnation: str) -> None:
        super().__init__(lambda: None, "letters", TOPOLOGY, incarnation)  # type: ignore[arg-type, return-value]
        self._log = world.kafka.log

    def _messages(self) -> Iterator[Any]:
        yield from self._log

    def _at(self, number: int, offsets: set[int]) -> Iterator[Any]:
        yield from (each for each in self._log if each.offset() in offsets)


class LettersKafka(SimKafka):
    """A broker that keeps the topic of letters."""

    def __init__(self, world: LettersWorld) -> None:
        super().__init__(world)
        self.log: list[SimMessage] = []

    def commit(self, transactional_id: str, epoch: int, marker: Marker, messages: list[SimMessage]) -> bool:
        if not super().commit(transactional_id, epoch, marker, messages):
            return False
        for offset, each in enumerate(messages, len(self.log)):
            self.log.append(replace(each, _offset=offset))
        return True

    def shown(self, message: SimMessage) -> Any:
        added = {name.removeprefix(HEADER): (value or b"").decode() for name, value in message.headers()}
        place = added["topic_id"], int(added["partition"]), int(added["offset"])
        if "settled" in added:
            return place, added["settled"], 0, ""
        return place, (message.value() or b"").decode(), int(added["attempts"]), added["error"]


class LettersExecutor(SimExecutor):
    """Processes batches by the real reader of letters."""

    world: LettersWorld
    keeps_letters = True

    def process(self, job: ProcessingJob) -> PhaseResult:
        world, header = self.world, job.header
        if header in self.dead:
            return super().process(job)
        spout = self.topology.spout.instance
        version = unwrapped(spout).version
        replayed = job.ranges.get(LETTERS_PARTITION, {}).get("rows", ())
        replays = {int(each.value): each.attempts + 1 for each in replayed if each}
        records: list[int] = []
        letters: list[dict[str, Any]] = []
        try:
            ranges = {**job.ranges, **dict(self.came(without(job.ranges, LETTERS_PARTITION)))}
            for stream, batch in map(on_stream, spout.reader({}, None).read_all(header.attempt("spout", 0), ranges)):
                if stream == DEAD_LETTER_STREAM:
                    letters += batch.to_pylist()
                else:
                    records += batch.column("record").to_pylist()
        except RetryableError as error:
            return PhaseResult(TaskFailure.of(error, "spout", 0))
        if world.shape.room and len(records) > world.shape.room:
            return self.too_large(records)
        refused = [each for each in records if world.refuser(each, replays.get(each, 0), version)]
        if refused and world.shape.refuses == "bolt":
            return self.refused_by_bolt(refused[0])
        result: list[Any] = [
            [world.operations(sink, each, header.attempt_id) for each in records] for sink in range(world.shape.states)
        ]
        world.oracle.versions[(header.epoch, header.txid, header.attempt_id)] = version
        return self.processed(header, [*result, letters], refused)

    def _letters_task(self, header: AttemptHeader, letters: Any, life: int) -> Any:
        attempt = header.attempt(LETTERS, 0)
        try:
            if self.world.keeper == "topic":
                yield partial(self.world.kafka.write_letters, attempt, letters, life)
            else:
                committer = DeadLetterTable(self.world.state(self.world.names.index(LETTERS)))
                committer.bind(LETTERS, [], 1)
                yield partial(commit_letters, committer, attempt, letters)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            return TaskFailure.of(error, LETTERS, 0)
        return None


class LettersDriver(SimDriver):
    executor_type = LettersExecutor


class LettersStore(SimStore):
    """Takes the requests of commands, which need no leadership."""

    def apply(self, changes: Any) -> None:
        if any(each.path != REQUEST_NODE for each in changes):
            super().apply(changes)
        for each in changes:
            for nodes in (self.nodes, self.written):
                if hasattr(each, "data"):
                    nodes[each.path] = each.data
                else:
                    nodes.pop(each.path, None)


# --- the oracle -----------------------------------------------------------------------------------


@dataclass
class LettersOracle(Oracle):
    """``letters``: those of closed transactions. ``requested``: the request of which letters were
    planned last, and the position of its first letter. ``ended``: how each record has ended: in
    the sinks, or dropped. ``letters_of_last``: as the topic has them of the last transaction."""

    world: LettersWorld
    letters: dict[Id, Kept] = field(default_factory=dict)
    versions: dict[tuple[int, int, int], int] = field(default_factory=dict)
    requested: tuple[str, int] = ("", 0)
    read: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    letters_of_last: list[Any] = field(default_factory=list)

    def positions_forgotten(self) -> None:
        super().positions_forgotten()
        self.positions.pop(LETTERS_PARTITION, None)
        self.requested = ("", 0)

    def _check_refused(self, txid: int, plan: dict[str, Any]) -> None:
        pass  # ``_apply`` does

    def _apply(self, attempt: tuple[int, int, int], plan: dict[str, Any], result: list[Any]) -> None:
        world, version, self.letters_of_last = self.world, self.versions[attempt], []
        taken: list[int] = []
        for partition, meta in without(plan, LETTERS_PARTITION).items():
            for offset, (record,) in world.in_range(partition, meta):
                self.read[record] += 1
                error = self._refused(record, 0, (offset, meta), version)
                if error is None:
                    taken.append(record)
                else:
                    self._keep(("id", int(partition), offset), Kept(record, 0, error))
        if LETTERS_PARTITION in plan:
            taken += self._replay(plan[LETTERS_PARTITION], version)
        self.ended.update(taken)
        for sink, name in enumerate(world.shape.names):
            wanted = [world.operations(sink, each, 0) for each in taken]
            if Counter(wanted) != Counter(result[sink]):
                raise Violation(f"C48: {attempt} gives {name} {result[sink]}, and not {wanted}")
            for key, weight in wanted:
                self.model[(sink, key)] = (self.model.get((sink, key)) or 0) + (weight or 0)
        self._check_ends()

    def _refused(self, record: int, replays: int, where: tuple[int, Mapping[str, Any]], version: int) -> str | None:
        """Why a record of a closed range is refused; None if it is taken. ``where``: its position,
        and the entry of the plan."""
        who, (position, meta) = self.world.refuser(record, replays, version), where
        if position in meta.get(LEFT_OUT, ()):
            error: str = meta.get(REFUSED, {}).get(str(position), "")
            if not self.world.may_be_left_out(record, replays) or REASON not in error:
                raise Violation(f"C51: {record} is left out of {meta}")
            return error
        if who not in ("", CODEC):
            raise Violation(f"C51: {record} is not left out of {meta}")
        return CANNOT_DECODE if who else None

    def _keep(self, place: Id, letter: Kept) -> None:
        self.letters[place] = letter
        self.letters_of_last.append((place, str(letter.record), letter.attempts, letter.error))

    def _replay(self, entry: Mapping[str, Any], version: int) -> list[int]:
        """Apply the letters of a plan. Returns the records that are taken."""
        first, end = int(entry["first"]), int(entry["next"])
        request = self.world.requests.get(entry["request"])
        if entry["request"] != self.requested[0] and first < end:
            self.requested = entry["request"], first
        if request is None or (first < end and self.requested[1] != entry["begin"]):
            raise Violation(f"C48: {entry} belongs to no request, or begins elsewhere than {self.requested}")
        if first == end:
            return []
        begin = int(entry["begin"])
        wanted = [ref for ref, _ in request.letters[first - begin : end - begin]]
        if wanted != entry["letters"] or entry["action"] != request.action:
            raise Violation(f"C48: {entry} replays other letters than {wanted}, which are the next of {request}")
        taken: list[int] = []
        for position, ref in enumerate(wanted, first):
            place = ref[0], ref[1], ref[2]
            letter = self.letters.get(place)
            if letter is None:
                self._count("ended meanwhile")
                continue
            if letter.attempts >= self.world.attempts_max[request.id]:
                raise Violation(f"C48: {letter} came back too often for {request}")
            error = None
            if request.action == REPLAYED:
                error = self._refused(letter.record, letter.attempts + 1, (position, entry), version)
            if error is not None:
                self._count("came back")
                self._keep(place, letter._replace(attempts=letter.attempts + 1, error=error))
                continue
            self._count(request.action)
            del self.letters[place]
            self.letters_of_last.append((place, request.action, 0, ""))
            if request.action == DROPPED:
                self.ended[letter.record] += 1
            else:
                taken.append(letter.record)
        return taken

    def _count(self, how: str) -> None:
        self.world.coverage[(how, "letter")] += 1

    def _check_ends(self) -> None:
        """Each record that was read is in the sinks, or has a letter, or was dropped (C48)."""
        if self.reset_epoch:
            return  # then records are read again
        kept = Counter(each.record for each in self.letters.values())
        if self.ended + kept != self.read:
            raise Violation(f"C48: {self.read} were read; {self.ended} have ended, {kept} have letters")

    def value_before(self, sink: int, key: tuple[Any, ...]) -> Any:
        if self.world.names[sink] != LETTERS:
            return super().value_before(sink, key)
        letter = self.letters.get((key[0], key[1], key[2]))
        return letter.value if letter is not None else None

    def _compare_sink(self, sink: int, backend: SimBackend) -> None:
        if self.world.names[sink] != LETTERS:
            super()._compare_sink(sink, backend)
            return
        found = {key: row.value for key, row in backend.rows().items() if row.value is not None}
        wanted = {place: letter.value for place, letter in self.letters.items()}
        if found != wanted:
            raise Violation(f"C48: after txid {self.committed} the table has the letters {found}, not {wanted}")

    def compare_listed(self) -> None:
        """Check what a command lists when all is over."""
        letters = whole_letters(self.world)
        listed = {each.id: (int(each.value or b""), each.attempts, each.error) for each in letters}
        if listed != self.letters:
            raise Violation(f"C48: at the end {listed} are listed, not {self.letters}")


def listed_letters(world: LettersWorld) -> list[ListedLetter]:
    """The letters, by the real reader of the keeper."""
    letters = _reader(world).letters(partial(committed_txid, world.store, TOPOLOGY))
    return sorted(letters, key=lambda each: each.id)


def whole_letters(world: LettersWorld) -> list[Letter]:
    """The same letters with their content."""
    refs = [each.ref for each in listed_letters(world)]
    found = _reader(world).fetched(refs, committed_txid(world.store, TOPOLOGY) + 1)
    return [each for each in found if each is not None]


def _reader(world: LettersWorld) -> LetterReader:
    reader = letter_reader_of(build_topology(world, whole=True), {}, read_incarnation(world.store, TOPOLOGY))
    assert reader is not None
    return reader


# --- commands -------------------------------------------------------------------------------------


class SimRequests(LetterRequests):
    """The requests of one command; never runs the topology itself."""

    def __init__(self, world: LettersWorld, topology: Topology) -> None:
        super().__init__(topology, world.store, Config.of({}), "local")
        self._world = world

    def _new_id(self) -> str:
        return f"request {len(self._world.requests) + 1}"

    def _run(self, request: LetterRequest) -> None:
        pass

    def _pause(self) -> None:
        raise AssertionError("a simulated command pauses by itself")


class Command:
    """One run of ``ratchet dead-letters replay`` or ``drop``, or with ``--cancel``."""

    FAULTS = ("dies before", "dies after", "late")

    def __init__(self, world: LettersWorld, kind: str) -> None:
        self.world, self.kind = world, kind
        self.requests = SimRequests(world, build_topology(world, whole=True))
        self.attempts_max = NEVER
        self.steps = self._steps()

    def start(self) -> None:
        world = self.world
        if world.finished:
            return
        if not world.oracle.letters and not world.all_read() and world.chance.random() < 0.95:
            world.at(POLL_MS, self.start)  # there is little to do yet
            return
        self.now()

    def now(self) -> None:
        world = self.world
        if world.a_command_runs:  # it is refused, and called again
            world.at(POLL_MS, self.now)
            return
        world.a_command_runs = True
        world.note(f"command: {self.kind}")
        self._move(None)

    def _steps(self) -> Iterator[Any]:
        world, chance = self.world, self.world.chance
        if self.kind == "cancel":
            yield self.requests.give_up
            return
        yield from self.requests.finishing()
        letters: list[ListedLetter] = []
        yield lambda: letters.extend(listed_letters(world))
        attempts_max = chance.choice((1, 2, 3))
        action = DROPPED if self.kind == "drop" else REPLAYED
        share = chance.choice((0.4, 1.0, 1.0))
        if action == REPLAYED:
            self.attempts_max = attempts_max
            letters = dead_letter_request_submission.to_replay(letters, attempts_max)
        meant = [each for each in letters if chance.random() < share]
        chance.shuffle(meant)
        yield from self.requests.doing(action, meant)

    def _move(self, answer: Any) -> None:
        """Perform the next step, and the others later."""
        world = self.world
        if world.finished:
            return
        try:
            step = self.steps.send(answer)  # type: ignore[attr-defined]
        except StopIteration:
            self._end("has ended")
            return
        except RetryableError as error:
            self._end(f"fails: {error}")
            return
        if step == self.requests._pause:
            if world.chance.random() < INTERRUPTED:
                self._end("is interrupted")
                self._change_mind()
            else:
                world.at(POLL_MS, partial(self._move, None))
            return
        fault = world.fault("command", self.FAULTS, 0.1)
        if fault == "late":
            world.at(int(world.chance.random() * 1_500), partial(self._perform, step, None))
        else:
            self._perform(step, fault)

    def _perform(self, step: Any, fault: str | None) -> None:
        world = self.world
        if world.finished:
            return
        if fault == "dies before":
            self._end("dies")
            return
        try:
            answer = step()
        except CorruptStateError as error:
            if world.corrupted not in str(error):
                raise Violation(f"a command fails: {error!r}") from error
            world.finished = True  # the corrupt node was refused and named, as it must be
            return
        except (ConfigError, RetryableError) as error:
            self._end(f"fails: {error}")
            return
        self._note_request(step)
        if fault == "dies after":
            self._end("dies")
        else:
            world.soon(partial(self._move, answer))

    def _change_mind(self) -> None:
        """Withdraw the request soon, mostly, and ask again."""
        world = self.world
        for kind in ("cancel", "replay") if world.chance.random() < 0.7 else ("replay",):
            world.coverage[(f"command: {kind}", "after an interrupted one")] += 1
            world.commands_left += 1
            world.soon(Command(world, kind).start)

    def _note_request(self, step: Any) -> None:
        """Tell the world of a request that this command has written."""
        world = self.world
        for each in step.args if isinstance(step, partial) else ():
            if isinstance(each, LetterRequest) and each.id not in world.requests:
                world.requests[each.id], world.attempts_max[each.id] = each, self.attempts_max
                world.trouble_letters()

    def _end(self, how: str) -> None:
        world = self.world
        world.note(f"command: {self.kind} {how}")
        self.steps.close()  # type: ignore[attr-defined]
        world.a_command_runs = False
        world.commands_left -= 1
        world.at(1, world.end_when_done)


# --- a schedule -----------------------------------------------------------------------------------


def run_letters_schedule(seed: int, coverage: Coverage | None = None, *, keep_trace: bool = False) -> Outcome:
    """Run the schedule of a seed, as ``run_schedule`` does."""
    world = LettersWorld(seed, Counter() if coverage is None else coverage, tells=keep_trace)
    world.note(f"{world.shape}, letters in a {world.keeper}")
    with world.clock():
        return run_world(world, LettersDriver, _plan, _check_end)


def _plan(world: Any, drivers: Sequence[SimDriver]) -> None:
    chance: random.Random = world.chance
    world.drivers = drivers
    at = 0
    for _ in range(world.commands_left):
        at += int(chance.random() * 1_200)
        kind = chance.choice(("replay",) * 5 + ("drop", "cancel", "cancel"))
        world.coverage[(f"command: {kind}", "any time")] += 1
        world.at(at, Command(world, kind).start)
    if world.keeper == "table" and chance.random() < 0.3:
        world.commands_left += 1
        world.at(int(chance.random() * 600), partial(_ask_before_the_close, world, Command(world, "replay")))
    if world.shape.opaque and world.keeper == "table" and chance.random() < 0.3:  # a topic cannot undo
        world.coverage[("another version", "any time")] += 1
        world.at(int(chance.random() * 1_500), partial(_deploy, world, drivers))


def _ask_before_the_close(world: LettersWorld, command: Command, tries: int = 300) -> None:
    """As soon as the table is done with letters of a transaction that is not closed, let the driver
    die, and ask for a replay. Mostly the topology gets another version meanwhile."""
    backend = world.backends[world.names.index(LETTERS)]
    header = backend.header()
    done = header is not None and header.done == world.store.currtx()
    if tries and not (done and any(row.stamp.txid == header.done for row in backend.rows().values())):  # type: ignore[union-attr]
        world.at(3, partial(_ask_before_the_close, world, command, tries - 1))
        return
    world.coverage[("command: replay", "before the close" if tries else "any time")] += 1
    for driver in world.drivers:
        driver.crash()
    if world.shape.opaque and world.version < VERSION_MAX and world.chance.random() < 0.7:
        _deploy(world, world.drivers)
    command.now()


def _deploy(world: LettersWorld, drivers: Sequence[SimDriver]) -> None:
    if world.version == VERSION_MAX:
        return
    world.note("the topology gets another version")
    world.deploy()
    for driver in drivers:
        driver.next_topology = build_topology(world, whole=True)
        driver.request_stop() if driver.leads and world.chance.random() < 0.5 else driver.crash()


def _check_end(world: Any) -> None:
    world.oracle.compare_listed()
