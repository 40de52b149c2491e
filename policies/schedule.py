"""When a model is kept warm although nobody asks for it.

Windows are wall-clock times where the model runs: who asks passes the local time, so that summer time is the clock's affair. A
window that lies in the hour that a spring night leaves out does not come that night; one in the repeated autumn hour lasts
twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from policies.scalars import Count, Section

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
TimeOfDay = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$|^24:00$")]
DAYS: tuple[str, ...] = get_args(Day)


class Moment(NamedTuple):
    """A local time, as far as windows care."""

    weekday: int
    """0 is Monday."""
    minute: int
    """Of the day, from 0 to 1439."""


class Window(Section):
    """A part of the week. ``end`` before ``start``: it lasts past midnight and belongs to the day it starts on."""

    days: Annotated[tuple[Day, ...], Field(min_length=1)] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    """The days on which it starts."""
    start: TimeOfDay
    """``HH:MM`` by the clock of the gateway's host, summer time included."""
    end: TimeOfDay
    """``HH:MM``, up to ``24:00``."""
    replicas: Count = 1
    """How many are kept warm meanwhile."""

    @model_validator(mode="after")
    def _lasts(self) -> Window:
        whole = (self.start, self.end) == ("00:00", "24:00")
        if not whole and (_minute(self.end) - _minute(self.start)) % (24 * 60) == 0:
            raise ValueError(f"from {self.start} to {self.end} is no time at all; a whole day is from 00:00 to 24:00")
        return self

    def covers(self, now: Moment) -> bool:
        """``now`` is in it; the end is not."""
        start, end, today = _minute(self.start), _minute(self.end), DAYS[now.weekday] in self.days
        if start < end:
            return today and start <= now.minute < end
        yesterday = DAYS[now.weekday - 1] in self.days
        return (today and now.minute >= start) or (yesterday and now.minute < end)


def kept(windows: Iterable[Window], now: Moment) -> int:
    """Replicas to keep warm now: the most that a window asks for, 0 outside all of them."""
    return max((window.replicas for window in windows if window.covers(now)), default=0)


def _minute(time: str) -> int:
    hours, minutes = time.split(":")
    return int(hours) * 60 + int(minutes)
