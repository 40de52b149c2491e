"""All of the crash matrix: ``make crash-matrix``, or ``python tests/crash_matrix_run.py [--only TEXT] [--resume] [--jobs N]``.

Hands the cases of :mod:`crash_matrix` to installations side by side, each in a process of its own, prints a line for each and
writes build/crash-matrix.json as they come, so that ``--resume`` goes on where a run was ended.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from crash_matrix import Case, Result, matrix
from e2e_installation import ROOT


class Run:
    """Cases handed to so many installations, each in a process of its own, one after another as they become free."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rows = {row["case"]: row for row in _before(options.out) if not row["faults"]} if options.resume else {}
        self._steps: dict[str, list[str]] = {}
        self._cases: list[Case] = []
        self._left: Iterator[tuple[int, Case]] = iter(())
        self._lock = threading.Lock()

    def all(self) -> int:
        """Its exit status: 0 if each case held."""
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(self._options.jobs) as pool:
            ended = [pool.submit(self._drive) for _ in range(self._options.jobs)]
        failed = [error for one in ended if (error := one.exception()) is not None]
        for error in failed:
            print(f"an installation was lost: {error!r}")
        mine = [self._rows.get(str(case), {"faults": ["never ran"]}) for case in self._cases]
        held = sum(not row["faults"] for row in mine)
        print(f"{held} of {len(mine)} cases held in {(time.monotonic() - begun) / 60:.0f} min; {self._options.out}")
        return 0 if mine and held == len(mine) and not failed else 1

    def _drive(self) -> None:
        """One installation from its start to its end. Blocks; a thread's."""
        context = multiprocessing.get_context("spawn")
        ours, its = context.Pipe()
        process = context.Process(target=_installation, args=(its,))
        process.start()
        its.close()
        try:
            self._begin(*ours.recv())
            while (taken := self._next()) is not None:
                ours.send(taken[1])
                self._note(taken[0], ours.recv())
        finally:
            ours.close()
            process.join()

    def _begin(self, steps: dict[str, list[str]], cases: list[Case]) -> None:
        """What an installation consists of: all of them the same."""
        with self._lock:
            if not self._cases:
                self._steps, self._cases = steps, [case for case in cases if self._options.only in str(case)]
                self._left = ((at, one) for at, one in enumerate(self._cases, 1) if str(one) not in self._rows)
            if steps != self._steps:
                raise RuntimeError(f"two installations differ in their steps: {steps}, {self._steps}")

    def _next(self) -> tuple[int, Case] | None:
        with self._lock:
            return next(self._left, None)

    def _note(self, number: int, result: Result) -> None:
        """Write it down at once, since all of them take the better part of an hour."""
        verdict = "held" if not result.faults else "BROKEN: " + " | ".join(result.faults)
        line = f"{number:3}/{len(self._cases)} {result.seconds:5.1f} s  {result.case!s:55} {result.answer[:24]:24} {verdict}"
        with self._lock:
            self._rows[str(result.case)] = _row(result)
            print(line, flush=True)
            _written(self._options.out, {"steps": self._steps, "cases": list(self._rows.values())})


def _installation(orders: Connection[Any, Any]) -> None:
    """What a process of :class:`Run` does: the cases that it is sent, until nobody sends any."""
    with matrix() as made:
        orders.send((made.steps, made.cases()))
        with contextlib.suppress(EOFError):
            while True:
                orders.send(made.run(orders.recv()))


def _row(result: Result) -> dict[str, Any]:
    return {"case": str(result.case), "answer": result.answer, "faults": result.faults, "seconds": result.seconds}


def _before(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_bytes())["cases"]) if path.exists() else []


def _written(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1))
    part.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the crash matrix.")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--resume", action="store_true", help="leave out what held in the run whose results are in --out")
    parser.add_argument("--jobs", type=int, default=2, help="installations side by side; default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "build/crash-matrix.json")
    return Run(parser.parse_args()).all()


if __name__ == "__main__":
    sys.exit(main())
