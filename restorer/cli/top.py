"""``rewake top``: the picture of :mod:`restorer.cli.frame`, drawn again as things change, and the keys.

Knows nothing of what is in the picture. The terminal is left as it was found, however this ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from policies.config import Config
from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import print_json
from restorer.cli.frame import Document, frame
from restorer.cli.operator import Admin, Failed, load

_KEY_S = 0.1
_BACKOFF_S = 2.0
_HELP = "q quit · space pause · r refresh"


def top(
    config: ConfigFile = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit; so does output that is no terminal.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.2, max=30, metavar="SECONDS", help="Draw at least this often.")
    ] = 1.0,
    json_: AsJson = False,
) -> None:
    """Show models, replicas, held requests, stages under way and hosts as they change; q or Ctrl-C ends it."""
    parsed = load(config)[1]
    if json_ or once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        with Admin(parsed) as admin:
            document = admin.overview()
        if json_:
            return print_json(document)
        console = Console(markup=False, highlight=False, emoji=False)
        return console.print(frame(document, console.width, time.time() * 1000))
    _live(parsed, interval)


@dataclass(slots=True)
class _Watch:
    """The latest document, fetched in a thread of its own so that keys are never kept waiting."""

    config: Config
    interval: float
    document: Document | None = None
    fault: str = ""
    fatal: Failed | None = None
    news: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                with Admin(self.config) as admin:
                    after = ""
                    while not self.stop.is_set():
                        self.document = admin.overview(after, self.interval)
                        after, self.fault = str(self.document["version"]), ""
                        self.news.set()
            except Failed as error:
                if self.document is None:
                    self.fatal = error
                    self.news.set()
                    return
                # A gateway that is restarted comes back; one that is gone is said to be.
                self.fault = "no gateway answers; trying again"
                self.news.set()
                self.stop.wait(_BACKOFF_S)


def _live(config: Config, interval: float) -> None:
    watch = _Watch(config, interval)
    thread = threading.Thread(target=watch.run, name="overview", daemon=True)
    thread.start()
    console = Console(markup=False, highlight=False, emoji=False)
    # Ctrl-C is how a person leaves: also where whoever started this had it ignored (`&` in a script), and never in the
    # middle of a drawing.
    signal.signal(signal.SIGINT, lambda *_: watch.stop.set())
    signal.signal(signal.SIGWINCH, lambda *_: watch.news.set())
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        paused, drawn = False, 0.0
        while watch.fatal is None and not watch.stop.is_set():
            key = pressed(_KEY_S)
            if key in ("q", "Q", "\x1b"):
                break
            paused ^= key == " "
            due = watch.news.is_set() or time.monotonic() - drawn >= interval or key in ("r", " ")
            if due and watch.document is not None and (not paused or key == " "):
                watch.news.clear()
                drawn = time.monotonic()
                notice = "paused" if paused else watch.fault or _HELP
                live.update(frame(watch.document, console.width, time.time() * 1000, notice), refresh=True)
    watch.stop.set()
    if watch.fatal is not None:
        raise watch.fatal


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed; yields a function that waits so many seconds for one. The terminal is left as it was."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(within_s: float) -> str:
        ready, _, _ = select.select([fd], [], [], within_s)
        return os.read(fd, 1).decode(errors="ignore") if ready else ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
