"""Tables of the command line, in a terminal and in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from restorer.cli import console

ROOT = Path(__file__).parents[1]
TITLES = ["REPLICA", "STATE", "SNAPSHOT", "ADDRESS", "REASON"]
LONG = "a reason with " + "many " * 30 + "words"
ROWS = [["m#0", "admitted", "0123456789abcdef", "198.18.0.2:8000", ""], ["m#1", "failed", "-", "-", LONG]]
_CODE = """
import sys; sys.path.insert(0, {root!r})
from restorer.cli import console
console._console = lambda: console.Console(width={width}, force_terminal={terminal}, color_system=None, markup=False)
console.print_table({titles!r}, {rows!r}, below="REASON", spare=("ADDRESS",))
"""


def shown(width: int, *, terminal: bool, rows: list[list[str]] = ROWS) -> list[str]:
    code = _CODE.format(root=str(ROOT), width=width, terminal=terminal, titles=TITLES, rows=rows)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_a_pipe_gets_a_line_for_each_row() -> None:
    lines = shown(40, terminal=False)
    assert len(lines) == 3
    assert lines[0].split() == TITLES
    assert LONG in lines[2]


@pytest.mark.parametrize(("width", "address"), [(80, True), (40, False)])
def test_a_terminal_gets_a_table_that_fits_and_the_reasons_whole_below_it(width: int, address: bool) -> None:
    lines = shown(width, terminal=True)
    assert lines[0].split() == [title for title in TITLES[:4] if title != "ADDRESS" or address]
    assert lines[1].split()[:3] == ["m#0", "admitted", "0123456789abcdef"]
    assert all(len(line) <= width for line in lines[:3])
    assert lines[3:] == [f"m#1: {LONG}"]


def test_a_table_without_rows_has_its_titles() -> None:
    assert [line.split() for line in shown(80, terminal=True, rows=[])] == [TITLES[:4]]


def test_who_waits_for_bytes_is_told_how_many_how_fast_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_SAY_S", 0.0)
    with console.bytes_bar("push 7f", 0) as show:
        show(0, 100 << 20)
        show(25 << 20, 100 << 20)
    assert re.fullmatch(r"push 7f: 25\.0 MiB of 100\.0 MiB, \d+ MB/s, \d+ s left\n", capsys.readouterr().err)
