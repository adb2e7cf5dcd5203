"""The contract suite of codecs: the behaviour that every codec must have. Needs pytest.

::

    class TestMyCodec(CodecContract):
        def codec(self):
            return MyCodec()

        def good(self):
            return [(b"a=1", {"a": 1}), (b"a=2", {"a": 2})]

        def bad(self):
            return [b"a"]
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from spouts.codecs.codec import Codec, UndecodableValueError


class CodecContract:
    """Subclass it and write ``codec``, ``good`` and, if a value can be wrong, ``bad``."""

    def codec(self) -> Codec:
        raise NotImplementedError

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        """Two or more values, each with the row that it decodes to."""
        raise NotImplementedError

    def bad(self) -> Sequence[bytes]:
        """Values that cannot be decoded; none if every value can."""
        return []

    # --- inside -----------------------------------------------------------------------------------

    def _values(self) -> list[bytes | None]:
        return [value for value, _ in self.good()]

    def _rows(self) -> list[Mapping[str, Any]]:
        return [row for _, row in self.good()]

    def _mixed(self) -> tuple[list[bytes | None], list[int]]:
        """Each bad value after a good one, and the positions of the bad ones."""
        mixed: list[bytes | None] = []
        places = []
        for number, bad in enumerate(self.bad()):
            mixed.append(self._values()[number % len(self._values())])
            places.append(len(mixed))
            mixed.append(bad)
        return [*mixed, *self._values()], places

    # --- the suite --------------------------------------------------------------------------------

    def test_good_values_become_their_rows_in_order(self) -> None:
        assert len(self._values()) >= 2, "good() gives two values or more"
        assert self.codec().decode(self._values()).to_pylist() == self._rows()
        assert self.codec().decode([*self._values(), *self._values()]).to_pylist() == self._rows() * 2

    def test_columns_are_the_fields_in_their_types(self) -> None:
        codec = self.codec()
        for batch in (codec.decode(self._values()), codec.decode([])):
            assert batch.schema.names == list(codec.fields)
            for name in codec.fields:
                assert codec.fields.type_of(name) in (None, batch.schema.field(name).type)

    def test_no_values_give_no_rows(self) -> None:
        codec = self.codec()
        assert codec.decode([]).num_rows == 0
        batch, bad = codec.decode_good([])
        assert (batch.num_rows, bad) == (0, [])

    def test_a_null_value_is_a_row_of_nulls(self) -> None:
        first, *rest = self._values()
        found = self.codec().decode([first, None, *rest]).to_pylist()
        assert found[1] == dict.fromkeys(self.codec().fields)
        assert [found[0], *found[2:]] == self._rows()

    def test_the_first_bad_value_is_named_by_its_place(self) -> None:
        for bad in self.bad():
            values = [*self._values(), bad, *self._values(), bad]
            with pytest.raises(UndecodableValueError) as caught:
                self.codec().decode(values)
            assert caught.value.index == len(self._values())
            assert caught.value.reason

    def test_good_values_beside_bad_ones_are_kept_in_order(self) -> None:
        values, places = self._mixed()
        batch, bad = self.codec().decode_good(values)
        assert [each.index for each in bad] == places
        assert all(each.reason for each in bad)
        good = [value for number, value in enumerate(values) if number not in places]
        assert batch.to_pylist() == self.codec().decode(good).to_pylist()

    def test_values_in_an_array_are_decoded_alike(self) -> None:
        codec = self.codec()
        values, places = self._mixed()
        array = pa.array([b"before", *self._values(), None, b"after"], pa.binary())
        assert codec.decode_array(array.slice(1, len(self._values()))).to_pylist() == self._rows()
        batch, bad = codec.decode_good_array(pa.array([b"before", *values], pa.binary()).slice(1))
        assert [each.index for each in bad] == places
        assert batch.to_pylist() == codec.decode_good(values)[0].to_pylist()

    def test_a_pickled_copy_decodes_alike(self) -> None:
        codec = self.codec()
        for copy in (pickle.loads(pickle.dumps(codec)), codec):
            assert copy.decode(self._values()).to_pylist() == self._rows()
        used = pickle.loads(pickle.dumps(codec))  # a codec that has decoded already
        assert used.decode(self._values()).to_pylist() == self._rows()
