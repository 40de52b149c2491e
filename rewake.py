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
    "up": "restorer.cli.process_commands:up",
    "gateway": "restorer.cli.process_commands:gateway",
    "restorer": "restorer.cli.process_commands:restorer",
    "doctor": "restorer.cli.doctor_command:doctor",
    "key": "gateway.keys:key",
    "journal": "restorer.cli.journal_commands:journal",
    "reload": "restorer.cli.commands:reload",
    "restart": "restorer.cli.commands:restart",
    "top": "restorer.cli.top:top",
    "why": "restorer.cli.why:why",
    "support": "restorer.cli.support:support",
    "ps": "restorer.cli.replica_commands:ps",
    "scale": "restorer.cli.replica_commands:scale",
    "drain": "restorer.cli.replica_commands:drain",
    "move": "restorer.cli.replica_commands:move",
    "logs": "restorer.cli.logs_command:logs",
}
_SNAPSHOT = {
    "create": "restorer.cli.snapshot_commands:create",
    "ls": "restorer.cli.snapshot_commands:ls",
    "show": "restorer.cli.snapshot_commands:show",
    "verify": "restorer.cli.snapshot_commands:verify",
    "rm": "restorer.cli.snapshot_commands:rm",
    "release": "restorer.cli.snapshot_commands:release",
    "push": "restorer.cli.transfer_commands:push",
    "pull": "restorer.cli.transfer_commands:pull",
    "diff": "restorer.cli.transfer_commands:diff",
    "key": "restorer.cli.trust_commands:key",
    "sign": "restorer.cli.trust_commands:sign",
    "gc": "restorer.cli.retention_commands:gc",
    "explain": "restorer.cli.explain_command:explain_",
    "inspect": "restorer.cli.inspect_command:inspect",
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
