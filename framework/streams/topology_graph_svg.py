"""The graph of a topology as an image for notebooks, in the forms of the page: round for a spout, a
second frame for a committer, an arrow per stream.

Components are in columns from left to right, each to the right of all that it takes rows from.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_HIGH, _ROW, _GAP, _MARGIN = 44, 66, 56, 6
_TEXT = 'text-anchor="middle" fill="currentColor" font-family="sans-serif"'
_LINE = 'fill="none" stroke="currentColor"'
#: Hides the arrows behind a box, in the colour of Jupyter's cells or of the page.
_BOX = 'stroke="currentColor" style="fill: var(--jp-layout-color0, Canvas)"'


def graph_svg(shape: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """``shape``: the shape of a topology, with its components in the order of the rows. The
    groupings are in the titles of the arrows."""
    components, edges = shape["components"], shape["edges"]
    column: dict[str, int] = {}
    for each in components:
        above = [column[edge["source"]] for edge in edges if edge["target"] == each["id"] and edge["source"] in column]
        column[each["id"]] = max(above, default=-1) + 1
    columns = [[each for each in components if column[each["id"]] == at] for at in sorted(set(column.values()))]
    place: dict[str, tuple[float, float, float]] = {}
    left, rows = float(_MARGIN), max(map(len, columns), default=0)
    for members in columns:
        wide = max(110.0, max(len(each["id"]) for each in members) * 7.5 + 24)
        for row, each in enumerate(members):
            place[each["id"]] = left, _MARGIN + (row + (rows - len(members)) / 2) * _ROW, wide
        left += wide + _GAP
    drawn = [_arrow(edge, place) for edge in edges if edge["source"] in place]
    drawn += [_box(each, *place[each["id"]]) for each in components]
    width, height = left - _GAP + _MARGIN, rows * _ROW - (_ROW - _HIGH) + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Graph of {len(components)} components" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{"".join(drawn)}</svg>'
    )


def _box(component: Mapping[str, Any], x: float, y: float, wide: float) -> str:
    name, kind = html.escape(component["id"]), component["kind"]
    said = f"{name}: {kind} {html.escape(component['class'])}"
    inner = f'<rect x="3" y="3" width="{wide - 6:.0f}" height="{_HIGH - 6}" rx="4" {_LINE}/>'
    return (
        f'<g class="{kind}" transform="translate({x:.0f} {y:.0f})"><title>{said}</title>'
        f'<rect width="{wide:.0f}" height="{_HIGH}" rx="{_HIGH // 2 if kind == "spout" else 7}" {_BOX}/>'
        f"{inner if kind == 'committer' else ''}"
        f'<text x="{wide / 2:.0f}" y="19" font-size="13" {_TEXT}>{name}</text>'
        f'<text x="{wide / 2:.0f}" y="34" font-size="11" {_TEXT}>{kind} &#215; {component["parallelism"]}</text></g>'
    )


def _arrow(edge: Mapping[str, Any], place: Mapping[str, tuple[float, float, float]]) -> str:
    (x1, y1, wide), (x2, y2, _) = place[edge["source"]], place[edge["target"]]
    start, end, y1, y2 = x1 + wide, x2 - 5, y1 + _HIGH / 2, y2 + _HIGH / 2
    stream = "" if edge["stream"] == "default" else f"/{edge['stream']}"
    said = html.escape(f"{edge['source']}{stream}->{edge['target']}: {edge['grouping']}")
    middle = (start + end) / 2
    return (
        f"<g><title>{said}</title>"
        f'<path d="M{start:.0f} {y1:.0f}C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f} {end:.0f} {y2:.0f}" {_LINE}/>'
        f'<path d="M{end:.0f} {y2 - 3:.0f}l5 3l-5 3z" fill="currentColor"/></g>'
    )
