"""Compatibility: every mismatch, each with expected, found and remedy; an unknown fact is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.compat import GPU_RULES, RULES, Mismatch, gpu_obstacles, mismatches, newest_fit
from policies.manifest import Gpu, GpuFacts, GpuState, HostFacts, Manifest, Profile, canonical

HOST = HostFacts(
    hostname="donor",
    arch="x86_64",
    kernel="6.18.0",
    cpu_model="Testium",
    cpu_flags=("avx2", "erms", "fpu"),
    xsave_size=832,
    criu_version="4.2.1",
    criu_sha256="c" * 64,
    page_size=4096,
)
PROFILE = Profile(model="m", engine="vllm", command=("/vllm", "serve"), env={"A": "1"}, port=8000, weights={"/w": "w" * 64})


def manifest(host: HostFacts = HOST, profile: Profile = PROFILE, created_ms: int = 1) -> Manifest:
    return Manifest(
        created_ms=created_ms, profile=profile, host=host, objects=(), files=(), canary=(), root_pid=1, pids=(1,), scratch=(),
        criu_options=(), cold_start_s=1.5, bytes=0, bytes_written=0,
    )  # fmt: skip


def here(**changes: Any) -> HostFacts:
    return HOST.model_copy(update=changes)


def configured(**changes: Any) -> Profile:
    return PROFILE.model_copy(update=changes)


def test_a_snapshot_fits_where_it_was_made() -> None:
    assert mismatches(manifest(), PROFILE, HOST) == []


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"arch": "aarch64"}, "x86_64", "aarch64"),
        ({"kernel": "6.18.1"}, "6.18.0", "6.18.1"),
        ({"cpu_flags": ("erms", "fpu", "new")}, "avx2", "none of these"),
        ({"cpu_flags": ()}, "avx2 erms fpu", "none of these"),
        ({"xsave_size": 11008}, "832", "11008"),
        ({"page_size": 16384}, "4096", "16384"),
        ({"criu_version": "4.1"}, "4.2.1", "4.1"),
    ],
)
def test_restore_case_32_33_and_39_a_host_that_differs_is_refused(changes: dict[str, Any], expected: str, found: str) -> None:
    (mismatch,) = mismatches(manifest(), PROFILE, here(**changes))
    (field,) = changes
    assert mismatch == Mismatch(f"host.{field}", expected, found, RULES[field][1])
    assert str(mismatch) == f"host.{field}: expected {expected}, found {found}; {RULES[field][1]}"


def test_restore_case_32_a_cpu_that_can_more_is_fine() -> None:
    assert mismatches(manifest(), PROFILE, here(cpu_flags=("amx", *HOST.cpu_flags))) == []  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes", [{"hostname": "other"}, {"cpu_model": "Else"}, {"criu_sha256": "d" * 64}, {"cpu_model": None}]
)
def test_facts_without_a_rule_are_only_reported(changes: dict[str, Any]) -> None:
    assert mismatches(manifest(), PROFILE, here(**changes)) == []


@pytest.mark.parametrize("field", list(RULES))
def test_an_unknown_fact_is_a_mismatch_on_either_side(field: str) -> None:
    unknown = here(**{field: None})
    for donor, host in [(unknown, HOST), (HOST, unknown), (unknown, unknown)]:
        (mismatch,) = mismatches(manifest(donor), PROFILE, host)
        assert mismatch.field == f"host.{field}"
        assert "unknown" in (mismatch.expected, mismatch.found)
        assert "rewake doctor" in mismatch.remedy


@pytest.mark.parametrize(
    ("changes", "field", "expected", "found"),
    [
        ({"model": "n"}, "model", "m", "n"),
        ({"engine": "http"}, "engine", "vllm", "http"),
        ({"command": ("/vllm",)}, "command", "/vllm serve", "/vllm"),
        ({"port": 1}, "port", "8000", "1"),
        ({"env": {"A": "2"}}, "env.A", "1", "2"),
        ({"env": {}}, "env.A", "1", "unknown"),
        ({"env": {"A": "1", "B": "x"}}, "env.B", "unknown", "x"),
        ({"weights": {"/w": "x" * 64}}, "weights./w", "w" * 64, "x" * 64),
        ({"weights": {}}, "weights./w", "w" * 64, "unknown"),
    ],
)
def test_a_profile_that_differs_is_refused(changes: dict[str, Any], field: str, expected: str, found: str) -> None:
    (mismatch,) = mismatches(manifest(), configured(**changes), HOST)
    assert mismatch[:3] == (f"profile.{field}", expected, found)
    assert "rewake snapshot create" in mismatch.remedy


@settings(deadline=None)
@given(st.sets(st.sampled_from(list(RULES))), st.sets(st.sampled_from(["model", "engine", "port", "env", "weights"])))
def test_every_mismatch_is_reported_not_just_the_first(host: set[str], profile: set[str]) -> None:
    other = {"model": "n", "engine": "http", "port": 1, "env": {"A": "2"}, "weights": {"/w": "x"}}
    keys = {"env": "env.A", "weights": "weights./w"}
    found = mismatches(manifest(), configured(**{f: other[f] for f in profile}), here(**dict.fromkeys(host)))
    assert {m.field for m in found} == {f"host.{f}" for f in host} | {f"profile.{keys.get(f, f)}" for f in profile}
    assert all(all(m) for m in found), "each has field, expected, found and remedy"


def test_the_newest_snapshot_that_fits_is_chosen_and_the_others_explained() -> None:
    old, new = manifest(created_ms=1), manifest(created_ms=2)
    wrong = manifest(here(kernel="5"), created_ms=3)
    for order in ([old, new, wrong], [wrong, new, old]):
        best, refused = newest_fit(order, PROFILE, HOST)
        assert best == new
        assert {id: [m.field for m in why] for id, why in refused.items()} == {wrong.id: ["host.kernel"]}
    assert newest_fit([], PROFILE, HOST) == (None, {})
    assert newest_fit([wrong], PROFILE, HOST)[0] is None


# ---------------------------------------------------------------- GPUs

GPU = Gpu(uuid="GPU-0", name="Testium 1", memory_bytes=100, compute="9.0", mig=False, persistence=True)
GPUS = GpuFacts(driver="580.1", mps=False, gpus=(GPU, GPU.model_copy(update={"uuid": "GPU-1"})))
STATE = GpuState(pids=(1,), uuids=("GPU-0", "GPU-1"), used=("GPU-0",), state_bytes=1, awake_bytes=2, weights=())


def on_gpu(gpus: GpuFacts | None = GPUS) -> Manifest:
    return manifest(here(gpu=gpus)).model_copy(update={"gpu": STATE})


def gpus(**changes: Any) -> HostFacts:
    """This host, with another fact of its driver or of its first GPU."""
    own = {name: changes.pop(name) for name in ("driver", "mps", "gpus") if name in changes}
    assert GPUS.gpus is not None
    first = GPUS.gpus[0].model_copy(update=changes)
    return here(gpu=GPUS.model_copy(update={"gpus": (first, *GPUS.gpus[1:]), **own}))


def test_any_gpu_of_the_same_model_will_do() -> None:
    assert mismatches(on_gpu(), PROFILE, gpus()) == []
    assert mismatches(on_gpu(), PROFILE, gpus(uuid="GPU-9", persistence=False)) == []


@pytest.mark.parametrize(
    ("changes", "field", "expected", "found"),
    [
        ({"driver": "590.2"}, "driver", "580.1", "590.2"),
        ({"name": "Testium 2"}, "names", "Testium 1 Testium 1", "Testium 1 Testium 2"),
        ({"gpus": (GPU,)}, "names", "Testium 1 Testium 1", "Testium 1"),
        ({"memory_bytes": 50}, "memory_bytes", "100 100", "50 100"),
        ({"compute": "8.0"}, "compute", "9.0 9.0", "8.0 9.0"),
        ({"mig": True}, "mig", "False False", "False True"),
        ({"mps": True}, "mps", "False", "True"),
    ],
)
def test_restore_case_60_a_gpu_that_differs_is_refused(changes: dict[str, Any], field: str, expected: str, found: str) -> None:
    mismatch = mismatches(on_gpu(), PROFILE, gpus(**changes))[0]
    assert (mismatch.field, mismatch.expected, mismatch.found) == (f"host.gpu.{field}", expected, found)
    assert mismatch.remedy


@pytest.mark.parametrize("field", GPU_RULES)
def test_an_unknown_fact_of_a_gpu_is_a_mismatch(field: str) -> None:
    unknown = {"names": "name"}.get(field, field)
    fields = {mismatch.field for mismatch in mismatches(on_gpu(), PROFILE, gpus(**{unknown: None}))}
    assert f"host.gpu.{field}" in fields


def test_a_host_without_a_driver_and_a_donor_without_facts_are_refused() -> None:
    assert [one.field for one in mismatches(on_gpu(), PROFILE, here())] == ["host.gpu"]
    assert {one.field for one in mismatches(on_gpu(None), PROFILE, gpus())} == {f"host.gpu.{field}" for field in GPU_RULES}


def test_gpus_are_nothing_to_an_engine_on_the_cpu() -> None:
    assert mismatches(manifest(), PROFILE, gpus(mig=True, mps=True, driver=None)) == []
    assert mismatches(manifest(here(gpu=GPUS)), PROFILE, here()) == []


def test_another_number_of_gpus_is_another_profile() -> None:
    (mismatch,) = mismatches(on_gpu(), configured(gpus=2), gpus())
    assert (mismatch.field, mismatch.found) == ("profile.gpus", "2")


def test_restore_case_60_what_keeps_this_host_from_capturing_at_all() -> None:
    assert gpu_obstacles(GPUS) == []
    assert [one.field for one in gpu_obstacles(None)] == ["host.gpu"]
    assert [one.field for one in gpu_obstacles(gpus(mig=True, mps=True).gpu)] == ["host.gpu.mig", "host.gpu.mps"]
    assert "host.gpu.driver" in [one.field for one in gpu_obstacles(gpus(driver=None).gpu)]


def test_what_has_no_gpu_is_encoded_as_before_there_were_any() -> None:
    text = canonical(manifest()).decode()
    assert "gpu" not in text
    assert '"gpu":{' in canonical(on_gpu()).decode()
    assert Manifest.model_validate_json(canonical(on_gpu())) == on_gpu()
