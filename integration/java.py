"""The one prerequisite besides Python: Java 17 or newer."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from integration.errors import ServerError

JAVA_MIN = 17


def find_java() -> str:
    """The path of a Java that is new enough: from ``JAVA_HOME`` or, without it, from the PATH.
    Raises ``ServerError``."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if found is None or not Path(found).exists():
        where = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "there is no java on the PATH"
        raise ServerError(f"Java {JAVA_MIN} or newer is needed, and {where}: install it, or set JAVA_HOME")
    version = _version_of(found, os.stat(found).st_mtime_ns)
    if version < JAVA_MIN:
        raise ServerError(
            f"{found} is Java {version}, and Java {JAVA_MIN} or newer is needed: install it, or set JAVA_HOME"
        )
    return found


@functools.cache  # a process that starts many servers asks once
def _version_of(java: str, changed_at: int) -> int:
    """``changed_at``: the file's modification time, because another file may take its place."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{java} does not run ({error}): install Java {JAVA_MIN} or newer") from error
    match = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    if match is None:
        raise ServerError(f"{java} -version says nothing about its version: install Java {JAVA_MIN} or newer")
    return int(match.group(1))
