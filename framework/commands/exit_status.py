"""Converts an error to one line and an exit status, in one place for all commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO

import typer

from framework.errors import ConfigError, RatchetError, TopologyError, escaped
from framework.observe.progress_lines import TerminalStream
from framework.transactions.run import TopologyFailed

EXIT_FAILED = 1
EXIT_MISUSED = 2
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130


@contextmanager
def exit_codes(*, as_json: bool = False, next_command: str | None = None) -> Iterator[None]:
    """Convert errors: one line and status 2 for errors that the user can fix, 1 for other errors of
    Ratchet and of the system, 130 for Ctrl-C.

    * ``as_json``: print the error on standard output too, as a line of type ``error``; this
      includes unexpected errors, which end with status 1 and a stack trace.
    * ``next_command``: the command to suggest when a topology fails because of its records."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of standard output has gone
    except (RatchetError, OSError) as error:
        status = EXIT_MISUSED if isinstance(error, (ConfigError, TopologyError)) else EXIT_FAILED
        lines = error.lines() if isinstance(error, TopologyFailed) else [str(error)]
        if isinstance(error, TopologyFailed) and error.failure.where and next_command is not None:
            lines.append(f"  next: {next_command}")
        shown = [escaped(line) for each in lines for line in each.split("\n")]
        typer.echo("error: " + "\n".join(shown), err=True)
        if as_json:
            _print_error(status, str(error))
        raise SystemExit(status) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if as_json:
            _print_error(EXIT_FAILED, f"{type(error).__name__}: {error}")
        raise


def _print_error(status: int, text: str) -> None:
    with suppress(OSError):  # standard output itself may have failed
        typer.echo(json.dumps({"type": "error", "status": status, "text": text}))


@contextmanager
def own_output(*, as_json: bool = False) -> Iterator[IO[str]]:
    """Standard output, reserved for the command when prints of user code in this process would
    disturb it, among JSON lines or behind a progress line: then those prints go to standard error.
    """
    own = sys.stdout
    if as_json or (own.isatty() and isinstance(sys.stderr, TerminalStream)):
        with redirect_stdout(sys.stderr):
            yield own
    else:
        yield own
