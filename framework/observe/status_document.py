"""The status document of a topology, for ``ratchet list`` and ``status``, and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.observe.topology_health import problem_in, waits


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
    """Make the status document of a topology.

    * ``kind``: transactional, core or unknown.
    * ``state``: one word.
    * ``txid``: the last committed transaction; for a core topology the last checkpoint.
    * ``committed_at``: in seconds since 1970.
    * ``trouble``: what the topology waits for, the last failure, or why the status cannot be read.
    * ``drivers``: the live drivers, the leader first.
    * ``status``: published by the leader."""
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
    """Make the status document of a run in its own process. ``summary``: the status of the run."""
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
