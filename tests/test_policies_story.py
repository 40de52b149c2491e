"""The story of a model: what is why, and what was once."""

from __future__ import annotations

from typing import Any

from policies.failures import Verdict
from policies.journal import Outcome, Step, Trail
from policies.replica import Replica, State
from policies.story import MAX_TRIES, Story, tell

FAULT = Verdict(cls="tool", evidence="criu restore was ended by signal 9 (Killed)", remedy="see `dmesg`")


def trail(id: str, outcome: Outcome | None, verdict: Verdict | None = None, **more: Any) -> Trail:
    job = {"operation": "op", "job": "op/0", "kind": "start", "model": "m", "replica": "m#0"}
    return Trail(id=id, outcome=outcome, verdict=verdict, **{**job, "attempt": 1, "host": "h", "pid": 1, "at_ms": 1, **more})


def told(*trails: Trail, replicas: tuple[Replica, ...] = ()) -> Story:
    """Of trails that come the latest first."""
    return tell("m", "ready", replicas, None, trails, ())


def test_what_failed_before_a_start_that_did_not_is_past_and_not_why() -> None:
    fits_not = Replica(id="m#0", model="m", state=State.ADMITTED, start="cold", reason="it does not fit", fence=2)
    story = told(trail("new", "succeeded"), trail("old", "succeeded", FAULT), replicas=(fits_not,))
    assert [(one.id, one.past) for one in story.tries] == [("old", True)]
    assert story.brief == ""


def test_what_failed_last_is_why_whatever_went_well_before_or_elsewhere() -> None:
    well = trail("well", "succeeded", replica="m#1"), trail("made", "succeeded", kind="snapshot", replica="m#0")
    story = told(*well, trail("last", "succeeded", FAULT), trail("before", "succeeded"))
    assert [(one.id, one.past) for one in story.tries] == [("last", False)]
    assert story.brief == FAULT.evidence


def test_what_is_why_comes_first_and_is_never_pushed_out_by_what_was() -> None:
    past = [trail(f"past{n}", "failed", FAULT, replica="m#1") for n in range(MAX_TRIES + 1)]
    story = told(trail("well", "succeeded", replica="m#1"), *past, trail("now", "failed", FAULT))
    assert [one.id for one in story.tries][:2] == ["now", "past0"]
    assert len(story.tries) == MAX_TRIES


def test_an_attempt_under_way_makes_nothing_past() -> None:
    story = told(trail("running", None), trail("failed", "failed", FAULT))
    assert [(one.id, one.past, one.outcome) for one in story.tries] == [("failed", False, "failed")]


def test_a_log_is_named_only_where_an_engine_may_have_written_one() -> None:
    step = Step(n=0, name="match", at_ms=1, ms=1.0)
    story = told(trail("early", "failed", FAULT), trail("late", "failed", FAULT, steps=(step,)))
    assert [one.logged for one in story.tries] == [False, True]
