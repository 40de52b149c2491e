"""Admission: the numbered decision, in its order."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import Code, Reject, Room, View, Wait, decide

ROOM = Room(requests=0, bytes=0, max_requests=10, max_bytes=100)
FULL = ROOM._replace(requests=10)
BASE = View(
    replicas=0,
    rooms=(ROOM, ROOM),
    size=10,
    waiting=False,
    left_s=60.0,
    eta_s=None,
    on_cold="hold",
    failure=None,
    draining=False,
)


def view(**changes: Any) -> View:
    return BASE._replace(**changes)


def code(**changes: Any) -> str:
    """The code of a rejection, ``wait`` otherwise."""
    decision = decide(view(**changes))
    return decision.code if isinstance(decision, Reject) else "wait"


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({}, "wait"),
        ({"replicas": 1}, "wait"),
        # 1 before 2
        ({"gone": True, "draining": True, "waiting": True}, "model_not_found"),
        # 2 before 3
        ({"draining": True, "left_s": 0.0}, "shutting_down"),
        ({"draining": True, "waiting": True}, "shutting_down"),
        # 3 before 4: the code says what was waited for
        ({"left_s": 0.0, "failure": "x"}, "cold_start_timeout"),
        ({"left_s": -1.0, "replicas": 1}, "capacity_exceeded"),
        ({"left_s": 0.0, "replicas": 1, "throttled": True}, "rate_limit_exceeded"),
        ({"left_s": 0.0, "waiting": True}, "cold_start_timeout"),
        # 4 before 5
        ({"failure": "why", "on_cold": "reject"}, "restore_failed"),
        ({"failure": "why", "waiting": True}, "restore_failed"),
        ({"failure": "", "waiting": True}, "restore_failed"),
        ({"failure": "why", "replicas": 1}, "wait"),
        # 5 before 6
        ({"on_cold": "reject"}, "model_loading"),
        ({"on_cold": "reject", "waiting": True}, "model_loading"),
        ({"on_cold": "reject", "replicas": 1}, "wait"),
        # 6 before 7, 8 and 9
        ({"waiting": True, "eta_s": 61.0, "places": 0, "rooms": (FULL, FULL)}, "wait"),
        # 7 before 8
        ({"eta_s": 60.1, "places": 0}, "cold_start_timeout"),
        ({"eta_s": 60.1, "replicas": 1}, "capacity_exceeded"),
        ({"eta_s": 60.0}, "wait"),
        # 8 before 9
        ({"places": 0, "rooms": (FULL, FULL)}, "rate_limit_exceeded"),
        ({"places": 1}, "wait"),
        # 9
        ({"rooms": (FULL, ROOM)}, "queue_full"),
        ({"rooms": (ROOM, FULL)}, "queue_full"),
        ({"size": 101}, "queue_bytes_full"),
        ({"size": 100}, "wait"),
        ({"rooms": (ROOM, ROOM._replace(bytes=91))}, "queue_bytes_full"),
        ({"rooms": (ROOM._replace(requests=9, bytes=90),)}, "wait"),
        ({"rooms": (FULL._replace(bytes=100),)}, "queue_full"),
    ],
)
def test_the_first_rule_that_matches_wins(changes: dict[str, Any], decision: str) -> None:
    assert code(**changes) == decision


def test_a_refusal_says_why() -> None:
    assert decide(view(failure="why")) == Reject("restore_failed", "why")
    assert decide(view(eta_s=90.0)) == Reject(
        "cold_start_timeout", "it would have been served in 90.0 s, its deadline is in 60.0 s"
    )


rooms = st.builds(
    Room, requests=st.integers(0, 3), bytes=st.integers(0, 9), max_requests=st.integers(1, 3), max_bytes=st.integers(0, 9)
)
views = st.builds(
    View,
    replicas=st.integers(0, 2),
    rooms=st.lists(rooms, min_size=1, max_size=2),
    size=st.integers(0, 9),
    left_s=st.sampled_from([-1.0, 0.0, 1.0, 60.0]),
    eta_s=st.sampled_from([None, 0.0, 10.0]),
    places=st.sampled_from([None, 0, 1]),
)


@settings(deadline=None)
@given(views)
def test_whatever_the_view_a_decision_keeps_the_bounds(seen: View) -> None:
    match decide(seen):
        case Wait():
            assert not seen.draining
            assert not seen.gone
            assert seen.left_s > 0
            fits = all(r.requests < r.max_requests and r.bytes + seen.size <= r.max_bytes for r in seen.rooms)
            assert seen.waiting or (fits and seen.places != 0)
        case Reject(code):
            assert code in get_args(Code)
