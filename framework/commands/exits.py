"""From an error to one line and an exit status, in one place for all commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from framework.errors import ConfigError, RatchetError, TopologyError

EXIT_FAILED = 1
EXIT_MISUSED = 2


@contextmanager
def exit_codes() -> Iterator[None]:
    """Ends the command with one line and status 2 for what its user can mend, 1 for anything else of ours."""
    try:
        yield
    except RatchetError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(EXIT_MISUSED if isinstance(error, (ConfigError, TopologyError)) else EXIT_FAILED) from None
