"""What a snapshot is: its manifest, the profile it was made with, and the facts of the host it was made on.

All of it is compared (by :mod:`policies.compat`) and hashed, so the encoding is canonical: equal values, equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT = 1
"""Manifest format; a reader refuses a format it does not know."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HostFacts(_Record):
    """What a machine is. None means that the fact could not be read, which compares as a mismatch."""

    hostname: str
    arch: str | None
    kernel: str | None
    cpu_model: str | None
    cpu_flags: tuple[str, ...] | None
    """Sorted, as in /proc/cpuinfo."""
    xsave_size: int | None
    """Bytes of the enabled extended CPU state (CPUID leaf 0xD, EBX)."""
    criu_version: str | None
    criu_sha256: str | None
    page_size: int | None


class Profile(_Record):
    """The resolved settings a snapshot was made with; any difference makes it another engine."""

    model: str
    engine: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    weights: Mapping[str, str]
    """Path to SHA-256, for every file under the model's ``weights``."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical encoding."""
        return hashlib.sha256(canonical(self)).hexdigest()


class SnapshotObject(_Record):
    """One file of a snapshot."""

    path: str
    """Relative to the snapshot's folder, with ``/``."""
    bytes: int
    """Apparent size."""
    sha256: str
    mode: int = 0o400


class MappedFile(_Record):
    """A file outside the snapshot that the engine had mapped or open: it must be there again, unchanged."""

    path: str
    bytes: int
    sha256: str


class Exchange(_Record):
    """One canary request and what of its answer must be repeated."""

    path: str
    request: Mapping[str, Any]
    answer: Any
    """The donor's answer, without what differs by nature (ids, times)."""
    tokens: int


class Manifest(_Record):
    """The commit marker of a snapshot: it exists only if every object it names is whole and durable."""

    format: Literal[1] = 1
    created_ms: int
    profile: Profile
    host: HostFacts
    objects: tuple[SnapshotObject, ...]
    files: tuple[MappedFile, ...]
    canary: tuple[Exchange, ...]
    root_pid: int
    """Pid of the engine's root process within its pid namespace."""
    pids: tuple[int, ...]
    """Every pid and tid the restored tree occupies."""
    scratch: tuple[str, ...]
    """Private folders (such as /dev/shm) whose content is part of the snapshot and is laid afresh for each restore."""
    criu_options: tuple[str, ...]
    """Options the restore must be given because the dump was made with their counterparts."""
    cold_start_s: float
    """Seconds from exec to the donor's first token, for comparison."""
    bytes: int
    """Allocated bytes of all objects: what the snapshot costs on disk."""
    bytes_written: int
    """Bytes handed to the file system while it was made."""

    @property
    def id(self) -> str:
        """The snapshot's name: 16 hex digits of the SHA-256 of the canonical encoding."""
        return hashlib.sha256(canonical(self)).hexdigest()[:16]


def canonical(record: BaseModel) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
