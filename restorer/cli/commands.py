"""What commands share: their options, and how an operation is shown to its end; and ``rewake reload`` and ``rewake restart``.

They ask the admin API; what is read and who is replaced is decided there. Knows only how a person sees it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from policies.config import Config, Model
from policies.wire import Operation, OperationState
from restorer.cli.console import print_json, stages
from restorer.cli.operator import DEFAULTS, FAILED, USAGE, Admin, Failed, load

_RELOAD_S, _RESTART_S = 30.0, 600.0

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help=f"Default: {' or '.join(map(str, DEFAULTS))}.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the end; print the operation's id.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Stop waiting (not the operation) after this long.")]
OK, INTERRUPTED = 0, 130


def reload(config: ConfigFile = None, json_: AsJson = False) -> None:
    """Put the configuration file in force while everything runs: the one that `rewake up` was started with, whatever -c says of
    where the gateway listens. A file with faults changes nothing; exits with 2."""
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


def model_named(config: Config, name: str) -> tuple[str, Model]:
    """The configured name and settings of what a person calls ``name``. Raises Failed."""
    found = config.resolve(name)
    if found is None:
        raise Failed(f"the configuration has no model {name!r}; it has {', '.join(config.models)}", USAGE)
    return found, config.models[found]


def finish(admin: Admin, operation: Operation, no_wait: bool, timeout: float) -> NoReturn:
    """Show an operation until its end; exits with its code."""
    if no_wait:
        print(operation.id)
        raise typer.Exit(OK)
    began, what = time.monotonic(), f"{operation.kind.replace('_', '-')} of {operation.model}"
    with stages(what) as show:
        try:
            operation = admin.follow(operation, within=timeout, progress=show)
        except KeyboardInterrupt:
            raise Failed(f"operation {operation.id} goes on by itself", INTERRUPTED) from None
    made = f", snapshot {operation.snapshot}" if operation.snapshot else ""
    detail = f": {operation.detail}" if operation.detail else ""
    print(f"{what} {operation.state} after {time.monotonic() - began:.1f} s{made}{detail}", flush=True)
    succeeded = operation.state == OperationState.SUCCEEDED
    raise typer.Exit(operation.code if succeeded else operation.code or FAILED)
