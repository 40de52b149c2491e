"""What is asked of one host's restorer by name, and what a restorer says while it works: records for people to look at.

Nothing is decided by them. A task is a question or a chore that only that host can do, because the files are there; its result
is JSON for whoever asked. Knows neither who asks nor how the answer is found.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from policies.replica import Stage

TASK_TTL_S = 3_600
"""A task is forgotten this long after it was made."""
MAX_TASKS = 32
"""Tasks that may wait for one host."""
MAX_LOG_LINES = 2_000
MAX_LOG_BYTES = 128 << 10
"""Of an engine's log in one answer."""
PROGRESS_TTL_S = 3_600


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


TaskKind = Literal["verify", "explain", "push", "pull", "remote", "log"]
"""``verify``: read every byte of a snapshot and compare it with what was committed. ``explain``: whether a snapshot fits this
host and the model's settings, and every reason why not. ``push``: copy a snapshot to the remote that starts pull from, or the
only one. ``pull``: bring one from there. ``remote``: what is there. ``log``: a part of the log of an engine, running or ended."""


CHORES: frozenset[TaskKind] = frozenset(("verify", "push", "pull"))
"""Kinds that take their time, and are listed beside operations."""


class TaskState(enum.StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Task(_Record):
    """One question or chore. Made by a gateway, settled by the restorer of its host."""

    id: str
    kind: TaskKind
    host: str
    model: str = ""
    snapshot: str = ""
    replica: str = ""
    """A slot or an incarnation."""
    lines: int = 200
    """``log``: how many of the last lines."""
    offset: int | None = None
    """``log``: go on from this byte, as an earlier answer said."""
    state: TaskState = TaskState.RUNNING
    detail: str = ""
    """Why it failed, or in one line what was found."""
    result: Mapping[str, JsonValue] = {}
    created_ms: int = 0
    updated_ms: int = 0


class Progress(_Record):
    """What one restorer is doing for one job or task, told as it happens; gone when it ends."""

    id: str
    """Of the job or the task."""
    what: str
    """``start``, ``snapshot``, or the kind of a task."""
    host: str
    model: str = ""
    replica: str = ""
    snapshot: str = ""
    begun_ms: int
    doing: tuple[Stage, ...] = ()
    """Stages that have begun and not ended, the outermost first; their seconds so far."""
    stages: tuple[Stage, ...] = ()
    """Those that have ended."""
    now_ms: int = 0
    """By the host's clock, when this was written."""
    bytes_done: int | None = None
    bytes_total: int | None = None
