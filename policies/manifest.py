"""What a snapshot is: its manifest, the profile it was made with, and the facts of the host it was made on.

All of it is compared (by :mod:`policies.compat`) and hashed, so the encoding is canonical: equal values, equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

FORMAT = 2
"""Manifest format that is written."""
FORMATS = frozenset({1, 2})
"""Those that are read; any other is refused. Format 1 has no list of chunks: such a snapshot can be restored, but not copied."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    """Fields left out of the encoding while they are None: snapshots made before there were such keep their names."""

    @model_serializer(mode="wrap")
    def _encoded(self, encode: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = encode(self)
        return {name: value for name, value in found.items() if value is not None or name not in self.OPTIONAL}


class Gpu(_Record):
    """One GPU that the driver knows."""

    uuid: str
    """``GPU-`` and a UUID, as the driver's tools write it."""
    name: str | None
    memory_bytes: int | None
    compute: str | None
    """Compute capability, such as ``9.0``."""
    mig: bool | None
    """It is split into instances, which cannot be checkpointed."""
    persistence: bool | None
    ecc: bool | None = None

    OPTIONAL = frozenset({"ecc"})


class GpuFacts(_Record):
    """What a host's NVIDIA driver says of itself and its GPUs."""

    driver: str | None
    """Version of the kernel driver."""
    mps: bool | None
    """A multi-process service runs, whose clients cannot be checkpointed."""
    gpus: tuple[Gpu, ...] | None
    """Every GPU, in the order of the PCI bus."""
    topology: str | None = None
    """How the GPUs are linked with each other, as a class: equal strings, equal links."""

    open_module: bool | None = None
    """The kernel modules are NVIDIA's open ones."""

    OPTIONAL = frozenset({"topology", "open_module"})


class HugePool(_Record):
    """The pool of one size of huge pages."""

    size_kib: int
    total: int
    free: int


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
    gpu: GpuFacts | None = None
    """None: no NVIDIA driver is here."""
    xsave_max: int | None = None
    """Bytes of all extended CPU state that the processor has, enabled or not (CPUID leaf 0xD, ECX)."""
    xfeatures: int | None = None
    """Which extended states the kernel has enabled, as a mask (CPUID leaf 0xD, EDX and EAX)."""
    criu_features: tuple[str, ...] | None = None
    """What CRIU can do with this kernel, of what a restore may need; sorted."""
    cgroup: str | None = None
    """``v1``, ``v2`` or ``hybrid``."""
    io_uring: int | None = None
    """``kernel.io_uring_disabled``: 0 for all, 1 for a group, 2 for nobody; 0 where the kernel has no such switch."""
    ptrace_scope: int | None = None
    """``kernel.yama.ptrace_scope``; 0 where there is no Yama."""
    pid_max: int | None = None
    nofile: int | None = None
    """The highest limit of open files that the restorer can give an engine."""
    memlock: int | None = None
    """Bytes that the restorer can let an engine lock; :data:`UNLIMITED` where there is no limit."""
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    """What a box's /dev/shm may hold."""
    hugepages: tuple[HugePool, ...] | None = None
    """By size; empty: this kernel has none."""
    time_namespace: bool | None = None
    """CRIU restores the monotonic clock by one."""

    OPTIONAL = frozenset(
        {"gpu", "xsave_max", "xfeatures", "criu_features", "cgroup", "io_uring", "ptrace_scope", "pid_max", "nofile", "memlock"}
        | {"memory_bytes", "shm_bytes", "hugepages", "time_namespace"}
    )


UNLIMITED = (1 << 63) - 1
"""A limit that there is not."""


class Needs(_Record):
    """What the donor took of its host when it was dumped: a restore takes as much again."""

    memory_bytes: int
    """Resident memory of all its processes, what they share counted once."""
    shm_bytes: int
    """In /dev/shm."""
    hugepages: Mapping[str, int]
    """Size in KiB -> pages."""
    nofile: int
    """The highest limit of open files among its processes."""
    memlock: int
    """The highest limit of locked memory among its processes, in bytes."""


class Profile(_Record):
    """The resolved settings a snapshot was made with; any difference makes it another engine."""

    model: str
    engine: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    weights: Mapping[str, str]
    """Path to SHA-256, for every file under the model's ``weights``."""
    gpus: int | None = None
    """How many GPUs a replica has; None: it runs on the CPU."""

    backend: str | None = None
    """What it was captured by; None: CRIU itself."""
    warmup: Mapping[str, Any] | None = None
    """The shapes of requests that the donor had served; None: what is done without any being named."""

    OPTIONAL = frozenset({"gpus", "backend", "warmup"})

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
    """Of the content; from format 2 on with long runs of zeros left out, so that a hole costs nothing however large it is."""
    mode: int = 0o400


class ChunkIndex(_Record):
    """The list of the objects' chunks, which lies beside the manifest: it would be most of it."""

    sha256: str
    bytes: int
    count: int
    """Chunks of all objects together."""


class MappedFile(_Record):
    """A file outside the snapshot that the engine had mapped or open: it must be there again, unchanged."""

    path: str
    bytes: int
    sha256: str
    touched: int | None = None
    """Bytes of it that the rehearsal's canary touched; None: there was no rehearsal."""
    build_id: str | None = None
    """Hex; what its linker named it, if it is an ELF file with a name."""

    OPTIONAL = frozenset({"build_id", "touched"})


class Exchange(_Record):
    """One canary request and what of its answer must be repeated."""

    path: str
    request: Mapping[str, Any]
    answer: Any
    """The donor's answer, without what differs by nature (ids, times)."""
    tokens: int


class WeightsPart(_Record):
    """One file of a weights set."""

    name: str
    bytes: int
    sha256: str


class Allocation(_Record):
    """One run of device memory that holds weights."""

    bytes: int
    fingerprint: str
    """Hex; computed by the GPU over the content, and compared after every restore."""


class Weights(_Record):
    """The weights of one worker, apart from the snapshots that use them: its allocations one after another, cut into parts."""

    digest: str
    """SHA-256 (hex) of the parts' hashes and the allocations: the name of the set's folder, shared by every snapshot of it."""
    parts: tuple[WeightsPart, ...]
    allocations: tuple[Allocation, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


class GpuState(_Record):
    """The GPU side of a snapshot: what of it lies in the dump, and what apart."""

    pids: tuple[int, ...]
    """The processes that use CUDA, as numbered within the box."""
    uuids: tuple[str, ...]
    """Every GPU that the driver knew, in its order: a restore onto another GPU must map them all."""
    used: tuple[str, ...]
    """Those of them that were the donor's."""
    state_bytes: int
    """Device memory that the CUDA state in the dump takes again, on all GPUs together."""
    awake_bytes: int
    """Device memory of the whole engine when it serves."""
    weights: tuple[Weights, ...]
    """One for each worker, by rank; empty: the weights are in the dump."""


class Manifest(_Record):
    """The commit marker of a snapshot: it exists only if every object it names is whole and durable."""

    format: Literal[1, 2] = 2
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
    gpu: GpuState | None = None
    """None: the engine used no GPU."""
    canary_s: float | None = None
    """Seconds in which its canary was answered: the least that was seen of its donor, and of its rehearsal."""
    needs: Needs | None = None
    secrets: tuple[str, ...] | None = None
    """What in the donor's environment and command is a secret by its name (:mod:`policies.secrets`); never a value. None: a
    snapshot of an earlier version, whose donor was not looked at."""
    engine_version: str | None = None
    """What the engine says of itself; only shown: what is compared are its files."""
    model_revision: str | None = None
    """The revision that the paths of the weights name; only shown: what is compared are their hashes."""

    chunks: ChunkIndex | None = None
    """None: made as format 1, before there were lists of chunks."""

    OPTIONAL = frozenset({"gpu", "needs", "secrets", "engine_version", "model_revision", "chunks", "canary_s"})

    @property
    def id(self) -> str:
        """The snapshot's name: 16 hex digits of the SHA-256 of the canonical encoding."""
        return hashlib.sha256(canonical(self)).hexdigest()[:16]


def canonical(record: BaseModel) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
