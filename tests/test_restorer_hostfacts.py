"""Host facts, of this machine and of written-down ones."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
from pathlib import Path

import pytest

from policies.compat import mismatches
from policies.manifest import UNLIMITED, HostFacts, HugePool, Manifest, Needs, Profile
from restorer.machine import hostfacts
from restorer.machine.hostfacts import probe, refreshed
from restorer.system.cpuid import ExtendedState, extended_state

CPU = "processor\t: {n}\nmodel name\t: Testium 9000\nflags\t\t: {flags}\nbugs\t\t:\n"
STATE = ExtendedState(2440, 11008, 0x602E7)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with two unequal processors."""
    return written(
        tmp_path / "proc",
        {
            "sys/kernel/hostname": "node7",
            "sys/kernel/osrelease": "6.1.0-test",
            "sys/kernel/arch": "x86_64",
            "sys/kernel/pid_max": "4194304",
            "sys/kernel/io_uring_disabled": "2",
            "sys/kernel/yama/ptrace_scope": "1",
            "sys/fs/nr_open": "1048576",
            "meminfo": "MemTotal:       16384000 kB\nMemFree: 1 kB",
            "self/cgroup": "0::/rewake.slice/restorer",
            "self/status": "Name:\tpython\nCapEff:\t000001ffffffffff",
            "self/ns/time": "",
            "cpuinfo": CPU.format(n=0, flags="xsave fpu amx") + "\n" + CPU.format(n=1, flags="sse2 xsave fpu"),
        },
    )


@pytest.fixture
def sys_(tmp_path: Path) -> Path:
    """Its /sys, with a limit on the memory of the group above ours."""
    pool = "kernel/mm/hugepages/hugepages-{}kB/{}"
    return written(
        tmp_path / "sys",
        {
            "fs/cgroup/cgroup.controllers": "memory",
            "fs/cgroup/rewake.slice/memory.max": str(8 << 30),
            "fs/cgroup/rewake.slice/restorer/memory.max": "max",
            pool.format(2048, "nr_hugepages"): "600",
            pool.format(2048, "free_hugepages"): "110",
            pool.format(2048, "resv_hugepages"): "10",
            pool.format(1048576, "nr_hugepages"): "0",
            pool.format(1048576, "free_hugepages"): "0",
        },
    )


def criu(folder: Path, script: str) -> Path:
    path = folder / "criu-real"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    (folder / "criu").symlink_to(path)
    return folder / "criu"


def test_facts_of_a_written_down_machine(proc: Path, sys_: Path, tmp_path: Path) -> None:
    can = 'case "$3" in timens | openat2) exit 0 ;; *) exit 1 ;; esac'
    tool = criu(tmp_path, f'test "$1" = --version && printf "Version: 4.2.1\\nGitID: v4.2.1\\n" && exit 0\n{can}')
    facts = probe(tool, proc, lambda: STATE, sys_)
    assert facts == HostFacts(
        hostname="node7",
        arch="x86_64",
        kernel="6.1.0-test",
        cpu_model="Testium 9000",
        cpu_flags=("fpu", "xsave"),
        xsave_size=2440,
        criu_version="4.2.1",
        criu_sha256=hashlib.sha256((tmp_path / "criu-real").read_bytes()).hexdigest(),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        xsave_max=11008,
        xfeatures=0x602E7,
        criu_features=("openat2", "timens"),
        cgroup="v2",
        io_uring=2,
        ptrace_scope=1,
        pid_max=4194304,
        nofile=1048576,
        memlock=UNLIMITED,
        memory_bytes=8 << 30,
        shm_bytes=16384000 * 1024 // 2,
        hugepages=(HugePool(size_kib=2048, total=600, free=100), HugePool(size_kib=1048576, total=0, free=0)),
        time_namespace=True,
    )


def test_what_changes_while_a_machine_runs_is_read_anew(proc: Path, sys_: Path) -> None:
    facts = probe(None, proc, lambda: STATE, sys_)
    (sys_ / "kernel/mm/hugepages/hugepages-2048kB/free_hugepages").write_text("600\n")
    (proc / "sys/kernel/yama/ptrace_scope").write_text("3\n")
    (proc / "sys/kernel/osrelease").write_text("7\n")
    now = refreshed(facts, proc, sys_)
    assert now.hugepages is not None
    assert (now.hugepages[0].free, now.ptrace_scope, now.kernel) == (590, 3, "6.1.0-test")


@pytest.mark.parametrize(
    ("made", "expected"),
    [("cgroup.controllers", "v2"), ("unified/cgroup.procs", "hybrid"), ("memory/tasks", "v1"), (None, None)],
)
def test_versions_of_cgroups(proc: Path, tmp_path: Path, made: str | None, expected: str | None) -> None:
    root = tmp_path / "other"
    (root / "fs/cgroup").mkdir(parents=True)
    if made:
        written(root, {f"fs/cgroup/{made}": ""})
    assert probe(None, proc, lambda: STATE, root).cgroup == expected


def test_limits_are_our_own_where_we_may_not_raise_them(proc: Path, sys_: Path) -> None:
    (proc / "self/status").write_text("CapEff:\t0000000000000000\n")
    facts = probe(None, proc, lambda: STATE, sys_)
    for found, which in ((facts.nofile, resource.RLIMIT_NOFILE), (facts.memlock, resource.RLIMIT_MEMLOCK)):
        hard = resource.getrlimit(which)[1]
        assert found == (UNLIMITED if hard == resource.RLIM_INFINITY else hard)


def test_memory_is_what_a_version_1_group_leaves(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("4:memory:/a/b\n0::/\n")
    root = written(tmp_path / "v1", {"fs/cgroup/memory/a/memory.limit_in_bytes": str(1 << 30)})
    assert probe(None, proc, lambda: STATE, root).memory_bytes == 1 << 30


def test_a_kernel_without_switches_has_them_off(proc: Path, sys_: Path) -> None:
    (proc / "sys/kernel/io_uring_disabled").unlink()
    (proc / "sys/kernel/yama/ptrace_scope").unlink()
    facts = probe(None, proc, lambda: STATE, sys_)
    assert (facts.io_uring, facts.ptrace_scope) == (0, 0)


def test_what_cannot_be_read_is_unknown_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/arch").write_text("x86_64\n")
    facts = probe(None, tmp_path, lambda: STATE, tmp_path / "nowhere")
    unknown = {name for name, value in facts if value is None}
    assert unknown == set(HostFacts.model_fields) - {"hostname", "arch", "page_size", "io_uring", "ptrace_scope"}


@pytest.mark.parametrize(
    ("arch", "flags", "expected"), [("aarch64", "fp asimd", 0), ("x86_64", "fpu", 0), ("x86_64", "fpu xsave", None)]
)
def test_extended_state_by_architecture(proc: Path, arch: str, flags: str, expected: int | None) -> None:
    def denied() -> ExtendedState:
        raise PermissionError

    (proc / "sys/kernel/arch").write_text(arch)
    (proc / "cpuinfo").write_text(f"processor : 0\n{'flags' if arch == 'x86_64' else 'Features'} : {flags}\n")
    facts = probe(None, proc, denied)
    assert facts.xsave_size == facts.xsave_max == facts.xfeatures == expected


@pytest.mark.parametrize("script", ["exit 1", "echo Version: 4.2; exit 1", "echo something", "printf '\\377'", "exec sleep 60"])
def test_a_criu_that_does_not_say_its_version(proc: Path, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfacts, "_CRIU_S", 0.2)
    assert probe(criu(tmp_path, script), proc, lambda: STATE).criu_version is None


def test_a_criu_that_is_missing(proc: Path, tmp_path: Path) -> None:
    facts = probe(tmp_path / "nowhere", proc, lambda: STATE)
    assert (facts.criu_version, facts.criu_sha256) == (None, None)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks an x86-64 CPU")
def test_this_cpu_says_how_large_its_extended_state_is() -> None:
    facts = probe(None)
    size, most, features = extended_state()
    has = "xsave" in (facts.cpu_flags or ())
    assert (facts.xsave_size, facts.xsave_max, facts.xfeatures) == ((size, most, features) if has else (0, 0, 0))
    # The x87 state is always on, and never is more enabled than there is.
    assert features & 1
    assert most >= size
    assert bool(features >> 2 & 1) == ("avx" in (facts.cpu_flags or ()))
    # The legacy area and the header, plus the upper halves of AVX registers, and of AVX-512's, if there are any.
    assert size >= 576 + 256 * ("avx" in (facts.cpu_flags or ()))
    assert size >= 2688 or "avx512f" not in (facts.cpu_flags or ())
    assert {extended_state() for _ in range(100)} == {(size, most, features)}


def test_this_host_fits_itself_but_for_a_missing_criu() -> None:
    facts = probe(None)
    profile = Profile(model="m", engine="http", command=("/e",), env={}, port=1, weights={})
    manifest = Manifest(
        created_ms=0, profile=profile, host=facts, objects=(), files=(), canary=(), root_pid=1, pids=(), scratch=(),
        criu_options=(), cold_start_s=0, bytes=0, bytes_written=0,
        needs=Needs(memory_bytes=1, shm_bytes=1, hugepages={}, nofile=64, memlock=0),
    )  # fmt: skip
    assert [found.field for found in mismatches(manifest, profile, facts)] == ["host.criu_version", "host.criu_features"]
