"""Estimates: starts by their stages, queues by their slots, promises within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import eta
from policies.replica import State

RESTORE = {"match": 1.0, "verify bytes": 2.0, "lay scratch": 3.0, "restore processes": 10.0, "canary": 4.0}


@pytest.mark.parametrize(
    ("state", "done", "elapsed_s", "left_s"),
    [
        (None, (), 0.0, 20.0),
        (State.QUEUED, (), 50.0, 20.0),
        (State.MATCHING, (), 0.5, 19.5),
        (State.MATCHING, (), 99.0, 17.0),
        (State.RESTORING, ("match", "verify bytes"), 5.0, 12.0),
        (State.RESTORING, ("match", "verify bytes"), 60.0, 4.0),
        (State.VERIFYING, ("match", "verify bytes", "lay scratch", "restore processes"), 1.0, 3.0),
        (State.VERIFYING, ("match", "verify bytes", "lay scratch", "restore processes"), 9.0, 0.0),
    ],
)
def test_a_start_takes_what_is_left_of_its_phase_and_all_later_ones(state, done, elapsed_s, left_s):
    assert eta.start_s(RESTORE, state=state, done=done, elapsed_s=elapsed_s) == left_s


def test_stages_of_no_known_name_make_the_engine():
    assert eta.start_s({"match": 1, "load weights": 8}, state=State.RESTORING, done=["match"], elapsed_s=3) == 5


@pytest.mark.parametrize(
    ("samples", "expected"), [([5.0], 5.0), ([3.0, 1.0], 3.0), (list(range(1, 11)), 9), (list(range(1, 101)), 90)]
)
def test_the_ninetieth_percentile_is_a_sample(samples, expected):
    assert eta.quantile(samples) == expected


@pytest.mark.parametrize(
    ("position", "slots", "service_s", "busy", "seconds"),
    [
        (1, 4, 8.0, True, 2.0),
        (8, 4, 8.0, True, 16.0),
        (4, 4, 8.0, False, 0.0),
        (5, 4, 8.0, False, 8.0),
        (9, 4, 8.0, False, 16.0),
        (9, 4, None, False, 0.0),
        (9, 4, None, True, 0.0),
    ],
)
def test_a_queue_takes_its_position_over_the_service_rate(position, slots, service_s, busy, seconds):
    assert eta.queue_s(position, slots=slots, service_s=service_s, busy=busy) == seconds


@given(st.floats(0, 1e6), st.floats(*eta.JITTER))
def test_promises_are_whole_seconds_from_1_to_60_and_never_too_early(eta_s, jitter):
    promise = eta.retry_after_s(eta_s, jitter)
    assert 1 <= promise <= eta.MAX_RETRY_AFTER_S
    assert promise >= min(eta_s, eta.MAX_RETRY_AFTER_S)
    assert promise <= max(1, eta_s * eta.JITTER[1] + 1)
