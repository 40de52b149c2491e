#!/usr/bin/env python3
"""What a door costs: CPU and latency beside none at all: ``make bench-door``. As root, since a door becomes nobody.

Usage: door.py [--rounds N] [--seconds S]

The same load goes to an upstream directly and through a door before it, in turns. The door has a CPU of its own, upstream and
load generator share another. Writes build/bench-door.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contenders import Running
from data_path import Bench
from rich.console import Console
from rich.table import Table
from rig import BUILD, ROOT, BenchError, raise_open_files

sys.path.insert(0, str(ROOT))
from restorer.boxes import door

SHOWN = {
    "cpu_per_request_us": "CPU of the door per request, 64 connections, µs",
    "cpu_per_chunk_us": "CPU of the door per chunk, 100 streams x 5 ms, µs",
    "one_p50_us": "one connection, p50, µs",
    "ttft_p50_us": "first token, 100 streams, p50, µs",
    "requests_per_s": "requests a second, 64 connections",
    "memory_mb": "memory of the door, MB",
}
console = Console(highlight=False)


@contextlib.contextmanager
def opened(folder: Path, upstream: int, cpu: int) -> Iterator[Running]:
    """A door before an upstream; it lives as long as this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, (folder / "counts").open("w+b") as counts:
        counts.truncate(door.COUNTS.size)
        pidfd = os.pidfd_open(os.getpid())
        passed = (listener.fileno(), pidfd, counts.fileno())
        argv = [sys.executable, "-I", "-S", door.__file__, "127.0.0.1", "127.0.0.0/8", "4096", "nobody", *map(str, passed)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed)
        os.close(pidfd)
        port = listener.getsockname()[1]
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.read(6) != b"ready\n":
            raise BenchError("the door did not start; run this as root")
        with process.stdin as gate:
            gate.write(str(upstream).encode())
        os.sched_setaffinity(process.pid, {cpu})
        yield Running("door", port, process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    raise_open_files(4096)
    found: dict[str, list[dict[str, float]]] = {"directly": [], "door": []}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.seconds)
        with bench.upstream() as upstream, opened(Path(folder), upstream, bench.cpus[-1]) as through:
            # A process that uses no CPU for it: nothing stands in the direct way.
            for _ in range(options.rounds):
                found["directly"].append(bench.round(Running("directly", upstream, -1)))
                found["door"].append({**bench.round(through), "memory_mb": through.memory() / 1e6})
    medians = {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]} for name, rounds in found.items()
    }
    BUILD.mkdir(exist_ok=True)
    (BUILD / "bench-door.json").write_text(json.dumps({"medians": medians, "rounds": found}, indent=1))
    table = Table("", "directly", "through a door")
    for key, text in SHOWN.items():
        direct = medians["directly"].get(key)
        table.add_row(text, "" if not direct else f"{direct:,.1f}", f"{medians['door'][key]:,.1f}")
    console.print(table)
    return int(any(each["errors"] for rounds in found.values() for each in rounds))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"door.py: {error}")
