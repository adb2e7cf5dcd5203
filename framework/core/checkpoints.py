"""The checkpoint protocol: decides what the next round does for the states, and evaluates its
result.

A pure state machine. It has no thread, clock or I/O, except ``save``, the port through which its
record becomes durable. It plays the role of Storm's checkpoint spout, but runs in the driver, which
makes the rounds. A round passes through all components, level by level. So its marker reaches each
task after everything that was emitted before the marker, on all of the task's inputs.

Phases, as in ``org.apache.storm.spout.CheckPointState``::

    COMMITTED ── prepare(n+1) ──> PREPARING ── all have ──> COMMITTING ── all have ──> COMMITTED
        ^                             │ any failure             │ any failure
        └───── recover, roll back ────┘                         └ recover, commit again ─> COMMITTED

Invariants:

1. An id belongs to one checkpoint only: it is saved before the first task prepares that checkpoint.
   The number of a layout is likewise saved before the first task uses it.
2. ``COMMITTING`` is saved, with the positions of the spouts, when every task has prepared, and
   before any task commits.
3. Nothing is processed between a failure and the recovery that follows it.
4. Exactly-once: no spout emits before a checkpoint holds the position where its input begins (C35).
   When a checkpoint is prepared, every emitted tree is complete, and no new tree begins before the
   round has passed: the states hold exactly the input up to the positions. After any failure,
   states and spouts go back to the last checkpoint together.
5. Exactly-once: a source record that has failed more often than its spout retries it is given up.
   The checkpoint record says so first, then every spout task learns it, and only then do spouts
   emit. The entry stays until a checkpoint covers the source record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from framework.acking.ack_reports import Roots
from framework.core.checkpoint_messages import CheckpointAction, CheckpointMarker, CheckpointReport
from framework.core.checkpoint_record import CheckpointRecord, Layout, Suspects, other_store
from framework.errors import InvariantViolation
from framework.topology.stateful import StateSize

#: The most records whose failures are counted at a time. If more fail, single records are not the
#: cause.
SUSPECTS_MAX = 1_000


class CheckpointStep(NamedTuple):
    """The requirements for the next round. ``drain``: spouts emit nothing. ``alone``: no other
    round may be under way."""

    marker: CheckpointMarker | None = None
    drain: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """The checkpoints of a run, for display.

    * ``phase``: recovering, COMMITTED, PREPARING or COMMITTING.
    * ``guarantee``: exactly-once or at-least-once, of the state.
    * ``states``: component -> size of its state at the last checkpoint of this run, summed over its
      tasks; without states that do not know their size."""

    txid: int
    phase: str
    guarantee: str
    recoveries: int
    last_failure: str | None
    states: Mapping[str, StateSize] = field(default_factory=dict)


def _given_up(suspects: Mapping[str, Mapping[str, bool]]) -> set[tuple[str, str]]:
    return {(spout, name) for spout, its in suspects.items() for name, given_up in its.items() if given_up}


class Checkpoints:
    """The checkpoints of one run.

    * ``stateful``, ``spouts``: component -> number of tasks.
    * ``layouts``: component -> the layout that it should have.
    * ``exact``: all spouts can go back.
    * ``durable``: the states survive their processes.
    * ``save``: makes a record durable, or raises.
    * ``attempts_max``: the topology fails after this many failures of components, or ends of
      processes, in a row without a checkpoint in between.
    * ``retries``: spout -> how often it retries a record before it gives the record up; failures of
      such records do not count for ``attempts_max``."""

    def __init__(
        self,
        record: CheckpointRecord,
        stateful: Mapping[str, int],
        spouts: Mapping[str, int],
        *,
        exact: bool,
        durable: bool,
        interval_s: float,
        attempts_max: int,
        save: Callable[[CheckpointRecord], None],
        layouts: Mapping[str, Layout] = MappingProxyType({}),
        retries: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._stateful = stateful
        self._all_spouts = spouts
        self._spouts = spouts if exact else {}  # those that a checkpoint waits for
        self._exact = exact
        self._durable = durable
        self._interval_s = interval_s
        self._retries = retries if exact else {}
        #: How many tuples a spout task should emit per round while there are suspects. Every tuple
        #: after the last checkpoint is replayed when a suspect fails, so fewer new ones are started
        #: at a time.
        self.few = max(SUSPECTS_MAX // 4 // max(sum(spouts.values()), 1), 1)
        self._attempts_max = attempts_max
        self._save = save
        self._layouts: dict[str, Layout] = {}
        for each, tasks in stateful.items():
            known = record.assigned.get(each)
            # Otherwise take a number that no namespace of this component can have: the component
            # may have been part of the topology before.
            wanted = layouts.get(each, Layout(0, tasks, 0.0))._replace(number=record.highest + 1)
            self._layouts[each] = wanted._replace(number=known.number) if known and known.fits(wanted) else wanted
        #: Whether the record names these layouts. It must before a task uses their namespaces, so
        #: that no command and no other driver takes the numbers for other layouts.
        self._assigned = self._layouts == record.assigned
        suspects = {spout: its for spout, its in record.suspects.items() if spout in self._retries}
        last = record.last if self._assigned else record.highest
        self.record = replace(record, assigned=dict(self._layouts), last=last, suspects=suspects)
        self._recovering = True
        self._dirty = False
        self._wanted = False
        self._taken_at: float | None = None
        self._failures = 0
        self._refused = 0
        self._ended = 0
        self._blamed: set[int] = set()  # trees whose records are not known yet
        self._new_suspects = 0  # since the last checkpoint
        self._times = 0  # failures of the record that failed last
        self._recoveries = 0
        self._last_failure: str | None = None
        self._sizes: dict[str, StateSize] = {}

    # --- for the driver ---------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the last checkpoint covers all work done."""
        return not self._recovering and not self._dirty and not self._first and self.record.pending is None

    @property
    def exact(self) -> bool:
        return self._exact

    @property
    def recovering(self) -> bool:
        return self._recovering

    @property
    def failed_for_good(self) -> str | None:
        """Why the topology cannot continue, once components have failed too often; else None."""
        if self._ended >= self._attempts_max:
            return (
                f"processes have ended {self._ended} times in a row without a checkpoint in between, the last time: "
                f"{self._last_failure}; a tuple may end its process each time: see what the executors have printed"
            )
        return self._last_failure if self._failures >= self._attempts_max else None

    @property
    def failures(self) -> int:
        """How often in a row components, or the same record, have failed."""
        return max(self._failures, self._times)

    @property
    def refused(self) -> int:
        """How often in a row a state, or its store, did not prepare or commit a checkpoint."""
        return self._refused

    def gives_up(self, spout: str) -> bool:
        """Whether the spout gives up records that fail too often."""
        return spout in self._retries

    @property
    def suspects(self) -> bool:
        """Whether a record has failed since the last checkpoint."""
        return self._new_suspects > 0 or self._times > 0

    def want(self) -> None:
        """Take a checkpoint as soon as there is something new."""
        self._wanted = True

    def due_in(self, now: float) -> float | None:
        """Seconds until a checkpoint step is due; None when none is due until a round does some
        work."""
        if self._recovering or self.record.pending is not None or self._first:
            return 0.0
        if not self._dirty:
            return None
        if self._wanted or self._taken_at is None or self.suspects:
            return 0.0
        return max(self._taken_at + self._interval_s - now, 0.0)

    def plan(self, now: float, *, quiet: bool, waiting: bool = False) -> CheckpointStep:
        """Plan the next round. ``quiet``: every tree is complete, and no round is under way.
        ``waiting``: a bolt has tuples that it has not executed yet. Raises the errors of ``save``.
        """
        if not self._assigned:
            self._put(self.record)
            self._assigned = True
        if self._recovering:
            return CheckpointStep(self._recovery(), drain=True, alone=True)
        if self.record.pending is not None:
            if not self.record.prepared:
                raise InvariantViolation(f"checkpoint {self.record.pending} is neither prepared nor given up")
            return CheckpointStep(self._marker(CheckpointAction.COMMIT, self.record.pending), alone=True)
        if self.due_in(now) != 0.0:
            return CheckpointStep()
        if waiting or (self._exact and not quiet):
            return CheckpointStep(drain=True, alone=True)
        txid = self.record.last + 1
        begun = replace(self.record.abandoned(), pending=txid, pending_layouts=dict(self._layouts), last=txid)
        self._put(begun)
        self._taken_at = now
        self._wanted = False
        return CheckpointStep(self._marker(CheckpointAction.PREPARE, txid), drain=True, alone=True)

    def worked(self) -> None:
        """Note that a round did something."""
        self._dirty = True

    def rested(self) -> None:
        """Note that the topology is idle, so that no remaining tuple can be the one that ends
        processes."""
        self._ended = 0

    def lost(self, why: str, *, ended: bool = False) -> None:
        """Note that a round was lost, so that its effects are unknown. ``ended``: a process with
        tasks has ended in it. If all spouts go back, this class counts such ends, because otherwise
        a tuple that ends its process would be replayed for ever. If spouts stay, they count the
        losses of each tuple themselves."""
        if ended and self._exact and not self._recovering:
            self._ended += 1
        self._recover(why)

    def failed(self, why: str, *, recovers: bool = False, blamed: Collection[int] = ()) -> None:
        """Note that a component died, or that a tree failed where none may.

        * ``recovers``: this happened in the round of a recovery, which is then repeated.
        * ``blamed``: trees whose source records are at fault, of spouts that give up records. The
          recovery asks for these records, and then decides."""
        if recovers or not (blamed or self._recovering):
            self._failures += 1
        self._blamed.update(blamed)
        self._recover(why)

    def end_round(self, marker: CheckpointMarker, reports: Sequence[CheckpointReport]) -> None:
        """Take in the result of a round with a marker. Raises what ``save`` raises, and
        ``CorruptStateError`` when a durable state does not hold the checkpoint that the record
        names."""
        found = {(each.component_id, each.task): each for each in reports}
        missing = [
            f"{component_id}[{task}]"
            for component_id, tasks in {**self._stateful, **self._spouts}.items()
            for task in range(tasks)
            if (component_id, task) not in found
        ]
        if marker.action is CheckpointAction.RECOVER:
            if not missing:
                self._recovered(marker, reports)
        elif missing:
            self._refused += 1
            self._recover(f"checkpoint {marker.txid}: {', '.join(missing[:3])} did not {marker.action.value} it")
        elif (moved := self._moved(marker, reports)) is not None:
            self._recover(moved)
        elif marker.action is CheckpointAction.PREPARE:
            told = {each: [found[(each, task)].position for task in range(n)] for each, n in self._spouts.items()}
            # A spout that the topology no longer has keeps its position: the states hold its
            # records.
            positions = {**(self.record.positions or {}), **told} if self._exact else None
            forgotten = self.record.forgotten if self._exact else self._still_to_begin(found)
            prepared = replace(self.record, prepared=True, pending_positions=positions, forgotten=forgotten)
            self._put(replace(prepared, pending_passed=self._passed(reports)))
            self._dirty = False
        else:
            self._failures = self._refused = self._ended = self._new_suspects = self._times = 0
            self._put(self._committed())
            self._sizes = {}
            for each in reports:
                if each.size is not None:
                    self._sizes[each.component_id] = self._sizes.get(each.component_id, StateSize()) + each.size

    def status(self) -> CheckpointStatus:
        return CheckpointStatus(
            txid=self.record.txid,
            phase="recovering" if self._recovering else self.record.phase,
            guarantee="exactly-once" if self._exact else "at-least-once",
            recoveries=self._recoveries,
            last_failure=self._last_failure,
            states=self._sizes,
        )

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _first(self) -> bool:
        """Whether the first checkpoint is missing: under exactly-once, the first one records where
        the input of every spout begins."""
        known = self.record.positions or {}
        return self._exact and self.record.pending is None and any(each not in known for each in self._spouts)

    def _still_to_begin(self, found: Collection[tuple[str, int]]) -> list[str]:
        """The forgotten spouts that have not restarted in every task. When no checkpoint holds
        positions, such a spout still keeps old positions elsewhere, so each new instance must be
        told to restart. ``found``: the tasks that have reported."""
        return [
            each
            for each in self.record.forgotten
            if each not in self._all_spouts or any((each, n) not in found for n in range(self._all_spouts[each]))
        ]

    def _recover(self, why: str) -> None:
        self._last_failure = why
        if not self._recovering:
            self._recovering = True
            self._recoveries += 1

    def _recovery(self) -> CheckpointMarker:
        """The marker of a recovery. It goes back to the checkpoint that every task has prepared,
        otherwise to the last committed one."""
        aim = self._committed() if self.record.prepared else self.record
        return CheckpointMarker(
            CheckpointAction.RECOVER,
            aim.txid,
            prepared=self.record.prepared,
            upto=self.record.last,
            layouts={each: layout.number for each, layout in self._layouts.items()},
            known=frozenset(aim.layouts),
            positions=aim.positions,
            exact=self._exact,
            forgotten=frozenset(self.record.forgotten),
            failed=Roots.of(self._blamed),
            suspects=self._told(),
            gives_up=bool(self._retries),
            few=self.few,
        )

    def _told(self) -> Mapping[str, Mapping[str, bool]]:
        """The suspects of each spout; True for those that are given up."""
        return {
            spout: {each: times > self._retries[spout] for each, times in its.items()}
            for spout, its in self.record.suspects.items()
            if its and spout in self._retries
        }

    def _passed(self, reports: Sequence[CheckpointReport]) -> Mapping[str, Sequence[str]]:
        """The suspects that lie before the positions of the prepared checkpoint."""
        found: dict[str, list[str]] = {}
        for each in reports:
            its = self.record.suspects.get(each.component_id, {})
            if passed := [name for name in each.passed if name in its]:
                found.setdefault(each.component_id, []).extend(passed)
        return found

    def _counted(self, known: Suspects, reports: Sequence[CheckpointReport]) -> Suspects | None:
        """Count the failures that tasks have reported. Returns the updated suspects, which
        are the records that may cause failures; None when the reports name no record.

        When there are too many suspects, those that failed longest ago are forgotten. If a
        forgotten suspect fails again, its count restarts. Too many new suspects are ignored,
        because then single records are not the cause."""
        suspects = {spout: dict(its) for spout, its in known.items()}
        named = False
        for spout, name in ((each.component_id, name) for each in reports for name in dict.fromkeys(each.failed)):
            its = suspects.setdefault(spout, {})
            if name not in its:
                self._new_suspects += 1
                if self._new_suspects > SUSPECTS_MAX:
                    continue
            its[name] = times = its.pop(name, 0) + 1
            self._times, named = times, True
            while len(its) > SUSPECTS_MAX:
                del its[next(iter(its))]
        return suspects if named else None

    def _moved(self, marker: CheckpointMarker, reports: Sequence[CheckpointReport]) -> str | None:
        """Describe a state that is not at this run's checkpoint, or return None: its store was set
        back or replaced (C27). The recovery that follows checks all states."""
        for each in reports:
            expected = self.record.txid if each.component_id in self.record.layouts else 0
            if marker.action is CheckpointAction.COMMIT:
                expected = marker.txid
            if each.component_id in self._stateful and each.txid not in (None, expected):
                return f"the state of {each.component_id}[{each.task}] holds checkpoint {each.txid}, and not {expected}"
        return None

    def _recovered(self, marker: CheckpointMarker, reports: Sequence[CheckpointReport]) -> None:
        for each in reports:
            expected = marker.txid if each.component_id in marker.known else 0
            if each.txid is None or each.component_id not in self._stateful or each.txid == expected:
                continue
            if self._durable:
                self._save(self.record)  # raises if this driver no longer leads
                raise other_store(each.component_id, each.task, each.txid, expected)
            if self._exact:
                self._begin_anew()
                return
        aim = self._committed() if marker.prepared else self.record.abandoned()
        if self._blamed:
            self._blamed.clear()
            suspects = self._counted(aim.suspects, reports)
            if suspects is None:
                self._failures += 1
                self._last_failure = f"{self._last_failure}; which record is at fault is not known"
            else:
                aim = replace(aim, suspects=suspects)
        if aim != self.record:
            self._put(aim)
        if not _given_up(self._told()) <= _given_up(marker.suspects):
            return  # spouts must know which records are given up before they emit
        self._recovering = False
        self._dirty = False

    def _begin_anew(self) -> None:
        """Start over when states in memory were lost with a process: all states begin empty, and
        the spouts go back to where the run began."""
        self._layouts = {each: layout._replace(number=layout.number + 1) for each, layout in self._layouts.items()}
        base = self.record.base if self.record.base is not None else self.record.pending_positions
        self._put(
            CheckpointRecord(
                positions=base,
                assigned=dict(self._layouts),
                last=self.record.last,
                base=base,
                forgotten=self.record.forgotten,
                suspects=self.record.suspects,
            )
        )
        self._last_failure = "states in memory were lost with their process: the input is read again from its beginning"

    def _committed(self) -> CheckpointRecord:
        """The record after the commit of the pending checkpoint, with ``base`` set if the states do
        not survive."""
        record = self.record.committed()
        return record if record.base is not None or self._durable else replace(record, base=record.positions)

    def _marker(self, action: CheckpointAction, txid: int) -> CheckpointMarker:
        return CheckpointMarker(action, txid, exact=self._exact, durable=self._durable)

    def _put(self, record: CheckpointRecord) -> None:
        self._save(record)
        self.record = record
