"""Manifests: equal values have equal bytes, other values have other names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from policies.manifest import Exchange, HostFacts, Manifest, MappedFile, Profile, SnapshotObject, canonical

PATIENT = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
HOSTS = st.builds(
    HostFacts,
    hostname=TEXT,
    arch=st.none() | TEXT,
    cpu_flags=st.none() | st.lists(TEXT, max_size=3).map(tuple),
    xsave_size=st.none() | st.integers(0),
)
PROFILES = st.builds(Profile, env=st.dictionaries(TEXT, TEXT, max_size=3), weights=st.dictionaries(TEXT, TEXT, max_size=3))
MANIFESTS = st.builds(
    Manifest,
    format=st.just(1),
    profile=PROFILES,
    host=HOSTS,
    objects=st.lists(st.builds(SnapshotObject), max_size=2).map(tuple),
    files=st.lists(st.builds(MappedFile), max_size=2).map(tuple),
    canary=st.lists(st.builds(Exchange, request=st.dictionaries(TEXT, JSON, max_size=3), answer=JSON), max_size=2).map(tuple),
    cold_start_s=st.floats(0, 1e6),
)


@PATIENT
@given(MANIFESTS)
def test_canonical_bytes_survive_reading_and_writing(manifest: Manifest) -> None:
    data = canonical(manifest)
    again = Manifest.model_validate_json(data)
    assert again == manifest
    assert canonical(again) == data
    assert again.id == manifest.id
    assert re.fullmatch("[0-9a-f]{16}", manifest.id)


@PATIENT
@given(PROFILES)
def test_the_order_of_keys_changes_nothing(profile: Profile) -> None:
    shuffled = profile.model_copy(
        update={"env": dict(reversed(profile.env.items())), "weights": dict(reversed(profile.weights.items()))}
    )
    assert canonical(shuffled) == canonical(profile)
    assert shuffled.digest == profile.digest


@PATIENT
@given(MANIFESTS, MANIFESTS)
def test_other_values_have_other_names(one: Manifest, other: Manifest) -> None:
    assert (one == other) == (one.id == other.id)


def document(manifest: Manifest) -> Any:
    return json.loads(canonical(manifest))


def a_manifest() -> Manifest:
    host = HostFacts(
        hostname="h", arch=None, kernel=None, cpu_model=None, cpu_flags=None, xsave_size=None, criu_version=None,
        criu_sha256=None, page_size=None,
    )  # fmt: skip
    profile = Profile(model="m", engine="http", command=("/é",), env={}, port=1, weights={})
    return Manifest(
        created_ms=0, profile=profile, host=host, objects=(), files=(), canary=(), root_pid=1, pids=(), scratch=(),
        criu_options=(), cold_start_s=0.1, bytes=0, bytes_written=0,
    )  # fmt: skip


def test_canonical_json_is_sorted_compact_utf8() -> None:
    data = canonical(a_manifest())
    assert "é".encode() in data
    assert b", " not in data
    assert b'": ' not in data
    assert list(document(a_manifest())) == sorted(document(a_manifest()))


@pytest.mark.parametrize("changes", [{"format": 3}, {"format": 0}, {"surprise": 1}, {"host": {}}, {"bytes": "many"}])
def test_a_manifest_of_another_format_or_shape_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate({**document(a_manifest()), **changes})


def test_each_field_counts() -> None:
    base = a_manifest()
    for field, value in {
        "created_ms": 1,
        "root_pid": 2,
        "pids": (1,),
        "scratch": ("/tmp",),
        "cold_start_s": 0.2,
        "bytes": 1,
    }.items():
        assert base.model_copy(update={field: value}).id != base.id
