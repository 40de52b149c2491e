"""The floor of a restore, and the account of where the rest of its time went."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policies_compat import manifest as any_manifest

from policies.floor import Rates, account, forecast_s, judged
from policies.manifest import GpuState, MappedFile, Weights, WeightsPart
from policies.replica import Replica, Stage, State

GB = 10**9
RATES = Rates(measured_ms=1, disk=1.0 * GB, disk_cached=0.5 * GB, cache=2.0 * GB, fill=4.0 * GB, fill_huge=1.0 * GB, spawn_s=0.02)


def stage(name: str, seconds: float = 1.0, size: int | None = None, cached: float | None = None) -> Stage:
    return Stage(name=name, seconds=seconds, bytes=size, cached=cached)


def replica(stages: list[Stage], **more: Any) -> Replica:
    return Replica(id="m#0", model="m", state=State.ADMITTED, fence=1, stages=tuple(stages), **more)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (stage("fill memory", size=2 * GB, cached=0.0), 2.0),
        (stage("fill memory", size=2 * GB, cached=1.0), 1.0),
        (stage("fill memory", size=2 * GB, cached=0.5), 1.0),
        (stage("restore processes", size=0, cached=1.0), 0.02),
        (stage("lay scratch", size=1 * GB), 0.5),
        (stage("verify bytes", size=5 * GB, cached=1.0), 0.0),
        (stage("match"), 0.0),
        (stage("something new", size=9 * GB), 0.0),
        (stage("canary"), 0.7),
        (stage("canary", size=1 * GB, cached=0.0), 2.0),
        (stage("restore GPU", size=5 * GB), 0.0),
    ],
)
def test_the_floor_of_a_stage_is_what_it_has_to_move(one: Stage, expected: float) -> None:
    (found,), _ = judged([one], RATES, canary_s=0.7)
    assert found.floor_s == pytest.approx(expected)


def test_disk_and_processors_can_work_beside_each_other() -> None:
    """1 GB for memory and 1 GB through the page cache for the canary: three seconds, in which the rest is done too."""
    stages = [stage("fill memory", size=GB, cached=0.0), stage("canary", 9.0, size=GB, cached=0.0)]
    assert judged(stages, RATES, canary_s=0.7)[1] == pytest.approx(3.0)
    assert judged(stages, RATES, canary_s=5.0)[1] == pytest.approx(5.25)


def test_a_canary_that_is_answered_faster_than_the_donors_lowers_the_floor() -> None:
    assert judged([stage("canary", 0.5)], RATES, canary_s=0.7)[1] == pytest.approx(0.5)


def test_weights_travel_beside_the_rest_until_they_are_the_longest() -> None:
    rates = RATES.model_copy(update={"pcie": 10.0 * GB})
    stages = [stage("fill memory", size=4 * GB, cached=1.0), stage("restore GPU", size=2 * GB)]
    assert judged(stages, rates, canary_s=None, apart_bytes=GB)[1] == pytest.approx(2.2)
    assert judged(stages, rates, canary_s=None, apart_bytes=100 * GB)[1] == pytest.approx(10.0)


def test_a_forecast_counts_memory_gpu_and_what_the_canary_touches() -> None:
    sets = (Weights(digest="0", parts=(WeightsPart(name="p", bytes=GB, sha256="0"),), allocations=()),)
    gpu = GpuState(pids=(), uuids=(), used=(), state_bytes=GB, awake_bytes=0, weights=sets)
    file = MappedFile(path="/m", bytes=2 * GB, sha256="0", touched=GB)
    made = any_manifest().model_copy(update={"bytes": 2 * GB, "gpu": gpu, "files": (file,), "canary_s": 0.5})
    rates = RATES.model_copy(update={"pcie": 10.0 * GB})
    assert forecast_s(made, rates, cached=1.0) == pytest.approx(0.02 + 1.0 + 0.1 + 0.5)
    assert forecast_s(made, rates, cached=0.0) == pytest.approx(4.0)
    assert forecast_s(any_manifest(), RATES, cached=0.0) == pytest.approx(0.02)


def test_the_account_in_words() -> None:
    timed = [stage("match", 0.01), stage("verify bytes", 0.2), stage("fill memory", 1.5, 2 * GB, 1.0), stage("canary", 0.8)]
    done, floor_s = judged(timed, RATES, canary_s=0.7)
    found = account(replica(done, floor_s=floor_s, took_s=2.6))
    assert found is not None
    assert found.ratio == pytest.approx(2.6 / 1.7)
    assert found.text == (
        "floor 1.70 s, took 2.60 s (1.5 x), lost in: fill memory 0.50 s, verify bytes 0.20 s, canary 0.10 s, "
        "between stages 90 ms, the rest 10 ms"
    )


def test_there_is_no_account_without_a_floor() -> None:
    assert account(replica([stage("start engine")])) is None
    assert account(replica([stage("start engine")], took_s=1.0)) is None


NAMES = st.sampled_from(["match", "lay scratch", "restore processes", "fill memory", "restore GPU", "canary", "wake"])
STAGES = st.lists(
    st.builds(stage, NAMES, st.floats(0, 100), st.none() | st.integers(0, 10**11), st.none() | st.floats(0, 1)), max_size=8
)


@given(STAGES, st.none() | st.floats(0, 10), st.integers(0, 10**11), st.floats(0, 5))
def test_floor_and_losses_add_up_to_what_it_took(stages: list[Stage], canary_s: float | None, apart: int, between: float) -> None:
    done, floor_s = judged(stages, RATES, canary_s=canary_s, apart_bytes=apart)
    took = sum(one.seconds for one in stages) + between
    found = account(replica(done, floor_s=floor_s, took_s=took))
    assert found is not None
    assert found.floor_s + sum(seconds for _, seconds in found.lost) == pytest.approx(took, abs=1e-3)
    assert floor_s >= 0


@given(STAGES, st.floats(0, 10), st.floats(0.1, 1))
def test_a_slower_host_never_has_a_lower_floor(stages: list[Stage], canary_s: float, part: float) -> None:
    names = ("disk", "cache", "fill", "fill_huge")
    slower = RATES.model_copy(update={name: getattr(RATES, name) * part for name in names})
    assert judged(stages, slower, canary_s=canary_s)[1] >= judged(stages, RATES, canary_s=canary_s)[1] - 1e-6


def test_the_best_of_two_measurements_is_the_faster_in_each() -> None:
    other = RATES.model_copy(update={"measured_ms": 2, "disk": 5.0 * GB, "fill": 1.0 * GB, "spawn_s": 0.5, "pcie": 7.0})
    for best in (RATES.best(other), other.best(RATES)):
        assert (best.measured_ms, best.disk, best.fill, best.spawn_s, best.pcie) == (2, 5.0 * GB, 4.0 * GB, 0.02, 7.0)
