"""What ``ratchet`` does when it is typed, and ``ratchet.read`` for notebooks.

It imports nothing of ours before Ctrl-C is quiet: Python takes a second to import the framework.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework import Snapshot


def main() -> None:
    """Run the command that was typed."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a trace
    from framework.commands.cli import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="ratchet")


def read(*what: Any, **options: Any) -> Snapshot:
    """As ``framework.read``: states of a topology, all as of one transaction.

    ::

        import ratchet

        with ratchet.read(topology) as found:
            found["words"].duckdb().aggregate("sum(count)").show()
    """
    from framework import read as read_states

    return read_states(*what, **options)
