"""The topics that a topology writes, which its spout must not read, and the topics that it reads or
uses itself, to which no row is routed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WrittenTopic:
    """A topic that a bolt writes. ``holds``: its content: "records", "dead letters" or "markers".
    ``settings``: of the writing client, for a spout that understands them."""

    topic: str
    holds: str
    settings: Any = field(repr=False)
    component_id: str = ""

    @property
    def is_internal(self) -> bool:
        """Whether only the topology itself may write to the topic."""
        return self.holds != "records"


@dataclass(frozen=True, slots=True)
class ReadTopics:
    """The topics that a spout reads: ``topics``, or those whose whole names match ``pattern``.
    ``settings``: of the reading client, for a sink that understands them."""

    topics: tuple[str, ...]
    pattern: str | None
    settings: Any = field(repr=False)

    def include(self, topic: str) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics
