"""Topics that a topology writes, so that its spout does not read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WrittenTopic:
    """A topic that a bolt writes. ``holds``: what, for a message: "records", "dead letters".
    ``settings``: those of the client that writes, for the spout that understands them."""

    topic: str
    holds: str
    settings: Any = field(repr=False)
    component_id: str = ""
