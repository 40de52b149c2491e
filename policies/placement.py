"""Which host takes a start or a snapshot: who can at all, who can best, and how long the others leave it to those.

Restorers choose for themselves. All of them look at one queue, know each other's reports and judge by this one rule, so that
they agree without asking; where a report is late and they do not, the claim decides, and all that was lost is a better place.
Nobody is waited for long: a host that can do it worse takes a job that those before it have left alone for :func:`ranking`'s
``lag_s``. Knows nothing of leases, nor of who runs where besides what records and reports say.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from policies.config import Model
from policies.failures import Class
from policies.replica import TERMINAL, Replica
from policies.wire import HostReport, JobKind

STEP_S = 0.25
"""What a host leaves to the one before it that can do it equally well: enough for a claim, too short to be felt."""
TIER_S = 2.0
"""What it leaves to one that can do it better: about a restore, so that a moment's lack of room does not mean a cold start."""
MOST_S = 6.0
NOBODY_S = 5.0
"""When no host can do it, one says so after this long: the one that could may be about to report."""
AVOID_S = 30.0
"""A host at which a job failed leaves it to the others for this long."""
ELSEWHERE: tuple[Class, ...] = ("host", "tool", "environment")
"""Failures that say something of the host where they happened: another one may do."""


class Tier(enum.IntEnum):
    """What a host would start from; the lower the better."""

    RESTING = 0
    """An engine of the model sleeps in its memory."""
    HERE = 1
    """A snapshot that fits lies on its disk."""
    PULL = 2
    """It may pull one from a remote."""
    COLD = 3


class Rank(NamedTuple):
    """One host's place in the order of those that may take a job."""

    host: str
    lag_s: float
    """How long a job must have been due before this host takes it."""


def named(model: Model, host: str) -> bool:
    """The model's settings let it run on this host."""
    return not model.engine.hosts or any(fnmatchcase(host, pattern) for pattern in model.engine.hosts)


def tier(name: str, model: Model, report: HostReport) -> Tier:
    """What a start of the model on this host would start from."""
    if name in report.resting:
        return Tier.RESTING
    if model.engine.backend in report.obstacles:
        return Tier.COLD
    if _has(name, report):
        return Tier.HERE
    return Tier.PULL if report.pulls else Tier.COLD


def lacks(name: str, model: Model, report: HostReport, kind: JobKind = JobKind.START) -> list[str]:
    """Everything for whose sake this host cannot do a job of this kind, now or later; empty: it can."""
    found = []
    if not named(model, report.host):
        found.append(f"engine.hosts names {', '.join(model.engine.hosts)}")
    if report.models is not None and name not in report.models:
        found.append("its configuration has no such model")
    if model.engine.gpu.count > report.gpus:
        found.append(f"it has {report.gpus} GPUs of {model.engine.gpu.count}")
    obstacle = report.obstacles.get(model.engine.backend)
    if kind is JobKind.SNAPSHOT and obstacle is not None:
        found.append(obstacle)
    if kind is JobKind.START and model.on_no_snapshot == "reject" and _snapshots(model):
        found += [] if tier(name, model, report) < Tier.COLD else _unfit(name, report) or [obstacle or "it has no snapshot of it"]
    return found


def ranking(
    name: str, model: Model, reports: Iterable[HostReport], replicas: Iterable[Replica], kind: JobKind = JobKind.START
) -> list[Rank]:
    """The hosts that may take a job, the best one first; if none can, all of them, for one to say so.

    A start goes where GPUs are free, then by :class:`Tier`, then where there is room for another start now, then where the
    fewest replicas of the model are. A snapshot is rather made where there is none that fits.
    """
    known = sorted(reports, key=lambda report: report.host)
    able = [report for report in known if not lacks(name, model, report, kind)]
    if not able:
        return [Rank(report.host, min(NOBODY_S + n * STEP_S, NOBODY_S + MOST_S)) for n, report in enumerate(known)]
    here = Counter(record.host for record in replicas if record.model == name and record.state not in TERMINAL)

    def worth(report: HostReport) -> tuple[bool, int, bool]:
        what = int(_has(name, report)) if kind is JobKind.SNAPSHOT else int(tier(name, model, report))
        return report.free_gpus < model.engine.gpu.count, what, report.starting >= report.parallel_starts

    able.sort(key=lambda report: (worth(report), here[report.host], report.running, report.host))
    ranks: list[Rank] = []
    for n, report in enumerate(able):
        lag_s = 0.0
        if n:
            lag_s = ranks[-1].lag_s + (STEP_S if worth(report) == worth(able[n - 1]) else TIER_S)
        ranks.append(Rank(report.host, min(lag_s, MOST_S)))
    return ranks


def others(
    name: str,
    model: Model,
    reports: Iterable[HostReport],
    besides: Collection[str],
    kind: JobKind = JobKind.START,
    worst: Tier = Tier.COLD,
) -> list[str]:
    """Hosts that can do a job of this kind, ``besides`` some, from ``worst`` or something better."""
    able = [report for report in reports if report.host not in besides and not lacks(name, model, report, kind)]
    return [report.host for report in able if tier(name, model, report) <= worst]


def lacking(name: str, model: Model, reports: Iterable[HostReport], kind: JobKind = JobKind.START) -> dict[str, str]:
    """What each host lacks; empty if one of them lacks nothing."""
    found = {report.host: ", ".join(lacks(name, model, report, kind)) for report in reports}
    return dict(sorted(found.items())) if all(found.values()) else {}


def nobody(name: str, model: Model, reports: Iterable[HostReport], kind: JobKind = JobKind.START) -> str:
    """The same in one line."""
    return "; ".join(f"{host}: {why}" for host, why in lacking(name, model, reports, kind).items())


def _has(name: str, report: HostReport) -> bool:
    return any(one.model == name and one.fits for one in report.snapshots)


def _unfit(name: str, report: HostReport) -> list[str]:
    mine = [one for one in report.snapshots if one.model == name]
    return [f"snapshot {one.id}: {one.quarantined or '; '.join(one.mismatches) or 'it does not fit'}" for one in mine]


def _snapshots(model: Model) -> bool:
    """Its backend restores from snapshots; the others start cold whatever the settings say."""
    return model.engine.backend in ("criu", "runc")
