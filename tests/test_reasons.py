"""A reason is short, and one printable line, wherever its text comes from."""

from __future__ import annotations

import json
import pickle

import pytest

from framework import Fields
from framework.commands.value_format import json_text
from framework.core.round_protocol import ComponentError, ErrorKind
from framework.core.run import CoreTopologyFailed
from framework.errors import REASON_BYTES_MAX, BadRecordError, FailedException, reason_of
from framework.execution import TaskFailure
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


def raised(error: Exception) -> Exception:
    """An error that another one led to, as a bolt raises it."""
    try:
        try:
            raise KeyError(FORGED)
        except KeyError as cause:
            raise error from cause
    except type(error) as found:
        return found


@pytest.mark.parametrize("kind", [ValueError, FailedException, BadRecordError])
def test_what_a_users_error_quotes_reaches_no_log_raw(kind: type[Exception]) -> None:
    error = raised(kind(f"cannot read {FORGED}{'x' * 900_000}"))
    failure = TaskFailure.of(error, "bolt", 0)
    of_core = ComponentError.of(error, ErrorKind.DIED, "bolt", 0)
    for message in (failure.message, of_core.message):
        assert f"cannot read {SHOWN}" in message and len(message.encode()) <= REASON_BYTES_MAX
    for lines in (failure.trace, of_core.trace, str(CoreTopologyFailed.of(of_core))):
        assert len(lines) < 10_000
        assert all(each.isprintable() for each in lines.splitlines())
        assert "\n2026-01-01" not in lines
    assert of_core.trace.count("Traceback (most recent call last)") == 2
    assert of_core.trace.index("KeyError") < of_core.trace.index("cannot read")
    assert "\nTraceback" in str(CoreTopologyFailed.of(of_core))


def test_json_for_a_person_has_no_control_characters() -> None:
    text = json_text(["é", FORGED])
    assert text.isprintable() and text.startswith('["é", ')
    assert json.loads(text) == ["é", FORGED]
