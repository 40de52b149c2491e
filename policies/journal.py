"""What a journal says: one attempt of a job as a list of steps, each with its undo; the lines it is written as, and back.

A line is one JSON object with a newline at its end. What follows the last whole line was cut short by a crash, or is room that
was reserved, and says nothing. Pure: who writes lines, and when they are on the disk, is the restorer's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from policies.failures import Verdict

Outcome = Literal["succeeded", "failed", "cancelled", "interrupted"]
"""``interrupted``: the restorer ended, or lost its lease, in the midst of it; the job goes on in another attempt."""
MOST_TEXT = 2000
"""Longer texts are cut: a journal is bounded."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Undo(_Record):
    """How a step is undone, as data: a restarted restorer has no closures. Doing it twice is doing it once."""

    what: Literal["box", "thaw", "staging"]
    """``box``: end the box. ``thaw``: let the stopped tree in the box run on. ``staging``: remove the folder."""
    name: str
    """Of the box, or of the folder."""


class Step(_Record):
    """One step, from its intent to its end."""

    n: int
    name: str
    at_ms: int
    undo: Undo | None = None
    ms: float | None = None
    """How long it took; None: it did not end."""
    bytes: int | None = None
    tier: str | None = None
    error: str | None = None
    undone: str | None = None
    """What undoing it came to."""


class Trail(_Record):
    """One attempt of a job."""

    id: str
    operation: str
    job: str
    kind: str
    model: str
    replica: str
    attempt: int
    host: str
    pid: int
    at_ms: int
    steps: tuple[Step, ...] = ()
    outcome: Outcome | None = None
    """None: it is under way, or its restorer has died."""
    ended_ms: int | None = None
    detail: str = ""
    verdict: Verdict | None = None
    """Whose fault a failure was."""

    @property
    def pending(self) -> tuple[Step, ...]:
        """Steps still to be undone if this attempt does not succeed, in the order of undoing."""
        return tuple(step for step in reversed(self.steps) if step.undo is not None and step.undone is None)

    @property
    def last(self) -> str:
        """The step it had got to, in words."""
        if not self.steps:
            return "before its first step"
        step = next((step for step in reversed(self.steps) if step.ms is None), None)
        return f"after {self.steps[-1].name!r}" if step is None else f"in {step.name!r}"


def begun(trail: Trail) -> dict[str, Any]:
    """The first line of a journal."""
    return {"do": "begin", **trail.model_dump(mode="json", include=_BEGIN)}


_BEGIN = {"id", "operation", "job", "kind", "model", "replica", "attempt", "host", "pid", "at_ms"}


def encoded(record: dict[str, Any]) -> bytes:
    """One line."""
    short = {key: value[:MOST_TEXT] if isinstance(value, str) else value for key, value in record.items() if value is not None}
    return json.dumps(short, separators=(",", ":")).encode() + b"\n"


def decoded(data: bytes) -> Trail | None:
    """What a journal says; None when it does not even have its first line."""
    records = _records(data)
    try:
        first = next(records)
        trail = Trail.model_validate(first) if first.get("do") == "begin" else None
    except (StopIteration, ValidationError):
        return None
    if trail is None:
        return None
    steps: dict[int, Step] = {}
    for record in records:
        try:
            trail = _told(trail, steps, record)
        except (ValidationError, KeyError):
            # A later version's, or damaged: what is known without it still holds.
            continue
    return trail.model_copy(update={"steps": tuple(steps.values())})


def _told(trail: Trail, steps: dict[int, Step], record: dict[str, Any]) -> Trail:
    kind = record.get("do")
    if kind == "step":
        step = Step.model_validate(record)
        steps[step.n] = step
    elif kind in ("done", "failed", "undone"):
        known = steps[record["n"]].model_dump()
        steps[record["n"]] = Step.model_validate({**known, **{k: v for k, v in record.items() if k in Step.model_fields}})
    elif kind == "end":
        update = {key: record[key] for key in ("outcome", "ended_ms", "detail", "verdict") if key in record}
        return Trail.model_validate({**trail.model_dump(), **update})
    return trail


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """The whole lines; a torn one ends them."""
    *lines, _ = data.split(b"\n")
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record
