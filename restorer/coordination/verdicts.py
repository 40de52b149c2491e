"""What became of each snapshot's restores: kept beside the snapshots, one file each, and exchanged between hosts.

::

    <folder>/<snapshot id>.jsonl   Note, one a line, appended and made durable; outlives the snapshot

Decides nothing: :mod:`policies.verdicts` does. Every method but :meth:`exchange` blocks, for a moment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from policies.restoring import Quarantine
from policies.verdicts import Note, Standing, standing
from restorer.system.files import disk_space, fsync

if TYPE_CHECKING:  # commands that read snapshots speak to no store
    from restorer.coordination.jobs import JobStore

_NOTES = TypeAdapter(tuple[Note, ...])
_SHARED = 20
"""Notes of a snapshot that a host tells others: the last ones."""


class Verdicts:
    """All verdicts that this host knows.

    Args:
        folder: made if missing, private to the running user.
        host: this host's name, for which snapshots are judged.
    """

    def __init__(self, folder: Path, host: str, policy: Quarantine | None = None) -> None:
        self._folder, self.host = folder, host
        self.policy = policy or Quarantine()
        """In force; the owner changes it at a reload."""
        self._known: dict[str, tuple[tuple[int, int], tuple[Note, ...]]] = {}
        self._heard: Mapping[str, Sequence[Note]] = {}
        self._told: dict[str, int] = {}
        """Snapshot -> notes when others were last told."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def note(self, id: str, note: Note) -> None:
        """Append a note, durably.

        Raises:
            Environment: the disk is full.
        """
        path = self._path(id)
        line = note.model_dump_json(by_alias=True, exclude_defaults=True).encode()
        with disk_space(f"writing the verdict on snapshot {id}", self._folder), path.open("ab") as file:
            # A line of its own, even after one that a crash cut short.
            file.write(b"\n" * bool(file.tell()) + line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fsync(self._folder)

    def notes(self, id: str) -> tuple[Note, ...]:
        """This host's own notes of a snapshot, in order."""
        try:
            facts = self._path(id).stat()
        except FileNotFoundError:
            return ()
        mark = (facts.st_ino, facts.st_size)
        if (known := self._known.get(id)) is None or known[0] != mark:
            self._known[id] = known = mark, _parsed(self._path(id).read_bytes(), self.host)
        return known[1]

    def standing(self, id: str) -> Standing:
        """May a snapshot be restored here and now."""
        others = [note for note in self._heard.get(id, ()) if note.host != self.host]
        return standing([*self.notes(id), *others], self.host, self.policy, time.time_ns() // 1_000_000)

    async def exchange(self, jobs: JobStore) -> None:
        """Tell other hosts what is new here, and hear what they know.

        Raises:
            StoreUnavailable: later, then.
        """
        ids = [path.stem for path in self._folder.glob("*.jsonl")]
        mine = {id: notes for id in ids if len(notes := self.notes(id)) != self._told.get(id)}
        if mine:
            told = {id: _NOTES.dump_json(notes[-_SHARED:], by_alias=True).decode() for id, notes in mine.items()}
            await jobs.tell_verdicts(told)
            self._told |= {id: len(notes) for id, notes in mine.items()}
        heard: dict[str, list[Note]] = {}
        for field, text in (await jobs.verdicts()).items():
            # A later version's, then.
            with contextlib.suppress(ValidationError):
                heard.setdefault(field.partition("\t")[0], []).extend(_NOTES.validate_json(text))
        self._heard = heard

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"


def _parsed(data: bytes, host: str) -> tuple[Note, ...]:
    found = []
    for line in data.splitlines():
        # Cut short by a crash, or a later version's.
        with contextlib.suppress(ValidationError):
            note = Note.model_validate_json(line)
            found.append(note if note.host else note.model_copy(update={"host": host}))
    return tuple(found)
