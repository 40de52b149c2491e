"""Admission: the numbered decision, in its order."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import Candidate, Code, Reject, Room, Send, View, Wait, decide

FREE = Candidate("free", inflight=0, limit=1)
BUSY = Candidate("busy", inflight=1, limit=1)
ROOM = Room(requests=0, bytes=0, max_requests=10, max_bytes=100)
FULL = dataclasses.replace(ROOM, requests=10)
BASE = View(
    candidates=(), rooms=(ROOM, ROOM), size=10, waiting=False, overdue=False, on_cold="hold", failure=None, draining=False
)


def view(**changes: Any) -> View:
    return dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({}, Wait()),
        ({"candidates": (FREE,)}, Send("free")),
        ({"candidates": (BUSY,)}, Wait()),
        ({"candidates": (BUSY, FREE)}, Send("free")),
        # 1 before all: a free replica serves whatever else holds.
        ({"candidates": (FREE,), "draining": True, "overdue": True, "failure": "x", "rooms": (FULL,)}, Send("free")),
        # 2 before 3
        ({"draining": True, "overdue": True}, Reject("shutting_down")),
        ({"draining": True, "waiting": True}, Reject("shutting_down")),
        # 3 before 4: the code says whether there was anything to wait for
        ({"overdue": True, "failure": "x"}, Reject("cold_start_timeout")),
        ({"overdue": True, "candidates": (BUSY,)}, Reject("capacity_exceeded")),
        ({"overdue": True, "waiting": True}, Reject("cold_start_timeout")),
        # 4 before 5
        ({"failure": "why", "on_cold": "reject"}, Reject("restore_failed", "why")),
        ({"failure": "why", "waiting": True}, Reject("restore_failed", "why")),
        ({"failure": "", "waiting": True}, Reject("restore_failed", "")),
        ({"failure": "why", "candidates": (BUSY,)}, Wait()),
        # 5 before 6
        ({"on_cold": "reject"}, Reject("model_loading")),
        ({"on_cold": "reject", "waiting": True}, Reject("model_loading")),
        ({"on_cold": "reject", "candidates": (BUSY,)}, Wait()),
        # 6 before 7
        ({"waiting": True, "rooms": (FULL, FULL)}, Wait()),
        # 7
        ({"rooms": (FULL, ROOM)}, Reject("queue_full")),
        ({"rooms": (ROOM, FULL)}, Reject("queue_full")),
        ({"size": 101}, Reject("queue_bytes_full")),
        ({"size": 100}, Wait()),
        ({"rooms": (ROOM, dataclasses.replace(ROOM, bytes=91))}, Reject("queue_bytes_full")),
        ({"rooms": (dataclasses.replace(ROOM, requests=9, bytes=90),)}, Wait()),
        ({"rooms": (dataclasses.replace(FULL, bytes=100),)}, Reject("queue_full")),
    ],
)
def test_the_first_rule_that_matches_wins(changes: dict[str, Any], decision: Send | Wait | Reject) -> None:
    assert decide(view(**changes)) == decision


def test_the_replica_with_the_fewest_requests_is_chosen_and_ties_are_settled() -> None:
    loads = [Candidate("c", 2, 4), Candidate("b", 1, 4), Candidate("a", 1, 4), Candidate("d", 0, 0)]
    assert decide(view(candidates=loads)) == Send("a")
    assert decide(view(candidates=loads[::-1])) == Send("a")


candidates = st.builds(Candidate, st.text(max_size=2), inflight=st.integers(0, 3), limit=st.integers(0, 3))
rooms = st.builds(
    Room, requests=st.integers(0, 3), bytes=st.integers(0, 9), max_requests=st.integers(1, 3), max_bytes=st.integers(0, 9)
)
views = st.builds(
    View, candidates=st.lists(candidates, max_size=3), rooms=st.lists(rooms, min_size=1, max_size=2), size=st.integers(0, 9)
)


@settings(deadline=None)
@given(views)
def test_whatever_the_view_a_decision_keeps_the_bounds(seen: View) -> None:
    match decide(seen):
        case Send(incarnation):
            assert any(c.incarnation == incarnation and c.inflight < c.limit for c in seen.candidates)
        case Wait():
            assert not any(c.inflight < c.limit for c in seen.candidates)
            assert not seen.draining
            assert not seen.overdue
            fits = all(r.requests < r.max_requests and r.bytes + seen.size <= r.max_bytes for r in seen.rooms)
            assert seen.waiting or fits
        case Reject(code):
            assert code in get_args(Code)
            assert not any(c.inflight < c.limit for c in seen.candidates)
