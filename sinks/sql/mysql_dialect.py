"""MariaDB's and MySQL's SQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError
from framework.topology import Fields, ValueType
from sinks.aggregates import Aggregate
from sinks.backend import SWEPT
from sinks.sql.schema import Dialect, TableShape, previous
from sinks.value_encoding import check_storable

#: The longest key of an index, in bytes, and the most bytes of a key column that is neither text
#: nor bytes.
_KEY_BYTES = 3_072
_FIXED_BYTES = 32
_DECIMAL_DIGITS, _DECIMAL_SCALE = 65, 30
_WIDTH = re.compile(r"^((?:small|medium|big)?int|tinyint(?!\(1\)$))\(\d+\)")


class MariaDbDialect(Dialect):
    """Type names are spelled as the database prints them, without the display widths that some
    releases add.

    Text compares by its code points, and trailing blanks are significant, so the collation has no
    padding. A moment is a ``datetime`` in UTC, because ``timestamp`` ends in 2038.
    """

    name = "MariaDB"
    integer = "bigint"
    text = "varchar(255)"
    boolean = "tinyint(1)"
    mark = "%s"
    least = "LEAST"
    greatest = "GREATEST"
    collation = "utf8mb4_nopad_bin"
    name_bytes_max = 64
    index_condition = ""
    #: The server leaves out those at the beginning, in the names of selected columns.
    no_name = re.compile(r"\A[\x00-\x20\x7f]|[\t-\r ]\Z|[\U00010000-\U0010ffff]")

    @property
    def table_options(self) -> str:  # type: ignore[override]
        return f" ENGINE=InnoDB ROW_FORMAT=DYNAMIC CHARACTER SET utf8mb4 COLLATE {self.collation}"

    @property
    def headers_options(self) -> str:  # type: ignore[override]
        return self.table_options

    def folded(self, name: str) -> str:
        """Letter by letter, as a small letter, whose capital counts if it is one letter: the Kelvin
        sign is a K."""
        small = [each.lower()[0] for each in name]
        return "".join(each.upper() if len(each.upper()) == 1 else each for each in small)

    def type_of(self, name: str, declared: pa.DataType) -> str:
        types = pa.types
        check_storable(name, declared, self.name)
        if types.is_uint64(declared):
            return "bigint unsigned"
        if types.is_integer(declared) or types.is_duration(declared):
            return "bigint"
        if types.is_decimal(declared):
            if not 0 <= declared.scale <= _DECIMAL_SCALE or not declared.scale <= declared.precision <= _DECIMAL_DIGITS:
                raise TopologyError(
                    f"column {name!r}: {self.name} holds decimals of up to {_DECIMAL_DIGITS} digits, {_DECIMAL_SCALE} of them "
                    f"after the point, and this is {declared}; cast it first"
                )
            return f"decimal({declared.precision},{declared.scale})"
        return next(column for kinds, column in _PLAIN if any(kind(declared) for kind in kinds))

    def key_type_of(self, name: str, fields: Fields) -> str:
        kind = self.type_of(name, fields.type_of(name))
        if kind not in ("longtext", "longblob"):
            return kind
        length = self.key_length(name, fields)
        return f"varchar({length})" if kind == "longtext" else f"varbinary({length})"

    def key_length(self, name: str, fields: Fields) -> int:
        """How many characters of text, or bytes, this column of a key may have: all columns of text
        and bytes get an equal share of the longest key."""
        kinds = [self.type_of(each, fields.type_of(each)) for each in fields]
        long = sum(kind in ("longtext", "longblob") for kind in kinds)
        each = (_KEY_BYTES - _FIXED_BYTES * (len(kinds) - long)) // long
        return each // 4 if self.type_of(name, fields.type_of(name)) == "longtext" else each

    @property
    def null_integer(self) -> str:
        """A table that is made of a cast null has a column of 32 bits."""
        return f"NULLIF({2**63 - 1}, {2**63 - 1})"

    def proposed(self, name: str) -> str:
        return f'VALUES("{name}")'

    def unless_there(self, key: str) -> str:
        """Empty: INSERT IGNORE would also truncate values that do not fit, so a cursor catches the
        error instead.
        """
        return ""

    def compared(self, expression: str, declared: pa.DataType) -> str:
        if pa.types.is_string(declared) or pa.types.is_large_string(declared):
            return f"BINARY ({expression})"
        return expression

    def merges(self, rule: str, declared: pa.DataType) -> bool:
        """No for sums of decimals of 65 digits, which would be truncated to 65 digits before they
        reach the column.
        """
        return not (rule == "add" and pa.types.is_decimal(declared) and declared.precision >= _DECIMAL_DIGITS - 1)


class MySqlDialect(MariaDbDialect):
    name = "MySQL"
    collation = "utf8mb4_0900_bin"


_PLAIN = (
    ((pa.types.is_boolean,), "tinyint(1)"),
    ((pa.types.is_floating,), "double"),
    ((pa.types.is_string, pa.types.is_large_string), "longtext"),
    ((pa.types.is_binary, pa.types.is_large_binary), "longblob"),
    ((pa.types.is_date,), "date"),
    ((pa.types.is_timestamp,), "datetime(6)"),
    ((pa.types.is_time,), "time(6)"),
)


def without_width(kind: str) -> str:
    """A column type without the display width of an integer, which has no effect."""
    return _WIDTH.sub(r"\1", kind)


def upsert(shape: TableShape, aggregates: Mapping[str, Aggregate], value_type: ValueType) -> tuple[str, str]:
    """The statement that merges deltas, before and after the list of their rows: keys, values,
    txid, epoch, attempt, writer. The rules are those of ``TableShape.upsert``.

    The database assigns from left to right, and later expressions see earlier assignments. So the
    previous values come first, then the values, then the columns that decide whether the row may be
    written: from the last column of the stamp to the first, so that the decision stays the same
    during the assignments.
    """
    proposed = shape.dialect.proposed
    names = {name: f'"{name}"' for name in (*shape.key, *shape.value)}
    skip_same_txid = value_type is ValueType.TRANSACTIONAL
    stamp = ("_txid", "_epoch", "_attempt")
    held = f"({', '.join(stamp)})"
    newer = f"({', '.join(map(proposed, stamp))})"
    allowed = f"({held} < {newer} OR ({held} = {newer} AND _writer IN ({proposed('_writer')}, '{SWEPT}')))"
    if skip_same_txid:
        allowed = f"_txid < {proposed('_txid')}"
    # another unique key, added during the run, would match another row
    allowed = " AND ".join([*(f"{names[name]} = {proposed(name)}" for name in shape.key), allowed])
    same = "FALSE" if skip_same_txid else f"_txid = {proposed('_txid')}"
    assignments = [
        ("_prev_exists", f"IF({same}, _prev_exists, NOT _deleted)"),
        *(
            (previous(name), f'IF({same}, "{previous(name)}", {held_value})')
            for name, held_value in names.items()
            if name in shape.value
        ),
    ]
    derived = []
    for name, each in aggregates.items():
        if each.derived_from:
            total, count = (names[part] for part in each.derived_from)
            kind = dict(shape.columns)[name]
            derived.append((name, f"CAST({total} AS {kind}) / NULLIF({count}, 0)"))
        else:
            old = names[name] if value_type is ValueType.NON_TRANSACTIONAL else f'"{previous(name)}"'
            assignments.append((name, shape.merged(each.merge_rule, name, old)))
    assignments += derived
    assignments += [(name, proposed(name)) for name in ("_deleted", "_writer", "_attempt", "_epoch", "_txid")]
    updates = ", ".join(f'"{name}" = IF({allowed}, {new}, "{name}")' for name, new in assignments)
    columns = ", ".join([*names.values(), *stamp, "_writer", "_deleted", "_prev_exists"])
    return f"INSERT INTO {shape.name} ({columns}) VALUES ", f" ON DUPLICATE KEY UPDATE {updates}"


def write_rows(shape: TableShape) -> str:
    """The statement that replaces the values of rows with existing keys. Parameters of each row:
    every column except the key, then the key."""
    held = [name for name, _ in shape.columns if name not in shape.key]
    columns = ", ".join(f'"{name}"' for name in (*held, *shape.key))
    marks = ", ".join([shape.dialect.mark] * len(shape.columns))
    updates = ", ".join(f'"{name}" = {shape.dialect.proposed(name)}' for name in held)
    return f"INSERT INTO {shape.name} ({columns}) VALUES ({marks}) ON DUPLICATE KEY UPDATE {updates}"


def literals(column: pa.ChunkedArray) -> pa.Array:
    """The values of a column as SQL literals that are independent of session settings."""
    types, kind = pa.types, column.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        texts = [None if value is None else f"X'{value.hex()}'" for value in column.to_pylist()]
        column = pa.chunked_array([pa.array(texts, pa.large_string())])
    elif types.is_string(kind) or types.is_large_string(kind):
        escaped = pc.replace_substring(pc.replace_substring(column, "\\", "\\\\"), "'", "''")
        column = _quoted(escaped.cast(pa.large_string()))
    elif types.is_decimal(kind):  # a number with an exponent would be a float
        column = _quoted(column.cast(pa.string()).cast(pa.large_string()))
    elif types.is_temporal(kind) and not types.is_duration(kind):
        column = _quoted(_plain_moment(column).cast(pa.large_string()))
    elif types.is_floating(kind):
        texts = [None if value is None else f"{value!r}e0" if "e" not in repr(value) else repr(value) for value in
                 column.cast(pa.float64()).to_pylist()]  # fmt: skip
        column = pa.chunked_array([pa.array(texts, pa.large_string())])
    elif types.is_duration(kind):
        column = column.cast(pa.int64()).cast(pa.large_string())
    else:
        column = column.cast(pa.string()).cast(pa.large_string())
    return (
        pa.concat_arrays(pc.fill_null(column, "NULL").chunks) if column.num_chunks else pa.array([], pa.large_string())
    )


def rows_of(columns: Sequence[pa.Array], constant: str = "") -> list[str]:
    """Rows of literals for SQL's VALUES. ``constant``: the end of each."""
    joined = pc.binary_join_element_wise(*columns, pa.scalar(", ", pa.large_string()))
    return [f"({row}{constant})" for row in joined.to_pylist()]


def _quoted(column: pa.ChunkedArray) -> pa.ChunkedArray:
    quote = pa.scalar("'", pa.large_string())
    return pc.binary_join_element_wise(quote, column, quote, pa.scalar("", pa.large_string()))


def _plain_moment(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):  # those with a zone are in UTC
        return column.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.timestamp("us")) if kind.tz else column
    return column
