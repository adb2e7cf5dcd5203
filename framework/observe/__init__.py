"""Watching a run: the journal of transactions, structured logs, progress lines."""

from framework.observe.journal import Journal, TransactionEvent
from framework.observe.logs import configure_logging
from framework.observe.progress import ProgressLines

__all__ = ["Journal", "ProgressLines", "TransactionEvent", "configure_logging"]
