"""Can this snapshot run here? Answers with every mismatch, never just the first.

Each :data:`RULES` row names a host fact, how it is compared, and what to do about a difference. An unknown fact is a
mismatch: a restore that might crash half-way costs more than a cold start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from policies.manifest import HostFacts, Manifest, Profile


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


def mismatches(manifest: Manifest, profile: Profile, host: HostFacts) -> list[Mismatch]:
    """Every reason why ``manifest`` cannot serve ``profile`` on ``host``; empty when it can."""
    return [*_profile(manifest.profile, profile), *_host(manifest.host, host)]


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
            yield Mismatch(
                f"host.{field}", _show(expected), _show(found), "an unknown fact cannot be trusted; run `rewake doctor`"
            )
        elif not rule(expected, found):
            if rule is _superset:
                missing = sorted(set(expected) - set(found))
                yield Mismatch(f"host.{field}", " ".join(missing), "none of these", remedy)
            else:
                yield Mismatch(f"host.{field}", _show(expected), _show(found), remedy)


def _profile(donor: Profile, here: Profile) -> Iterable[Mismatch]:
    remedy = "put the setting back, or make a new snapshot with `rewake snapshot create`"
    for field in ("model", "engine", "command", "port"):
        expected, found = getattr(donor, field), getattr(here, field)
        if expected != found:
            yield Mismatch(f"profile.{field}", _show(expected), _show(found), remedy)
    for field in ("env", "weights"):
        expected, found = getattr(donor, field), getattr(here, field)
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                yield Mismatch(f"profile.{field}.{key}", _show(expected.get(key)), _show(found.get(key)), remedy)


def _show(value: object) -> str:
    if value is None:
        return "unknown"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
