"""When a restore may begin beside the rest of its weights, and how long it waits for them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policies_floor import GB, RATES
from test_restorer_snapshots import draft

from policies import floor
from policies.arrival import Rest, begin, patience_s
from policies.manifest import GpuState


def rest(**changes: Any) -> Rest:
    """2 GB are to come within two seconds, and are verified a moment later."""
    return Rest(**{"left": 2 * GB, "came": 1.0 * GB, "behind": 2 * GB, "part": GB // 10, "checked": 10.0 * GB, **changes})


@pytest.mark.parametrize(
    ("changes", "lead_s", "on"),
    [
        ({}, 1.01, True),
        ({}, 1.0, False),
        ({"came": 0.9 * GB}, 1.01, False),
        ({"left": 0, "behind": 8 * GB, "checked": 2.0 * GB}, 1.95, False),
        ({"left": 0, "behind": 8 * GB, "checked": 2.0 * GB}, 2.0, True),
        ({"left": GB // 5, "behind": 8 * GB, "checked": 2.0 * GB}, 0.35, False),
        ({"left": 0, "behind": 0, "came": 0.0}, 0.0, True),
        ({"came": 0.0}, 1e9, False),
        ({"checked": 0.0}, 1e9, False),
        ({}, None, False),
    ],
    ids=[
        "in time", "the last part must be verified too", "the network is too slow", "the disk is behind",
        "the disk has caught up", "hardly anything is to come and much to be verified", "all is here",
        "nothing has come", "nothing was verified",
        "not measured",
    ],
)  # fmt: skip
def test_it_begins_when_the_rest_is_here_and_verified_before_it_is_wanted(
    changes: dict[str, Any], lead_s: float | None, on: bool
) -> None:
    assert begin(rest(**changes), lead_s=lead_s).on is on


def test_the_reason_has_the_numbers() -> None:
    assert begin(rest(), lead_s=0.45).why == (
        "2000 MB were left, at 1000 MB/s, and 2000 MB not verified, at 10000 MB/s: 2.01 s; weights are wanted after about 0.90 s"
    )


_COUNTS, _RATES = st.integers(0, 10**13), st.floats(0.0, 1e12)


@given(_COUNTS, _RATES, _COUNTS, _RATES, st.floats(0.0, 1e4))
def test_a_gpu_is_never_taken_for_longer_than_a_restore_needs_it(
    left: int, came: float, behind: int, checked: float, lead_s: float
) -> None:
    if begin(Rest(left=left, came=came, behind=behind, part=GB, checked=checked), lead_s=lead_s).on:
        assert left <= 2 * lead_s * came * (1 + 1e-9)
        assert behind <= 2 * lead_s * checked * (1 + 1e-9)


def test_what_is_being_verified_is_done_in_part() -> None:
    behind = {"left": 0, "behind": 4 * GB, "checked": 1.0 * GB}
    assert not begin(rest(**behind), lead_s=0.5).on
    assert not begin(rest(**behind, spent_s=2.9), lead_s=0.5).on
    assert begin(rest(**behind, spent_s=3.1), lead_s=0.5).on
    assert begin(rest(**behind, spent_s=9.0), lead_s=0.0).on


def test_a_slow_rest_is_waited_for_and_one_that_stalls_is_not() -> None:
    assert patience_s(0) == 60.0
    assert patience_s(5 * GB) == 160.0


def test_what_comes_before_the_weights_is_what_a_restore_does_out_of_the_page_cache() -> None:
    state = GpuState(pids=(1,), uuids=("G",), used=("G",), state_bytes=GB, awake_bytes=GB, weights=())
    manifest = draft(bytes=4 * GB, gpu=state)
    rates = RATES.model_copy(update={"pcie": 10.0 * GB})
    assert floor.lead_s(manifest, rates) == pytest.approx(4 / 2.0 + 0.02 + 0.1)
    assert floor.lead_s(manifest.model_copy(update={"gpu": None}), rates) == pytest.approx(4 / 2.0 + 0.02)
