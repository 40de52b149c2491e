"""A GPU driver without GPUs, in the real helper process: ``python fake_cuda.py FOLDER``.

FOLDER/facts.json is what NVML would say (and ``total_bytes``); FOLDER/calls gets a line for each step, in order; a file
FOLDER/fault-OP scripts a fault of that step (JSON: ``do``: ``hang`` or an error's name; ``state``: claim success and be in
that state; ``pid``: only for the process with this number inside its box; ``after``: spare so many first; ``first``: then only
so many; ``once``: with ``die``, never again).

The state of a process lies where the process could keep it: in its own HOME, which is part of a snapshot. So a restored
process is as checkpointed as its images say. Device memory is a memory file.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from restorer.gpu import cuda_loader
from restorer.gpu.cuda_helper import CHECKPOINTED, LOCKED, RUNNING, DriverError, serve

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


def written(folder: Path, gpus: int = 1, total_bytes: int = 8 << 30, **more: Any) -> list[str]:
    """Describe a host with some GPUs; argv of the helper for it."""
    names = [{"uuid": f"GPU-{n}", "name": "Testium 1", "memory_bytes": total_bytes, "compute": "9.0"} for n in range(gpus)]
    facts = {"driver": "580.1", "mps": False, "gpus": [{**one, "mig": False, "persistence": True} for one in names]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").write_text(json.dumps({"total_bytes": total_bytes, "facts": facts | more}))
    return [sys.executable, str(Path(__file__).resolve()), str(folder)]


def home(pid: int, folder: Path) -> tuple[Path, int] | None:
    """(the HOME of a process of a test's engine as seen from here, its number inside); None: it is none."""
    try:
        environ = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in one)
        inner = int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
    except (OSError, ValueError):
        return None
    if environ.get("FAKE_CUDA") != str(folder):
        return None
    return Path(f"/proc/{pid}/root{environ['HOME']}"), inner


class FakeDevice:
    """A GPU's memory as memory files."""

    def __init__(self, driver: FakeDriver, uuid: str) -> None:
        self._driver, self._uuid = driver, uuid
        self._blocks: list[FakeBlock] = []

    def allocate(self, count: int) -> FakeBlock:
        self._driver.trip("allocate", 0)
        if self._driver.memory()[self._uuid]["free"] < count:
            raise DriverError(OUT_OF_MEMORY, "out of memory")
        self._blocks.append(block := FakeBlock(count))
        self._driver.helper[self._uuid] = self._driver.helper.get(self._uuid, 0) + count
        return block

    def staging(self, count: int) -> FakeStaging:
        return FakeStaging(count)

    def close(self) -> None:
        for block in self._blocks:
            os.close(block.fd)
            self._driver.helper[self._uuid] -= block.count
        self._blocks = []
        self._driver.note("close", 0)


class FakeBlock:
    def __init__(self, count: int) -> None:
        self.count, self.fd = count, os.memfd_create("device")
        os.ftruncate(self.fd, count)


class FakeStaging:
    def __init__(self, count: int) -> None:
        # Aligned, as pinned memory is.
        self.view = memoryview(mmap.mmap(-1, count))

    def begin(self, block: FakeBlock, offset: int, count: int) -> None:
        os.pwrite(block.fd, self.view[:count], offset)

    def wait(self) -> None:
        pass


class FakeDriver:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.helper: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "facts.json").read_text())["facts"]
        return found

    def memory(self) -> dict[str, dict[str, Any]]:
        total = json.loads((self.folder / "facts.json").read_text())["total_bytes"]
        uuids = [gpu["uuid"] for gpu in self.facts()["gpus"]]
        stranger = self.folder / "stranger-bytes"
        others = int(stranger.read_text()) if stranger.exists() else 0
        found: dict[str, dict[str, Any]] = {
            uuid: {"free": total - others - self.helper.get(uuid, 0), "total": total, "pids": []} for uuid in uuids
        }
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            state = self._load(pid)
            if state is not None and state["state"] in (RUNNING, LOCKED):
                gpu = found[state.get("uuid") or uuids[state["index"]]]
                gpu["free"] -= state["bytes"]
                gpu["pids"].append(pid)
        return found

    def used(self, pid: int) -> int:
        """Bytes of device memory that a process has."""
        return int(self._must(pid)["bytes"])

    def is_cuda(self, pid: int) -> bool:
        return self._load(pid) is not None

    def state(self, pid: int) -> str:
        return str(self._must(pid)["state"])

    def lock(self, pid: int, timeout_ms: int) -> None:
        self.note("lock", pid, f"timeout={timeout_ms}")
        self._step("lock", pid, RUNNING, LOCKED)

    def checkpoint(self, pid: int) -> None:
        self.note("checkpoint", pid)
        self._step("checkpoint", pid, LOCKED, CHECKPOINTED)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        self.note("restore", pid, *(f"{old}={new}" for old, new in pairs))
        uuids = [gpu["uuid"] for gpu in self.facts()["gpus"]]
        if pairs and sorted(new for _, new in pairs) != sorted(uuids):
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "invalid argument")
        state = self._must(pid)
        was = state.get("uuid") or uuids[state["index"]]
        uuid = dict(pairs).get(was, was)
        if self.memory()[uuid]["free"] < state["bytes"]:
            raise DriverError(OUT_OF_MEMORY, "out of memory")
        self._step("restore", pid, CHECKPOINTED, LOCKED, uuid=uuid)

    def unlock(self, pid: int) -> None:
        self.note("unlock", pid)
        self._step("unlock", pid, LOCKED, RUNNING)

    def open(self, uuid: str) -> FakeDevice:
        self.trip("open", 0)
        return FakeDevice(self, uuid)

    def note(self, *words: object) -> None:
        with (self.folder / "calls").open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def trip(self, op: str, inner: int) -> str | None:
        """Do what a test scripted for this step; a state to be in in place of the right one, if it says so."""
        try:
            fault = json.loads((self.folder / f"fault-{op}").read_text())
        except FileNotFoundError:
            return None
        if fault.get("pid") not in (None, inner):
            return None
        self._seen[op] = self._seen.get(op, 0) + 1
        if not fault.get("after", 0) < self._seen[op] <= fault.get("after", 0) + fault.get("first", 1 << 30):
            return None
        if fault.get("do") == "hang":
            while (self.folder / f"fault-{op}").exists():
                time.sleep(0.02)
        elif fault.get("do") == "die":
            if fault.get("once"):
                (self.folder / f"fault-{op}").unlink()
            os._exit(7)
        elif "do" in fault:
            raise DriverError(fault["do"], "scripted")
        return fault.get("state")

    def _step(self, op: str, pid: int, before: str, after: str, **more: Any) -> None:
        state = self._must(pid)
        if state["state"] != before:
            raise DriverError("CUDA_ERROR_ILLEGAL_STATE", f"{op} of a process that is {state['state']}")
        wrong = self.trip(op, self._home(pid)[1])
        self._store(pid, {**state, "state": wrong or after, **more})

    def _home(self, pid: int) -> tuple[Path, int]:
        found = home(pid, self.folder)
        if found is None:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", f"process {pid} has no CUDA")
        return found

    def _load(self, pid: int) -> dict[str, Any] | None:
        found = home(pid, self.folder)
        with contextlib.suppress(OSError, ValueError):
            if found is not None:
                state: dict[str, Any] = json.loads((found[0] / f"cuda-{found[1]}").read_text())
                return state
        return None

    def _must(self, pid: int) -> dict[str, Any]:
        state = self._load(pid)
        if state is None:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", f"process {pid} has no CUDA")
        return state

    def _store(self, pid: int, state: dict[str, Any]) -> None:
        folder, inner = self._home(pid)
        temporary = folder / f".cuda-{inner}"
        temporary.write_text(json.dumps(state))
        temporary.replace(folder / f"cuda-{inner}")


if __name__ == "__main__":
    cuda_loader._PROBE_BYTES = 32 << 20
    serve(FakeDriver(Path(sys.argv[1])))
