"""Models that exclude each other because they share a GPU: who is on, who is next, who has to go.

That no more than :attr:`Group.members` models run at once is the store's to guarantee, and so is the order of the queue. Here
is the judgement: whether a model that waits for a place may take one from a model that has it, and from which. It balances
two evils. *Thrash*: every swap costs two starts, so a member serves for :func:`turn_s` before a busy one is displaced.
*Starvation*: whoever has waited for :attr:`Group.max_wait_s` ends the longest turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.scalars import Count, PositiveSeconds, Section

QUIET_S = 2.0
"""A member without a request for less than this is not idle: its client may be between two requests."""
TURN_COSTS = 4.0
"""A busy member's turn, as a multiple of what its swap costs: at most a fifth of the time goes into swapping."""


class Group(Section):
    """Models (they name their group themselves) of which only ``members`` run at once."""

    members: Count = 1
    """Models of the group that may have replicas at the same time."""
    min_tenure_s: PositiveSeconds = 10.0
    """A member that was let in serves at least this long before another may displace it: no thrash."""
    max_wait_s: PositiveSeconds = 60.0
    """A model that has waited this long is let in next, however busy the members are: no starvation."""


@dataclass(frozen=True, slots=True)
class Member:
    """A model that has a place."""

    model: str
    serving_s: float | None
    """Seconds since it was admitted; None: a start, or a snapshot, of it is under way."""
    quiet_s: float
    """Seconds since it last had a request held or in flight."""
    leaving: bool = False
    """All its replicas are about to stop."""
    pinned: bool = False
    kept: bool = False
    """It is to be warm now, by ``keep`` or by its schedule."""
    cost_s: float = 0.0
    """What it takes to start it again, as measured; 0 when it never was."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A model that waits for a place."""

    model: str
    waited_s: float
    yields: bool = False
    """Nobody waits: it is to be kept warm."""
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Displace:
    """Drain and stop all replicas of ``victim``."""

    victim: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stay:
    """Nobody goes for this waiter now."""

    reason: str


def turn_s(group: Group, member: Member, waiter: Waiter) -> float:
    """How long ``member`` may serve, if it is busy, before ``waiter`` may have its place."""
    return max(group.min_tenure_s, TURN_COSTS * (member.cost_s + waiter.cost_s))


def decide(group: Group, model: str, members: Sequence[Member], queue: Sequence[Waiter]) -> Displace | Stay:
    """What to do for ``model``, which waits; first match wins.

    1. Places that are free, or are being freed, suffice for it and all before it: stay.
    2. Nobody may be displaced (pinned, not serving yet, shorter than the tenure): stay. Who yields displaces only who is quiet
       and not to be kept itself.
    3. A member is quiet: displace it; rather one that need not be kept, rather one that is cheap to bring back.
    4. A busy member's turn is over, or ``model`` has waited for ``max_wait_s``: displace it; rather a cheap one.
    5. Stay.

    Args:
        members: models that have a place; ``model`` itself only if it is leaving.
        queue: models that wait, the next one first.
    """
    others = [member for member in members if member.model != model]
    rank, waiter = next((n, waiter) for n, waiter in enumerate(queue) if waiter.model == model)
    if rank < group.members - len(others) + sum(member.leaving for member in others):
        return Stay("a place is about to be free")
    settled = [m for m in others if not m.leaving and not m.pinned and m.serving_s is not None]
    movable = [m for m in settled if m.serving_s is not None and m.serving_s >= group.min_tenure_s]
    quiet = [m for m in movable if m.quiet_s >= QUIET_S and not (waiter.yields and m.kept)]
    if quiet:
        return _displace(quiet, model, "nobody used it")
    if waiter.yields or not movable:
        return Stay(_why(others, settled, movable))
    if waiter.waited_s >= group.max_wait_s:
        return _displace(movable, model, f"that had waited for {waiter.waited_s:.0f} s")
    over = [m for m in movable if m.serving_s is not None and m.serving_s >= turn_s(group, m, waiter)]
    if over:
        return _displace(over, model, "its turn was over")
    return Stay("every member is busy, and in the middle of its turn")


def wait_s(group: Group, model: str, members: Sequence[Member], queue: Sequence[Waiter]) -> float:
    """Seconds until ``model`` may be expected to have a place, if everybody goes on as now. Takes what :func:`decide` takes.

    Those that are leaving count as gone: how long a drain takes is for their clients to say. 0 for a model that nothing can be
    said of: it is not in the queue, or nobody can ever be displaced for it.
    """
    others = [member for member in members if member.model != model]
    rank = next((n for n, waiter in enumerate(queue) if waiter.model == model), None)
    if rank is None:
        return 0.0
    behind = rank - (group.members - len(others) + sum(member.leaving for member in others))
    turns = sorted(_left_s(group, member, queue[rank]) for member in others if not member.leaving and not member.pinned)
    if behind < 0 or not turns:
        return 0.0
    # Each place goes round: to the one before, who serves at least its tenure, and only then to the next.
    rounds, nth = divmod(behind, len(turns))
    return turns[nth] + rounds * group.min_tenure_s


def _left_s(group: Group, member: Member, waiter: Waiter) -> float:
    serving_s = member.serving_s or 0.0
    tenure_s = group.min_tenure_s - serving_s
    if member.quiet_s >= QUIET_S:
        return max(0.0, tenure_s)
    turn = min(turn_s(group, member, waiter) - serving_s, group.max_wait_s - waiter.waited_s)
    return max(0.0, tenure_s, turn)


def _displace(candidates: Sequence[Member], model: str, why: str) -> Displace:
    return Displace(min(candidates, key=_dearness).model, f"displaced by {model}: {why}")


def _dearness(member: Member) -> tuple[bool, float, float, str]:
    return member.kept, member.cost_s, -(member.serving_s or 0.0), member.model


def _why(others: Sequence[Member], settled: Sequence[Member], movable: Sequence[Member]) -> str:
    if movable:
        return "every member is in use, or to be kept"
    if settled:
        return "no member has served for long enough"
    if others and all(member.pinned for member in others):
        return "every place is pinned"
    return "every other member is on its way in or out, or pinned"
