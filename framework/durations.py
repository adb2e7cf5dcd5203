"""Lengths of time as users write them: ``"5 min"``, ``"1 day"``, a ``timedelta``, or seconds."""

from __future__ import annotations

import datetime
import math
import re

from framework.errors import ConfigError

#: Microseconds per second.
MICROS = 1_000_000
_MICROSECOND = datetime.timedelta(microseconds=1)
_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "sec": 1_000_000,
    "second": 1_000_000,
    "min": 60_000_000,
    "minute": 60_000_000,
    "h": 3_600_000_000,
    "hour": 3_600_000_000,
    "d": 86_400_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)

Duration = str | float | datetime.timedelta


def micros_of(duration: Duration, what: str) -> int:
    """A length of time in whole microseconds. A number is seconds. Raises ``ConfigError``, which
    names ``what``, for an invalid or negative length of time.

    >>> micros_of("5 min", "gap"), micros_of("1.5s", "gap"), micros_of(2, "gap")
    (300000000, 1500000, 2000000)
    """
    found: float | None = None
    if isinstance(duration, datetime.timedelta):
        found = timedelta_to_micros(duration)
    elif isinstance(duration, str):
        found = _micros_in(duration)
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool) and math.isfinite(duration):
        found = duration * MICROS
    if found is None or not 0 <= found < 1 << 61:
        raise ConfigError(
            f"{what} is {duration!r}: give a length of time, such as '30 s', '5 min', '1 h', '1 day', or seconds as a number"
        )
    return round(found)


def micros_above_0(duration: Duration, what: str) -> int:
    """As ``micros_of``, and refuses 0."""
    micros = micros_of(duration, what)
    if micros == 0:
        raise ConfigError(f"{what} is {duration!r}: give a length of time above 0")
    return micros


def length_of(micros: int) -> str:
    """A length of time as users write it.

    >>> length_of(3_600_000_000), length_of(90_000_000), length_of(1_500)
    ('1 h', '90 s', '1500 us')
    """
    unit = next(each for each in ("day", "h", "min", "s", "ms", "us") if micros % _UNITS[each] == 0)
    return f"{micros // _UNITS[unit]} {unit}"


def seconds_to_micros(seconds: float) -> int:
    return round(seconds * MICROS)


def timedelta_to_micros(delta: datetime.timedelta) -> int:
    """Exact."""
    return delta // _MICROSECOND


def seconds_of(setting: object) -> object:
    """The seconds in a text of a setting, such as "5 min" or "90"; other values are returned
    unchanged. Raises ``ValueError``.

    >>> seconds_of("5 min"), seconds_of("90"), seconds_of("500ms"), seconds_of(3)
    (300.0, 90.0, 0.5, 3)
    """
    if not isinstance(setting, str):
        return setting
    micros = _micros_in(setting if setting.strip()[-1:].isalpha() else f"{setting} s")
    if micros is None:
        raise ValueError('must be seconds, or a text such as "90 s", "5 min", "1 h" or "500 ms"')
    return micros / MICROS


def _micros_in(text: str) -> float | None:
    """The microseconds of a number with a unit; None for another text."""
    match = _TEXT.fullmatch(text)
    unit = match[2] if match is not None else ""
    factor = _UNITS.get(unit) or (_UNITS.get(unit[:-1]) if unit[-1:] == "s" and len(unit) > 2 else None)
    return float(match[1]) * factor if match is not None and factor is not None else None
