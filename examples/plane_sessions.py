"""Sessions of planes: departures from New York at most a day apart belong to one session.

Departures come from Kafka, one record each. All departures of a plane are in one partition, in
order. For each plane, the bolt keeps the current session and a summary of the sessions that have
ended: exactly-once, on disk. At the end the state is read from outside, like
``ratchet state get examples.plane_sessions:topology N14228``.

It shows a stateful bolt. A pipeline has sessions by ``window(session("1 day"), on="at")``.

    python -m examples.plane_sessions [--local] [--flights N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka.admin import AdminClient, NewTopic

from framework.coordination import store_of
from framework.core.committed_state_reader import TopologyState
from framework.observe import configure_logging
from integration import EmbeddedServers
from ratchet import (
    BaseStatefulBolt,
    Config,
    CoreTopology,
    Fields,
    JsonCodec,
    KafkaSpout,
    KeyValueState,
    RichOutputCollector,
    TopologyBuilder,
    TopologyContext,
    Tuple,
    submit,
)
from ratchet.demo.flights_data import departures
from ratchet.demo.sending import send

TOPIC = "departures"
PARTITIONS = 4
GAP_S = 24 * 3600


class Sessions(NamedTuple):
    """The sessions of one plane. ``began``, ``latest``: the first and the latest departure of the
    current session, in seconds since 1970. ``flights``: its departures so far. ``ended``: the
    number of sessions that have ended. ``longest``: the most departures of one of these."""

    began: int
    latest: int
    flights: int
    ended: int = 0
    longest: int = 0

    def after(self, at: int) -> Sessions:
        """The sessions after one more departure."""
        if at - self.latest <= GAP_S:
            return self._replace(latest=max(self.latest, at), flights=self.flights + 1)
        return Sessions(at, at, 1, self.ended + 1, max(self.longest, self.flights))


class Sessionize(BaseStatefulBolt):
    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: RichOutputCollector
    ) -> None:
        self.collector = collector

    def init_state(self, state: KeyValueState[str, Sessions]) -> None:
        self.sessions = state

    def execute(self, tup: Tuple) -> None:
        plane, at = tup["plane"], tup["at"]
        known = self.sessions.get(plane)
        self.sessions.put(plane, known.after(at) if known is not None else Sessions(at, at, 1))
        self.collector.ack(tup)


def topology(app: Mapping[str, Any]) -> CoreTopology:
    """``app.kafka``: brokers."""
    spout = KafkaSpout([TOPIC], bootstrap_servers=app["app.kafka"], codec=JsonCodec(Fields(plane=str, at=int)))
    builder = TopologyBuilder("plane-sessions")
    builder.set_spout("departures", spout, 2)
    builder.set_bolt("sessions", Sessionize(), 2).fields_grouping("departures", Fields("plane"))
    return builder.build()


def settings_of(servers: EmbeddedServers, folder: Path) -> dict[str, Any]:
    return {
        "app.kafka": servers.bootstrap_servers,
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
        "topology.state.provider.config": {
            "path": str(folder / "state"),
            "valueClass": f"{Sessions.__module__}.{Sessions.__qualname__}",
        },
    }


def send_departures(bootstrap_servers: str, flights: Iterable[tuple[str, int]]) -> None:
    """Send all departures of a plane to one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, -1)])[TOPIC].result(30)
    records = (
        (json.dumps({"plane": plane, "at": at}), None, zlib.crc32(plane.encode()) % PARTITIONS) for plane, at in flights
    )
    send(bootstrap_servers, TOPIC, records)


def sessions(settings: Mapping[str, Any], executor: str = "spark") -> dict[str, Sessions]:
    """Run until all departures are in the state, and return the state."""
    config = Config.of(settings)
    with submit(topology(config.app), config, executor=executor) as run:
        run.wait_until_idle(600)
    store = store_of(config)
    try:
        with TopologyState(topology(config.app), config, store) as state:
            return dict(state.items("sessions"))
    finally:
        store.close()


def expected(flights: Iterable[tuple[str, int]]) -> dict[str, Sessions]:
    """The same result, computed without Ratchet."""
    found: dict[str, Sessions] = {}
    for plane, at in flights:
        found[plane] = found[plane].after(at) if plane in found else Sessions(at, at, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--local", action="store_true", help="in this process instead of on Spark")
    parser.add_argument("--flights", type=int, default=50_000)
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with (
        tempfile.TemporaryDirectory(prefix="ratchet-planes-") as made,
        EmbeddedServers(Path(made) / "servers") as servers,
    ):
        send_departures(servers.bootstrap_servers, islice(departures(), arguments.flights))
        found = sessions(settings_of(servers, Path(made)), "local" if arguments.local else "spark")
    if found != expected(islice(departures(), arguments.flights)):
        raise SystemExit("the sessions are wrong")
    for plane, each in sorted(found.items(), key=lambda each: -each[1].longest)[:10]:
        print(f"{plane}: {each.ended + 1} sessions, the longest with {max(each.longest, each.flights)} departures")


if __name__ == "__main__":
    # The configuration names the class of the values as a member of this module, not of __main__.
    from examples import plane_sessions

    plane_sessions.main()
