"""The spans of a job that somebody traces: the job itself, and each of its stages.

Made when the job has ended, from its clock; :mod:`restorer.operations.worker` leaves them in the store. Sends nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from policies.replica import Replica, Stage, State
from policies.tracing import Context, Span
from policies.wire import OperationState
from restorer.coordination.jobs import Claim, Outcome

_MS_NS, _SECOND_NS = 1_000_000, 1_000_000_000
_GIVEN_BACK = "given back"


def of_job(
    claim: Claim, host: str, stages: Sequence[Stage], begun_ns: int, ended_ns: int, end: tuple[Outcome, Replica | None] | None
) -> list[Span]:
    """All spans of one claim of a job; none when nobody traces it.

    Args:
        end: how it was settled; None: it was not, and may be claimed again.
    """
    parent = Context.of(claim.job.trace)
    if parent is None or not parent.sampled:
        return []
    own = Context(parent.trace, secrets.token_hex(8))
    job, (outcome, record) = claim.job, end or (None, None)
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.model": job.model,
        "host.name": host,
        "rewake.job": job.id,
        "rewake.attempt": claim.attempts,
        "rewake.result": _GIVEN_BACK if outcome is None else outcome.state,
        **({} if record is None else _facts(record)),
    }
    error = _GIVEN_BACK if outcome is None else outcome.detail if outcome.state is not OperationState.SUCCEEDED else ""
    root = Span(
        name=f"{job.kind} {job.replica or job.model}",
        context=own,
        parent=parent,
        kind="consumer",
        begun_ns=begun_ns,
        ended_ns=ended_ns,
        attributes=attributes,
        error=error.partition("\n")[0],
    )
    return [root, *_stages(stages, own), *_admission(record, stages, own, ended_ns)]


def _stages(stages: Sequence[Stage], parent: Context) -> Iterator[Span]:
    for stage in stages:
        begun_ns = stage.begun_ms * _MS_NS
        moved = {"rewake.bytes": stage.bytes, "rewake.tier": stage.tier}
        yield Span(
            name=stage.name,
            context=Context(parent.trace, secrets.token_hex(8)),
            parent=parent,
            begun_ns=begun_ns,
            ended_ns=begun_ns + int(stage.seconds * _SECOND_NS),
            attributes={name: value for name, value in moved.items() if value is not None},
        )


def _admission(record: Replica | None, stages: Sequence[Stage], parent: Context, ended_ns: int) -> Iterator[Span]:
    """From the end of the last stage until traffic was open."""
    if record is None or record.state is not State.ADMITTED:
        return
    last_ns = max((stage.begun_ms * _MS_NS + int(stage.seconds * _SECOND_NS) for stage in stages), default=ended_ns)
    yield Span(
        name="admit",
        context=Context(parent.trace, secrets.token_hex(8)),
        parent=parent,
        begun_ns=min(last_ns, ended_ns),
        ended_ns=ended_ns,
        attributes={"rewake.incarnation": record.incarnation},
    )


def _facts(record: Replica) -> dict[str, str]:
    found = {
        "rewake.replica": record.id,
        "rewake.incarnation": record.incarnation,
        "rewake.state": str(record.state),
        "rewake.start": record.start or "",
        "rewake.snapshot": record.snapshot or "",
    }
    return {name: value for name, value in found.items() if value}
