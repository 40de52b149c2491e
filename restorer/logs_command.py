"""``rewake logs``: the engine's log of a replica of this host, which is a file while it runs and after it has ended."""

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
from restorer.commands import ConfigFile
from restorer.operator import Admin, Failed, load
from restorer.remains import ENGINE_LOG, Remains

_FOLLOW_S = 0.25
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def logs(
    replica: str,
    config: ConfigFile = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the end of the engine's log of one REPLICA (model#slot, or an incarnation); of the last that ended it is kept."""
    path = _log(load(config)[1], replica)
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


def _log(config: Config, replica: str) -> Path:
    """Where the log of a replica is, running or ended."""
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
    if ended is None:
        raise Failed(f"{replica} does not run, and no log of it is kept here; a log is on the replica's host")
    return ended.log()
