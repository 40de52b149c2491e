"""What a restorer has to work with on its host: settings, store, boxes, CRIU, snapshots, facts. Built once, at start."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policies import compat, drivers, verdicts
from policies.config import Config, Model
from policies.floor import Rates
from policies.manifest import HostFacts, Manifest, Profile
from policies.wire import SnapshotSummary
from restorer.boxes import network
from restorer.boxes.box import Box, BoxFactory
from restorer.boxes.probes import CHECK, MINIMUM_CRIU
from restorer.boxes.remains import Remains
from restorer.checkpoint import backends, kerndat
from restorer.checkpoint.backend import Backend
from restorer.checkpoint.criu import Criu
from restorer.coordination.fleet import Fleet
from restorer.coordination.jobs import JobStore
from restorer.errors import Environment, RestorerError
from restorer.gpu import cuda
from restorer.gpu.cuda import Cuda
from restorer.gpu.gpus import Gpus
from restorer.machine import hostfacts, profile
from restorer.machine.floor import Speed
from restorer.procfs import inventory
from restorer.records.journal import Hook, Journals
from restorer.records.progress import ProgressBoard
from restorer.records.tally import Tally
from restorer.storage.arrival import Arrival
from restorer.storage.holds import users_of
from restorer.storage.integrity import MANIFEST
from restorer.storage.ownership import way_to
from restorer.storage.signatures import Judge
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps
from restorer.storage.statefolder import judge_of, stamps_of
from restorer.storage.weights import WeightsStore

log = logging.getLogger("rewake.restorer")
_CHECK_S = 20.0


@dataclass(frozen=True, slots=True)
class Match:
    """Which snapshot serves a model here, or why none does."""

    profile: Profile
    manifest: Manifest | None
    refused: dict[str, list[compat.Mismatch]]
    """Snapshots of this model that do not fit, and every reason of each."""
    quarantined: dict[str, str]
    allowed: tuple[compat.Mismatch, ...] = ()
    """What of the chosen one is not as it should be, and a policy lets pass."""
    held: dict[str, str] = field(default_factory=dict)
    """Snapshots whose restores failed a moment ago."""
    remote: str = ""
    """Why the remote that starts pull from was of no help, if it was asked."""
    arrival: Arrival | None = None
    """Of the chosen one, if weights of it are still on their way."""

    @property
    def newest(self) -> str | None:
        """Its id."""
        return None if self.manifest is None else self.manifest.id

    @property
    def why(self) -> str:
        """Why there is none, in one line."""
        reasons = [f"snapshot {id} is quarantined: {reason}" for id, reason in self.quarantined.items()]
        reasons += [f"snapshot {id} is {why}" for id, why in self.held.items()]
        reasons += [f"snapshot {id} does not fit: " + " | ".join(map(str, found)) for id, found in self.refused.items()]
        reasons += [self.remote] if self.remote else []
        return "; ".join(reasons) or "there is no snapshot of this model"


class News:
    """Wakes everyone who waits for something in the store to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until told, or ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


@dataclass(slots=True)
class Host:
    """The parts, and the questions several of them answer together."""

    config: Config
    name: str
    place: str
    """Where its boxes' addresses lead to them from; see :mod:`policies.reach`."""
    jobs: JobStore
    boxes: BoxFactory
    stamps: Stamps
    snapshots: SnapshotStore
    weights: WeightsStore
    journals: Journals
    cuda: Cuda
    gpus: Gpus
    facts: HostFacts
    criu: Criu | None
    """None: CRIU does not work here, so every start is a cold one."""
    capability: str
    """How CRIU was found, or what is missing."""
    progress: ProgressBoard
    remains: Remains
    judge: Judge
    """What signatures are worth under the configuration in force."""
    backends: Mapping[str, Backend] = field(default_factory=dict)
    """By their names."""
    speed: Speed | None = None
    """How fast this host is."""
    news: News = field(default_factory=News)
    fleet: Fleet = field(default_factory=lambda: Fleet(""))
    """The other hosts."""
    tally: Tally = field(default_factory=Tally)
    _reading: Counter[Path] = field(default_factory=Counter)
    _gone: dict[str, Model] = field(default_factory=dict)
    """The last settings of models that the configuration has no more: their replicas still have to end."""

    def model(self, name: str) -> Model:
        """Settings of a model that the configuration has, or had while this process ran."""
        found = self.config.models.get(name)
        return self._gone[name] if found is None else found

    @property
    def rates(self) -> Rates | None:
        """How fast this host is; None: not measured."""
        return None if self.speed is None else self.speed.rates

    async def pcie(self) -> float | None:
        """Bytes a second from pinned memory to the slowest GPU; None: there is none. Takes a moment for each."""
        found = [await self.cuda.bandwidth(gpu.uuid) for gpu in (self.facts.gpu and self.facts.gpu.gpus) or ()]
        return min(found, default=None)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[bool]:
        """A restore out of a folder, until the block ends; yields whether nobody else was restoring out of it already."""
        self._reading[folder] += 1
        try:
            yield self._reading[folder] == 1
        finally:
            self._reading[folder] -= 1
            self._reading += Counter()

    def backend(self, name: str) -> Backend:
        """The backend of a model."""
        return self.backends[self.model(name).engine.backend]

    def described(self) -> dict[str, str]:
        """Each backend that a model uses, in one line."""
        used = {model.engine.backend for model in self.config.models.values()}
        return {name: backend.describe() for name, backend in self.backends.items() if name in used}

    def obstacles(self) -> dict[str, str]:
        """Each backend that a model uses and that cannot make or restore snapshots here, and why."""
        used = {model.engine.backend for model in self.config.models.values()}
        return {name: why for name in sorted(used) if (why := self.backends[name].obstacle()) is not None}

    def adopt(self, config: Config) -> None:
        """Put another configuration in force."""
        self._gone.update({name: model for name, model in self.config.models.items() if name not in config.models})
        self.config = config
        self.snapshots.verdicts.policy = config.restorer.quarantine
        self.judge = judge_of(config)
        self.snapshots.sign = self.judge.keys.sign

    def facts_now(self) -> HostFacts:
        """This machine's facts, those that change while it runs read anew. Blocks for moments."""
        return hostfacts.refreshed(self.facts)

    async def find_gpus(self) -> None:
        """Ask the driver, if there is one, what GPUs this host has; called once, before anything is started."""
        if not self.config.restorer.gpu_helper and not hostfacts.NVIDIA.exists():
            return
        try:
            facts = await self.cuda.facts()
        except RestorerError as error:
            log.warning("this host's GPUs cannot be used: %s", error)
            return
        # CUDA's own start, which takes as long as a tenth of a restore, is paid for now.
        with contextlib.suppress(RestorerError):
            await self.cuda.states([os.getpid()])
        self.gpus.facts = facts
        self.facts = self.facts.model_copy(update={"gpu": facts})

    async def discard(self, box: Box) -> None:
        """End a box and free what it had. What uses a GPU is taken off it first: a kill in mid-work has hung hosts."""
        try:
            if (gpus := box.facts.get("gpus")) and box.alive:
                pids = await asyncio.to_thread(inventory.numbers, box.init_pid)
                await self.gpus.leave(gpus, list(pids.values()))
        except RestorerError as error:
            log.warning("box %s is ended without a checkpoint of its GPU state: %s", box.id, error)
        finally:
            await asyncio.to_thread(self.remains.keep, box)
            await self.boxes.discard(box)
            self.gpus.release(box.id)

    def match(self, name: str) -> Match:
        """Compare every snapshot of a model with this host and its settings. Blocks: it may hash weights."""
        here = profile.resolve(name, self.model(name), self.stamps, self.config.trust)
        mine = [manifest for manifest in self.snapshots.list() if manifest.profile.model == name]
        facts = self.facts_now()
        standings = {m.id: self.snapshots.verdicts.standing(m.id) for m in mine}
        quarantined = {id: one.quarantined for id, one in standings.items() if one.quarantined is not None}
        held = {id: one.held for id, one in standings.items() if one.held is not None}
        distrusted = {m.id: found for m in mine if m.id not in quarantined and (found := self.distrust(m))}
        trusted = [m for m in mine if m.id not in quarantined.keys() | held.keys() | distrusted.keys()]
        best, unfit = compat.newest_fit(trusted, here, facts, self.config.matching)
        allowed = () if best is None else self.allowed(best, facts)
        return Match(here, best, distrusted | unfit, quarantined, allowed, held)

    def blame(self, id: str, error: RestorerError) -> None:
        """Note a failed restore of a snapshot, and whose fault it was. Blocks."""
        facts = hashlib.sha256(self.facts.model_dump_json().encode()).hexdigest()[:16]
        verdict, now = error.verdict, time.time_ns() // 1_000_000
        log.warning(
            "verdict on snapshot %s: host %s, facts %s, class %s%s, evidence %r, remedy: %s",
            *(id, self.name, facts, verdict.cls, " (certain)" if verdict.certain else "", verdict.evidence, verdict.remedy),
        )
        note = verdicts.failed(verdict, host=self.snapshots.verdicts.host, facts=facts, at_ms=now, reason=error.brief)
        with contextlib.suppress(Environment):
            # On a full disk nothing can be noted, and nothing is restored either.
            self.snapshots.verdicts.note(id, note)

    def praise(self, id: str) -> None:
        """Note that a restore of a snapshot went well, if that is news. Blocks."""
        mine = self.snapshots.verdicts
        if mine.standing(id).failures:
            with contextlib.suppress(Environment):
                mine.note(id, verdicts.Note(what="restored", host=mine.host, at_ms=time.time_ns() // 1_000_000))

    def distrust(self, manifest: Manifest, folder: Path | None = None) -> list[compat.Mismatch]:
        """Why a snapshot must not be restored, whatever is in it: others could have changed it, or nobody trusted signed it.

        Blocks; cheap when nothing has changed.

        Args:
            folder: where it lies, if it is not published yet.
        """
        folder = folder or self.snapshots.folder(manifest.id)
        found = [compat.Mismatch(one.path, "writable by us alone", one.found, one.remedy) for one in way_to(folder / MANIFEST)]
        if manifest.gpu is not None:
            found += drivers.refused(self.facts.gpu, self.config.restorer.drivers)
        verdict = self.judge.judge(folder, manifest)
        if verdict.mismatch is not None and not verdict.allowed:
            found.append(verdict.mismatch)
        return found

    def allowed(self, manifest: Manifest, facts: HostFacts, folder: Path | None = None) -> tuple[compat.Mismatch, ...]:
        """What of a snapshot is not as it should be on a host, and a policy lets pass. Blocks; cheap when nothing has changed."""
        verdict = self.judge.judge(folder or self.snapshots.folder(manifest.id), manifest)
        waived = compat.waived(manifest, facts, self.config.matching)
        return (*waived, *(() if verdict.mismatch is None else (verdict.mismatch,)))

    def summaries(self) -> tuple[SnapshotSummary, ...]:
        """Every snapshot as the admin API lists it. Blocks."""
        found: list[SnapshotSummary] = []
        matches: dict[str, Match | RestorerError] = {}
        for manifest in self.snapshots.list():
            name = manifest.profile.model
            if name not in matches and name in self.config.models:
                try:
                    matches[name] = self.match(name)
                except RestorerError as error:
                    matches[name] = error
            signature = str(self.judge.judge(self.snapshots.folder(manifest.id), manifest))
            found.append(
                _summary(manifest, matches.get(name), self.snapshots.verdicts.standing(manifest.id).quarantined, signature)
            )
        return tuple(found)


def _summary(manifest: Manifest, match: Match | RestorerError | None, quarantined: str | None, signature: str) -> SnapshotSummary:
    if match is None:
        reasons = ["its model is not in the configuration"]
    elif isinstance(match, RestorerError):
        reasons = [str(match)]
    else:
        reasons = [str(mismatch) for mismatch in match.refused.get(manifest.id, [])]
    return SnapshotSummary(
        id=manifest.id,
        model=manifest.profile.model,
        created_ms=manifest.created_ms,
        bytes=manifest.bytes,
        fits=not reasons and quarantined is None,
        quarantined=quarantined,
        signature=signature,
        mismatches=tuple(reasons),
        engine=manifest.profile.engine,
        cold_start_s=manifest.cold_start_s,
    )


def build(config: Config, store_url: str, *, stamps_file: str = "stamps.json", hook: Hook | None = None) -> Host:
    """Probe this machine and put the parts together. Blocks for as long as CRIU's own check takes.

    Args:
        stamps_file: another one for a command that runs beside the restorer.
        hook: for tests: called around each journaled step.
    """
    state, run = Path(config.state_dir), Path(config.run_dir)
    for folder in (state, run):
        folder.mkdir(parents=True, exist_ok=True)
    binary, capability = find_criu(config.restorer.criu)
    stamps = stamps_of(config, stamps_file)
    name = config.restorer.host or socket.gethostname()
    judge = judge_of(config)
    helper = Cuda(cuda.command(config.restorer.gpu_helper))
    jobs = JobStore(store_url, config.store.namespace, name)
    criu = None if binary is None else Criu(binary, config.restorer.criu_timeout_s, kerndat.kept(binary, run))
    host = Host(
        config=config,
        name=name,
        place=network.place(),
        jobs=jobs,
        boxes=BoxFactory(
            run_dir=run,
            state_dir=state,
            network=config.restorer.network,
            spare=config.restorer.parallel_starts,
            expose=config.restorer.expose,
        ),
        stamps=stamps,
        snapshots=SnapshotStore(state / "snapshots", stamps, judge.keys.sign, lambda: users_of(run), host=name),
        weights=WeightsStore(state / "weights", stamps),
        journals=Journals(state / "journal", hook),
        cuda=helper,
        gpus=Gpus(helper, None),
        facts=hostfacts.probe(binary),
        criu=criu,
        capability=capability,
        progress=ProgressBoard(jobs),
        remains=Remains(state / "ended"),
        judge=judge,
        backends=backends.build(config.restorer, criu, capability),
        fleet=Fleet(name),
    )
    host.speed = Speed(state, host.pcie)
    return host


def find_criu(name: str) -> tuple[Path | None, str]:
    """(CRIU's path if it works on this host, how it was found or what is missing). Blocks."""
    found = shutil.which(name)
    if found is None:
        return None, f"{name} is not installed; `rewake doctor` says how to get CRIU 4.2 or newer"
    version = hostfacts.criu_version(Path(found))
    if version is None or tuple(map(int, re.findall(r"\d+", version)[:2])) < MINIMUM_CRIU:
        return None, f"{found} is version {version or 'unknown'}; `rewake doctor` says how to get CRIU 4.2 or newer"
    try:
        argv = [*CHECK, found, "check"]
        check = subprocess.run(argv, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{found} check did not end well: {error}; run `rewake doctor`"
    if check.returncode != 0:
        return None, f"{found} check says: {(check.stdout + check.stderr).strip()[-300:]}; run `rewake doctor`"
    return Path(found), f"{found} works here"
