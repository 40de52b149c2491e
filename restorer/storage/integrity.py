"""Is what lies on the disk what a manifest says? Answers with every fault, by name.

Reads, never writes; knows the shape of a snapshot's folder, not where snapshots are kept.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from policies.manifest import Manifest, MappedFile, SnapshotObject
from restorer.storage import chunks, signatures
from restorer.storage.ownership import exposed
from restorer.storage.stamps import Stamps
from restorer.system.elf import build_id
from restorer.system.files import hash_file

MANIFEST = "manifest.json"
BESIDE = frozenset({MANIFEST, chunks.FILE})
"""What may lie beside the objects."""
FOLDERS = ("images", "scratch")
"""The parts of a snapshot that hold its objects."""


class Fault(NamedTuple):
    """One way in which a snapshot, or a file it depends on, is not what its manifest says."""

    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


def verify_files(manifest: Manifest, stamps: Stamps) -> list[Fault]:
    """Every file outside the snapshot that its engine needs (binaries, libraries, weights) and that has changed since."""
    faults: list[Fault] = []
    sound: dict[Path, tuple[str, str]] = {}
    for file in manifest.files:
        try:
            size = os.stat(file.path).st_size
        except OSError as error:
            faults.append(Fault(file.path, "the file the donor had open", f"{_why(error)}{_others(Path(file.path))}"))
            continue
        if size == file.bytes:
            sound[Path(file.path)] = (file.path, file.sha256)
        else:
            faults.append(_built(file, Fault(file.path, f"{file.bytes} bytes", f"{size} bytes")))
    changed = differences({str(path): wanted for path, wanted in sound.items()}, stamps.sha256_all(sound))
    files = {file.path: file for file in manifest.files}
    return faults + [_built(files[fault.path], fault) for fault in changed]


def _built(file: MappedFile, fault: Fault) -> Fault:
    """With the builds of a binary or library, by which people know it."""
    if file.build_id is None:
        return fault
    now = build_id(Path(file.path)) or "none"
    return fault._replace(expected=f"{fault.expected}, build {file.build_id}", found=f"{fault.found}, build {now}")


def _others(path: Path) -> str:
    """What else is there of a library whose name has a version in it, such as a driver's."""
    stem, versioned, _ = path.name.partition(".so.")
    if not versioned:
        return ""
    there = sorted(one.name for one in path.parent.glob(f"{glob.escape(stem)}.so.*"))
    return f"; there is {', '.join(there[:3])}" if there else ""


def differences(wanted: Mapping[str, tuple[str, str]], hashes: Mapping[Path, str | OSError]) -> list[Fault]:
    """Faults of content. ``wanted``: path -> (name to report, SHA-256)."""
    faults = []
    for path, found in hashes.items():
        name, sha256 = wanted[str(path)]
        if isinstance(found, OSError):
            faults.append(Fault(name, f"sha256 {sha256}", _why(found)))
        elif found != sha256:
            faults.append(Fault(name, f"sha256 {sha256}", f"sha256 {found}"))
    return faults


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def is_sparse(manifest: Manifest) -> bool:
    """Whether the hashes of its objects leave out long runs of zeros (:class:`restorer.system.files.SparseHash`)."""
    return manifest.format > 1


def listing(folder: Path, manifest: Manifest, *, full: bool) -> Fault | None:
    """What is wrong with the list of chunks. ``full``: read it. No restore does, so that none waits for it."""
    if manifest.chunks is None:
        return None
    item = SnapshotObject(path=chunks.FILE, bytes=manifest.chunks.bytes, sha256=manifest.chunks.sha256)
    fault = shape(folder, item)
    if fault is not None or not full:
        return fault
    try:
        found = hash_file(folder / item.path)
    except OSError as error:
        return Fault(item.path, f"sha256 {item.sha256}", _why(error))
    return None if found == item.sha256 else Fault(item.path, f"sha256 {item.sha256}", f"sha256 {found}")


def shape(folder: Path, item: SnapshotObject) -> Fault | None:
    """What can be said of a file of a snapshot without reading it."""
    parts = item.path.split("/")
    if parts[0] not in (*FOLDERS, chunks.FILE) or "\0" in item.path or any(part in ("", ".", "..") for part in parts):
        return Fault(item.path, "a path inside the snapshot", "one that leads out of it")
    try:
        facts = (folder / item.path).lstat()
    except OSError as error:
        return Fault(item.path, f"{item.bytes} bytes", _why(error))
    if not stat.S_ISREG(facts.st_mode):
        return Fault(item.path, "a regular file", stat.filemode(facts.st_mode))
    if facts.st_size != item.bytes:
        return Fault(item.path, f"{item.bytes} bytes", f"{facts.st_size} bytes")
    if stat.S_IMODE(facts.st_mode) != item.mode:
        return Fault(item.path, f"mode {item.mode:04o}", f"mode {stat.S_IMODE(facts.st_mode):04o}")
    return _ownership(item.path, facts)


def _ownership(name: str, facts: os.stat_result) -> Fault | None:
    if facts.st_uid != os.geteuid():
        return Fault(name, f"owner {os.geteuid()}", f"owner {facts.st_uid}")
    if exposed(name, facts) is not None:
        return Fault(name, "writable by its owner alone", f"mode {stat.S_IMODE(facts.st_mode):04o}")
    return None


def strangers(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    """Faults of the folders and of the one around them, and whatever lies in them that the manifest does not name."""
    fault = _ownership(str(folder.parent), os.lstat(folder.parent))
    if fault is not None:
        yield fault
    expected = {item.path for item in manifest.objects} | BESIDE
    for parent, folders, names in os.walk(folder):
        relative = os.path.relpath(parent, folder)
        fault = _ownership(relative, os.lstat(parent))
        if fault is not None:
            yield fault
        for name in [*names, *(name for name in folders if Path(parent, name).is_symlink())]:
            path = os.path.normpath(os.path.join(relative, name))
            if path == MANIFEST or (relative == signatures.FOLDER and signatures.NAME.fullmatch(name)):
                fault = _ownership(path, os.lstat(os.path.join(parent, name)))
                if fault is not None:
                    yield fault
            elif path not in expected:
                yield Fault(path, "nothing of this name", stat.filemode(os.lstat(os.path.join(parent, name)).st_mode))
