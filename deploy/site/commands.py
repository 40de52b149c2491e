"""The page of commands, read off the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

import rewake
from deploy.site.text import cell, code, prose, table

_INTRO = """
The configuration of every command is `--config FILE`; without it `./rewake.yaml`, then `/etc/rewake/rewake.yaml`. Results go to
standard output, progress and errors to standard error. An ID of a snapshot may be shortened.
"""
_EXITS = (
    (code(0), "done"),
    (code(1), "failed: the message says what, where and how to mend it"),
    (code(2), "usage, or a configuration with faults"),
    (code(3), "the snapshot does not fit this host"),
    (code(130), "interrupted"),
)


def page() -> str:
    """Markdown."""
    parts = [
        "# Commands",
        _INTRO.strip(),
        "## Exit status",
        table(("status", ""), _EXITS),
    ]
    for name, command in commands():
        parts += [f"## {name}", prose(command.help or ""), f"    {_usage(name, command)}"]
        rows = [_row(one) for one in command.params if one.name != "help"]
        if rows:
            parts.append(table(("", "", "default"), rows))
    return "\n\n".join(parts) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, in the order of ``rewake --help``."""
    yield from _below("rewake", typer.main.get_command(rewake.app))


# Typer brings a Click of its own, whose types have no public name: hence Any.
def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for below in command.commands.values():
        if not below.hidden:
            yield from _below(f"{name} {below.name}", below)


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper().replace("_", "-"))


def _usage(name: str, command: Any) -> str:
    arguments = []
    for one in command.params:
        if one.param_type_name == "argument":
            many = "..." if one.nargs != 1 else ""
            arguments.append(f"{_metavar(one)}{many}" if one.required else f"[{_metavar(one)}{many}]")
    return " ".join((name, "[OPTIONS]", *arguments))


def _row(parameter: Any) -> tuple[str, str, str]:
    said = cell(getattr(parameter, "help", None) or "")
    if parameter.param_type_name == "argument":
        return code(_metavar(parameter)), said, ""
    names = ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
    value = "" if parameter.is_flag else f" {code(_metavar(parameter))}"
    default = "" if parameter.default in (None, False, ()) or callable(parameter.default) else code(parameter.default)
    return f"{names}{value}", said, default
