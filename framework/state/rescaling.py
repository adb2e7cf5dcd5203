"""Moves the keys of a state to other tasks, when the number of a component's tasks has changed.

The new tasks get namespaces of their own, which nobody has used before; the record names them once they are complete. A crash
before that leaves the old ones as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import structlog

from framework.errors import ConfigError, TopologyError
from framework.state.checkpoints import CheckpointRecord, Layout
from framework.state.settings import kept_state_of
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

_log = structlog.get_logger()

#: Entries that are kept before they are written.
BATCH = 100_000


class Entry(NamedTuple):
    """A key of a task's state with its value. ``put_at``: when that was put, where values expire."""

    key: Any
    value: Any
    put_at: float | None
    task: int


def namespace_of(topology_id: str, component_id: str, layout: int, task: int) -> str:
    return f"{topology_id}/{component_id}/{layout}/{task}"


def finished(
    topology_id: str,
    components: Mapping[str, Component],
    record: CheckpointRecord,
    provider: StateProvider,
    conf: Mapping[str, Any],
    save: Callable[[CheckpointRecord], None],
) -> CheckpointRecord:
    """The record without a checkpoint that is prepared by other components or tasks than there are now: it is committed here, in
    the namespaces that it was prepared in (C39). One that was prepared by those that there are now is theirs to commit."""
    now = {component_id: each.parallelism for component_id, each in components.items()}
    if not record.prepared or record.pending is None or now == {k: v.tasks for k, v in record.pending_layouts.items()}:
        return record
    for component_id, layout in record.pending_layouts.items():
        for task in range(layout.tasks):
            state = provider.new_state(namespace_of(topology_id, component_id, layout.number, task), conf, None)
            try:
                state.recover(record.pending, prepared=True, upto=record.last)
            finally:
                state.close()
    record = record.committed()
    save(record)
    _log.info("state.finished", topology=topology_id, checkpoint=record.txid)
    return record


def rescaled(
    topology_id: str,
    components: Mapping[str, Component],
    record: CheckpointRecord,
    provider: StateProvider,
    conf: Mapping[str, Any],
    save: Callable[[CheckpointRecord], None],
) -> CheckpointRecord:
    """The record for the parallelism that components have now. ``components``: the stateful ones. Raises ``TopologyError`` for
    keys that belong to no task."""
    record = finished(topology_id, components, record, provider, conf, save)
    for component_id, layout in list(record.layouts.items()):
        component = components.get(component_id)
        if component is None:
            _log.warning(
                "state.left_behind", component=component_id, reason="the topology has no such stateful bolt now"
            )
        elif component.parallelism != layout.tasks:
            # An id that nobody else has, whoever else tries the same at the same time.
            record = replace(record, last=record.last + 1)
            save(record)
            new = Layout(record.last, component.parallelism)
            _log.info("state.moves", component=component_id, tasks_before=layout.tasks, tasks=new.tasks)
            _move(topology_id, component, record, layout, new, provider, conf)
            record = replace(
                record,
                layouts={**record.layouts, component_id: new},
                assigned={**record.assigned, component_id: new},
            )
            save(record)
            for task in range(layout.tasks):
                provider.drop(namespace_of(topology_id, component_id, layout.number, task), conf)
    return record


class Filling:
    """Fills new namespaces of a component with keys, each in its task's."""

    def __init__(
        self, topology_id: str, component: Component, layout: Layout, provider: StateProvider, conf: Mapping[str, Any]
    ) -> None:
        self._component = component
        self._tasks = layout.tasks
        self._targets = _states(topology_id, component, layout, provider, conf)
        self._waiting = 0

    def put(self, key: Any, value: Any, task: int, tasks: int) -> None:
        """A key that task ``task`` of ``tasks`` has had. Raises ``TopologyError`` for one that belongs to no task, or to another
        one than had it: nobody knows where its tuples go then."""
        if tasks != self._tasks:
            bolt = self._component.instance
            grouped: Any = bolt.grouping_key(key) if isinstance(bolt, BaseStatefulBolt) else ()
            if grouped is None:
                return  # of a task that is no more
            if grouped is EVERY_TASK:
                for each in self._targets:
                    known = each.get(key)
                    each.put(key, value if known is None else max(known, value))
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
        """All of it is the state of checkpoint ``txid``."""
        for each in self._targets:
            each.prepare_commit(txid)
            each.commit(txid)

    def close(self) -> None:
        for each in self._targets:
            each.close()


def _move(
    topology_id: str,
    component: Component,
    record: CheckpointRecord,
    old: Layout,
    new: Layout,
    provider: StateProvider,
    conf: Mapping[str, Any],
) -> None:
    filling = Filling(topology_id, component, new, provider, conf)
    sources = _states(topology_id, component, old, provider, conf)
    try:
        for task, source in enumerate(sources):
            source.recover(record.txid, prepared=False, upto=record.last)
            for key, value in source.items():
                filling.put(key, value, task, old.tasks)
        filling.finish(record.txid)
    finally:
        filling.close()
        for each in sources:
            each.close()


def _states(
    topology_id: str, component: Component, layout: Layout, provider: StateProvider, conf: Mapping[str, Any]
) -> list[KeyValueState[Any, Any]]:
    names = [namespace_of(topology_id, component.id, layout.number, task) for task in range(layout.tasks)]
    return [_key_value(kept_state_of(provider, name, component.instance, conf, None)) for name in names]


def task_of_key(component: Component, key: Any, tasks: int) -> int | None:
    """Which task a key of the state belongs to: the one that its tuples go to. None when that cannot be told from the key."""
    groupings = [each.grouping for each in component.subscriptions]
    if all(isinstance(each, GlobalGrouping) for each in groupings):
        return 0
    if not all(isinstance(each, FieldsGrouping) for each in groupings):
        return None
    bolt = component.instance
    assert isinstance(bolt, BaseStatefulBolt)
    values = bolt.grouping_key(key)
    return FieldsGrouping.task_of(values, tasks) if values and values is not EVERY_TASK else None


def _key_value(state: State) -> KeyValueState[Any, Any]:
    if not isinstance(state, KeyValueState):
        raise ConfigError(f"{type(state).__name__} is no KeyValueState: the number of tasks of its bolt cannot change")
    return state
