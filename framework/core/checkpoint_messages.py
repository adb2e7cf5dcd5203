"""The messages of a checkpoint: the marker that a round carries to every task, and the report of a
task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from framework.acking.ack_reports import Roots
from framework.core.checkpoint_record import Positions
from framework.topology.stateful import StateSize

#: The longest record name that is kept, in characters.
_NAME_MAX = 500


def name_of(message_id: Any) -> str | None:
    """The name of a record, made from its message id; None when the id has no JSON form or is too
    long."""
    try:
        name = None if message_id is None else json.dumps(message_id, sort_keys=True)
    except (TypeError, ValueError):
        return None
    return name if name is None or len(name) <= _NAME_MAX else None


class CheckpointAction(Enum):
    """The action that a checkpoint asks of a task."""

    RECOVER = "recover"  # restart from the committed checkpoint
    PREPARE = "prepare"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """The part of a round that concerns a checkpoint. Every task gets it.

    * ``txid``: the checkpoint; in a recovery, the checkpoint to go back to.
    * ``prepared``: the checkpoint may be prepared only, and must then be committed.
    * ``upto``: the highest id ever used.
    * ``layouts``: component -> number of its layout.
    * ``known``: components whose state is part of the checkpoint; the others begin empty.
    * ``positions``: where spouts go back to.
    * ``exact``: all spouts go back; otherwise only new instances do.
    * ``forgotten``: spouts that restart from the beginning of their input if they have no position.
    * ``durable``: committed state survives its process.
    * ``failed``: trees whose source records the driver asks the spouts for.
    * ``suspects``: spout -> records that have failed and will be emitted again; True: the record is
      given up.
    * ``gives_up``: whether any spout gives up records.
    * ``few``: the most records that a spout task names in a recovery; others are named when they
      fail again."""

    action: CheckpointAction
    txid: int
    _: KW_ONLY
    prepared: bool = False
    upto: int = 0
    layouts: Mapping[str, int] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    positions: Positions | None = None
    exact: bool = False
    forgotten: frozenset[str] = frozenset()
    durable: bool = False
    failed: Roots = field(default_factory=Roots)
    suspects: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    gives_up: bool = False
    few: int = 1


class CheckpointReport(NamedTuple):
    """A task's report after a round with a marker.

    * ``txid``: the checkpoint that its state holds; None when the state does not know.
    * ``position``: of a spout that can go back.
    * ``size``: of a state that has committed and knows its size.
    * ``failed``: in a recovery, the source records of the trees that the driver asked for.
    * ``passed``: the suspects that this spout task has emitted or given up."""

    component_id: str
    task: int
    txid: int | None = None
    position: Any = None
    size: StateSize | None = None
    failed: Sequence[str] = ()
    passed: Sequence[str] = ()
