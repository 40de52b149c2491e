"""`rewake up` as a process whose children are scripted fakes, or partly the real ones, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FAKE = str(Path(__file__).with_name("fake_child.py"))

_DRIVER = """
import json, sys
import rewake
from restorer.installation import up
told = json.loads(sys.argv[1])
real = up.command
def command(package, config_file, url, *more):
    if package not in told["fake"]:
        return real(package, config_file, url, *more)
    name = package + (more[-1] if package == "gateway" else "")
    return (sys.executable, told["program"], told["journal"], name, *told["fake"][package])
up.command = command
up._STORE_S = told["store_s"]
sys.exit(rewake.main(["up", "-c", told["config"]]))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Place:
    """A configuration, a run folder, and a journal of the fake children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir, self.state_dir, self.config = folder / "run", folder / "state", folder / "rewake.yaml"
        self.port = free_port()
        self.journal = folder / "journal"
        self.journal.touch()
        self.journal.chmod(0o666)
        self.write()

    def write(
        self,
        *,
        store: str | None = None,
        models: Mapping[str, Any] | None = None,
        top: Mapping[str, Any] | None = None,
        **gateway: Any,
    ) -> None:
        """The configuration; ``top``: more sections of it."""
        engine = {"engine": {"kind": "http", "command": ["/bin/true"]}}
        document = {
            **(top or {}),
            "models": {name: engine | dict(more) for name, more in (models or {"m": {}}).items()},
            "gateway": {"port": self.port, "drain_s": 30, **gateway},
            "restorer": {"criu": "/no/such/criu"},
            "store": {"url": store},
            "run_dir": str(self.run_dir),
            "state_dir": str(self.state_dir),
        }
        self.config.write_text(yaml.safe_dump(document))

    @property
    def socket(self) -> Path:
        return self.run_dir / "store" / "store.sock"

    def events(self, *, pids: bool = False) -> list[str]:
        return [line if pids else line.rpartition(" ")[0] for line in self.journal.read_text().splitlines()]

    def children(self) -> dict[str, int]:
        """What up has written down about its children: name -> pid."""
        try:
            document = json.loads((self.run_dir / "up.lock").read_text())
        except (OSError, ValueError):
            return {}
        return {name: pid for name, (pid, _) in document["children"].items()}


class Running:
    """One `rewake up`."""

    def __init__(
        self, place: Place, fake: Mapping[str, tuple[str, ...]], *, store_s: float = 15.0, stdin: int = subprocess.DEVNULL
    ) -> None:
        told = {
            "program": FAKE,
            "journal": str(place.journal),
            "fake": fake,
            "config": str(place.config),
            "store_s": store_s,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _DRIVER, json.dumps(told)],
            cwd=ROOT,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def says(self, part: str, *, within: float = 60.0) -> str:
        """The first line not read yet that contains ``part``."""
        deadline = time.monotonic() + within
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"not said within {within} s: {part!r}; said so far: {self.said}")
            assert line is not None, f"ended without saying {part!r}: {self.said}"
            self.said.append(line)
            if part in line:
                return line

    def ends(self, within: float = 60.0) -> int:
        """Its exit code."""
        code = self.process.wait(within)
        self._reader.join(within)
        while (line := self._lines.get(timeout=within)) is not None:
            self.said.append(line)
        return code


@contextlib.contextmanager
def a_place() -> Iterator[Place]:
    """A folder that the gateway's account may pass through."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Place(Path(name))


@contextlib.contextmanager
def running(
    place: Place, *, restorer: tuple[str, ...] = (), gateway: tuple[str, ...] | None = (), **more: Any
) -> Iterator[Running]:
    """A `rewake up` with fake children; ``gateway=None`` for the real one. Nothing of it is left afterwards."""
    fake = {"restorer": restorer} if gateway is None else {"restorer": restorer, "gateway": gateway}
    up = Running(place, fake, **more)
    try:
        yield up
    finally:
        left = place.children()
        if up.process.poll() is None:
            up.process.kill()
        up.process.wait()
        up._reader.join(20)
        assert up.process.stdout is not None
        up.process.stdout.close()
        for pid in left.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
