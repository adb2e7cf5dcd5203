"""The word count of ``benchmarks.core`` in Bytewax, item by item, with recovery (at least once).

Run by ``python -m benchmarks.core --peers bytewax``, in a virtual environment of its own. Prints
one line of JSON. The clock runs from the first message to the end of the topic. Arguments:
bootstrap servers, topic, number of messages.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op  # type: ignore[import-not-found]
from bytewax.connectors.kafka import KafkaSource  # type: ignore[import-not-found]
from bytewax.dataflow import Dataflow  # type: ignore[import-not-found]
from bytewax.outputs import DynamicSink, StatelessSinkPartition  # type: ignore[import-not-found]
from bytewax.recovery import RecoveryConfig, init_db_dir  # type: ignore[import-not-found]
from bytewax.testing import run_main  # type: ignore[import-not-found]

BATCH = 10_000
began: list[tuple[float, float]] = []
counted = [0]


class Nowhere(StatelessSinkPartition):  # type: ignore[misc]
    def write_batch(self, items: list[Any]) -> None:
        counted[0] += len(items)


class NowhereSink(DynamicSink):  # type: ignore[misc]
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Nowhere:
        return Nowhere()


def words(message: Any) -> list[str]:
    if not began:
        began.append((time.monotonic(), time.process_time()))
    return message.value.decode().split()  # type: ignore[no-any-return]


def counting(count: int | None, _: str) -> tuple[int, int]:
    count = (count or 0) + 1
    return count, count


def main() -> int:
    servers, topic, messages = sys.argv[1], sys.argv[2], int(sys.argv[3])
    flow = Dataflow("words")
    lines = op.input("lines", flow, KafkaSource([servers], [topic], tail=False, batch_size=BATCH))
    split = op.flat_map("split", lines, words)
    keyed = op.key_on("key", split, lambda word: word)
    op.output("nowhere", op.stateful_map("count", keyed, counting), NowhereSink())
    with tempfile.TemporaryDirectory() as folder:
        init_db_dir(Path(folder), 1)
        run_main(flow, epoch_interval=timedelta(seconds=5), recovery_config=RecoveryConfig(folder))
    seconds, cpu_s = time.monotonic() - began[0][0], time.process_time() - began[0][1]
    figures = {
        "messages_per_s": round(messages / seconds),
        "cpu_us_per_message": round(cpu_s / messages * 1e6, 1),
        "words": counted[0],
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
