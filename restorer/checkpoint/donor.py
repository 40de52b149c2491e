"""What a manifest says of the donor beside its memory: what it takes of its host, which secrets it holds, what it is.

Reads /proc of the donor's processes and asks the engine its version; decides nothing but what the operator has decided.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from policies import secrets
from policies.manifest import UNLIMITED, Needs, Profile
from policies.trust import Trust
from restorer.errors import SnapshotError
from restorer.system.files import allocated

_PROC = Path("/proc")
_VERSIONS = {"llama-server": ("/props", "build_info"), "vllm": ("/version", "version"), "sglang": ("/get_server_info", "version")}
"""Which engine says its version where."""
_ASK_S = 5.0
_REVISION = re.compile(r"/snapshots/([0-9a-f]{40})/")
"""Where caches of model hubs keep a revision's files."""


@dataclass(frozen=True, slots=True)
class Donor:
    """What was found."""

    needs: Needs
    secrets: tuple[str, ...]
    model_revision: str | None


def look(pids: Iterable[int], shm: Path, profile: Profile, trust: Trust, proc: Path = _PROC) -> Donor:
    """Everything of a donor that runs. Blocks.

    Args:
        pids: its processes, as numbered on the host.
        shm: its /dev/shm, as seen from the host.

    Raises:
        SnapshotError: it holds secrets, and the operator wants no snapshot of such a donor.
    """
    family = list(pids)
    held = tuple(sorted({name for pid in family for name in _secrets(proc / str(pid), trust)}))
    if held and trust.secrets == "refuse":
        raise SnapshotError(
            f"the donor holds secrets ({', '.join(held)}), and trust.secrets is refuse; let the engine read them from files, or "
            "name what is no secret in trust.not_secret"
        )
    revisions = {match[1] for path in profile.weights for match in [_REVISION.search(path)] if match}
    return Donor(
        needs=_needs([proc / str(pid) for pid in family], shm),
        secrets=held,
        model_revision=" ".join(sorted(revisions)) or None,
    )


async def version(client: httpx.AsyncClient, kind: str) -> str | None:
    """What an engine says of its version; None: it does not say."""
    path, field = _VERSIONS.get(kind, ("", ""))
    if not path:
        return None
    with contextlib.suppress(httpx.HTTPError, ValueError, TypeError, AttributeError):
        answer = await client.get(path, timeout=_ASK_S)
        said = answer.json().get(field) if answer.is_success else None
        return str(said)[:200] if said else None
    return None


def _secrets(process: Path, trust: Trust) -> Iterator[str]:
    environ = dict(pair.split("=", 1) for pair in _words(process / "environ") if "=" in pair)
    yield from secrets.found(environ, _words(process / "cmdline"), trust)


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [word for word in path.read_bytes().decode(errors="surrogateescape").split("\0") if word]
    return []


def _needs(processes: Sequence[Path], shm: Path) -> Needs:
    memory = 0
    pools: dict[int, int] = {}
    shared: dict[tuple[str, int], int] = {}
    for process in processes:
        rolled = dict(_fields(process / "smaps_rollup"))
        memory += sum(rolled.get(field, 0) for field in ("Pss_Anon", "Pss_Shmem", "SwapPss")) << 10
        if rolled.get("Private_Hugetlb", 0) + rolled.get("Shared_Hugetlb", 0):
            for inode, page_kib, pages in _huge(process / "smaps"):
                if inode == "0":
                    pools[page_kib] = pools.get(page_kib, 0) + pages
                else:
                    shared[inode, page_kib] = max(pages, shared.get((inode, page_kib), 0))
    for (_, page_kib), pages in shared.items():
        pools[page_kib] = pools.get(page_kib, 0) + pages
    with contextlib.suppress(OSError):
        return Needs(
            memory_bytes=memory,
            shm_bytes=allocated(shm),
            hugepages={str(page_kib): pages for page_kib, pages in sorted(pools.items())},
            nofile=max((_limit(process, "Max open files") for process in processes), default=0),
            memlock=max((_limit(process, "Max locked memory") for process in processes), default=0),
        )
    raise SnapshotError(f"{shm} of the donor cannot be read; it has ended")


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    """The ``Name: 12 kB`` lines of a file."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if len(words) == 2 and words[1] == "kB":
                yield name, int(words[0])


def _huge(smaps: Path) -> Iterator[tuple[str, int, int]]:
    """(inode, page size in KiB, pages reserved) of each mapping of huge pages; inode ``0``: nobody shares it."""
    inode, size, page = "0", 0, 0
    with contextlib.suppress(OSError):
        for line in smaps.read_text().splitlines():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                inode = words[4]
            elif words[0] == "Size:":
                size = int(words[1])
            elif words[0] == "KernelPageSize:":
                page = int(words[1])
            elif words[0] == "VmFlags:" and "ht" in words and page:
                yield inode, page, size // page


def _limit(process: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (process / "limits").read_text().splitlines():
            if line.startswith(name):
                hard = line.removeprefix(name).split()[1]
                return UNLIMITED if hard == "unlimited" else int(hard)
    return 0
