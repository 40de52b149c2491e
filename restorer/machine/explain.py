"""Why would a model start cold here, or from which snapshot would it be restored? Every reason at once, and what mends it.

Asks the same questions as a start does, of each snapshot, and does not stop at the first answer. Restores nothing, changes
nothing; knows nothing of how it is shown. Blocks: it may hash files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies import compat
from policies.compat import Mismatch
from policies.config import Config
from policies.floor import foretold
from policies.manifest import HostFacts, Manifest, Profile
from policies.matching import Comparison, compare
from restorer.errors import RestorerError, SnapshotError
from restorer.machine import profile
from restorer.machine.host import Host
from restorer.storage.integrity import MANIFEST, verify_files

_FILE = "bring the donor's version back, or make a new snapshot with `rewake snapshot create`"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot, explained."""

    manifest: Manifest
    signature: str
    reasons: tuple[Mismatch, ...]
    """Every reason why it is not restored here: trust, settings, host, files; each once."""
    allowed: tuple[Mismatch, ...]
    """Differences that a policy lets pass."""
    facts: tuple[Comparison, ...]
    """Every fact of this host that was compared, with its rule."""
    quarantined: str | None
    held: str | None
    """Why it is not restored just now."""
    floor: str | None
    """What a restore of it takes here at the least; None: this host has not been measured."""

    @property
    def fits(self) -> bool:
        return not self.reasons and self.quarantined is None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen to one model."""

    model: str
    fits: bool
    """Something could be restored here, if not just now."""
    chosen: str | None
    """The snapshot that a start would take now; None: it would be cold, or refused."""
    why: str
    """In one line."""
    snapshots: tuple[Snapshot, ...] = ()
    elsewhere: Mapping[str, Mapping[str, Sequence[Mismatch]]] = field(default_factory=dict)
    """Snapshot -> host of the fleet -> every reason why it cannot be restored there, as far as facts of hosts go."""


def explain(host: Host, target: str | None, fleet: Mapping[str, HostFacts]) -> list[Explanation]:
    """Every model that ``target`` means, and each of its snapshots.

    Args:
        target: a model, the id of a snapshot or the beginning of one; None: all of the configuration.
        fleet: host -> what it is.

    Raises:
        SnapshotError: there is no such model or snapshot.
    """
    config, manifests = host.config, host.snapshots.list()
    name = None if target is None else config.resolve(target)
    if target is None:
        models = list(dict.fromkeys([*config.models, *(manifest.profile.model for manifest in manifests)]))
    elif name is not None:
        models = [name]
    else:
        found = host.snapshots.load(target)
        models, manifests = [found.profile.model], [found]
    return [_model(host, model, [one for one in manifests if one.profile.model == model], fleet) for model in models]


def damaged(host: Host) -> dict[str, str]:
    """Folders whose manifest cannot be read: name -> why. Of which model they were, nobody knows."""
    faults = {}
    for path in sorted(host.snapshots.root.glob(f"*/{MANIFEST}")):
        try:
            host.snapshots.load(path.parent.name)
        except SnapshotError as error:
            faults[path.parent.name] = str(error)
    return faults


def _model(host: Host, name: str, manifests: Sequence[Manifest], fleet: Mapping[str, HostFacts]) -> Explanation:
    facts = host.facts_now()
    elsewhere = {
        manifest.id: {at: compat.host_mismatches(manifest, there, host.config.matching) for at, there in fleet.items()}
        for manifest in manifests
    }
    here: Profile | None = None
    obstacle = None
    if name not in host.config.models:
        obstacle = f"the configuration has no model {name!r}"
    else:
        try:
            here = profile.resolve(name, host.config.models[name], host.stamps, host.config.trust)
            obstacle = host.backend(name).obstacle()
        except RestorerError as error:
            obstacle = str(error)
    snapshots = tuple(_snapshot(host, manifest, here, facts) for manifest in manifests)
    fit = [one for one in snapshots if one.fits and one.held is None]
    chosen = None if obstacle is not None or not fit else max(fit, key=lambda one: one.manifest.created_ms)
    return Explanation(
        model=name,
        fits=obstacle is None and any(one.fits for one in snapshots),
        chosen=chosen.manifest.id if chosen else None,
        why=_why(host.config, name, obstacle, snapshots, chosen),
        snapshots=snapshots,
        elsewhere=elsewhere,
    )


def _snapshot(host: Host, manifest: Manifest, here: Profile | None, facts: HostFacts) -> Snapshot:
    standing = host.snapshots.verdicts.standing(manifest.id)
    distrust = host.distrust(manifest)
    settings = [] if here is None else list(compat.profile_mismatches(manifest.profile, here))
    compared = compare(manifest, facts, host.config.matching)
    hosts = compat.host_mismatches(manifest, facts, host.config.matching)
    files = [Mismatch(f"file {one.path}", one.expected, one.found, _FILE) for one in verify_files(manifest, host.stamps)]
    bytes_ = [
        Mismatch(f"object {one.path}", one.expected, one.found, "remove the snapshot, and pull or make it again")
        for one in host.snapshots.verify(manifest, full=False)
        if not distrust
    ]
    return Snapshot(
        manifest=manifest,
        signature=str(host.judge.judge(host.snapshots.folder(manifest.id), manifest)),
        reasons=tuple(dict.fromkeys([*distrust, *settings, *hosts, *files, *bytes_])),
        allowed=host.allowed(manifest, facts),
        facts=tuple(compared),
        quarantined=standing.quarantined,
        held=standing.held,
        floor=None if host.rates is None else foretold(manifest, host.rates),
    )


def _why(config: Config, name: str, obstacle: str | None, snapshots: Sequence[Snapshot], chosen: Snapshot | None) -> str:
    if chosen is not None:
        return f"would be restored from {chosen.manifest.id}"
    model = config.models.get(name)
    rejects = model is not None and model.on_no_snapshot == "reject"
    outcome = "would not be started" if model is None or rejects else "would start cold"
    if obstacle is not None:
        return f"{outcome}: {obstacle}"
    if not snapshots:
        return f"{outcome}: there is no snapshot of it; make one with `rewake snapshot create {name}`"
    if any(one.fits for one in snapshots):
        held = next(one for one in snapshots if one.fits)
        return f"{outcome} just now: {held.manifest.id} is {held.held}"
    bad = sum(one.quarantined is not None for one in snapshots)
    if len(snapshots) == 1:
        return f"{outcome}: its one snapshot {'is quarantined' if bad else 'does not fit'}"
    return f"{outcome}: none of its {len(snapshots)} snapshots fits" + (f", {bad} of them quarantined" if bad else "")


def document(explanation: Explanation) -> dict[str, Any]:
    """An explanation as JSON has it."""
    return {
        "model": explanation.model,
        "fits": explanation.fits,
        "chosen": explanation.chosen,
        "why": explanation.why,
        "snapshots": [
            {
                "id": one.manifest.id,
                "fits": one.fits,
                "created_ms": one.manifest.created_ms,
                "made_on": one.manifest.host.hostname,
                "engine_version": one.manifest.engine_version,
                "model_revision": one.manifest.model_revision,
                "signature": one.signature,
                "quarantined": one.quarantined,
                "held": one.held,
                "floor": one.floor,
                "mismatches": [reason._asdict() for reason in one.reasons],
                "allowed": [reason._asdict() for reason in one.allowed],
                "facts": [fact._asdict() for fact in one.facts],
                "secrets": one.manifest.secrets,
                "hosts": {
                    at: [reason._asdict() for reason in found]
                    for at, found in explanation.elsewhere.get(one.manifest.id, {}).items()
                },
            }
            for one in explanation.snapshots
        ],
    }
