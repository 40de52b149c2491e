#!/usr/bin/env python3
"""Measures Rewake on this host's GPU: cold starts, restores, swaps and faults, all through the gateway of a real `rewake up`.

Usage: gpu.py [--python PYTHON] [--model 7b=FOLDER …] [--steps …]      (root; run by `make bench-gpu`; see docs/benchmarks.md)

Needs an NVIDIA driver, CRIU, and vLLM in some Python. Without a folder, models have the shape of Qwen2.5 7B and 14B and
weights that vLLM makes up, the same at each start. Prints tables and writes build/bench-gpu.json after each step; steps of a
later call are added to it. A step that fails is noted there and printed, and the next one begins; so is one that is left out
because the time is over. Talks to the product through its configuration and its HTTP API, and asks nvidia-smi what is left
on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import arrive
import httpx
import measures
import rates
import report
import trials
from installation import ROOT, Bench, BenchError, between, console

BUILD = ROOT / "build"
STEPS = ("restore", "repeat", "disk", "arrive", "other", "swap", "move", "pair", "driver", "another", "faults")
_FAULTS = (BenchError, httpx.HTTPError, OSError, subprocess.SubprocessError)


class Run:
    """The steps that are wanted, one after another, and what they found."""

    def __init__(self, bench: Bench, result: dict[str, Any]) -> None:
        self._bench, self._result = bench, result
        self._steps = bench.options.steps.split(",")
        self._ends = time.monotonic() + bench.options.within_s
        self.well = True

    def all(self) -> None:
        bench, result, names = self._bench, self._result, self._bench.options.models.split(",")
        result["host"] = rates.host(bench.helper, bench.options.fill_mib << 20)
        result.pop("failed", None)
        result.pop("left_out", None)
        with self._installation({"restore", "repeat", "disk", "arrive", "other", "move", "pair", "swap"}):
            for name in names:
                self._one("restore", partial(measures.restore, bench, name), "models", name)
                self._one("repeat", partial(measures.repeat, bench, name), "models", name)
                report.show(console, result, name)
                self._one("disk", partial(measures.disk, bench, name), "models", name, "disk")
            # Its disk is to hold a copy of all of it besides.
            self._one("arrive", partial(arrive.arrive, bench, names[0]), "models", names[0], "arrive")
            self._one("other", partial(measures.other, bench), "other")
            if result["host"]["gpus"] > 1:
                self._one("move", partial(trials.move, bench), "move")
            if result["host"]["gpus"] > 1:
                self._one("pair", partial(trials.pair, bench), "pair")
            for key, changes in self._swaps().items():
                self._one("swap", partial(self._swapped, changes), key)
        self._one("another", partial(trials.another, bench, result.get("pair", {}).get("settings", "")), "another")
        log = bench.work / "helper.jsonl"
        log.unlink(missing_ok=True)
        with self._installation({"driver", "faults"}, restorer={"gpu_helper": between(bench, "--log", str(log))}):
            self._one("driver", partial(measures.driver, bench, names[0], log), "driver")
            self._one("faults", partial(trials.faults, bench), "faults")

    def _installation(self, steps: set[str], **changes: Any) -> contextlib.AbstractContextManager[None]:
        """One for some steps; none if none of them is wanted."""
        return self._bench.installation(**changes) if steps & {*self._steps} else contextlib.nullcontext()

    def _swaps(self) -> dict[str, dict[str, Any]]:
        """The ways in which the model that has the GPU makes way."""
        idle, kept = {"idle_park_s": self._bench.options.park_s}, {"gpu": {"suspend_s": 600}}
        group = {"group": "gpu", "groups": {"gpu": {"members": 1, "min_tenure_s": 1}}}
        ways = {"parked": idle, "suspended": {**idle, **kept}, "grouped": {**group, **kept}}
        return {f"swap_{way}": ways[way] for way in self._bench.options.swap_ways.split(",")}

    def _swapped(self, changes: dict[str, Any]) -> dict[str, Any]:
        for name in self._bench.names:
            self._bench.manifest(name)
        with self._bench.changed(**changes):
            found = measures.swap(self._bench)
        # What is kept asleep in the host's memory is in nobody's way on the GPU.
        self._bench.gone()
        return found

    def _one(self, step: str, work: Callable[[], dict[str, Any]], *keys: str) -> None:
        """Do one step, if it is wanted and there is time, and write down what it found."""
        if step not in self._steps:
            return
        name, result = "/".join(dict.fromkeys([*keys, step])), self._result
        if time.monotonic() > self._ends:
            result.setdefault("left_out", []).append(name)
            console.print(f"{name}: left out, the time is over")
        else:
            begun = time.monotonic()
            console.print(f"[{time.strftime('%T')}] {name} …", markup=False)
            try:
                found = work()
            except Exception as error:  # whatever it is, what GPU time is left is for the other steps
                self.well = False
                result.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
                console.print(f"{name} failed: {error}", style="bold red", markup=False)
            else:
                into = result
                for key in keys:
                    into = into.setdefault(key, {})
                into.update(found)
                console.print(f"[{time.strftime('%T')}] {name}: {time.monotonic() - begun:.1f} s", markup=False)
        report.headline(result)
        self._bench.options.output.write_text(json.dumps(result, indent=2) + "\n")


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--model", action="append", default=[], metavar="7b=FOLDER", help="real weights for one of the models")
    parser.add_argument("--models", default="7b,14b", help="which of them to measure (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(STEPS), help="default: %(default)s")
    parser.add_argument("--canary-tokens", type=int, default=32, help="of each of two prompts (default: %(default)s)")
    parser.add_argument("--restores", type=int, default=10, help="restores in a row (default: %(default)s)")
    parser.add_argument("--swaps", type=int, default=3, help="times that each of two models gets the GPU")
    parser.add_argument("--swap-ways", default="parked,suspended,grouped", help="how the other one makes way (default: all)")
    parser.add_argument("--park-s", type=float, default=1.0, help="idle seconds before a model makes way in the swap step")
    parser.add_argument("--kv-gib", type=int, default=2, help="the 7B model's KV cache; 14B: four times that")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the engines")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="ARGUMENT", help="for the engines")
    parser.add_argument("--pair-arg", action="append", default=[], metavar="ARGUMENT", help="for the engine on two GPUs")
    settings = "environment of the engine on two GPUs; the next one is tried if it cannot be restored"
    parser.add_argument("--pair-try", action="append", default=[], metavar="NAME=VALUE,…", help=settings)
    parser.add_argument("--criu", default=os.environ.get("REWAKE_CRIU", ""), help="the CRIU binary")
    parser.add_argument("--work", default=str(BUILD / "bench-gpu"), help="everything is kept here (default: %(default)s)")
    parser.add_argument("--port", type=int, default=18180)
    parser.add_argument("--run-dir", default="/run/rewake-bench-gpu")
    parser.add_argument("--network", default="198.18.80.0/20", help="for the engines' links")
    parser.add_argument("--output", type=Path, default=BUILD / "bench-gpu.json")
    parser.add_argument("--gpu-helper", action="append", default=[], metavar="WORD", help="argv of another GPU helper than ours")
    parser.add_argument("--fill-mib", type=int, default=2048, help="memory with which the rate of filling it is measured")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="seconds after which no further step is begun")
    parser.add_argument("--operation-s", type=float, default=1800.0, help="seconds that a snapshot may take")
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave out the cold start with compile caches")
    parser.add_argument("--no-rehearse", dest="rehearse", action="store_false", help="publish snapshots without a rehearsal")
    return parser


def main() -> int:
    """0: every step did what it must."""
    chosen = options().parse_args()
    if os.geteuid() != 0 or shutil.which("nvidia-smi") is None:
        console.print("the bench makes namespaces and restores processes on an NVIDIA GPU: run it as root where nvidia-smi works")
        return 2
    if unknown := set(chosen.steps.split(",")) - {*STEPS}:
        console.print(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
        return 2
    chosen.python = os.path.abspath(chosen.python)
    chosen.strangers = [line.split(",")[0] for line in rates.compute_processes()]
    chosen.output.parent.mkdir(exist_ok=True)
    result: dict[str, Any] = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    run = Run(Bench(chosen), result)
    try:
        run.all()
    except _FAULTS as error:
        console.print(f"the bench failed: {error}", style="bold red", markup=False)
        return 1
    console.print(f"written to {chosen.output}")
    return 0 if run.well else 1


if __name__ == "__main__":
    sys.exit(main())
