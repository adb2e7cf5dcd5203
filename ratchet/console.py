"""The entry point of the command ``ratchet``.

It imports Ratchet's modules only after Ctrl-C is handled, because importing the framework takes a
second.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a traceback
    from framework.commands.cli import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="ratchet")
