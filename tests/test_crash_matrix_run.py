"""How the whole crash matrix is run: each case once, by whichever installation is free; nothing that was lost counts as held."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crash_matrix_run
import pytest
from crash_matrix import Case, Result

CASES = [Case("capture", "dump", fault) for fault in ("kill", "enospc", "hang", "nonzero")]


class Beside(threading.Thread):
    """A thread in place of a process: the installations of this test are none."""

    def __init__(self, target: Callable[[Connection[Any, Any]], None], args: tuple[Connection[Any, Any]]) -> None:
        # A process would have descriptors of its own.
        self._orders = Connection(os.dup(args[0].fileno()))
        super().__init__(target=target, args=(self._orders,))

    def run(self) -> None:
        with self._orders:
            super().run()


def held(orders: Connection[Any, Any], faults: tuple[str, ...] = ()) -> None:
    """An installation in which all cases hold, or none."""
    orders.send(({"capture": ["dump"]}, CASES))
    with contextlib.suppress(EOFError):
        while True:
            orders.send(Result(orders.recv(), True, "200", [*faults]))


def broken(orders: Connection[Any, Any]) -> None:
    held(orders, ("(5) a box is left",))


def lost(orders: Connection[Any, Any]) -> None:
    """One that ends in the midst of its first case."""
    orders.send(({"capture": ["dump"]}, CASES))
    orders.recv()


def run(monkeypatch: pytest.MonkeyPatch, installation: Any, out: Path, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(crash_matrix_run, "_installation", installation)
    monkeypatch.setattr(crash_matrix_run.multiprocessing, "get_context", lambda _: SimpleNamespace(Pipe=Pipe, Process=Beside))
    status = crash_matrix_run.Run(argparse.Namespace(**{"only": "", "resume": False, "jobs": 2, "out": out, **options})).all()
    return status, json.loads(out.read_bytes())["cases"] if out.exists() else []


def test_each_case_is_run_once_whoever_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, rows = run(monkeypatch, held, tmp_path / "build/out.json")
    assert status == 0
    assert sorted(row["case"] for row in rows) == sorted(map(str, CASES))


def test_what_held_before_is_left_out_and_what_did_not_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    status, before = run(monkeypatch, broken, out, only="kill", jobs=1)
    assert (status, [row["faults"] for row in before]) == (1, [["(5) a box is left"]])
    assert run(monkeypatch, held, out, only="enospc", jobs=1, resume=True)[0] == 0
    capsys.readouterr()
    status, rows = run(monkeypatch, held, out, jobs=1, resume=True)
    assert status == 0
    assert len(rows) == len(CASES)
    said = capsys.readouterr().out
    assert "enospc" not in said
    assert "4 of 4 cases held" in said


def test_an_installation_that_is_lost_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(monkeypatch, lost, tmp_path / "out.json")
    assert (status, rows) == (1, [])
    said = capsys.readouterr().out
    assert said.count("an installation was lost") == 2
    assert "0 of 4 cases held" in said
