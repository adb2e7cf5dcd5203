"""Failures of Python code in Spark's workers, read from Spark's errors."""

from __future__ import annotations

import re

from framework.errors import BadRecordError, FailedException
from framework.execution.failures import FailureKind, TaskFailure, is_users_file, shown_line

#: The most characters of an error that are shown.
SAID_MAX = 500
_KINDS = {
    f"{kind.__module__}.{kind.__qualname__}": name
    for kind, name in ((BadRecordError, FailureKind.BAD_RECORD), (FailedException, FailureKind.FAILED))
}
#: A place in a traceback, followed by its line of code where Python has it.
_PLACE = re.compile(r'^ *File "(.*)", line (\d+), in ')
#: Lines that are less informative than the Python worker's own error, and advice that does not
#: concern users of Ratchet.
_BESIDE_THE_POINT = ("exception was thrown from the Python worker", "consider using `rdd.checkpoint()`")


def python_part(error: BaseException) -> list[str]:
    """The lines of an error from Spark that help a Python programmer: those before the JVM's
    stack."""
    lines: list[str] = []
    for line in str(error).splitlines():
        if line.lstrip().startswith("at "):
            break
        said = line.split(" SQLSTATE:")[0].removesuffix("Driver stacktrace:")
        if said.strip():
            lines.append(said)
    return [line for line in lines if not any(words in line for words in _BESIDE_THE_POINT)] or lines


def worker_failure(error: BaseException, component_id: str) -> TaskFailure:
    """The failure for an error of a job. An error in a function of a DataFrame arrives as text."""
    lines = python_part(error) or [type(error).__name__]
    said = lines[-1].strip()[:SAID_MAX]
    name, _, message = said.partition(": ")
    kind = _KINDS.get(name, FailureKind.ERROR)
    return TaskFailure(
        kind,
        component_id,
        0,
        said if kind is FailureKind.ERROR else message,
        trace="\n".join(lines),
        where=_users_line(lines),
    )


def _users_line(lines: list[str]) -> str:
    """The last line of the user's own code in a traceback; empty when there is none."""
    for number in reversed(range(len(lines))):
        place = _PLACE.match(lines[number])
        if place is not None and is_users_file(place[1]):
            following = lines[number + 1] if number + 1 < len(lines) else ""
            code = following.strip() if following.startswith("    ") and not _PLACE.match(following) else ""
            return shown_line(place[1], int(place[2]), code)
    return ""
