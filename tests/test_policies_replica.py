"""The replica table: every legal step, every illegal one, and that an illegal one changes nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.replica import COMING, RUNNING, TERMINAL, TRANSITIONS, Event, IllegalTransition, Replica, State, advance

PAIRS = list(itertools.product(State, Event))


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS))
def test_a_row_of_the_table_is_a_legal_step(state: State, event: Event) -> None:
    assert advance(state, event) is TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_an_absent_row_raises_and_changes_nothing(state: State, event: Event) -> None:
    before = dict(TRANSITIONS)
    with pytest.raises(IllegalTransition, match=f"^{event} is not possible for a replica that is {state}$"):
        advance(state, event)
    assert before == TRANSITIONS


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[State.QUEUED, Event.ADMIT] = State.ADMITTED  # type: ignore[index]


def test_every_state_is_coming_running_or_over() -> None:
    assert set(State) == COMING | RUNNING | TERMINAL
    assert len(COMING) + len(RUNNING) + len(TERMINAL) == len(State)


def test_nothing_follows_an_end() -> None:
    assert not [state for state, _ in TRANSITIONS if state in TERMINAL]


def test_traffic_is_opened_only_after_verification() -> None:
    assert [pair for pair, to in TRANSITIONS.items() if to is State.ADMITTED] == [(State.VERIFYING, Event.ADMIT)]


def test_a_replica_that_differs_never_comes_back() -> None:
    assert TRANSITIONS[State.VERIFYING, Event.DIFFER] is State.QUARANTINED
    assert State.QUARANTINED in TERMINAL


def test_every_state_can_be_reached_and_left() -> None:
    assert {State.QUEUED} | set(TRANSITIONS.values()) == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State) - TERMINAL


def test_anything_on_its_way_can_fail_and_a_lost_lease_sends_claimed_work_back() -> None:
    for state in COMING | RUNNING:
        assert advance(state, Event.FAIL) is State.FAILED
    for state in COMING - {State.QUEUED}:
        assert advance(state, Event.LEASE_LOST) is State.QUEUED


def test_nothing_is_cancelled_beyond_the_point_of_no_return() -> None:
    assert {state for state, event in TRANSITIONS if event is Event.CANCEL} == {State.QUEUED, State.MATCHING, State.STARTING}


@settings(deadline=None)
@given(st.lists(st.sampled_from(Event), max_size=40))
def test_any_history_keeps_to_the_table(events: list[Event]) -> None:
    state, verified = State.QUEUED, False
    for event in events:
        before = state
        try:
            state = advance(state, event)
        except IllegalTransition:
            assert (before, event) not in TRANSITIONS
            continue
        assert before not in TERMINAL
        verified = state is State.VERIFYING or (verified and state in RUNNING)
        assert state not in RUNNING or verified


def test_a_replica_record_is_frozen_and_survives_its_codec() -> None:
    replica = Replica(id="m#0", model="m", state=State.VERIFYING, fence=3, start="restored", snapshot="ab")
    assert Replica.model_validate_json(replica.model_dump_json()) == replica
    with pytest.raises(ValueError, match="frozen"):
        replica.state = State.ADMITTED  # type: ignore[misc]
