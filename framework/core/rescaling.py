"""Moves the keys of a state to other namespaces. This is needed when the number of a component's
tasks changes, when its values live longer than before, or when exactly one of the old and new
states lets values expire.

The new tasks get namespaces that were never used before. The record names the new namespaces once
they are complete, so a crash before that leaves the old ones as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from framework.core.checkpoint_record import CheckpointRecord, Layout, other_store
from framework.errors import ConfigError, InvariantViolation, TopologyError
from framework.observe.logs import get_logger
from framework.state.expiry import FOR_EVER, fresh, kept
from framework.state.provider_settings import kept_state_of
from framework.topology import (
    EVERY_TASK,
    BaseStatefulBolt,
    Component,
    FieldsGrouping,
    GlobalGrouping,
    KeyValueState,
    State,
    StateProvider,
)

_log = get_logger()

#: How many entries are written between commits.
BATCH = 100_000


class Entry(NamedTuple):
    """A key of a task's state with its value. ``put_at``: when the value was written, if values
    expire."""

    key: Any
    value: Any
    put_at: float | None
    task: int


def namespace_of(topology_id: str, component_id: str, layout: int, task: int) -> str:
    return f"{topology_id}/{component_id}/{layout}/{task}"


@dataclass(frozen=True)
class Namespaces:
    """The namespaces of one topology's states."""

    topology_id: str
    provider: StateProvider
    conf: Mapping[str, Any]

    def of(self, component_id: str, layout: Layout) -> list[str]:
        """The namespaces of a layout, one for each task."""
        return [namespace_of(self.topology_id, component_id, layout.number, task) for task in range(layout.tasks)]

    def states(self, component: Component, layout: Layout) -> list[KeyValueState[Any, Any]]:
        """The states of the tasks of a layout, with values in stored form. Raises
        ``ConfigError``."""
        timed = layout.ttl_of(component.instance) > 0
        names = self.of(component.id, layout)
        return [_key_value(kept_state_of(self.provider, name, timed, self.conf, None)) for name in names]

    def commit(self, component_id: str, layout: Layout, record: CheckpointRecord) -> None:
        """Commit the prepared checkpoint in the namespaces of a layout."""
        for name in self.of(component_id, layout):
            state = self.provider.new_state(name, self.conf, None)
            try:
                state.recover(record.pending or 0, prepared=True, upto=record.last)
            finally:
                state.close()

    def drop(self, component_id: str, layout: Layout) -> None:
        for name in self.of(component_id, layout):
            self.provider.drop(name, self.conf)


def finished(
    namespaces: Namespaces,
    components: Mapping[str, Component],
    record: CheckpointRecord,
    save: Callable[[CheckpointRecord], None],
) -> CheckpointRecord:
    """Commit a prepared checkpoint, if the components or their tasks have changed since it was
    prepared. It is committed in the namespaces where it was prepared (C39). If nothing has changed,
    the checkpoint is left for the present tasks to commit. Returns the record afterwards."""
    if not record.prepared:
        return record
    pending = record.pending_layouts
    if pending.keys() == components.keys() and all(
        pending[name].fits(layout_of(each, 0)) for name, each in components.items()
    ):
        return record
    for component_id, layout in pending.items():
        namespaces.commit(component_id, layout, record)
    record = record.committed()
    save(record)
    _log.info("state.finished", topology=namespaces.topology_id, checkpoint=record.txid)
    return record


def rescaled(
    namespaces: Namespaces,
    components: Mapping[str, Component],
    record: CheckpointRecord,
    save: Callable[[CheckpointRecord], None],
) -> CheckpointRecord:
    """Move keys as the present components need it, and return the record that names the new
    namespaces. Keys move when the number of tasks or the lifetime of values has changed.
    ``components``: those with state. Raises ``TopologyError`` for keys that belong to no task, or
    when the grouping of their tuples has changed, and ``CorruptStateError`` for a state that does
    not hold the checkpoint that the record names."""
    record = finished(namespaces, components, record, save)
    for component_id, layout in list(record.layouts.items()):
        component = components.get(component_id)
        if component is None:
            _log.warning(
                "state.left_behind", component=component_id, reason="the topology has no such stateful bolt now"
            )
        elif not layout.brought_as(wanted := layout_of(component, 0)):
            raise TopologyError(
                f"bolt {component_id!r} takes its tuples by {wanted.grouping}, and its state was written where they came by "
                f"{layout.grouping}: tuples of a key may go to another task than its state. Group them as before; where it is the "
                "same by other names, save a snapshot with the topology as it was, and restore it with this one"
            )
        elif not layout.fits(wanted):
            # Take an id that stays unique even if another process does the same concurrently.
            record = replace(record, last=record.highest + 1)
            save(record)
            new = layout_of(component, record.last)
            _log.info("state.moves", component=component_id, tasks_before=layout.tasks, tasks=new.tasks)
            _move(namespaces, component, record, old=layout, new=new, save=save)
            record = replace(
                record,
                layouts={**record.layouts, component_id: new},
                assigned={**record.assigned, component_id: new},
            )
            save(record)
            namespaces.drop(component_id, layout)
    return record


def layout_of(component: Component, number: int) -> Layout:
    """The layout that a component needs now."""
    bolt = _bolt_of(component)
    groupings = sorted({each.grouping.outline() for each in component.subscriptions})
    return Layout(number, component.parallelism, bolt.state_ttl_s or 0.0, " and ".join(groupings))


class Filling:
    """Fills new namespaces of a component: puts each key in the namespace of its task."""

    def __init__(self, namespaces: Namespaces, component: Component, layout: Layout) -> None:
        self._component = component
        self._tasks = layout.tasks
        self._ttl_s = layout.ttl_of(component.instance)
        # extracts a value without its time
        self._itself: Callable[[Any], Any] | None = itemgetter(1) if self._ttl_s else None
        self._targets = namespaces.states(component, layout)
        self._waiting = 0

    def put(self, entry: Entry, tasks: int) -> None:
        """Put a key that one of the ``tasks`` former tasks held. Raises ``TopologyError`` when the
        key belongs to no task, or to another task than the former holder: then the destination of
        its tuples is unknown."""
        bolt = _bolt_of(self._component)
        key, task = entry.key, entry.task
        value = kept(entry.value, entry.put_at if bolt.expires(key) else FOR_EVER, self._ttl_s)
        if tasks != self._tasks:
            grouped: Any = bolt.grouping_key(key)
            if grouped is None:
                return  # its former task, which no longer exists, was the right holder
            if grouped is EVERY_TASK:
                for each in self._targets:
                    known = each.get(key)
                    each.put(key, value if known is None else max(known, value, key=self._itself))
                return
            had = task_of_key(self._component, key, tasks)
            now = task_of_key(self._component, key, self._tasks)
            if had is None or now is None:
                raise TopologyError(
                    f"bolt {self._component.id!r} has state whose keys belong to no task, because it takes tuples otherwise than "
                    "by fields grouping, or keeps them for a task as a whole: its number of tasks cannot change"
                )
            if had != task:
                raise TopologyError(
                    f"bolt {self._component.id!r} has key {key!r} of its state in task {task}, and by its grouping it belongs to "
                    f"task {had}: write grouping_key() so that it gives the values that the input is grouped by; until then the "
                    f"number of tasks must stay {tasks}"
                )
            task = now
        self._targets[task].put(key, value)
        self._waiting += 1
        if self._waiting >= BATCH:
            self._waiting = 0
            for each in self._targets:
                each.commit()

    def finish(self, txid: int) -> None:
        """Commit all entries as the state of checkpoint ``txid``."""
        for each in self._targets:
            each.prepare_commit(txid)
            each.commit(txid)

    def close(self) -> None:
        for each in self._targets:
            each.close()


def _move(
    namespaces: Namespaces,
    component: Component,
    record: CheckpointRecord,
    *,
    old: Layout,
    new: Layout,
    save: Callable[[CheckpointRecord], None],
) -> None:
    """Copy the keys of a component from the old layout to the new one. Raises ``CorruptStateError``
    for a state that does not hold the checkpoint that the record names, because its missing keys
    would be lost for good."""
    filling = Filling(namespaces, component, new)
    sources = namespaces.states(component, old)
    ttl_s = old.ttl_of(component.instance)
    try:
        for task, source in enumerate(sources):
            source.recover(record.txid, prepared=False, upto=record.last)
            if source.txid not in (None, record.txid):
                save(record)  # raises if this driver no longer leads
                raise other_store(component.id, task, source.txid or 0, record.txid)
            for key, value, put_at in fresh(source.items(), ttl_s, time.time()):
                filling.put(Entry(key, value, put_at, task), old.tasks)
        filling.finish(record.txid)
    finally:
        filling.close()
        for each in sources:
            each.close()


def task_of_key(component: Component, key: Any, tasks: int) -> int | None:
    """The task to which the tuples of a state's key go; None when the key does not tell."""
    groupings = [each.grouping for each in component.subscriptions]
    if all(isinstance(each, GlobalGrouping) for each in groupings):
        return 0
    if not all(isinstance(each, FieldsGrouping) for each in groupings):
        return None
    values = _bolt_of(component).grouping_key(key)
    return FieldsGrouping.task_of(values, tasks) if values and values is not EVERY_TASK else None


def _bolt_of(component: Component) -> BaseStatefulBolt:
    if not isinstance(component.instance, BaseStatefulBolt):
        raise InvariantViolation(f"{component.id} has no state, and its layout was asked for")
    return component.instance


def _key_value(state: State) -> KeyValueState[Any, Any]:
    if not isinstance(state, KeyValueState):
        raise ConfigError(f"{type(state).__name__} is no KeyValueState: the number of tasks of its bolt cannot change")
    return state
