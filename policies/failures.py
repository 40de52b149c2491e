"""Whose fault a failure is: the host's, the snapshot's, the moment's, a tool's, the environment's; with the line that says so.

What becomes of a snapshot hangs on it. A host that does not fit says nothing about a snapshot; a full disk says nothing about
either; only what is the snapshot's own fault may count against it (:mod:`policies.verdicts`). The table of what CRIU writes is
from real failures of CRIU 4.2; a line that no row knows leaves the error's own kind standing.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

Class = Literal["host", "snapshot", "transient", "tool", "environment", "cancelled"]
"""``host``: another host may do. ``snapshot``: it is at fault. ``transient``: try again. ``tool``: an external program crashed,
hung or failed in a way not known. ``environment``: this host cannot just now. ``cancelled``: nobody wants it any more."""
_MOST_EVIDENCE = 400


class Verdict(BaseModel):
    """Whose fault a failure was, as logs, journals and operators are told."""

    model_config = ConfigDict(frozen=True)
    cls: Class
    evidence: str
    """The line that decided, or the error's own words."""
    remedy: str
    certain: bool = False
    """Of the snapshot: one failure is proof, such as bytes that are not what was committed. Otherwise it takes several."""

    def __str__(self) -> str:
        return f"[{self.cls}] {self.evidence}; {self.remedy}"


_CREATE = "make a new snapshot: `rewake snapshot create MODEL`"
_FILE = f"a file that the engine uses is not the donor's: bring that version back, or {_CREATE}"
_CPU = "this CPU lacks what the donor's has: restore on a host of the donor's kind"
_KERNEL = "kernel or CRIU differ from the donor's: use the donor's versions"
_IMAGE = f"an image is short or damaged: remove the snapshot, and {_CREATE}"
KILLED = "see `dmesg`: most likely the kernel ended it for want of memory; free memory, or run fewer replicas"
_GPU = "its GPU state comes back broken each time: remove the snapshot and make a new one"
_GPU_FULL = "the GPU's memory is too small for this engine as it is told to run, or something else has it: see nvidia-smi"


class Signature(NamedTuple):
    """One thing that CRIU, or an engine that it restored, is known to write."""

    pattern: str
    cls: Class
    remedy: str
    certain: bool = False


_S = Signature
SIGNATURES: tuple[Signature, ...] = (
    # What the environment lacks comes first: everything after it fails for the same reason.
    _S(r"No space left on device|Disk quota exceeded", "environment", "free space on the disk of state_dir or in /dev/shm"),
    _S(r"Cannot allocate memory|Out of memory", "environment", "free memory, or run fewer replicas"),
    _S(r"CUDA(?: error:)? out of memory|CUDA_ERROR_OUT_OF_MEMORY", "environment", _GPU_FULL),
    _S(r"No available memory for the cache blocks", "environment", _GPU_FULL),
    _S(r"Too many open files", "environment", "raise the restorer's limit of open files (LimitNOFILE)"),
    _S(r"Can't fork for \d+: File exists", "transient", "a pid of the snapshot was taken; the next try gets another box"),
    _S(r"Can't bind \w+ socket|Address already in use", "transient", "an address was taken; the next try gets another box"),
    _S(r"Cannot assign requested address", "host", "the engine had an address of its donor: let it listen on 0.0.0.0"),
    _S(r"has bad (?:size|mode)|bad (?:size|mode) \d+|(?i:build-?id).{0,40}(?:mismatch|differ)", "host", _FILE),
    _S(r"Can't open file .+: No such file|Can't open file .+ on restore", "host", _FILE),
    _S(r"(?i)\bcpu\b.{0,60}(?:not match|mismatch|missing|incompatib|not supported)|x(?:save|features).{0,40}\S", "host", _CPU),
    _S(r"(?i)vdso.{0,60}(?:mismatch|differ|unexpected|not found)|unexpected.{0,20}vdso|rseq.{0,40}fail", "host", _KERNEL),
    _S(r"(?i)suspending seccomp failed|PTRACE_O_SUSPEND_SECCOMP", "host", "give the restorer CAP_SYS_ADMIN; see `rewake doctor`"),
    _S(r"(?i)hugetlb|huge ?page", "host", "reserve huge pages of the donor's size on this host"),
    _S(
        r"Unexpected EOF on|empty-image|Read \d+ bytes while \d+ expected|Can't read pages data|[Mm]agic doesn't match",
        "snapshot",
        _IMAGE,
    ),
    _S(r"Unable to (?:open|read) \S+\.img|Can't read \S+ image|Corrupted", "snapshot", _IMAGE),
    _S(r"link_remap\.\d+", "snapshot", "a file that the donor had open without a name is missing: make a new snapshot"),
    _S(r"misaligned address|an illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS", "snapshot", _GPU, certain=True),
)
"""What is written, whose fault it is, what to do. The first row that fits a line decides."""

_REMEDIES: dict[Class, str] = {
    "host": "restore on a host that fits; `rewake snapshot explain MODEL` names every mismatch, and hosts that would do",
    "snapshot": f"{_CREATE}, and remove this one: `rewake snapshot rm ID`",
    "transient": "it is tried again by itself; if it goes on so, the engine's own log says why",
    "tool": "see all that it said, below and in the restorer's log; `rewake doctor` checks what this host lacks",
    "environment": "mend what is named; `rewake doctor` checks what this host lacks",
    "cancelled": "nothing to mend",
}
_ALARMING = re.compile(r"\bError \(|\bERROR\b|rror:")


def classify(kind: Class, message: str, log: str = "", *, certain: bool = False, remedy: str = "") -> Verdict:
    """Judge one failure.

    Args:
        kind: the error's own class, which stands unless a line of the log knows better. Only failures of tools and of moments
            are looked at closer: who has compared facts or hashes knows already.
        message: its words.
        log: what the tool and the engine wrote, oldest line first.
        certain: a snapshot at fault for good, whatever the log says.
        remedy: what mends it, unless a line of the log knows better; empty: what mends most of its class.
    """
    remedy = remedy or _REMEDIES[kind]
    if kind not in ("tool", "transient"):
        return Verdict(cls=kind, evidence=_cut(message), remedy=remedy, certain=certain and kind == "snapshot")
    lines = [line.strip() for line in (log or message).splitlines() if line.strip()]
    for signature in SIGNATURES:
        found = next((line for line in lines if re.search(signature.pattern, line)), None)
        if found is not None:
            return Verdict(cls=signature.cls, evidence=_cut(found), remedy=signature.remedy, certain=signature.certain)
    # The first complaint is the cause; what follows it is CRIU's way back.
    first = next((line for line in lines if _ALARMING.search(line)), message)
    return Verdict(cls=kind, evidence=_cut(first), remedy=remedy)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_EVIDENCE else text[: _MOST_EVIDENCE - 1] + "…"
