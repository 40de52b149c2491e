"""How the command line shows things: tables, JSON, sizes and times, the progress of long work.

Results go to stdout and progress to stderr, so that a pipe carries results alone. Decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from policies import floor
from policies.manifest import GpuState
from policies.replica import Replica, Stage

_SAY_S = 10.0
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b")
_SHORT = 24
"""Of a cell that is not folded."""


def when(ms: int) -> str:
    """A wall-clock time in milliseconds, for people."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if ms else "-"


def size(count: int) -> str:
    """Bytes, for people."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    return f"{count / (1 << 20):.1f} MiB" if count >= 50 << 10 else f"{count / (1 << 10):.1f} KiB"


def short_hashes(text: str) -> str:
    """Only the beginnings of hashes, which tell them apart."""
    return _HASH.sub(r"\1…", text)


def on_gpu(state: GpuState | None) -> str:
    """What a snapshot has on GPUs, for people; empty when it has nothing there."""
    if state is None:
        return ""
    weights = size(sum(one.bytes for one in state.weights))
    sets = "".join(f"\nweights {one.digest[:16]}… {size(one.bytes)}" for one in state.weights) or ", weights in the dump"
    own = size(state.state_bytes)
    return f"\nGPUs: {len(state.used)} of {len(state.uuids)}, {own} of state beside {weights} of weights{sets}"


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, below: str = "", spare: Sequence[str] = ()) -> None:
    """A table that fits the terminal; elsewhere every row is one line, however long.

    No cell is cut: what is short stays in one piece, to be copied, and what is long is folded.

    Args:
        below: the title of a column that a terminal has no room for: what is in it is said below the table, row by row.
        spare: titles of columns that a narrow terminal does without, the first one first.
    """
    console = _console()
    if not console.is_terminal:
        lines = [[cell.replace("\n", "; ") for cell in row] for row in (titles, *rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    wide = {title: max([len(title), *(len(row[at]) for row in rows)]) for at, title in enumerate(titles)}
    left = [title for title in titles if title != below]
    for title in spare:
        if sum(wide[one] + 2 for one in left) - 2 > console.width:
            left.remove(title)
    shown = [titles.index(title) for title in left]
    for title in left:
        table.add_column(title, no_wrap=wide[title] <= _SHORT, overflow="fold")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    console.print(table)
    if below:
        apart = titles.index(below)
        for row in rows:
            if row[apart]:
                console.print(f"{row[0]}: {row[apart]}", soft_wrap=True)


def print_start(record: Replica) -> None:
    """Where the time of a replica's start went, stage by stage, and why it was read as it was; nothing of one that has none."""
    if not record.stages:
        return
    account = floor.account(record)
    print(f"\n{record.id}" + (f": {account.text}" if account else ""))
    print_table(["STAGE", "TOOK", "FLOOR", "BYTES", "FROM"], [_stage_row(stage) for stage in record.stages])
    for choice in record.choices:
        print(choice)


def _stage_row(stage: Stage) -> list[str]:
    least = "-" if stage.floor_s is None else f"{stage.floor_s:.3f} s"
    source = stage.tier or "-"
    if stage.tier == "mixed" and stage.cached is not None:
        source = f"page cache {stage.cached:.0%}, disk {1 - stage.cached:.0%}"
    return [stage.name, f"{stage.seconds:.3f} s", least, "-" if stage.bytes is None else size(stage.bytes), source]


@contextlib.contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and estimate on a terminal, a line now and then elsewhere; yields what is told (bytes done, in all)."""
    console, began, said = _console(stderr=True), time.monotonic(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total or None)

        def show(done: int, all_of_it: int) -> None:
            nonlocal said
            bar.update(task, completed=done, total=all_of_it)
            now = time.monotonic()
            if not console.is_terminal and now - said >= _SAY_S and done:
                said, rate = now, done / (now - began)
                left = (all_of_it - done) / rate
                line = f"{what}: {size(done)} of {size(all_of_it)}, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
                print(line, file=sys.stderr, flush=True)

        yield show


@contextlib.contextmanager
def stages(what: str) -> Iterator[Callable[[float, Sequence[str]], None]]:
    """What goes on and for how long: one living line on a terminal, a line for each change elsewhere.

    Yields a function that is told the seconds so far and what goes on.
    """
    console, last = _console(stderr=True), ""
    with console.status(what) as status:

        def show(elapsed_s: float, doing: Sequence[str]) -> None:
            nonlocal last
            now = ", ".join(doing) or "waiting"
            line = f"{what}: {now} ({elapsed_s:.0f} s)"
            status.update(line)
            if not console.is_terminal and now != last:
                print(line, file=sys.stderr, flush=True)
            last = now

        yield show


def _console(*, stderr: bool = False) -> Console:
    """Takes names of models and files as they are: nothing in them is markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)
