"""Rows for Python: the same with pandas and without, in small batches and in large ones."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from framework.errors import BadRecordError
from framework.topology.python_datetime_range import in_microseconds, outside_python
from framework.topology.tuples import rows_of

OUTSIDE = [
    (pa.timestamp("us", "UTC"), 10**18),
    (pa.timestamp("ms"), 10**17),
    (pa.date32(), -(10**6)),
    (pa.time64("us"), 86_400 * 10**6),
    (pa.time64("us"), -1),
    (pa.time32("s"), 90_000),
]


def column(declared: pa.DataType, count: int, rows: int) -> pa.Array:
    return pa.array([count] * rows, pa.int32() if declared.bit_width == 32 else pa.int64()).view(declared)


@pytest.mark.parametrize(("declared", "count"), OUTSIDE, ids=str)
@pytest.mark.parametrize("rows", [1, 1_000])
def test_a_time_that_python_cannot_hold_is_an_error_that_names_its_field(
    declared: pa.DataType, count: int, rows: int
) -> None:
    its = column(declared, count, rows)
    nested = pa.StructArray.from_arrays([its], ["inside"])
    offsets, names = pa.array(range(rows + 1), pa.int32()), pa.array(["name"] * rows)
    in_map, as_key = (pa.MapArray.from_arrays(offsets, *pair) for pair in ((names, its), (its, names)))
    for each in (its, nested, in_map, as_key):
        with pytest.raises(BadRecordError, match="field 'at': Python cannot hold a value") as error:
            list(rows_of(pa.record_batch([each], ["at"])))
        assert "ArrowBolt" in error.value.advice


def test_a_map_is_found_by_its_own_row() -> None:
    late = 253_402_300_800_000
    given = [[("a", late)], None, [], [("a", 0), ("b", 1)], [("a", 0), ("b", late)]]
    plain = pa.array(given, pa.map_(pa.string(), pa.int64()))
    column = pa.MapArray.from_arrays(plain.offsets, plain.keys, plain.items.view(pa.timestamp("ms", "UTC")))
    found = outside_python(column)
    assert found is not None
    assert found.tolist() == [True, False, False, False, True]
    rest = outside_python(column.slice(1))
    assert rest is not None
    assert rest.tolist() == [False, False, False, True]
    assert outside_python(column.slice(1, 3)) is None


FINE = [pa.timestamp("ns", "UTC"), pa.timestamp("ns"), pa.duration("ns"), pa.time64("ns")]


@pytest.mark.parametrize("declared", FINE, ids=str)
@pytest.mark.parametrize("rows", [1, 1_000])
def test_nanoseconds_are_python_objects_or_an_error(declared: pa.DataType, rows: int) -> None:
    """pandas, which the tests have, would give objects of its own, and cut times of day off."""
    whole, fine = column(declared, 2_000, rows), column(declared, 2_001, rows)
    plain = whole.cast(in_microseconds(declared)).to_pylist()
    nested = pa.StructArray.from_arrays([whole], ["inside"])
    assert list(rows_of(pa.record_batch([whole, nested], ["at", "in"]))) == [(one, {"inside": one}) for one in plain]
    assert {type(one).__module__ for (one,) in rows_of(pa.record_batch([whole], ["at"]))} == {"datetime"}
    for each in (
        fine,
        pa.StructArray.from_arrays([fine], ["inside"]),
        pa.array([[2_001]] * rows).cast(pa.list_(declared)),
    ):
        with pytest.raises(BadRecordError, match="field 'at': Python cannot hold a value"):
            list(rows_of(pa.record_batch([each], ["at"])))


_TRY = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name)
if sys.argv[1] == "without":
    sys.meta_path.insert(0, Without())
else:
    import pandas
from tests.topology.test_datetime_range import FINE, OUTSIDE, column
from framework.topology.hashing import hash_rows
from framework.errors import BadRecordError
from framework.topology.tuples import rows_of
import pyarrow as pa
for declared, count in [*OUTSIDE, *((each, count) for each in FINE for count in (2_000, 2_001))]:
    for rows in (1, 1000):
        try:
            print(list(rows_of(pa.record_batch([column(declared, count, rows)], ["at"])))[0])
        except BadRecordError as error:
            print(error)
        if declared in FINE:
            print(hash_rows([column(declared, count, rows)])[0])
"""


@pytest.mark.slow
def test_it_is_the_same_error_with_pandas_and_without() -> None:
    found = [
        subprocess.run([sys.executable, "-c", _TRY, each], check=True, capture_output=True, text=True).stdout
        for each in ("with", "without")
    ]
    assert found[0] == found[1]
    assert found[0].count("Python cannot hold a value") == 20
