"""The GPUs of this host: which are free, who has which, and how a snapshot's GPUs map onto them.

One lease for each GPU, held by a box, from before its engine starts until after its end. What a GPU has free is asked of the
driver each time: others use it too, and an engine's memory is back only a moment after its end. Knows boxes by id alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.manifest import GpuFacts, GpuState
from restorer.errors import Environment
from restorer.gpu.cuda import Cuda

log = logging.getLogger("rewake.restorer")

_POLL_S = 0.1
_END_LOCK_S, _END_S = 5.0, 20.0
_GIB = 1 << 30
MARGIN_BYTES = 512 << 20
"""Device memory beside an engine's own: contexts of the driver and of the helper."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs that one box has."""

    uuids: tuple[str, ...]
    indices: tuple[int, ...]
    """Their numbers in the order of the bus, as CUDA_VISIBLE_DEVICES wants them."""
    free_bytes: int
    """Free on the fullest of them when they were leased."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a box wants of its GPUs."""

    bytes: int = 0
    """Free on each."""
    prefer: tuple[str, ...] = ()
    """UUIDs to take if they can be had: no state has to be moved to another GPU then."""
    only: bool = False
    """No others will do: a living process cannot leave its GPUs."""


@dataclass(slots=True)
class Gpus:
    """The leases. Methods are called from one event loop.

    Args:
        facts: None: there is no driver here.
    """

    cuda: Cuda
    facts: GpuFacts | None
    _holders: dict[str, str] = field(default_factory=dict)
    """UUID -> id of the box that has it."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for, such as freeing memory. It must not raise."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def lease(
        self, box: str, count: int, *, need_bytes: int, wait_s: float, prefer: Sequence[str] = (), only: bool = False
    ) -> Placement:
        """Take ``count`` GPUs for a box, each with ``need_bytes`` free; waits for them, at most ``wait_s`` seconds.

        Args:
            prefer, only: as in :class:`Need`.

        Raises:
            Environment: not in time, or never here; says what each GPU lacks.
        """
        known = self._known()
        if count > len(known):
            raise Environment(f"{count} GPUs are asked for, and this host has {len(known)}; lower engine.gpu.count")
        wanted = [uuid for uuid in known if uuid in prefer] if only else self._alike(prefer)
        if count > len(wanted) and not only:
            raise Environment(f"{count} GPUs of its donor's model are asked for, and this host has {len(wanted)}")
        if count > len(wanted):
            raise Environment(
                f"it can run on {', '.join(prefer)} alone, which this host has not; with driver 580 or later any would do"
            )
        deadline = time.monotonic() + wait_s
        while True:
            found = await self.cuda.memory()
            # Then the emptiest, to a gibibyte: strangers use GPUs too, and take no lease.
            order = sorted(wanted, key=lambda uuid: (uuid not in prefer, -int(found.get(uuid, {}).get("free", 0)) // _GIB))
            lacks = {uuid: self._lack(uuid, found.get(uuid), need_bytes) for uuid in order}
            fit = [uuid for uuid in order if lacks[uuid] is None and uuid not in self._holders][:count]
            if len(fit) == count:
                for uuid in fit:
                    self._holders[uuid] = box
                return self._placement(fit, found)
            if time.monotonic() > deadline:
                why = "; ".join(f"GPU {at}: {lack}" for at, uuid in enumerate(known) if (lack := lacks.get(uuid)) is not None)
                raise Environment(
                    f"no {count} free GPU(s) within {wait_s:g} s: {why}; park what uses them, or raise engine.gpu.wait_s"
                )
            await asyncio.sleep(_POLL_S)

    async def share(self, uuids: Sequence[str]) -> Placement:
        """The GPUs of a box that is off them for now, for one that takes its place for a moment; the lease stays as it is."""
        return self._placement(list(uuids), await self.cuda.memory())

    async def leave(self, uuids: Sequence[str], pids: Sequence[int]) -> None:
        """Take processes that are about to be killed off their GPUs, as far as they let it be done, and their state fits here."""
        mine = await self.cuda.find(pids)
        if not mine:
            return
        found = await self.cuda.memory()
        # What cannot be told apart counts as theirs: the host must not run out of memory for the sake of an orderly end.
        held = sum(int(one["total"]) - int(one["free"]) for uuid, one in found.items() if uuid in uuids)
        if held > memory()[1] // 2:
            log.warning("%d bytes of GPU state do not fit into this host's memory; their processes are ended without", held)
            return
        await self.cuda.quiet(mine, lock_s=_END_LOCK_S, within_s=_END_S)

    def adopt(self, box: str, uuids: Sequence[str]) -> None:
        """Take over the leases of a box that outlived its restorer."""
        for uuid in uuids:
            self._holders[uuid] = box

    def release(self, box: str) -> None:
        """Give back whatever a box has. Idempotent."""
        for uuid in [uuid for uuid, holder in self._holders.items() if holder == box]:
            del self._holders[uuid]

    def taken(self, uuid: str) -> bool:
        """Some box has this GPU."""
        return uuid in self._holders

    def held(self, box: str) -> tuple[str, ...]:
        """UUIDs that a box has."""
        return tuple(uuid for uuid in self._known() if self._holders.get(uuid) == box)

    def _known(self) -> list[str]:
        if self.facts is None or not self.facts.gpus:
            raise Environment("engine.gpu.count asks for a GPU, and the driver on this host knows none; run `rewake doctor`")
        return [gpu.uuid for gpu in self.facts.gpus]

    def _alike(self, uuids: Sequence[str]) -> list[str]:
        """The GPUs here of the same model as some of these; all, if none of these is here: then hosts were compared."""
        known = (self.facts.gpus if self.facts else None) or ()
        models = {(gpu.name, gpu.memory_bytes, gpu.compute) for gpu in known if gpu.uuid in uuids}
        return [gpu.uuid for gpu in known if not models or (gpu.name, gpu.memory_bytes, gpu.compute) in models]

    def _placement(self, uuids: list[str], found: dict[str, dict[str, Any]]) -> Placement:
        known = self._known()
        order = sorted(uuids, key=known.index)
        return Placement(tuple(order), tuple(map(known.index, order)), min(int(found[uuid]["free"]) for uuid in order))

    def _lack(self, uuid: str, found: dict[str, Any] | None, need_bytes: int) -> str | None:
        if (holder := self._holders.get(uuid)) is not None:
            return f"leased to {holder}"
        if found is None:
            return "the driver does not tell its memory"
        if found["free"] < need_bytes:
            users = ", ".join(map(str, found["pids"])) or "nobody that the driver names"
            return f"{found['free'] / _GIB:.1f} GiB free of {need_bytes / _GIB:.1f} GiB needed (used by {users})"
        return None


def mapping(state: GpuState, placement: Placement, here: GpuFacts) -> list[tuple[str, str]]:
    """(UUID at the checkpoint, UUID now) of every GPU, with the donor's on the leased ones; empty when nothing moves.

    All or none: the driver refuses a map that leaves one of its GPUs out.

    Raises:
        Environment: another number of GPUs.
    """
    now = [gpu.uuid for gpu in here.gpus or ()]
    if len(now) != len(state.uuids) or len(placement.uuids) != len(state.used):
        raise Environment(f"the snapshot knew {len(state.uuids)} GPUs and used {len(state.used)}; this host has {len(now)}")
    pairs = dict(zip(state.used, placement.uuids, strict=True))
    others = [uuid for uuid in now if uuid not in placement.uuids]
    rest = [uuid for uuid in state.uuids if uuid not in pairs]
    for uuid in [uuid for uuid in rest if uuid in others]:
        pairs[uuid] = uuid
        others.remove(uuid)
    pairs.update(zip([uuid for uuid in rest if uuid not in pairs], others, strict=True))
    return [] if all(old == new for old, new in pairs.items()) else [(uuid, pairs[uuid]) for uuid in state.uuids]


def memory() -> tuple[int, int]:
    """(bytes of memory that this host has, bytes that it can give)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total, available
