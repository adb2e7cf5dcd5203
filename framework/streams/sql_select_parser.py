"""``SELECT ... FROM stream WHERE ...``, divided into the expressions that polars reads.

Only what sees one row at a time is taken. Every other clause is refused with the operator that does
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from framework.call_site import Call

#: Text, quoted names, words, and everything else sign by sign.
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\w+|\s+|.", re.DOTALL)
_TABLE = "stream"
_GATHERS = "needs several rows together: use group_by(...).agg(...)"
_ENDLESS = "needs the end of a stream, which has none"
_REFUSED = {
    "GROUP": f"GROUP BY {_GATHERS}",
    "HAVING": f"HAVING {_GATHERS}",
    "DISTINCT": "DISTINCT compares rows: use deduplicate(...)",
    "ORDER": f"ORDER BY {_ENDLESS}; aggregate with max_(...), or sort where you read the result",
    "LIMIT": f"LIMIT {_ENDLESS}: use filter(...)",
    "OFFSET": f"OFFSET {_ENDLESS}: use filter(...)",
    "JOIN": "JOIN needs two streams: use join(...)",
    "UNION": "UNION needs two streams: use merge(...)",
    "INTERSECT": "INTERSECT needs two streams: use join(...)",
    "EXCEPT": "EXCEPT needs two streams: use join(...); for columns, drop(...)",
    "EXCLUDE": "name the columns, or use drop(...)",
    "QUALIFY": "QUALIFY compares rows: use deduplicate(...) for the first row of a key, latest_by(...) for the newest",
    "WITH": "name a stream in Python in place of WITH",
    ";": "give one query, without a semicolon",
}


class Select(NamedTuple):
    """``columns``: expressions, or ``*``. ``condition``: that of WHERE."""

    columns: list[str]
    condition: str | None


class _Token(NamedTuple):
    text: str
    depth: int

    @property
    def word(self) -> str:
        return self.text.upper()


def select_of(call: Call, query: str) -> Select:
    """The parts of a query. Raises ``TopologyError``."""
    tokens = list(_tokens(query))
    words = [each.word for each in tokens if not each.text.isspace()]
    following = iter([*words[1:], ""])
    if words[:1] == ["INSERT"]:
        raise call.mistake("a query only reads: write the rows by append_into(...) or to_kafka(...)")
    second = next((place for place, word in enumerate(words) if place and word == "SELECT"), 0)
    sets = [each for each in words[max(second - 2, 0) : second] if each in ("UNION", "INTERSECT", "EXCEPT")]
    if sets:
        raise call.mistake(_REFUSED[sets[0]])
    if second:
        raise call.mistake("a query inside a query: make two streams, one of the other")
    clauses: dict[str, list[_Token]] = {}
    current: list[_Token] = []
    previous = ""
    for each in tokens:
        word = each.word if each.depth == 0 else ""
        after = next(following) if not each.text.isspace() else ""
        if word in _REFUSED and _is_clause(word, previous, after, "FROM" in clauses):
            raise call.mistake(_REFUSED[word])
        if word in ("SELECT", "FROM", "WHERE") and previous != "DISTINCT":
            if (
                word in clauses
                or list(clauses) != ["SELECT", "FROM"][: len(clauses)]
                or (word == "SELECT") == bool(clauses)
            ):
                raise call.mistake(f"{query!r} is no query: write SELECT ... FROM {_TABLE} WHERE ...")
            current = clauses[word] = []
        elif clauses:
            current.append(each)
        elif not each.text.isspace():
            raise call.mistake(f"{query!r} is no query: write SELECT ... FROM {_TABLE} WHERE ...")
        if not each.text.isspace():
            previous = each.word
    table = _text(clauses.get("FROM", []))
    if table.casefold() != _TABLE:
        raise call.mistake(
            "join two streams by join(...)"
            if "," in table
            else f"the rows are those of this stream: write FROM {_TABLE}"
        )
    columns = [_text(part) for part in _parts(clauses["SELECT"])]
    condition = _text(clauses["WHERE"]) if "WHERE" in clauses else None
    if "" in columns or condition == "":
        raise call.mistake(f"{query!r} is no query: something is missing after a comma, SELECT or WHERE")
    return Select(columns, condition)


def _is_clause(word: str, before: str, after: str, beyond_from: bool) -> bool:
    """Whether a word begins a clause: columns may be called ``order`` or ``offset``."""
    if word == ";":
        return True
    if word == "WITH":
        return before == ""
    if word == "DISTINCT":
        return before == "SELECT"
    if not beyond_from:
        return word in ("EXCLUDE", "EXCEPT") and before == "*"
    if word in ("GROUP", "ORDER"):
        return after == "BY"
    return word not in ("LIMIT", "OFFSET") or after.isdigit() or after == "ALL"


def _tokens(query: str) -> Iterator[_Token]:
    depth = 0
    for found in _TOKEN.finditer(query):
        text = found[0]
        depth -= text in ")]"
        yield _Token(text, depth)
        depth += text in "(["


def _parts(tokens: list[_Token]) -> Iterator[list[_Token]]:
    part: list[_Token] = []
    for each in tokens:
        if each.text == "," and each.depth == 0:
            yield part
            part = []
        else:
            part.append(each)
    yield part


def _text(tokens: list[_Token]) -> str:
    return "".join(each.text for each in tokens).strip()
