"""Why a model, or one of its replicas, is not what it should be: the last attempts, whose fault each was, what mends it.

Put together from what is on record, for people: the console, ``rewake why``. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from policies.journal import Trail
from policies.replica import Replica, State
from policies.wire import Failure, HostReport

MAX_TRIES = 8


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Try(_Record):
    """One attempt that did not go as it should have."""

    id: str
    """Of its journal; ``rewake journal ID`` has every step."""
    at_ms: int
    host: str
    replica: str
    kind: str
    """``start`` or ``snapshot``."""
    number: int
    """1 for the first attempt of its job."""
    outcome: str
    """``succeeded`` after a failed restore means: by a cold start."""
    step: str
    """How far it got, or which step failed, in words."""
    fault: str
    """Whose fault: host, snapshot, transient, tool, environment; empty: nobody judged."""
    quote: str
    """The line that decided."""
    remedy: str
    said: str
    """All that was said."""
    logged: bool = False
    """It came as far as an engine, so there may be a log of it."""
    past: bool = False
    """The same was done again since, and did not fail: it is not why things are as they are."""


class Unfit(_Record):
    """A snapshot that is not used."""

    id: str
    host: str
    reason: str
    """A line for each."""


class Story(_Record):
    """The whole of it."""

    model: str
    state: str
    """Of the model, as a whole."""
    brief: str
    """In one line; empty: nothing is wrong."""
    next_try_s: float | None
    """Until it may be started again without an operator's asking; None: nothing stands against it."""
    replicas: tuple[Replica, ...]
    tries: tuple[Try, ...]
    """The latest first; those that are past after those that are not."""
    unfit: tuple[Unfit, ...]
    hosts: tuple[str, ...]
    """Those whose restorers report; none: nothing can be started."""
    lacking: dict[str, str]
    """What each of them lacks to start it; empty: one of them can."""


def tell(
    model: str,
    state: str,
    replicas: Iterable[Replica],
    failure: tuple[Failure, float] | None,
    trails: Iterable[Trail],
    hosts: Sequence[HostReport],
    *,
    replica: str = "",
    barred: Mapping[str, str] = MappingProxyType({}),
    lacking: Mapping[str, str] = MappingProxyType({}),
) -> Story:
    """Put it together.

    Args:
        failure: what stands against the model, and for how many more seconds.
        trails: of any model, the latest first.
        replica: a slot; tells of it alone.
        barred: slots that whoever tells this cannot reach, and why.
        lacking: what each host lacks to start the model, if none can.
    """
    mine = [one for one in replicas if one.model == model and replica in ("", one.id)]
    tries = _tries(one for one in trails if one.model == model and replica in ("", one.replica))
    now = [one for one in tries if not one.past]
    told = [one for one in mine if one.reason and one.state in (State.FAILED, State.QUARANTINED)]
    shut = [f"{one.id}: {barred[one.id]}" for one in mine if one.id in barred]
    brief = now[0].quote if now else failure[0].detail if failure else told[0].reason if told else "".join(shut[:1])
    return Story(
        model=model,
        state=state,
        brief=brief,
        next_try_s=None if failure is None else round(failure[1], 1),
        replicas=tuple(mine),
        tries=tries,
        unfit=tuple(
            Unfit(id=one.id, host=host.host, reason=one.quarantined or "\n".join(one.mismatches))
            for host in hosts
            for one in host.snapshots
            if one.model == model and not one.fits
        ),
        hosts=tuple(sorted(host.host for host in hosts)),
        lacking=dict(lacking),
    )


def _tries(trails: Iterable[Trail]) -> tuple[Try, ...]:
    """Those that went wrong, of trails that come the latest first."""
    well: set[tuple[str, str]] = set()
    found: list[Try] = []
    for one in trails:
        if _went_wrong(one):
            found.append(_try(one, past=(one.kind, one.replica) in well))
        elif one.outcome == "succeeded":
            well.add((one.kind, one.replica))
    return tuple(sorted(found, key=lambda tried: tried.past)[:MAX_TRIES])


def _went_wrong(trail: Trail) -> bool:
    return trail.outcome in ("failed", "interrupted") or trail.verdict is not None


def _try(trail: Trail, *, past: bool) -> Try:
    verdict = trail.verdict
    broken = next((step for step in trail.steps if step.error), None)
    said = trail.detail or (broken.error if broken is not None and broken.error else "")
    return Try(
        id=trail.id,
        at_ms=trail.at_ms,
        host=trail.host,
        replica=trail.replica,
        kind=trail.kind,
        number=trail.attempt,
        outcome=trail.outcome or "under way",
        step=f"in {broken.name!r}" if broken is not None else trail.last,
        fault="" if verdict is None else verdict.cls,
        quote=verdict.evidence if verdict is not None else said.split("\n", 1)[0],
        remedy="" if verdict is None else verdict.remedy.replace("MODEL", trail.model),
        said=said,
        logged=bool(trail.steps),
        past=past,
    )
