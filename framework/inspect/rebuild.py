"""Rebuilds a state from the source, as a copy next to the state that the topology continues to
write, and replaces the state by the copy.

The part of the topology on which the state depends is recomputed (``recompute``). The rows of the
copy are in the store of the state, under the txids of the topology's own transactions. So when the
copy has caught up, one atomic step can exchange the contents of the copy and the state, and the
topology continues. A commit that is open at that moment is treated as a dead attempt: its fence is
closed, and the driver repeats the attempt over the new rows.

Each batch is marked in the coordination store before it is committed, so a killed rebuild continues
when it is repeated.

States of committers above, such as the watermark of a window, are recomputed in the same way and
compared, and never exchanged: the new rows fit only if these states agree.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy as copied
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from framework.coordination.election import ELECTION_TIMEOUT_S, identity_of_process
from framework.coordination.store import CoordinationStore, Leadership
from framework.coordination.transactional_state import TransactionalState
from framework.document_type_checks import check_fields
from framework.errors import ConfigError, CorruptStateError, InvariantViolation, RetryableError, StaleWriterError
from framework.inspect.comparison import compare
from framework.inspect.full_recomputation import RECORDS_PER_BATCH, Batch, Recomputation
from framework.inspect.sandbox import shadow_of, with_what_it_needs
from framework.inspect.state_by_name import state_named
from framework.inspect.verify import StateReport, compare_following
from framework.local_paths import held_temporary_folder
from framework.topology import FORMER, REBUILT, Bolt, Component, FencedState, Header, OpenCommit, Topology, ValueType
from framework.topology.fencing import ROLLED_BACK
from framework.topology.inspectable import RebuildableState, TimedBolt, inspectable, rebuildable
from framework.topology.spouts import LEFT_OUT, LEFT_OUT_FROM
from framework.transactions.code_version import lineage_of
from framework.transactions.documents import (
    committed_or_refused,
    committed_txid,
    form_of,
    read_incarnation,
    read_joined,
    read_origin,
    read_transaction,
    read_undone,
)
from framework.transactions.history_archive import HistoryTarget
from framework.transactions.plans import Plan, plan_digest, plan_of, stored_plan

#: How long a rebuild that has caught up tries to take over from a topology that moves on.
TAKE_OVER_TIMEOUT_S = 120.0
#: The epochs of rebuilds begin here and rise. They are below those of all drivers: a driver that
#: replays the last transaction, because ZooKeeper has lost its close, writes its rows again.
EPOCH_OF_REBUILDS = -1_000_000_000
#: Pause before it looks again whether the topology holds still.
PAUSE_S = 0.001
#: How often it reads up to where the topology stands before it compares.
ROUNDS_MAX = 20

MARK, TAKING_OVER, TAKEN_OVER = "mark", "taking_over", "taken_over"


@dataclass(frozen=True, slots=True)
class RebuildProgress:
    """``txid``: up to where the copy has come; ``committed_txid``: where the topology was when this
    stretch began. ``records``: read so far by this process, in ``seconds``."""

    txid: int
    committed_txid: int
    records: int
    seconds: float


@dataclass(slots=True)
class RebuildReport:
    """``txid``: the transaction as of which the copy was compared, or took over. ``resumed_at``:
    the transaction that an earlier rebuild had reached; 0 if there was none. ``difference``: None
    if the copy had already taken over. ``moved``: keys that were not compared, because the topology
    changed them meanwhile. ``above``: the states that the new rows depend on, compared with their
    copies. ``below``: the committers that hold what this state has sent them, which an exchange
    does not change. ``former``: the place of the former rows; None as long as nothing was
    exchanged. ``has_other_code``: whether other code than this made the topology's last
    transaction, and would continue with the new rows."""

    topology_id: str
    location: str
    txid: int
    _: KW_ONLY
    resumed_at: int
    difference: StateReport | None = None
    moved: int = 0
    above: list[StateReport] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    former: str | None = None
    has_other_code: bool = False
    records: int = 0
    batches: int = 0
    seconds: float = 0.0


def rebuild(
    topology: Topology,
    store: CoordinationStore,
    conf: Mapping[str, Any] | None = None,
    *,
    state: str,
    take_over: bool,
    told: Callable[[RebuildProgress], None] = lambda progress: None,
    timeout_s: float = ELECTION_TIMEOUT_S,
    archive: HistoryTarget | None = None,
) -> RebuildReport:
    """Bring the copy up to where the topology stands, and compare it with the state; then, with
    ``take_over``, exchange the two. ``state``: the id of its component, or its location, or the end
    of that. ``archive``: the table of records, where the topology has one. A driver may run
    meanwhile.

    Raises ``ConfigError`` for a state that cannot be rebuilt, when a state above it differs from
    its copy and ``take_over`` is set, and when another rebuild of one of them runs for longer than
    ``timeout_s``; ``Unverifiable`` when source or records do not reach back; ``RetryableError``
    when something does not answer, or the topology moves on too fast: repeated, it goes on where it
    ended."""
    component = _rebuildable(topology, *state_named(topology, state))
    (kept,) = component.states
    for each in (kept, *(state for above in _above(topology, component) for state in above.states)):
        _check_owned(topology.id, each, read_incarnation(store, topology.id))
    made_by = _maker_of(topology, store, conf or {})
    with _rebuilds_of(topology, component, store, timeout_s) as documents:
        if documents.finish(kept, made_by) and take_over:
            return documents.report(kept)
        rebuildable(kept).check_exchange(topology.id)
        with held_temporary_folder("ratchet-rebuild-") as folder:
            work = _Rebuild(
                topology,
                store,
                conf or {},
                documents,
                component=component,
                folder=folder,
                made_by=made_by,
                told=told,
                archive=archive,
            )
            return work.run(take_over=take_over)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The last exchange of a component's state: as of which transaction, when (UTC), how many keys
    had differed, and which code had made the new rows."""

    component_id: str
    txid: int
    at: str
    differed: int
    made_by: Mapping[str, str]


def read_exchanges(store: CoordinationStore, topology_id: str) -> list[Exchange]:
    """The last exchange of each state, by component. No leadership is needed. Raises
    ``CorruptStateError``."""
    found = []
    for component_id in store.children(f"{topology_id}/rebuild"):
        path = f"{topology_id}/rebuild/{component_id}"
        document = TransactionalState(store, path).get_data(TAKEN_OVER)
        try:
            if document is not None:
                shown = {name: document[name] for name in ("txid", "at", "differed", "made_by")}
                check_fields(Exchange, shown)
                found.append(Exchange(component_id, **shown))
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptStateError(f"{path}/{TAKEN_OVER}: not what rebuild writes; delete the node") from error
    return found


def clean(topology: Topology, store: CoordinationStore, state: str, timeout_s: float = ELECTION_TIMEOUT_S) -> list[str]:
    """Remove the rows from before the last rebuild, and what an unfinished one has made. Returns
    where they were. Raises ``ConfigError`` as ``rebuild``."""
    component = _rebuildable(topology, *state_named(topology, state))
    with _rebuilds_of(topology, component, store, timeout_s) as documents:
        documents.forget()
        places = [_beside(component.states[0], place) for place in (REBUILT, FORMER)]
        places += _copies_above(topology, component)
        return [each.location for each in places if each.remove(topology.id)]


class _Rebuild:
    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        conf: Mapping[str, Any],
        documents: _Documents,
        *,
        component: Component,
        folder: Path,
        made_by: Mapping[str, str],
        told: Callable[[RebuildProgress], None],
        archive: HistoryTarget | None,
    ) -> None:
        self._topology, self._store, self._documents = topology, store, documents
        self._component, self._made_by, self._told = component, made_by, told
        (state,) = component.states
        self._state = rebuildable(state)
        part = with_what_it_needs(topology, component)
        shadow, left_out = shadow_of(part, folder, _beside_itself, joined=read_joined(store, topology.id))
        for each in left_out:
            raise ConfigError(f"{self._state.location} cannot be rebuilt: {each}")
        (self._rebuilt,) = shadow[component.id].states
        self._above = [
            (state, copy)
            for each in _above(topology, component)
            for state, copy in zip(each.states, shadow[each.id].states, strict=True)
        ]
        self._copy = _Copy(
            topology,
            store,
            conf,
            shadow=shadow,
            rebuilt=self._rebuilt,
            documents=documents,
            made_by=made_by,
            seen=self._seen,
            archive=archive,
        )
        self._target, self._began_s = 0, time.monotonic()

    def run(self, *, take_over: bool) -> RebuildReport:
        self._target = committed_or_refused(self._store, self._topology.id)
        with self._copy as copy:
            for _ in range(ROUNDS_MAX):
                copy.advance(self._target)
                self._target = committed_txid(self._store, self._topology.id)
                if self._target <= copy.txid:
                    break
            report = RebuildReport(self._topology.id, self._state.location, copy.txid, resumed_at=copy.resumed_at)
            report.difference, report.moved = self._compared()
            report.above = compare_following(
                copy, [(inspectable(state, purpose="be compared"), its) for state, its in self._above]
            )
            report.below = [each.id for each in _below(self._topology, self._component)]
            report.has_other_code = self._was_made_by_other_code()
            if take_over:
                self._check_above(report)
                self._take_over(report)
            report.records, report.batches = copy.records, copy.batches
        if take_over:
            for each in _copies_above(self._topology, self._component):
                each.remove(self._topology.id)
        report.seconds = time.monotonic() - self._began_s
        return report

    def _check_above(self, report: RebuildReport) -> None:
        """Refuse an exchange for rows that the present states above would not have given."""
        for (state, _), compared in zip(self._above, report.above, strict=True):
            if compared.difference_count:
                (above,) = (each for each in _above(self._topology, self._component) if state in each.states)
                raise ConfigError(
                    f"{self._state.location} was not exchanged: bolt {self._component.id!r} gets rows from {above.id!r}, and "
                    f"{compared.difference_count} keys of {state.location} differ from the rebuilt ones, such as "
                    f"{compared.differences[0]}; {_how_to_mend(above)}"
                )

    def _seen(self, batch: Batch) -> None:
        seconds = time.monotonic() - self._began_s
        self._told(RebuildProgress(batch.number, self._target, self._copy.records, seconds))

    def _compared(self) -> tuple[StateReport, int]:
        """Compare as of the copy's transaction. Keys that have moved on are counted."""
        report, moved = StateReport(self._state.location), 0

        def count(key: Any) -> None:
            nonlocal moved
            moved += 1

        report.compared = compare(self._state, self._rebuilt, self._copy.txid, report.add, count)
        return report, moved

    def _was_made_by_other_code(self) -> bool:
        """Whether the last transaction was made by another version of the code, as far as it is
        recorded."""
        record = read_transaction(self._store, self._topology.id, self._copy.txid)
        found = record.attempts[-1].made_by if record is not None and record.attempts else {}
        return bool(found) and found.get("code") != self._made_by["code"]

    def _take_over(self, report: RebuildReport) -> None:
        differed = report.difference.difference_count if report.difference is not None else 0
        deadline = time.monotonic() + TAKE_OVER_TIMEOUT_S
        while not self._exchanged(differed):
            time.sleep(PAUSE_S)
            if time.monotonic() > deadline:
                raise RetryableError(
                    f"topology {self._topology.id!r} moves on faster than its copy follows: stop it for a moment, or repeat this "
                    "when it has less to do; the copy is kept"
                )
        report.txid, report.former = self._copy.txid, _beside(self._state, FORMER).location

    def _exchanged(self, differed: int) -> bool:
        """Follow the topology, and exchange the rows if nothing is closed meanwhile."""
        leads = self._store.is_led(self._topology.id)
        committed = committed_txid(self._store, self._topology.id)
        if committed >= self._copy.txid:
            self._copy.advance(committed)
        self._documents.note_taking_over(committed, differed, self._made_by, self._copy.rows)
        header, rebuilt = self._state.read_header(), self._rebuilt.read_header()
        if committed < self._copy.txid or _life_of(self._store, self._topology.id) != self._made_by["life"]:
            raise RetryableError(
                f"topology {self._topology.id!r} was reset, or a transaction of it was taken back, while its state was rebuilt: "
                "nothing was exchanged; repeat this"
            )
        if header.done > committed and not leads and not self._store.is_led(self._topology.id):
            raise ConfigError(
                f"transaction {header.done} was being closed when the last driver of topology {self._topology.id!r} ended: run "
                "the topology until it is closed, then repeat this"
            )
        if not self._copy.is_as_of(committed) or header.done != committed or not _is_whole(rebuilt, committed):
            return False
        try:
            self._state.exchange(header, with_closed_fence(header), rebuilt)
        except StaleWriterError:
            return False
        except RetryableError:  # it waited for readers, or nobody knows what became of it
            return self._documents.finish(self._state, self._made_by)
        self._documents.note_taken_over()
        return True


class _Copy(Recomputation):
    """A recomputation whose states are kept, so that it can go on in another process. Its batches
    have the txids of the topology: a batch that stands for several transactions has the last
    one's. ``rebuilt``: the state that may take over. All states have its incarnation."""

    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        conf: Mapping[str, Any],
        *,
        shadow: Topology,
        rebuilt: FencedState,
        documents: _Documents,
        made_by: Mapping[str, str],
        seen: Callable[[Batch], None],
        archive: HistoryTarget | None,
    ) -> None:
        super().__init__(topology, store, conf, shadow=shadow, seen=seen, archive=archive, epoch=documents.epoch)
        self._rebuilt, self._documents, self._made_by = rebuilt, documents, made_by
        self.rows = ""  # their incarnation
        self.resumed_at = 0

    def is_as_of(self, txid: int) -> bool:
        """Whether the copy has read what the topology had read when it closed ``txid``, its last
        transaction."""
        if self.txid != txid or committed_txid(self._store, self._topology.id) != txid:
            return False
        try:
            return _ranges_digest(self._plan_of(txid)) == _ranges_digest(self._plan)
        except RetryableError:
            return False  # the topology has moved on

    def _begin(self) -> None:
        states, mark = self._shadow.states, self._documents.mark()
        headers = [header for header in map(_header_of, states) if header is not None]
        if mark is not None and len(headers) == len(states) and self._are_ours(headers, mark):
            try:
                for state in states:
                    state.prepare(self._shadow.id)
            except (CorruptStateError, ConfigError):
                pass  # somebody has removed or changed the rows
            else:
                self.rows = mark.rows
                self._go_on(headers, mark)
                return
        self._documents.forget()
        for state in states:
            rebuildable(state).remove(self._shadow.id)
        self.rows = self._rebuilt.prepare(self._shadow.id).incarnation
        for state in states:
            header = state.prepare(self._shadow.id)
            state.raise_header(header, replace(header, epoch=self._epoch, incarnation=self.rows))
        super()._begin()

    def _are_ours(self, headers: Sequence[Header], mark: _Mark) -> bool:
        """Whether the rows with these headers are of the same making, and can be gone on with."""
        if mark.made_by != self._made_by or not all(mark.fits(header, self._epoch) for header in headers):
            return False
        begun = any(header.open is not None and header.open.txid > header.done for header in headers)  # there in part
        return not (begun and any(state.value_type is ValueType.NON_TRANSACTIONAL for state in self._shadow.states))

    def _go_on(self, headers: Sequence[Header], mark: _Mark) -> None:
        for state, header in zip(self._shadow.states, headers, strict=True):
            if header.done < mark.number - 1:  # the passing over of a batch that stands for several transactions
                state.raise_header(header, header.finished(mark.number - 1))
        done = min(max(header.done, mark.number - 1) for header in headers)
        opened = {header.open.txid: header.open.plan_digest for header in headers if header.open is not None}
        self._sandbox.commit.open(done + 1, opened)
        if done < mark.number:
            self._commit_as(mark.number, mark.batch, replay=mark.number in opened)
        self._plan = {**mark.before, **mark.batch}
        self.txid = self.resumed_at = mark.number
        if mark.left:
            self._read_over(mark.txid, mark.target)

    def _step(self, txid: int, plan: Plan, target: Plan, left: int = 0) -> None:
        mark = _Mark(
            self._made_by,
            self.rows,
            txid,
            left,
            after=self._number,
            batch=plan,
            before=self._plan,
            target=target if left else {},
        )
        self._documents.set_mark(mark)
        self._commit_as(txid - left, plan)
        self._plan = {**self._plan, **plan}
        self._told(Batch(txid - left, self.txid + 1, txid, plan))

    def _commit_as(self, number: int, plan: Plan, *, replay: bool = False) -> None:
        self._sandbox.commit.pass_over(number - 1)
        self._number = number - 1
        self.recompute(plan, replay=replay)

    def _batches_to(self, txid: int, plan: Plan) -> list[Plan]:
        """No more batches than there are transactions, since each has the txid of one."""
        ranges, records_max = self._ranges_to(plan), RECORDS_PER_BATCH
        while len(batches := self._cut(ranges, records_max)) > txid - self.txid:
            records_max *= 2
        return batches


@dataclass(frozen=True, slots=True)
class _Mark:
    """The batch that is committed next, into the rows of the incarnation ``rows``. It leads, with
    ``left`` others, to the end of transaction ``txid``, whose plan is ``target``. ``before``: what
    each partition was read to when it began, by the batch with the txid ``after``; 0 for the first
    one."""

    made_by: Mapping[str, str]
    rows: str
    txid: int
    left: int
    _: KW_ONLY
    after: int
    batch: Plan
    before: Plan
    target: Plan

    @property
    def number(self) -> int:
        return self.txid - self.left

    def fits(self, header: Header, epoch: int) -> bool:
        """Whether a state with this header has all batches before this one, and at most this
        one."""
        opened = header.open.txid if header.open is not None else 0
        ours = header.incarnation == self.rows and header.epoch < epoch
        return ours and header.done <= self.number and opened in (self.after, self.number)

    def document(self) -> dict[str, Any]:
        return {**asdict(self), **{name: stored_plan(getattr(self, name)) for name in _PLANS}}


_PLANS = ("batch", "before", "target")


class _Documents:
    """The stored documents about the rebuilds of one state, under its leadership::

    <topology id>/rebuild/<component>/mark         the batch that is committed next
    <topology id>/rebuild/<component>/taking_over  the exchange that is tried, or was when a command
                                                   ended too early
    <topology id>/rebuild/<component>/taken_over   the last exchange
    """

    def __init__(self, store: CoordinationStore, path: str, leadership: Leadership) -> None:
        self._state = TransactionalState(store, path, leadership.apply)
        self._path, self._leadership = path, leadership
        self.epoch = EPOCH_OF_REBUILDS + leadership.epoch

    def __enter__(self) -> _Documents:
        return self

    def __exit__(self, *error: object) -> None:
        self._leadership.resign()

    def mark(self) -> _Mark | None:
        """Raises ``CorruptStateError``."""
        found = self._state.get_data(MARK)
        try:
            return _Mark(**{**found, **{name: plan_of(found[name]) for name in _PLANS}}) if found is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStateError(
                f"{self._path}/{MARK}: not what rebuild writes ({error}); delete the node"
            ) from error

    def set_mark(self, mark: _Mark) -> None:
        document = mark.document()
        self._state.set_data(MARK, document, max(form_of(document[name]) for name in _PLANS))

    def forget(self) -> None:
        """The rebuilt rows are given up, and so is an exchange that did not happen."""
        for node in (MARK, TAKING_OVER):
            if self._state.get_data(node) is not None:
                self._state.delete(node)

    def note_taking_over(self, txid: int, differed: int, made_by: Mapping[str, str], rows: str) -> None:
        """An exchange is tried as of this transaction, for rows of this incarnation."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        note = {"txid": txid, "at": at, "differed": differed, "made_by": dict(made_by), "rows": rows}
        self._state.set_data(TAKING_OVER, note)

    def note_taken_over(self) -> None:
        """The exchange has happened."""
        note = self._state.get_data(TAKING_OVER)
        with self._state.atomically():
            self._state.set_data(TAKEN_OVER, note)
            self._state.delete(TAKING_OVER)
            self._state.delete(MARK)

    def finish(self, state: FencedState, made_by: Mapping[str, str]) -> bool:
        """Record an exchange that a rebuild has made and not recorded, as the header of the former
        rows shows. Returns whether there was one, of rows that this code had made."""
        found = self._state.get_data(TAKING_OVER)
        former = _header_of(_beside(state, FORMER)) if found is not None else None
        if former is None or former.incarnation != found["rows"]:
            return False
        self.note_taken_over()
        return bool(found["made_by"] == dict(made_by))

    def report(self, state: FencedState) -> RebuildReport:
        """The exchange that is recorded."""
        txid, former = self._state.get_data(TAKEN_OVER)["txid"], _beside(state, FORMER).location
        return RebuildReport(self._path.split("/")[0], state.location, txid, resumed_at=txid, former=former)


@contextmanager
def _rebuilds_of(
    topology: Topology, component: Component, store: CoordinationStore, timeout_s: float
) -> Iterator[_Documents]:
    """The documents of a component's rebuild. No other rebuild has its states, or the states above,
    until the block ends."""
    with ExitStack() as stack:
        for each in _above(topology, component):
            stack.enter_context(_rebuild_of(topology.id, each.id, store, timeout_s))
        yield stack.enter_context(_rebuild_of(topology.id, component.id, store, timeout_s))


def _rebuild_of(topology_id: str, component_id: str, store: CoordinationStore, timeout_s: float) -> _Documents:
    path = f"{topology_id}/rebuild/{component_id}"
    leadership = store.lead(path, f"a command on {identity_of_process()}", timeout_s=timeout_s)
    if leadership is None:
        raise ConfigError(
            f"another rebuild of {component_id!r} in topology {topology_id!r} runs: wait for it, or stop it"
        )
    return _Documents(store, path, leadership)


def _rebuildable(topology: Topology, component: Component, number: int) -> Component:
    """The component, unless its state can only be exchanged together with others."""
    location = component.states[number].location
    if len(component.states) > 1:
        raise ConfigError(f"{location} cannot be rebuilt: bolt {component.id!r} keeps {len(component.states)} states")
    if _keeps_time(component) and _below(topology, component):
        raise ConfigError(
            f"{location} cannot be rebuilt: bolt {component.id!r} keeps the event time by which others have sent what was due, "
            "and would send it again; `ratchet reset --everything` makes all anew"
        )
    parts = (component, *_above(topology, component))
    beside = {_beside(state, place).location for each in parts for state in each.states for place in (REBUILT, FORMER)}
    taken = [state.location for state in topology.states if state.location in beside]
    if taken:
        raise ConfigError(f"{location} cannot be rebuilt: its rows would be made in {taken[0]}, which is another state")
    return component


def _above(topology: Topology, component: Component) -> list[Component]:
    """The components with states that this one gets rows from."""
    needed = with_what_it_needs(topology, component).components
    return [topology[each.id] for each in needed if each.states and each.id != component.id]


def _below(topology: Topology, component: Component) -> list[Component]:
    """The components with states that this one gives rows to."""
    return [each for each in topology.components if each.states and component in _above(topology, each)]


def _copies_above(topology: Topology, component: Component) -> list[RebuildableState]:
    """The copies of the states above, which a rebuild of this component makes."""
    return [_beside(state, REBUILT) for each in _above(topology, component) for state in each.states]


def _keeps_time(component: Component) -> bool:
    bolt: object = component.instance
    return isinstance(bolt, TimedBolt)


def _how_to_mend(above: Component) -> str:
    if _keeps_time(above):
        return "what is sent by another event time can only be made anew by `ratchet reset --everything`"
    return f"rebuild {above.id!r} first"


def _check_owned(topology_id: str, state: FencedState, incarnation: str) -> None:
    """Raise ``ConfigError`` for a state of another topology, or of another life of this one."""
    header = state.check(topology_id)
    if header is not None and incarnation and header.done and header.incarnation != incarnation:
        raise ConfigError(
            f"{state.location} is of incarnation {header.incarnation}, and topology {topology_id!r} is of {incarnation}: one of "
            "them was wiped, or restored from a backup"
        )


def _maker_of(topology: Topology, store: CoordinationStore, conf: Mapping[str, Any]) -> dict[str, str]:
    """What rebuilt rows depend on, beside the records: code, configuration, and the life of the
    topology."""
    settings = json.dumps(dict(conf), sort_keys=True, default=str)
    conf_digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
    return {**lineage_of(topology), "conf": conf_digest, "life": _life_of(store, topology.id)}


def _beside(state: FencedState, place: str) -> RebuildableState:
    other = copied(rebuildable(state))
    other.become_beside(place)
    return other


def _beside_itself(bolt: Bolt, folder: Path) -> Bolt:
    """The ``Shadowed`` of a rebuild: the bolt as it is, and its states in ``REBUILT``."""
    for state in bolt.states():
        rebuildable(state).become_beside(REBUILT)
    return bolt


def _ranges_digest(plan: Plan) -> str:
    """A hash of the ranges that a plan has read, without the records that later batches left out,
    which are also written into the plan."""
    later = (LEFT_OUT, LEFT_OUT_FROM)
    return plan_digest({each: {k: v for k, v in meta.items() if k not in later} for each, meta in plan.items()})


def _header_of(state: FencedState) -> Header | None:
    """The header of what stands beside a state, if there is one."""
    try:
        return state.read_header()
    except (CorruptStateError, ConfigError, InvariantViolation):
        return None


def _is_whole(rebuilt: Header, txid: int) -> bool:
    """Whether rebuilt rows hold transaction ``txid``, and nothing of what follows."""
    return rebuilt.done == txid and rebuilt.open is not None and rebuilt.open.txid == txid


def _life_of(store: CoordinationStore, topology_id: str) -> str:
    """Changes whenever transactions that were closed are no longer what they were: the topology was
    reset, or one of them was taken back."""
    undone = read_undone(store, topology_id)
    taken_back = (undone.txid, [each.document() for each in undone.attempts]) if undone is not None else None
    life = (read_incarnation(store, topology_id), read_origin(store, topology_id).txid, taken_back)
    return hashlib.sha256(json.dumps(life).encode()).hexdigest()[:16]


def with_closed_fence(header: Header) -> Header:
    """The header under which a commit that is open now is refused, and is repeated by the attempt
    that follows."""
    opened = header.open
    if opened is None or opened.txid <= header.done or opened.plan_digest == ROLLED_BACK:
        return header
    return header.opened(header.epoch, OpenCommit(opened.txid, opened.attempt_id + 1, opened.plan_digest))
