"""The capability that tools look for, and states that lack it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError
from framework.inspect.sandbox import recounting
from framework.topology import (
    BaseTransactionalBolt,
    FencedState,
    Fields,
    Header,
    PartitionPlanner,
    Reach,
    SourceRanges,
    ValueType,
)
from framework.topology.inspectable import InspectableState, RecountedBolt, inspectable, rebuildable
from sinks import MapBackend, MemoryBackend, OpaqueMapState, StateCommitter


class PlainState(FencedState):
    """All that a sink must have for a topology to run."""

    value_type = ValueType.OPAQUE
    reach = Reach.PROCESS
    location = "plain state"

    def prepare(self, topology_id: str) -> Header:
        return Header(topology_id, "incarnation")

    def read_header(self) -> Header:
        return self.prepare("topology")

    def raise_header(self, expected: Header, new: Header) -> None: ...

    def sweep(self, header: Header) -> int:
        return 0

    def close(self) -> None: ...


class PlainBolt(BaseTransactionalBolt):
    def __init__(self, state: FencedState) -> None:
        self.state = state

    def execute(self, tup: Any) -> None: ...

    def finish_batch(self) -> None: ...


def test_a_state_without_the_capability_is_named_in_one_line(tmp_path: Path) -> None:
    for ask in (
        lambda: inspectable(PlainState(), purpose="be replayed"),
        lambda: rebuildable(PlainState()),
        lambda: recounting(PlainBolt(PlainState()), tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"^plain state cannot .*: it .*$") as refused:
            ask()
        assert "\n" not in str(refused.value)


def test_a_state_with_the_capability_becomes_a_scratch_copy_of_any_bolt(tmp_path: Path) -> None:
    state = OpaqueMapState(MemoryBackend("words"))
    state.bind(Fields(word=str), Fields(count=int))
    assert isinstance(inspectable(state, purpose="be read"), InspectableState)
    bolt = PlainBolt(state)
    assert not isinstance(bolt, RecountedBolt) and recounting(bolt, tmp_path) is bolt
    assert str(tmp_path) in state.location


def test_a_bolt_that_says_what_recomputes_it_is_asked() -> None:
    assert issubclass(StateCommitter, RecountedBolt)


def test_the_ports_have_no_method_of_a_tool() -> None:
    of_tools = {
        "become_scratch",
        "become_replay",
        "become_beside",
        "changes",
        "compare",
        "exchange",
        "reading",
        "remove",
    }
    assert not of_tools & set(dir(FencedState)) and len([each for each in vars(FencedState) if each[0] != "_"]) <= 16
    assert not {"recounting", "narrow"} & set(dir(BaseTransactionalBolt))
    of_tools = {"for_reading", "check_held", "at_one_moment", "as_of", "items_as_of", "beside", "exchange", "remove"}
    assert not of_tools & set(dir(MapBackend))
    assert not {"split", "stages", "peek", "joined", "beginning", "offsets", "takes_out"} & set(dir(PartitionPlanner))


def test_a_planner_that_knows_nothing_of_its_ranges_is_asked_all_the_same() -> None:
    ranges, whole = SourceRanges(), {"p": {"first": 0}}
    assert (ranges.split("p", whole["p"]), ranges.offsets(whole["p"]), ranges.takes_out("p")) == (None, None, False)
    assert list(ranges.stages(whole)) == [whole]
