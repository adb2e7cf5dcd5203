"""The contract suite of state providers: the behaviour that every provider must have. Needs pytest.

::

    class TestMyProvider(StateProviderContract):
        def provider(self):
            return MyProvider()

        def conf(self):
            return {"topology.state.provider.config": {"host": "localhost"}}

Each test uses a namespace of its own. ``reopened`` stands for another process: by default it
makes a new provider.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from framework.errors import BadRecordError, CorruptStateError, InvariantViolation
from framework.topology.stateful import KeyValueState, StateProvider

#: One of each kind of key and of value that a state must accept.
AWKWARD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    "",
    "naïve ☃",
    b"\x00\xff",
    (),
    ("a", 1, None),
    (("nested",), b"x"),
    decimal.Decimal("1.10"),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 12, 30, 0, 5),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    datetime.time(1, 2, 3),
    datetime.timedelta(days=-1, microseconds=7),
    frozenset({1, "b"}),
    "long " * 500,
)


class StateProviderContract:
    """Subclass it and write ``provider`` and, if needed, ``conf`` and ``begin``."""

    def provider(self) -> StateProvider:
        raise NotImplementedError

    def conf(self) -> Mapping[str, Any]:
        return {}

    def reopened(self, provider: StateProvider) -> StateProvider:
        """The provider as seen by another process; the same object if it is not durable."""
        if not provider.durable:
            return provider
        provider.close()
        return self.provider()

    def begin(self, request: pytest.FixtureRequest) -> None:
        """Called before each test. Get the servers that the provider needs by
        ``request.getfixturevalue``.
        """

    @pytest.fixture(autouse=True)
    def _made(self, request: pytest.FixtureRequest) -> None:
        self.begin(request)
        self.namespace = f"contract/{uuid.uuid4().hex}/1/0"
        self.made = self.provider()
        self.made.check_before_start(self.conf())

    def state(self, task: int = 0) -> KeyValueState[Any, Any]:
        found = self.made.new_state(f"{self.namespace[:-1]}{task}", self.conf(), None)
        assert isinstance(found, KeyValueState)
        return found

    def again(self) -> KeyValueState[Any, Any]:
        """The state as seen by another process."""
        self.made = self.reopened(self.made)
        return self.state()

    def checkpoint(self, state: KeyValueState[Any, Any], txid: int, values: Mapping[Any, Any]) -> None:
        for key, value in values.items():
            state.put(key, value)
        state.prepare_commit(txid)
        state.commit(txid)

    # --- a mapping --------------------------------------------------------------------------------

    def test_a_new_state_is_empty(self) -> None:
        assert not self.made.exists(self.namespace, self.conf())
        state = self.state()
        assert state.txid == 0
        assert list(state.items()) == []
        assert state.get("a") is None
        assert state.get("a", 7) == 7
        assert "a" not in state

    def test_what_was_put_is_got_and_what_was_deleted_is_not(self) -> None:
        state = self.state()
        state.put("a", 1)
        state.put("b", None)
        state.put("a", 2)
        state.delete("c")
        assert (state.get("a"), "b" in state, state.get("b", 5)) == (2, True, None)
        state.delete("a")
        assert "a" not in state
        assert state.multi_get(["a", "b", "c"]) == [None, None, None]
        assert dict(state.items()) == {"b": None}

    def test_its_size_is_that_of_the_last_commit(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1, "b": 2, "c": 3})
        size = state.size
        if size is None:  # the state does not know its size
            return
        assert (size.keys, size.changed) == (3, 3)
        state.delete("a")
        self.checkpoint(state, 2, {"b": 20})
        later = state.size
        assert later is not None and (later.keys, later.changed) == (2, 2)
        assert 0 < later.changed_bytes < size.changed_bytes
        again = self.again().size
        assert again is not None and again.keys == 2

    def test_every_kind_of_key_and_value_comes_back_as_it_was(self) -> None:
        self.checkpoint(self.state(), 1, {("key", each): each for each in AWKWARD})
        state = self.again()
        found = dict(state.items())
        for each in AWKWARD:
            got = state.get(("key", each))
            assert (got, type(got)) == (each, type(each))
            assert type(found[("key", each)]) is type(each)
        assert len(found) == len({("key", each) for each in AWKWARD})
        self.checkpoint(state, 2, {"list": [1, (2,)], "dict": {"a": [1], 2: {3}}, "set": {1, 2}})
        assert self.again().multi_get(["list", "dict", "set"]) == [[1, (2,)], {"a": [1], 2: {3}}, {1, 2}]

    def test_keys_that_differ_in_type_are_different_keys(self) -> None:
        self.checkpoint(self.state(), 1, {1: "int", "1": "str", b"1": "bytes", (1,): "tuple"})
        assert dict(self.again().items()) == {1: "int", "1": "str", b"1": "bytes", (1,): "tuple"}

    def test_what_is_done_to_an_object_after_it_was_put_is_not_seen(self) -> None:
        state = self.state()
        value = [1]
        state.put("a", value)
        value.append(2)
        got: Any = state.get("a")
        got.append(3)
        assert state.get("a") == [1]
        self.checkpoint(state, 1, {})
        got = state.get("a")
        got.append(4)
        assert state.get("a") == [1]

    def test_what_cannot_be_kept_is_refused_when_it_is_put(self) -> None:
        state = self.state()
        with pytest.raises(BadRecordError, match="cannot hold"):
            state.put("a", object())
        assert "a" not in state

    def test_many_keys(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {number: number for number in range(12_345)})
        self.checkpoint(state, 2, {number: -number for number in range(0, 12_345, 2)})
        for number in range(0, 12_345, 5):
            state.delete(number)
        state.prepare_commit(3)
        state.commit(3)
        expected = {number: -number if number % 2 == 0 else number for number in range(12_345) if number % 5}
        again = self.again()
        assert dict(again.items()) == expected
        assert again.multi_get(list(range(12_345))) == [expected.get(number) for number in range(12_345)]

    # --- checkpoints ------------------------------------------------------------------------------

    def test_what_is_committed_is_there_and_what_is_not_is_not(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1, "b": 1})
        state.put("a", 2)
        state.delete("b")
        state.put("c", 3)
        assert dict(state.items()) == {"a": 2, "c": 3}
        again = self.again()
        again.recover(1, prepared=False, upto=1)
        assert (again.txid, dict(again.items())) == (1, {"a": 1, "b": 1})
        assert self.made.exists(self.namespace, self.conf())

    def test_a_namespace_in_which_nothing_is_committed_does_not_exist(self) -> None:
        state = self.state()
        state.put("a", 1)
        state.prepare_commit(1)
        assert not self.made.exists(self.namespace, self.conf())
        state.commit(1)
        assert self.made.exists(self.namespace, self.conf())

    def test_what_is_prepared_is_not_committed(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1})
        state.put("a", 2)
        state.prepare_commit(2)
        assert state.get("a") == 2
        again = self.again()
        assert (again.txid, again.get("a")) == (1, 1)

    def test_what_is_prepared_can_be_committed_by_another_process(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1, "b": 1})
        state.put("a", 2)
        state.delete("b")
        state.prepare_commit(2)
        state.put("a", 3)
        again = self.again()
        again.recover(2, prepared=True, upto=2)
        assert (again.txid, dict(again.items())) == (2, {"a": 2})

    def test_what_another_object_has_prepared_is_seen_when_it_is_committed(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1, "b": 1})
        assert state.multi_get(["a", "b", "c"]) == [1, 1, None]
        other = self.state()
        other.put("a", 2)
        other.delete("b")
        other.put("c", 2)
        other.prepare_commit(2)
        state.commit(2)
        assert (state.txid, state.multi_get(["a", "b", "c"])) == (2, [2, None, 2])

    def test_what_is_prepared_can_be_rolled_back_by_another_process(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1})
        state.put("a", 2)
        state.prepare_commit(2)
        again = self.again()
        again.recover(1, prepared=False, upto=2)
        assert (again.txid, again.get("a")) == (1, 1)
        with pytest.raises(CorruptStateError):
            self.again().commit(2)

    def test_a_rollback_spares_what_a_later_driver_has_prepared(self) -> None:
        state = self.state()
        state.put("a", 5)
        state.prepare_commit(5)
        self.state().recover(0, prepared=False, upto=4)
        again = self.again()
        again.commit(5)
        assert again.get("a") == 5

    def test_changes_between_prepare_and_commit_belong_to_the_next_checkpoint(self) -> None:
        state = self.state()
        state.put("a", 1)
        state.put("b", 1)
        state.prepare_commit(1)
        state.put("a", 2)
        state.delete("b")
        state.commit(1)
        assert dict(state.items()) == {"a": 2}
        assert dict(self.again().items()) == {"a": 1, "b": 1}
        # The changes are lost with the first object: make them again.
        state = self.state()
        state.put("a", 2)
        state.delete("b")
        state.prepare_commit(2)
        state.commit(2)
        assert dict(self.again().items()) == {"a": 2}

    def test_a_commit_is_done_once(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1})
        state.commit(1)
        self.checkpoint(state, 2, {"a": 2})
        self.again().commit(1)
        self.again().commit(2)
        assert (self.again().txid, self.again().get("a")) == (2, 2)

    def test_a_late_commit_of_a_driver_that_is_gone_changes_nothing(self) -> None:
        late = self.state()
        late.put("a", "late")
        late.prepare_commit(1)
        state = self.state()
        state.recover(1, prepared=True, upto=1)
        self.checkpoint(state, 2, {"a": "new"})
        late.commit(1)
        assert (self.again().txid, self.again().get("a")) == (2, "new")

    def test_a_commit_of_what_was_never_prepared_is_refused(self) -> None:
        with pytest.raises(CorruptStateError, match="nothing prepared as checkpoint 3"):
            self.state().commit(3)

    def test_only_one_checkpoint_is_prepared_at_a_time(self) -> None:
        state = self.state()
        state.prepare_commit(1)
        with pytest.raises(InvariantViolation):
            state.prepare_commit(2)
        with pytest.raises(InvariantViolation):
            state.commit(2)

    def test_a_repeated_prepare_takes_what_has_changed_since(self) -> None:
        state = self.state()
        state.put("a", 1)
        state.prepare_commit(1)
        state.put("a", 2)
        state.put("b", 2)
        state.prepare_commit(1)
        state.commit(1)
        assert dict(self.again().items()) == {"a": 2, "b": 2}

    def test_a_checkpoint_without_changes_counts(self) -> None:
        state = self.state()
        state.prepare_commit(4)
        state.commit(4)
        assert self.again().txid == 4
        assert self.made.exists(self.namespace, self.conf())

    def test_a_rollback_forgets_changes_and_what_is_prepared(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1})
        state.put("a", 2)
        state.prepare_commit(2)
        state.put("a", 3)
        state.rollback()
        assert (state.get("a"), state.txid) == (1, 1)
        self.checkpoint(state, 3, {"b": 3})
        assert dict(self.again().items()) == {"a": 1, "b": 3}

    def test_a_commit_without_an_id_takes_everything_at_once(self) -> None:
        state = self.state()
        state.put("a", 1)
        state.commit()
        again = self.again()
        assert (again.get("a"), again.txid) == (1, 0)

    # --- namespaces -------------------------------------------------------------------------------

    def test_namespaces_are_apart(self) -> None:
        first, second = self.state(0), self.state(1)
        self.checkpoint(first, 1, {"a": 1})
        second.put("a", 2)
        assert (second.txid, first.get("a"), second.get("a")) == (0, 1, 2)

    def test_a_namespace_that_is_dropped_is_empty(self) -> None:
        state = self.state()
        self.checkpoint(state, 1, {"a": 1})
        state.put("a", 2)
        state.prepare_commit(2)
        state.close()
        self.made.drop(self.namespace, self.conf())
        assert not self.made.exists(self.namespace, self.conf())
        assert (self.again().txid, list(self.state().items())) == (0, [])

    def test_a_state_is_filled_at_once(self) -> None:
        self.state().load(((number, str(number)) for number in range(1_000)), 17)
        again = self.again()
        assert (again.txid, again.get(999), len(dict(again.items()))) == (17, "999", 1_000)
