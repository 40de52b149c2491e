"""Which host takes what: who can at all, who is best, and for how long the others leave it to those."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.config import Model
from policies.placement import MOST_S, NOBODY_S, STEP_S, TIER_S, Rank, Tier, lacking, lacks, nobody, others, ranking, tier
from policies.replica import Replica, State
from policies.wire import HostReport, JobKind, SnapshotSummary


def model(**more: Any) -> Model:
    engine = {"kind": "http", "command": ["/bin/true"], **more.pop("engine", {})}
    return Model.model_validate({"engine": engine, **more})


def snapshot(fits: bool = True, **more: Any) -> SnapshotSummary:
    return SnapshotSummary(id="s1", model="m", created_ms=0, bytes=1, fits=fits, **more)


def host(name: str, *snapshots: SnapshotSummary, **more: Any) -> HostReport:
    usual: dict[str, Any] = {"capable": True, "capability": "", "running": 0, "parallel_starts": 3}
    return HostReport(host=name, snapshots=snapshots, **(usual | more))


def running(on: str, slot: int = 0, state: State = State.ADMITTED) -> Replica:
    return Replica(id=f"m#{slot}", model="m", state=state, fence=1, host=on)


def order(
    *reports: HostReport, of: Model | None = None, replicas: tuple[Replica, ...] = (), kind: JobKind = JobKind.START
) -> str:
    return " ".join(rank.host for rank in ranking("m", of or model(), reports, replicas, kind))


def test_what_is_nearer_to_serving_comes_first() -> None:
    cold, here = host("a"), host("c", snapshot())
    pulls, resting = host("b", pulls=True), host("d", resting=("m",))
    assert [tier("m", model(), one) for one in (resting, here, pulls, cold)] == list(Tier)
    assert order(cold, pulls, here, resting) == "d c b a"
    assert [rank.lag_s for rank in ranking("m", model(), (cold, pulls, here, resting), ())] == [
        0.0,
        TIER_S,
        2 * TIER_S,
        3 * TIER_S,
    ]


def test_a_snapshot_that_does_not_fit_or_cannot_be_restored_there_is_none() -> None:
    assert tier("m", model(), host("a", snapshot(fits=False))) is Tier.COLD
    assert tier("m", model(), host("a", snapshot(), obstacles={"criu": "criu is not installed"}, pulls=True)) is Tier.COLD
    assert tier("other", model(), host("a", snapshot())) is Tier.COLD


def test_equal_hosts_share_the_replicas_and_agree_on_the_order() -> None:
    a, b, c = host("a", snapshot()), host("b", snapshot()), host("c", snapshot())
    assert order(c, a, b) == "a b c"
    assert ranking("m", model(), (a, b, c), ())[1] == Rank("b", STEP_S)
    assert order(a, b, c, replicas=(running("a"), running("b", 1, State.RESTORING))) == "c a b"
    assert order(a, b, replicas=(running("a", 0, State.STOPPED), running("b", 1, State.FAILED))) == "a b", (
        "what is over takes no room"
    )
    assert order(host("a", snapshot(), running=2), b) == "b a"


def test_free_gpus_and_room_for_a_start_count_before_who_is_named_first() -> None:
    of = model(engine={"gpu": {"count": 2}})
    full, free = host("a", snapshot(), gpus=2, free_gpus=1), host("b", snapshot(), gpus=2, free_gpus=2)
    assert order(full, free, of=of) == "b a"
    assert order(host("c", gpus=2, free_gpus=2), full, of=of) == "c a", "a cold start on free GPUs comes before waiting for them"
    busy = host("a", snapshot(), starting=3)
    assert order(busy, host("b", snapshot())) == "b a"
    assert order(busy, host("b")) == "a b", "a moment's lack of room is worth waiting for"


def test_who_lacks_something_for_good_is_not_in_the_order() -> None:
    gpus = model(engine={"gpu": {"count": 2}, "hosts": ["gpu-*", "big"]})
    assert lacks("m", gpus, host("big", gpus=1)) == ["it has 1 GPUs of 2"]
    assert lacks("m", gpus, host("gpu-7", gpus=8)) == []
    assert lacks("m", gpus, host("small", models=("other",))) == [
        "engine.hosts names gpu-*, big",
        "its configuration has no such model",
        "it has 0 GPUs of 2",
    ]
    assert order(host("gpu-1", gpus=2), host("big", gpus=1), of=gpus) == "gpu-1"


def test_where_only_a_restore_will_do_every_reason_of_every_host_is_told() -> None:
    strict = model(on_no_snapshot="reject")
    reports = (
        host("a", snapshot(fits=False, mismatches=("kernel: 6.1, found 6.2", "cpu: x"))),
        host("b", obstacles={"criu": "criu is not installed"}),
        host("c", snapshot(fits=False, quarantined="it differs")),
    )
    assert nobody("m", strict, reports) == (
        "a: snapshot s1: kernel: 6.1, found 6.2; cpu: x; b: criu is not installed; c: snapshot s1: it differs"
    )
    assert "; ".join(f"{at}: {what}" for at, what in lacking("m", strict, reports).items()) == nobody("m", strict, reports)
    assert nobody("m", strict, (*reports, host("d", pulls=True))) == ""
    assert nobody("m", model(), reports) == ""
    assert not lacks("m", model(on_no_snapshot="reject", engine={"backend": "cold"}), host("a", obstacles={"cold": "cold"}))


def test_when_nobody_can_one_says_so_after_a_while() -> None:
    nowhere = model(engine={"hosts": ["x"]})
    assert ranking("m", nowhere, (host("b"), host("a")), ()) == [Rank("a", NOBODY_S), Rank("b", NOBODY_S + STEP_S)]


def test_a_snapshot_is_rather_made_where_there_is_none() -> None:
    able = (host("a", snapshot()), host("b"))
    assert order(*able, kind=JobKind.SNAPSHOT) == "b a"
    assert order(*able, host("c", obstacles={"criu": "none"}), kind=JobKind.SNAPSHOT) == "b a"


def test_others_are_those_that_have_not_failed_yet() -> None:
    reports = (host("a", snapshot()), host("b", snapshot()), host("c"))
    assert others("m", model(), reports, {"a"}) == ["b", "c"]
    assert others("m", model(), reports, {"a"}, worst=Tier.HERE) == ["b"]
    assert others("m", model(engine={"hosts": ["a"]}), reports, {"a"}) == []


names = st.sampled_from("abcdef")
hosts = st.builds(
    lambda name, fits, **more: host(name, *([snapshot(fits)] if fits is not None else []), **more),
    names,
    st.one_of(st.none(), st.booleans()),
    starting=st.integers(0, 4),
    running=st.integers(0, 3),
    gpus=st.integers(0, 2),
    free_gpus=st.integers(0, 2),
    pulls=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    reports=st.lists(hosts, min_size=1, unique_by=lambda one: one.host),
    count=st.integers(0, 2),
    reject=st.booleans(),
    replicas=st.lists(st.builds(running, names, st.integers(0, 3), st.sampled_from(list(State)))),
    kind=st.sampled_from([JobKind.START, JobKind.SNAPSHOT]),
    data=st.data(),
)
def test_whatever_there_is_all_hosts_find_one_order_and_somebody_comes_at_once(
    reports: list[HostReport], count: int, reject: bool, replicas: list[Replica], kind: JobKind, data: st.DataObject
) -> None:
    of = model(engine={"gpu": {"count": count}}, on_no_snapshot="reject" if reject else "cold")
    ranks = ranking("m", of, reports, replicas, kind)
    assert ranks == ranking("m", of, data.draw(st.permutations(reports)), replicas, kind)
    able = {one.host for one in reports if not lacks("m", of, one, kind)}
    assert {rank.host for rank in ranks} == (able or {one.host for one in reports})
    lags = [rank.lag_s for rank in ranks]
    assert lags == sorted(lags)
    assert lags[0] == (0.0 if able else NOBODY_S)
    assert lags[-1] <= (MOST_S if able else NOBODY_S + MOST_S)
    assert bool(nobody("m", of, reports, kind)) is not bool(able)


@pytest.mark.parametrize(("pattern", "name", "fits"), [("gpu-*", "gpu-1", True), ("gpu-*", "cpu-1", False), ("a", "A", False)])
def test_hosts_are_named_by_name_or_pattern(pattern: str, name: str, fits: bool) -> None:
    assert (lacks("m", model(engine={"hosts": [pattern]}), host(name)) == []) is fits
