"""Describes the changes between two outlines of a topology, component by component, for people.

Stateless steps between two components are no part of its shape: ``without_steps``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

_INPUT = re.compile(r"(?P<source>.*) by (?P<grouping>\w+)\((?P<fields>.*)\)")
_PLACE = re.compile(r"(?P<id>[^/]*)/(?P<stream>.*) by \w+\(.*\)")
_FIELDS = re.compile(r"Fields\((?P<columns>.*)\)")
_OPENING, _CLOSING = "<([{", ">)]}"

Component = Mapping[str, Any]


def without_steps(outline: Mapping[str, Any], steps: Set[str]) -> Mapping[str, Any]:
    """An outline in which each component reads from the components above the steps. ``steps``:
    bolts that may be added and removed. With steps, the columns of the spout depend on the needs of
    all components, so the outline leaves them out. The columns that a component without output
    takes, such as a table, stay in it as ``takes``. Without ``steps``, the outline itself.

    >>> words = {"streams": {"default": "Fields(word: string)"}, "inputs": []}
    >>> long = {**words, "inputs": ["words/default by ShuffleGrouping()"]}
    >>> table = {"streams": {}, "inputs": ["long/default by GlobalGrouping()"]}
    >>> outline = {"spout": "words", "components": {"words": words, "long": long, "table": table}}
    >>> without_steps(outline, {"long"})["components"]["table"]["inputs"]
    ['words/default by GlobalGrouping()']
    """
    if not steps:
        return outline
    components = outline.get("components", {})
    kept = {name: _without_steps(each, components, steps) for name, each in components.items() if name not in steps}
    spout = outline.get("spout")
    if isinstance(spout, str) and spout in kept:
        kept[spout] = {**kept[spout], "streams": dict.fromkeys(_mapped(kept[spout], "streams"))}
    return {**outline, "components": kept}


def with_common_settings(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Two outlines with the settings of components that both have. An earlier version stored fewer
    of them; and where a column is added or removed, its setting is, too.

    >>> old, new = {"settings": {"a": 1, "b": 2}}, {"settings": {"b": 3, "c": 4}}
    >>> found = with_common_settings({"components": {"sum": old}}, {"components": {"sum": new}})
    >>> [each["components"] for each in found]
    [{'sum': {'settings': {'b': 2}}}, {'sum': {'settings': {'b': 3}}}]
    """
    was, has = before.get("components", {}), now.get("components", {})
    common = {name: _mapped(was[name], "settings").keys() & _mapped(has[name], "settings") for name in {*was} & {*has}}
    return _with_settings(before, common), _with_settings(now, common)


def _with_settings(outline: Mapping[str, Any], kept: Mapping[str, Set[str]]) -> Mapping[str, Any]:
    components = {}
    for name, each in outline.get("components", {}).items():
        settings = {key: its for key, its in _mapped(each, "settings").items() if key in kept.get(name, ())}
        others = {key: its for key, its in each.items() if key != "settings"}
        components[name] = {**others, "settings": settings} if settings else others
    return {**outline, "components": components}


def _without_steps(component: Component, components: Mapping[str, Component], steps: Set[str]) -> Component:
    inputs, takes = [], {}
    for each in _listed(component, "inputs"):
        found, columns = each, None
        if (place := _PLACE.fullmatch(each)) is not None:
            above = components.get(place.group("id"), {})
            columns = _mapped(above, "streams").get(place.group("stream"))
            if place.group("id") in steps:
                source = next((its.group("source") for its in _parsed(_listed(above, "inputs"))), "?")
                found = f"{source}{each[place.end('stream') :]}"
        inputs.append(found)
        takes[found.partition(" by ")[0]] = columns
    emits = _mapped(component, "streams")
    return {**component, "inputs": inputs, **({"takes": takes} if takes and not emits else {})}


def shape_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence per change: first those of components with a state, because the others often
    follow from them. Empty where the outlines say the same.

    >>> def outline(by):
    ...     count = {"states": ["table t"], "inputs": [f"words/default by FieldsGrouping({by})"]}
    ...     return {"fields_hash": "1", "components": {"count": count}}
    >>> shape_changes(outline("word"), outline("word, day"))
    ["'count' has a new key: it was word, and is word, day"]
    """
    if before.get("fields_hash") != now.get("fields_hash"):
        return [
            f"the hash behind fields groupings was {before.get('fields_hash')!r}, and is {now.get('fields_hash')!r}"
        ]
    was, has = before.get("components", {}), now.get("components", {})
    found = [f"component {name!r} is gone" for name in was if name not in has]
    found += [f"component {name!r} is new" for name in has if name not in was]
    both = [name for name in has if name in was and was[name] != has[name]]
    for name in sorted(both, key=lambda each: not has[each].get("states")):
        found += [f"{name!r} {change}" for change in _changes(was[name], has[name])] or [f"{name!r} differs"]
    return found


def _changes(was: Component, has: Component) -> Iterator[str]:
    yield from _inputs(_listed(was, "inputs"), _listed(has, "inputs"))
    old, new = _mapped(was, "takes"), _mapped(has, "takes")
    for source in new:
        if source in old:
            yield from _columns("takes", old[source], new[source])
    old, new = _mapped(was, "streams"), _mapped(has, "streams")
    for stream in dict.fromkeys((*new, *old)):
        of = "" if stream == "default" else f" on stream {stream!r}"
        yield from (f"{change}{of}" for change in _columns("emits", old.get(stream), new.get(stream)))
    if was.get("parallelism") != has.get("parallelism"):
        yield f"has {has.get('parallelism')} tasks, and had {was.get('parallelism')}"
    if was.get("committer") != has.get("committer"):
        yield "is a committer now" if has.get("committer") else "is no committer any more"
    states = _listed(was, "states"), _listed(has, "states")
    if states[0] != states[1]:
        yield f"keeps its state in {', '.join(states[1]) or 'none'}, and kept it in {', '.join(states[0]) or 'none'}"
    old, new = _mapped(was, "settings"), _mapped(has, "settings")
    for each in dict.fromkeys((*new, *old)):
        if old.get(each) != new.get(each):
            yield f"has another option {each}: it was {old.get(each)!r}, and is {new.get(each)!r}"
    known = {"inputs", "streams", "parallelism", "committer", "states", "settings", "takes"}
    for each in dict.fromkeys((*has, *was)):
        if each not in known and was.get(each) != has.get(each):
            yield f"has another {each}: it was {was.get(each)!r}, and is {has.get(each)!r}"


def _inputs(was: Sequence[str], has: Sequence[str]) -> Iterator[str]:
    """One sentence for inputs whose sources alone, or whose key alone, has changed."""
    if was == has:
        return
    old, new = _parsed(was), _parsed(has)
    keys = [list(dict.fromkeys(each.group("fields") for each in its if _is_keyed(each))) for its in (old, new)]
    if keys[0] != keys[1] and keys[0] and keys[1]:
        yield f"has a new key: it was {' / '.join(keys[0])}, and is {' / '.join(keys[1])}"
    sources = [[each.group("source") for each in its] for its in (old, new)]
    if sources[0] != sources[1]:
        yield f"reads {', '.join(sources[1]) or 'nothing'}, and read {', '.join(sources[0]) or 'nothing'}"
    kinds = [[each.group("grouping") for each in its] for its in (old, new)]
    if kinds[0] != kinds[1] and sources[0] == sources[1]:
        yield f"gets its rows by {', '.join(has)}, and got them by {', '.join(was)}"


def _is_keyed(given: re.Match[str]) -> bool:
    return given.group("grouping") == "FieldsGrouping"


def _parsed(inputs: Sequence[str]) -> list[re.Match[str]]:
    return [found for each in inputs if (found := _INPUT.fullmatch(each)) is not None]


def _columns(verb: str, was: object, has: object) -> Iterator[str]:
    """The columns of a stream that are new, gone, or of another type."""
    if was == has:
        return
    old, new = _types(was), _types(has)
    found = [f"{verb} {name}, which is new" for name in new if name not in old]
    found += [f"{verb} {name} no more" for name in old if name not in new]
    found += [
        f"{verb} {name} as {new[name]}, and did as {old[name]}" for name in new if old.get(name, new[name]) != new[name]
    ]
    yield from found or [f"{verb} its columns in another order"]


def _types(fields: object) -> dict[str, str]:
    """Column -> type, of the text of ``Fields``. A type may have commas of its own."""
    found = _FIELDS.fullmatch(fields) if isinstance(fields, str) else None
    columns, depth = [""], 0
    for each in found.group("columns") if found is not None else "":
        depth += (each in _OPENING) - (each in _CLOSING)
        if each == "," and not depth:
            columns.append("")
        else:
            columns[-1] += each
    pairs = (each.strip().partition(": ") for each in columns if each.strip())
    return {name: kind or "any type" for name, _, kind in pairs}


def _listed(component: Component, name: str) -> list[str]:
    given = component.get(name)
    return list(map(str, given)) if isinstance(given, (list, tuple)) else []


def _mapped(component: Component, name: str) -> Mapping[str, Any]:
    given = component.get(name)
    return given if isinstance(given, Mapping) else {}
