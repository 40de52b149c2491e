"""The signatures beside a manifest: found, filed, judged. They are no part of the snapshot, whose name they do not change.

::

    <snapshot>/signatures/<key id>.sig   64 bytes: Ed25519 over exactly the bytes of manifest.json

Knows where they lie; what they are worth is :mod:`restorer.storage.keyring`'s to compute and :mod:`policies.trust`'s to decide.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from policies.manifest import Manifest, canonical
from policies.trust import NOT_CHECKED, Verdict
from restorer.storage.keyring import KeyRing
from restorer.system.files import fsync, write_durable

FOLDER = "signatures"
NAME = re.compile(r"([0-9a-f]{16})\.sig")
_BYTES = 64
_MOST = 64
"""Signatures of one snapshot that are looked at."""
_REMEMBERED = 1000


def read(snapshot: Path) -> dict[str, bytes]:
    """Key id -> signature, of every one that is there; one that cannot be read is empty, and so is no signature.

    Opened name by name from the snapshot's folder down, so that no link on the way is followed.
    """
    found: dict[str, bytes] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), contextlib.ExitStack() as stack:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        outer = os.open(snapshot, flags)
        stack.callback(os.close, outer)
        inner = os.open(FOLDER, flags, dir_fd=outer)
        stack.callback(os.close, inner)
        for name in sorted(os.listdir(inner))[:_MOST]:
            if match := NAME.fullmatch(name):
                found[match[1]] = _content(name, inner)
    return found


def write(snapshot: Path, key: str, signature: bytes) -> None:
    """File one signature, durably; one of the same key is replaced."""
    folder = snapshot / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    write_durable(folder / f"{key}.sig", signature)
    fsync(snapshot)


class Judge:
    """What the signatures of manifests are worth under one configuration; remembers what it has computed."""

    def __init__(self, keys: KeyRing) -> None:
        self.keys = keys
        self._known: dict[int, tuple[Manifest, Mapping[str, bytes], object, Verdict]] = {}
        """By the identity of the manifest, which is kept with it: its encoding takes longer than all else here."""

    def judge(self, snapshot: Path, manifest: Manifest) -> Verdict:
        """May this manifest, found in the folder ``snapshot``, be believed? Blocks; cheap when nothing has changed."""
        if self.keys.trust.demand == "off":
            return NOT_CHECKED
        signatures, ring = read(snapshot), self.keys.trusted()
        known = self._known.get(id(manifest))
        if known is not None and known[0] is manifest and known[1:3] == (signatures, ring):
            return known[3]
        verdict = self.keys.judge(canonical(manifest), signatures)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[id(manifest)] = manifest, signatures, ring, verdict
        return verdict


def _content(name: str, folder: int) -> bytes:
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode) and facts.st_size == _BYTES:
                return file.read(_BYTES)
    return b""
