"""A spout's pending tuples in runs do what a ``RotatingMap`` of single tuples does, on random
rounds.
"""

from __future__ import annotations

import random

import pyarrow as pa

from framework.acking import RotatingMap
from framework.acking.ack_reports import Roots
from framework.core.spout_pending import Emitted, EmittedRows, Pending, Told
from tests.kit.targets import Often

BUCKETS = 3


def told_of(told: Told) -> dict[int, Emitted]:
    return dict(zip(range(told.first, told.first + told.size), told.each(), strict=True))


def test_random_rounds_leave_the_same_pending_and_tell_the_same(seed: int, often: Often) -> None:
    chance = random.Random(seed)
    settled = expired = 0
    for _ in range(often(15, 60)):
        runs, single = Pending(BUCKETS), RotatingMap[int, Emitted](BUCKETS)
        following = chance.randrange(1 << 40)
        for _ in range(chance.randrange(5, 40)):
            rotates = chance.random() < 0.4
            if rotates:
                runs.age()
                single.age()
            pool = [*range(following - 60, following + 5)]
            roots = [root for root in pool if chance.random() < chance.choice([0.02, 0.3, 1.0])]
            found: dict[int, Emitted] = {}
            ids: list[object] = []
            for told in runs.settle(Roots.of(roots)):
                assert not found.keys() & told_of(told).keys()
                found.update(told_of(told))
                ids += told.message_ids()
                assert abs(told.waited_s(10.0) - sum(10.0 - each.since for each in told.each())) < 1e-6
            gone = {root: entry for root in roots if (entry := single.remove(root)) is not None}
            assert found == gone
            assert sorted(map(str, ids)) == sorted(str(e.message_id) for e in gone.values() if e.message_id is not None)
            settled += len(gone)
            reset = [root for root in pool if chance.random() < 0.1]
            runs.touch(Roots.of(reset))
            for root in reset:
                entry = single.get(root)
                if entry is not None:
                    single.put(root, entry)
            if rotates:
                late = {root: entry for told in runs.expire() for root, entry in told_of(told).items()}
                assert late == single.expire()
                expired += len(late)
            for _ in range(chance.randrange(4)):
                following += chance.choice([0, 0, 7])  # a new instance of the task leaves a gap
                if chance.random() < 0.5:
                    emitted = Emitted(chance.choice([None, following]), 1.0, (following,), "default", None)
                    runs.put(following, emitted)
                    single.put(following, emitted)
                    following += 1
                else:
                    values = list(range(following, following + chance.randrange(1, 20)))
                    batch = pa.record_batch([pa.array(values)], ["n"])
                    rows = EmittedRows(chance.choice([None, values]), 2.0, batch, "default", len(values))
                    runs.put_rows(following, rows)
                    for at, root in enumerate(values):
                        single.put(root, rows[at])
                        assert rows[at].values == (root,)
                    following += len(values)
            if chance.random() < 0.05:
                runs.touch_all()
                for root in list(single):
                    single.put(root, single.get(root))  # type: ignore[arg-type]
            assert len(runs) == len(single)
            assert list(runs.roots()) == sorted(single)
    assert settled > 500
    assert expired > 100
