"""Private folders of an engine (its /dev/shm, its /tmp) as part of a snapshot, and laid afresh for every restore.

A stored tree is one ``tree.json`` (names, kinds, modes, owners, times) and its files' contents as ``files/0``,
``files/1``…: the contents can be read-only and root-only in the store whatever they are in the tree, and no name an engine
chose becomes a path of ours. Unix sockets are left out, since CRIU binds them again; their folders are kept. Names such as
``link_remap.7`` and ``sem.x`` are kept like any other: the first restore consumes them, so every restore gets its own.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from restorer.errors import Environment, SnapshotError
from restorer.system.files import copy_sparse, disk_space

_DESCRIPTION = "tree.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def capture_tree(source: Path, target: Path) -> int:
    """Store the folder ``source`` as the new folder ``target``. Nothing may write to ``source`` meanwhile.

    Returns:
        Bytes of data copied (holes are not).

    Raises:
        Environment: the disk is full.
        SnapshotError: it holds something that cannot be stored, such as a device node; the message names it.
    """
    entries: list[dict[str, Any]] = []
    seen: dict[tuple[int, int], str] = {}
    copied = 0
    with disk_space(f"copying {source} into the snapshot", target):
        (target / "files").mkdir(parents=True, mode=0o700)
        for path in _walk(source):
            facts = path.lstat()
            if stat.S_ISSOCK(facts.st_mode):
                continue
            entry = _describe(path, str(path.relative_to(source)), facts)
            if entry["kind"] == "file":
                first = seen.setdefault((facts.st_dev, facts.st_ino), entry["path"])
                if first != entry["path"]:
                    entry = {"path": entry["path"], "kind": "hardlink", "target": first}
                else:
                    entry["object"] = str(len(seen) - 1)
                    copied += _copy(path, target / "files" / entry["object"], 0o400)
            entries.append(entry)
        # ASCII JSON: a name that is not UTF-8 survives as lone surrogates.
        data = json.dumps(entries, separators=(",", ":")).encode()
        (target / _DESCRIPTION).write_bytes(data)
    return copied + len(data)


def lay_tree(stored: Path, target: Path) -> int:
    """Lay a stored tree out in ``target``: the same names, contents, modes, owners, times. Returns bytes of data copied.

    Folders may exist already (and take the tree's mode and owner), files must not.

    Raises:
        Environment: the disk is full, or something is in the way.
        SnapshotError: the description is not one.
    """
    entries = _read(stored)
    copied = 0
    with disk_space(f"laying {target}", target):
        try:
            for entry in entries:
                copied += _lay(entry, stored, target)
            # Deepest first, and after all children: making a child moves its folder's mtime.
            for entry in reversed(entries):
                if entry["kind"] == "dir":
                    _adorn(_inside(target, entry["path"]), entry)
        except FileExistsError as error:
            raise Environment(
                f"{error.filename} is in the way of the snapshot's private files; lay them in an empty folder"
            ) from None
    return copied


def _walk(root: Path) -> Iterator[Path]:
    """``root`` and everything under it, parents first, names sorted, symlinks not followed."""
    yield root
    for path in sorted(root.iterdir()):
        if stat.S_ISDIR(path.lstat().st_mode):
            yield from _walk(path)
        else:
            yield path


def _describe(path: Path, name: str, facts: os.stat_result) -> dict[str, Any]:
    mode = facts.st_mode
    entry = {
        "path": name,
        "mode": stat.S_IMODE(mode),
        "uid": facts.st_uid,
        "gid": facts.st_gid,
        "mtime_ns": facts.st_mtime_ns,
    }
    if stat.S_ISDIR(mode):
        return {**entry, "kind": "dir"}
    if stat.S_ISREG(mode):
        return {**entry, "kind": "file"}
    if stat.S_ISLNK(mode):
        return {**entry, "kind": "symlink", "target": str(path.readlink())}
    if stat.S_ISFIFO(mode):
        return {**entry, "kind": "fifo"}
    raise SnapshotError(f"{path} is a device node, which cannot be part of a snapshot; let the engine keep it elsewhere")


def _copy(source: Path, target: Path, mode: int) -> int:
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        writer = os.open(target, _NEW, mode)
        try:
            return copy_sparse(reader, writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _read(stored: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads((stored / _DESCRIPTION).read_bytes())
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{stored / _DESCRIPTION} cannot be read: {error}; verify the snapshot") from None
    if not isinstance(entries, list) or not entries or entries[0].get("path") != ".":
        raise SnapshotError(f"{stored / _DESCRIPTION} does not describe a folder; verify the snapshot")
    return entries


def _lay(entry: dict[str, Any], stored: Path, target: Path) -> int:
    path, kind = _inside(target, entry["path"]), entry["kind"]
    copied = 0
    if kind == "dir":
        if not path.is_dir() or path.is_symlink():
            path.mkdir(mode=0o700, parents=entry["path"] == ".")
        return 0
    if kind == "hardlink":
        os.link(_inside(target, entry["target"]), path, follow_symlinks=False)
        return 0
    if kind == "file":
        copied = _copy(_inside(stored / "files", entry["object"]), path, 0o600)
    elif kind == "symlink":
        path.symlink_to(entry["target"])
    else:
        os.mkfifo(path, 0o600)
    _adorn(path, entry)
    return copied


def _adorn(path: Path, entry: dict[str, Any]) -> None:
    """Owner first: a change of owner clears set-id bits."""
    facts = path.lstat()
    if (facts.st_uid, facts.st_gid) != (entry["uid"], entry["gid"]):
        os.chown(path, entry["uid"], entry["gid"], follow_symlinks=False)
    if entry["kind"] != "symlink":
        path.chmod(entry["mode"])
    os.utime(path, ns=(entry["mtime_ns"], entry["mtime_ns"]), follow_symlinks=False)


def _inside(root: Path, name: str) -> Path:
    """``root / name``, if that is still within ``root``."""
    if name.startswith("/") or ".." in name.split("/"):
        raise SnapshotError(f"a stored tree names {name!r}, which is outside of it; do not use this snapshot")
    return root / name
