"""The doctor, really run on this host, and its findings about what is wrong."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import certificates
import pytest
from conftest import require_root
from processes import alive, mode

from policies.config import Config, Tls, parse
from policies.expose import Expose
from restorer.boxes import probes
from restorer.boxes.probes import Finding
from restorer.checks import doctor


def config(folder: Path, **more: object) -> Config:
    engine = {"kind": "http", "command": [sys.executable]}
    sections = {"state_dir": str(folder / "state"), "run_dir": str(folder / "run"), "models": {"m": {"engine": engine}}}
    return parse(sections | more)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def links() -> list[str]:
    """The host's network interfaces, without those of replicas that may come and go."""
    return sorted(name for name in os.listdir("/sys/class/net") if not probes._OWN_LINK.fullmatch(name))


async def test_every_check_of_this_host_has_a_verdict_and_a_remedy_unless_ok(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in await doctor.examine(config(tmp_path))}
    assert list(findings) == [
        *("data path", "capabilities", "kernel", "criu", "tools", "namespaces", "veth", "ns_last_pid", "network", "io_uring"),
        *("userfaultfd", "huge pages", "cgroups", "store", "disk", "punch hole", "memory", "gpu", "account", "run_dir"),
        *("ownership", "trust", "speed"),
        *("models.m", "models.m.weights"),
    ]
    assert all(finding.found for finding in findings.values())
    assert all(finding.remedy for finding in findings.values() if finding.ok != "ok")
    # These hold wherever the tests run at all.
    assert {findings[name].ok for name in ("kernel", "tools", "io_uring", "store", "models.m")} == {"ok"}
    assert findings["store"].found.startswith("embedded: Valkey server v=")
    assert findings["models.m.weights"].ok == "warn"
    assert os.listdir(tmp_path) == []


async def test_what_root_may_do_works_here_and_leaves_nothing(tmp_path: Path) -> None:
    require_root()
    before = links()
    findings = {finding.name: finding.ok for finding in await doctor.examine(config(tmp_path))}
    names = ("capabilities", "namespaces", "veth", "ns_last_pid", "network", "account")
    assert {name: findings[name] for name in names} == dict.fromkeys(names, "ok")
    assert links() == before


async def test_the_host_alone_can_be_examined() -> None:
    findings = await doctor.examine(Config.model_construct(models={}))
    assert not [finding for finding in findings if finding.name.startswith("models.")]


async def test_the_real_criu_is_usable() -> None:
    require_root()
    binary = os.environ.get("REWAKE_CRIU")
    if not binary:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("REWAKE_CRIU names no CRIU")
    finding = await probes.criu(str(binary))
    assert (finding.ok, finding.name) == ("ok", "criu")
    assert "Looks good" in finding.found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo 'Version: 3.17.1'", "is 3.17.1"),
        ("echo 'Version: 4.2'; [ $1 = --version ] || { echo 'Error: no vdso'; exit 1; }", "4.2: criu check says: Error: no vdso"),
        ("echo 'cannot execute'; exit 126", "does not run: cannot execute"),
    ],
)
async def test_restore_case_64_a_criu_that_cannot_work_fails_and_says_why(tmp_path: Path, text: str, found: str) -> None:
    path = script(tmp_path / "criu", text)
    finding = await doctor.criu(config(tmp_path, restorer={"criu": path}))
    assert finding.ok == "fail"
    assert finding.found == f"{path} {found}"
    assert finding.remedy


async def test_no_criu_fails_with_the_way_to_get_one(tmp_path: Path) -> None:
    finding = await doctor.criu(config(tmp_path, restorer={"criu": "/no/criu"}))
    assert finding == Finding(
        "criu",
        "fail",
        "/no/criu not found",
        "install CRIU 4.2 or later (deploy/install/criu.sh) and name it in restorer.criu; without it, starts are cold",
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo 'runc version 1.0.3'; echo 'libseccomp: 2.5.4'", "is 1.0.3"),
        ("echo 'runc version 1.1.5+ds1'", "1.1.5+ds1 was built without seccomp"),
        ("echo 'no such thing'; exit 126", "does not run: no such thing"),
    ],
)
async def test_a_runc_that_cannot_work_fails_where_a_model_wants_it(tmp_path: Path, text: str, found: str) -> None:
    path = script(tmp_path / "runc", text)
    finding = await probes.runc(path)
    assert (finding.ok, finding.found) == ("fail", f"{path} {found}")
    assert "runc.sh" in finding.remedy


async def test_the_real_runc_is_usable() -> None:
    binary = os.environ.get("REWAKE_RUNC")
    if not binary:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("REWAKE_RUNC names no runc")
    assert (await probes.runc(binary)).ok == "ok"


async def test_a_tool_that_hangs_is_killed_with_all_it_started_at_its_deadline(tmp_path: Path) -> None:
    path = script(tmp_path / "hangs", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await probes.tool(path, within=0.5)
    assert time.monotonic() - began < 30
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_check_that_hangs_or_is_not_allowed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs() -> Finding:
        await asyncio.sleep(60)
        raise AssertionError

    async def denied() -> Finding:
        raise PermissionError(13, "Permission denied", "/proc/x")

    monkeypatch.setattr(doctor, "_DEADLINE_S", 0.05)
    checks: tuple[Callable[[], Awaitable[Finding]], ...] = (hangs, denied)
    late, refused = [await doctor._within("x", check()) for check in checks]
    assert (late.ok, late.found) == ("fail", "no answer in time")
    assert (refused.ok, refused.found) == ("fail", "Permission denied: /proc/x")


async def test_a_network_that_this_host_uses_fails() -> None:
    finding = await probes.network("127.0.0.0/16")
    assert finding.ok == "fail"
    assert finding.found.startswith("127.0.0.0/16 overlaps 127.0.0.")
    assert finding.remedy == "set restorer.network to an unused network"


def test_missing_tools_are_named() -> None:
    assert probes.tools(("sh", "no-such-tool")).found == "not on PATH: no-such-tool"


async def test_a_store_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch, store_server: str) -> None:
    assert (await doctor.store(store_server)).ok == "ok"
    monkeypatch.setattr(doctor, "_STORE_S", 0.2)
    finding = await doctor.store("redis://:secret@127.0.0.1:1")
    assert finding.ok == "fail"
    assert "127.0.0.1:1 does not answer within 0.2 s" in finding.found
    assert "secret" not in finding.found


@pytest.mark.parametrize(
    ("engine", "weights", "found"),
    [
        ("missing", [], {"models.m": "fail", "models.m.weights": "warn"}),
        ("plain", [], {"models.m": "fail", "models.m.weights": "warn"}),
        ("program", ["missing"], {"models.m": "ok", "models.m.weights": "fail"}),
        ("program", ["plain"], {"models.m": "ok", "models.m.weights": "ok"}),
    ],
)
async def test_engines_and_weights_must_be_there(tmp_path: Path, engine: str, weights: list[str], found: dict[str, str]) -> None:
    (tmp_path / "plain").write_text("")
    script(tmp_path / "program", "true")
    model = {
        "engine": {"kind": "http", "command": [str(tmp_path / engine)]},
        "weights": [str(tmp_path / name) for name in weights],
    }
    findings = list(doctor._model("m", config(tmp_path, models={"m": model}).models["m"]))
    assert {finding.name: finding.ok for finding in findings} == found


def test_an_account_and_a_run_dir_that_the_gateway_cannot_use_fail(tmp_path: Path) -> None:
    require_root()
    assert doctor.account(config(tmp_path, gateway={"user": "nosuch"})).ok == "fail"
    assert doctor.account(config(tmp_path, gateway={"user": "root"})).ok == "fail"
    tmp_path.chmod(0o700)
    finding = doctor.run_dir(config(tmp_path))
    assert finding.ok == "fail"
    assert finding.remedy.startswith("chmod o+x ")
    assert mode(tmp_path) == 0o700


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    finding = probes.disk(tmp_path / "not" / "yet")
    assert finding.found.startswith(f"{tmp_path} (")
    assert " GiB free, writes " in finding.found
    assert probes.punch_hole(tmp_path).name == "punch hole"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "ok", "found"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n", "warn", "NVIDIA driver 535.129.03"),
        ("garbage\n", "warn", "NVIDIA driver of unknown version"),
        (None, "ok", "none: engines run on the CPU"),
    ],
)
async def test_gpu_drivers(tmp_path: Path, text: str | None, ok: str, found: str) -> None:
    version = tmp_path / "version"
    if text is not None:
        version.write_text(text)
    finding = await probes.gpu(version)
    assert (finding.ok, finding.found) == (ok, found)


async def test_a_gpu_is_named_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    script(tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 143771 MiB'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    finding = await probes.gpu(tmp_path / "version")
    assert (finding.ok, finding.found) == ("ok", "driver 580.95.05; NVIDIA H200, 143771 MiB")
    script(tmp_path / "nvidia-smi", "echo 'No devices were found'; exit 6")
    assert (await probes.gpu(tmp_path / "version")).found == "nvidia-smi: No devices were found"


def test_the_pair_of_tls_must_fit_and_last(tmp_path: Path) -> None:
    one, other = certificates.make(tmp_path, "one"), certificates.make(tmp_path, "other")

    def look(certificate: Path, key: Path) -> Finding:
        return doctor.tls(Tls(certificate=str(certificate), key=str(key)))

    # It is made for two days.
    found = look(one.certificate, one.key)
    assert (found.name, found.ok, found.remedy) == ("tls", "warn", "renew it: new files are taken up within seconds")
    wrong = look(one.certificate, other.key)
    assert (wrong.ok, "are no pair" in wrong.found) == ("fail", True)
    missing = look(tmp_path / "none.pem", one.key)
    assert missing.ok == "fail"
    assert "mend gateway.tls" in missing.remedy
    garbled = tmp_path / "garbled.pem"
    garbled.write_text("no PEM")
    assert look(garbled, one.key).ok == "fail"


@pytest.mark.parametrize(
    ("address", "ok", "said"),
    [("127.0.0.1", "ok", "they can listen at 127.0.0.1"), ("192.0.2.1", "fail", "Cannot assign requested")],
)
def test_doors_are_tried_where_they_shall_listen(address: str, ok: str, said: str) -> None:
    require_root()
    found = doctor.doors(Expose(address=address, allow=("10.0.0.0/8",)))
    assert (found.ok, said in found.found) == (ok, True), found


def test_doors_want_rights_that_the_restorer_has_not_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restorer.boxes.probes.lacking", lambda wanted: list(wanted)[:1])
    found = doctor.doors(Expose(address="127.0.0.1", allow=("10.0.0.0/8",)))
    assert (found.ok, found.found) == ("fail", "without CAP_KILL")
