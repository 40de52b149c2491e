"""What a new configuration changes: at once, at the next start of a replica, or only when the installation starts anew.

A setting that cannot change while the processes live keeps its old value until they start anew, and is named; it never spoils
the rest. Pure: who reads the file and who obeys is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.config import Config

_RESTART = (
    ("gateway", "host"),
    ("gateway", "port"),
    ("gateway", "workers"),
    ("gateway", "user"),
    ("restorer", "criu"),
    ("restorer", "criu_timeout_s"),
    ("restorer", "runc"),
    ("restorer", "network"),
    ("restorer", "host"),
    ("restorer", "expose"),
    ("restorer", "parallel_starts"),
    ("store",),
    ("metrics", "address"),
    ("tracing",),
    ("state_dir",),
    ("run_dir",),
)
"""Settings that processes are built around."""
_NEXT_START = re.compile(r"models\.(.+)\.(engine|weights|concurrency|canary|snapshot)(\..*)?")
"""What a running replica has from its start."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths of settings, sorted; ``models.NAME`` for a model that came or went."""

    applied: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()
    """In force for replicas that start from now on; one that runs keeps what it was started with."""
    restart: tuple[str, ...] = ()
    """Not in force: only a new start of all processes takes them up."""


def when(name: str) -> Literal["at once", "next start", "restart"]:
    """When a change of the setting at a path is in force; ``gateway.tls`` counts as changed when it is switched on or off."""
    if any(_within(name, ".".join(path)) for path in _RESTART):
        return "restart"
    return "next start" if _NEXT_START.fullmatch(name) else "at once"


def merge(before: Config, after: Config) -> tuple[Config, Changes]:
    """What comes into force when ``after`` was read while ``before`` is in force, and what that changes."""
    old, wished = before.model_dump(mode="json"), after.model_dump(mode="json")
    kept = [path for path in _RESTART if _at(old, path) != _at(wished, path)]
    if (old["gateway"]["tls"] is None) != (wished["gateway"]["tls"] is None):
        kept.append(("gateway", "tls"))
    config = after
    for path in kept:
        config = _with(config, before, path)
    names = sorted(_differences(old, wished))
    restart = [name for name in names if any(_within(name, ".".join(path)) for path in kept)]
    later = [name for name in names if _NEXT_START.fullmatch(name)]
    return config, Changes(
        applied=tuple(name for name in names if name not in restart and name not in later),
        next_start=tuple(later),
        restart=tuple(restart),
    )


def _with(config: Config, before: Config, path: tuple[str, ...]) -> Config:
    """``config``, but with the value at ``path`` as ``before`` has it."""
    top, *rest = path
    value = getattr(before, top)
    if rest:
        value = getattr(config, top).model_copy(update={rest[0]: getattr(value, rest[0])})
    return config.model_copy(update={top: value})


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = document
    for part in path:
        value = value[part]
    return value


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Paths of what differs. A model, tenant or group that came or went is one difference; a list is one setting."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        if old != new:
            yield path
        return
    for key in {**old, **new}:
        below = f"{path}.{key}" if path else str(key)
        if key in old and key in new:
            yield from _differences(old[key], new[key], below)
        else:
            yield below
