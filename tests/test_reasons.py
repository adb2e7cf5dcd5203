"""A reason is short, and one printable line, wherever its text comes from."""

from __future__ import annotations

import pickle

import pytest

from framework import Fields
from framework.errors import REASON_BYTES_MAX, BadRecordError, reason_of
from spouts import JsonCodec
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import UndecodableValueError

FORGED = "no\x00\n2026-01-01 all is well\x1b]0;title\x07\x9b31m\u202e\u2028\ud800\x7f"
SHOWN = r"no\x00\x0a2026-01-01 all is well\x1b]0;title\x07\x9b31m\u202e\u2028\ud800\x7f"


def test_a_reason_has_no_sign_that_a_terminal_a_log_or_a_store_obeys() -> None:
    assert reason_of(FORGED) == SHOWN
    assert reason_of(SHOWN) == SHOWN
    assert reason_of("Grüße, 日本 🙂") == "Grüße, 日本 🙂"


@pytest.mark.parametrize("text", ["x" * 900_000, "\x00" * 1_024, "日" * 1_000, "é" * 512 + "x"])
def test_a_long_reason_is_cut_and_says_so(text: str) -> None:
    reason = reason_of(text)
    assert len(reason.encode()) <= REASON_BYTES_MAX
    assert reason.endswith(f"... (shortened, it has {len(text):,} characters)")
    assert reason_of(reason) == reason


def test_every_error_about_a_record_has_such_a_reason() -> None:
    error = BadRecordError(FORGED, FORGED)
    assert (str(error), error.about) == (SHOWN, SHOWN)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.about) == (SHOWN, SHOWN)
    assert UndecodableValueError(3, FORGED).reason == SHOWN
    assert BadRecord(3, FORGED).reason == SHOWN


@pytest.mark.parametrize("value", [b'{"n": "' + b"x" * 900_000 + b'"}', b'{"n": "\\u0000\\u001b[2J"}', b"\x1b[2J" * 9])
def test_codecs_make_short_printable_reasons_of_large_and_hostile_values(value: bytes) -> None:
    _, (bad,) = JsonCodec(Fields(n=int)).decode_good([value])
    assert bad.reason == reason_of(bad.reason) and "\x1b" not in bad.reason
