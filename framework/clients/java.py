"""The one prerequisite besides Python: Java 17 or newer, for Spark and for embedded servers."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from framework.errors import ConfigError

JAVA_MIN = 17


def find_java() -> str:
    """The path of a Java that is new enough: ``JAVA_HOME`` first, then the PATH. Raises
    ``ConfigError``."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if found is None or not Path(found).exists():
        where = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "there is no java on the PATH"
        raise ConfigError(f"Java {JAVA_MIN} or newer is needed, and {where}: install it, or set JAVA_HOME")
    version = _version_of(found, os.stat(found).st_mtime_ns)
    if version < JAVA_MIN:
        raise ConfigError(
            f"{found} is Java {version}, and Java {JAVA_MIN} or newer is needed: install it, or set JAVA_HOME"
        )
    return found


def java_version() -> int:
    """The version of the Java that ``find_java`` finds. Raises ``ConfigError``."""
    found = find_java()
    return _version_of(found, os.stat(found).st_mtime_ns)


@functools.cache  # a process that starts many servers asks once
def _version_of(java: str, changed_at: int) -> int:
    """``changed_at``: the file's time of change, because the file may be replaced."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{java} does not run ({error}): install Java {JAVA_MIN} or newer") from error
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if match is None:
        raise ConfigError(f"{java} -version says nothing about its version: install Java {JAVA_MIN} or newer")
    return int(match.group(1))  # up to version 8, Java reports 1.8 and the like
