"""Runs rounds task by task, two at once, with random trouble; all of it from a seed."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from framework.acking.ack_reports import LedgerPart
from framework.core.checkpoint_messages import CheckpointAction
from framework.core.round_protocol import Addressed, Round, RoundRecord
from framework.errors import RetryableError
from framework.execution.level_walk import delivered
from framework.execution.messages import Piece
from tests.kit.core_parts import Stepped

TROUBLES = (
    "lost output",
    "task dies",
    "round breaks off",
    "round overtakes",
    "late records",
    "doubled ledger",
    "flipped bit",
    "failed tuple",
    "value does not fit",
    "slow bolt",
)
#: How long a bolt takes for a tuple when it is slow: longer than it has in a round.
SLOW_S = 2.0
#: How far time goes on after a round that found nothing to do: less than maps take to rotate.
IDLE_S = 14.0
#: After so many recoveries in a row that did not succeed, the next one is spared: it needs all
#: tasks, and would hardly ever succeed where every record may be late.
RECOVERIES_STRUCK_MAX = 2


@dataclass
class Chances:
    """Decides from a seed when trouble strikes. ``struck``: how often each trouble has struck."""

    seed: int
    troubles: frozenset[str]
    chance: random.Random = field(init=False)
    struck: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def strikes(self, trouble: str, probability: float) -> bool:
        """Whether ``trouble`` strikes now."""
        if trouble not in self.troubles or self.chance.random() >= probability:
            self.struck.setdefault(trouble, 0)  # so that one that never comes shows with 0
            return False
        self.struck[trouble] += 1
        return True


class Walk:
    """A round that is under way, task by task."""

    def __init__(self, round_: Round, rounds: TroubledRounds) -> None:
        self.round = round_
        self._steps = self._tasks(rounds)
        self.at: tuple[int, int] | None = next(self._steps)
        self.done: set[tuple[int, int]] = set()
        self._records: Sequence[RoundRecord] = ()
        self._error: RetryableError | None = None

    def _tasks(self, rounds: TroubledRounds) -> Generator[tuple[int, int], None, list[RoundRecord]]:
        """Yield level and partition before each task: ``walk_round`` with pauses."""
        inboxes: dict[int, list[RoundRecord]] = {}
        for level, width in enumerate(rounds.widths):
            addressed: list[Addressed] = []
            for partition in range(width):
                yield level, partition
                addressed += rounds.run_task(self.round, level, partition, inboxes.get(partition, []))
            inboxes = delivered(addressed)
        return [record for partition in sorted(inboxes) for record in inboxes[partition]]

    def go_on(self) -> None:
        """Run the next task."""
        assert self.at is not None
        self.done.add(self.at)
        try:
            self.at = next(self._steps)
        except StopIteration as end:
            self.at, self._records = None, end.value
        except RetryableError as error:
            self.at, self._error = None, error

    def result(self) -> Sequence[RoundRecord]:
        if self._error is not None:
            raise self._error
        return self._records


class TroubledRounds:
    """Rounds around a task worker, two at once, with trouble."""

    def __init__(self, world: Chances, stepped: Stepped) -> None:
        self.world = world
        self._stepped = stepped
        self._worker = stepped.rounds._worker
        self._worker._overtake_s = 0.0  # whether a round may wait is decided here
        self.widths = stepped.plan.widths
        self._late: dict[tuple[int, int], list[RoundRecord]] = defaultdict(list)
        self._walks: list[Walk] = []
        self._settling = False
        self._recoveries = 0  # in a row, up to now
        #: Whether the last round found nothing to do.
        self.idle = False

    def pass_time(self, seconds: float) -> None:
        """Let time go on by ``seconds``, or by more after a round that found nothing to do: spouts
        wait then, in steps that are shorter than any time-out. Where there is state, they wait no
        longer than until the next checkpoint; at-least-once, it acks what was done."""
        checkpoints = self._stepped.driver._checkpoints
        if self.idle:
            seconds = IDLE_S if checkpoints is None else 5.0 if checkpoints.exact else 2.0
        self._stepped.clock.now += seconds

    def go_on(self) -> None:
        """Run tasks until a round has ended; a second round may be under
        way where the order allows it.
        """
        driver, chance = self._stepped.driver, self.world.chance
        while not self._walks or self._walks[0].at is not None:
            more = len(self._walks) == 1 and not self._settling and not driver._alone()
            if not self._walks or (more and chance.random() < 0.3):
                if self.world.strikes("task dies", 0.02) and self._worker._tasks:
                    del self._worker._tasks[chance.choice(list(self._worker._tasks))]
                self._walks.append(Walk(driver.begin(), self))
                self._recoveries = self._recoveries + 1 if _recovers(self._walks[-1].round) else 0
            first, *others = self._walks
            for later in others:
                if later.at is None or chance.random() < 0.3:
                    continue
                if later.at in first.done or self.world.strikes("round overtakes", 0.1):
                    later.go_on()
            if chance.random() < 0.6:
                first.go_on()
        ended = self._walks.pop(0)
        whole = driver.end(ended.round, ended.result)
        self.idle = driver._spout_wait_s > 0.0
        driver._spout_wait_s = 0.0
        self._settling = bool(self._walks) and (self._settling or not whole)

    def wander(self) -> bool:
        """Run one task of a round whose driver has gone. False when no round is under way."""
        walks = [each for each in self._walks if each.at is not None]
        if walks:
            self.world.chance.choice(walks).go_on()
        return bool(walks)

    def run_task(
        self, round_: Round, level: int, partition: int, records: Sequence[RoundRecord]
    ) -> Sequence[Addressed]:
        world, chance = self.world, self.world.chance
        spared = _recovers(round_) and self._recoveries > RECOVERIES_STRUCK_MAX
        if not spared and world.strikes("round breaks off", 0.006):
            raise RetryableError("broke off")
        late = self._late.pop((level, partition), [])
        if _recovers(round_):
            # Rows end with their round, and no round is under way when a recovery begins.
            late = [each for each in late if not isinstance(each, Piece)]
        arriving = [*records, *late]
        now: list[RoundRecord] = []
        for record in arriving:
            if isinstance(record, LedgerPart):
                record = self._damaged(record)
                if world.strikes("doubled ledger", 0.02):
                    now.append(record)
            if not spared and world.strikes("late records", 0.05):
                self._late[(level, partition)].append(record)
            else:
                now.append(record)
        if "late records" in world.troubles:
            chance.shuffle(now)
        exits = self._worker.run_task(round_, level, partition, now)
        return [] if not spared and world.strikes("lost output", 0.01) else exits

    def _damaged(self, part: LedgerPart) -> LedgerPart:
        if not len(part.values) or not self.world.strikes("flipped bit", 0.01):
            return part
        values = part.values.copy()
        values[self.world.chance.randrange(len(values))] ^= np.uint64(1 << self.world.chance.randrange(64))
        return part._replace(values=values)


def _recovers(round_: Round) -> bool:
    return round_.checkpoint is not None and round_.checkpoint.action is CheckpointAction.RECOVER
