"""Compatibility: every mismatch, each with expected, found and remedy; an unknown fact is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.compat import Mismatch, gpu_obstacles, mismatches, newest_fit, waived
from policies.manifest import Gpu, GpuFacts, GpuState, HostFacts, HugePool, Manifest, Needs, Profile, canonical
from policies.matching import ALL, FACTS, GPU_FACTS, IGNORABLE_FLAGS, Matching, Rule

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
    xsave_max=2696,
    xfeatures=0b111,
    criu_features=("openat2", "timens"),
    cgroup="v2",
    io_uring=0,
    ptrace_scope=1,
    pid_max=32768,
    nofile=1 << 20,
    memlock=8 << 20,
    memory_bytes=64 << 30,
    shm_bytes=32 << 30,
    hugepages=(HugePool(size_kib=2048, total=600, free=512), HugePool(size_kib=1 << 20, total=0, free=0)),
    time_namespace=True,
)
NEEDS = Needs(memory_bytes=4 << 30, shm_bytes=1 << 20, hugepages={"2048": 512}, nofile=1024, memlock=8 << 20)
PROFILE = Profile(model="m", engine="vllm", command=("/vllm", "serve"), env={"A": "1"}, port=8000, weights={"/w": "w" * 64})


def manifest(host: HostFacts = HOST, profile: Profile = PROFILE, created_ms: int = 1) -> Manifest:
    return Manifest(
        created_ms=created_ms, profile=profile, host=host, objects=(), files=(), canary=(), root_pid=1, pids=(1, 30000),
        scratch=(), criu_options=(), cold_start_s=1.5, bytes=0, bytes_written=0, needs=NEEDS, secrets=(),
    )  # fmt: skip


def here(**changes: Any) -> HostFacts:
    return HOST.model_copy(update=changes)


def configured(**changes: Any) -> Profile:
    return PROFILE.model_copy(update=changes)


@pytest.mark.parametrize(("made", "wanted"), [(None, "runc"), ("runc", None)])
def test_restore_case_28_who_lays_mounts_another_way_does_not_take_the_snapshot(made: str | None, wanted: str | None) -> None:
    """Which way that is goes by the backend, which a snapshot names and keeps."""
    found = mismatches(manifest(profile=configured(backend=made)), configured(backend=wanted), HOST)
    assert [(one.field, one.expected, one.found) for one in found] == [("profile.backend", made or "criu", wanted or "criu")]


def test_a_snapshot_fits_where_it_was_made() -> None:
    assert mismatches(manifest(), PROFILE, HOST) == []


LESS: dict[str, tuple[Any, str, str]] = {
    "arch": ("aarch64", "x86_64", "aarch64"),
    "kernel": ("6.18.1", "6.18.0", "6.18.1"),
    "page_size": (16384, "4096", "16384"),
    "cpu_flags": (("erms", "fpu", "new"), "avx2", "none of these"),
    "xsave_size": (11008, "832", "11008"),
    "xsave_max": (11008, "2696", "11008"),
    "xfeatures": (0b1011, "7", "11"),
    "criu_version": ("4.2.2", "4.2.1", "4.2.2"),
    "criu_features": (("openat2",), "timens", "none of these"),
    "cgroup": ("v1", "v2", "v1"),
    "ptrace_scope": (3, "1", "3"),
    "time_namespace": (False, "yes", "no"),
    "pid_max": (30000, "30001", "30000"),
    "nofile": (512, "1024", "512"),
    "memlock": (65536, str(8 << 20), "65536"),
    "memory_bytes": (1 << 30, str(4 << 30), str(1 << 30)),
    "shm_bytes": (4096, str(1 << 20), "4096"),
    "hugepages": ((HugePool(size_kib=2048, total=600, free=100),), "512 of 2048 KiB", "100 of 2048 KiB"),
}
"""A host that differs in one fact: its value, and what is said of it. Cases 24, 32, 33 and 39 of the restore list are rows."""


@pytest.mark.parametrize("field", LESS)
def test_restore_cases_24_32_33_and_39_a_host_that_differs_is_refused(field: str) -> None:
    value, expected, found = LESS[field]
    (mismatch,) = mismatches(manifest(), PROFILE, here(**{field: value}))
    assert mismatch == Mismatch(f"host.{field}", expected, found, ALL[field].remedy)
    assert str(mismatch) == f"host.{field}: expected {expected}, found {found}; {ALL[field].remedy}"


def test_every_fact_is_in_the_table_and_each_that_is_not_only_reported_is_tried() -> None:
    assert set(FACTS) == set(HostFacts.model_fields) - {"hostname", "gpu"}
    assert {field for field, fact in FACTS.items() if fact.rule is not Rule.REPORT} == set(LESS)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_flags": ("amx", *(HOST.cpu_flags or ()))},
        {"xfeatures": 0b1111},
        {"criu_features": ("newer", "openat2", "timens")},
        {"memory_bytes": 1 << 50},
        {"ptrace_scope": 2},
        {"hugepages": (HugePool(size_kib=2048, total=9999, free=9999),)},
        {"pid_max": 1 << 22},
    ],
)
def test_restore_case_32_a_host_that_can_more_is_fine(changes: dict[str, Any]) -> None:
    assert mismatches(manifest(), PROFILE, here(**changes)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"hostname": "other"},
        {"cpu_model": "Else"},
        {"criu_sha256": "d" * 64},
        {"cpu_model": None},
        {"io_uring": 2},
        {"io_uring": None},
    ],
)
def test_facts_that_are_reported_refuse_nothing(changes: dict[str, Any]) -> None:
    assert mismatches(manifest(), PROFILE, here(**changes)) == []


OWN_NEEDS = ("nofile", "memlock", "memory_bytes", "shm_bytes", "hugepages")
"""What is compared with what the donor took itself, not with what its host had."""


@pytest.mark.parametrize("field", list(LESS))
def test_an_unknown_fact_is_a_mismatch_on_either_side(field: str) -> None:
    unknown = here(**{field: None})
    (mismatch,) = mismatches(manifest(), PROFILE, unknown)
    assert (mismatch.field, mismatch.found) == (f"host.{field}", "unknown")
    assert "rewake doctor" in mismatch.remedy
    if field not in (*OWN_NEEDS, "pid_max"):
        for host in (HOST, unknown):
            (mismatch,) = mismatches(manifest(unknown), PROFILE, host)
            assert (mismatch.field, mismatch.expected) == (f"host.{field}", "unknown")
            assert "make a new one" in mismatch.remedy


def test_a_snapshot_of_an_earlier_version_passes_nothing_silently() -> None:
    """Format 1 knew nine facts and no needs: what it does not say is a mismatch, unless the operator has it reported."""
    old = {name: value for name, value in HOST if name not in HostFacts.OPTIONAL}
    first = manifest(HostFacts(**old)).model_copy(update={"format": 1, "needs": None, "secrets": None})
    first = Manifest.model_validate_json(canonical(first))
    found = {mismatch.field.removeprefix("host."): mismatch for mismatch in mismatches(first, PROFILE, HOST)}
    unsaid = set(LESS) & (HostFacts.OPTIONAL | set(OWN_NEEDS)) - {"pid_max"}
    assert set(found) == unsaid
    assert all(f"matching.rules.{field}: report" in mismatch.remedy for field, mismatch in found.items())
    lenient = Matching(rules=dict.fromkeys(unsaid, Rule.REPORT))
    assert mismatches(first, PROFILE, HOST, lenient) == []
    assert {one.field.removeprefix("host.") for one in waived(first, HOST, lenient)} == unsaid


# ---------------------------------------------------------------- what an operator may change


def test_a_rule_that_is_changed_lets_pass_and_says_so() -> None:
    newer = here(kernel="6.18.9", cpu_model="Else")
    for rule in ("class", "report"):
        lenient = Matching.model_validate({"rules": {"kernel": rule}})
        assert mismatches(manifest(), PROFILE, newer, lenient) == []
        (passed,) = waived(manifest(), newer, lenient)
        assert passed[:3] == ("host.kernel", "6.18.0", "6.18.9")
        assert f"matching.rules.kernel: {rule}" in passed.remedy
    by_class = Matching.model_validate({"rules": {"kernel": "class"}})
    assert [one.field for one in mismatches(manifest(), PROFILE, here(kernel="6.19.0"), by_class)] == ["host.kernel"]
    assert waived(manifest(), here(kernel="6.19.0"), by_class) == []


def test_a_rule_may_be_made_stricter() -> None:
    strict = Matching.model_validate({"rules": {"cpu_model": "equal", "cpu_flags": "equal", "criu_sha256": "equal"}})
    other = here(cpu_model="Else", cpu_flags=("avx2", "erms", "fpu", "new"), criu_sha256=None)
    assert [one.field for one in mismatches(manifest(), PROFILE, other, strict)] == [
        "host.cpu_model",
        "host.cpu_flags",
        "host.criu_sha256",
    ]


def test_restore_case_35_listed_performance_bits_may_be_ignored_and_no_others() -> None:
    slow = here(cpu_flags=("avx2", "fpu"))
    assert [one.expected for one in mismatches(manifest(), PROFILE, slow)] == ["erms"]
    lenient = Matching(ignore_cpu_flags=("erms",))
    assert mismatches(manifest(), PROFILE, slow, lenient) == []
    (passed,) = waived(manifest(), slow, lenient)
    assert (passed.expected, passed.remedy) == ("erms", "let pass by matching.ignore_cpu_flags")
    assert [one.expected for one in mismatches(manifest(), PROFILE, here(cpu_flags=("fpu",)), lenient)] == ["avx2 erms"]
    with pytest.raises(ValueError, match="avx512f: an engine may have chosen code that needs it"):
        Matching(ignore_cpu_flags=("erms", "avx512f"))
    assert not {"avx", "avx2", "avx512f", "sse4_2", "amx_tile", "xsave", "bmi2", "aes", "fma", "popcnt"} & IGNORABLE_FLAGS


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"kernal": "report"}, "there is no fact 'kernal'; there are arch, kernel"),
        ({"arch": "report"}, "arch cannot be compared by report, only by equal"),
        ({"gpu.mig": "report"}, "gpu.mig cannot be compared by report"),
        ({"kernel": "superset"}, "kernel cannot be compared by superset, only by equal or class or report"),
        ({"kernel": "whatever"}, "Input should be"),
    ],
)
def test_a_rule_that_makes_no_sense_is_a_fault_of_the_file(rules: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Matching.model_validate({"rules": rules})


DONORS = st.fixed_dictionaries(
    {},
    optional={
        "kernel": st.sampled_from(["6.18.0", "6.18.1", "6.19.0", None]),
        "cpu_flags": st.none() | st.sets(st.sampled_from(["avx2", "erms", "fpu", "amx_tile"])).map(lambda s: tuple(sorted(s))),
        "xfeatures": st.none() | st.integers(0, 15),
        "ptrace_scope": st.none() | st.integers(0, 3),
        "memory_bytes": st.none() | st.integers(0, 8 << 30),
        "criu_version": st.sampled_from(["4.2.1", "4.2.9", "4.3", None]),
        "hugepages": st.none() | st.integers(0, 1024).map(lambda free: (HugePool(size_kib=2048, total=1024, free=free),)),
    },
)
CHANGED = st.dictionaries(st.sampled_from(list(FACTS)), st.sampled_from(list(Rule)), max_size=5).map(
    lambda rules: {field: rule for field, rule in rules.items() if rule in (FACTS[field].rule, *FACTS[field].others)}
)


@settings(max_examples=300, deadline=None)
@given(DONORS, DONORS, CHANGED)
def test_whatever_the_hosts_and_the_rules(donor: dict[str, Any], host: dict[str, Any], rules: dict[str, Rule]) -> None:
    matching, snapshot, machine = Matching(rules=rules), manifest(here(**donor)), here(**host)
    refused = {one.field for one in mismatches(snapshot, PROFILE, machine, matching)}
    default = {one.field for one in mismatches(snapshot, PROFILE, machine)}
    passed = {one.field for one in waived(snapshot, machine, matching)}
    # What the defaults refuse is refused still, or let pass by name; nothing falls through.
    assert default <= refused | passed
    assert not refused & passed
    assert passed <= default & {f"host.{field}" for field in rules}
    # Nothing but what is reported passes unknown.
    for field in FACTS:
        if matching.rule(field) is not Rule.REPORT and getattr(machine, field) is None:
            assert f"host.{field}" in refused
    # A snapshot fits the host that it was made on, as far as that host is known.
    own = {one.field.removeprefix("host.") for one in mismatches(snapshot, PROFILE, here(**donor), matching)}
    assert all(field in OWN_NEEDS or donor.get(field, HOST) is None for field in own)


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
@given(st.sets(st.sampled_from(list(LESS))), st.sets(st.sampled_from(["model", "engine", "port", "env", "weights"])))
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
GPUS = GpuFacts(driver="580.1", mps=False, gpus=(GPU, GPU.model_copy(update={"uuid": "GPU-1"})), topology="NVLinks 18 18; bus 40")
STATE = GpuState(pids=(1,), uuids=("GPU-0", "GPU-1"), used=("GPU-0",), state_bytes=1, awake_bytes=2, weights=())


def on_gpu(gpus: GpuFacts | None = GPUS) -> Manifest:
    return manifest(here(gpu=gpus)).model_copy(update={"gpu": STATE})


def gpus(**changes: Any) -> HostFacts:
    """This host, with another fact of its driver or of its first GPU."""
    own = {name: changes.pop(name) for name in ("driver", "mps", "gpus", "topology") if name in changes}
    assert GPUS.gpus is not None
    first = GPUS.gpus[0].model_copy(update=changes)
    return here(gpu=GPUS.model_copy(update={"gpus": (first, *GPUS.gpus[1:]), **own}))


def test_any_gpu_of_the_same_model_will_do() -> None:
    assert mismatches(on_gpu(), PROFILE, gpus()) == []
    assert mismatches(on_gpu(), PROFILE, gpus(uuid="GPU-9", persistence=False, ecc=False)) == []


@pytest.mark.parametrize(
    ("changes", "field", "expected", "found"),
    [
        ({"driver": "590.2"}, "driver", "580.1", "590.2"),
        ({"name": "Testium 2"}, "names", "Testium 1 Testium 1", "Testium 1 Testium 2"),
        ({"gpus": (GPU,)}, "names", "Testium 1 Testium 1", "Testium 1"),
        ({"memory_bytes": 50}, "memory_bytes", "100 100", "50 100"),
        ({"compute": "8.0"}, "compute", "9.0 9.0", "8.0 9.0"),
        ({"mig": True}, "mig", "no", "no yes"),
        ({"mps": True}, "mps", "no", "yes"),
    ],
)
def test_restore_case_60_a_gpu_that_differs_is_refused(changes: dict[str, Any], field: str, expected: str, found: str) -> None:
    mismatch = mismatches(on_gpu(), PROFILE, gpus(**changes))[0]
    assert (mismatch.field, mismatch.expected, mismatch.found) == (f"host.gpu.{field}", expected, found)
    assert mismatch.remedy


GPU_FIELDS = [field.removeprefix("gpu.") for field, fact in GPU_FACTS.items() if fact.rule is not Rule.REPORT]


@pytest.mark.parametrize("field", [field for field in GPU_FIELDS if field != "topology"])
def test_an_unknown_fact_of_a_gpu_is_a_mismatch(field: str) -> None:
    unknown = {"names": "name"}.get(field, field)
    fields = {mismatch.field for mismatch in mismatches(on_gpu(), PROFILE, gpus(**{unknown: None}))}
    assert f"host.gpu.{field}" in fields


def test_a_host_without_a_driver_and_a_donor_without_facts_are_refused() -> None:
    assert [one.field for one in mismatches(on_gpu(), PROFILE, here())] == ["host.gpu"]
    asked = {f"host.gpu.{field}" for field in GPU_FIELDS if field not in ("mig", "mps", "topology")}
    assert {one.field for one in mismatches(on_gpu(None), PROFILE, gpus())} == asked


def test_how_gpus_are_linked_matters_to_an_engine_on_several() -> None:
    two = on_gpu().model_copy(update={"gpu": STATE.model_copy(update={"used": ("GPU-0", "GPU-1")})})
    (mismatch,) = mismatches(two, PROFILE, gpus(topology="NVLinks 0 0; bus 50"))
    assert mismatch[:3] == ("host.gpu.topology", "NVLinks 18 18; bus 40", "NVLinks 0 0; bus 50")
    assert [one.field for one in mismatches(two, PROFILE, gpus(topology=None))] == ["host.gpu.topology"]
    assert mismatches(on_gpu(), PROFILE, gpus(topology=None)) == []


def test_a_driver_of_the_same_branch_passes_where_the_operator_says_so() -> None:
    lenient = Matching.model_validate({"rules": {"gpu.driver": "class"}})
    assert mismatches(on_gpu(), PROFILE, gpus(driver="580.9"), lenient) == []
    assert [one.field for one in waived(on_gpu(), gpus(driver="580.9"), lenient)] == ["host.gpu.driver"]
    assert [one.field for one in mismatches(on_gpu(), PROFILE, gpus(driver="590.1"), lenient)] == ["host.gpu.driver"]


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
