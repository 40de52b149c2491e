"""Host facts, of this machine and of written-down ones."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import pytest

from policies.compat import mismatches
from policies.manifest import HostFacts, Manifest, Profile
from restorer import hostfacts
from restorer.hostfacts import ask_xsave_size, probe

CPU = "processor\t: {n}\nmodel name\t: Testium 9000\nflags\t\t: {flags}\nbugs\t\t:\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with two unequal processors."""
    kernel = tmp_path / "proc/sys/kernel"
    kernel.mkdir(parents=True)
    for name, value in {"hostname": "node7", "osrelease": "6.1.0-test", "arch": "x86_64"}.items():
        (kernel / name).write_text(value + "\n")
    (tmp_path / "proc/cpuinfo").write_text(
        CPU.format(n=0, flags="xsave fpu amx") + "\n" + CPU.format(n=1, flags="sse2 xsave fpu")
    )
    return tmp_path / "proc"


def criu(folder: Path, script: str) -> Path:
    path = folder / "criu-real"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    (folder / "criu").symlink_to(path)
    return folder / "criu"


def test_facts_of_a_written_down_machine(proc: Path, tmp_path: Path) -> None:
    tool = criu(tmp_path, 'test "$1" = --version && printf "Version: 4.2.1\\nGitID: v4.2.1\\n"')
    facts = probe(tool, proc, lambda: 2440)
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
    )


def test_what_cannot_be_read_is_unknown_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/arch").write_text("x86_64\n")
    facts = probe(None, tmp_path, lambda: 2440)
    unknown = {name for name, value in facts if value is None}
    assert unknown == {"kernel", "cpu_model", "cpu_flags", "xsave_size", "criu_version", "criu_sha256", "gpu"}


@pytest.mark.parametrize(
    ("arch", "flags", "expected"), [("aarch64", "fp asimd", 0), ("x86_64", "fpu", 0), ("x86_64", "fpu xsave", None)]
)
def test_extended_state_by_architecture(proc: Path, arch: str, flags: str, expected: int | None) -> None:
    def denied() -> int:
        raise PermissionError

    (proc / "sys/kernel/arch").write_text(arch)
    (proc / "cpuinfo").write_text(f"processor : 0\n{'flags' if arch == 'x86_64' else 'Features'} : {flags}\n")
    assert probe(None, proc, denied).xsave_size == expected


@pytest.mark.parametrize("script", ["exit 1", "echo Version: 4.2; exit 1", "echo something", "printf '\\377'", "exec sleep 60"])
def test_a_criu_that_does_not_say_its_version(proc: Path, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfacts, "_CRIU_S", 0.2)
    assert probe(criu(tmp_path, script), proc, lambda: 1).criu_version is None


def test_a_criu_that_is_missing(proc: Path, tmp_path: Path) -> None:
    facts = probe(tmp_path / "nowhere", proc, lambda: 1)
    assert (facts.criu_version, facts.criu_sha256) == (None, None)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks an x86-64 CPU")
def test_this_cpu_says_how_large_its_extended_state_is() -> None:
    facts = probe(None)
    size = ask_xsave_size()
    assert facts.xsave_size == (size if "xsave" in (facts.cpu_flags or ()) else 0)
    # The legacy area and the header, plus the upper halves of AVX registers, and of AVX-512's, if there are any.
    assert size >= 576 + 256 * ("avx" in (facts.cpu_flags or ()))
    assert size >= 2688 or "avx512f" not in (facts.cpu_flags or ())
    assert {ask_xsave_size() for _ in range(100)} == {size}


def test_this_host_fits_itself_but_for_a_missing_criu() -> None:
    facts = probe(None)
    profile = Profile(model="m", engine="http", command=("/e",), env={}, port=1, weights={})
    manifest = Manifest(
        created_ms=0, profile=profile, host=facts, objects=(), files=(), canary=(), root_pid=1, pids=(), scratch=(),
        criu_options=(), cold_start_s=0, bytes=0, bytes_written=0,
    )  # fmt: skip
    assert [found.field for found in mismatches(manifest, profile, facts)] == ["host.criu_version"]
