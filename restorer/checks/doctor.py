"""What of this host works, what does not, and how to mend it: the report behind ``rewake doctor``.

Owns which checks there are and their deadlines; the looking is :mod:`restorer.boxes.probes`', the printing the command line's.
Changes nothing on the host.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from policies.config import Config, Model, Tls
from policies.expose import Expose
from policies.floor import foretold
from policies.manifest import Manifest
from restorer.boxes import probes
from restorer.boxes.doors import bound
from restorer.boxes.probes import Finding
from restorer.checks import gpudoctor
from restorer.errors import Environment, RestorerError
from restorer.installation import embedded, rundir
from restorer.machine import floor
from restorer.storage.keyring import KeyRing
from restorer.storage.ownership import way_to
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps

_DEADLINE_S = 40.0
_STORE_S = 5.0
_RENEW = timedelta(days=14)
_DOOR_CAPABILITIES = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}


async def examine(config: Config) -> list[Finding]:
    """Every finding about this host and what ``config`` asks of it, in a fixed order. Takes seconds.

    ``Config.model_construct(models={})`` asks about the host alone.
    """
    restorer, state_dir = config.restorer, Path(config.state_dir)
    checks: dict[str, Awaitable[Finding]] = {
        "data path": asyncio.to_thread(probes.data_path),
        "capabilities": asyncio.to_thread(probes.capabilities),
        "kernel": asyncio.to_thread(probes.kernel),
        "criu": criu(config),
        "tools": asyncio.to_thread(probes.tools),
        "namespaces": probes.namespaces(),
        "veth": probes.veth(),
        "ns_last_pid": probes.ns_last_pid(),
        "network": probes.network(restorer.network),
        "io_uring": probes.io_uring(),
        "userfaultfd": asyncio.to_thread(probes.userfaultfd),
        "huge pages": asyncio.to_thread(probes.huge_pages),
        "cgroups": asyncio.to_thread(probes.cgroups),
        "store": store(config.store.url),
        "disk": asyncio.to_thread(probes.disk, state_dir),
        "punch hole": asyncio.to_thread(probes.punch_hole, state_dir),
        "memory": asyncio.to_thread(probes.memory),
        "gpu": probes.gpu(),
        "account": asyncio.to_thread(account, config),
        "run_dir": asyncio.to_thread(run_dir, config),
        **({"doors": asyncio.to_thread(doors, restorer.expose)} if restorer.expose else {}),
        **({"tls": asyncio.to_thread(tls, config.gateway.tls)} if config.gateway.tls else {}),
        "ownership": asyncio.to_thread(ownership, config),
        "trust": asyncio.to_thread(trust, config),
    }
    if any(model.engine.backend == "runc" for model in config.models.values()):
        checks["runc"] = probes.runc(restorer.runc)
    looking = asyncio.create_task(_gpus(config))
    found = await asyncio.gather(*(_within(name, check) for name, check in checks.items()))
    gpus, pcie = await looking
    # After the rest: what else runs here would be taken for a slow host.
    rates = await speed(config, pcie)
    return [*found, *rates, *gpus, *(finding for name, model in config.models.items() for finding in _model(name, model))]


async def criu(config: Config) -> Finding:
    """Whether snapshots can be made and restored here; otherwise every start is cold."""
    return await _within("criu", probes.criu(config.restorer.criu))


def doors(expose: Expose) -> Finding:
    """Doors to other hosts can listen where they should, and become nobody."""
    if missing := probes.lacking(_DOOR_CAPABILITIES):
        return Finding(
            "doors", "fail", f"without {', '.join(missing)}", "give them to the restorer, or leave restorer.expose out"
        )
    try:
        with bound(expose.address, 0, reuse=False):
            return Finding(
                "doors", "ok", f"they can listen at {expose.address}, ports {expose.ports}, for {', '.join(expose.allow)}"
            )
    except RestorerError as error:
        return Finding("doors", "fail", str(error), "set restorer.expose.address to an address of this host")


async def store(url: str | None) -> Finding:
    """The store answers, or the embedded one runs here."""
    try:
        if url:
            await embedded.answers(url, within=_STORE_S)
            return Finding("store", "ok", "answers PING")
        rc, said = await probes.tool(str(embedded.binary()), "--version")
    except Environment as error:
        return Finding("store", "fail", str(error), "start it, or mend store.url; empty: `rewake up` runs an embedded one")
    if rc:
        return Finding("store", "fail", f"the embedded one does not run: {said}", "set store.url to a Redis")
    return Finding("store", "ok", f"embedded: {said.partition(' sha=')[0]}")


def account(config: Config) -> Finding:
    """The account that the gateway gives root up for."""
    try:
        who = rundir.account(config.gateway.user)
    except Environment as error:
        return Finding("account", "fail", str(error), "set gateway.user to an account without rights, such as nobody")
    if who is None:
        return Finding("account", "ok", f"not root: the gateway runs as uid {os.geteuid()} like everything else")
    return Finding("account", "ok", f"the gateway runs as {who.name} (uid {who.uid})")


def run_dir(config: Config) -> Finding:
    """The gateway's account can reach the sockets."""
    place = Path(config.run_dir)
    try:
        who = rundir.account(config.gateway.user)
    except Environment:
        return Finding("run_dir", "warn", "not tried: there is no account to try it for", "mend gateway.user")
    closed = None if who is None else rundir.closed_to(place, who)
    if who is not None and closed is not None:
        return Finding("run_dir", "fail", f"{closed} is closed to {who.name}", f"chmod o+x {closed}, or set run_dir elsewhere")
    nearest = next(p for p in (place, *place.parents) if p.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("run_dir", "fail", f"{nearest} is not writable", "run as root, or set run_dir to a folder of yours")
    return Finding("run_dir", "ok", str(place))


def ownership(config: Config) -> Finding:
    """Nobody but us can change what is restored."""
    folders = [Path(config.state_dir, name) for name in ("", "snapshots", "weights")]
    found = list(dict.fromkeys(one for folder in folders for one in way_to(folder)))
    if found:
        return Finding("ownership", "fail", f"{found[0].path}: {found[0].found}; nothing is restored from there", found[0].remedy)
    return Finding("ownership", "ok", f"only root and uid {os.geteuid()} can change what is in {config.state_dir}")


def trust(config: Config) -> Finding:
    """Snapshots are signed, and the keys can be used."""
    ring = KeyRing(config.trust)
    if ring.trust.demand == "off":
        found = "signatures are not looked at: whoever can write snapshots can run anything as root"
        return Finding("trust", "warn", found, "make a key with `rewake snapshot key FILE` and name it in trust.sign_with")
    keys, faults = ring.trusted()
    if faults or not keys:
        fault = "; ".join(faults) or "no key is in trust.keys"
        return Finding("trust", "fail", fault, "mend that, or snapshots of such keys are refused")
    signs = f", new snapshots are signed by {ring.signer().id}" if ring.trust.sign_with else ", nothing is signed here"
    return Finding("trust", "ok", f"{ring.trust.demand}: {', '.join(sorted(keys))}{signs}")


def tls(pair: Tls) -> Finding:
    """The certificate and its key fit together, and for how long."""
    mend = "mend gateway.tls: PEM files, the server's own certificate first, readable by whoever runs `rewake up`"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(pair.certificate, pair.key, password=lambda: b"")
        own = x509.load_pem_x509_certificates(Path(pair.certificate).read_bytes())[0]
    except ssl.SSLError as error:
        return Finding("tls", "fail", f"{pair.certificate} and {pair.key} are no pair: {error.reason or error}", mend)
    except (OSError, ValueError) as error:
        return Finding("tls", "fail", f"{getattr(error, 'filename', None) or pair.certificate}: {error}", mend)
    left = own.not_valid_after_utc - datetime.now(UTC)
    until = f"{own.not_valid_after_utc:%Y-%m-%d}"
    if left.total_seconds() <= 0:
        return Finding("tls", "fail", f"the certificate ended on {until}", "renew it: new files are taken up within seconds")
    if left < _RENEW:
        return Finding("tls", "warn", f"the certificate ends on {until}", "renew it: new files are taken up within seconds")
    return Finding("tls", "ok", f"certificate and key fit, until {until}")


def _model(name: str, model: Model) -> Iterator[Finding]:
    program = Path(model.engine.command[0])
    if not program.is_file():
        yield Finding(f"models.{name}", "fail", f"{program} is not there", f"install it or mend models.{name}.engine.command")
    elif not os.access(program, os.X_OK):
        yield Finding(f"models.{name}", "fail", f"{program} is not executable", f"chmod +x {program}")
    else:
        yield Finding(f"models.{name}", "ok", f"{model.engine.kind}: {program}")
    missing = [path for path in model.weights if not Path(path).exists()]
    if missing:
        yield Finding(f"models.{name}.weights", "fail", f"not there: {', '.join(missing)}", "fetch them or mend the path")
    elif model.weights:
        yield Finding(f"models.{name}.weights", "ok", ", ".join(model.weights))
    else:
        remedy = "list the model's files, so that a changed one is not taken for the one in the snapshot"
        yield Finding(f"models.{name}.weights", "warn", "none listed", remedy)


async def speed(config: Config, pcie: float | None) -> list[Finding]:
    """How fast this host is, measured anew, and what that makes of each model's newest snapshot."""
    state = Path(config.state_dir)
    if not await asyncio.to_thread(state.is_dir):
        return [Finding("speed", "warn", f"not measured: {state} is not there yet", "run this again when Rewake has run once")]
    try:
        rates = await floor.measure(state, pcie=pcie)
        newest = await asyncio.to_thread(_newest, config)
    except (RestorerError, OSError) as error:
        return [Finding("speed", "warn", f"not measured: {error}", "run this as root; see dmesg if it hangs")]
    disk = f"disk {rates.disk / 1e9:.2f} GB/s, {rates.disk_cached / 1e9:.2f} through the page cache"
    memory = f"{rates.fill / 1e9:.2f} GB/s, {rates.fill_huge / 1e9:.2f} in huge pages, {rates.cache / 1e9:.2f} of what is cached"
    found = [Finding("speed", "ok", f"{disk}; fresh memory {memory}")]
    for name, manifest in newest.items():
        found.append(Finding(f"models.{name}.floor", "ok", f"a restore takes {foretold(manifest, rates)}"))
    return found


def _newest(config: Config) -> dict[str, Manifest]:
    state, found = Path(config.state_dir), dict[str, Manifest]()
    if (state / "snapshots").is_dir():
        for manifest in SnapshotStore(state / "snapshots", Stamps(state / "stamps.cli.json")).list():
            if manifest.profile.model in config.models:
                found.setdefault(manifest.profile.model, manifest)
    return found


async def _gpus(config: Config) -> tuple[list[Finding], float | None]:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await gpudoctor.examine(config)
    except TimeoutError:
        return [Finding("gpu helper", "fail", "no answer in time", "the driver hangs; see dmesg and nvidia-smi")], None


async def _within(name: str, check: Awaitable[Finding]) -> Finding:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await check
    except TimeoutError:
        return Finding(name, "fail", "no answer in time", "something on this host hangs; see dmesg")
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return Finding(name, "fail", f"{error.strerror or error}{where}", "mend that, or run this as root")
