"""Windows of event time as pure arithmetic."""

from __future__ import annotations

import datetime
import zoneinfo
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.durations import micros_of
from framework.errors import ConfigError
from framework.operators.event_clock import EventClock
from framework.operators.event_window_assigner import hopping, sliding, tumbling
from framework.operators.watermarks import NEVER
from framework.state import TimeWindow

pytestmark = pytest.mark.rule("C43")

MICROS = 1_000_000


def micros(text: str, zone: str) -> int:
    moment = datetime.datetime.fromisoformat(text).replace(tzinfo=zoneinfo.ZoneInfo(zone))
    return int(moment.timestamp()) * MICROS


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25", 25),
        ("Europe/Berlin", "2026-07-01", 24),
        ("America/Sao_Paulo", "2018-11-04", 23),  # the clock goes forward at midnight
        ("Asia/Kathmandu", "2026-01-01", 24),
    ],
)
def test_a_day_in_a_zone_has_its_own_length(zone: str, day: str, hours: int) -> None:
    window = tumbling("1 day", zone=zone)
    noon = micros(f"{day}T12:00:00", zone)
    _, (start,), (end,) = (each.tolist() for each in window.assign(np.array([noon])))
    assert end - start == hours * 3_600 * MICROS
    assert window.assign(np.array([start, end - 1, end, start - 1])).ends.tolist()[:2] == [end, end]
    assert window.assign(np.array([end])).ends[0] > end
    assert window.assign(np.array([start - 1])).ends[0] == start


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 60),
    st.lists(st.integers(-500, 500), min_size=1, max_size=20),
)
def test_a_time_is_in_each_window_that_spans_it_and_in_no_other(
    length: int, step: int, origin: int, times: list[int]
) -> None:
    step = min(step, length)
    window = hopping(length, step, origin=origin)
    assigned = window.assign(np.array(times) * MICROS)
    found = sorted(zip(assigned.rows.tolist(), (assigned.ends // MICROS).tolist(), strict=True))
    shift = origin % step
    expected = [
        (row, start + length)
        for row, at in enumerate(times)
        for start in range(at - length + 1, at + 1)
        if (start - shift) % step == 0
    ]
    assert found == expected


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 60),
    st.integers(-500, 500),
    st.sampled_from([None, "Europe/Berlin", "America/Sao_Paulo"]),
)
def test_a_pane_is_in_the_windows_of_each_of_its_times(
    length: int, step: int, origin: int, at: int, zone: str | None
) -> None:
    step = min(step, length)
    window = hopping(length, step, origin=origin)
    if zone is not None:
        window, at = tumbling(f"{length} days", origin=f"{origin} days", zone=zone), at * 86_400 + at
    at *= MICROS
    assigned = window.assign(np.array([at]))
    starts = window.windows_of(window.pane_of(at))
    assert list(starts) == assigned.starts.tolist()[::-1]
    assert [window.end_of(start) for start in starts] == assigned.ends.tolist()[::-1]
    assert window.end_of(window.pane_of(at)) == max(assigned.ends)
    for start in starts:
        panes = window.panes_of(start)
        assert window.pane_of(at) in panes
        assert all(start in window.windows_of(pane) for pane in panes)


def test_the_day_before_one_that_a_zone_has_left_out_has_its_start() -> None:
    """Samoa had no 30 December 2011."""
    at = micros("2011-12-29T12:00:00", "Pacific/Apia")
    _, (start,), (end,) = (each.tolist() for each in tumbling("1 day", zone="Pacific/Apia").assign(np.array([at])))
    assert (start, end - start) == (micros("2011-12-29T00:00:00", "Pacific/Apia"), 24 * 3_600 * MICROS)


@pytest.mark.parametrize("wrong", ["5 parsecs", "", "-1 s", -1, True, float("nan"), None, "min"])
def test_what_is_no_length_of_time_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="gap is .*give a length of time"):
        micros_of(wrong, "gap")


def test_windows_that_cannot_be_are_refused() -> None:
    for make, why in (
        (lambda: tumbling(0), "above 0"),
        (lambda: hopping("1 min", "2 min"), "leave gaps"),
        (lambda: sliding("1 min", "2 min"), "leave gaps"),
        (lambda: sliding("1 min", 0), "above 0"),
        (lambda: sliding("1 min"), r"sliding\('1 min'\) has no step: give one"),
        (lambda: tumbling("1 day", zone="Mars/Olympus"), "no name of a time zone"),
        (lambda: tumbling("1 h", zone="Europe/Berlin"), "whole days"),
    ):
        with pytest.raises(ConfigError, match=why):
            make()


@pytest.mark.parametrize(("length_s", "step_s"), [(60, 20), (50, 15), (7, 7)])
def test_sliding_and_hopping_windows_and_those_of_core_topologies_are_the_same(length_s: int, step_s: int) -> None:
    assert sliding(length_s, step_s) == hopping(length_s, step_s) == TimeWindow(length_s, "at", step_s).assigner
    assert sliding(length_s, step_s, origin=3) == hopping(length_s, step_s, origin=3)


def test_an_idle_partition_and_an_unread_one() -> None:
    rules: dict[str, Any] = {"out_of_orderness": 10, "idle_after": 100}
    clock = EventClock().after({"a": 1_000, "b": 500}, 0, **rules)
    assert clock.watermark == 490
    assert clock.after({"a": 2_000}, 99, **rules).watermark == 490
    later = clock.after({"a": 2_000}, 100, **rules)
    assert later.watermark == 1_990
    assert later.after({"b": 600}, 110, **rules).watermark == 1_990  # it never goes back
    assert EventClock().after({"a": 1}, 0, unread=True, **rules).watermark == NEVER
    assert EventClock.of_document(later.document()) == later


def test_a_partition_that_had_no_event_time_so_far_delays_the_watermark() -> None:
    """Its next record may be as old as any, until it has been read to its end, or is idle."""
    rules: dict[str, Any] = {"out_of_orderness": 10, "idle_after": 100}
    clock = EventClock().after({"a": 1_000}, 0, begun=["a", "b"], **rules)
    assert (clock.watermark, clock.held_up_by(100)) == (NEVER, "b")
    assert EventClock.of_document(clock.document()) == clock
    waiting = clock.after({"a": 2_000}, 99, begun=["b"], **rules)
    assert waiting.watermark == NEVER
    assert waiting.after({"a": 2_000, "b": 500}, 99, begun=["b"], **rules).watermark == 490
    assert waiting.after({"a": 2_000}, 99, **rules).watermark == 1_990, "b is read to its end"
    idle = waiting.after({"a": 3_000}, 100, begun=["b"], **rules)
    assert (idle.watermark, idle.held_up_by(100)) == (2_990, "a")
    assert idle.after({"a": 4_000}, 101, begun=["b"], **rules).watermark == 3_990
    older = EventClock.of_document({each: its for each, its in waiting.document().items() if each != "timeless"})
    assert older.after({"a": 2_000}, 100, begun=["b"], **rules).watermark == NEVER
    never = EventClock().after({"a": 1_000}, 0, begun=["b"], out_of_orderness=10, idle_after=None)
    assert never.after({"a": 9}, 10**9, begun=["b"], out_of_orderness=10, idle_after=None).watermark == NEVER


def test_no_partition_becomes_idle_while_records_are_left_unread() -> None:
    """A driver that was down for an hour may read one partition before the other."""
    rules: dict[str, Any] = {"out_of_orderness": 0, "idle_after": 100}
    clock = EventClock().after({"a": 1_000, "b": 500}, 0, **rules)
    left = clock.after({"a": 9_000}, 3_600, behind=True, **rules)
    assert left.watermark == 500
    assert left.after({"a": 9_000, "b": 8_000}, 3_601, **rules).watermark == 8_000
    assert left.after({"a": 9_001}, 3_700, **rules).watermark == 9_001


def test_a_clock_of_a_leader_that_is_wrong_once_ends_no_time() -> None:
    rules: dict[str, Any] = {"out_of_orderness": 0, "idle_after": 100}
    clock = EventClock().after({"a": 10, "b": 5}, 1_000, **rules)
    far = clock.after({"a": 11, "b": 6}, 10**15, **rules)
    back = far.after({"a": 12}, 1_001, **rules)
    assert back.watermark == 6
    assert back.after({"a": 13}, 1_101, **rules).watermark == 13


def test_time_goes_on_while_everything_is_idle_if_it_may() -> None:
    rules: dict[str, Any] = {"out_of_orderness": 5, "idle_after": 100}
    clock = EventClock().after({"a": 1_000, "b": 500}, 0, **rules)
    assert clock.after({}, 400, **rules).watermark == 495
    assert clock.after({}, 99, advance_when_idle=True, **rules).watermark == 495
    assert clock.after({}, 400, advance_when_idle=True, **rules).watermark == 1_395


@pytest.mark.parametrize(
    ("zone", "around"),
    [
        ("America/St_Johns", "2010-11-07T02:31:00"),  # at 00:01 the clock goes back to 23:01 of the day before
        ("Africa/Monrovia", "1971-06-01T00:44:30"),  # midnight is at no quarter of an hour
        ("America/Toronto", "1919-03-31T04:30:00"),  # the clock goes from 23:30 to 00:30
        ("America/Havana", "2022-11-06T05:00:00"),  # midnight comes twice
        ("America/Sao_Paulo", "2018-11-04T03:00:00"),  # there is no midnight
        ("Pacific/Apia", "2011-12-30T10:00:00"),  # there is no such day
        ("Europe/Berlin", "2024-10-27T01:00:00"),
    ],
)
def test_the_days_of_a_zone_follow_each_other_without_gaps(zone: str, around: str) -> None:
    days = tumbling("1 day", zone=zone)
    middle = micros(around, "UTC")
    times = np.unique(np.concatenate([middle + np.arange(-5_400, 5_400) * 1_000_000, [middle - 1, middle + 1]]))
    assigned = days.assign(times)
    assert np.all((assigned.starts <= times) & (times < assigned.ends))
    for start, end in set(zip(assigned.starts.tolist(), assigned.ends.tolist(), strict=True)):
        assert days.last_of(start) == days.last_of(end - 1) == (start, end) and days.last_of(end)[0] == end
    for at in (middle - 5_000_000_000, middle, middle + 61_000_000, middle + 5_000_000_000):
        assert days.last_of(at) == tuple(each.tolist()[0] for each in days.assign(np.array([at]))[1:])
