"""Records that consumers may not read yet, because a kafka_txn of their producer is open: how many
there are, and a warning when they stay.

A consumer of committed records sees the end of the log only up to the first open kafka_txn. A
producer that hangs hides all that others write after it, until the broker aborts its kafka_txn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from framework.errors import RetryableError
from framework.observe.logs import get_logger
from spouts.kafka.cluster_metadata import KafkaMetadata, Offset, age_max_s

_log = get_logger()

#: A kafka_txn that is open for so long is reported once.
LONG_OPEN_S = 30.0


class OpenTransactions:
    """The known ends of logs behind open kafka_txns. Used from the planner's thread; ``records``
    from any."""

    def __init__(self) -> None:
        #: Where the logs end. Replaced, never changed.
        self.ends: Mapping[str, Offset] = {}
        #: Whether ``tell`` says nothing.
        self.is_silent = False
        self._looked_at = -math.inf
        self._open: dict[str, tuple[int, float, bool]] = {}  # stable offset, since when, whether it was reported

    def records(self, partition: str, stable: int) -> int:
        """The number of offsets after the last stable one."""
        end = self.ends.get(partition)
        return max(end.offset - stable, 0) if end is not None else 0

    def tell(self, partition: str, stable: int) -> None:
        """Say that records are behind the end that was just fixed, if there are any."""
        if not self.is_silent and (hidden := self.records(partition, stable)):
            _log.warning("source.hidden_records", partition=partition, stable_offset=stable, records=hidden)

    def look(self, metadata: KafkaMetadata, stable: Mapping[str, Offset], *, now: bool = False) -> None:
        """Look where the logs end, at most every few seconds. ``stable``: the last stable
        offsets."""
        now_s = time.monotonic()
        if not now and now_s - self._looked_at < age_max_s(len(stable)):
            return
        self._looked_at = now_s
        try:
            found = metadata.open_ends()
            if not found.items() <= self.ends.items():
                self.ends = {**self.ends, **found}
        except RetryableError:
            return  # whoever plans asks the same brokers, and says what is wrong
        open_now = {each: at.offset for each, at in stable.items() if self.records(each, at.offset)}
        before, self._open = self._open, {}
        for partition, offset in open_now.items():
            known = before.get(partition)
            since_s, reported = (known[1], known[2]) if known is not None and known[0] == offset else (now_s, False)
            if not reported and now_s - since_s >= LONG_OPEN_S:
                reported = True
                _log.warning(
                    "source.open_transaction",
                    partition=partition,
                    stable_offset=offset,
                    records=self.records(partition, offset),
                    open_s=round(now_s - since_s),
                )
            self._open[partition] = offset, since_s, reported
