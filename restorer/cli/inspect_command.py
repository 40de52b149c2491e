"""``rewake snapshot inspect``: what would stand in the way of a snapshot of something that runs. Reads /proc; touches nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import typer

from policies.config import Config
from restorer.checkpoint.criu import GHOST_LIMIT
from restorer.cli.commands import OK, AsJson, ConfigFile
from restorer.cli.console import print_json, print_table
from restorer.cli.operator import FAILED, USAGE, Failed, load
from restorer.errors import EngineDied
from restorer.procfs.inventory import examine
from restorer.procfs.processes import children, status


def inspect(what: str, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Name what of WHAT (a replica, model#slot; a model; or the pid of any process) could not be dumped or restored, with the
    process and the descriptor that has it, and what to do about it. Exits with 1 if anything is fatal."""
    parsed = load(config)[1]
    pid = int(what) if what.isdigit() else _engine(parsed, what)
    try:
        found = examine(pid, private=("/dev/shm", f"{parsed.run_dir}/box"), ghost_limit=GHOST_LIMIT)
    except EngineDied as error:
        raise Failed(str(error)) from None
    if json_:
        print_json([finding._asdict() for finding in found])
    elif found:
        rows = [
            [one.severity, one.code, str(one.pid), "" if one.fd is None else str(one.fd), one.what, one.remedy] for one in found
        ]
        print_table(["", "WHAT", "PID", "FD", "FOUND", "TO MEND"], rows)
    else:
        print("nothing stands in the way of a snapshot")
    raise typer.Exit(FAILED if any(one.severity == "fatal" for one in found) else OK)


def _engine(config: Config, name: str) -> int:
    """The host's pid of a running engine of this host, by its replica or its model."""
    for path in sorted((Path(config.run_dir) / "boxes").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            box: dict[str, Any] = json.loads(path.read_text())
            record, inner = box["facts"]["record"], str(box["facts"]["inner_pid"])
            if name in (record["id"], record["model"], record["incarnation"]):
                return next(pid for pid in children(box["init_pid"]) if status(pid, "NSpid").split()[-1] == inner)
    raise Failed(f"no replica of {name} runs on this host; `rewake ps` lists them, and a pid does too", USAGE)
