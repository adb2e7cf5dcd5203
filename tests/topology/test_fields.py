"""Fields, tuples and attempts, as the author of a bolt sees them."""

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt, Tuple
from framework.core.component_task import anchored_class
from framework.errors import TopologyError, UnknownFieldError
from framework.topology import CommitFence
from framework.topology.tuples import tuple_class


def test_fields_positional_and_typed_names_keep_their_order() -> None:
    fields = Fields("word", count=int, at=datetime.datetime)
    assert fields.names == ("word", "count", "at")
    assert fields.type_of("word") is None
    assert fields.type_of("count") == pa.int64()
    assert fields.type_of("at") == pa.timestamp("us", tz="UTC")


def test_fields_accept_arrow_types_and_names_like_self() -> None:
    fields = Fields(word=pa.large_string(), self=int)
    assert fields.schema() == pa.schema([("word", pa.large_string()), ("self", pa.int64())])


def test_fields_take_lists_of_python_types() -> None:
    types = Fields(items=list[str], rows=list[list[int]])
    assert [types.type_of(each) for each in types] == [pa.list_(pa.string()), pa.list_(pa.list_(pa.int64()))]
    with pytest.raises(TopologyError, match=r"field 'items': no Arrow type is known for <class 'set'>"):
        Fields(items=list[set])


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


def made_by_class(
    attempt: TransactionAttempt, fields: Fields, values: tuple[Any, ...], component: str, stream: str
) -> Tuple:
    return tuple_class(fields, component, stream)(attempt, values)


@pytest.mark.parametrize("make", [Tuple, made_by_class])
def test_tuple_by_name_by_position_and_as_values(make: Callable[..., Tuple]) -> None:
    attempt = TransactionAttempt(3, 1)
    tup = make(attempt, Fields(word=str, count=int), ("dog", 2), "spout", "default")
    assert isinstance(tup, Tuple)
    assert tup.attempt == attempt
    assert (tup.fields, tup.source_component, tup.source_stream) == (Fields(word=str, count=int), "spout", "default")
    assert tup["word"] == "dog"
    assert tup[0] == tup["id"] == attempt
    assert tup[1] == "dog"
    assert tup[2] == tup[-1] == 2
    assert tup.values == ("dog", 2)
    assert list(tup) == [attempt, "dog", 2]
    assert len(tup) == 3
    assert repr(tup) == "Tuple(3:1, word='dog', count=2)"
    assert not tup.is_tick
    assert (tup[-2], tup[True]) == ("dog", "dog")
    with pytest.raises(KeyError, match=r"^no field 'wrod' in .* of 'spout'; perhaps 'word' is meant"):
        tup["wrod"]
    for position in (3, -3):
        with pytest.raises(
            IndexError, match=rf"^no field at position {position} in .* of 'spout'; positions end at 2$"
        ):
            tup[position]
    with pytest.raises(UnknownFieldError):
        tup["nope"]
    with pytest.raises(TypeError):
        tup[1:2]  # type: ignore[index]


@pytest.mark.parametrize("make", [Tuple, made_by_class])
@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda each: each.__name__)
def test_a_tuple_that_a_bolt_keeps_is_pickled_with_it(make: Callable[..., Tuple], library: Any) -> None:
    tup = make(TransactionAttempt(3, 1), Fields(word=str), ("dog",), "spout", "default")
    again = library.loads(library.dumps(tup))
    assert repr(again) == repr(tup)
    assert (again["word"], again.fields, again.source_component) == ("dog", tup.fields, "spout")


@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda each: each.__name__)
def test_a_tuple_of_a_core_topology_is_pickled_with_its_edge_and_its_trees(library: Any) -> None:
    tup = anchored_class(Fields(word=str), "spout", "default")(("dog",), 7, (1, 2))
    tup.settled = True
    again = library.loads(library.dumps(tup))
    assert (again["word"], again[0], again[-1], again.source_component) == ("dog", "dog", "dog", "spout")
    assert (again.edge, again.roots, again.settled) == (7, (1, 2), True)


def test_a_field_may_have_the_name_of_an_attribute() -> None:
    tup = made_by_class(TransactionAttempt(1, 1), Fields("values", "fields"), (1, 2), "spout", "default")
    assert (tup["values"], tup["fields"], tup.values) == (1, 2, (1, 2))


def test_streams_whose_fields_differ_in_types_have_tuples_of_their_own() -> None:
    attempt = TransactionAttempt(1, 1)
    made = [made_by_class(attempt, fields, (1,), "spout", "default") for fields in (Fields(n=int), Fields(n=str))]
    assert [str(each.fields.type_of("n")) for each in made] == ["int64", "string"]


def test_the_schema_of_fields_is_made_once() -> None:
    """A loop over a thousand columns asks for it a thousand times."""
    fields = Fields(n=int)
    assert fields.schema() is fields.schema() is not None
    assert Fields("n").schema() is None
