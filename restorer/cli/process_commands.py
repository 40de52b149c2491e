"""``rewake up``, ``rewake gateway`` and ``rewake restorer``: the commands that become, or supervise, processes of Rewake.

They know how each is started, and nothing of what it does then: a gateway is a program here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from policies.config import Config
from restorer.checks import doctor
from restorer.cli.commands import ConfigFile
from restorer.cli.operator import USAGE, Failed, load
from restorer.installation import rundir
from restorer.installation.up import Up, command
from restorer.system import modules

Worker = Annotated[int, typer.Option(min=0, help="Number of this worker; workers share one port.")]


def up(config: ConfigFile = None) -> None:
    """Run everything on this machine until Ctrl-C."""
    path, parsed = load(config)

    def pass_on(name: str, text: str) -> None:
        print(f"{name} | {text}", file=sys.stderr, flush=True)

    def say(text: str) -> None:
        print(f"rewake: {text}", flush=True)

    async def note() -> str:
        found = await doctor.criu(parsed)
        return "" if found.ok == "ok" else f"cold starts only, because CRIU is not usable: {found.found}; {found.remedy}"

    run = Up(parsed, path, say, pass_on, read=lambda: load(path)[1], note=lambda: asyncio.ensure_future(note()))
    raise typer.Exit(asyncio.run(run.run()))


def gateway(config: ConfigFile = None, worker: Worker = 0) -> None:
    """Run one gateway process against the store of the configuration."""
    path, parsed = load(config)
    token = rundir.admin_token(rundir.folder(Path(parsed.run_dir), 0o755, setting="run_dir"))
    _become(command("gateway", path, _store_url(path, parsed), "--admin-token-file", str(token), "--worker", str(worker)))


def restorer(config: ConfigFile = None) -> None:
    """Run this host's restorer against the store of the configuration."""
    path, parsed = load(config)
    _become(command("restorer", path, _store_url(path, parsed)))


def _store_url(path: Path, config: Config) -> str:
    if not config.store.url:
        raise Failed(f"{path}: store.url is empty; name the Redis where gateway and restorer meet, or use `rewake up`", USAGE)
    return config.store.url


def _become(argv: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execve(argv[0], list(argv), modules.environment())
