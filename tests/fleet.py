"""Several hosts on this machine: network namespaces on a bridge of their own, one Redis, a restorer in each, gateways elsewhere.

::

    with fleet(models, hosts=("a", "b")) as all:
        all.hosts["a"].start()
        ...                                   # all.gateways[0].complete("m"), .admin("replicas"), all.hosts["a"].lose()

The test itself is on the bridge, so it reaches Redis, gateways and doors like one more host. What a host has on disk is its own:
``state_dir`` and ``run_dir`` lie below a folder of its name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from conftest import VALKEY, require_root
from e2e_installation import PROGRAM, PROMPT, ROOT, a_place, eventually, processes

T = TypeVar("T", "Node", "FleetHost", "FleetGateway")
STREAM = {"prompt": "The capital of France is", "max_tokens": 4, "stream": True}
READY_S = 120.0
END_S = 60.0


def streaming(hold: Path, **policy: Any) -> dict[str, Any]:
    """Settings of a model on the engine of :mod:`fleet_engine`; it starts cold unless ``backend`` says otherwise."""
    engine = {"backend": policy.pop("backend", "cold")}
    command = [sys.executable, "-I", str(ROOT / "tests/fleet_engine.py"), "8000", str(hold)]
    return {
        "engine": {"kind": "http", "command": command, **engine},
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["one", "two"], "timeout_s": 20},
        **policy,
    }


class Node:
    """A network namespace on the bridge."""

    def __init__(self, token: str, number: int, net: str) -> None:
        self.namespace, self._link = f"rwf{token}-{number}", f"rwf{token}{number}"
        self.address = f"{net}.{10 + number}"
        bridge = f"rwf{token}"
        _ip(
            f"netns add {self.namespace}",
            f"link add {self._link} type veth peer name eth0 netns {self.namespace}",
            f"link set {self._link} master {bridge}",
            f"link set {self._link} up",
        )
        _ip("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up", within=self.namespace)
        self.inode = os.stat(f"/run/netns/{self.namespace}").st_ino

    def run(self, log: Path, *argv: str) -> subprocess.Popen[bytes]:
        """Start a program of ours in it."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "--", sys.executable, str(PROGRAM), *argv]
        with log.open("ab") as out:
            return subprocess.Popen(enter, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)

    def cut(self) -> None:
        """No packet gets through any more, and nobody is told."""
        _ip(f"link set {self._link} down")

    def heal(self) -> None:
        _ip(f"link set {self._link} up")

    def processes(self) -> list[tuple[int, bytes]]:
        """(pid, argv) of all that is in its network namespace; engines are in their boxes' own."""
        found = []
        for pid, argv in processes():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == self.inode:
                    found.append((pid, argv))
        return found

    def close(self) -> None:
        # Both: a namespace goes when the last of its processes does, and later than it is told to.
        _ip(f"link del {self._link}", f"netns del {self.namespace}", check=False)


class FleetHost:
    """A host with a restorer; nothing runs until :meth:`start`."""

    def __init__(self, name: str, folder: Path, node: Node, settings: dict[str, Any], **restorer: Any) -> None:
        self.name, self.folder, self.node = name, folder, node
        folder.mkdir()
        folder.chmod(0o755)
        self.state_dir, self.run_dir, self.log = folder / "state", folder / "run", folder / "restorer.log"
        network = f"{node.address.rpartition('.')[0]}.0/24"
        expose = {"address": node.address, "ports": "20000-20099", "allow": [network]}
        own = {"host": name, "expose": expose, "network": "198.18.0.0/24", "lease_s": 4, "parallel_starts": 1, **restorer}
        self.settings = {**settings, "state_dir": str(self.state_dir), "run_dir": str(self.run_dir), "restorer": own}
        self.config = folder / "rewake.yaml"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start its restorer; :meth:`Fleet.ready` waits for it."""
        self.config.write_text(yaml.safe_dump(self.settings))
        self._process = self.node.run(self.log, "restorer", "-c", str(self.config))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill_restorer(self) -> None:
        """SIGKILL to the restorer alone; engines and doors go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and wait: it ends all that it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(END_S)

    def cut(self) -> None:
        self.node.cut()

    def heal(self) -> None:
        self.node.heal()

    def lose(self) -> None:
        """The machine is gone: its link, then all that ran on it, so that nobody hears of anything's end."""
        self.node.cut()
        self.kill_restorer()
        for pid in [*self.doors(), *self.boxes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self.doors() and not self.boxes(), f"all of {self.name} to be gone")

    def forget(self) -> None:
        """What a reboot forgets."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def boxes(self) -> list[int]:
        """Pids of its boxes' first processes."""
        mark = f"rewake-box={self.run_dir}/".encode()
        return [pid for pid, argv in processes() if mark in argv and not argv.split(b"\0", 1)[0].endswith(b"unshare")]

    def doors(self) -> list[int]:
        return [pid for pid, argv in self.node.processes() if b"/restorer/boxes/door.py" in argv]

    def snapshots(self) -> list[Path]:
        return sorted(path.parent for path in (self.state_dir / "snapshots").glob("*/manifest.json"))

    def take(self, snapshot: Path) -> None:
        """Have a copy of another host's snapshot; at rest, or it may be seen half."""
        target = self.state_dir / "snapshots" / snapshot.name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        subprocess.run(["cp", "-a", "--sparse=always", str(snapshot), str(target)], check=True)

    def said(self) -> str:
        """The end of its restorer's log, for messages."""
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def close(self) -> None:
        """For the end of a test, however it went."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        if self.running:
            self.kill_restorer()
        for pid in [*self.boxes(), *self.doors()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class FleetGateway:
    """A gateway in a namespace that has no restorer."""

    def __init__(self, name: str, folder: Path, node: Node, settings: dict[str, Any], **gateway: Any) -> None:
        self.name, self.folder, self.node = name, folder, node
        folder.mkdir()
        folder.chmod(0o755)
        self.log, self.run_dir = folder / "gateway.log", folder / "run"
        own = {"host": node.address, "port": 8080, **gateway}
        places = {"state_dir": str(folder / "state"), "run_dir": str(self.run_dir)}
        self.config = folder / "rewake.yaml"
        self.config.write_text(yaml.safe_dump({**settings, **places, "gateway": own}))
        self.base = f"http://{node.address}:8080"
        self.http = httpx.Client(base_url=self.base, timeout=60, trust_env=False)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        self._process = self.node.run(self.log, "gateway", "-c", str(self.config))
        eventually(self._ready, f"gateway {self.name}; see its log: {self.log}", READY_S)

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/ready").status_code == 200
        return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.run_dir / 'admin-token').read_text().strip()}"}

    def admin(self, path: str, body: Any = None) -> Any:
        """GET, or POST with a body."""
        answer = self.http.request("GET" if body is None else "POST", f"/admin/v1/{path}", json=body, headers=self.headers)
        answer.raise_for_status()
        return answer.json()

    def operation(self, path: str, body: Any, within: float = 60.0) -> dict[str, Any]:
        """Begin an operation and follow it to its end."""
        begun = self.admin(path, body)

        def ended() -> dict[str, Any] | None:
            seen = self.admin(f"operations/{begun['id']}?wait=5")
            return None if seen["state"] == "running" else dict(seen)

        found = eventually(ended, f"{path} {body} to end", within)
        return found

    def replicas(self, model: str, state: str = "admitted") -> list[dict[str, Any]]:
        return [one for one in self.admin("replicas")["replicas"] if one["model"] == model and one["state"] == state]

    def complete(self, model: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={**PROMPT, "model": model}, **more)

    def park(self, model: str) -> None:
        """No replica of a model, anywhere."""
        ended = self.operation("scale-down", {"model": model, "replicas": 0})
        assert ended["state"] == "succeeded", ended
        eventually(lambda: not self.replicas(model), f"{model} to be parked")

    def close(self) -> None:
        self.http.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()


class Fleet:
    """One installation over all of them. Gateways run from the beginning, hosts when they are started."""

    def __init__(
        self, folder: Path, models: dict[str, Any], hosts: Sequence[str], gateways: int, more: dict[str, Any], **restorer: Any
    ) -> None:
        self.folder, self._token = folder, secrets.token_hex(3)
        self.net = f"10.213.{secrets.randbelow(250) + 1}"
        self._held = contextlib.ExitStack()
        try:
            _ip(f"link add rwf{self._token} type bridge", f"addr add {self.net}.1/24 dev rwf{self._token}")
            self._held.callback(_ip, f"link del rwf{self._token}", check=False)
            _ip(f"link set rwf{self._token} up")
            self.redis = self._store()
            settings = {"store": {"url": self.redis, "namespace": "fleet"}, "models": models, **more}
            self.hosts = {
                name: self._closing(FleetHost(name, folder / name, self._node(n), settings, **restorer))
                for n, name in enumerate(hosts)
            }
            self.gateways = [
                self._closing(FleetGateway(f"gw{n}", folder / f"gw{n}", self._node(len(hosts) + n), settings))
                for n in range(gateways)
            ]
            for gateway in self.gateways:
                gateway.start()
        except BaseException:
            self._held.close()
            raise

    def _node(self, number: int) -> Node:
        return self._closing(Node(self._token, number, self.net))

    def _closing(self, part: T) -> T:
        self._held.callback(part.close)
        return part

    def _store(self) -> str:
        program = shutil.which("redis-server") or str(VALKEY)
        argv = [
            program,
            "--bind",
            f"{self.net}.1",
            "--port",
            "6379",
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        server = subprocess.Popen(argv, cwd=self.folder, stdout=subprocess.DEVNULL)
        self._held.callback(server.wait)
        self._held.callback(server.kill)
        return f"redis://{self.net}.1:6379/0"

    def reporting(self) -> set[str]:
        """Hosts whose restorers report."""
        return {one["host"] for one in self.gateways[0].admin("snapshots")["hosts"]}

    def start(self, *names: str) -> None:
        """Start these hosts, or all, and wait until they report."""
        wanted = names or tuple(self.hosts)
        for name in wanted:
            self.hosts[name].start()

        def ready() -> bool:
            for name in wanted:
                assert self.hosts[name].running, self.hosts[name].said()
            return self.reporting() >= set(wanted)

        eventually(ready, f"{', '.join(wanted)} to report; see {self.folder}", READY_S)

    def close(self) -> None:
        self._held.close()

    def left(self) -> list[str]:
        """What is left of it after :meth:`close`: processes, links, namespaces."""
        found = [argv.decode(errors="replace") for _, argv in processes() if str(self.folder).encode() in argv]
        for listing in (["ip", "-o", "link"], ["ip", "netns"]):
            said = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
            found += [line for line in said.splitlines() if f"rwf{self._token}" in line]
        return found


@contextlib.contextmanager
def fleet(
    models: dict[str, Any],
    hosts: Sequence[str] = ("a", "b"),
    *,
    gateways: int = 1,
    more: dict[str, Any] | None = None,
    **restorer: Any,
) -> Iterator[Fleet]:
    """A fleet in a folder of its own; nothing of it is left afterwards.

    Args:
        more: sections of every configuration beside ``store`` and ``models``.
        restorer: settings of every restorer, beside those that make it a host of this fleet.
    """
    require_root()
    with a_place("fleet") as folder:
        made = Fleet(folder, models, hosts, gateways, more or {}, **restorer)
        try:
            yield made
        finally:
            made.close()
        eventually(lambda: not made.left(), "nothing to be left", END_S)


def _ip(*commands: str, within: str = "", check: bool = True) -> None:
    enter = ["ip", "-n", within] if within else ["ip"]
    for command in commands:
        done = subprocess.run([*enter, *command.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"ip {command}: {done.stderr.strip()}"
