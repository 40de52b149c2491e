"""Which snapshots go: examples, and what holds whatever there is."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.retention import Kept, Retention, plan

NOW = 10_000_000
DAY = 86_400_000


def kept(id: str, created_ms: int = 0, **more: object) -> Kept:
    base = Kept(id, "m", "p", created_ms, created_ms, 100, True)
    return replace(base, **more)  # type: ignore[arg-type]


def ids(*snapshots: Kept, now_ms: int = NOW, **rules: object) -> list[str]:
    given = Retention.model_validate({"keep_last": None, "grace_s": 0, **rules})
    return [removal.id for removal in plan(snapshots, given, now_ms)]


def test_by_default_three_of_a_kind_stay_and_nothing_young_goes() -> None:
    five = [kept(f"s{n}", n) for n in range(5)]
    assert [removal.id for removal in plan(five, Retention(), NOW)] == ["s0", "s1"]
    assert plan(five, Retention(), 3_599_999) == []


def test_kinds_are_counted_apart() -> None:
    snapshots = [kept("a", 1), kept("b", 2), kept("c", 3, profile="q"), kept("d", 4, model="n")]
    assert ids(*snapshots, keep_last=1) == ["a"]


def test_the_newest_usable_of_a_model_outlives_its_age_and_the_budget_unless_told() -> None:
    snapshots = [kept("old", 1), kept("good", 2), kept("unfit", 3, usable=False), kept("bad", 4, quarantined=True)]
    assert ids(*snapshots, max_age_s=1) == ["bad", "unfit", "old"]
    assert ids(*snapshots, max_bytes=0) == ["bad", "unfit", "old"]
    assert ids(*snapshots, max_bytes=0, spare_newest=False) == ["bad", "unfit", "old", "good"]


def test_what_is_used_stays() -> None:
    assert ids(kept("a", in_use=True), kept("b", 1), keep_last=1, max_bytes=0, spare_newest=False) == ["b"]


def test_a_quarantined_one_is_not_one_of_the_last() -> None:
    assert ids(kept("good", 1), kept("bad", 2, quarantined=True), keep_last=1, spare_newest=False) == ["bad"]


def test_weights_are_freed_with_the_last_that_names_them() -> None:
    big = {"w": 1000}
    removals = plan(
        [kept("a", 1, weights=big), kept("b", 2, weights=big)],
        Retention(keep_last=None, grace_s=0, max_bytes=0, spare_newest=False),
        NOW,
    )
    assert [(removal.id, removal.bytes) for removal in removals] == [("a", 100), ("b", 1100)]


def test_reasons_name_the_setting() -> None:
    reasons = [r.reason for r in plan([kept("a"), kept("b", 1)], Retention(keep_last=1, grace_s=0, spare_newest=False), NOW)]
    assert [reason.partition(":")[0] for reason in reasons] == ["retention.keep_last"]


SNAPSHOTS = st.lists(
    st.builds(
        Kept,
        id=st.text("abcdef", min_size=4, max_size=6),
        model=st.sampled_from("mn"),
        profile=st.sampled_from("pq"),
        created_ms=st.integers(0, 20),
        since_ms=st.integers(0, 20),
        bytes=st.integers(0, 100),
        usable=st.booleans(),
        quarantined=st.booleans(),
        in_use=st.booleans(),
        weights=st.dictionaries(st.sampled_from("xyz"), st.just(50), max_size=2),
    ),
    max_size=12,
    unique_by=lambda one: one.id,
)
RULES = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 4),
    max_age_s=st.none() | st.sampled_from([0.003, 0.01]),
    max_bytes=st.none() | st.integers(0, 500),
    grace_s=st.sampled_from([0.0, 0.005, 0.02]),
    spare_newest=st.booleans(),
)


def size(snapshots: list[Kept]) -> int:
    weights: dict[str, int] = {}
    for one in snapshots:
        weights.update(one.weights)
    return sum(one.bytes for one in snapshots) + sum(weights.values())


@settings(max_examples=400, deadline=None)
@given(SNAPSHOTS, RULES, st.integers(20, 40))
def test_whatever_there_is_the_rules_hold_and_what_is_protected_stays(snapshots: list[Kept], rules: Retention, now: int) -> None:
    removals = plan(snapshots, rules, now)
    gone = {removal.id for removal in removals}
    left = [one for one in snapshots if one.id not in gone]
    assert len(gone) == len(removals)

    newest: dict[str, Kept] = {}
    for one in sorted(snapshots, key=lambda one: (one.created_ms, one.id)):
        if one.usable and not one.quarantined:
            newest[one.model] = one
    spared = {one.id for one in newest.values()} if rules.spare_newest else set()

    def protected(one: Kept) -> bool:
        return one.in_use or now - one.since_ms < rules.grace_s * 1000 or one.id in spared

    assert not [one for one in snapshots if one.id in gone and protected(one)]
    # Each rule holds of what is left, or what breaks it is protected.
    if rules.max_bytes is not None and size(left) > rules.max_bytes:
        assert all(protected(one) for one in left)
    for one in left:
        if rules.max_age_s is not None and now - one.created_ms > rules.max_age_s * 1000:
            assert protected(one)
    if rules.keep_last is not None:
        for kind in {(one.model, one.profile) for one in left}:
            same = [one for one in left if (one.model, one.profile) == kind]
            assert len([one for one in same if not protected(one)]) <= rules.keep_last
    # What is freed adds up, and a second look finds nothing more to do.
    assert sum(removal.bytes for removal in removals) == size(snapshots) - size(left)
    assert plan(left, rules, now) == []
    # Without a rule nothing goes.
    if rules.keep_last is None and rules.max_age_s is None and rules.max_bytes is None:
        assert not gone


@settings(max_examples=200, deadline=None)
@given(SNAPSHOTS, st.integers(0, 500), st.integers(20, 40))
def test_the_budget_takes_quarantined_ones_first_then_unfit_ones_then_old_ones(
    snapshots: list[Kept], budget: int, now: int
) -> None:
    rules = Retention(keep_last=None, max_bytes=budget, grace_s=0, spare_newest=False)
    by_id = {one.id: one for one in snapshots}
    order = [by_id[removal.id] for removal in plan(snapshots, rules, now)]
    worth = [(not one.quarantined, one.usable, one.created_ms) for one in order]
    assert worth == sorted(worth)
