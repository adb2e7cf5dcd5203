"""Every error of Ratchet, named by how to recover from it.

::

    RatchetError
    ├── ConfigError            fix the configuration; nothing was started
    ├── TopologyError          fix the topology; raised by build() or submit()
    │   └── UnknownFieldError      no tuple has the field that a bolt asks for; correct its name
    ├── FailedException        the batch is replayed (a bolt may raise it to ask for that)
    ├── RetryableError         a server did not answer; the batch is replayed
    │   ├── MovedOnError           a row has changed since; ask for a later transaction
    │   └── CommitOutcomeUnknown   the reply to a commit was lost; the replay reads what happened
    ├── StaleWriterError       a newer attempt or leader has written; this writer stops
    ├── LeadershipLostError    another driver leads, or the session ended; stand for election again
    ├── CorruptStateError      a znode, row or file cannot be parsed; look at what the message names
    ├── DataLossError          the source lost planned records; decide what to do about the gap
    ├── BadRecordError         a record cannot be decoded, or its value is refused
    └── InvariantViolation     a bug of Ratchet: stop before more is written
"""

from __future__ import annotations

import re

__all__ = [
    "BadRecordError",
    "CommitOutcomeUnknown",
    "ConfigError",
    "CorruptStateError",
    "DataLossError",
    "FailedException",
    "InvariantViolation",
    "LeadershipLostError",
    "MovedOnError",
    "RatchetError",
    "RetryableError",
    "StaleWriterError",
    "TopologyError",
    "UnknownFieldError",
]

#: How many bytes of a reason are kept: more would burden logs, documents and dead letters.
REASON_BYTES_MAX = 1_024
#: Characters that a terminal, a log or a store may not treat as text: control characters, line and
#: paragraph separators, marks that reverse the direction of writing, lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def reason_of(text: str) -> str:
    """Convert text of any origin to a reason that can be logged, printed and stored: one line,
    without control characters, of ``REASON_BYTES_MAX`` bytes at most. A reason is returned
    unchanged.

    >>> reason_of("no\\nINFO all is well\\x1b]0;title")
    'no\\\\x0aINFO all is well\\\\x1b]0;title'
    """
    shown = escaped(text[:REASON_BYTES_MAX])
    encoded = shown.encode()
    if len(text) <= REASON_BYTES_MAX and len(encoded) <= REASON_BYTES_MAX:
        return shown
    end = f"... (shortened, it has {len(text):,} characters)"
    return encoded[: REASON_BYTES_MAX - len(end)].decode(errors="ignore") + end


def text_of(error: BaseException) -> str:
    """The text of an error of any class, also of a class that raises another error in
    ``__str__``."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - of any class
        return f"its text cannot be made ({type(failed).__name__})"


def escaped(text: str) -> str:
    """The text on one line, without control characters."""
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def panics() -> tuple[type[BaseException], ...]:
    """The classes of the panics of libraries in Rust, such as polars. Each library has its own
    class, which is not an ``Exception``, cannot be imported, and is created by the first panic."""
    return tuple(each for each in BaseException.__subclasses__() if each.__name__ == "PanicException")


class RatchetError(Exception):
    """Root of every error that Ratchet raises on purpose."""


class ConfigError(RatchetError):
    """A setting is missing, unknown, of the wrong type or out of range."""


class TopologyError(RatchetError):
    """The topology cannot be built or run as it is defined."""


class UnknownFieldError(TopologyError, KeyError, IndexError):
    """A field, requested by name or by position, does not exist in the tuples of the stream. It is
    a ``KeyError`` and an ``IndexError``, like that of a dictionary and of a list."""

    __str__ = Exception.__str__  # KeyError's own would quote the message


class FailedException(RatchetError):
    """Fails the current batch only: it is replayed, and the process continues. In a core topology,
    fails the current tuple.

    Source: ``org.apache.storm.topology.FailedException``.
    """


class RetryableError(RatchetError):
    """An external system did not answer. It is safe to try again later, and the driver does so."""


class MovedOnError(RetryableError):
    """A row has changed more than once since the requested transaction. Ask for a later one."""


class CommitOutcomeUnknown(RetryableError):
    """A commit was sent to a store and the reply was lost. Read the stamps to learn what happened;
    never guess."""


class StaleWriterError(RatchetError):
    """A newer attempt or a newer leader has written to this state.

    ``epoch`` is the epoch found there, or None. A driver steps down only when it is above its own.
    Otherwise the writer is a late task of a dead attempt, and the error only refuses its write.
    """

    def __init__(self, message: str, epoch: int | None = None) -> None:
        super().__init__(message)
        self.epoch = epoch

    def __reduce__(self) -> tuple[type[StaleWriterError], tuple[str, int | None]]:
        return (type(self), (str(self), self.epoch))


class LeadershipLostError(RatchetError):
    """This driver no longer leads its topology. Nothing more may be written in its name."""


class CorruptStateError(RatchetError):
    """Persisted data cannot be parsed or contradicts itself. It is never treated as absent. Quoted
    data is escaped."""

    def __init__(self, reason: str) -> None:
        super().__init__(escaped(reason))


class DataLossError(RatchetError):
    """The source no longer holds offsets that a plan needs, or is no longer the same source."""


#: Advice for a transactional topology.
READ_ANEW = (
    "to read it anew, run `ratchet reset MODULE:TOPOLOGY --positions --yes` (the sinks keep what they hold), or with "
    "--everything (they are emptied)"
)


class BadRecordError(RatchetError):
    """A record of the source cannot be decoded, or the value of one is refused: by a state, by a
    sink, or by a bolt of yours, which may raise it.

    In a transactional topology, the ``on_bad_record`` of the bolt or of the spout decides about the
    record. It is found by bisecting the batch, so the error need not name it.

    * ``message``: limited as in ``reason_of``.
    * ``about``: the beginning of the record, shown to the user only; never logged or stored.
    * ``advice``: the remedy, if the message does not contain it.
    """

    def __init__(self, message: str, about: str = "", advice: str = "") -> None:
        super().__init__(reason_of(message))
        self.about = reason_of(about)
        self.advice = advice

    def __reduce__(self) -> tuple[type[BadRecordError], tuple[str, str, str]]:
        return (type(self), (str(self), self.about, self.advice))


class BatchTooLargeError(BadRecordError):
    """A batch is too large for a task, though each of its records may be fine.

    In a transactional topology whose source can divide its batches, the batch is planned again in
    halves, whatever ``on_bad_record`` says (ADR 84). A single record that is too large by itself is
    a bad record. Raise it before the commit is opened."""


class InvariantViolation(RatchetError):
    """A numbered invariant does not hold. Always a bug, never the user's fault."""
