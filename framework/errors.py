"""Every error of Ratchet, named by how one recovers from it.

::

    RatchetError
    ├── ConfigError            fix the configuration; nothing was started
    ├── TopologyError          fix the topology; raised by build() or submit()
    ├── FailedException        the batch is replayed (raise it from a bolt to ask for that)
    ├── RetryableError         a server did not answer; the batch is replayed
    │   └── CommitOutcomeUnknown   the answer to a commit was lost; the replay reads what happened
    ├── StaleWriterError       a newer attempt or leader has written; this writer stops
    ├── LeadershipLostError    another driver leads, or the ZooKeeper session ended; stand for election again
    ├── CorruptStateError      a znode, row or file does not parse; look at what the message names
    ├── DataLossError          the source no longer holds what was planned; decide what to do about the gap
    ├── BadRecordError         a record cannot be decoded; the message names topic, partition and offset
    └── InvariantViolation     a bug of Ratchet: stop before more is written
"""

from __future__ import annotations


class RatchetError(Exception):
    """Root of every error that Ratchet raises on purpose."""


class ConfigError(RatchetError):
    """A setting is missing, unknown, of the wrong type or out of range."""


class TopologyError(RatchetError):
    """The topology cannot be built or run as it is written."""


class FailedException(RatchetError):
    """Fails the batch that is being processed, and only that: it is replayed, the process goes on.

    Source: ``org.apache.storm.topology.FailedException``.
    """


class RetryableError(RatchetError):
    """Something outside did not answer. Trying again later is safe and is what the driver does."""


class MovedOnError(RetryableError):
    """A row has changed more than once since the transaction that was asked for: ask for a later one."""


class CommitOutcomeUnknown(RetryableError):
    """A store took a commit and its answer was lost. Read the stamps to learn what happened; never guess."""


class StaleWriterError(RatchetError):
    """A newer attempt or a newer leader has written to this state.

    ``epoch`` is the epoch found there, or None. A driver steps down only when it is above its own; a late task of
    an attempt that is already dead is refused without further ado.
    """

    def __init__(self, message: str, epoch: int | None = None) -> None:
        super().__init__(message)
        self.epoch = epoch

    def __reduce__(self) -> tuple[type[StaleWriterError], tuple[str, int | None]]:
        return (type(self), (str(self), self.epoch))


class LeadershipLostError(RatchetError):
    """This driver no longer leads its topology. Nothing more may be written in its name."""


class CorruptStateError(RatchetError):
    """Something persisted does not parse or contradicts itself. It is never read as absent."""


class DataLossError(RatchetError):
    """The source no longer holds offsets that a plan needs, or is not the source it was."""


class BadRecordError(RatchetError):
    """A record of the source cannot be decoded."""


class InvariantViolation(RatchetError):
    """A numbered invariant does not hold. Always a bug, never the user's fault."""
