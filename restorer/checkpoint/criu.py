"""CRIU, run inside a box: one dump, one restore, each with a deadline and its log read for the reason of a failure.

CRIU hangs for ever on a short image and says nothing of a changed one, so callers verify first; it ignores SIGTERM in
mid-restore, so a call that outlasts its deadline is ended together with its box by the caller. pre-dump is never used
(it leaves the donor undumpable on kernels without soft-dirty tracking), nor is a parent image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from restorer.boxes.box import Box, Output
from restorer.checkpoint import kerndat
from restorer.errors import Environment, ToolFailed

GHOST_LIMIT = 256 << 20
"""Bytes up to which an open file that has no name any more is put into the images."""
COMMON = ("--file-locks", "--link-remap", "--ghost-limit", f"{GHOST_LIMIT >> 20}M", "--manage-cgroups=ignore", "-v1")
"""Options of every dump and restore. cgroups are the host's business, not the snapshot's."""
_TAIL = 20


class Criu:
    """One CRIU binary.

    Args:
        binary: its path.
        timeout_s: deadline of each call, in seconds.
        kept: what it knows of this kernel, from :func:`restorer.checkpoint.kerndat.kept`.
    """

    def __init__(self, binary: Path, timeout_s: float, kept: Path | None = None) -> None:
        self.binary, self.kept = binary, kept
        self._timeout_s = timeout_s

    async def dump(self, box: Box, pid: int, images: Path, options: Sequence[str]) -> None:
        """Dump the tree under ``pid`` (a pid inside the box) and leave it stopped: the caller lets it run on, or kills it.

        Raises:
            ToolFailed: CRIU refused; the tree runs on. ToolHung: it did not end in time. Environment: the disk is full.
        """
        argv = ["dump", "-t", str(pid), "-D", str(images), "-W", str(box.work), "-o", "dump.log", "--leave-stopped"]
        await self._run(box, [*argv, *COMMON, *options], box.work / "dump.log")

    async def restore(self, box: Box, images: Path, options: Sequence[str]) -> None:
        """Restore into an empty box; returns once the tree runs.

        Raises:
            ToolFailed, ToolHung: the box holds a part of a tree and must be killed.
        """
        argv = ["restore", "-D", str(images), "-W", str(box.work), "-o", "restore.log", "--restore-detached"]
        await self._run(box, [*argv, *COMMON, *options], box.work / "restore.log")

    async def _run(self, box: Box, arguments: Sequence[str], log: Path) -> None:
        argv = kerndat.shown(self.kept, [str(self.binary), *arguments])
        output = await box.run(argv, timeout_s=self._timeout_s, name=str(self.binary))
        if output.rc != 0:
            raise failure(f"criu {arguments[0]}", output, log)


def failure(tool: str, output: Output, log: Path) -> ToolFailed | Environment:
    """Why a dump or restore failed, as CRIU's own log has it."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "RLIMIT_NOFILE" not in line]
    except OSError:
        lines = output.text.splitlines()
    tail = "\n".join(lines[-_TAIL:])
    if "No space left on device" in tail:
        return Environment(f"disk full while criu wrote images: {tail}")
    return ToolFailed(tool, output.rc, tail or output.text)
