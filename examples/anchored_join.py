"""Two streams joined in a bolt that holds tuples and anchors its output to both inputs.

Impressions and clicks of advertisements come from two spouts, in any order. ``JoinById`` keeps the
first half until its counterpart arrives. Then it emits one tuple that is anchored to both halves,
and acks them. Until then the half waits in the joiner, unacked. If the joiner dies, or the other
half does not arrive in time, the spout emits the half again. ``Billing`` fails each pair of one
advertisement the first time: both spouts are told, and both halves come again.

    python -m examples.anchored_join [--local]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from framework.observe import configure_logging
from ratchet import (
    BaseRichBolt,
    BaseRichSpout,
    CoreTopology,
    Fields,
    OutputFieldsDeclarer,
    RichOutputCollector,
    SpoutOutputCollector,
    TopologyBuilder,
    TopologyContext,
    Tuple,
    submit,
)

IMPRESSIONS = [[number, f"ad-{number % 3}"] for number in range(12)]
CLICKS = [[number, 5 * number] for number in reversed(range(12))]  # (id, seconds until the click)
UNLUCKY = "ad-1"


class Events(BaseRichSpout):
    """Emits each event until it is acked."""

    def __init__(self, events: list[list[Any]], fields: Fields) -> None:
        self.events, self.fields = events, fields

    def open(self, conf: Mapping[str, Any], context: TopologyContext, collector: SpoutOutputCollector) -> None:
        self.collector = collector
        self.waiting = list(range(len(self.events)))

    def next_tuple(self) -> None:
        if self.waiting:
            number = self.waiting.pop(0)
            self.collector.emit(self.events[number], message_id=number)

    def fail(self, message_id: int) -> None:
        self.waiting.append(message_id)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self.fields)


class JoinById(BaseRichBolt):
    """Holds a tuple until the one with the same id arrives from the other stream."""

    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: RichOutputCollector
    ) -> None:
        self.collector = collector
        self.halves: dict[int, Tuple] = {}

    def execute(self, tup: Tuple) -> None:
        other = self.halves.get(tup["id"])
        if other is None or other.source_component == tup.source_component:
            self.halves[tup["id"]] = tup  # the first half, or the same half again after it failed
            return
        del self.halves[tup["id"]]
        impression, click = (tup, other) if tup.source_component == "impressions" else (other, tup)
        self.collector.emit([tup["id"], impression["ad"], click["seconds"]], anchors=[impression, click])
        self.collector.ack(impression)
        self.collector.ack(click)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(id=int, ad=str, seconds=int))


class Billing(BaseRichBolt):
    """Prints each pair. Fails each unlucky pair once."""

    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: RichOutputCollector
    ) -> None:
        self.collector = collector
        self.failed: set[int] = set()

    def execute(self, tup: Tuple) -> None:
        if tup["ad"] == UNLUCKY and tup["id"] not in self.failed:
            self.failed.add(tup["id"])
            self.collector.fail(tup)
            return
        print(f"click {tup['id']:2} on {tup['ad']} after {tup['seconds']:2} s", flush=True)
        self.collector.ack(tup)


def topology() -> CoreTopology:
    builder = TopologyBuilder("joined-streams")
    builder.set_spout("impressions", Events(IMPRESSIONS, Fields(id=int, ad=str)))
    builder.set_spout("clicks", Events(CLICKS, Fields(id=int, seconds=int)))
    join = builder.set_bolt("join", JoinById(), 2)
    join.fields_grouping("impressions", Fields("id")).fields_grouping("clicks", Fields("id"))
    builder.set_bolt("billing", Billing()).global_grouping("join")
    return builder.build()


def run(executor: str) -> dict[str, tuple[int, int]]:
    """Component -> (tuples completed, tuples failed)."""
    with submit(topology(), {}, executor=executor) as running:
        running.wait_until_idle(60)
        return {name: (each.completed, each.failed) for name, each in running.status().components.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--local", action="store_true", help="in this process instead of on Spark")
    configure_logging(level="warning")
    for name, (completed, failed) in run("local" if parser.parse_args().local else "spark").items():
        print(f"{name}: {completed} completed, {failed} failed")


if __name__ == "__main__":
    main()
