"""The document that says where a topology stands, for ``ratchet list`` and ``status``, and for the
page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.observe.health import problem_in, waits


def status_document(
    topology_id: str,
    kind: str,
    *,
    state: str,
    txid: int | None,
    committed_at: float | None,
    trouble: str | None,
    drivers: Sequence[Mapping[str, Any]],
    status: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """``kind``: transactional, core or unknown. ``state``: one word. ``txid``: the last committed
    transaction, of a core topology the last checkpoint. ``committed_at``: in seconds since 1970.
    ``trouble``: what it waits for, what failed last, or why it cannot be read. ``drivers``: those
    that live, the leader first. ``status``: what the leader tells of itself."""
    return {
        "topology": topology_id,
        "kind": kind,
        "state": state,
        "txid": txid,
        "committed_at": committed_at,
        "trouble": trouble,
        "drivers": list(drivers),
        "status": status,
    }


def run_document(
    topology_id: str,
    kind: str,
    *,
    phase: str,
    txid: int | None,
    committed_at: float | None,
    drivers: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of a run, made in its own process. ``summary``: the status of the run."""
    return status_document(
        topology_id,
        kind,
        state="waiting" if waits([summary]) else phase,
        txid=txid,
        committed_at=committed_at,
        trouble=problem_in([summary]),
        drivers=drivers,
        status=summary,
    )
