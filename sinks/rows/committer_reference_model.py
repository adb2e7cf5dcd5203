"""A committer that ``verify``, ``explain`` and ``replay`` put in the place of another one, in a
copy of a topology. It computes the same rows in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.topology import ArrowBolt, Committer, OutputCollector, TopologyContext, TransactionAttempt
from sinks.rows.rows_as_of import Key


class ReferenceCommitter(ArrowBolt, Committer):
    """Implement ``execute_arrow`` and ``finish_batch``. ``_only``: the key to which ``explain``
    narrows it; None: every key. ``_attempt``: that of the batch."""

    deterministic = True
    commits_on_driver = True
    takes_batches_whole = True  # the changes of a batch are checked before the first is taken

    def __init__(self) -> None:
        self._only: Key | None = None
        self._attempt: TransactionAttempt | None = None

    def narrow(self, key: Key) -> None:
        self._only = key

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._attempt = batch_id
