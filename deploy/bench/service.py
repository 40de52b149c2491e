"""One `rewake up` whose restores are measured: its life, what is asked of it, what its processes take."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "198.18.84.0/22"
START_S, OPERATION_S = 60.0, 900.0


class BenchError(Exception):
    """A step that did not do what it must."""


class Service:
    """One installation, until the block ends."""

    def __init__(self, work: Path, models: dict[str, Any], criu: Path) -> None:
        self.state, self.run_dir = work / "state", Path(f"/run/rewake-bench-{secrets.token_hex(4)}")
        self._log, self._config = work / "up.log", work / "rewake.yaml"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._document: dict[str, Any] = {
            "state_dir": str(self.state),
            "run_dir": str(self.run_dir),
            "gateway": {"port": self._port},
            "restorer": {
                "criu": str(criu),
                "network": NETWORK,
                "parallel_starts": 4,
                "max_attempts": 1,
                "criu_timeout_s": 300,
                # What is cold stays so.
                "warm": {"enabled": False},
            },
            "models": models,
        }
        self._config.write_text(yaml.safe_dump(self._document, sort_keys=False))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=OPERATION_S, trust_env=False)

    def __enter__(self) -> Service:
        argv = [sys.executable, str(ROOT / "rewake.py"), "up", "-c", str(self._config)]
        with self._log.open("wb") as log:
            self._up = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self._until(self._ready, "the restorer to report")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()
        if self._up.poll() is None:
            self._up.send_signal(signal.SIGINT)
            self._up.wait(180)
        mounts = Path("/proc/self/mountinfo").read_text()
        if f"{self.run_dir}/" in mounts:  # a box that could not be ended: what it uses must not be emptied
            raise BenchError(f"{self.run_dir} is still in use, by what {self._log} says; end that, and remove it")
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def snapshot(self, model: str) -> dict[str, Any]:
        """A fresh snapshot's manifest, and its id."""
        id = self._operate("snapshots", {"model": model})["snapshot"]
        return {**json.loads((self.state / "snapshots" / id / "manifest.json").read_bytes()), "id": id}

    def first_token(self, model: str, body: dict[str, Any], *, start: str) -> dict[str, Any]:
        """Seconds until a request that finds nothing running is answered, and the record of the replica that did."""
        begun = time.perf_counter()
        answer = self._http.post("/v1/completions", json={**body, "model": model})
        seconds = time.perf_counter() - begun
        if answer.status_code != httpx.codes.OK or answer.headers["x-rewake-start"] != start:
            raise BenchError(f"{model}: {answer.status_code} {answer.headers.get('x-rewake-start')} {answer.text[:300]}")
        (record,) = self._replicas(model)
        self._operate("scale-down", {"model": model, "replicas": 0})
        return {"seconds": seconds, "record": record} if start == "restored" else {"seconds": seconds}

    def clones(self, model: str, count: int) -> dict[str, Any]:
        """Restore so many replicas side by side; what they take together, when each has answered."""
        begun = time.perf_counter()
        self._operate("scale-up", {"model": model, "replicas": count})
        self._until(lambda: len(self._replicas(model)) == count, f"{count} clones")
        seconds, records = time.perf_counter() - begun, self._replicas(model)
        took = [record["took_s"] for record in records]
        boxes = {record["incarnation"] for record in records}
        rss, pss = self._memory(boxes)
        self._operate("scale-down", {"model": model, "replicas": 0})
        return {"seconds": seconds, "took_s": took, "spread": max(took) / min(took), "rss_bytes": rss, "pss_bytes": pss}

    def warming(self, enabled: bool) -> None:
        """Whether the restorer reads snapshots into the page cache by itself, from now on."""
        self._document["restorer"] = {**self._document["restorer"], "warm": {"enabled": enabled, "keep_free": 0.05}}
        self._config.write_text(yaml.safe_dump(self._document, sort_keys=False))
        self._admin("POST", "reload")

    def restorer_peak_bytes(self) -> int:
        """The most memory that the restorer has had resident."""
        for pid, argv in _processes():
            if b"restorer" in argv and str(self._config).encode() in argv and _parent(pid) == self._up.pid:
                return _field(Path(f"/proc/{pid}/status"), "VmHWM")
        raise BenchError("the restorer's process was not found")

    def _memory(self, boxes: set[str]) -> tuple[int, int]:
        """(RSS, PSS) of the engines in these boxes together."""
        inits = {pid for pid, argv in _processes() if any(box.encode() in part for box in boxes for part in argv)}
        rss = pss = 0
        for pid, argv in _processes():
            if b"llama" in argv[0] or b"ld-linux" in argv[0]:
                ancestor = pid
                while ancestor > 1 and ancestor not in inits:
                    ancestor = _parent(ancestor)
                if ancestor > 1:
                    rollup = Path(f"/proc/{pid}/smaps_rollup")
                    rss, pss = rss + _field(rollup, "Rss"), pss + _field(rollup, "Pss")
        return rss, pss

    def _ready(self) -> bool:
        try:
            return bool(self._admin("GET", "snapshots")["hosts"])
        except (httpx.HTTPError, OSError, BenchError):
            return False

    def _replicas(self, model: str) -> list[dict[str, Any]]:
        found = self._admin("GET", "replicas")["replicas"]
        return [replica for replica in found if replica["model"] == model and replica["state"] == "admitted"]

    def _admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        token = (self.run_dir / "admin-token").read_text().strip()
        answer = self._http.request(method, f"/admin/v1/{path}", json=body, headers={"Authorization": f"Bearer {token}"})
        if answer.status_code >= httpx.codes.BAD_REQUEST:
            raise BenchError(f"{method} {path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.json()

    def _operate(self, path: str, body: dict[str, Any]) -> Any:
        operation = self._admin("POST", path, body)
        deadline = time.monotonic() + OPERATION_S
        while operation["state"] == "running":
            if time.monotonic() > deadline:
                raise BenchError(f"{path} did not end within {OPERATION_S:g} s; see {self._log}")
            operation = self._admin("GET", f"operations/{operation['id']}?wait=20")
        if operation["state"] != "succeeded":
            raise BenchError(f"{path}: {operation['detail']}")
        return operation

    def _until(self, check: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not check():
            if self._up.poll() is not None:
                raise BenchError(f"`rewake up` ended with status {self._up.returncode}; see {self._log}")
            if time.monotonic() > deadline:
                raise BenchError(f"waited {START_S:g} s for {what}; see {self._log}")
            time.sleep(0.05)


def _processes() -> list[tuple[int, list[bytes]]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")))
            except OSError:
                continue
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _field(path: Path, name: str) -> int:
    """A size in kB of a file in /proc, in bytes."""
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) << 10
