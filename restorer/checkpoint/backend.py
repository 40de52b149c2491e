"""What every backend is: how an engine comes into a box, and, where it can, into images and back.

A backend knows boxes, engines and its own tool. It decides nothing: whether to restore, what a failure means and when an
engine may be asked are the pipeline's. Whatever it makes lies in the box or is named there, so that killing the box is the
end of all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from restorer.adapters.engines import HttpEngine
from restorer.boxes import seal
from restorer.boxes.box import Box
from restorer.errors import SnapshotError

SEAL = (sys.executable, "-I", "-S", seal.__file__)
"""Becomes the command that follows, which then cannot make io_uring rings."""


@dataclass(frozen=True, slots=True)
class Can:
    """What a backend can do where nothing is in its way."""

    snapshot: bool = False
    """Capture an engine, and restore it in another box."""
    sleep: bool = False
    """Keep an engine that serves nobody, and wake it."""
    fill: bool = False
    """Leave a restored tree stopped, for its memory to be filled from outside."""
    contain: bool = False
    """Its engines have mounts and pids of their own within the box's."""
    clone: bool = False
    """Have several replicas of one snapshot at once."""


class Backend:
    """One way to have engines; the base starts them by their command, in the box itself, and can do nothing else."""

    name: ClassVar[str] = "cold"
    can: ClassVar[Can] = Can()
    private: ClassVar[tuple[str, ...]] = ()
    """Folders besides a box's own that an engine finds its private files in."""

    def obstacle(self) -> str | None:
        """Why no snapshot can be made or restored by it here, in one line; None: nothing is in the way."""
        return f"engine.backend is {self.name}, which makes no snapshots"

    def describe(self) -> str:
        """What it has found on this host, in one line, for people."""
        return "every start runs the engine's command"

    async def launch(self, box: Box, engine: HttpEngine, visible: Sequence[int]) -> int:
        """Start an engine by its command; its root's pid, as the box's innermost pid namespace numbers it.

        Args:
            visible: the GPUs that it may see, by their place on the bus.

        Raises:
            ToolFailed, ToolHung, Environment: it could not even be started; the box must be killed.
        """
        return await box.spawn((*SEAL, *engine.argv()), engine.environment(box.mountpoint, visible))

    async def dump(self, box: Box, pid: int, images: Path, engine: HttpEngine) -> None:
        """Write the images of the tree under ``pid`` and leave it stopped, until its box is let run or ended.

        Raises:
            ToolFailed: the tool refused; the tree runs on. ToolHung: it did not end in time. Environment: the disk is full.
        """
        raise SnapshotError(f"no snapshot can be made: {self.obstacle()}")

    async def restore(self, box: Box, engine: HttpEngine, images: Path, options: Sequence[str]) -> None:
        """Restore images into an empty box whose private folders are laid; returns once the tree runs.

        Args:
            options: CRIU's, as the manifest has them, and what the caller adds.

        Raises:
            ToolFailed, ToolHung: the box holds a part of a tree and must be killed.
        """
        raise SnapshotError(f"nothing can be restored: {self.obstacle()}")

    def located(self, engine: HttpEngine, paths: Sequence[str]) -> Sequence[str]:
        """Where files that the engine sees under these names lie on this host."""
        return paths
