"""Classifies the errors of tasks by their consequence for the topology, for both kinds of
topologies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from pathlib import Path

from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    DataLossError,
    FailedException,
    InvariantViolation,
    RetryableError,
    StaleWriterError,
    TopologyError,
    UnknownFieldError,
    panics,
    reason_of,
    text_of,
)

#: Errors that a retry cannot repair.
FATAL_ERRORS = (BadRecordError, CorruptStateError, ConfigError, InvariantViolation, UnknownFieldError)


def users_errors() -> tuple[type[BaseException], ...]:
    """The exceptions to catch from user code, for ``except users_errors()``. Python evaluates the
    call after the exception was raised, so a class that it created is included (see ``panics``).
    ``sys.exit()``, a cancelled coroutine and a panic fail the call in which they occur; they do not
    end a process of Ratchet. Nor does a ``KeyboardInterrupt`` in another thread than the main one,
    where Ctrl-C raises none."""
    found: tuple[type[BaseException], ...] = (Exception, SystemExit, asyncio.CancelledError, *panics())
    return found if threading.current_thread() is threading.main_thread() else (*found, KeyboardInterrupt)


@contextlib.contextmanager
def ignoring_users_errors() -> Iterator[None]:
    """Continue after the block, whatever user code raises in it."""
    try:
        yield
    except users_errors():
        pass


class FailureKind(Enum):
    """The driver's reaction to a failure."""

    #: ``FailedException``: replay, without limit.
    FAILED = "failed"
    #: An external system did not answer: replay, without limit.
    RETRYABLE = "retryable"
    #: Any other exception: replay up to ``topology.max.attempts``.
    ERROR = "error"
    #: The source lost planned records: make a new plan where the protocol allows it (C7), else
    #: stop.
    DATA_LOSS = "data loss"
    #: A fence refused the writer: step down if the epoch is higher, else replay up to
    #: ``topology.max.attempts``.
    STALE = "stale"
    #: The value of a record was refused: remove the record from the plan, or stop the topology
    #: (C51).
    BAD_RECORD = "bad record"
    #: A replay cannot help: stop the topology.
    FATAL = "fatal"
    #: ``ConfigError``: as ``FATAL``, and the user can correct the settings.
    MISCONFIGURED = "misconfigured"

    @property
    def stops(self) -> bool:
        """Whether the topology stops at the first failure."""
        return self in (FailureKind.FATAL, FailureKind.MISCONFIGURED)


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """The reason why an attempt failed, with the component and task."""

    kind: FailureKind
    component_id: str
    task: int
    message: str
    _: KW_ONLY
    trace: str = ""
    epoch: int | None = None
    error: str = ""  # the error's class
    where: str = ""  # the user's own file, line and code
    advice: str = ""  # what to do next
    about: str = ""  # the tuple that was executed, shortened; shown to the user, never logged
    is_of_try: bool = False  # a store refused a write that was only tried
    nothing_after: bool = False  # in this phase, no component of a later level has run

    @classmethod
    def of(cls, error: BaseException, component_id: str, task: int, about: str = "") -> TaskFailure:
        kind = kind_of(error)
        trace = trace_of(error) if kind is FailureKind.ERROR else ""
        text = text_of(error)
        message = reason_of(text if kind is not FailureKind.ERROR else f"{type(error).__name__}: {text}")
        return cls(
            kind,
            component_id,
            task,
            message,
            trace=trace,
            epoch=getattr(error, "epoch", None),
            error=type(error).__name__,
            where=users_line(error) if kind.stops or kind in (FailureKind.ERROR, FailureKind.BAD_RECORD) else "",
            advice=getattr(error, "advice", ""),
            about=about or getattr(error, "about", ""),
        )

    def lines(self) -> list[str]:
        """Lines for display: the error, and its place in the user's own code."""
        shown = [f"component {self.component_id!r}, task {self.task}: {self.message}"]
        if self.where:
            shown.append(f"  at {self.where}")
        if self.about:
            shown.append(f"  with {self.about}")
        if self.advice:
            shown.append(f"  next: {self.advice}")
        return shown

    def __str__(self) -> str:
        return f"{self.component_id}[{self.task}]: {self.message}"


class FrameFailed(Exception):
    """A DataFrame bolt failed on the driver. ``failure`` names the bolt; the cause is its error."""

    def __init__(self, failure: TaskFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def in_users_words(error: BaseException) -> str:
    """An error from user code in one line: the last line of the user's own code that led to it, and
    its message."""
    where = users_line(error)
    return f"{where}{': ' if where else ''}{type(error).__name__}: {error}"


def trace_of(error: BaseException) -> str:
    """The traceback of an error and of its causes. Messages are limited as in ``reason_of``,
    because they may quote a record."""
    chain, before = [error], _before(error)
    while before is not None and before not in chain:
        chain.append(before)
        before = _before(before)
    return "\n".join(map(_frames, reversed(chain)))


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> str:
    said = reason_of("".join(traceback.format_exception_only(error)).rstrip())
    return "".join(["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__), said, "\n"])


def users_line(error: BaseException) -> str:
    """The last line of the user's own code in an error's traceback, as ``file:line: code``; empty
    when there is none."""
    own = [each for each in traceback.extract_tb(error.__traceback__) if is_users_file(each.filename)]
    return shown_line(own[-1].filename, own[-1].lineno or 0, own[-1].line or "") if own else ""


def shown_line(file: str, number: int, code: str) -> str:
    """A line of the user's own code, as ``file:line: code``."""
    return f"{_ARCHIVE.sub('', file)}:{number}: {code}"


def is_users_file(file: str) -> bool:
    """Whether a file is neither Python's own, nor part of an installed package, nor of Ratchet. On
    an executor of a cluster it may be in the archive of code that the driver sent."""
    if _ARCHIVE.match(file):
        return _ARCHIVE.sub("", file).split("/")[0] not in _OURS
    if file.endswith((".pyx", ".pxi")):
        return False  # belongs to a compiled library, which names its sources without their folder
    return not file.startswith(_NOT_USERS) and "site-packages" not in file and "dist-packages" not in file


_OURS = ("framework", "spouts", "sinks", "integration")
_ARCHIVE = re.compile(r".*/ratchet-code-[0-9a-f]{16}\.zip/")
#: The folder that contains our packages.
_ROOT = Path(__file__).resolve().parents[2]
_NOT_USERS = (
    "<",
    *(sysconfig.get_paths()[each] for each in ("stdlib", "platstdlib")),
    *(f"{_ROOT / each}{os.sep}" for each in _OURS),
)

_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureKind], ...] = (
    (FailedException, FailureKind.FAILED),
    (RetryableError, FailureKind.RETRYABLE),
    (StaleWriterError, FailureKind.STALE),
    (DataLossError, FailureKind.DATA_LOSS),
    (BadRecordError, FailureKind.BAD_RECORD),
    (ConfigError, FailureKind.MISCONFIGURED),
    (FATAL_ERRORS, FailureKind.FATAL),
    # values that do not fit the declared fields: no replay changes them
    (TopologyError, FailureKind.FATAL),
)


def kind_of(error: BaseException) -> FailureKind:
    """The reaction of the driver of a transactional topology to an error."""
    if isinstance(error, KeyError) and _NO_COLUMN.match(text_of(error)):
        return FailureKind.FATAL  # Arrow's error for a column that no batch of the stream has
    return next((kind for errors, kind in _KINDS if isinstance(error, errors)), FailureKind.ERROR)


_NO_COLUMN = re.compile("""'(Field ".*"|Column .*) does not exist in schema'$""")
