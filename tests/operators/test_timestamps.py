"""Which values of a column are event times."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from framework.errors import BadRecordError
from framework.operators.timestamps import times_of

pytestmark = pytest.mark.rule("C43")


@pytest.mark.parametrize(
    ("values", "kind", "unit"),
    [
        ([10**12], pa.int64(), "s"),
        ([-(10**14)], pa.int64(), "ms"),
        ([1e300], pa.float64(), "s"),
        ([float("nan")], pa.float64(), "s"),
        ([2**63], pa.uint64(), "us"),
        ([2**62], pa.timestamp("us", "UTC"), "s"),
        ([-62_135_596_800_000_000], pa.timestamp("us", "UTC"), "s"),
        ([None], pa.int64(), "s"),
    ],
)
def test_what_is_no_time_is_a_bad_record(values: list[Any], kind: Any, unit: str) -> None:
    with pytest.raises(BadRecordError, match="field 'at' (holds|is null)"):
        times_of(pa.array(values, kind), "at", unit)


def test_times_are_microseconds() -> None:
    assert times_of(pa.array([1.5, -2.0]), "at", "s").tolist() == [1_500_000, -2_000_000]
    assert times_of(pa.array([1_999], pa.timestamp("ns", "UTC")), "at", "s").tolist() == [1]
    assert times_of(pa.array([3], pa.uint64()), "at", "ms").tolist() == [3_000]
