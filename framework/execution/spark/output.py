"""What the JVM of Spark prints, and the Python workers below it.

While Spark starts and ends, that is about Spark: it goes to a log file, which is kept and named
when something fails. In between it is what the user's code prints in tasks, and goes to standard
error.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


class SparkOutput:
    """Reads the output until the JVM ends, which is with this process at the latest."""

    def __init__(self) -> None:
        number, name = tempfile.mkstemp(prefix="ratchet-spark-", suffix=".log")
        os.close(number)
        self.log = Path(name)
        self._shown = False
        self._kept = False
        self._reads, self._writes = os.pipe()
        self._thread = threading.Thread(target=self._read, name="ratchet-spark-output", daemon=True)
        self._thread.start()
        atexit.register(self._forget_log)

    def popen_arguments(self) -> dict[str, Any]:
        """How the JVM is to be started."""
        return {"stdout": self._writes, "stderr": self._writes}

    def started(self) -> None:
        """The JVM has the pipe: from now on what is read ends when the JVM does."""
        os.close(self._writes)

    def show(self, shown: bool) -> None:
        """Whether what comes from now on goes to standard error."""
        self._shown = shown

    def keep_log(self) -> Path:
        """Leave the log file behind when this process ends."""
        self._kept = True
        return self.log

    def _read(self) -> None:
        with os.fdopen(self._reads, encoding="utf-8", errors="backslashreplace") as lines, self.log.open("a") as log:
            for line in lines:
                (sys.stderr if self._shown else log).write(line)
                if not self._shown:
                    log.flush()

    def _forget_log(self) -> None:
        if not self._kept:
            self.log.unlink(missing_ok=True)
