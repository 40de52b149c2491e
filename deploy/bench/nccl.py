#!/usr/bin/env python3
"""What the driver makes of NCCL: two processes that share a communicator are checkpointed and restored in place, and asked again.

Usage: nccl.py [--python PYTHON] [--only CASE …] [--output FILE]      (root; torch in that Python; needs an NVIDIA driver)

Each case is one way in which two processes talk; what became of it is printed and written down: what failed, and what the
driver, NCCL or torch said of it. Each process has a GPU of its own: two that share one are no substitute, since NCCL's kernels
fail after a restore there, and do not where each has its own. No engine, no CRIU: what fails here can be restored by nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rates

_WORKER = Path(__file__).with_name("inside") / "talking.py"
_PEERS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
_SHARED = {**_PEERS, "NCCL_P2P_DISABLE": "1"}
_SOCKETS = {
    **_SHARED,
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
_PROCESSES = 2
_CASE_S = 60.0
_LOCK_S, _DRIVER_S = 10.0, 30.0


class Case(NamedTuple):
    """One thing to try."""

    work: str
    """What the processes do; see inside/talking.py."""
    env: dict[str, str]


CASES = {
    "no NCCL": Case("pinned", {}),
    "sockets": Case("eager", _SOCKETS),
    "sockets in a CUDA graph": Case("graph", _SOCKETS),
    "shared memory": Case("eager", _SHARED),
    "shared memory in a CUDA graph": Case("graph", _SHARED),
    "made anew": Case("anew", _SHARED),
    "made anew in a CUDA graph": Case("anew-graph", _SHARED),
    "peer to peer, no cuMem": Case("eager", _PEERS),
    "peer to peer": Case("eager", {"NCCL_NVLS_ENABLE": "0"}),
    "multicast": Case("eager", {}),
}


class Failed(Exception):
    """A step did not do what it must."""


@contextlib.contextmanager
def talking(case: Case, python: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a case, begun, each on the GPU of its rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    try:
        for rank in range(_PROCESSES):
            env = {**os.environ, **case.env, "TORCH_NCCL_ENABLE_MONITORING": "0"}
            argv = [python, str(_WORKER), case.work, str(rank), str(_PROCESSES), str(port)]
            processes.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def told(processes: Sequence[subprocess.Popen[str]], step: str) -> None:
    """Wait until each has done a step. Raises Failed with what one says instead."""
    for rank, process in enumerate(processes):
        assert process.stdout is not None
        line = process.stdout.readline()
        answer = json.loads(line) if line.startswith("{") else {"error": f"it ended: {line.strip()}"}
        if "error" in answer:
            raise Failed(f"{step}, process {rank}: {answer['error']}")


def say(processes: Sequence[subprocess.Popen[str]], word: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(word + "\n")
        process.stdin.flush()


def tried(case: Case, python: str, helper: Sequence[str]) -> dict[str, Any]:
    """What became of one case."""
    found: dict[str, Any] = {"restored": False}
    with talking(case, python) as processes:
        # What does not answer in time is ended, and then says so.
        deadline = threading.Timer(_CASE_S, lambda: [process.kill() for process in processes])
        deadline.start()
        try:
            told(processes, "before")
            say(processes, "part")
            told(processes, "parting")
            asked = {"pids": [process.pid for process in processes], "lock_s": _LOCK_S, "within_s": _DRIVER_S}
            for answer in rates.ask(helper, {"op": "freeze", **asked}, {"op": "thaw", **asked}):
                found |= {key: round(value, 3) for key, value in answer.result.items()}
            say(processes, "join")
            told(processes, "after")
        except (Failed, OSError) as error:
            return {**found, "told": str(error)}
        finally:
            deadline.cancel()
    return {**found, "restored": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--only", action="append", choices=CASES, help="a case (default: all)")
    parser.add_argument("--gpu-helper", action="append", metavar="WORD", help="argv of another GPU helper than ours")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    helper = options.gpu_helper or rates.HELPER
    facts = rates.ask(helper, {"op": "facts"})[0].result
    gpus = len(facts["gpus"])
    result: dict[str, Any] = {"driver": facts["driver"], "gpus": gpus, "gpu": facts["gpus"][0]["name"], "cases": {}}
    if gpus < _PROCESSES:
        print(f"nccl.py needs {_PROCESSES} GPUs, and this host has {gpus}")
        return 2
    for name in options.only or CASES:
        begun = time.monotonic()
        found = tried(CASES[name], options.python, helper)
        result["cases"][name] = found
        print(f"{name}: {found} ({time.monotonic() - begun:.1f} s)", flush=True)
        if options.output:
            options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
