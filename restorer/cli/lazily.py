"""Groups of commands of which each is imported when it is named: all of them together take a second, and most are used alone.

Owns how a command is found by ``module:name``; which there are, the command line says. Knows nothing of what they do.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup


def group(table: Mapping[str, str]) -> type[TyperGroup]:
    """A class for ``typer.Typer(cls=...)`` whose commands are those of the table, in its order, then those that are added."""

    class Named(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = _Commands(table, self.commands)

    return Named


# Typer brings a Click of its own, whose types have no public name: hence Any.
class _Commands(MutableMapping[str, Any]):
    """Name -> command; a value is imported when it is looked at."""

    def __init__(self, table: Mapping[str, str], more: Mapping[str, Any]) -> None:
        self._table, self._there = table, dict(more)

    def __getitem__(self, name: str) -> Any:
        if name not in self._there:
            module, _, attribute = self._table[name].partition(":")
            alone = typer.Typer(add_completion=False)
            alone.command(name)(getattr(importlib.import_module(module), attribute))
            self._there[name] = typer.main.get_command(alone)
        return self._there[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._there[name] = command

    def __delitem__(self, name: str) -> None:
        del self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._table, *self._there)))

    def __len__(self) -> int:
        return len(self._table.keys() | self._there.keys())
