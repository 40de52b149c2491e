"""The journal of what is done to this host: each step of a start or a capture is written before it is taken, with its undo.

::

    STATE_DIR/journal/<id>.jsonl   one attempt of one job; lines as in :mod:`policies.journal`, room for them reserved

A line is in the file before its step begins, so the restorer's own death loses none. It is on the disk within moments, by a
thread, and for certain (:meth:`Journal.durable`) before a step whose effect would outlive the machine's death. Waiting for the
disk at each step would cost a restore up to a tenth of its time, and would hold up the restorer's other work.

Knows nothing of how a step is undone (:mod:`restorer.operations.undo`), nor of boxes or snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from policies.failures import Verdict
from policies.journal import Outcome, Step, Trail, Undo, begun, decoded, encoded
from restorer.errors import Environment, RestorerError
from restorer.system.files import disk_space, fsync

log = logging.getLogger("rewake.restorer")

KEPT = 200
"""Ended attempts that are kept for people to look at."""
_RESERVED = 16 << 10
_SUFFIX = ".jsonl"
_HOOK_S = 60.0

Hook = Callable[[str, str], None]
"""Called with a step's name and ``before`` or ``after``: for tests that let a step fail."""


class Journal:
    """One attempt being written. Its methods are called from one event loop."""

    def __init__(self, path: Path, fd: int, trail: Trail, *, at: int = 0, hook: Hook | None = None) -> None:
        self.path, self.trail = path, trail
        self._fd, self._at, self._hook = fd, at, hook
        self._steps = {step.n: step for step in trail.steps}
        self._dirty = False
        self._syncing: asyncio.Task[None] | None = None
        if not at:
            self._write(begun(trail))

    @property
    def pending(self) -> Sequence[Step]:
        """Steps that have an undo, the latest first."""
        return self._now().pending

    @property
    def mark(self) -> int:
        """The number that the next step will have."""
        return len(self._steps)

    def step(self, name: str, undo: Undo | None = None) -> int:
        """Say what is about to be done; its number.

        Raises:
            Environment: the disk is full; the step must not be taken.
        """
        step = Step(n=len(self._steps), name=name, at_ms=_now_ms(), undo=undo)
        self._write({"do": "step", **step.model_dump(mode="json", exclude_none=True)})
        self._steps[step.n] = step
        if self._hook is not None:
            self._hook(name, "before")
        return step.n

    def done(self, n: int, seconds: float, *, bytes: int | None = None, tier: str | None = None) -> None:
        """The step has ended well."""
        self._note("done", n, ms=round(seconds * 1e3, 3), bytes=bytes, tier=tier)
        if self._hook is not None:
            self._hook(self._steps[n].name, "after")

    def failed(self, n: int, seconds: float, error: BaseException) -> None:
        """The step has ended in an error."""
        self._note("failed", n, ms=round(seconds * 1e3, 3), error=str(error) or type(error).__name__)

    def undone(self, n: int, detail: str) -> None:
        """The step's effect is gone, or was meant to stay."""
        self._note("undone", n, undone=detail)

    async def durable(self) -> None:
        """Wait until all that was written is on the disk."""
        while self._syncing is not None and not self._syncing.done():
            await asyncio.shield(self._syncing)

    async def close(self, outcome: Outcome | None, detail: str = "", verdict: Verdict | None = None) -> Trail:
        """End it. None: something is still to be undone, and stays on record for :meth:`Journals.abandoned`."""
        if outcome is not None:
            end = {"outcome": outcome, "ended_ms": _now_ms(), "detail": detail}
            with contextlib.suppress(OSError, RestorerError):
                self._write({"do": "end", **end, "verdict": verdict and verdict.model_dump(mode="json")})
            self.trail = self.trail.model_copy(update={**end, "verdict": verdict})
        await self.durable()
        os.close(self._fd)
        return self._now()

    def _now(self) -> Trail:
        return self.trail.model_copy(update={"steps": tuple(self._steps.values())})

    def _note(self, kind: str, n: int, **facts: Any) -> None:
        self._steps[n] = self._steps[n].model_copy(update=facts)
        try:
            self._write({"do": kind, "n": n, **facts})
        except (OSError, RestorerError) as error:
            # The step is taken, and its undo on record: what is lost is how it went.
            log.warning("%s: %s", self.path, error)

    def _write(self, record: dict[str, Any]) -> None:
        data = encoded(record)
        with disk_space("writing the journal", self.path):
            os.pwrite(self._fd, data, self._at)
        self._at += len(data)
        self._dirty = True
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._sync())

    async def _sync(self) -> None:
        """One at a time; what is written meanwhile goes with the next."""
        while self._dirty:
            self._dirty = False
            try:
                await asyncio.to_thread(os.fdatasync, self._fd)
            except OSError as error:
                log.error("%s: it may not survive a loss of power: %s", self.path, error)


class Journals:
    """All journals of a host.

    Args:
        folder: made if missing, root's alone.
        hook: see :data:`Hook`.
    """

    def __init__(self, folder: Path, hook: Hook | None = None) -> None:
        self.folder, self._hook = folder, hook
        self._open: set[str] = set()
        self._ready: list[str] = []
        self._owed: set[str] | None = None
        """Those that this process could not undo; None: nobody has looked yet."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, *, operation: str, job: str, kind: str, model: str, replica: str, attempt: int, host: str) -> Journal:
        """Open the journal of one attempt, in room that :meth:`reserve` has made, if there was time.

        Raises:
            Environment: the disk is full.
        """
        id = self._ready.pop() if self._ready else self._room()
        trail = Trail(
            id=id, operation=operation, job=job, kind=kind, model=model, replica=replica, attempt=attempt, host=host,
            pid=os.getpid(), at_ms=_now_ms(),
        )  # fmt: skip
        self._open.add(id)
        path = self._path(id)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return Journal(path, fd, trail, hook=self._hook)
        except BaseException:
            os.close(fd)
            raise

    async def end(self, journal: Journal, outcome: Outcome | None, detail: str = "", verdict: Verdict | None = None) -> Trail:
        """End a journal; if something of it is still to be undone, it is among the abandoned from now on."""
        try:
            return await journal.close(outcome, detail, verdict)
        finally:
            self._open.discard(journal.trail.id)
            if outcome is None and self._owed is not None:
                self._owed.add(journal.trail.id)

    def abandoned(self) -> Sequence[Journal]:
        """Journals without an end that nobody writes: what they say is still to be undone. The latest first. Blocks.

        They may be written on, and are ended like any other. The first call looks through all; later ones only at what this
        process could not undo.
        """
        found = []
        for id, trail in self._read() if self._owed is None else self._read(self._owed):
            if trail.outcome is None and id not in self._open:
                found.append(_reopened(self._path(id), trail))
                self._open.add(id)
        self._owed = set()
        return found

    def history(self) -> Sequence[Trail]:
        """Every attempt on record, the latest first. Blocks."""
        return [trail for _, trail in self._read()]

    def reserve(self, count: int) -> None:
        """Make room for the next attempts, and drop the oldest that have ended. Blocks; done when nothing is urgent."""
        with contextlib.suppress(RestorerError):
            while len(self._ready) < count:
                self._ready.append(self._reserve())
        ids = {path.stem for path in self.folder.glob(f"*{_SUFFIX}")} - self._open - {*self._ready}
        if len(ids) > KEPT:
            known = self._read(ids)
            ended = [id for id, trail in known if trail.outcome is not None]
            # Without a first line nothing was begun: room that an earlier restorer has reserved.
            for id in [*ended[KEPT:], *ids - {id for id, _ in known}]:
                self._path(id).unlink(missing_ok=True)

    def _room(self) -> str:
        """A file to write into; on a full disk the one of the attempt that ended longest ago, whose room is there already."""
        try:
            return self._reserve()
        except Environment:
            ended = [id for id, trail in self._read() if trail.outcome is not None and id not in self._open]
            if not ended:
                raise
            with self._path(ended[-1]).open("r+b") as file:
                file.write(bytes(_RESERVED))
            return ended[-1]

    def _reserve(self) -> str:
        """Zeros are written, not just promised: a line then changes no metadata that the disk would have to order."""
        id = secrets.token_hex(8)
        path = self._path(id)
        with disk_space("opening a journal", self.folder):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, bytes(_RESERVED))
                os.fsync(fd)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        fsync(self.folder)
        return id

    def _read(self, ids: Iterable[str] | None = None) -> list[tuple[str, Trail]]:
        found = []
        for id in [path.stem for path in self.folder.glob(f"*{_SUFFIX}")] if ids is None else ids:
            with contextlib.suppress(FileNotFoundError):
                if (trail := decoded(self._path(id).read_bytes())) is not None:
                    found.append((id, trail))
        return sorted(found, key=lambda one: (-one[1].at_ms, one[0]))

    def _path(self, id: str) -> Path:
        return self.folder / f"{id}{_SUFFIX}"


def _reopened(path: Path, trail: Trail) -> Journal:
    data = path.read_bytes().rstrip(b"\0")
    end = data.rfind(b"\n") + 1
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    # A line that a crash cut short makes room for the next.
    os.pwrite(fd, bytes(len(data) - end), end)
    return Journal(path, fd, trail, at=end)


def program_hook(program: str) -> Hook:
    """A hook that runs a program with the step's name and ``before`` or ``after``, and waits for it."""

    def hook(name: str, when: str) -> None:
        subprocess.run([program, name, when], check=False, timeout=_HOOK_S)

    return hook


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
