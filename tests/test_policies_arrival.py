"""When a restore may begin beside the rest of its weights, and how long it waits for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policies_floor import GB, RATES
from test_restorer_snapshots import draft

from policies import floor
from policies.arrival import begin, patience_s
from policies.manifest import GpuState


@pytest.mark.parametrize(
    ("left", "rate", "lead_s", "on"),
    [
        (2 * GB, 1 * GB, 2.0, True),
        (2 * GB + 1, 1 * GB, 2.0, False),
        (0, 1 * GB, 0.0, True),
        (1, 0.0, 5.0, False),
        (1, 1 * GB, None, False),
    ],
    ids=["in time", "a GPU would wait", "all has come", "nothing has come", "not measured"],
)
def test_it_begins_when_the_rest_comes_before_it_is_wanted(left: int, rate: float, lead_s: float | None, on: bool) -> None:
    assert begin(left, rate=rate, lead_s=lead_s).on is on


def test_the_reason_has_the_numbers() -> None:
    assert begin(GB, rate=2.0 * GB, lead_s=0.9).why == "1000.0 MB are left, 0.50 s at 2000 MB/s; weights are wanted after 0.90 s"


@given(st.integers(0, 10**13), st.floats(0.0, 1e12), st.floats(0.0, 1e4))
def test_a_gpu_is_never_taken_for_longer_than_a_restore_needs_it(left: int, rate: float, lead_s: float) -> None:
    if begin(left, rate=rate, lead_s=lead_s).on:
        assert left <= lead_s * rate * (1 + 1e-9)


def test_a_slow_rest_is_waited_for_and_one_that_stalls_is_not() -> None:
    assert patience_s(0) == 60.0
    assert patience_s(5 * GB) == 160.0


def test_what_comes_before_the_weights_is_what_a_restore_does_out_of_the_page_cache() -> None:
    state = GpuState(pids=(1,), uuids=("G",), used=("G",), state_bytes=GB, awake_bytes=GB, weights=())
    manifest = draft(bytes=4 * GB, gpu=state)
    rates = RATES.model_copy(update={"pcie": 10.0 * GB})
    assert floor.lead_s(manifest, rates) == pytest.approx(4 / 2.0 + 0.02 + 0.1)
    assert floor.lead_s(manifest.model_copy(update={"gpu": None}), rates) == pytest.approx(4 / 2.0 + 0.02)
