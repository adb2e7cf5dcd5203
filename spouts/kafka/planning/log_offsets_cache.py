"""Where the logs of a source begin and end, as far as the planner has seen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from spouts.kafka.cluster_metadata import METADATA_AGE_MAX_S, KafkaMetadata, Offset


class LogOffsets:
    """``ends``: the last stable offsets. Other threads read ``ends`` and ``beginnings``: both are
    replaced, never changed."""

    def __init__(self, metadata: KafkaMetadata) -> None:
        self._metadata = metadata
        self.ends: Mapping[str, Offset] = {}
        self.beginnings: Mapping[str, int] = {}
        self._looked_at = -math.inf

    def see_ends(self, ends: Mapping[str, Offset]) -> None:
        if not ends.items() <= self.ends.items():
            self.ends = {**self.ends, **ends}

    def see_beginning(self, partition: str, offset: int) -> None:
        self.beginnings = {**self.beginnings, partition: offset}

    def look_for_beginnings(self, partitions: Sequence[str], *, now: bool) -> None:
        """Look up where these logs begin. Retention moves this forward, so an older answer is a
        lower bound."""
        if partitions and (now or time.monotonic() - self._looked_at > METADATA_AGE_MAX_S):
            found = self._metadata.beginnings(partitions, patient=False)
            self.beginnings = {**self.beginnings, **{each: at.offset for each, at in found.items()}}
            self._looked_at = time.monotonic()
