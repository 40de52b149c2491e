"""runc, run inside a box: an engine as an OCI container of its own, captured and restored through runc.

A container within a box has namespaces of its own for processes and mounts below the box's, and the box's network: so whatever
becomes of runc or of CRIU behind it, the end of the box is the end of all of it, save for the control groups, which the box's
record names. CRIU's options go by a file, since runc knows few of them: what stands there overrides what runc asks for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from restorer.adapters.engines import HttpEngine
from restorer.boxes import cgroups
from restorer.boxes.box import Box, Output
from restorer.checkpoint import bundle, kerndat
from restorer.checkpoint.backend import Backend, Can
from restorer.checkpoint.criu import COMMON, Criu, failure
from restorer.errors import ToolFailed
from restorer.procfs import inventory

ROOT_PID = 1
"""A container's first process, as its own namespace numbers it."""
_CONTAINER = "engine"
"""Its name; each box has a state folder of its own."""
_START_S = 60.0


class Runc(Backend):
    """Containers by runc.

    Args:
        binary: None: it does not work here.
        criu: the CRIU that runc is to use.
        capability: how both were found, or what is missing.
        timeout_s: deadline of a capture or restore, in seconds.
    """

    name = "runc"
    can = Can(snapshot=True, fill=True, contain=True, clone=True)
    private = ("/tmp",)

    def __init__(self, binary: Path | None, criu: Criu | None, capability: str, timeout_s: float) -> None:
        self._binary, self._criu = binary, criu
        self._capability = capability
        self._timeout_s = timeout_s

    def obstacle(self) -> str | None:
        return None if self._binary and self._criu else self._capability

    def describe(self) -> str:
        return self._capability

    async def launch(self, box: Box, engine: HttpEngine, visible: Sequence[int]) -> int:
        await asyncio.to_thread(self._prepare, box, engine, ())
        output = await self._run(box, ["run", "--detach", "--bundle", str(_bundle(box)), _CONTAINER], _START_S)
        if output.rc != 0:
            raise ToolFailed("runc run", output.rc, output.text)
        return ROOT_PID

    async def dump(self, box: Box, pid: int, images: Path, engine: HttpEngine) -> None:
        _write_options(box, ("--leave-stopped", *COMMON, *engine.dump_options))
        argv = ["checkpoint", "--image-path", str(images), "--work-path", str(box.work), "--leave-running", _CONTAINER]
        output = await self._run(box, argv, self._timeout_s)
        if output.rc != 0:
            raise failure("runc checkpoint", output, box.work / "dump.log")

    async def restore(self, box: Box, engine: HttpEngine, images: Path, options: Sequence[str]) -> None:
        await asyncio.to_thread(self._prepare, box, engine, options)
        argv = ["restore", "--detach", "--bundle", str(_bundle(box)), "--image-path", str(images), "--work-path", str(box.work)]
        output = await self._run(box, [*argv, _CONTAINER], self._timeout_s)
        if output.rc != 0:
            raise failure("runc restore", output, box.work / "restore.log")
        # What CRIU forks is where CRIU is, and runc moves only the process that it knows as CRIU.
        await asyncio.to_thread(cgroups.gather, cgroups.name(box.id), lambda: _tree(box))

    def located(self, engine: HttpEngine, paths: Sequence[str]) -> Sequence[str]:
        given = engine.model.engine.bundle
        return paths if given is None else bundle.located(Path(given), paths)

    def _prepare(self, box: Box, engine: HttpEngine, options: Sequence[str]) -> None:
        """Make the bundle, and note the control group before there is one."""
        group, settings = cgroups.name(box.id), engine.model.engine
        box.remember(cgroup=group)
        bundle.write(
            _bundle(box),
            given=None if settings.bundle is None else Path(settings.bundle),
            private=box.private,
            mountpoint=box.mountpoint,
            argv=engine.argv(),
            env=engine.environment(box.mountpoint),
            settings=engine.settings(),
            named=(*engine.argv(), *engine.settings().values(), *engine.model.weights),
            group=group,
            criu_config=_options(box),
        )
        _write_options(box, (*COMMON, *options))
        if self._criu is not None:
            # runc asks PATH for a program of this name.
            (box.work / "bin").mkdir()
            (box.work / "bin" / "criu").symlink_to(self._criu.binary)

    async def _run(self, box: Box, arguments: Sequence[str], timeout_s: float) -> Output:
        assert self._binary is not None, "nobody asks for it where there is an obstacle"
        env = {**os.environ, "PATH": f"{box.work / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
        argv = [str(self._binary), "--root", str(box.folder / "runc"), *arguments]
        kept = None if self._criu is None else self._criu.kept
        return await box.run(kerndat.shown(kept, argv), timeout_s=timeout_s, env=env, name=str(self._binary))


def _tree(box: Box) -> Iterable[int]:
    root = box.host_pid(ROOT_PID)
    return () if root is None else inventory.numbers(root).values()


def _bundle(box: Box) -> Path:
    return box.folder / "bundle"


def _options(box: Box) -> Path:
    return box.work / "criu.conf"


def _write_options(box: Box, options: Sequence[str]) -> None:
    """As CRIU's configuration files have them: an option a line, its value behind it."""
    lines: list[str] = []
    for word in options:
        if word.startswith("--"):
            lines.append(word.removeprefix("--"))
        elif not word.startswith("-"):
            lines[-1] += f" {word}"
    _options(box).write_text("\n".join([*lines, ""]))
