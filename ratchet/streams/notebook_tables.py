"""The rows of a pipeline's sinks, for tests and notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from framework.call_site import ByName


class RowsTable(list[Mapping[str, Any]]):
    """The rows of a sink: a list that notebooks show as a table."""

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(str(row.get(name)))}</td>' for name in names)}</tr>" for row in self
        )
        return f"<table><tr>{head}</tr>{body}</table>"


class Tables(ByName[RowsTable]):
    """Sink -> its rows."""

    def __init__(self, tables: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        super().__init__({name: RowsTable(rows) for name, rows in tables.items()})

    def head(self, rows: int) -> Tables:
        """The first rows of each."""
        return Tables({name: its[:rows] for name, its in self.items()})

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{html.escape(name)}</h4>{rows._repr_html_()}" for name, rows in self.items())
