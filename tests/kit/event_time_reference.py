"""What event time means, written out plainly: every transaction is a list of records, and nothing
fails. Times are seconds; what is sent has microseconds, as the committers send it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

NEVER = -(1 << 62)
#: A watermark before all records, in seconds.
BEFORE_ALL = -(10**9)
OPERATORS = ("windows", "sessions", "first", "pairs", "valued", "expiring", "timers")
#: Component and stream -> how often each row.
Sent = dict[str, Counter[Any]]


class Record(NamedTuple):
    source: int
    key: str
    kind: str
    at: int
    number: int


@dataclass(frozen=True)
class Options:
    lag: int
    idle_after: int | None
    length: int
    step: int
    origin: int
    lateness: int
    gap: int
    within: int
    valid: int | None
    how: Literal["inner", "left", "right", "outer"]
    #: How long rows are kept after their last record.
    ttl: int
    #: How long after a record its timer is due.
    remind: int
    advance_when_idle: bool = False


def us(seconds: int) -> int:
    return seconds * 1_000_000


class ClockReference:
    """The event time of some streams: what one watermark says after each transaction."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.watermark: int | None = None
        self.planned_at: int | None = None
        self.elapsed = 0
        self.partitions: dict[int, tuple[int, int]] = {}
        self.timeless: dict[int, int] = {}

    @property
    def reached(self) -> int:
        return self.watermark if self.watermark is not None else BEFORE_ALL

    def after(
        self,
        records: Sequence[Record],
        planned_at: int,
        *,
        behind: bool,
        begun: Collection[int] = (),
        unread: bool = False,
    ) -> None:
        """Advance by the next transaction: as ``Reference.after``."""
        if self.planned_at is not None and not behind:
            self.elapsed += max(planned_at - self.planned_at, 0)
        self.planned_at = planned_at
        for record in records:
            newest = max(record.at, self.partitions.get(record.source, (record.at, 0))[0])
            self.partitions[record.source] = newest, self.elapsed
        idle = self.options.idle_after
        awake = [at for at, seen in self.partitions.values() if idle is None or self.elapsed - seen < idle]
        known = self.timeless
        self.timeless = {each: known.get(each, self.elapsed) for each in begun if each not in self.partitions}
        waits = any(idle is None or self.elapsed - since < idle for since in self.timeless.values())
        passed = [at + self.elapsed - seen for at, seen in self.partitions.values()]
        counted = awake or ([max(passed)] if passed and self.options.advance_when_idle else [])
        if counted and not waits and not unread:
            reached = min(counted) - self.options.lag
            self.watermark = max(self.watermark, reached) if self.watermark is not None else reached


class Reference:
    """All committers, each over the records of the source."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.clock = ClockReference(options)
        self.windows: dict[tuple[str, int, int], list[int]] = {}
        self.open: dict[str, list[Record]] = defaultdict(list)
        self.seen: dict[str, int] = {}
        #: Records that may still find a partner, each with whether it has found one.
        self.waiting: list[list[Any]] = []
        self.rows: list[Record] = []
        self.ahead: list[Record] = []
        #: key -> when its row expires, the number of its records, and their sum
        self.kept: dict[str, tuple[int, int, int]] = {}
        self.untimed: list[Record] = []
        #: key -> the sum of its records, or None, and its timers
        self.entries: dict[str, tuple[int | None, set[int]]] = {}

    def after(
        self,
        records: Sequence[Record],
        planned_at: int,
        *,
        behind: bool,
        begun: Collection[int] = (),
        unread: bool = False,
    ) -> Sent:
        """The rows that the next transaction sends. ``begun``: the partitions that no transaction
        has read to their end so far. ``unread``: a partition has records, none of which was ever
        read."""
        before = self.clock.reached
        self.clock.after(records, planned_at, behind=behind, begun=begun, unread=unread)
        now = self.clock.reached
        sent: Sent = {"watermark": Counter([us(now) if self.clock.watermark is not None else NEVER])}
        for operator in OPERATORS:
            sent |= self.sent_by(operator, records, before, now)
        return sent

    def sent_by(self, operator: str, records: Sequence[Record], before: int, now: int) -> Sent:
        """The rows that one committer sends in the next transaction, whose watermark goes from
        ``before`` to ``now``."""
        sent: Sent = {}
        getattr(self, f"_{operator}")(records, before, now, sent)
        return {name: found for name, found in sent.items() if found}

    def held(self) -> dict[str, int]:
        """How many rows each state may have at most."""
        return {
            "windows": len(self.windows),
            "sessions": sum(map(len, self.open.values())),
            "first": len(self.seen),
            "valued": len(self.ahead) + len({row.key for row in self.rows}),
            "expiring": len(self.kept),
            "timers": len(self.untimed) + len(self.entries),
        }

    def _windows(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        late: dict[tuple[str, int, int], list[int]] = {}
        touched = set()
        o = self.options
        for record in records:
            first = (record.at - o.origin) // o.step * o.step + o.origin
            for start in range(first, record.at - o.length, -o.step):
                window = record.key, start, start + o.length
                into = late if window[2] <= before - o.lateness else self.windows
                total = into.setdefault(window, [0, 0])
                total[0], total[1] = total[0] + 1, total[1] + record.number
                if into is self.windows:
                    touched.add(window)
        for window, (count, total_) in sorted(self.windows.items()):
            if before < window[2] <= now or (window in touched and window[2] <= before):
                row = (window[0], us(window[1]), us(window[2]), count, total_)
                sent.setdefault("windows/default", Counter())[(*row, window[2] <= before) if o.lateness else row] += 1
        for window, (count, total_) in late.items():
            sent.setdefault("windows/late", Counter())[(window[0], us(window[1]), us(window[2]), count, total_)] += 1
        self.windows = {window: total for window, total in self.windows.items() if window[2] > now - o.lateness}

    def _sessions(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        new = {*map(id, records)}
        for record in records:
            self.open[record.key].append(record)
        for key, its in self.open.items():
            chains: list[list[Record]] = []
            for record in sorted(its, key=lambda each: each.at):
                if chains and record.at - chains[-1][-1].at < self.options.gap:
                    chains[-1].append(record)
                else:
                    chains.append([record])
            self.open[key] = []
            for chain in chains:
                end = chain[-1].at + self.options.gap
                row = (key, us(chain[0].at), us(end), len(chain), sum(each.number for each in chain))
                if end <= before and all(id(each) in new for each in chain):
                    sent.setdefault("sessions/late", Counter())[row] += 1
                elif end <= now:
                    sent.setdefault("sessions/default", Counter())[row] += 1
                else:
                    self.open[key] += chain

    def _first(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        for record in records:
            until = self.seen.get(record.key)
            if until is not None and record.at < until:
                continue
            row = (record.kind, record.key, record.source, record.at, record.number)
            if record.at < before:
                sent.setdefault("first/late", Counter())[row] += 1
            else:
                self.seen[record.key] = record.at + self.options.gap
                sent.setdefault("first/default", Counter())[row] += 1
        self.seen = {key: until for key, until in self.seen.items() if until > now}

    def _late(self, name: str, records: Sequence[Record], before: int, sent: Sent) -> None:
        for record in records:
            if record.at < before:
                side = "late_left" if record.kind == "order" else "late_right"
                sent.setdefault(f"{name}/{side}", Counter())[(record.key, record.at, record.number)] += 1

    def _pairs(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        self._late("pairs", records, before, sent)
        new = [[record, False] for record in records if record.at >= before]
        found = sent.setdefault("pairs/default", Counter())
        held, self.waiting = self.waiting, [*self.waiting, *new]
        for one, other in (*itertools.product(held, new), *itertools.combinations(new, 2)):
            left, right = (one, other) if one[0].kind == "order" else (other, one)
            fits = left[0].key == right[0].key and (left[0].kind, right[0].kind) == ("order", "payment")
            if fits and abs(left[0].at - right[0].at) <= self.options.within:
                left[1] = right[1] = True
                found[(left[0].key, left[0].at, left[0].number, right[0].at, right[0].number)] += 1
        still = []
        for each in self.waiting:
            record, is_matched = each
            if record.at + self.options.within >= now:
                still.append(each)
            elif not is_matched:
                if record.kind == "order" and self.options.how in ("left", "outer"):
                    found[(record.key, record.at, record.number, None, None)] += 1
                if record.kind == "payment" and self.options.how in ("right", "outer"):
                    found[(record.key, None, None, record.at, record.number)] += 1
        self.waiting = still

    def _valued(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        self._late("valued", records, before, sent)
        self.ahead += [record for record in records if record.at >= before or record.kind == "payment"]
        due = [record for record in self.ahead if record.at < now]
        self.ahead = [record for record in self.ahead if record.at >= now]
        self.rows += [record for record in due if record.kind == "payment"]
        found = sent.setdefault("valued/default", Counter())
        for left in due:
            if left.kind != "order":
                continue
            its = [
                (row.at, place, row) for place, row in enumerate(self.rows) if row.key == left.key and row.at <= left.at
            ]
            newest = max(its, default=None)
            valid = self.options.valid
            if newest is not None and (valid is None or left.at - newest[0] <= valid):
                found[(left.key, left.at, left.number, newest[0], newest[2].number)] += 1
            else:
                found[(left.key, left.at, left.number, None, None)] += 1

    def _expiring(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        ttl, changed = self.options.ttl, set()
        late, expired = sent.setdefault("expiring/late", Counter()), sent.setdefault("expiring/expired", Counter())
        for record in sorted(records, key=lambda each: each.at):
            if record.at + ttl <= before:
                late[(record.key, record.at, record.number)] += 1
                continue
            end, count, total = self.kept.pop(record.key, (record.at, 0, 0))
            if count and end <= min(record.at, now):
                expired[(record.key, us(end), count, total)] += 1
                count, total = 0, 0
            self.kept[record.key] = max(end, record.at + ttl), count + 1, total + record.number
            changed.add(record.key)
        for key, (end, count, total) in list(self.kept.items()):
            if end <= now:
                expired[(key, us(end), count, total)] += 1
                del self.kept[key]
        live = ((key, *self.kept[key][1:]) for key in changed if key in self.kept)
        sent.setdefault("expiring/default", Counter()).update(live)

    def _timers(self, records: Sequence[Record], before: int, now: int, sent: Sent) -> None:
        late = sent.setdefault("timers/late", Counter())
        for record in records:
            if record.at < before:
                late[(record.kind, record.key, record.source, record.at, record.number)] += 1
            else:
                self.untimed.append(record)
        due = sorted((each for each in self.untimed if each.at < now), key=lambda each: each.at)
        self.untimed = [each for each in self.untimed if each.at >= now]
        for record in due:
            value, timers = self._fired(record.key, record.at, sent)
            self.entries[record.key] = (value or 0) + record.number, {*timers, record.at + self.options.remind}
        for key in list(self.entries):
            if (entry := self._fired(key, now, sent)) == (None, set()):
                del self.entries[key]
            else:
                self.entries[key] = entry

    def _fired(self, key: str, upto: int, sent: Sent) -> tuple[int | None, set[int]]:
        """The entry of a key after its timers up to a time: the first sends the sum."""
        value, timers = self.entries.get(key, (None, set()))
        for at in sorted(each for each in timers if each <= upto):
            if value is not None:
                sent.setdefault("timers/default", Counter())[(key, us(at), value)] += 1
            value = None
        return value, {each for each in timers if each > upto}
