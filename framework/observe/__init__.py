"""Watching a run: the journal of transactions, structured logs, progress lines."""

from framework.observe.journal import Journal, TransactionEvent
from framework.observe.logs import configure_logging

__all__ = ["Journal", "TransactionEvent", "configure_logging"]
