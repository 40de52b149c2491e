#!/usr/bin/env python3
"""The gateway's data path beside its peers': ``make bench-gateway``.

Usage: data_path.py [--rounds N] [--only NAME,NAME...] [--seconds S]

Every contender stands before the same upstream, with one worker on a CPU of its own; upstream and load generator share
another. Contenders take turns within each round, and what is reported of two is the median over rounds of the ratio within
a round, so that what else runs on the machine counts in both. CPU is that of a contender's whole process tree.
Writes build/bench-gateway.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from contenders import CONTENDERS, Running
from rich.console import Console
from rich.table import Table
from rig import BUILD, BenchError, free_port, raise_open_files, until

HERE = Path(__file__).parent
PAIRS, PAIR_S = 50, 1.2
"""How what observing costs is measured. Fixed, with the estimator in `observing`, before anything was measured with them: what
is asked for is smaller than what one short run differs from the next by, so whoever may choose afterwards finds what he likes."""
WARM_UP_S = 0.5
"""What load.c leaves out of its figures; its CPU is measured all the same, so it is part of the requests counted too."""
PLAIN = {"model": "bench", "messages": [{"role": "user", "content": "hello " * 60}]}
STREAM = {**PLAIN, "stream": True, "messages": [{"role": "user", "content": "chunks=100 delay_us=5000 " + "hello " * 50}]}
HANG = {**PLAIN, "messages": [{"role": "user", "content": "hang"}]}
FLOOD = {**PLAIN, "stream": True, "messages": [{"role": "user", "content": "chunks=2000 size=50000"}]}
RATIOS = {
    # name: (figure, better is less)
    "requests_per_cpu_second": ("cpu_per_request_us", True),
    "chunks_per_cpu_second": ("cpu_per_chunk_us", True),
    "one_connection_p50": ("one_p50_us", False),
    "ttft_p50": ("ttft_p50_us", False),
    "ttft_p99": ("ttft_p99_us", False),
}

console = Console(highlight=False)


class Bench:
    """Programs, bodies and the pinning of one run."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.cpus = sorted(os.sched_getaffinity(0))
        if len(self.cpus) < 2:
            raise BenchError("two CPUs are needed: one for the contender, one for the load")
        for program in ("mock", "load"):
            built = ["cc", "-O2", "-o", str(folder / program), str(HERE / f"{program}.c")]
            subprocess.run(built, check=True)
        for name, body in (("plain", PLAIN), ("stream", STREAM), ("hang", HANG), ("flood", FLOOD)):
            (folder / f"{name}.json").write_text(json.dumps(body))

    @contextlib.contextmanager
    def upstream(self) -> Iterator[int]:
        port = free_port()
        process = subprocess.Popen([str(self.folder / "mock"), str(port)])
        os.sched_setaffinity(process.pid, {self.cpus[0]})
        try:
            until(lambda: self.open_requests(port) == 0, "the upstream")
            yield port
        finally:
            process.kill()
            process.wait()

    def open_requests(self, port: int) -> int | None:
        with contextlib.suppress(httpx.HTTPError):
            return int(httpx.get(f"http://127.0.0.1:{port}/open", trust_env=False, timeout=5).json()["open"])
        return None

    def begin(self, port: int, connections: int, mode: str, body: str, seconds: float) -> subprocess.Popen[str]:
        argv = [str(self.folder / "load"), str(port), str(connections), str(seconds), mode, str(self.folder / f"{body}.json")]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(process.pid, {self.cpus[0]})
        return process

    def load(self, running: Running, connections: int, mode: str, body: str, seconds: float | None = None) -> dict[str, Any]:
        """One measurement, with the CPU that the contender used for it; ``seconds``: not as long as the others."""
        seconds = seconds or self.seconds
        before = running.cpu_s()
        process = self.begin(running.port, connections, mode, body, seconds)
        out, _ = process.communicate(timeout=seconds + 30)
        found = dict(json.loads(out))
        # The load counts after its warm-up; the CPU was used all the time.
        share = seconds / (seconds + WARM_UP_S)
        found["cpu_s"] = (running.cpu_s() - before) * share
        return found

    def round(self, running: Running) -> dict[str, float]:
        many = self.load(running, 64, "request", "plain")
        one = self.load(running, 1, "request", "plain")
        streams = self.load(running, 100, "stream", "stream")
        return {
            "requests_per_s": many["answers"] / many["seconds"],
            "cpu_per_request_us": 1e6 * many["cpu_s"] / max(many["answers"], 1),
            "p99_us": many["total_p99"],
            "one_p50_us": one["total_p50"],
            "cpu_per_chunk_us": 1e6 * streams["cpu_s"] / max(streams["chunks"], 1),
            "chunk_p99_us": streams["chunk_p99"],
            "ttft_p50_us": streams["ttft_p50"],
            "ttft_p99_us": streams["ttft_p99"],
            "errors": many["errors"] + one["errors"] + streams["errors"],
        }

    def behaviour(self, running: Running, upstream: int, held: int) -> dict[str, Any]:
        """Memory of requests without an answer, orphans when their clients leave, growth behind a reader that stops."""
        before = running.memory()
        clients = self.begin(running.port, held, "hold", "hang", 600)
        try:
            until(lambda: (self.open_requests(upstream) or 0) >= held, f"{held} requests at the upstream", 60)
            grown = running.memory() - before
        finally:
            clients.kill()
            clients.wait()
        left = time.monotonic()
        with contextlib.suppress(BenchError):
            until(lambda: self.open_requests(upstream) == 0, "", 5)
        freed_s, orphans = time.monotonic() - left, self.open_requests(upstream)
        before = running.memory()
        stalled = self.begin(running.port, 1, "stall", "flood", 4)
        time.sleep(3)
        growth = running.memory() - before
        stalled.kill()
        stalled.wait()
        return {
            "held_requests": held,
            "held_mb": round(grown / 1e6, 1),
            "orphans": orphans,
            "freed_s": round(freed_s, 2),
            "stalled_reader_mb": round(growth / 1e6, 2),
        }


def compare(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Medians of per-round ratios of Rewake to the others; above 1 is better for rates, worse for times."""
    ratios = {}
    for other, theirs_all in rounds.items():
        for name, (figure, inverted) in RATIOS.items():
            pairs = zip(rounds["rewake"], theirs_all, strict=True)
            found = [(theirs[figure] / ours[figure] if inverted else ours[figure] / theirs[figure]) for ours, theirs in pairs]
            if not other.startswith("rewake"):
                ratios[f"{name}_vs_{other}"] = round(statistics.median(found), 3)
    return ratios


def observing(bench: Bench, running: dict[str, Running], pairs: int) -> dict[str, Any]:
    """What metrics, access log and traces cost of a request's CPU: 0.1 is a tenth more than without them.

    One right after the other, each first in every other pair: on a machine that does other work too, CPU per request drifts by
    more than what is asked for.
    """
    names = ("rewake_observed", "rewake_unobserved")
    if not pairs or not all(name in running for name in names):
        return {}
    used: dict[str, list[float]] = {name: [] for name in names}
    for number in range(pairs):
        for name in names if number % 2 else reversed(names):
            many = bench.load(running[name], 64, "request", "plain", PAIR_S)
            used[name].append(round(1e6 * many["cpu_s"] / max(many["answers"], 1), 1))

    def cost(of: Callable[[list[float]], float]) -> float:
        with_it, without = (of(used[name]) for name in names)
        return round(with_it / without - 1, 3)

    # What else runs mostly adds, so that what it takes is among the smaller ones; the very least is one lucky moment.
    quartile = cost(lambda found: sorted(found)[pairs // 4])
    return {**used, "cost": quartile, "of_medians": cost(statistics.median), "of_means": cost(statistics.mean)}


def show(rounds: dict[str, list[dict[str, float]]], ratios: dict[str, float]) -> None:
    table = Table("", "req/s @64", "CPU µs/req", "p99 ms @64", "p50 µs @1", "CPU µs/chunk", "TTFT p50 / p99 µs @100", "errors")
    for name, found in rounds.items():
        if not found:
            continue

        def mid(figure: str, found: list[dict[str, float]] = found) -> float:
            return statistics.median(one[figure] for one in found)

        table.add_row(
            name,
            f"{mid('requests_per_s'):,.0f}",
            f"{mid('cpu_per_request_us'):.1f}",
            f"{mid('p99_us') / 1000:.2f}",
            f"{mid('one_p50_us'):.0f}",
            f"{mid('cpu_per_chunk_us'):.1f}",
            f"{mid('ttft_p50_us'):.0f} / {mid('ttft_p99_us'):.0f}",
            f"{sum(one['errors'] for one in found):.0f}",
        )
    if table.row_count:
        console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    names = options.only.split(",") if options.only else list(CONTENDERS)
    bench = Bench(folder, options.seconds)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    behaviour: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(bench.upstream())
        running: dict[str, Running] = {}
        for name in names:
            (folder / name).mkdir()
            running[name] = stack.enter_context(CONTENDERS[name](folder / name, upstream))
            for pid in running[name].tree():
                os.sched_setaffinity(pid, {bench.cpus[1]})
        for _ in range(options.rounds):
            for name in names:
                rounds[name].append(bench.round(running[name]))
        observed = observing(bench, running, options.pairs)
        for name in names if options.held else ():
            try:
                behaviour[name] = bench.behaviour(running[name], upstream, options.held)
            except BenchError as error:
                behaviour[name] = {"error": str(error)}
            until(lambda: bench.open_requests(upstream) is not None, "the upstream")
    ratios = compare(rounds) if "rewake" in rounds else {}
    if observed:
        ratios["observability_cost"] = observed["cost"]
        ratios |= {f"observability_cost_{name}": observed[name] for name in ("of_medians", "of_means")}
    return {"rounds": rounds, "ratios": ratios, "observed": observed, "behaviour": behaviour}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help=f"measurements of what observing costs, of {PAIR_S:g} s each; 0: none"
    )
    parser.add_argument("--held", type=int, default=5000)
    parser.add_argument("--only", help=f"of {', '.join(CONTENDERS)}")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rewake-bench-data-"))
    folder.chmod(0o755)
    try:
        raise_open_files(3 * options.held + 500)
        found = measure(options, folder)
    except (BenchError, subprocess.CalledProcessError) as error:
        print(f"bench-gateway: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(found["rounds"], found["ratios"])
    for name, row in found["behaviour"].items():
        console.print(f"{name}: {row}")
    BUILD.mkdir(exist_ok=True)
    (BUILD / "bench-gateway.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
