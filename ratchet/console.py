"""What ``ratchet`` does when it is typed.

It imports nothing of ours before Ctrl-C is quiet: Python takes a second to import the framework.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command that was typed."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a trace
    from framework.commands.cli import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="ratchet")
