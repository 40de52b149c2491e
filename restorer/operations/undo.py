"""How each step is undone, by its name on record: live, when an attempt fails, and by the next restorer, when this one dies.

Both go through :func:`unwind`, the latest step first, so that what is tried at every failure is what a crash relies on. Every
undo is idempotent, says what it found, and touches nothing but what is named. Knows nothing of why something failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from policies.journal import Outcome, Trail, Undo
from restorer.boxes.box import Box
from restorer.errors import RestorerError
from restorer.machine.host import Host, log
from restorer.records.journal import Journal
from restorer.records.stages import Stages

GONE = "it was gone already"


async def fresh_box(host: Host, stages: Stages) -> Box:
    """A box for one engine; whoever journals ``stages`` ends it when they fail."""
    id = host.boxes.reserve()
    # What is in the folder of boxes is known by its place: nothing of it outlives a restorer's start, whatever was noted.
    with stages.timed("take box", Undo(what="box", name=id)):
        return await host.boxes.take(id)


@contextlib.asynccontextmanager
async def unwinding(host: Host, journal: Journal) -> AsyncIterator[None]:
    """Whatever is raised within, all steps since the beginning are undone before it is raised on."""
    mark = journal.mark
    try:
        yield
    except BaseException:
        await asyncio.shield(unwind(host, journal, since=mark))
        raise


async def unwind(host: Host, journal: Journal, *, since: int = 0, kept: Mapping[str, str] | None = None) -> bool:
    """Undo the steps from number ``since`` on, the latest first. False: something could not be undone, and stays on record.

    Args:
        kept: id of a box that goes on -> why.
    """
    whole = True
    for step in [step for step in journal.pending if step.n >= since]:
        assert step.undo is not None
        try:
            journal.undone(step.n, await _UNDO[step.undo.what](host, step.undo.name, kept or {}))
        except (RestorerError, OSError) as error:
            whole = False
            log.error("%r of job %s cannot be undone, and is tried again later: %s", step.name, journal.trail.job, error)
    return whole


async def reconcile(host: Host, kept: Mapping[str, str]) -> Sequence[Trail]:
    """Undo what attempts that nobody works on any more have left, and close their journals. Done at start, and now and then.

    Args:
        kept: as for :func:`unwind`.
    """
    closed = []
    for journal in await asyncio.to_thread(host.journals.abandoned):
        whole = await unwind(host, journal, kept=kept)
        # It may have died between the last step and the end of its journal.
        succeeded = any(step.undo is not None and step.undo.name in kept for step in journal.trail.steps)
        outcome: Outcome = "succeeded" if succeeded else "interrupted"
        trail = await host.journals.end(journal, outcome if whole else None, f"the restorer ended {journal.trail.last}")
        log.warning("job %s, attempt %d: %s", trail.job, trail.attempt, summary(trail))
        closed.append(trail)
    return closed


def summary(trail: Trail) -> str:
    """What became of an interrupted attempt, in one line."""
    undone = [f"{step.name}: {step.undone}" for step in reversed(trail.steps) if step.undone is not None]
    return "; ".join([trail.detail or f"ended {trail.last}", *undone])


async def _thaw(host: Host, name: str, kept: Mapping[str, str]) -> str:
    box = host.boxes.known(name)
    if box is None or not box.alive:
        return GONE
    await asyncio.to_thread(box.let_run)
    return f"box {name} runs on"


async def _box(host: Host, name: str, kept: Mapping[str, str]) -> str:
    if name in kept:
        return f"box {name} goes on: {kept[name]}"
    box = host.boxes.known(name)
    if box is None:
        return GONE
    await host.discard(box)
    return f"box {name} was ended"


async def _staging(host: Host, name: str, kept: Mapping[str, str]) -> str:
    path = host.snapshots.root / name
    if not path.is_dir() or path.parent != host.snapshots.root:
        return GONE
    await asyncio.to_thread(shutil.rmtree, path)
    return f"{name} was removed"


_UNDO: Mapping[str, Callable[[Host, str, Mapping[str, str]], Awaitable[str]]] = {
    "box": _box,
    "thaw": _thaw,
    "staging": _staging,
}
