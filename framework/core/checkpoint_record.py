"""The durable record of a topology's checkpoints, and the layouts of the states in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from framework.document_type_checks import check_fields
from framework.errors import CorruptStateError, InvariantViolation

FORMAT = 1
_LAYOUTS = ("layouts", "assigned", "pending_layouts")
_NOTHING_PENDING: dict[str, Any] = {
    "pending": None,
    "prepared": False,
    "pending_positions": None,
    "pending_layouts": {},
    "pending_passed": {},
}
Positions = Mapping[str, Sequence[Any]]
#: Spout -> record -> how often it has failed. A record is named by ``name_of``.
Suspects = Mapping[str, Mapping[str, int]]


class Layout(NamedTuple):
    """The namespaces that hold a component's state: one per task, under a layout number.

    * ``ttl_s``: how long values live, in seconds; 0 for ever.
    * ``grouping``: how tuples are divided among the tasks.

    Both are None in records of earlier versions, which did not keep them."""

    number: int
    tasks: int
    ttl_s: float | None = None
    grouping: str | None = None

    def ttl_of(self, bolt: Any) -> float:
        """How long values live in this layout, in seconds; 0 for ever. ``bolt``: the bolt whose
        layout this is; its ``state_ttl_s`` applies when the record has no value."""
        found: float | None = bolt.state_ttl_s if self.ttl_s is None else self.ttl_s
        return found or 0.0

    def fits(self, other: Layout) -> bool:
        """Whether tasks of the other layout can keep the namespaces of this one. They cannot when
        values live longer in the other layout, because expired values may still be stored. Nor can
        they when values live for ever in exactly one of the two, because only values that expire
        are stored with a time."""
        ttl_s = other.ttl_s or 0.0
        return self.tasks == other.tasks and (self.ttl_s is None or self.ttl_s == ttl_s or 0 < ttl_s < self.ttl_s)

    def brought_as(self, other: Layout) -> bool:
        """Whether both layouts divide tuples among tasks in the same way. With a single task in
        either, the grouping does not matter."""
        return min(self.tasks, other.tasks) == 1 or self.grouping in (None, other.grouping)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """The durable record of a topology's checkpoints.

    * ``txid``: the last committed checkpoint.
    * ``positions``: the spouts' positions at ``txid``; None without a checkpoint, or when spouts
      cannot go back.
    * ``pending``: the next checkpoint, once begun.
    * ``pending_layouts``: of the components that take part in ``pending``.
    * ``prepared``: all tasks have prepared ``pending``, at ``pending_positions``.
    * ``layouts``: of the components that were part of ``txid``.
    * ``assigned``: layouts of all components of the topology.
    * ``last``: the highest id ever used.
    * ``base``: the positions at which the run began, for states that do not survive their process.
    * ``forgotten``: spouts whose positions were forgotten on request, and that have no new ones
      yet.
    * ``suspects``: the records after ``txid`` that have failed, the latest failure last.
    * ``pending_passed``: the suspects that lie before ``pending_positions``."""

    txid: int = 0
    positions: Positions | None = None
    pending: int | None = None
    prepared: bool = False
    pending_positions: Positions | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    assigned: Mapping[str, Layout] = field(default_factory=dict)
    last: int = 0
    base: Positions | None = None
    pending_layouts: Mapping[str, Layout] = field(default_factory=dict)
    forgotten: Sequence[str] = ()
    suspects: Suspects = field(default_factory=dict)
    pending_passed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The record as a JSON-able document."""
        layouts = {name: {key: list(each) for key, each in getattr(self, name).items()} for name in _LAYOUTS}
        return {"format": FORMAT, **asdict(self), **layouts}

    @classmethod
    def of(cls, document: Any, where: str) -> CheckpointRecord:
        """Read a document. Raises ``CorruptStateError`` with a message that begins with
        ``where``."""
        try:
            if document["format"] != FORMAT:
                found = document["format"]
                raise CorruptStateError(f"{where}: format {found!r} is of another release; this one reads {FORMAT}")
            # Records of earlier versions hold no layouts of a pending checkpoint (these were the
            # assigned ones), and no suspects.
            lacking = {"pending_layouts": document["assigned"], "forgotten": [], "suspects": {}, "pending_passed": {}}
            known = {**lacking, **document}
            fields = {name: known[name] for name in cls.__dataclass_fields__}
            for name in _LAYOUTS:
                fields[name] = {key: Layout(*each) for key, each in fields[name].items()}
                for each in fields[name].values():
                    check_fields(Layout, each._asdict())
            check_fields(cls, fields)
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptStateError(f"{where} is no record of checkpoints: {error!r}") from None

    def committed(self) -> CheckpointRecord:
        """Return the record after the commit of the pending checkpoint."""
        if self.pending is None:
            raise InvariantViolation("there is no checkpoint to commit")
        positions = self.pending_positions
        return replace(
            self,
            txid=self.pending,
            positions=positions,
            layouts=self.pending_layouts,
            forgotten=[each for each in self.forgotten if each not in (positions or ())],
            suspects={
                spout: {each: times for each, times in its.items() if each not in self.pending_passed.get(spout, ())}
                for spout, its in self.suspects.items()
            },
            **_NOTHING_PENDING,
        )

    def abandoned(self) -> CheckpointRecord:
        """Return the record without the pending checkpoint. Call it only while that is not
        prepared."""
        return replace(self, **_NOTHING_PENDING)

    @property
    def highest(self) -> int:
        """The highest number that a checkpoint or a layout ever had."""
        return max([self.last, *(each.number for each in self.assigned.values())])

    @property
    def phase(self) -> str:
        return "COMMITTED" if self.pending is None else "COMMITTING" if self.prepared else "PREPARING"


def other_store(component_id: str, task: int, txid: int, expected: int) -> CorruptStateError:
    """Make the error for a state that does not hold the checkpoint that the record names."""
    return CorruptStateError(
        f"the state of {component_id}[{task}] holds checkpoint {txid}, and the record of this topology says {expected}: its store "
        "was emptied, restored or replaced; restore it, or give the topology another id"
    )
