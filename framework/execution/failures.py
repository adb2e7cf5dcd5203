"""Classifies the errors of tasks by their consequence for the topology. For both kinds of
topology."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
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
)

#: The exceptions caught from user code. ``sys.exit()`` fails the call that made it; it ends no
#: process of Ratchet.
USER_ERRORS = (Exception, SystemExit)
#: Errors that no repetition can repair.
FATAL_ERRORS = (BadRecordError, CorruptStateError, ConfigError, InvariantViolation)
#: Where the packages of Ratchet are.
_OURS = str(Path(__file__).resolve().parents[2])


def in_users_words(error: BaseException) -> str:
    """An error from user code in one line: the last line of the user's own that led to it, and
    what it says."""
    own = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each.filename)]
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}: " if own else ""
    return f"{where}{type(error).__name__}: {error}"


def _is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor one of ours."""
    return not file.startswith(("<", sys.base_prefix, _OURS)) and "site-packages" not in file


class FailureKind(Enum):
    """What the driver does about a failure."""

    #: ``FailedException``: replay, without limit.
    FAILED = "failed"
    #: Something outside did not answer: replay, without limit.
    RETRYABLE = "retryable"
    #: Any other exception: replay up to ``topology.max.attempts``.
    ERROR = "error"
    #: The source lost planned records: plan afresh where the protocol allows it (C7), else stop.
    DATA_LOSS = "data loss"
    #: A fence refused the writer: step down for a higher epoch, else replay up to
    #: ``topology.max.attempts``.
    STALE = "stale"
    #: Replaying cannot help: stop the topology.
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """Why an attempt failed, and in which component and task."""

    kind: FailureKind
    component_id: str
    task: int
    message: str
    trace: str = ""
    epoch: int | None = None
    error: str = ""  # the class of the error

    @classmethod
    def of(cls, error: BaseException, component_id: str, task: int) -> TaskFailure:
        kind = kind_of(error)
        trace = "" if kind is not FailureKind.ERROR else "".join(traceback.format_exception(error))
        message = str(error) if kind is not FailureKind.ERROR else f"{type(error).__name__}: {error}"
        return cls(kind, component_id, task, message, trace, getattr(error, "epoch", None), type(error).__name__)

    def __str__(self) -> str:
        return f"{self.component_id}[{self.task}]: {self.message}"


_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureKind], ...] = (
    (FailedException, FailureKind.FAILED),
    (RetryableError, FailureKind.RETRYABLE),
    (StaleWriterError, FailureKind.STALE),
    (DataLossError, FailureKind.DATA_LOSS),
    (FATAL_ERRORS, FailureKind.FATAL),
)


def kind_of(error: BaseException) -> FailureKind:
    """What the driver of a transactional topology does about an error."""
    return next((kind for errors, kind in _KINDS if isinstance(error, errors)), FailureKind.ERROR)
