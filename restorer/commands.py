"""Commands about the life of a running installation: ``rewake reload`` and ``rewake restart``.

They ask the admin API; what is read and who is replaced is decided there. Knows only how a person sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from restorer.console import print_json
from restorer.operator import DEFAULTS, Admin, load

_RELOAD_S, _RESTART_S = 30.0, 600.0

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help=f"Default: {' or '.join(map(str, DEFAULTS))}.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def reload(config: ConfigFile = None, json_: AsJson = False) -> None:
    """Put the configuration file in force while everything runs. A file with faults changes nothing; exits with 2."""
    with Admin(load(config)[1]) as admin:
        changes = admin.call("POST", "reload", more_s=_RELOAD_S)
    if json_:
        return print_json(changes)
    for key, what in (
        ("applied", "in force"),
        ("next_start", "in force for replicas that start from now on"),
        ("restart", "only in force after everything was stopped and started again"),
    ):
        for path in changes.get(key, []):
            print(f"{path}: {what}")
    if not any(changes.values()):
        print("no setting has changed")


def restart(config: ConfigFile = None, json_: AsJson = False) -> None:
    """Let new gateway processes take the places of those that run, without refusing or breaking a request."""
    with Admin(load(config)[1]) as admin:
        done: dict[str, Any] = admin.call("POST", "restart", more_s=_RESTART_S)
    if json_:
        return print_json(done)
    print(f"restarted {', '.join(done['restarted'])}; what the old processes have open may finish")
