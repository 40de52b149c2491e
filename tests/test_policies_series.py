"""What restorers count, on its way through the store: spelt, read again, and added up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.series import SECONDS, SERIES, Point, buckets, observed

LABEL = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\t"), max_size=20)


@given(st.data())
def test_a_field_is_read_as_it_was_spelt(data):
    name = data.draw(st.sampled_from(sorted(SERIES)))
    labels = tuple(data.draw(LABEL) for _ in SERIES[name].labels)
    points = observed(name, labels, 1.0) if SERIES[name].kind == "histogram" else (Point(name, labels),)
    assert [Point.of(point.field) for point in points] == list(points)


def test_what_another_version_counts_is_left_alone():
    assert Point.of("never_heard_of\tm") is None
    assert Point.of("canary\tm") is None, "a label is missing"
    assert Point.of("canary\tm\tequal\tmore") is None


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_buckets_are_cumulative_and_whole(seen):
    parts: dict[str, float] = {}
    for seconds in seen:
        bucket, total = observed("start_seconds", ("m", "cold"), seconds)
        parts[bucket.part] = parts.get(bucket.part, 0) + 1
        parts[total.part] = parts.get(total.part, 0) + seconds
    counts, total_s = buckets(parts)
    assert [bound for bound, _ in counts] == [str(float(bound)) for bound in SECONDS] + ["+Inf"]
    assert [count for _, count in counts] == [sum(one <= bound for one in seen) for bound in SECONDS] + [len(seen)]
    assert abs(total_s - sum(seen)) < 1e-6


def test_buckets_reach_ten_minutes():
    assert max(SECONDS) >= 600
