"""Values in plain forms, as stores without their types, and JSON, have them."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from framework import Fields
from framework.topology.json_values import plain
from sinks.value_encoding import JsonColumns, restored


@pytest.mark.parametrize(
    ("value", "declared", "text"),
    [
        ("0", pa.decimal128(38, 18), "0.000000000000000000"),
        ("0.0000001", pa.decimal128(38, 18), "0.000000100000000000"),
        ("0", pa.decimal32(9, 9), "0.000000000"),
        ("-12.50", pa.decimal128(20, 2), "-12.50"),
        ("12000", pa.decimal128(20, -3), "12000"),
        ("1" + "0" * 48 + ".01", pa.decimal256(60, 2), "1" + "0" * 48 + ".01"),
    ],
)
def test_decimals_are_written_without_an_exponent(value: str, declared: pa.DataType, text: str) -> None:
    held = pa.array([Decimal(value)], declared)[0].as_py()
    assert plain(held, declared) == text
    assert list(JsonColumns(Fields(v=declared), "JSON").encode([held])) == [text]
    assert restored(text, declared) == held
