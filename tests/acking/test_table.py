"""The trees of an acker as arrays: decided as the acker decides tree by tree, on random rounds."""

from __future__ import annotations

import random

import numpy as np

from framework.acking import Acker
from framework.acking.ack_reports import Ids, fold, root_of
from framework.acking.table import TreeTable

BUCKETS = 3


class TreeByTree:
    """The same rounds, applied to an ``Acker`` one message after the other."""

    def __init__(self) -> None:
        self.completed: set[int] = set()
        self.failed: set[int] = set()
        self.expired: set[int] = set()
        self.acker: Acker[int, int] = Acker(
            on_complete=lambda root, _: self.completed.add(root),
            on_fail=lambda root, _: self.failed.add(root),
            buckets=BUCKETS,
            on_expire=lambda root, _: self.expired.add(root),
        )

    def apply(self, born: list[int], values: dict[int, int], failed: list[int]) -> tuple[set[int], set[int]]:
        self.completed, self.failed = set(), set()
        for root in failed:
            self.acker.fail(root)
        left = {root: value for root, value in values.items() if root not in failed}
        for root in dict.fromkeys(born):
            self.acker.init(root, 1, left.pop(root, 0))
        for root, value in left.items():
            self.acker.ack(root, value)
        return self.completed, self.failed

    def tick(self, *, half: str) -> set[int]:
        self.expired = set()
        if half == "age":
            self.acker.age()
        else:
            self.acker.expire()
        return self.expired


def ids(roots: list[int]) -> Ids:
    return np.array(roots, np.uint64)


def test_random_rounds_are_decided_as_by_an_acker(seed: int) -> None:
    chance = random.Random(seed)
    decided = 0
    for _ in range(60):
        table, trees = TreeTable(BUCKETS), TreeByTree()
        pool = [root_of(task, number) for task in (0, 3) for number in range(chance.choice([3, 12]))]
        unborn = set(pool)  # a root is born once
        open_edges: dict[int, int] = {}
        for _ in range(chance.randrange(5, 40)):
            rotates = chance.random() < 0.4
            if rotates:
                table.age()
                trees.tick(half="age")
            born = [root for root in pool if root in unborn and chance.random() < 0.2]
            unborn.difference_update(born)
            failed = [root for root in pool if chance.random() < 0.05]
            values: dict[int, int] = {}
            for root in chance.sample(pool, chance.randrange(len(pool))):
                value = chance.choice([0, open_edges.get(root, 0), chance.getrandbits(64)])
                open_edges[root] = open_edges.get(root, 0) ^ value
                values[root] = value
            found = table.apply(ids(born), ids(list(values)), ids(list(values.values())), ids(failed))
            expected = trees.apply(born, values, failed)
            assert (set(found.completed.tolist()), set(found.failed.tolist())) == expected
            decided += len(found.completed) + len(found.failed)
            reset = [root for root in pool if chance.random() < 0.1]
            table.reset(ids(reset))
            for root in reset:
                trees.acker.reset_timeout(root)
            if rotates:
                expired = table.expire().tolist()
                assert set(expired) == trees.tick(half="expire")
                decided += len(expired)
            assert (table.pending, table.trees) == (trees.acker.pending, trees.acker.trees)
            assert (table.expired, table.unknown) == (trees.acker.expired, trees.acker.unknown)
            assert [table.value(root) for root in pool] == [trees.acker.value(root) for root in pool]
    assert decided > 500


def test_roots_are_folded_alike_wherever_they_lie(seed: int) -> None:
    """Dense roots, roots of several spout tasks, and roots far apart go different ways."""
    chance = random.Random(seed)
    for _ in range(200):
        tasks = chance.choice([[0], [5], [0, 1, 4], [2, 4_000]])
        width = chance.choice([1, 20, 1 << 40])
        roots = [root_of(chance.choice(tasks), chance.randrange(width)) for _ in range(chance.randrange(60))]
        values = [chance.getrandbits(64) for _ in roots]
        expected: dict[int, int] = {}
        for root, value in zip(roots, values, strict=True):
            expected[root] = expected.get(root, 0) ^ value
        found, folded = fold(ids(roots), ids(values))
        assert found.tolist() == sorted(expected)
        assert dict(zip(found.tolist(), folded.tolist(), strict=True)) == expected
