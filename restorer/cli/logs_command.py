"""``rewake logs``: the engine's log of a replica, which is a file while it runs and after it has ended; on another host, its
restorer is asked for it."""

from __future__ import annotations

import collections
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from policies.config import Config
from policies.tasks import MAX_LOG_LINES
from restorer.boxes.remains import ENGINE_LOG, Remains
from restorer.cli.commands import ConfigFile
from restorer.cli.operator import Admin, Failed, load

_FOLLOW_S, _AFAR_S = 0.25, 1.0
_TASK_S = 30.0
"""For another host's restorer to answer."""
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

Lines = Annotated[
    int, typer.Option("--lines", "-n", min=0, help=f"How many of the last lines; from another host {MAX_LOG_LINES} at most.")
]


def logs(
    replica: str,
    config: ConfigFile = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help=f"How many of the last lines; of another host's, {MAX_LOG_LINES} at most.")
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the end of the engine's log of one REPLICA (model#slot, or an incarnation), whatever host it is on; of the last that
    ended it is kept."""
    parsed = load(config)[1]
    path = _here(parsed, replica)
    if path is None:
        return _from_its_host(parsed, replica, lines, follow)
    try:
        # The engine can write to that folder: a link in it could lead anywhere.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            sys.stdout.buffer.writelines(collections.deque(file, maxlen=lines))
            while follow:
                sys.stdout.flush()
                time.sleep(_FOLLOW_S)
                sys.stdout.buffer.write(file.read())
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}; a log is on the replica's host, for its user") from None
    sys.stdout.flush()
    return None


def _here(config: Config, replica: str) -> Path | None:
    """Where the log of a replica is, running or ended; None: not on this host."""
    state_dir, incarnation = Path(config.state_dir), replica
    if not (_SAFE.fullmatch(replica) and (state_dir / "boxes" / replica).is_dir()):
        ended = Remains(state_dir / "ended").find(replica)
        try:
            with Admin(config) as admin:
                incarnation = str(admin.replica(replica)["incarnation"])
        except Failed:
            # What has ended is found without a gateway.
            if ended is None:
                raise
            return ended.log()
    box = incarnation.partition("-")[0]
    running = state_dir / "boxes" / box / "private" / ENGINE_LOG
    if _SAFE.fullmatch(incarnation) and running.parent.is_dir():
        return running
    ended = Remains(state_dir / "ended").find(incarnation or replica) or Remains(state_dir / "ended").find(replica)
    return None if ended is None else ended.log()


def _from_its_host(config: Config, replica: str, lines: int, follow: bool) -> None:
    """The same from the restorer of another host, by the gateway."""
    with Admin(config) as admin:
        host = str(admin.replica(replica)["host"])
        if not host:
            raise Failed(f"no host has started {replica}, so there is no log of it; `rewake why '{replica}'` may know more")
        asked: dict[str, object] = {"kind": "log", "replica": replica, "host": host, "lines": min(lines, MAX_LOG_LINES)}
        while True:
            found = admin.task(asked, within=_TASK_S)
            print(found["text"], end="", flush=True)
            if not follow or not found["running"]:
                return
            asked = {"kind": "log", "replica": replica, "host": host, "offset": found["offset"]}
            time.sleep(_AFAR_S)
