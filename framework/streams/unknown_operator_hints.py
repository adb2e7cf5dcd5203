"""Errors for names that a stream, a grouped stream or a table does not have: an operator of another
engine, an operator of the other kind, or a column. Each error says what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from framework.call_site import called
from framework.errors import TopologyError

_AGGREGATE = "group_by('shop').agg(n=count(), total=sum_('cents'))"
_LOOK = "test({...}) or show() of the pipeline, to look at rows"
_SINK = "append_into(...), to_kafka(...), or upsert_into(...) of a table"
_PAIRS = "join(other, on=..., name=..., how=...)"
_REPEATS = "deduplicate('order', within='1 day', on='at', name=...)"
_CLOSES = "window(tumbling('1 h'), on='at').group_by(...).agg(...).when_closed(name=...)"
_CHANGES = (
    "a table changes its rows: do that before group_by(...) or latest_by(...), or with the stream that "
    "upsert_into(...) returns"
)

_AGGREGATES = ("agg", "aggregate", "sum", "count", "mean", "avg", "min", "max", "reduce", "nunique")
_PROCESS = "process(Unpaid, on='at', output=Fields(order=str), name=...), with a subclass of TimerCommitter"
_COUNTS = "window(by_count(100)).group_by(...).agg(...).when_closed(name=...)"
_WINDOWS = ("tumbling", "hopping", "sliding", "session")
#: Of a stream: a name that people know from elsewhere, in lower case without ``_``: what to write.
_OF_STREAM: Mapping[str, str] = {
    **dict.fromkeys(("where", "query", "filternot"), "filter('cents > 0')"),
    **dict.fromkeys(("dropna", "dropnulls"), "filter('cents IS NOT NULL')"),
    **dict.fromkeys(("withcolumn", "assign", "withfields"), "with_columns(euros='cents / 100')"),
    **dict.fromkeys(("withcolumnrenamed", "withcolumnsrenamed"), "rename(old='new')"),
    **dict.fromkeys(("groupby", "groupbykey", "keyby", "partitionby"), "group_by('shop')"),
    **dict.fromkeys(("flatmap", "flatmapvalues", "flattransform"), "flat_map(function, word=str)"),
    **dict.fromkeys(("apply", "mapvalues", "transform"), "map(function, word=str)"),
    **dict.fromkeys(("mapinpandas", "mapinarrow", "pipe"), "map_batches(function, kind='pandas', n=int)"),
    **dict.fromkeys(("mappartition", "mappartitions", "foreachpartition"), "map_partitions(function, n=int)"),
    **dict.fromkeys(("union", "unionall", "unionbyname", "concat", "vstack"), "merge(other)"),
    **dict.fromkeys(("dropduplicates", "dropduplicateswithinwatermark", "distinct", "unique"), _REPEATS),
    **dict.fromkeys(("leftjoin", "outerjoin", "innerjoin", "intervaljoin", "joinasof", "crossjoin"), _PAIRS),
    **dict.fromkeys(("split", "sideoutput"), "branch(large='cents > 100', other='true')"),
    **dict.fromkeys(("totable", "tochangelog", "last", "tail"), "latest_by('order', sequence_by='at')"),
    **dict.fromkeys(_AGGREGATES, _AGGREGATE),
    **dict.fromkeys(("whenclosed", "whenchanged", "tumble", "hop", "windowedby", "resample"), _CLOSES),
    **dict.fromkeys((*_WINDOWS, *(f"{each}window" for each in _WINDOWS)), _CLOSES),
    **dict.fromkeys(("bycount", "countwindow", "countwindowall", "tumblingcountwindow", "slidingcountwindow"), _COUNTS),
    **dict.fromkeys(("collect", "show", "head", "limit", "take", "print", "foreach", "topandas", "topolars"), _LOOK),
    **dict.fromkeys(("write", "writestream", "sink", "sinkto", "to", "totopic", "tosql", "tocsv", "toparquet"), _SINK),
    **dict.fromkeys(("columns", "dtypes"), "schema"),
    "insertinto": _SINK,
    "process": "map(function, word=str), or group_by('order').process(...), with a subclass of TimerCommitter",
}


_OPERATORS_OF_PIPELINE = (
    *("read_kafka", "read", "spout", "mirror", "every", "at_most", "batches"),
    *("build", "builder", "describe", "run", "submit", "test", "show"),
)
#: Of a pipeline, as above.
_OF_PIPELINE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "fromkafka",
            "kafka",
            "source",
            "addsource",
            "input",
            "readstream",
            "dataframe",
            "stream",
            "table",
            "subscribe",
        ),
        "read_kafka('orders', value=Json(order=str))",
    ),
    **dict.fromkeys(("fromlist", "fromrows", "parallelize", "fromcollection"), "read(rows)"),
    **dict.fromkeys(("start", "execute", "main", "awaittermination", "runforever"), "run(config) or submit(config)"),
    **dict.fromkeys(("explain", "plan", "printschema"), "describe()"),
}


class UnknownOperatorError(TopologyError, AttributeError):
    """A stream, a grouped stream or a table is asked for a name that it does not have."""


def unknown_operator(noun: str, name: str, own: object, hints: Mapping[str, str], otherwise: str = "") -> Exception:
    """The error for a name. ``hints``: names in lower case, without ``_`` -> what to write.
    ``otherwise``: the advice without a hint; by default, the operators that there are."""
    if name.startswith("_"):
        return AttributeError(f"{type(own).__name__!r} object has no attribute {name!r}")
    operators = [each for each in dir(type(own)) if not each.startswith("_")]
    near = [f"{each}(...)" for each in difflib.get_close_matches(name, operators, n=1)]
    hint = hints.get(name.replace("_", "").casefold()) or next(iter(near), "")
    advice = f"use {hint}" if hint else otherwise or f"it has {', '.join(operators)}"
    return _error(name, f".{name}", f"{noun} has no {name!r}: {advice}")


def of_stream(own: object, name: str, columns: Iterable[str]) -> Exception:
    """The error for a name that a stream does not have."""
    if name in columns:
        return _of_column(name, f".{name}")
    if name == "upsert_into":
        return _error(
            name,
            ".upsert_into",
            "a stream has no 'upsert_into', which needs one row per key: use latest_by(...).upsert_into(...), or "
            "group_by(...).agg(...).upsert_into(...); append_into(...) takes every row",
        )
    return unknown_operator("a stream", name, own, _OF_STREAM)


def of_pipeline(own: object, name: str, of_streams: Iterable[str]) -> Exception:
    """The error for a name that a pipeline does not have. ``of_streams``: the operators of a
    stream."""
    if name.startswith("_"):
        return AttributeError(f"{type(own).__name__!r} object has no attribute {name!r}")
    near = [f"{each}(...)" for each in difflib.get_close_matches(name, _OPERATORS_OF_PIPELINE, n=1)]
    use = _OF_PIPELINE.get(name.replace("_", "").casefold()) or next(iter(near), "")
    advice = f"use {use}" if use else f"it has {', '.join(_OPERATORS_OF_PIPELINE)}"
    if name in of_streams:
        advice = f"a stream has it: begin with read_kafka(...).{name}(...), or read(rows).{name}(...)"
    return _error(name, f".{name}", f"a pipeline has no {name!r}: {advice}")


def of_item(item: Any) -> Exception:
    """The error for ``stream[item]``."""
    return _of_column(item if isinstance(item, str) else "cents", f"[{item!r}]")


def of_grouped(own: object, name: str) -> Exception:
    """The error for a name that a grouped stream does not have."""
    hints = {
        **dict.fromkeys(_AGGREGATES, "agg(n=count(), total=sum_('cents'))"),
        "window": "window(tumbling('1 h'), on='at').group_by(...), the window first",
        **dict.fromkeys(("timers", "ontimer", "apply", "map", "transform", "transformwithstate", "flatmap"), _PROCESS),
        "countwindow": "window(by_count(100)).group_by(...), the window first",
        "filter": "filter('cents > 0').group_by(...), the filter first",
    }
    return unknown_operator("a grouped stream", name, own, hints, "it becomes a table by agg(n=count())")


def of_table(own: object, name: str) -> Exception:
    """The error for a name that a table does not have."""
    hints = {
        "window": "window(tumbling('1 h'), on='at').group_by(...), the window first",
        "join": "stream.join(table, on=..., name=...), the stream first",
        **dict.fromkeys(("ttl", "withttl", "statettl", "expireafter"), "agg(...).expire('30 days', on='at')"),
        "expire": "group_by(...).agg(cents=last('cents')).expire('30 days', on='at'): newest rows do not expire",
        "tokafka": "upsert_into(...), and to_kafka(...) of the stream of changes that it returns",
    }
    return unknown_operator("a table", name, own, hints, _CHANGES)


def _of_column(name: str, text: str) -> Exception:
    return _error(
        name,
        text,
        f"a stream has no values to compute with: name the column in an expression, as in filter('{name} > 5') or "
        f"pl.col('{name}') > 5",
    )


def _error(name: str, text: str, said: str) -> Exception:
    """``text``: the mistake as it stands in the user's code."""
    return UnknownOperatorError(str(replace(called(name), text=text).mistake(said)))
