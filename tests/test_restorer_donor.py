"""What a donor takes, holds and is: real processes, and a /proc that is written down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from test_policies_compat import PROFILE

from policies.manifest import UNLIMITED
from policies.trust import TRUST, Trust
from restorer.checkpoint import donor
from restorer.errors import SnapshotError
from restorer.system.elf import build_id

CODE = """
import mmap, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.write(b"x" * (32 << 20))
print(flush=True)
input()
"""
HUGE = """7f00-7f01 rw-p 00000000 00:0f 0                          /anon_hugepage (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
VmFlags: rd wr mr mw me de ht
7f10-7f11 rw-s 00000000 00:0f 77                         /memfd:x (deleted)
Size:              10240 kB
KernelPageSize:     2048 kB
VmFlags: rd wr sh mr mw me ms de ht
7f20-7f21 rw-p 00000000 00:00 0
Size:                132 kB
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[int]:
    environ = {"PATH": "/bin", "HF_TOKEN": "hf-value-of-it"}
    argv = [sys.executable, "-c", CODE, "--api-key", "another-value"]
    with subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_what_a_real_process_takes_and_holds(engine: int, tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"x" * 8192)
    profile = PROFILE.model_copy(update={"weights": {f"/hub/snapshots/{'a1' * 20}/model.safetensors": "0" * 64}})
    seen = donor.look([engine], tmp_path, profile, TRUST)
    assert 32 << 20 <= seen.needs.memory_bytes < 512 << 20
    assert seen.needs.shm_bytes == 8192
    assert seen.needs.nofile == 200
    assert seen.needs.hugepages == {}
    assert seen.secrets == ("env HF_TOKEN", "option --api-key")
    assert seen.model_revision == "a1" * 20


def test_restore_case_44_a_donor_with_secrets_is_refused_by_policy_and_nothing_but_names_is_said(
    engine: int, tmp_path: Path
) -> None:
    with pytest.raises(SnapshotError) as refused:
        donor.look([engine], tmp_path, PROFILE, Trust(secrets="refuse"))
    assert "env HF_TOKEN, option --api-key" in str(refused.value)
    assert "value" not in str(refused.value)
    lenient = Trust(secrets="refuse", not_secret=("HF_TOKEN", "API_KEY"))
    assert donor.look([engine], tmp_path, PROFILE, lenient).secrets == ()


def test_huge_pages_are_counted_by_size_and_shared_ones_once(tmp_path: Path) -> None:
    """512 pages of one engine, say, that a restore needs again: restore case 24 compares them with what is free."""
    for pid in ("1", "2"):
        folder = tmp_path / "proc" / pid
        folder.mkdir(parents=True)
        (folder / "smaps_rollup").write_text(
            "Pss_Anon: 8 kB\nPss_Shmem: 4 kB\nPrivate_Hugetlb: 4096 kB\nShared_Hugetlb: 10240 kB\n"
        )
        (folder / "smaps").write_text(HUGE)
        (folder / "limits").write_text("Limit   Soft Limit  Hard Limit  Units\nMax open files  1024  4096  files\n"
                                       "Max locked memory  65536  unlimited  bytes\n")  # fmt: skip
        (folder / "environ").write_bytes(b"")
        (folder / "cmdline").write_bytes(b"")
    needs = donor.look([1, 2], tmp_path / "proc", PROFILE, TRUST, tmp_path / "proc").needs
    assert needs.hugepages == {"2048": 2 + 2 + 5}
    assert (needs.memory_bytes, needs.nofile, needs.memlock) == (24 << 10, 4096, UNLIMITED)


@pytest.mark.parametrize(
    ("kind", "path", "answer", "expected"),
    [
        ("llama-server", "/props", {"build_info": "b4242-abc"}, "b4242-abc"),
        ("vllm", "/version", {"version": "0.11.0"}, "0.11.0"),
        ("vllm", "/elsewhere", {}, None),
        ("vllm", "/version", ["not", "an", "object"], None),
        ("http", "/version", {"version": "1"}, None),
    ],
)
async def test_engines_say_their_version(kind: str, path: str, answer: object, expected: str | None) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answer) if request.url.path == path else httpx.Response(404)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://engine") as client:
        assert await donor.version(client, kind) == expected


def test_build_ids_are_those_that_readelf_shows(tmp_path: Path) -> None:
    for file in (Path(sys.executable).resolve(), Path("/bin/sh").resolve()):
        shown = subprocess.run(["readelf", "-n", file], capture_output=True, text=True, check=True).stdout
        expected = shown.partition("Build ID: ")[2].split("\n")[0] or None
        assert build_id(file) == expected
    for name, data in {"text": b"hello", "empty": b"", "cut": Path("/bin/sh").read_bytes()[:40]}.items():
        (tmp_path / name).write_bytes(data)
        assert build_id(tmp_path / name) is None
    assert build_id(tmp_path / "gone") is None
