"""Rows as JSON objects that a JSON Schema validates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import ConfigError, TopologyError
from spouts.codecs.json_arrow_schema import resolved, self_contained

#: So much of a reason is shown: it has the whole value.
_SHOWN = 200


class ObjectWriter:
    """Encodes rows as objects of one JSON Schema. ``others``: the documents that it refers to.
    Raises ``TopologyError`` for a schema that is not valid."""

    def __init__(self, document: Mapping[str, Any], others: Mapping[str, str]) -> None:
        try:
            from jsonschema import exceptions, validators
            from referencing import Registry
        except ImportError as error:
            raise ConfigError(
                f"writing by a JSON Schema lacks {error.name}: pip install 'ratchet-pipelines[registry]'"
            ) from error
        self._document = self_contained(document, others)
        kind: Any = validators.validator_for(self._document)
        try:
            kind.check_schema(self._document)
        except exceptions.SchemaError as error:
            raise TopologyError(f"JSON Schema, {error.json_path}: {error.message[:_SHOWN]}") from None
        # An empty registry: nothing is fetched that a schema refers to.
        self._validator = kind(self._document, registry=Registry())
        self._best: Any = exceptions.best_match
        self._root = resolved(self._document, self._document, "#")

    def check(self, names: Sequence[str]) -> None:
        """Raise ``TopologyError`` for a required property that rows with these fields do not
        have."""
        for name in self._root.get("required", ()):
            if name not in names:
                raise TopologyError(f"the JSON Schema requires {name!r}, and the rows do not have it: add it")

    def write(self, columns: Mapping[str, pa.Array], rows: int) -> list[bytes]:
        """The object of each row. Raises ``ValueError`` with the reason."""
        if not columns:
            return [self._written({})] * rows
        lists = [column.to_pylist() for column in columns.values()]
        return [self._written(dict(zip(columns, row, strict=True))) for row in zip(*lists, strict=True)]

    def _written(self, row: Mapping[str, Any]) -> bytes:
        found = self._without_nulls(row, self._root)
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        error = self._best(self._validator.iter_errors(found))
        if error is not None:
            raise ValueError(f"{error.json_path.removeprefix('$.')}: {error.message[:_SHOWN]}")
        return text.encode()

    def _without_nulls(self, value: Any, node: Any) -> Any:
        """The value without the properties that are null and not required."""
        if value is None:
            return None
        node = resolved(node, self._document, "#")
        if isinstance(value, list):
            return [self._without_nulls(each, node["items"]) for each in value]
        if not isinstance(value, Mapping):
            return value
        required = node.get("required", ())
        return {
            name: self._without_nulls(each, node["properties"][name])
            for name, each in value.items()
            if each is not None or name in required
        }
