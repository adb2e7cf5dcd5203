"""A schedule: the division of the sample into batches, and the faults. Both follow from a seed.

A fault names a transaction and a moment in it. It strikes once, the first time that an attempt at
this transaction reaches the moment; a second fault of the same kind strikes the next attempt. So
any fault can be removed from a schedule without changing the meaning of the others, which shrinking
needs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kinds of faults in words, the plainest first. Workers are the processes of tasks."""

    PROCESSING_LOST = "the worker dies when it has processed the batch"
    ANSWER_LOST = "the answer of the commit's tasks is lost"
    WORKER_RESTARTS = "the worker is restarted"
    OTHER_PROCESS = "another Python process takes the batch"
    TASK_TWICE = "a commit task runs twice"
    TASK_LATE = "a commit task hangs and is given up; it runs late"
    COMMIT_STOPS = "a worker dies in the middle of the commit"
    DRIVER_DIES_PROCESSED = "the driver dies before the commit begins"
    DRIVER_DIES_OPENED = "the driver dies when the commit is open, before its tasks run"
    DRIVER_DIES_WRITTEN = "the driver dies when the commit's tasks have run"
    DRIVER_DIES_DONE = "the driver dies when the sinks are done, before the transaction is closed"
    OTHER_ORDER = "the tasks run in another order"
    OTHER_SIZE = "from here on the source gives batches of another size"


#: How often each kind is drawn, relative to the others.
_WEIGHTS = {
    Kind.PROCESSING_LOST: 4,
    Kind.ANSWER_LOST: 4,
    Kind.TASK_TWICE: 3,
    Kind.TASK_LATE: 3,
    Kind.WORKER_RESTARTS: 3,
    Kind.OTHER_PROCESS: 3,
}
FAULTS_MAX = 4
BATCHES_MAX = 5
PENDING_MAX = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. ``pick``: selects the task, the later moment, or the size, depending on the kind."""

    kind: Kind
    txid: int
    pick: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule.

    * ``kept``: the records of the sample that take part, as (partition, index).
    * ``take``: records of each partition in a batch.
    * ``pending``: transactions under way concurrently.
    * ``collapsed``: all tasks of a commit run as one, as for small batches."""

    seed: int
    kept: tuple[tuple[str, int], ...]
    take: int
    pending: int = 1
    collapsed: bool = True
    faults: tuple[Fault, ...] = ()


def drawn(seed: int, places: tuple[tuple[str, int], ...]) -> Schedule:
    """The schedule of a seed, over the whole sample."""
    chance = random.Random(f"schedule {seed}")
    longest = max(place for _, place in places) + 1
    batches = chance.randint(1, BATCHES_MAX)
    kinds = list(Kind)
    weights = [_WEIGHTS.get(kind, 2) for kind in kinds]
    faults = tuple(
        Fault(kind, chance.randint(1, batches), chance.randrange(100))
        for kind in chance.choices(kinds, weights, k=chance.randint(1, FAULTS_MAX))
    )
    return Schedule(
        seed=seed,
        kept=places,
        take=max(-(-longest // batches), 1),
        pending=chance.choice((1, 1, 2, PENDING_MAX)),
        collapsed=chance.random() < 0.5,
        faults=faults,
    )
