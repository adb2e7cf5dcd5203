"""Conditions about the fields of a row, as text: ``op = 'd' OR kind IN ('x', 'y')``.

Comparisons (``=``, ``<>``, ``!=``, ``<``, ``<=``, ``>``, ``>=``) with a text, a number, TRUE or
FALSE;
``IN (...)``; ``IS NULL`` and ``IS NOT NULL``; a field of truth values alone; AND, OR, NOT, and
parentheses. A field that is no plain word stands in double quotes. As in SQL, a comparison with
null is not true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError, TopologyError

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*')|(?P<name>"(?:[^"]|"")+")|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>[^\W\d]\w*)|(?P<sign><>|!=|<=|>=|=|<|>|\(|\)|,))"""
)
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_KEYWORDS = frozenset({"AND", "OR", "NOT", "IS", "NULL", "IN", "TRUE", "FALSE"})
Truth = Callable[[pa.RecordBatch], Any]


class Condition:
    """A parsed condition. ``fields``: those that it names. Raises ``TopologyError`` for a text that
    is no condition."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields: list[str] = []
        self._tokens = self._tokens_of(text)
        self._truth = self._either()
        if self._tokens:
            raise self._wrong(f"{self._tokens[0][1]!r} was not expected")

    def __getstate__(self) -> str:
        return self.text

    def __setstate__(self, text: str) -> None:
        self.__init__(text)  # type: ignore[misc]

    def rows(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Which rows the condition is true of. Raises ``BadRecordError`` for values that it cannot
        compare."""
        try:
            return pc.fill_null(self._truth(batch), False)
        except pa.ArrowException as error:
            raise BadRecordError(f"the condition {self.text!r} cannot be applied: {error}") from error

    def _tokens_of(self, text: str) -> list[tuple[str, str]]:
        found, end = [], 0
        while text[end:].strip():
            match = _TOKEN.match(text, end)
            if match is None:
                raise self._wrong(f"{text[end:].strip()[:20]!r} is not understood")
            kind = match.lastgroup or ""
            found.append((kind, match[kind]))
            end = match.end()
        return found

    def _wrong(self, why: str) -> TopologyError:
        return TopologyError(f"{self.text!r} is no condition: {why}; write one such as op = 'd'")

    def _takes(self, *words: str) -> bool:
        """Whether these keywords or signs come next; then they are taken."""
        following = [token.upper() if kind == "word" else token for kind, token in self._tokens[: len(words)]]
        quoted = any(kind in ("text", "name") for kind, _ in self._tokens[: len(words)])
        if quoted or following != list(words):
            return False
        del self._tokens[: len(words)]
        return True

    def _either(self) -> Truth:
        found = self._both()
        while self._takes("OR"):
            found = _joined(pc.or_kleene, found, self._both())
        return found

    def _both(self) -> Truth:
        found = self._one()
        while self._takes("AND"):
            found = _joined(pc.and_kleene, found, self._one())
        return found

    def _one(self) -> Truth:
        if self._takes("NOT"):
            inner = self._one()
            return lambda batch: pc.invert(inner(batch))
        if self._takes("("):
            inner = self._either()
            self._require(")")
            return inner
        name = self._field()
        if self._takes("IS", "NOT", "NULL"):
            return lambda batch: pc.is_valid(batch.column(name))
        if self._takes("IS", "NULL"):
            return lambda batch: pc.is_null(batch.column(name))
        if self._takes("IN"):
            self._require("(")
            values = [self._value()]
            while self._takes(","):
                values.append(self._value())
            self._require(")")
            return lambda batch: _among(batch.column(name), values)
        sign = next((each for each in _COMPARISONS if self._takes(each)), None)
        if sign is None:
            return lambda batch: batch.column(name).cast(pa.bool_())
        compare, value = _COMPARISONS[sign], self._value()
        return lambda batch: compare(batch.column(name), pa.scalar(value))

    def _require(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._wrong(f"{sign!r} is missing")

    def _field(self) -> str:
        kind, token = self._tokens.pop(0) if self._tokens else ("", "")
        if kind == "name":
            token = token[1:-1].replace('""', '"')
        elif kind != "word" or token.upper() in _KEYWORDS:
            raise self._wrong("the name of a field is missing")
        self.fields.append(token)
        return token

    def _value(self) -> Any:
        kind, token = self._tokens.pop(0) if self._tokens else ("", "")
        if kind == "text":
            return token[1:-1].replace("''", "'")
        if kind == "number":
            return int(token) if re.fullmatch(r"-?\d+", token) else float(token)
        if kind == "word" and token.upper() in ("TRUE", "FALSE"):
            return token.upper() == "TRUE"
        raise self._wrong("a value is missing: a text in single quotes, a number, TRUE or FALSE")


def _among(column: pa.Array, values: Sequence[Any]) -> pa.BooleanArray:
    return pc.if_else(pc.is_valid(column), pc.is_in(column, pa.array(values)), pa.scalar(None, pa.bool_()))


def _joined(join: Callable[..., Any], one: Truth, other: Truth) -> Truth:
    return lambda batch: join(one(batch), other(batch))
