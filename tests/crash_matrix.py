"""The crash matrix: each step of a capture and of a restore, and what can go wrong with it, against the real thing.

One installation with the real CRIU, a small engine with GPU state in a driver of ours, its state on a small tmpfs. Steps are not
listed here: they are what the journal says a capture and a restore consist of. A step is met by the restorer's step hook, which
runs a program before each; the fault armed for that step is in a file that the program moves away and runs. All of it is run by
``crash_matrix_run.py``, a sample by the tests.

After each case: what a client was told is honest, the invariants hold, and asked again without a fault everything converges.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fake_cuda
from e2e_installation import ROOT, Installation, eventually, network, processes

from policies.journal import Trail
from policies.manifest import Manifest
from restorer.procfs.processes import start_time
from restorer.records.journal import Journals
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps

MODEL = "m"
FAULTS = ("kill", "enospc", "nonzero", "hang", "killed")
_SIZE = "96m"
_TOOL_S = 3
_TRIES = 3
_SETTLE_S = 45.0
_PATIENCE_S = 200.0
"""An engine that hangs in its sleep, at its wake or with its weights is given up after a minute, and a donor then woken."""
HOOK = """#!/bin/sh
# Runs before and after each step of the restorer: does what is armed for it, once.
armed="{folder}/armed/$1 $2"
[ -e "$armed" ] || exit 0
mv "$armed" "{folder}/fired"
. "{folder}/fired"
"""
TOOL = """#!/bin/sh
# Stands before a tool: fails as it is told to, once, and is the tool otherwise.
for fault in nonzero hang killed; do
    if mv "{folder}/tool-{name}{verb}-$fault" "{folder}/tool-fired" 2>/dev/null; then
        [ $fault = nonzero ] && {{ echo "scripted failure" >&2; exit 3; }}
        [ $fault = killed ] && kill -9 $$
        while :; do sleep 0.1; done
    fi
done
exec {tool} "$@"
"""


class Part(NamedTuple):
    """Whose failure is a step's: a program, the engine, or the driver's helper."""

    kind: str
    name: str = ""


PARTS: dict[str, Part] = {
    "take box": Part("tool", "unshare"),
    "rehearse: take box": Part("tool", "unshare"),
    "dump": Part("tool", "criu-dump"),
    "restore processes": Part("tool", "criu-restore"),
    "rehearse: restore processes": Part("tool", "criu-restore"),
    "publish": Part("tool", "fallocate"),
    "start engine": Part("engine"),
    "record canary": Part("engine"),
    "export weights": Part("engine"),
    "sleep": Part("engine"),
    "weights": Part("engine"),
    "rehearse: weights": Part("engine"),
    "wake": Part("engine"),
    "rehearse: wake": Part("engine"),
    "canary": Part("engine"),
    "rehearse: canary": Part("engine"),
    "warm up": Part("engine"),
    "freeze GPU": Part("driver", "lock"),
    "restore GPU": Part("driver", "restore"),
    "rehearse: restore GPU": Part("driver", "restore"),
    "wake donor": Part("driver", "restore"),
}
"""Step -> what it relies on. Other steps run no program: nothing of theirs can exit, hang or be killed but the restorer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    flow: str
    """``capture`` or ``restore``."""
    step: str
    fault: str

    def __str__(self) -> str:
        return f"{self.flow}: {self.step}: {self.fault}"


@dataclass(slots=True)
class Result:
    """What became of a case."""

    case: Case
    fired: bool
    answer: str
    """What the client was told while the fault lasted."""
    faults: list[str] = field(default_factory=list)
    """Invariants that did not hold."""
    seconds: float = 0.0


class Matrix:
    """One installation, and cases run against it one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE},mode=0700", "tmpfs", str(self.state)], check=True)
        (folder / "armed").mkdir()
        helper = fake_cuda.written(folder / "cuda", gpus=2)
        command = [sys.executable, str(ROOT / "tests/e2e_gpu_engine.py"), "8000", str(folder / "hold")]
        gpu = {"count": 1, "wait_s": 5}
        engine = {
            "kind": "vllm",
            "command": command,
            "env": {"FAKE_CUDA": str(folder / "cuda")},
            "gpu": gpu,
            "ready_timeout_s": 10,
        }
        model = {"engine": engine, "canary": {"max_tokens": 4, "prompts": ["one"], "timeout_s": 4}}
        more = {"gpu_helper": helper, "failure_backoff_s": 0.2, "criu_timeout_s": _TOOL_S, "parallel_starts": 1}
        self.system = Installation(folder, network(20), {MODEL: model}, **more)
        self.system.http.timeout = _PATIENCE_S
        self._wrap()
        self.expected = ""
        self.steps: dict[str, list[str]] = {}

    def _wrap(self) -> None:
        """Put programs of ours before the tools, and the hook in its place."""
        bin = self.folder / "bin"
        bin.mkdir()
        criu = self.folder / "criu"
        _script(self.folder / "criu.real", criu.read_text())
        _script(criu, TOOL.format(folder=self.folder, name="criu-", verb="$1", tool=self.folder / "criu.real"))
        for name in ("unshare", "fallocate"):
            _script(bin / name, TOOL.format(folder=self.folder, name=name, verb="", tool=shutil.which(name)))
        _script(self.folder / "hook", HOOK.format(folder=self.folder))

    def start(self) -> None:
        """Begin, and find out by one capture and one restore what the steps are."""
        os.environ["REWAKE_STEP_HOOK"] = str(self.folder / "hook")
        os.environ["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.system.start()
        self.expected = self._asked().removeprefix("200 cold ")
        self.steps["capture"] = self._steps_with("dump")
        self._park()
        assert self._asked() == f"200 restored {self.expected}"
        self.steps["restore"] = self._steps_with("verify bytes")
        self._park()

    def close(self) -> None:
        self.system.close()
        subprocess.run(["umount", "-l", str(self.state)], check=True)

    def cases(self) -> list[Case]:
        """All of them, in order."""
        return [
            Case(flow, step, fault)
            for flow, steps in self.steps.items()
            for step in steps
            for fault in FAULTS
            if (fault in ("kill", "enospc") or step in PARTS)
        ]

    def run(self, case: Case) -> Result:
        """One case; again if its step was not come to, since on a busy machine one before it may run out of its few seconds."""
        for _ in range(_TRIES):
            result = self._once(case)
            if result.fired:
                break
        return result

    def _once(self, case: Case) -> Result:
        """Prepare, break, look, mend, converge."""
        begun = time.monotonic()
        result = Result(case, False, "")
        try:
            self._prepare(case.flow)
            self._arm(case)
            result.answer = self._asked()
            result.fired = not (self.folder / "armed" / f"{case.step} before").exists()
            self._mend()
            if not result.fired:
                result.faults.append("the fault was never met")
            if result.answer not in self._honest(result.answer):
                result.faults.append(f"the client was told {result.answer}")
            result.faults += self._broken()
            result.faults += self._converges(case.flow)
        except (AssertionError, httpx.HTTPError, OSError) as error:
            result.faults.append(f"{type(error).__name__}: {str(error)[:300]}")
            with contextlib.suppress(Exception):
                self._mend()
        result.seconds = round(time.monotonic() - begun, 1)
        return result

    # ------------------------------------------------------------ a case, step by step

    def _prepare(self, flow: str) -> None:
        """Nothing runs; a snapshot is there for a restore, and none for a capture."""
        self._mend()
        self._park()
        manifests = list(self.state.glob("snapshots/*/manifest.json"))
        if flow == "capture":
            for path in manifests:
                done = self.system.cli("snapshot", "rm", path.parent.name)
                assert done.returncode == 0, done.stderr
        elif not manifests:
            self._converges("capture")
            self._park()
        shutil.rmtree(self.state / "snapshots/verdicts", ignore_errors=True)
        (self.state / "snapshots/verdicts").mkdir(mode=0o700, exist_ok=True)

    def _arm(self, case: Case) -> None:
        (self.folder / "fired").unlink(missing_ok=True)
        (self.folder / "armed" / f"{case.step} before").write_text(self._snippet(case))

    def _snippet(self, case: Case) -> str:
        if case.fault == "kill":
            return "kill -9 $PPID\n"
        if case.fault == "enospc":
            return f"cat /dev/zero > {self.state}/filler 2>/dev/null\n:\n"
        part = PARTS[case.step]
        if part.kind == "tool":
            return f"touch {self.folder}/tool-{part.name}-{case.fault}\n"
        if part.kind == "driver":
            fault = {"nonzero": {"do": "CUDA_ERROR_UNKNOWN"}, "hang": {"do": "hang"}, "killed": {"do": "die", "once": True}}
            return f"cat > {self.folder}/cuda/fault-{part.name} <<'END'\n{json.dumps({**fault[case.fault], 'first': 1})}\nEND\n"
        signal = {"nonzero": "TERM", "hang": "STOP", "killed": "KILL"}[case.fault]
        return f"'{sys.executable}' '{Path(__file__).resolve()}' --strike {signal} '{self.folder}/hold'\n"

    def _asked(self) -> str:
        """What a client is told: status, how the replica was started, and the answer or the error's code."""
        try:
            answer = self.system.complete(MODEL)
        except httpx.TransportError as error:
            return f"none: {error}"
        if answer.status_code == 200:
            return f"200 {answer.headers['x-rewake-start']} {answer.json()['choices'][0]['text']}"
        return f"{answer.status_code} {answer.headers.get('x-rewake-error', 'no code')}"

    def _honest(self, answer: str) -> Sequence[str]:
        right = [f"200 {start} {self.expected}" for start in ("restored", "cold", "resumed")]
        return [*right, "503 restore_failed", "503 model_loading", "503 cold_start_timeout", "503 cold_start_deadline"]

    def _mend(self) -> None:
        """No fault any more: room on the disk, tools and the driver as they are."""
        for path in [
            self.state / "filler",
            *self.folder.glob("armed/*"),
            *self.folder.glob("tool-*"),
            *self.folder.glob("cuda/fault-*"),
        ]:
            path.unlink(missing_ok=True)
        eventually(self.system.ready, "an installation that answers", _SETTLE_S)

    def _converges(self, flow: str) -> list[str]:
        """Asked again without a fault: a capture ends with a snapshot, and that can be restored."""
        deadline = time.monotonic() + _SETTLE_S
        said = ""
        while time.monotonic() < deadline:
            self._park()
            said = self._asked()
            if said == f"200 restored {self.expected}":
                return self._broken()
            time.sleep(0.2)
        return [f"(8) a rerun does not converge: {said}"]

    def _park(self) -> None:
        self.system.park(MODEL)
        eventually(self.system.nothing_half_made, "what was half-made to be gone", _SETTLE_S)

    # ------------------------------------------------------------ invariants

    def _broken(self) -> list[str]:
        """Which of the eight invariants do not hold, now that all is quiet."""
        found = []
        try:
            eventually(self._quiet, "no start under way", _SETTLE_S)
        except AssertionError:
            found.append("(8) a start goes on for ever")
        try:
            eventually(self.system.nothing_half_made, "nothing half-made", _SETTLE_S)
        except AssertionError:
            found.append("(5) something half-made is left: boxes, folders, links, staging or processes")
        found += [f"(1) {fault}" for fault in self._snapshots()]
        found += self._replicas()
        found += [f"(8) the journal of {trail.job} is still open" for trail in self._trails() if trail.outcome is None]
        return found

    def _quiet(self) -> bool:
        busy = ("queued", "matching", "restoring", "starting", "verifying")
        return not any(one["state"] in busy for one in self.system.admin("replicas")["replicas"])

    def _snapshots(self) -> list[str]:
        """Each manifest names objects that are whole."""
        faults = []
        with tempfile.TemporaryDirectory() as folder:
            for path in self.state.glob("snapshots/*/manifest.json"):
                store = SnapshotStore(path.parents[1], Stamps(Path(folder) / "stamps.json"))
                manifest = Manifest.model_validate_json(path.read_bytes())
                faults += [str(fault) for fault in store.verify(manifest, full=True)]
        return faults

    def _replicas(self) -> list[str]:
        """Engines serve or are gone; none is stopped, locked, or holds a GPU that is nobody's."""
        found = []
        admitted = self.system.replicas(MODEL)
        for one in admitted:
            url = f"http://{one['address']}:{one['port']}/v1/completions"
            with contextlib.suppress(httpx.HTTPError):
                reply = self.system.http.post(url, json={"prompt": "one", "max_tokens": 1}, timeout=5)
                if reply.status_code == 200:
                    continue
            found.append(f"(2) {one['incarnation']} is admitted and does not serve")
        engines = [pid for pid, argv in processes() if f"{self.folder}/hold".encode() in argv]
        for pid in engines:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "Tt":
                found.append(f"(3) process {pid} is stopped")
            home = fake_cuda.home(pid, self.folder / "cuda")
            if home is not None:
                with contextlib.suppress(OSError):
                    driver = json.loads((home[0] / f"cuda-{home[1]}").read_text())["state"]
                    if driver != "running":
                        found.append(f"(4) process {pid} is {driver}")
        memory = fake_cuda.FakeDriver(self.folder / "cuda").memory().values()
        taken = sum(one["free"] != one["total"] for one in memory)
        if taken != len(admitted):
            found.append(f"(6) {taken} GPUs are in use by {len(admitted)} replicas")
        return found

    def _trails(self) -> list[Trail]:
        return list(Journals(self.state / "journal").history())

    def _steps_with(self, step: str) -> list[str]:
        """All steps of the newest attempt that went through this one. Its end may be written a moment after it has answered."""

        def ended() -> list[str] | None:
            found = (_names(one) for one in self._trails() if one.outcome == "succeeded")
            return next((names for names in found if step in names), None)

        return eventually(ended, f"the end of an attempt with {step!r} in the journal", _SETTLE_S)


def strike(signal_name: str, mark: str) -> int:
    """Send a signal to the newest engine that has ``mark`` in its argv: the one that a step is about."""
    mine = [pid for pid, argv in processes() if mark.encode() in argv.split(b"\0") and b"--strike" not in argv]
    roots = [pid for pid in mine if start_time(pid) is not None and not set(_parents(pid)) & set(mine)]
    if roots:
        os.kill(max(roots, key=lambda pid: start_time(pid) or 0), getattr(signal, f"SIG{signal_name}"))
    return 0


def _parents(pid: int) -> list[int]:
    return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])]


def _names(trail: Trail) -> list[str]:
    return list(dict.fromkeys(step.name for step in trail.steps))


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


@contextlib.contextmanager
def matrix() -> Iterator[Matrix]:
    """A matrix whose installation runs, and is gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rewake-matrix-", dir="/var/tmp"))
    folder.chmod(0o755)
    before = dict(os.environ)
    made = Matrix(folder)
    try:
        made.start()
        yield made
    finally:
        try:
            made.close()
        finally:
            os.environ.clear()
            os.environ.update(before)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # What an armed case runs in a shell: the signal's name, and the engine's mark.
    sys.exit(strike(*sys.argv[2:]))
