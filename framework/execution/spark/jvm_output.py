"""The output of Spark's JVM and its Python workers.

While Spark starts and stops, Spark itself writes this output. It goes to a log file; when something
fails, the file is kept, and the error names it. In between, it is the output of user code in tasks,
and goes to standard error.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Written into the pipe itself, so that it takes effect after all earlier output. The rest of the
#: line says whether to show the output.
_SWITCH = "\0ratchet shows "


class SparkOutput:
    """Reads the output as long as this process lives, shown or not: a process that prints into a
    pipe without a reader would block or fail."""

    def __init__(self) -> None:
        number, name = tempfile.mkstemp(prefix="ratchet-spark-", suffix=".log")
        self.log = Path(name)
        self._log = os.fdopen(number, "w", buffering=1, encoding="utf-8")
        self._kept = False
        self._reads, self._writes = os.pipe()
        self._thread = threading.Thread(target=self._read, name="ratchet-spark-output", daemon=True)
        self._thread.start()
        atexit.register(self._forget_log)

    def popen_arguments(self) -> dict[str, Any]:
        """The arguments with which the JVM must be started."""
        return {"stdout": self._writes, "stderr": self._writes}

    def show(self, shown: bool) -> None:
        """Set whether output from now on goes to standard error."""
        os.write(self._writes, f"{_SWITCH}{shown:d}\n".encode())

    def keep_log(self) -> Path:
        """Keep the log file when this process ends."""
        self._kept = True
        return self.log

    def _read(self) -> None:
        shown = False
        with os.fdopen(self._reads, encoding="utf-8", errors="backslashreplace") as lines:
            for line in lines:
                text, switch, now = line.partition(_SWITCH)
                if text:
                    with suppress(OSError, ValueError):  # a closed terminal, a full disk
                        (sys.stderr if shown else self._log).write(text + "\n" if switch else text)
                if switch:
                    shown = now.startswith("1")

    def _forget_log(self) -> None:
        with suppress(OSError):
            self._log.close()
        if not self._kept:
            self.log.unlink(missing_ok=True)
