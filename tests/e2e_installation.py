"""One `rewake up` with the real CRIU, as the end-to-end tests drive it: start, ask, break, look for what is left."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import pytest
import yaml
from conftest import require_root

from policies.manifest import Manifest, canonical
from restorer.system.modules import ROOT as PACKAGES

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = PACKAGES / "rewake.py"
"""The command as these tests themselves import it: over the compiled form it is that one's."""
PROMPT = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "seed": 1}
CRIU_TIMEOUT_S = 6
WRAPPER = """#!/bin/sh
# Notes what CRIU is asked to do, and holds it as long as a test wants.
echo "$1" >> {folder}/criu.calls
while [ -e {folder}/hold-before-$1 ]; do sleep 0.05; done
[ -e {folder}/fail-$1 ] && exit 1
{criu} "$@"
status=$?
[ -e {folder}/hold-after-$1 ] && echo "$1-done" >> {folder}/criu.calls
while [ -e {folder}/hold-after-$1 ]; do sleep 0.05; done
exit $status
"""


def needed(name: str) -> str:
    """A real part, named by the environment (`make test` does); skipped without it locally, failed in CI."""
    value = os.environ.get(name, "")
    if not value or not Path(value).exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {name}; `make test` installs it and sets this")
    return value


def eventually(check: Callable[[], T], what: str, within: float = 60.0) -> T:
    """The first truthy result of a blocking check."""
    deadline = time.monotonic() + within
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.02)
    return result


def processes() -> list[tuple[int, bytes]]:
    """(pid, argv joined by NUL) of everything that runs."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                found.append((int(entry), Path(f"/proc/{entry}/cmdline").read_bytes()))
    return found


def argv_of(pid: int) -> bytes:
    """Joined by NUL; empty when it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def llama(**policy: Any) -> dict[str, Any]:
    """Settings of a model on the real engine."""
    gguf = needed("REWAKE_MODEL")
    options = ["--host", "0.0.0.0", "--port", "8000", "--threads", "1", "--ctx-size", "512", "--parallel", "1", "--no-webui"]
    return {
        "engine": {"kind": "llama-server", "command": [needed("REWAKE_LLAMA_SERVER"), "--model", gguf, *options]},
        "weights": [gguf],
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["The capital of France is", "One, two, three,"]},
        **policy,
    }


def small(mapped: Path, hold: Path, **policy: Any) -> dict[str, Any]:
    """Settings of a model on the small engine of :mod:`e2e_engine`."""
    command = [sys.executable, "-I", str(ROOT / "tests/e2e_engine.py"), "8000", str(mapped), str(hold)]
    return {
        "engine": {"kind": "http", "command": command},
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["one", "two"], "timeout_s": 20},
        **policy,
    }


@contextlib.contextmanager
def a_place(name: str) -> Iterator[Path]:
    """A folder for an installation. Not pytest's: socket paths are short, and the gateway's account must be able to pass."""
    require_root()
    folder = Path(tempfile.mkdtemp(prefix=f"rewake-{name}-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def network(second: int) -> str:
    """One that another run of these tests on this host hardly has."""
    return f"198.{second}.{os.getpid() % 200 + 50}.0/24"


class Installation:
    """One `rewake up` with folders, a port and a network of its own."""

    def __init__(self, folder: Path, network: str, models: dict[str, Any], **restorer: Any) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        wrapper = folder / "criu"
        wrapper.write_text(WRAPPER.format(folder=folder, criu=needed("REWAKE_CRIU")))
        wrapper.chmod(0o755)
        self.calls_file = folder / "criu.calls"
        self.run_dir, self.network = folder / "run", ipaddress.IPv4Network(network)
        self.settings = {
            "state_dir": str(folder / "state"),
            "run_dir": str(self.run_dir),
            "gateway": {"port": self.port, "workers": 2},
            "restorer": {
                "criu": str(wrapper),
                "network": network,
                "criu_timeout_s": CRIU_TIMEOUT_S,
                "lease_s": 4,
                # What is cold for a test stays so.
                "warm": {"enabled": False},
                **restorer,
            },
            "models": models,
        }
        self.config = folder / "rewake.yaml"
        self.configure()
        self.base = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.base, timeout=60, trust_env=False)
        self.up: subprocess.Popen[bytes] | None = None

    def configure(self, **sections: Any) -> None:
        """Write the configuration, with these sections of it changed."""
        self.settings |= sections
        self.config.write_text(yaml.safe_dump(self.settings))

    def start(self) -> None:
        with (self.folder / "up.log").open("ab") as log:
            argv = [sys.executable, str(PROGRAM), "up", "-c", str(self.config)]
            self.up = subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        eventually(self.ready, f"ready; see {self.folder / 'up.log'}", 90)

    def ready(self) -> bool:
        assert self.up is not None
        assert self.up.poll() is None, (self.folder / "up.log").read_text()
        with contextlib.suppress(httpx.HTTPError, OSError):
            return self.http.get("/ready").status_code == 200 and bool(self.admin("snapshots")["hosts"])
        return False

    def stop(self) -> int:
        """Ctrl-C; its exit status."""
        assert self.up is not None
        self.http.close()
        self.up.send_signal(signal.SIGINT)
        return self.up.wait(60)

    def close(self) -> None:
        """For the end of a test, however it went."""
        if self.up is not None and self.up.poll() is None:
            self.stop()
        self.http.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Started, and ended however the test goes; a failure shows what was logged."""
        try:
            self.start()
            yield self
        finally:
            self.close()
            print((self.folder / "up.log").read_text())

    @contextlib.contextmanager
    def held(self, stage: str) -> Iterator[None]:
        """Hold a stage (``before-restore``, ``after-restore``, ``before-dump``, ``start``, ``answer``) open."""
        flag = self.folder / f"hold-{stage}"
        flag.touch()
        try:
            yield
        finally:
            flag.unlink()

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(PROGRAM), *arguments, "-c", str(self.config)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)

    def admin(self, path: str, body: Any = None) -> Any:
        """GET, or POST with a body."""
        token = (self.run_dir / "admin-token").read_text().strip()
        verb = "GET" if body is None else "POST"
        answer = self.http.request(verb, f"/admin/v1/{path}", json=body, headers={"Authorization": f"Bearer {token}"})
        answer.raise_for_status()
        return answer.json()

    def replicas(self, model: str, state: str = "admitted") -> list[dict[str, Any]]:
        return [one for one in self.admin("replicas")["replicas"] if one["model"] == model and one["state"] == state]

    def complete(self, model: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={**PROMPT, "model": model}, **more)

    def snapshot(self, model: str) -> Path:
        """Make one; its folder."""
        made = self.cli("snapshot", "create", model)
        assert made.returncode == 0, made.stdout + made.stderr
        return self.newest()

    def release(self, id: str) -> None:
        """Let a snapshot be restored at once, whatever became of earlier restores of it."""
        released = self.cli("snapshot", "release", id)
        assert released.returncode == 0, released.stdout + released.stderr

    def newest(self) -> Path:
        """Folder of the newest snapshot."""
        return max((self.folder / "state/snapshots").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime).parent

    def park(self, model: str) -> None:
        """No replica of a model, and nobody who waits for one."""
        operation = self.admin("scale-down", {"model": model, "replicas": 0})
        ended = self.admin(f"operations/{operation['id']}?wait=30")
        assert ended["state"] == "succeeded", ended
        eventually(lambda: not self.replicas(model), f"{model} to be parked")

    def calls(self, verb: str) -> int:
        return self.calls_file.read_text().split().count(verb) if self.calls_file.exists() else 0

    def restorer_pid(self) -> int | None:
        needle = f"restorer\0--config\0{self.config}".encode()
        return next((pid for pid, argv in processes() if needle in argv), None)

    def kill_restorer(self) -> None:
        pid = eventually(self.restorer_pid, "a restorer")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.restorer_pid() not in (None, pid), "another restorer")

    def engines(self, box: str = "") -> list[int]:
        """Host pids of the processes in this installation's boxes (or one of them), beside pid 1."""
        others = [pid for pid, argv in processes() if argv and b"rewake-box=" not in argv]
        return [pid for pid in others if any(box in line for line in self._private(pid))]

    def _private(self, pid: int) -> list[str]:
        """The mount that makes a process one of a box of ours; it names the box."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
            return [line for line in lines if line.split()[4] == str(self.run_dir / "box")]
        return []

    def boxes(self) -> list[int]:
        mark = f"rewake-box={self.run_dir}".encode()
        return [pid for pid, argv in processes() if mark in argv and argv.split(b"\0", 1)[0].endswith(b"unshare")]

    def nothing_half_made(self) -> bool:
        """Boxes, their folders and state files are admitted replicas' or spare; no staging, no CRIU, no other engine."""
        admitted = [one for one in self.admin("replicas")["replicas"] if one["state"] in ("admitted", "draining")]
        most = len(admitted) + self.settings["restorer"].get("parallel_starts", 3)
        criu = [pid for pid, argv in processes() if argv.startswith(b"/bin/sh\0" + str(self.folder / "criu").encode())]
        staging = list((self.folder / "state/snapshots").glob(".staging-*"))
        alive = {one["incarnation"] for one in admitted}
        engines = set(self.engines()) - {pid for id in alive for pid in self.engines(id)}
        counts = len(self.boxes()), len(list((self.folder / "state/boxes").iterdir())), len(self.links())
        states = len(list((self.run_dir / "boxes").glob("*.json")))
        return max(*counts, states) <= most and not criu and not staging and not engines

    def links(self) -> list[str]:
        """Interfaces of this installation's network."""
        listed = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listed.splitlines()]
        return [row[1] for row in rows if ipaddress.IPv4Interface(row[3]).ip in self.network]

    def nothing_left(self) -> bool:
        """After the end: no process, no link, no mount but one that the test made."""
        ours = [argv for _, argv in processes() if str(self.folder).encode() in argv]
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{self.run_dir}/" in line]
        return not self.boxes() and not self.links() and not ours and not mounts


def rewritten(folder: Path, **changes: Any) -> None:
    """Change a committed manifest and file it under its new id, as only who holds root could."""
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    changed = manifest.model_copy(update=changes)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(canonical(changed))
    (folder / "manifest.json").chmod(0o400)
    folder.rename(folder.with_name(changed.id))


def manifest_of(folder: Path) -> Manifest:
    return Manifest.model_validate_json((folder / "manifest.json").read_bytes())
