"""The acker: seed 002's example step by step, the rotating map,
and random trees under random trouble.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from framework.acking import Acker, RotatingMap
from framework.errors import ConfigError


class Told:
    """An acker, and what it calls back."""

    def __init__(self, buckets: int = 3) -> None:
        self.completed: list[tuple[Any, Any]] = []
        self.failed: list[tuple[Any, Any]] = []
        self.acker: Acker[Any, Any] = Acker(
            on_complete=lambda root, task: self.completed.append((root, task)),
            on_fail=lambda root, task: self.failed.append((root, task)),
            buckets=buckets,
        )


# --- the map --------------------------------------------------------------------------------------


def test_put_resets_the_timeout_and_rotate_expires_the_oldest_bucket() -> None:
    dead: list[tuple[str, int]] = []
    pending: RotatingMap[str, int] = RotatingMap(3, on_expire=lambda key, value: dead.append((key, value)))
    pending.put("a", 1)
    assert pending.rotate() == {}
    pending.put("b", 2)
    assert pending.rotate() == {}
    pending.put("a", 3)
    assert (len(pending), list(pending)) == (2, ["a", "b"])
    assert pending.rotate() == {}
    assert pending.rotate() == {"b": 2}
    assert pending.rotate() == {"a": 3}
    assert dead == [("b", 2), ("a", 3)]
    assert (len(pending), pending.contains("a"), "a" in pending, pending.get("a")) == (0, False, False, None)


def test_get_does_not_reset_the_timeout_and_remove_calls_no_callback() -> None:
    dead: list[str] = []
    pending: RotatingMap[str, int] = RotatingMap(2, on_expire=lambda key, value: dead.append(key))
    pending.put("a", 1)
    pending.rotate()
    assert pending.get("a") == 1
    assert pending.remove("a") == 1
    assert pending.remove("a") is None
    pending.rotate()
    assert dead == []
    assert pending.get("a", 7) == 7


@pytest.mark.parametrize("buckets", [1, 0, -1, 2.0, True])
def test_a_map_needs_two_buckets(buckets: Any) -> None:
    with pytest.raises(ConfigError, match="needs 2 buckets or more, not"):
        RotatingMap(buckets)


def test_an_expiry_callback_may_put_its_key_back() -> None:
    """A spout does so when it emits again a tuple that has timed out."""
    pending: RotatingMap[str, int] = RotatingMap(2)
    pending._on_expire = lambda key, value: pending.put(key, value + 1)
    pending.put("a", 1)
    for _ in range(4):
        pending.rotate()
    assert pending.get("a") == 3


class RotatingMapMachine(RuleBasedStateMachine):
    """Compares the map with a plain model: key -> (value, age)."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: list[tuple[int, int]] = []
        self.map: RotatingMap[int, int] = RotatingMap(3, on_expire=lambda key, value: self.dead.append((key, value)))
        self.model: dict[int, tuple[int, int]] = {}

    @rule(key=st.integers(0, 5), value=st.integers())
    def put(self, key: int, value: int) -> None:
        self.map.put(key, value)
        self.model[key] = (value, 0)

    @rule(key=st.integers(0, 5))
    def remove(self, key: int) -> None:
        assert self.map.remove(key) == self.model.pop(key, (None, 0))[0]

    @rule()
    def rotate(self) -> None:
        self.dead.clear()
        self.map.rotate()
        gone = {key: value for key, (value, age) in self.model.items() if age == 2}
        assert Counter(self.dead) == Counter(gone.items())
        self.model = {key: (value, age + 1) for key, (value, age) in self.model.items() if age < 2}

    @invariant()
    def same(self) -> None:
        assert {key: self.map.get(key) for key in self.map} == {key: value for key, (value, _) in self.model.items()}
        assert len(self.map) == len(self.model)


TestRotatingMapMachine = RotatingMapMachine.TestCase


# --- the acker ------------------------------------------------------------------------------------


@pytest.mark.behaviour("4.3")
def test_the_example_of_two_spouts_two_bolts_and_two_ackers_step_by_step() -> None:
    """Seed 002, with its 4-bit ids."""
    stid1, stid2, tid1 = 0b1010, 0b1011, 0b1100
    first, second = Told(), Told()
    acker1, acker2 = first.acker, second.acker
    acker1.init(stid1, "sid1", stid1)
    acker2.init(stid2, "sid2", stid2)
    assert (acker1.value(stid1), acker2.value(stid2)) == (0b1010, 0b1011)
    # Bolt1 emits tid1, anchored to both.
    acker1.ack(stid1, tid1)
    acker2.ack(stid2, tid1)
    assert (acker1.value(stid1), acker2.value(stid2)) == (0b0110, 0b0111)
    # Bolt1 acks both of its inputs.
    acker1.ack(stid1, stid1)
    acker2.ack(stid2, stid2)
    assert (acker1.value(stid1), acker2.value(stid2)) == (0b1100, 0b1100)
    assert not first.completed and not second.completed
    # Bolt2 acks tid1.
    acker1.ack(stid1, tid1)
    acker2.ack(stid2, tid1)
    assert (first.completed, second.completed) == ([(stid1, "sid1")], [(stid2, "sid2")])
    assert (acker1.pending, acker2.pending, first.failed, second.failed) == (0, 0, [], [])


def test_a_tree_without_subscribers_completes_at_once() -> None:
    told = Told()
    told.acker.init("root", 1, 0)
    assert told.completed == [("root", 1)]


def test_a_fail_tells_the_spout_at_once_and_only_once() -> None:
    told = Told()
    told.acker.init("root", 1, 5)
    told.acker.fail("root")
    told.acker.fail("root")
    told.acker.ack("root", 5)
    for _ in range(4):
        told.acker.tick()
    assert (told.failed, told.completed) == ([("root", 1)], [])
    assert (told.acker.pending, told.acker.unknown) == (0, 1)


def test_a_fail_before_its_init_fails_the_tree_when_the_init_comes() -> None:
    told = Told()
    told.acker.fail("root")
    assert told.failed == []
    told.acker.init("root", 1, 5)
    assert told.failed == [("root", 1)]


def test_acks_before_their_init_complete_the_tree_when_the_init_comes() -> None:
    told = Told()
    told.acker.ack("root", 5 ^ 9)
    told.acker.ack("root", 9)
    assert told.completed == []
    told.acker.init("root", 1, 5)
    assert told.completed == [("root", 1)]


def test_a_double_ack_makes_the_tree_time_out() -> None:
    told = Told()
    told.acker.init("root", 1, 5 ^ 6)
    told.acker.ack("root", 5)
    told.acker.ack("root", 5)
    told.acker.ack("root", 6)
    for _ in range(3):
        told.acker.tick()
    assert (told.completed, told.failed, told.acker.expired) == ([], [("root", 1)], 1)


@pytest.mark.behaviour("4.5")
def test_a_tree_times_out_once_and_each_message_resets_its_timeout() -> None:
    told = Told()
    told.acker.init("root", 1, 5)
    for hear in (lambda: told.acker.ack("root", 0), lambda: told.acker.reset_timeout("root")):
        told.acker.tick()
        told.acker.tick()
        assert told.failed == []
        hear()
    told.acker.tick()
    told.acker.tick()
    assert told.failed == []
    told.acker.tick()
    assert told.failed == [("root", 1)]
    for _ in range(4):
        told.acker.tick()
    assert told.failed == [("root", 1)]
    told.acker.reset_timeout("root")
    assert told.acker.pending == 0


def test_late_messages_of_a_tree_notify_no_spout_and_expire() -> None:
    told = Told()
    for number in range(1_000):
        told.acker.ack(number, number + 1)
    assert told.acker.pending == 1_000
    for _ in range(3):
        told.acker.tick()
    assert (told.acker.pending, told.acker.unknown, told.completed, told.failed) == (0, 1_000, [], [])


@given(st.data())
def test_the_order_of_messages_makes_no_difference(data: st.DataObject) -> None:
    edges = data.draw(st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=20, unique=True))
    roots, inner = edges[:1], edges[1:]
    value = 0
    for edge in roots:
        value ^= edge
    messages: list[tuple[str, int]] = [("init", value), *(("ack", edge) for edge in roots)]
    messages += [("ack", edge) for edge in inner] * 2
    shuffled = data.draw(st.permutations(messages))
    told = Told()
    for number, (kind, each) in enumerate(shuffled):
        if kind == "init":
            told.acker.init("root", 1, each)
        else:
            told.acker.ack("root", each)
        if told.completed:
            assert number == len(shuffled) - 1 or _zero_by_then(shuffled[: number + 1])
            break
    assert told.completed == [("root", 1)]


def _zero_by_then(messages: list[tuple[str, int]]) -> bool:
    """Whether a prefix of the messages looks like a whole tree: it has the init,
    and every edge in it was acked.
    """
    total = 0
    for _, value in messages:
        total ^= value
    return total == 0 and any(kind == "init" for kind, _ in messages)


# --- random trees ---------------------------------------------------------------------------------


class Tree:
    """A random DAG below one root, as the messages that its tasks send.

    A task sends one message when it is done with a tuple: the tuple's edge, XORed with the edges of
    the tuples that it emitted.
    """

    def __init__(self, root: int, chance: random.Random) -> None:
        self.root = root
        self.first = self._edge(chance)
        self.acks: list[int] = []
        waiting = [self.first]
        size = chance.randrange(1, 12)
        while waiting:
            edge = waiting.pop(chance.randrange(len(waiting)))
            emitted = [self._edge(chance) for _ in range(chance.randrange(0, 3))] if size > 0 else []
            size -= len(emitted)
            value = edge
            for each in emitted:
                value ^= each
            self.acks.append(value)
            waiting += emitted

    @staticmethod
    def _edge(chance: random.Random) -> int:
        return chance.getrandbits(64) or 1


TREES = 4_000


@pytest.mark.parametrize("trouble", ["none", "lost", "doubled", "flipped", "failed"])
def test_random_trees_complete_fail_or_time_out_exactly_once(trouble: str, seed: int) -> None:
    """Messages of all trees come in random order.

    Whole trees complete and no others do. A tree with a lost, doubled or damaged message times out,
    and a failed one fails: each exactly once.
    """
    chance = random.Random(seed)
    told = Told(buckets=3)
    trees = [Tree(root, chance) for root in range(TREES)]
    hurt = set() if trouble == "none" else {tree.root for tree in trees if chance.random() < 0.3}
    messages: list[tuple[str, int, int]] = []
    for tree in trees:
        mine = [("init", tree.root, tree.first), *(("ack", tree.root, value) for value in tree.acks)]
        if tree.root in hurt:
            victim = chance.randrange(1, len(mine))
            if trouble == "lost":
                mine.pop(victim)
            elif trouble == "doubled":
                mine.append(mine[victim])
            elif trouble == "flipped":
                kind, root, value = mine[victim]
                mine[victim] = (kind, root, value ^ (1 << chance.randrange(64)))
            else:
                mine.append(("fail", tree.root, 0))
        messages += mine
    # Trees side by side, a few hundred at a time, in any order.
    order = sorted(range(len(messages)), key=lambda number: number + chance.uniform(0, 2_000))
    left = Counter(messages[number][1] for number in order)
    early = Counter[int]()
    for number in order:
        kind, root, value = messages[number]
        before = len(told.completed)
        if kind == "init":
            told.acker.init(root, root % 7, value)
        elif kind == "ack":
            told.acker.ack(root, value)
        else:
            told.acker.fail(root)
        left[root] -= 1
        if len(told.completed) > before and left[root] and trouble != "doubled":
            early[root] += 1
    for _ in range(3):
        told.acker.tick()
    completed, failed = Counter(root for root, _ in told.completed), Counter(root for root, _ in told.failed)
    assert all(task == root % 7 for root, task in told.completed + told.failed)
    whole = {tree.root for tree in trees} - hurt
    assert set(completed) >= whole
    assert all(count == 1 for count in (completed + failed).values())
    assert set(completed) | set(failed) == {tree.root for tree in trees}  # no tree is forgotten
    if trouble in ("lost", "flipped"):
        assert set(completed) == whole
    if trouble in ("none", "lost", "flipped"):
        assert not early
    if trouble == "doubled":
        assert set(completed) - whole <= hurt  # a tree may be whole before the doubled message comes
    assert told.acker.pending == 0
