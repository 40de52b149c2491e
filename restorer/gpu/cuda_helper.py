"""The one process of a host that speaks to the GPU driver: ``python -m restorer.gpu.cuda_helper``.

Initialising CUDA costs a second or more, a driver call may hang, and a crash in a driver library must not take the restorer
along: so all of it happens here, once. Requests are JSON objects, one a line, on stdin; each has an ``id`` and an ``op``,
runs in a thread of its own, and is answered on stdout with the same id and a ``result`` or an ``error``. What belongs
together is one request, so that no caller can forget the second half: *freeze* locks all processes at once, and unlocks
them all if one fails. The state of a process is read back after each step: a driver's "success" is not taken for it.

Knows pids of the host, GPUs by UUID and files by path; nothing of boxes, engines or snapshots. Ends with its stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from restorer.gpu.cuda_loader import Device, Loads

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
"""What a CUDA process can be in, as the driver says."""
_GRACE_S = 2.0
"""How much longer than the driver's own deadline a call may take before it counts as hung."""
_PR_SET_PDEATHSIG = 1


class DriverError(Exception):
    """The driver refused. ``code`` is its name for the reason, such as ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, code: str, message: str, pid: int | None = None) -> None:
        self.code, self.pid = code, pid
        super().__init__(message)


class Driver(Protocol):
    """What this process asks of a driver; every method may raise :class:`DriverError`, and may be called by many threads."""

    def facts(self) -> dict[str, Any]:
        """:class:`policies.manifest.GpuFacts` as JSON, with more for people."""

    def memory(self) -> dict[str, dict[str, Any]]:
        """UUID -> bytes ``free`` and ``total``, and the ``pids`` that use it."""

    def is_cuda(self, pid: int) -> bool:
        """It has CUDA state that a checkpoint must know of."""

    def state(self, pid: int) -> str:
        """One of RUNNING, LOCKED, CHECKPOINTED, FAILED."""

    def lock(self, pid: int, timeout_ms: int) -> None: ...

    def checkpoint(self, pid: int) -> None: ...

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        """``pairs``: (UUID at the checkpoint, UUID now) of every GPU; empty: none has changed."""

    def unlock(self, pid: int) -> None: ...

    def open(self, uuid: str) -> Device:
        """A GPU to put weights on."""


class Helper:
    """The requests, over one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loads = Loads(driver.open)

    def perform(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one request.

        Raises:
            DriverError: it failed; what could be undone was.
        """
        operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "facts": lambda _: self._driver.facts(),
            "memory": lambda _: dict(self._driver.memory()),
            "find": lambda asked: {"pids": [pid for pid in asked["pids"] if self._driver.is_cuda(pid)]},
            "states": lambda asked: {"states": self._states(asked["pids"])},
            "freeze": self._freeze,
            "thaw": self._thaw,
            "quiet": self._quiet,
            "load": self._loads.load,
            "arrived": self._loads.arrived,
            "loaded": self._loads.loaded,
            "drop": self._loads.drop,
            "bandwidth": self._loads.bandwidth,
        }
        if op not in operations:
            raise DriverError("UNKNOWN_OP", f"the GPU helper has no operation {op!r}")
        return operations[op](request)

    def _freeze(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Lock all, then checkpoint all; what fails on one is undone on all."""
        pids, lock_s, within = asked["pids"], float(asked["lock_s"]), float(asked["within_s"])
        begun = time.monotonic()
        try:
            self._all("lock", pids, lambda pid: self._driver.lock(pid, int(lock_s * 1000)), LOCKED, lock_s + _GRACE_S)
            locked = time.monotonic()
            self._all("checkpoint", pids, self._driver.checkpoint, CHECKPOINTED, within)
        except DriverError as error:
            left = self._release(pids, within)
            if left:
                raise DriverError(error.code, f"{error}; not undone on {_names(left)}", error.pid) from error
            raise DriverError(error.code, f"{error}; undone on all others", error.pid) from error
        return {"lock_s": locked - begun, "checkpoint_s": time.monotonic() - locked}

    def _thaw(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Restore all that are checkpointed, then unlock all. A failure cannot be undone in place: the caller kills."""
        pids, within = asked["pids"], float(asked["within_s"])
        pairs = [(old, new) for old, new in asked.get("pairs", ())]
        begun = time.monotonic()
        states = self._states(pids)
        checkpointed = [pid for pid in pids if states[str(pid)] == CHECKPOINTED]
        self._all("restore", checkpointed, lambda pid: self._driver.restore(pid, pairs), LOCKED, within)
        restored = time.monotonic()
        states = self._states(pids)
        self._all("unlock", [pid for pid in pids if states[str(pid)] == LOCKED], self._driver.unlock, RUNNING, within)
        wrong = [pid for pid, state in self._states(pids).items() if state != RUNNING]
        if wrong:
            raise DriverError("WRONG_STATE", f"{_names(wrong)} did not come to run again")
        return {"restore_s": restored - begun, "unlock_s": time.monotonic() - restored}

    def _quiet(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Bring processes that are about to be killed off the GPU, as far as each can be. Never raises for one of them.

        Killing a process in the midst of GPU work has hung hosts; a checkpointed one holds nothing of the GPU.
        """
        pids, lock_s, within = asked["pids"], float(asked["lock_s"]), float(asked["within_s"])
        faults = []
        for verb, before, work, after, seconds in (
            ("lock", RUNNING, lambda pid: self._driver.lock(pid, int(lock_s * 1000)), LOCKED, lock_s + _GRACE_S),
            ("checkpoint", LOCKED, self._driver.checkpoint, CHECKPOINTED, within),
        ):
            due = [pid for pid in pids if self._state(pid) == before]
            try:
                self._all(verb, due, work, after, seconds)
            except DriverError as error:
                faults.append(str(error))
        return {"states": self._states(pids), "faults": faults}

    def _release(self, pids: Sequence[int], within: float) -> list[int]:
        """Undo a freeze that failed; the pids that could not be brought to run again."""
        for state, work, after in (
            (CHECKPOINTED, lambda pid: self._driver.restore(pid, ()), LOCKED),
            (LOCKED, self._driver.unlock, RUNNING),
        ):
            try:
                self._all("undo", [pid for pid in pids if self._state(pid) == state], work, after, within)
            except DriverError:
                continue
        return [pid for pid in pids if self._state(pid) != RUNNING]

    def _all(self, verb: str, pids: Iterable[int], work: Callable[[int], None], after: str, within: float) -> None:
        """Do one step to many processes at once; each must be in state ``after`` then.

        Raises:
            DriverError: the first that failed, or took longer than ``within`` seconds.
        """
        pids = list(pids)
        faults: dict[int, DriverError] = {}
        abandoned = threading.Event()

        def step(pid: int) -> None:
            try:
                work(pid)
                state = self._driver.state(pid)
                if abandoned.is_set() and state == LOCKED and verb == "lock":
                    # It came after everybody had given up, and must not stay locked for ever.
                    self._driver.unlock(pid)
                if state != after:
                    raise DriverError("WRONG_STATE", f"is {state} after {verb}, not {after}", pid)
            except DriverError as error:
                faults[pid] = error
            except Exception as error:
                # A thread that ends by a fault of ours must not count as a step that was done.
                faults[pid] = DriverError("BUG", f"{type(error).__name__}: {error}", pid)

        threads = {pid: threading.Thread(target=step, args=(pid,), daemon=True) for pid in pids}
        for thread in threads.values():
            thread.start()
        deadline = time.monotonic() + within
        for number, (pid, thread) in enumerate(threads.items(), 1):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                abandoned.set()
                text = f"{verb} of pid {pid} ({number} of {len(pids)}) did not end within {within:g} s"
                raise DriverError("HUNG", text, pid)
        for number, pid in enumerate(pids, 1):
            if pid in faults:
                text = f"{verb} of pid {pid} ({number} of {len(pids)}): {faults[pid].code}: {faults[pid]}"
                raise DriverError(faults[pid].code, text, pid)

    def _state(self, pid: int) -> str:
        """The state of one process; FAILED when the driver does not tell, or not within moments."""
        answers: list[str] = []

        def ask() -> None:
            try:
                answers.append(self._driver.state(pid))
            except DriverError:
                answers.append(FAILED)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_GRACE_S)
        return answers[0] if answers else FAILED

    def _states(self, pids: Iterable[int]) -> dict[str, str]:
        return {str(pid): self._state(pid) for pid in pids}


def _names(pids: Iterable[object]) -> str:
    return ", ".join(f"pid {pid}" for pid in pids)


def serve(driver: Driver) -> None:
    """Answer requests until stdin ends. Whatever a library prints goes to stderr."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    writing = threading.Lock()
    helper = Helper(driver)

    def answer(request: dict[str, Any]) -> None:
        try:
            reply: dict[str, Any] = {"result": helper.perform(request["op"], request)}
        except DriverError as error:
            reply = {"error": {"code": error.code, "message": str(error), "pid": error.pid}}
        except OSError as error:
            reply = {"error": {"code": "IO", "message": str(error), "pid": None}}
        except Exception as error:
            reply = {"error": {"code": "BUG", "message": f"{type(error).__name__}: {error}", "pid": None}}
        with writing:
            answers.write(json.dumps({"id": request["id"], **reply}) + "\n")
            answers.flush()

    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    # A thread that hangs in the driver must not keep this process, and device memory, for ever.
    os._exit(0)


def main() -> None:
    # Run by -m, this file is another module than the one whose errors the drivers raise.
    from restorer.gpu import cuda_helper  # noqa: PLC0415, PLW0406
    from restorer.gpu.cuda_driver import choose  # noqa: PLC0415 - the driver's libraries are for this process alone

    cuda_helper.serve(choose())


if __name__ == "__main__":
    main()
