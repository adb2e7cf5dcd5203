"""Records with any headers, from a Kafka spout through codecs to ``KafkaSink``.

``python -m tests.kit.headers_fuzz`` does it for longer.
"""

from __future__ import annotations

import collections

import pytest

from integration import EmbeddedServers
from tests.kit.fuzzing import Counts
from tests.kit.headers_fuzz import fuzz
from tests.kit.targets import Often

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("2.9")]


def test_records_with_any_headers_arrive_once_as_rows_or_dead_letters(
    servers: EmbeddedServers, seed: int, often: Often
) -> None:
    counts: Counts = collections.Counter()
    runs = often(1, 4)
    for each in range(runs):
        counts += fuzz(servers.bootstrap_servers, seed + each)
    assert min(counts["written"], counts["refused by a codec"]) > runs, counts
