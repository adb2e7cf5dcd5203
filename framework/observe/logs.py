"""Structured logs: one event per line, on standard error. Silent until configured.

A program that embeds Ratchet gets no logs of it until it calls ``configure_logging``, or configures
structlog itself. Spark executors and workers log in the same way as the command that started them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import structlog

from framework.observe.progress_lines import TerminalStream

#: Passes the log settings to child processes: ``text:info``, ``json:debug`` and the like.
INHERITED = "RATCHET_LOG"


def get_logger() -> Any:
    """A structlog logger that prints nothing until logging is configured. It also configures a
    child process of a command, before its first line."""
    if INHERITED in os.environ and not structlog.is_configured():
        form, _, level = os.environ[INHERITED].partition(":")
        configure_logging(json_lines=form == "json", level=level or "info")
    return structlog.wrap_logger(_PrintsWhenAsked())


def configure_logging(*, json_lines: bool = False, level: str = "info", inherited: bool = False) -> None:
    """Configure structlog and Python's logging alike. The command line calls it; a program that
    embeds Ratchet may call it, or configure structlog in its own way. ``inherited``: child
    processes log in the same way."""
    if inherited:
        os.environ[INHERITED] = f"{'json' if json_lines else 'text'}:{level}"
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
    without_py4j()


class _OfOthers(logging.Filter):
    """Leaves out what Py4J logs by the root logger, beside the errors that it raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        return os.path.basename(os.path.dirname(record.pathname)) != "py4j"


_OF_OTHERS = _OfOthers()


def without_py4j() -> None:
    """Keep stack traces of Py4J from the terminal. When Spark's JVM ends before this process, Py4J
    raises an error, and logs it."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_OF_OTHERS)


_quiet = ContextVar("quiet", default=False)


@contextmanager
def no_logs() -> Iterator[None]:
    """Suppress the logs of this package in this thread. For code that kills drivers on purpose."""
    before = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(before)


class _PrintsWhenAsked:
    """The end of this package's log processors: forwards to the configured logger, or drops."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        if not structlog.is_configured() or _quiet.get():
            return _drop
        found: Callable[..., None] = getattr(structlog.get_config()["logger_factory"](), method)
        return partial(_say, found)


def _say(log: Callable[..., None], *arguments: Any, **fields: Any) -> None:
    """Write a log line, if possible: a full disk, a reader that is gone, or a closed stream must
    not end a run."""
    with suppress(OSError, ValueError):
        log(*arguments, **fields)


def _drop(*arguments: Any, **fields: Any) -> None:
    """Print nothing."""
