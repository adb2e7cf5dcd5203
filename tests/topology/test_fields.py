"""Fields, tuples and attempts, as the author of a bolt sees them."""

import datetime
import pickle

import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt, Tuple
from framework.errors import TopologyError
from framework.topology import CommitFence


def test_fields_positional_and_typed_names_keep_their_order() -> None:
    fields = Fields("word", count=int, at=datetime.datetime)
    assert fields.names == ("word", "count", "at")
    assert fields.type_of("word") is None
    assert fields.type_of("count") == pa.int64()
    assert fields.type_of("at") == pa.timestamp("us", tz="UTC")


def test_fields_accept_arrow_types_and_names_like_self() -> None:
    fields = Fields(word=pa.large_string(), self=int)
    assert fields.schema() == pa.schema([("word", pa.large_string()), ("self", pa.int64())])


def test_fields_schema_is_none_when_a_field_is_untyped() -> None:
    assert Fields("word", count=int).schema() is None


@pytest.mark.parametrize(("names", "part"), [(("a", "a"), "named twice"), (("",), "non-empty"), ((3,), "non-empty")])
def test_fields_bad_names_are_refused_by_name(names: tuple[object, ...], part: str) -> None:
    with pytest.raises(TopologyError, match=part):
        Fields(*names)  # type: ignore[arg-type]


def test_fields_unknown_python_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TopologyError, match="'tags'.*bool, bytes"):
        Fields(tags=set)


def test_fields_survive_pickling() -> None:
    fields = Fields("word", count=int)
    assert pickle.loads(pickle.dumps(fields)) == fields


def test_attempt_prints_as_txid_and_attempt_and_orders() -> None:
    assert str(TransactionAttempt(7, 2)) == "7:2"
    assert sorted([TransactionAttempt(2, 1), TransactionAttempt(1, 9)])[0] == TransactionAttempt(1, 9)


def test_attempt_fence_takes_no_part_in_equality() -> None:
    fenced = TransactionAttempt(1, 1, CommitFence("t", 4, "digest", "bolt:0"))
    assert fenced == TransactionAttempt(1, 1)
    assert hash(fenced) == hash(TransactionAttempt(1, 1))


def test_tuple_by_name_by_position_and_as_values() -> None:
    attempt = TransactionAttempt(3, 1)
    tup = Tuple(attempt, Fields(word=str, count=int), ("dog", 2), "spout", "default")
    assert tup["word"] == "dog"
    assert tup[0] == tup["id"] == attempt
    assert tup[1] == "dog"
    assert tup[2] == tup[-1] == 2
    assert tup.values == ("dog", 2)
    assert list(tup) == [attempt, "dog", 2]
    assert len(tup) == 3
    with pytest.raises(KeyError, match="no field 'nope'"):
        tup["nope"]
