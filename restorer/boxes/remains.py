"""What stays of boxes that have ended: the ends of their logs, for whoever asks why.

Bounded in number and in bytes; the oldest go. Knows nothing of why a box has ended, nor of who reads.

::

    STATE_DIR/ended/<box id>/engine.log, restore.log, dump.log, box.log   the end of each, as far as there was one
    STATE_DIR/ended/<box id>/box.json                                     whose it was: replica, model, snapshot, when it ended
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `rewake logs` reads what remains, and needs nothing that makes boxes
    from restorer.boxes.box import Box

KEPT = 32
"""Boxes of which something is kept."""
TAIL_BYTES = 256 << 10
"""Of each log."""
ENGINE_LOG = "engine.log"
_TOOLS = ("restore.log", "dump.log")
_ABOUT = "box.json"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class Ended:
    """One box that is no more."""

    id: str
    folder: Path
    ended_ms: int
    about: dict[str, Any]

    def log(self, name: str = ENGINE_LOG) -> Path:
        return self.folder / name


class Remains:
    """Those of one host. Every method blocks; none raises for what cannot be read or written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def keep(self, box: Box) -> None:
        """Call before the box is removed. Nothing is kept of one in which nothing ran."""
        logs = {ENGINE_LOG: box.log, **{name: box.work / name for name in _TOOLS}, "box.log": box.folder / "box.log"}
        tails = {name: text for name, path in logs.items() if (text := tail(path))}
        if not tails:
            return
        about = {key: box.facts[key] for key in ("model", "replica", "snapshot") if key in box.facts}
        record = box.facts.get("record")
        if isinstance(record, dict):
            about |= {"model": record.get("model"), "replica": record.get("id"), "snapshot": record.get("snapshot")}
        with contextlib.suppress(OSError):
            folder = self.root / box.id
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, text in tails.items():
                (folder / name).write_bytes(text)
            (folder / _ABOUT).write_text(json.dumps({"id": box.id, "ended_ms": time.time_ns() // 1_000_000, **about}))
            for old in self.list()[KEPT:]:
                shutil.rmtree(old.folder, ignore_errors=True)

    def list(self) -> list[Ended]:
        """All of them, the latest first."""
        found = []
        with contextlib.suppress(OSError):
            for folder in self.root.iterdir():
                with contextlib.suppress(OSError, ValueError, TypeError):
                    about = json.loads((folder / _ABOUT).read_text())
                    found.append(Ended(folder.name, folder, int(about["ended_ms"]), about))
        return sorted(found, key=lambda one: one.ended_ms, reverse=True)

    def find(self, name: str) -> Ended | None:
        """The latest of a replica (``model#slot``), or the one of an incarnation."""
        box = name.partition("-")[0] if _ID.fullmatch(name) else ""
        return next((one for one in self.list() if name == one.about.get("replica") or box == one.id), None)


def tail(path: Path, most: int = TAIL_BYTES) -> bytes:
    """The end of a file that an engine may have made anything of: no link is followed; empty when there is nothing to read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most))
            return file.read(most)
    except OSError:
        return b""
