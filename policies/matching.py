"""How each fact of a host is compared with the donor's: one rule per fact, in one literal table, and what an operator may change.

An unknown fact is a mismatch under every rule but ``report``: a restore that might crash half-way costs more than a cold start.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import field_validator

from policies.manifest import UNLIMITED, GpuFacts, HostFacts, HugePool, Manifest
from policies.scalars import Section


class Rule(enum.StrEnum):
    """How two values of a fact are compared."""

    EQUAL = "equal"
    SUPERSET = "superset"
    """This host has all that the donor's had."""
    AT_LEAST = "at_least"
    """This host has as much as the donor took, or as the donor's host had."""
    CLASS = "class"
    """Both are of one kind: a kernel or CRIU of the same major and minor version, a driver of the same branch."""
    REPORT = "report"
    """A difference is shown, and nothing follows from it."""


class Mismatch(NamedTuple):
    """One reason why a snapshot does not fit."""

    field: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}; {self.remedy}"


class Fact(NamedTuple):
    """One row of :data:`FACTS`."""

    rule: Rule
    """Unless the operator chooses another."""
    others: tuple[Rule, ...]
    """What the operator may choose instead."""
    remedy: str
    donor: Callable[[Manifest], Any]
    """What a restore needs; None: unknown."""
    here: Callable[[HostFacts], Any]
    """What this host has; None: unknown."""
    kind: Callable[[Any], Any] = str
    """What :attr:`Rule.CLASS` compares."""


def _both(field: str) -> tuple[Callable[[Manifest], Any], Callable[[HostFacts], Any]]:
    return lambda manifest: getattr(manifest.host, field), lambda host: getattr(host, field)


def _need(field: str) -> tuple[Callable[[Manifest], Any], Callable[[HostFacts], Any]]:
    """What the donor itself took counts, not what its host had to give."""
    return lambda manifest: getattr(manifest.needs, field) if manifest.needs else None, lambda host: getattr(host, field)


def _pids(manifest: Manifest) -> int:
    return max(manifest.pids, default=0) + 1


def _free(host: HostFacts) -> dict[str, int] | None:
    return None if host.hugepages is None else {str(pool.size_kib): pool.free for pool in host.hugepages}


def _of_gpu(read: Callable[[GpuFacts], Any]) -> tuple[Callable[[Manifest], Any], Callable[[HostFacts], Any]]:
    return (
        lambda manifest: None if manifest.host.gpu is None else read(manifest.host.gpu),
        lambda host: None if host.gpu is None else read(host.gpu),
    )


def _each(field: str) -> Callable[[GpuFacts], Any]:
    """One fact of every GPU, sorted: which of them sits in which slot does not matter. None when one is unknown."""

    def read(facts: GpuFacts) -> Any:
        values = [getattr(gpu, field) for gpu in facts.gpus or ()]
        return tuple(sorted(values)) if values and None not in values else None

    return read


def _links(manifest: Manifest) -> Any:
    """One GPU alone is linked with nothing."""
    if manifest.gpu is not None and len(manifest.gpu.used) == 1:
        return ""
    return None if manifest.host.gpu is None else manifest.host.gpu.topology


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _branch(driver: str) -> str:
    return driver.partition(".")[0]


def _on(switches: Any) -> bool:
    return any(switches) if isinstance(switches, tuple) else bool(switches)


_HERE = "or make a snapshot on this host"
_CPU = f"restore on a CPU with the same extended state, {_HERE}"
_R = Rule
FACTS: Mapping[str, Fact] = {
    "arch": Fact(_R.EQUAL, (), "restore on a host of the same architecture", *_both("arch")),
    "kernel": Fact(_R.EQUAL, (_R.CLASS, _R.REPORT), f"boot the donor's kernel, {_HERE}", *_both("kernel"), _minor),
    "page_size": Fact(_R.EQUAL, (), "boot a kernel with the donor's page size", *_both("page_size")),
    "cpu_model": Fact(_R.REPORT, (_R.EQUAL,), f"restore on the donor's CPU model, {_HERE}", *_both("cpu_model")),
    "cpu_flags": Fact(_R.SUPERSET, (_R.EQUAL, _R.REPORT), f"restore on a CPU with these features, {_HERE}", *_both("cpu_flags")),
    "xsave_size": Fact(_R.EQUAL, (_R.REPORT,), _CPU, *_both("xsave_size")),
    "xsave_max": Fact(_R.EQUAL, (_R.REPORT,), _CPU, *_both("xsave_max")),
    "xfeatures": Fact(_R.SUPERSET, (_R.EQUAL, _R.REPORT), _CPU, *_both("xfeatures")),
    "criu_version": Fact(
        _R.EQUAL,
        (_R.CLASS, _R.REPORT),
        "install the donor's CRIU version, or make a snapshot with this one",
        *_both("criu_version"),
        _minor,
    ),
    "criu_sha256": Fact(_R.REPORT, (_R.EQUAL,), "install the donor's build of CRIU", *_both("criu_sha256")),
    "criu_features": Fact(
        _R.SUPERSET, (_R.EQUAL, _R.REPORT), "boot a kernel with these features, see `criu check`", *_both("criu_features")
    ),
    "cgroup": Fact(_R.EQUAL, (_R.REPORT,), "boot with the donor's version of cgroups", *_both("cgroup")),
    "io_uring": Fact(_R.REPORT, (_R.EQUAL,), "set kernel.io_uring_disabled as the donor's host has it", *_both("io_uring")),
    "ptrace_scope": Fact(
        _R.CLASS, (_R.EQUAL, _R.REPORT), "set kernel.yama.ptrace_scope below 3", *_both("ptrace_scope"), lambda scope: scope >= 3
    ),
    "time_namespace": Fact(_R.AT_LEAST, (_R.REPORT,), "boot a kernel with time namespaces", *_both("time_namespace")),
    "pid_max": Fact(_R.AT_LEAST, (_R.REPORT,), "raise kernel.pid_max", _pids, lambda host: host.pid_max),
    "nofile": Fact(_R.AT_LEAST, (_R.REPORT,), "raise fs.nr_open, or the restorer's LimitNOFILE", *_need("nofile")),
    "memlock": Fact(_R.AT_LEAST, (_R.REPORT,), "raise the restorer's LimitMEMLOCK", *_need("memlock")),
    "memory_bytes": Fact(_R.AT_LEAST, (_R.REPORT,), "restore on a host with more memory", *_need("memory_bytes")),
    "shm_bytes": Fact(
        _R.AT_LEAST, (_R.REPORT,), "restore where there is more memory: /dev/shm has half of it", *_need("shm_bytes")
    ),
    "hugepages": Fact(
        _R.AT_LEAST,
        (_R.REPORT,),
        "free some, or raise /sys/kernel/mm/hugepages/hugepages-SIZEkB/nr_hugepages",
        lambda manifest: None if manifest.needs is None else dict(manifest.needs.hugepages),
        _free,
    ),
}
"""Every fact that is compared for every snapshot."""

_OFF = "cannot be checkpointed"
GPU_FACTS: Mapping[str, Fact] = {
    "gpu.driver": Fact(
        _R.EQUAL,
        (_R.CLASS, _R.REPORT),
        "install the donor's driver, or make a snapshot with this one",
        *_of_gpu(lambda facts: facts.driver),
        _branch,
    ),
    "gpu.names": Fact(_R.EQUAL, (), f"restore on a host with the donor's GPUs, {_HERE}", *_of_gpu(_each("name"))),
    "gpu.memory_bytes": Fact(
        _R.EQUAL, (_R.AT_LEAST, _R.REPORT), f"restore on GPUs of the donor's size, {_HERE}", *_of_gpu(_each("memory_bytes"))
    ),
    "gpu.compute": Fact(_R.EQUAL, (), "restore on GPUs of the same compute capability", *_of_gpu(_each("compute"))),
    "gpu.topology": Fact(
        _R.EQUAL,
        (_R.REPORT,),
        "restore on a host whose GPUs are linked alike",
        _links,
        lambda host: None if host.gpu is None else host.gpu.topology,
    ),
    "gpu.mig": Fact(
        _R.CLASS,
        (),
        f"switch MIG off (nvidia-smi -mig 0): a part of a GPU {_OFF}",
        lambda _: False,
        _of_gpu(_each("mig"))[1],
        _on,
    ),
    "gpu.mps": Fact(
        _R.CLASS,
        (),
        f"stop nvidia-cuda-mps-control: a client of it {_OFF}",
        lambda _: False,
        _of_gpu(lambda facts: facts.mps)[1],
        _on,
    ),
    "gpu.persistence": Fact(
        _R.REPORT, (_R.EQUAL,), "switch persistence mode on (nvidia-smi -pm 1)", *_of_gpu(_each("persistence"))
    ),
    "gpu.ecc": Fact(_R.REPORT, (_R.EQUAL,), "switch ECC as the donor's host has it (nvidia-smi -e)", *_of_gpu(_each("ecc"))),
}
"""Every fact that is compared besides, for engines that use a GPU."""
ALL: Mapping[str, Fact] = {**FACTS, **GPU_FACTS}

_IGNORABLE = (
    # How fast something is.
    "erms fsrm fsrs fzrm rep_good ida arat epb pln pts dtherm hwp hwp_notify hwp_act_window hwp_epp hwp_pkg_req "
    # What clocks and counters there are, and who may read them.
    "constant_tsc nonstop_tsc tsc_known_freq tsc_reliable tsc_adjust tsc_deadline_timer art arch_perfmon pebs bts aperfmperf "
    # How the kernel is placed, and what it does against side channels.
    "hypervisor xtopology nopti pti md_clear flush_l1d arch_capabilities ibrs ibpb stibp ssbd ibrs_enhanced virt_ssbd "
    "amd_lbr_v2 amd_ppin intel_ppin cqm cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local cat_l3 cat_l2 cdp_l3 cdp_l2 mba rdt_a"
)
IGNORABLE_FLAGS = frozenset(_IGNORABLE.split())
"""CPU flags that no program can fault for want of."""


class Matching(Section):
    """Which hosts a snapshot fits. Every fact has a rule (`rewake snapshot explain` shows it); these change it, for hosts that
    are known to do. What passes only because of them is logged at each restore, and shown."""

    rules: Mapping[str, Rule] = {}
    """Fact -> rule, such as `kernel: class` or `kernel: report`."""
    ignore_cpu_flags: tuple[str, ...] = ()
    """CPU flags that this host may lack; only such that say how fast something is (`erms`), or how the kernel is placed."""

    @field_validator("rules")
    @classmethod
    def _known(cls, rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
        for field, rule in rules.items():
            fact = ALL.get(field)
            if fact is None:
                raise ValueError(f"there is no fact {field!r}; there are {', '.join(ALL)}")
            if rule not in (fact.rule, *fact.others):
                choice = " or ".join((fact.rule, *fact.others))
                raise ValueError(f"{field} cannot be compared by {rule}, only by {choice}")
        return rules

    @field_validator("ignore_cpu_flags")
    @classmethod
    def _harmless(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [flag for flag in flags if flag not in IGNORABLE_FLAGS]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: an engine may have chosen code that needs it, and would die of SIGILL; only these may be "
                f"ignored: {' '.join(sorted(IGNORABLE_FLAGS))}"
            )
        return flags

    def rule(self, field: str) -> Rule:
        """How a fact is compared under these settings."""
        return self.rules.get(field, ALL[field].rule)


MATCHING = Matching()
"""The defaults."""


class Comparison(NamedTuple):
    """One fact, compared."""

    field: str
    rule: Rule
    same: bool
    """Under the rule that is in force."""
    expected: str
    found: str
    remedy: str
    waived: Literal["", "rule", "flags"] = ""
    """It passes, and under the defaults it would not."""


_UNKNOWN = "an unknown fact cannot be trusted; run `rewake doctor`"
_UNRECORDED = "the snapshot does not say, as those of earlier versions do not; make a new one"


def compare(manifest: Manifest, host: HostFacts, matching: Matching, fields: Iterable[str] | None = None) -> list[Comparison]:
    """Every fact of ``host`` compared with what a snapshot needs, in the table's order."""
    wanted = fields if fields is not None else (ALL if manifest.gpu is not None else FACTS)
    return [_compared(field, manifest, host, matching) for field in wanted]


def _compared(field: str, manifest: Manifest, host: HostFacts, matching: Matching) -> Comparison:
    fact, rule = ALL[field], matching.rule(field)
    donor, here = fact.donor(manifest), fact.here(host)
    ignored = frozenset(matching.ignore_cpu_flags) if field == "cpu_flags" else frozenset()
    same = _fits(fact, rule, donor, here, ignored)
    default = _fits(fact, fact.rule, donor, here, frozenset())
    waived: Literal["", "rule", "flags"] = "" if default or not same else "rule" if rule is not fact.rule else "flags"
    expected, found = _shown(rule if not same else fact.rule, donor, here)
    unknown = _UNRECORDED if donor is None else _UNKNOWN if here is None else ""
    remedy = unknown or fact.remedy
    if unknown and not same and Rule.REPORT in fact.others:
        remedy = f"{unknown}, or set matching.rules.{field}: report"
    return Comparison(field, rule, same, expected, found, remedy, waived)


def _fits(fact: Fact, rule: Rule, donor: Any, here: Any, ignored: frozenset[str]) -> bool:
    if rule is Rule.REPORT or (isinstance(donor, dict | str) and not donor):
        return True  # nothing is asked for
    if donor is None or here is None:
        return False
    if rule is Rule.EQUAL:
        return bool(_without(donor, ignored) == _without(here, ignored))
    if rule is Rule.SUPERSET:
        return donor & ~here == 0 if isinstance(donor, int) else set(donor) - ignored <= set(here)
    if rule is Rule.CLASS:
        return bool(fact.kind(donor) == fact.kind(here))
    if isinstance(donor, dict):
        return all(here.get(size, 0) >= count for size, count in donor.items())
    if isinstance(donor, tuple):
        return len(donor) == len(here) and all(one >= other for one, other in zip(here, donor, strict=True))
    return bool(here >= donor)


def _without(value: Any, ignored: frozenset[str]) -> Any:
    return set(value) - ignored if ignored else value


def _shown(rule: Rule, donor: Any, here: Any) -> tuple[str, str]:
    """What was expected and what was found, in words; of sets only what is missing."""
    if (
        isinstance(donor, tuple)
        and isinstance(here, tuple)
        and rule is Rule.SUPERSET
        and (missing := sorted(set(donor) - set(here)))
    ):
        return " ".join(missing), "none of these"
    return show(donor), show(here)


def show(value: Any) -> str:
    """A fact in words."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{count} of {size} KiB" for size, count in value.items()) or "none"
    if isinstance(value, HugePool):
        return f"{value.free} of {value.total} of {value.size_kib} KiB free"
    if isinstance(value, tuple):
        return " ".join(map(show, value)) or "none"
    return "unlimited" if value == UNLIMITED else str(value)
