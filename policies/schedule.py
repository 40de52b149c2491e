"""When a model is kept warm although nobody asks for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from policies.scalars import Count, Section

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
TimeOfDay = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$|^24:00$")]


class Window(Section):
    """A part of the week. ``end`` before ``start``: it lasts past midnight and belongs to the day it starts on."""

    days: Annotated[tuple[Day, ...], Field(min_length=1)] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    start: TimeOfDay
    end: TimeOfDay
    replicas: Count = 1
