"""The driver's side of a commit: which headers are accepted at a start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from framework import Fields
from framework.errors import ConfigError
from framework.topology import Header, OpenCommit
from framework.transactions.commit import CommitPhase
from sinks import MemoryBackend, OpaqueMapState, common_txid

NO_EXECUTOR: Any = None


def state() -> OpaqueMapState:
    made = OpaqueMapState(MemoryBackend())
    made.bind(Fields(word=str), Fields(n=int))
    return made


def test_a_state_that_joins_is_done_with_the_last_committed_txid() -> None:
    old, new = state(), state()
    header = old.prepare("topology")
    old.raise_header(header, replace(header, epoch=1, open=OpenCommit(4, 1, "digest"), done=4))
    opened = CommitPhase("topology", [old, new], NO_EXECUTOR, 2).open(5, {5: "next"}, joining=[new.location])
    assert not opened
    assert (new.read_header().done, new.read_header().open) == (4, None)
    assert common_txid([old, new]) == 4


@pytest.mark.parametrize(
    ("opened", "match"),
    [
        (None, "joined after transaction 5, and ZooKeeper says that 5 is next: its state is older"),
        (OpenCommit(4, 1, "digest"), "is done with transaction 5, for which it was never opened"),
    ],
    ids=["never opened", "opened for another"],
)
def test_a_state_that_is_done_with_a_txid_it_was_not_opened_for_stops_the_start(
    opened: OpenCommit | None, match: str
) -> None:
    """C2: ``done`` may be ``currtx`` only if ``open`` is, too."""
    made = state()
    header = made.prepare("topology")
    made.raise_header(header, Header("topology", header.incarnation, epoch=1, open=opened, done=5))
    with pytest.raises(ConfigError, match=match):
        CommitPhase("topology", [made], NO_EXECUTOR, 2).open(5, {5: "digest"})
