"""Windows by the numbers of tuples, which fire again for what comes late; and a bolt that keeps
what each has fired. All that is kept, late and open together is what came, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from framework import BaseStatefulBolt, Fields, Tuple
from framework.state import BaseWindowedBolt, TimeWindow, Window


class Spans(BaseWindowedBolt):
    """How many of each word are in ``span`` numbers. ``lag``, ``lateness``: in numbers, too."""

    def __init__(self, span: int, lag: int, lateness: int, idle_s: float | None = None) -> None:
        windows = TimeWindow(span, "number", lag_s=lag, lateness_s=lateness, idle_s=idle_s)
        super().__init__(windows, key=["word"], late=Fields(word=str, number=int))

    def execute_window(self, window: Window, collector: Any) -> None:
        collector.emit([*window.key, int(window.start), window.firing, len(window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(word=str, start=int, firing=int, count=int))


class Fired(NamedTuple):
    """What is known of a window.

    ``count``: tuples in its last firing. ``wrong``: firings that could not follow the one before.
    """

    firings: int = 0
    count: int = 0
    late: int = 0
    wrong: int = 0

    @property
    def tuples(self) -> int:
        return self.count + self.late


class KeepFired(BaseStatefulBolt):
    """Takes both streams of ``Spans``. Its state: (word, start) -> the values of a ``Fired``."""

    def __init__(self, span: int) -> None:
        self.span = span

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.fired = state

    def execute(self, tup: Tuple) -> None:
        late = tup.source_stream == "late"
        key = tup["word"], tup["number"] // self.span * self.span if late else tup["start"]
        known = Fired(*self.fired.get(key, ()))
        if late:
            now = known._replace(late=known.late + 1)
        else:
            wrong = tup["firing"] != known.firings or (known.firings > 0 and tup["count"] != known.count + 1)
            now = known._replace(firings=tup["firing"] + 1, count=tup["count"], wrong=known.wrong + wrong)
        self.fired.put(key, tuple(now))
        self.collector.ack(tup)

    def grouping_key(self, key: Any) -> Sequence[Any]:
        return [key[0]]
