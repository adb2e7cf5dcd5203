"""Fields that have another name in the records than in the topology."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Codec, Truths, Values
from spouts.codecs.encoding_codec import WrappingCodec, encoder


def names_in_records(fields: Fields, alias: Mapping[str, str] | None) -> list[str]:
    """The name that each field has in the records. ``alias``: field -> its name there, as it is
    written: a dot is a part of the name. Raises ``TopologyError`` for a field that is not declared,
    and for two fields of one name."""
    found: dict[str, str] = {}
    for field, name in (alias or {}).items():
        if field not in fields:
            raise TopologyError(f"alias: {field!r} is not declared; {_known(field, list(fields))}")
        if not isinstance(name, str):
            raise TopologyError(f"alias: the name of field {field!r} in the records must be text, not {name!r}")
    for field in fields:
        name = (alias or {}).get(field, field)
        if name in found:
            raise TopologyError(
                f"alias: fields {found[name]!r} and {field!r} are both called {name!r} in the records; keep one of them"
            )
        found[name] = field
    return list(found)


class AliasedCodec(WrappingCodec):
    """Another codec, some of whose fields have other names: for codecs whose schema names the
    fields, such as ``AvroCodec``.

    ``alias``: field -> the name that the codec gives it, as of ``JsonCodec``. Raises
    ``TopologyError`` for a name that the codec does not have, and for two fields of one name. It
    encodes if the codec does.

    >>> from spouts import TextCodec
    >>> AliasedCodec(TextCodec("value"), {"line": "value"}).decode([b"a"]).to_pydict()
    {'line': ['a']}
    """

    def __init__(self, codec: Codec, alias: Mapping[str, str]) -> None:
        renamed: dict[str, str] = {}
        for field, name in alias.items():
            if name not in codec.fields:
                raise TopologyError(f"alias: the schema has no field {name!r}; {_known(name, list(codec.fields))}")
            if name in renamed:
                raise TopologyError(f"alias: {name!r} is called both {renamed[name]!r} and {field!r}; keep one of them")
            renamed[name] = field
        names = [renamed.get(name, name) for name in codec.fields]
        for name in names:
            if names.count(name) > 1:
                raise TopologyError(f"alias: two fields are called {name!r}; give one of them another name")
        self._codec = codec
        self._in_records = dict(zip(names, codec.fields, strict=True))
        self.fields = Fields.of(
            {name: codec.fields.type_of(given) for name, given in zip(names, codec.fields, strict=True)}
        )

    def decode(self, values: Values) -> pa.RecordBatch:
        return self._renamed(self._codec.decode(values))

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        batch, bad = self._codec.decode_good(values)
        return self._renamed(batch), bad

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return self._renamed(self._codec.decode_array(values))

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        batch, bad = self._codec.decode_good_array(values)
        return self._renamed(batch), bad

    def left_out(self, values: Values | pa.BinaryArray) -> Truths | None:
        return self._codec.left_out(values)

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that the codec cannot encode."""
        for name in fields:
            if name not in self.fields:
                raise TopologyError(f"alias: there is no field {name!r}; {_known(name, list(self.fields))}")
        encoder(self._codec).check_encodable(
            Fields.of({self._in_records[name]: fields.type_of(name) for name in fields})
        )

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value for each row. Raises ``BadRecordError`` for a row that cannot be encoded."""
        return encoder(self._codec).encode(
            batch.rename_columns([self._in_records[each] for each in batch.schema.names])
        )

    def _renamed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.rename_columns(list(self.fields))


def _known(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"perhaps {near[0]!r} is meant" if near else f"declared: {', '.join(known)}"
