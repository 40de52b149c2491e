"""Passive health: what counts as a failure, when a replica is ejected, how it comes back."""

from __future__ import annotations

import pytest

from policies.health import FAILURES, MAX_PAUSE_S, PAUSE_S, RECOVERED, TRUSTED, Health, Outcome, judge, outcome_of

OK, BUSY, FAILED, DEAD = Outcome.OK, Outcome.BUSY, Outcome.FAILED, Outcome.DEAD


def after(*outcomes: Outcome, health: Health = TRUSTED, now: float = 0.0, alone: bool = False) -> Health:
    for outcome in outcomes:
        health = judge(health, outcome, now, alone=alone).health
    return health


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, OK),
        (400, OK),
        (404, OK),
        (422, OK),
        (429, BUSY),
        (499, OK),
        (500, FAILED),
        (501, OK),
        (502, FAILED),
        (503, BUSY),
        (504, FAILED),
    ],
)
def test_gateway_case_31_what_a_status_says(status: int, outcome: Outcome) -> None:
    assert outcome_of(status) is outcome


def test_gateway_case_31_refusals_never_eject_and_do_not_excuse_failures() -> None:
    assert after(*[outcome_of(422)] * 100, *[outcome_of(429)] * 100, *[outcome_of(503)] * 100) is TRUSTED
    assert after(FAILED, BUSY, FAILED, BUSY, FAILED).ejected(0.0)


def test_failures_in_a_row_eject_and_a_good_answer_starts_anew() -> None:
    assert not after(FAILED, FAILED, OK, FAILED, FAILED).ejected(0.0)
    assert after(*[FAILED] * FAILURES).ejected(0.0)


def test_a_dead_one_is_ejected_at_once_even_when_alone() -> None:
    judgement = judge(TRUSTED, DEAD, 0.0, alone=True)
    assert judgement.suspect
    assert judgement.health.ejected(PAUSE_S - 0.1)
    assert judgement.health.on_trial(PAUSE_S)


def test_errors_that_requests_provoke_do_not_take_the_last_replica() -> None:
    health, suspected = TRUSTED, 0
    for _ in range(9):
        judgement = judge(health, FAILED, 0.0, alone=True)
        health, suspected = judgement.health, suspected + judgement.suspect
    assert not health.ejected(0.0)
    assert suspected == 3, "somebody who can look closer is told"


def test_pauses_grow_and_are_short_again_after_recovery() -> None:
    health, now, pauses = TRUSTED, 0.0, []
    for _ in range(6):
        health = after(DEAD, health=health, now=now)
        assert health.until is not None
        pauses.append(health.until - now)
        now = health.until
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert max(pauses) == MAX_PAUSE_S
    back = after(OK, health=health, now=now)
    assert back.until is None
    again = after(*[FAILED] * FAILURES, health=back, now=now)
    assert again.until == now + MAX_PAUSE_S, "one good answer is no recovery"
    assert after(*[OK] * RECOVERED, health=health, now=now) is TRUSTED


def test_on_trial_one_failure_is_enough() -> None:
    ejected = after(DEAD)
    assert after(FAILED, health=ejected, now=PAUSE_S).ejected(PAUSE_S)
    assert not after(FAILED, health=ejected, now=PAUSE_S, alone=True).ejected(PAUSE_S)
    assert after(BUSY, health=ejected, now=PAUSE_S).on_trial(PAUSE_S)


def test_what_began_before_the_ejection_changes_nothing() -> None:
    ejected = after(DEAD)
    assert after(OK, FAILED, DEAD, health=ejected, now=1.0) == ejected
