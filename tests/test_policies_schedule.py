"""Windows in which a model is kept warm: days, midnight, and the two nights on which clocks are changed."""

from __future__ import annotations

import datetime
import zoneinfo
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from policies.schedule import DAYS, Moment, Window, kept

OFFICE = {"days": ["mon", "tue", "wed", "thu", "fri"], "start": "09:00", "end": "18:00"}
NIGHT = {"days": ["fri"], "start": "22:00", "end": "06:00"}


def at(day: str, time: str) -> Moment:
    hours, minutes = time.split(":")
    return Moment(DAYS.index(day), int(hours) * 60 + int(minutes))


@pytest.mark.parametrize(
    ("window", "day", "time", "expected"),
    [
        (OFFICE, "mon", "08:59", False),
        (OFFICE, "mon", "09:00", True),
        (OFFICE, "fri", "17:59", True),
        (OFFICE, "fri", "18:00", False),
        (OFFICE, "sat", "12:00", False),
        (NIGHT, "fri", "21:59", False),
        (NIGHT, "fri", "22:00", True),
        (NIGHT, "sat", "05:59", True),
        (NIGHT, "sat", "06:00", False),
        (NIGHT, "sat", "22:00", False),
        (NIGHT, "fri", "05:00", False),
        ({"days": ["sun"], "start": "23:00", "end": "01:00"}, "mon", "00:30", True),
        ({"days": ["mon"], "start": "00:00", "end": "24:00"}, "mon", "23:59", True),
        ({"days": ["mon"], "start": "00:00", "end": "24:00"}, "tue", "00:00", False),
        ({"days": ["mon"], "start": "24:00", "end": "02:00"}, "tue", "01:00", True),
        ({"start": "12:00", "end": "12:01"}, "wed", "12:00", True),
    ],
)
def test_a_window_covers(window: dict[str, Any], day: str, time: str, expected: bool) -> None:
    assert Window.model_validate(window).covers(at(day, time)) is expected


def test_the_window_that_wants_most_counts() -> None:
    windows = [Window(start="08:00", end="20:00"), Window(start="12:00", end="14:00", replicas=3)]
    assert [kept(windows, at("tue", time)) for time in ("07:00", "09:00", "13:00", "14:00", "20:00")] == [0, 1, 3, 1, 0]
    assert kept([], at("tue", "12:00")) == 0


@pytest.mark.parametrize(("start", "end"), [("09:00", "09:00"), ("00:00", "00:00"), ("24:00", "00:00"), ("24:00", "24:00")])
def test_a_window_of_no_length_is_a_fault(start: str, end: str) -> None:
    with pytest.raises(ValidationError, match="is no time at all; a whole day is from 00:00 to 24:00"):
        Window(start=start, end=end)


@pytest.mark.parametrize("time", ["9:00", "24:01", "12:60", "noon", ""])
def test_a_time_that_is_none_is_a_fault(time: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        Window(start=time, end="23:00")


@settings(deadline=None)
@given(st.integers(0, 1439), st.integers(0, 1439), st.sets(st.sampled_from(DAYS), min_size=1))
def test_a_week_has_as_many_minutes_of_a_window_as_it_says(start: int, end: int, days: set[str]) -> None:
    if start == end:
        return
    clock = [f"{minute // 60:02}:{minute % 60:02}" for minute in (start, end)]
    window = Window.model_validate({"days": sorted(days), "start": clock[0], "end": clock[1]})
    covered = sum(window.covers(Moment(day, minute)) for day in range(7) for minute in range(1440))
    assert covered == (end - start) % 1440 * len(days)


def minutes_kept(window: Window, day: datetime.date) -> int:
    """Real minutes that a window keeps a model warm on one day in Berlin, as clocks there show them."""
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    begin = datetime.datetime.combine(day, datetime.time(), zone).astimezone(datetime.UTC)
    total = 0
    for minute in range(25 * 60):
        local = (begin + datetime.timedelta(minutes=minute)).astimezone(zone)
        if local.date() == day:
            total += kept([window], Moment(local.weekday(), local.hour * 60 + local.minute))
    return total


@pytest.mark.parametrize(
    ("day", "start", "end", "minutes"),
    [
        # 02:00 -> 03:00, and 03:00 -> 02:00.
        ("2026-03-29", "09:00", "18:00", 540),
        ("2026-03-29", "02:15", "02:45", 0),
        ("2026-03-29", "01:00", "04:00", 120),
        ("2026-10-25", "09:00", "18:00", 540),
        ("2026-10-25", "02:15", "02:45", 60),
        ("2026-10-25", "00:00", "24:00", 1500),
    ],
)
def test_summer_time_moves_windows_with_the_clocks(day: str, start: str, end: str, minutes: int) -> None:
    assert minutes_kept(Window(start=start, end=end), datetime.date.fromisoformat(day)) == minutes
