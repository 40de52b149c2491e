"""Which backends there are on a host: :func:`build` finds what each needs; ``engine.backend`` of a model names one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from policies.restoring import Restorer
from restorer.adapters.engines import HttpEngine
from restorer.boxes.box import Box
from restorer.checkpoint.backend import Backend, Can
from restorer.checkpoint.criu import Criu
from restorer.checkpoint.runc import Runc

__all__ = ["Backend", "Can", "OwnCriu", "Runc", "Sleep", "build"]


class OwnCriu(Backend):
    """CRIU itself, run inside the box.

    Args:
        criu: None: it does not work here.
        capability: how it was found, or what is missing.
    """

    name = "criu"
    can = Can(snapshot=True, fill=True, clone=True)

    def __init__(self, criu: Criu | None, capability: str) -> None:
        self._criu = criu
        self._capability = capability

    def obstacle(self) -> str | None:
        return self._capability if self._criu is None else None

    def describe(self) -> str:
        return self._capability

    async def dump(self, box: Box, pid: int, images: Path, engine: HttpEngine) -> None:
        await self._tool().dump(box, pid, images, engine.dump_options)

    async def restore(self, box: Box, engine: HttpEngine, images: Path, options: Sequence[str]) -> None:
        await self._tool().restore(box, images, options)

    def _tool(self) -> Criu:
        assert self._criu is not None, "nobody asks for it where there is an obstacle"
        return self._criu


class Sleep(Backend):
    """Sleep and wake in place."""

    name = "sleep"
    can = Can(sleep=True)

    def describe(self) -> str:
        return "a stopped engine sleeps by its own API until it is asked for again"


def build(config: Restorer, criu: Criu | None, capability: str) -> Mapping[str, Backend]:
    """Every backend by its name."""
    runc = shutil.which(config.runc)
    missing = f"{config.runc} is not installed; `rewake doctor` says how to get runc 1.1 or newer"
    said = missing if runc is None else f"{runc}, with CRIU: {capability}"
    found: tuple[Backend, ...] = (
        OwnCriu(criu, capability),
        Runc(None if runc is None else Path(runc), criu, said, config.criu_timeout_s),
        Sleep(),
        Backend(),
    )
    return {backend.name: backend for backend in found}
