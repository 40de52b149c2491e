"""Budgets: a minute's worth at once, evenly refilled, and leases that follow the pace."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from policies.limits import MINUTE_S, keep, refilled, wait_s

LIMITS = st.integers(1, 10**9)
BALANCES = st.floats(-1e9, 1e9)


def test_a_minute_refills_a_whole_budget() -> None:
    assert refilled(0, limit=60, seconds=MINUTE_S) == 60
    assert refilled(0, limit=60, seconds=0.5) == 0.5
    assert refilled(-30, limit=60, seconds=45) == 15


@given(balance=BALANCES, limit=LIMITS, seconds=st.floats(-1e6, 1e6))
def test_it_never_holds_more_than_a_minutes_worth_and_time_takes_nothing(balance: float, limit: int, seconds: float) -> None:
    after = refilled(balance, limit=limit, seconds=seconds)
    assert after <= limit
    assert after >= min(balance, limit)


@given(balance=st.floats(-1e6, 1e6), limit=st.integers(1, 10**6))
def test_after_the_time_that_is_promised_there_is_one(balance: float, limit: int) -> None:
    seconds = wait_s(balance, limit=limit, needed=1)
    assert seconds >= 0
    assert refilled(balance, limit=limit, seconds=seconds) >= 1 - 1e-6
    assert (seconds == 0) == (balance >= 1)


def test_what_is_kept_follows_the_pace_up_at_once_and_down_by_halves() -> None:
    pace, kept = 0.0, []
    for spent in (0, 1, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        at_hand, pace = keep(spent, pace)
        kept.append(at_hand)
    assert kept == [1, 2, 200, 100, 50, 25, 13, 7, 4, 2, 1, 1]


@given(spent=st.integers(0, 10**6), pace=st.floats(0, 1e6))
def test_there_is_always_one_at_hand_and_never_more_than_two_periods_of_the_fastest(spent: int, pace: float) -> None:
    at_hand, after = keep(spent, pace)
    assert at_hand >= 1
    assert at_hand <= max(1, math.ceil(2 * max(spent, pace)))
    assert spent <= after <= max(spent, pace)
