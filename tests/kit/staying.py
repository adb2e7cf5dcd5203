"""Small batches in the Spark task that stays, each committed in one step of its store, under many
kills; and the oracle.

``python -m tests.kit.staying --kills 50`` kills the task's worker and the driver, and with
``--workers 2`` an executor of a cluster too, and prints what came of it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.transactions import ZooKeeperStore, committed_txid
from integration import EmbeddedServers
from integration.folder_permissions import open_folder
from sinks import Count, OpaqueMapState, StateCommitter, Sum
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.kills import TOPIC, Kills, kill_often
from tests.kit.stores import backend, server_of

KEYS = 40
TOPOLOGY = "staying"
#: What is killed with Spark in the driver, and on a cluster, in these shares.
LOCAL, CLUSTER = ("working", "driver", "working"), ("working", "executor", "driver", "working", "executor")


def record(number: int) -> bytes:
    return json.dumps({"key": f"k{number * 7 % KEYS}", "n": number}).encode()


def topology(app: Mapping[str, Any]) -> Topology:
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=JsonCodec(Fields(key=str, n=int))
    )
    builder = TransactionalTopologyBuilder(TOPOLOGY, "records", spout, 2)
    sums = StateCommitter(OpaqueMapState(backend(app, "sums")), ["key"], {"records": Count(), "total": Sum("n")})
    builder.set_bolt("sums", sums).global_grouping("records")
    return builder.build()


@dataclass
class Outcome:
    """What was killed, and key -> (number of records, their sum): as sent, and as the state holds
    it."""

    seen: Kills
    expected: dict[str, tuple[int, int]]
    found: dict[str, tuple[int, int]]
    transactions: int

    def summary(self) -> dict[str, Any]:
        return {**self.seen.summary(), "transactions": self.transactions, "exact": self.found == self.expected}


def order_of(kills: int, workers: int, chance: random.Random) -> list[str]:
    """What is killed, one after the other. ``workers``: of the Spark cluster; 0: there is none."""
    kinds = CLUSTER if workers else LOCAL
    order = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(order)
    return order


def run(
    folder: Path,
    order: list[str],
    chance: random.Random,
    *,
    store: str,
    address: str,
    workers: int,
    minutes_max: float = math.inf,
) -> Outcome:
    """Kill what ``order`` says, one after the other, while records keep coming."""
    with (
        EmbeddedServers(folder / "servers") as servers,
        closing(ZooKeeperStore(servers.zookeeper, "/ratchet")) as coordination,
    ):
        app = {"app.store": store, "app.address": address, "app.kafka": servers.bootstrap_servers}
        seen = kill_often(
            folder,
            "tests.kit.staying:topology",
            {
                **app,
                "transactional.zookeeper.servers": servers.zookeeper,
                "transactional.zookeeper.session.timeout.secs": 2,
                "topology.max.spout.pending": 1,
                "topology.max.attempts": 1_000,
            },
            order,
            lambda: committed_txid(coordination, TOPOLOGY),
            servers,
            per_second=200,
            record=record,
            workers=workers,
            minutes_max=minutes_max,
            chance=chance,
            rises_by=2,  # the transaction whose task is over already does not count
        )
        transactions = committed_txid(coordination, TOPOLOGY)
        state = topology({**app, "app.topic": TOPIC}).states[0]
        assert isinstance(state, OpaqueMapState)
        found: dict[str, Any] = {key[0]: row.value for key, row in state.backend.scan() if row.value is not None}
        state.close()
    expected: dict[str, tuple[int, int]] = {}
    for number in range(seen.messages):
        key = f"k{number * 7 % KEYS}"
        records, total = expected.get(key, (0, 0))
        expected[key] = (records + 1, total + number)
    return Outcome(seen, expected, found, transactions)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill for so long, at most")
    parser.add_argument("--workers", type=int, default=0, help="of a Spark cluster; 0: Spark is in the driver")
    parser.add_argument("--store", choices=["sqlite", "postgres", "redis"], default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with open_folder() as folder, server_of(arguments.store, folder) as (address, _):
        outcome = run(
            folder,
            order_of(arguments.kills, arguments.workers, chance),
            chance,
            store=arguments.store,
            address=address,
            workers=arguments.workers,
            minutes_max=arguments.minutes,
        )
    print(json.dumps(outcome.summary()))
    return 0 if outcome.found == outcome.expected else 1


if __name__ == "__main__":
    sys.exit(main())
