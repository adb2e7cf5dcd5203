"""One document says where a topology stands, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

from framework.inspect.topologies import TopologyOverview
from framework.observe.status_document import run_document


def of_run(**summary: Any) -> dict[str, Any]:
    return run_document(
        "words", "transactional", phase="running", txid=3, committed_at=1e9, drivers=[], summary=summary
    )


@pytest.mark.parametrize(
    ("summary", "state", "trouble"),
    [
        ({}, "running", None),
        ({"last_error": "no such table"}, "running", "no such table"),
        ({"repeating": "count[0]: no such row", "last_error": "no such table"}, "waiting", "count[0]: no such row"),
        ({"waiting_for": "the broker"}, "waiting", "the broker"),
    ],
)
def test_a_run_waits_for_what_is_tried_again(summary: dict[str, str], state: str, trouble: str | None) -> None:
    found = of_run(**summary)
    assert (found["state"], found["trouble"], found["status"]) == (state, trouble, summary)


def test_a_topology_that_has_stopped_has_the_keys_of_one_that_runs() -> None:
    stopped = TopologyOverview("words", kind="transactional", drivers=[], led=False, txid=3, last=None)
    assert list(stopped.document()) == list(of_run())
    assert (stopped.document()["state"], stopped.document()["status"]) == ("stopped", None)
