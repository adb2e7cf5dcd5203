"""What an error of a task means for its topology, of either kind."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum

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

#: What user code may end with. ``sys.exit()`` ends what called it, and no process of Ratchet's.
USER_ERRORS = (Exception, SystemExit)
#: What no repetition mends.
FATAL_ERRORS = (BadRecordError, CorruptStateError, ConfigError, InvariantViolation)


class FailureKind(Enum):
    """What the driver does about a failure."""

    FAILED = "failed"  # FailedException: replay, without limit
    RETRYABLE = "retryable"  # something outside: replay, without limit
    ERROR = "error"  # any other exception: replay up to topology.max.attempts
    DATA_LOSS = (
        "data loss"  # the source lost what was planned: plan afresh where the protocol allows it (C7), else stop
    )
    STALE = "stale"  # refused by a fence: step down for a higher epoch, else replay up to topology.max.attempts
    FATAL = "fatal"  # replaying cannot help: stop the topology


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """Why an attempt failed, where."""

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
    """What the driver of a transactional topology does about it."""
    return next((kind for errors, kind in _KINDS if isinstance(error, errors)), FailureKind.ERROR)
