"""Can this snapshot run here? Answers with every mismatch, never just the first.

How facts of a host are compared is :mod:`policies.matching`'s table to say; settings must be equal, each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from policies.manifest import GpuFacts, HostFacts, Manifest, Profile
from policies.matching import FACTS, GPU_FACTS, MATCHING, Comparison, Matching, Mismatch, Rule, compare, show
from policies.secrets import hidden, hidden_argv
from policies.trust import TRUST

__all__ = ["Mismatch", "gpu_obstacles", "host_mismatches", "mismatches", "newest_fit", "profile_mismatches", "waived"]

_PLAIN = {"backend": "criu"}
"""What it means where a profile names none."""


_NOTHING = HostFacts(
    hostname="",
    **dict.fromkeys(("arch", "kernel", "cpu_model", "cpu_flags", "xsave_size", "criu_version", "criu_sha256", "page_size")),
)


def mismatches(manifest: Manifest, profile: Profile, host: HostFacts, matching: Matching = MATCHING) -> list[Mismatch]:
    """Every reason why ``manifest`` cannot serve ``profile`` on ``host``; empty when it can."""
    return [*profile_mismatches(manifest.profile, profile), *host_mismatches(manifest, host, matching)]


def host_mismatches(manifest: Manifest, host: HostFacts, matching: Matching = MATCHING) -> list[Mismatch]:
    """Every reason why ``manifest`` cannot be restored on ``host``, whatever the settings there.

    Any GPU of the same model will do. The driver wants every GPU that it knew mapped to one that it knows, so hosts must have
    the same ones.
    """
    if manifest.gpu is not None and host.gpu is None:
        found = compare(manifest, host, matching, FACTS)
        return [*_failed(found), Mismatch("host.gpu", "an NVIDIA driver", "none", "restore on a host with the donor's GPUs")]
    return list(_failed(compare(manifest, host, matching)))


def waived(manifest: Manifest, host: HostFacts, matching: Matching) -> list[Mismatch]:
    """What passes on ``host`` only because the operator has changed a rule."""
    found = []
    for one in compare(manifest, host, matching):
        if one.waived:
            setting = "matching.ignore_cpu_flags" if one.waived == "flags" else f"matching.rules.{one.field}: {one.rule}"
            found.append(Mismatch(f"host.{one.field}", one.expected, one.found, f"let pass by {setting}"))
    return found


def gpu_obstacles(here: GpuFacts | None) -> list[Mismatch]:
    """Every reason why no engine on a GPU of this host can be captured."""
    if here is None:
        return [Mismatch("host.gpu", "an NVIDIA driver", "none", "run the engine on a host with a GPU")]
    host = _NOTHING.model_copy(update={"gpu": here})
    found = []
    for field in ("gpu.driver", "gpu.names", "gpu.mig", "gpu.mps"):
        fact = GPU_FACTS[field]
        value = fact.here(host)
        if value is None:
            found.append(Mismatch(f"host.{field}", "known", "unknown", "run `rewake doctor`"))
        elif fact.rule is Rule.CLASS and fact.kind(value):
            found.append(Mismatch(f"host.{field}", "off", "on", fact.remedy))
    return found


def newest_fit(
    manifests: Iterable[Manifest], profile: Profile, host: HostFacts, matching: Matching = MATCHING
) -> tuple[Manifest | None, dict[str, list[Mismatch]]]:
    """The newest snapshot that fits, and for each that does not, why."""
    best: Manifest | None = None
    refused: dict[str, list[Mismatch]] = {}
    for manifest in manifests:
        found = mismatches(manifest, profile, host, matching)
        if found:
            refused[manifest.id] = found
        elif best is None or manifest.created_ms > best.created_ms:
            best = manifest
    return best, refused


def profile_mismatches(donor: Profile, here: Profile) -> Iterable[Mismatch]:
    """Every setting that differs. Secrets are never shown, not even those that an older snapshot has as they were."""
    remedy = "put the setting back, or make a new snapshot with `rewake snapshot create`"
    for field in ("model", "engine", "backend", "command", "port", "gpus", "warmup"):
        expected, found = getattr(donor, field), getattr(here, field)
        if expected != found:
            if field == "command":
                expected, found = hidden_argv(expected, TRUST), hidden_argv(found, TRUST)
            plain = _PLAIN.get(field, "none")
            yield Mismatch(f"profile.{field}", show(expected or plain), show(found or plain), remedy)
    for field in ("env", "weights"):
        expected, found = getattr(donor, field), getattr(here, field)
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                yield Mismatch(f"profile.{field}.{key}", _said(key, expected), _said(key, found), remedy)


def _said(key: str, values: Mapping[str, str]) -> str:
    return hidden({key: values[key]}, TRUST)[key] if key in values else show(None)


def _failed(compared: Iterable[Comparison]) -> Iterable[Mismatch]:
    return (Mismatch(f"host.{one.field}", one.expected, one.found, one.remedy) for one in compared if not one.same)
