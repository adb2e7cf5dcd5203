"""Ends a server when the process that started it ends.

``guarded_by(SIGNAL) + COMMAND`` runs the command and waits until its own standard input closes.
This happens when the parent dies, however it dies. Then it ends the command: with SIGNAL (such as
``TERM``), and after ``STOP_TIMEOUT_S`` seconds with SIGKILL. If the guardian itself is killed,
Linux kills the command.

It runs as a program of its own and imports only the standard library, because each running server
has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

STOP_TIMEOUT_S = 15.0
_PR_SET_PDEATHSIG = 1


def guarded_by(name_of_signal: str) -> list[str]:
    """The words to put before a command that has to be guarded."""
    return [sys.executable, "-I", "-S", __file__, name_of_signal]


def main(name_of_signal: str, command: list[str]) -> int:
    """Run and guard the command. Returns its exit code; 128 + N if signal N ended it."""
    parent = os.getpid()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the parent decides, by closing this standard input
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _child(parent))
    threading.Thread(
        target=_end_with_parent, args=(process, signal.Signals[f"SIG{name_of_signal}"]), daemon=True
    ).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _child(parent: int) -> None:
    """Runs in the child before it becomes the server."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ctrl-C must reach only the parent, which stops its servers in order
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end_with_parent(process: subprocess.Popen[bytes], stop: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    process.send_signal(stop)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
