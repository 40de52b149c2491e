"""The command line: the one place that knows both processes, and how a person speaks to them.

Owns which commands there are, and their exit codes: 0 ok, 1 failed, 2 usage, 3 host incompatible. Each is imported when it is
asked for, and this module imports no more than all of them need: `rewake --version` must not wait for what restores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from restorer.cli.lazily import group

OK, FAILED, INTERRUPTED = 0, 1, 130
_COMMANDS = {
    "up": "restorer.process_commands:up",
    "gateway": "restorer.process_commands:gateway",
    "restorer": "restorer.process_commands:restorer",
    "doctor": "restorer.doctor_command:doctor",
    "key": "gateway.keys:key",
    "journal": "restorer.journal_commands:journal",
    "reload": "restorer.commands:reload",
    "restart": "restorer.commands:restart",
    "top": "restorer.top:top",
    "why": "restorer.why:why",
    "support": "restorer.support:support",
    "ps": "restorer.replica_commands:ps",
    "scale": "restorer.replica_commands:scale",
    "drain": "restorer.replica_commands:drain",
    "move": "restorer.replica_commands:move",
    "logs": "restorer.logs_command:logs",
}
_SNAPSHOT = {
    "create": "restorer.snapshot_commands:create",
    "ls": "restorer.snapshot_commands:ls",
    "show": "restorer.snapshot_commands:show",
    "verify": "restorer.snapshot_commands:verify",
    "rm": "restorer.snapshot_commands:rm",
    "release": "restorer.snapshot_commands:release",
    "push": "restorer.transfer_commands:push",
    "pull": "restorer.transfer_commands:pull",
    "diff": "restorer.transfer_commands:diff",
    "key": "restorer.trust_commands:key",
    "sign": "restorer.trust_commands:sign",
    "gc": "restorer.retention_commands:gc",
    "explain": "restorer.explain_command:explain_",
    "inspect": "restorer.inspect_command:inspect",
}

app = typer.Typer(
    cls=group(_COMMANDS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Cold starts that are none.",
)
app.add_typer(
    typer.Typer(cls=group(_SNAPSHOT), no_args_is_help=True, help="Make, list, verify and remove snapshots."), name="snapshot"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        app(args=None if argv is None else list(argv), prog_name="rewake")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may complain about that while Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        return _refused(error)
    return OK


def _refused(error: Exception) -> int:
    """Say what a command could not do, and why. Raises the error if it is none that is meant for people."""
    from restorer.cli.operator import Failed  # noqa: PLC0415
    from restorer.errors import RestorerError  # noqa: PLC0415 -- whoever raised it has imported it; nobody else needs it

    if not isinstance(error, Failed | RestorerError):
        raise error
    print(f"rewake: {error}", file=sys.stderr)
    return error.code if isinstance(error, Failed) else FAILED


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"rewake {metadata.version('rewake')}")
    except metadata.PackageNotFoundError:
        print("rewake: not installed as a package, so it has no version; pip install it", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
