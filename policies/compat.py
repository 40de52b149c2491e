"""Can this snapshot run here? Answers with every mismatch, never just the first.

Each :data:`RULES` row names a host fact, how it is compared, and what to do about a difference. An unknown fact is a
mismatch: a restore that might crash half-way costs more than a cold start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from policies.manifest import GpuFacts, HostFacts, Manifest, Profile


class Mismatch(NamedTuple):
    """One reason why a snapshot does not fit."""

    field: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}; {self.remedy}"


def _equal(donor: Any, here: Any) -> bool:
    return bool(donor == here)


def _superset(donor: Any, here: Any) -> bool:
    return set(donor) <= set(here)


RULES: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "arch": (_equal, "restore on a host of the same architecture"),
    "kernel": (_equal, "boot the donor's kernel, or make a snapshot on this kernel"),
    "cpu_flags": (_superset, "restore on a CPU with these features, or make a snapshot on this host"),
    "xsave_size": (_equal, "restore on a CPU with the same extended state, or make a snapshot on this host"),
    "page_size": (_equal, "boot a kernel with the donor's page size"),
    "criu_version": (_equal, "install the donor's CRIU version, or make a snapshot with this one"),
}
"""Host fact -> (rule over donor's and this host's value, remedy). Facts without a row are only reported."""

_UNKNOWN = "an unknown fact cannot be trusted; run `rewake doctor`"


def _each(field: str) -> Callable[[GpuFacts], Any]:
    """One fact of every GPU, sorted: which of them sits in which slot does not matter. None when one is unknown."""

    def read(facts: GpuFacts) -> Any:
        values = [getattr(gpu, field) for gpu in facts.gpus or ()]
        return tuple(sorted(values)) if values and None not in values else None

    return read


def _off(donor: Any, here: Any) -> bool:
    switches = here if isinstance(here, tuple) else (here,)
    return not any(switches)


GPU_RULES: Mapping[str, tuple[Callable[[GpuFacts], Any], Callable[[Any, Any], bool], str]] = {
    "driver": (lambda facts: facts.driver, _equal, "install the donor's driver, or make a snapshot with this one"),
    "names": (_each("name"), _equal, "restore on a host with the donor's GPUs, or make a snapshot on this one"),
    "memory_bytes": (_each("memory_bytes"), _equal, "restore on GPUs of the donor's size, or make a snapshot on this host"),
    "compute": (_each("compute"), _equal, "restore on GPUs of the same compute capability"),
    "mig": (_each("mig"), _off, "switch MIG off (nvidia-smi -mig 0): an instance of a GPU cannot be checkpointed"),
    "mps": (lambda facts: facts.mps, _off, "stop nvidia-cuda-mps-control: its clients cannot be checkpointed"),
}
"""GPU fact -> (how it is read, rule over donor's and this host's value, remedy); asked only for engines that use a GPU."""


def mismatches(manifest: Manifest, profile: Profile, host: HostFacts) -> list[Mismatch]:
    """Every reason why ``manifest`` cannot serve ``profile`` on ``host``; empty when it can."""
    found = [*_profile(manifest.profile, profile), *_host(manifest.host, host)]
    if manifest.gpu is not None:
        found += gpu_mismatches(manifest.host.gpu, host.gpu)
    return found


def gpu_mismatches(donor: GpuFacts | None, here: GpuFacts | None) -> list[Mismatch]:
    """Every reason why the state of ``donor``'s GPUs cannot be put onto the GPUs of a host.

    Any GPU of the same model will do. The driver wants every GPU that it knew mapped to one that it knows, so hosts must
    have the same ones.
    """
    if here is None:
        return [Mismatch("host.gpu", "an NVIDIA driver", "none", "restore on a host with the donor's GPUs")]
    found = []
    for field, (read, rule, remedy) in GPU_RULES.items():
        expected, value = None if donor is None else read(donor), read(here)
        if expected is None or value is None:
            found.append(Mismatch(f"host.gpu.{field}", _show(expected), _show(value), _UNKNOWN))
        elif not rule(expected, value):
            found.append(Mismatch(f"host.gpu.{field}", _show(expected), _show(value), remedy))
    return found


def gpu_obstacles(here: GpuFacts | None) -> list[Mismatch]:
    """Every reason why no engine on a GPU of this host can be captured."""
    if here is None:
        return [Mismatch("host.gpu", "an NVIDIA driver", "none", "run the engine on a host with a GPU")]
    return [found for found in gpu_mismatches(here, here) if found.field.rpartition(".")[2] in ("mig", "mps", "driver", "names")]


def newest_fit(
    manifests: Iterable[Manifest], profile: Profile, host: HostFacts
) -> tuple[Manifest | None, dict[str, list[Mismatch]]]:
    """The newest snapshot that fits, and for each that does not, why."""
    best: Manifest | None = None
    refused: dict[str, list[Mismatch]] = {}
    for manifest in manifests:
        found = mismatches(manifest, profile, host)
        if found:
            refused[manifest.id] = found
        elif best is None or manifest.created_ms > best.created_ms:
            best = manifest
    return best, refused


def _host(donor: HostFacts, here: HostFacts) -> Iterable[Mismatch]:
    for field, (rule, remedy) in RULES.items():
        expected, found = getattr(donor, field), getattr(here, field)
        if expected is None or found is None:
            yield Mismatch(f"host.{field}", _show(expected), _show(found), _UNKNOWN)
        elif not rule(expected, found):
            if rule is _superset:
                missing = sorted(set(expected) - set(found))
                yield Mismatch(f"host.{field}", " ".join(missing), "none of these", remedy)
            else:
                yield Mismatch(f"host.{field}", _show(expected), _show(found), remedy)


_PLAIN = {"backend": "criu"}
"""What a field that is not there stands for."""


def _profile(donor: Profile, here: Profile) -> Iterable[Mismatch]:
    remedy = "put the setting back, or make a new snapshot with `rewake snapshot create`"
    for field in ("model", "engine", "backend", "command", "port", "gpus", "warmup"):
        expected, found = getattr(donor, field), getattr(here, field)
        if expected != found:
            plain = _PLAIN.get(field, "none")
            yield Mismatch(f"profile.{field}", _show(expected or plain), _show(found or plain), remedy)
    for field in ("env", "weights"):
        expected, found = getattr(donor, field), getattr(here, field)
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                yield Mismatch(f"profile.{field}.{key}", _show(expected.get(key)), _show(found.get(key)), remedy)


def _show(value: object) -> str:
    if value is None:
        return "unknown"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
