"""Observes a run: the journal of transactions, structured logs, progress lines, metrics."""

from framework.observe.journal import AttemptRecord, Journal, TransactionEvent, TransactionRecord
from framework.observe.logs import configure_logging
from framework.observe.progress_lines import ProgressLines

__all__ = [
    "AttemptRecord",
    "Journal",
    "ProgressLines",
    "TransactionEvent",
    "TransactionRecord",
    "configure_logging",
]
