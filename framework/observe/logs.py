"""Structured logs: one event per line, on standard error."""

from __future__ import annotations

import logging
import sys

import structlog

from framework.observe.progress import TerminalStream


def configure_logging(*, json_lines: bool = False, level: str = "info") -> None:
    """Set up structlog and Python's own logging. Called by the command line. A program that embeds
    Ratchet configures its own logging."""
    number = logging.getLevelNamesMapping()[level.upper()]
    if sys.stderr.isatty() and not isinstance(sys.stderr, TerminalStream):
        sys.stderr = TerminalStream(sys.stderr)  # so that a line of progress stays below the logs
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_lines
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("kazoo").setLevel(logging.ERROR)
    logging.getLogger("py4j").setLevel(logging.ERROR)
