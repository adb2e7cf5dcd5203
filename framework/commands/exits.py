"""From an error to one line and an exit status, in one place for all commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from framework.errors import ConfigError, RatchetError, TopologyError
from framework.transactions.run import TopologyFailed

EXIT_FAILED = 1
EXIT_MISUSED = 2
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130


@contextmanager
def exit_codes(*, as_json: bool = False, next_command: str | None = None) -> Iterator[None]:
    """End the command with one line and status 2 for what its user can mend, 1 for any other error
    of ours, 130 for Ctrl-C. ``as_json``: say it on standard output too, as a line of type
    ``error``. ``next_command``: what to type when a topology fails over its records."""
    try:
        yield
    except (RatchetError, TimeoutError) as error:
        lines = error.lines() if isinstance(error, TopologyFailed) else [str(error)]
        if isinstance(error, TopologyFailed) and error.failure.where and next_command is not None:
            lines.append(f"  next: {next_command}")
        typer.echo("error: " + "\n".join(lines), err=True)
        status = EXIT_MISUSED if isinstance(error, (ConfigError, TopologyError)) else EXIT_FAILED
        if as_json:
            typer.echo(json.dumps({"type": "error", "status": status, "text": str(error)}))
        raise SystemExit(status) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
