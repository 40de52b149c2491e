"""Durable writes, hashes and remembered hashes, on real files."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_installation import eventually

from restorer.errors import Environment, ToolHung
from restorer.storage import stamps as module
from restorer.storage.stamps import SETTLE_NS, Stamps
from restorer.system import modules
from restorer.system.files import allocated, copy_sparse, dig_holes, disk_space, fsync_tree, hash_file, write_durable


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def settled(path: Path, data: bytes) -> Path:
    """A file old enough for its hash to be remembered."""
    path.write_bytes(data)
    while time.time_ns() <= path.stat().st_ctime_ns + SETTLE_NS:
        pass
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes that were really read, in order."""
    inodes: list[int] = []
    real = module.hash_fd

    def spy(fd: int, tap: module.Tap | None = None, *, sparse: bool = False) -> str:
        inodes.append(os.fstat(fd).st_ino)
        return real(fd, tap, sparse=sparse)

    monkeypatch.setattr(module, "hash_fd", spy)
    return inodes


def test_write_durable_replaces_whole_files_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_durable(path, b"one")
    write_durable(path, b"two", 0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["f"]


def test_write_durable_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_durable(path, b"one")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_durable(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_333_333])
def test_hash_file_equals_hashlib(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert hash_file(tmp_path / "f") == sha(data)


def test_hash_file_counts_holes_as_zeros(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.seek(3 << 20)
        file.write(b"data")
        file.truncate((7 << 20) + 13)
    assert allocated(path) < 1 << 20
    assert hash_file(path) == sha(path.read_bytes())


def test_a_sparse_hash_depends_on_the_content_alone(tmp_path: Path) -> None:
    page = os.urandom(4096)
    contents = [
        b"",
        bytes(4096),
        bytes(1 << 20),
        page,
        page + bytes(4096),
        bytes(4096) + page,
        page + bytes(64 << 10) + page,
        page + bytes((64 << 10) + 4096) + page,
        page + bytes(1 << 20) + page,
        page + bytes(2 << 20) + page,
        page + page,
        page + bytes(1 << 20) + b"tail",
    ]
    found = []
    for content in contents:
        (tmp_path / "dense").write_bytes(content)
        with (tmp_path / "sparse").open("wb") as file:
            for at in range(0, len(content), 4096):
                if any(content[at : at + 4096]):
                    file.seek(at)
                    file.write(content[at : at + 4096])
            file.truncate(len(content))
        found.append(hash_file(tmp_path / "dense", sparse=True))
        assert hash_file(tmp_path / "sparse", sparse=True) == found[-1]
    assert len(set(found)) == len(contents)


def test_a_sparse_hash_of_20_gb_of_holes_is_a_moment(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.write(b"begin")
        file.truncate(20_000_000_000)
    began = time.process_time()
    hash_file(tmp_path / "f", sparse=True)
    assert time.process_time() - began < 1


def test_what_is_known_of_a_file_is_known_in_one_way(tmp_path: Path, hashed: list[int]) -> None:
    stamps, path = Stamps(tmp_path / "stamps.json"), settled(tmp_path / "f", b"a" * 5000)
    plain = stamps.sha256_all([path])
    sparse = stamps.sha256_all([path], sparse=True)
    assert plain != sparse
    assert stamps.sha256_all([path], sparse=True) == sparse
    assert len(hashed) == 2
    assert Stamps(tmp_path / "stamps.json").sha256_all([path]) == plain


def test_hash_file_refuses_symlinks_and_fifos(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to("f")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(OSError, match=r"symbolic links|not a regular file"):
            hash_file(tmp_path / name)


def test_dig_holes_frees_zeros_and_keeps_content(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(4096) + bytes(4 << 20) + os.urandom(4096))
    fsync_tree(tmp_path)
    before, digest = allocated(path), hash_file(path)
    freed = dig_holes(path)
    assert hash_file(path) == digest
    assert freed >= (4 << 20) - 8192
    assert allocated(path) == before - freed


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A ``fallocate`` that hangs; asked for its pid, which it writes down as soon as it runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/fallocate").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.part\nmv {tmp_path}/pid.part {tmp_path}/pid\nexec sleep 1000\n"
    )
    (tmp_path / "bin/fallocate").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def pid() -> str:
        return (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else ""

    return pid


def test_holes_that_are_dug_for_ever_end_with_the_tool_killed(tmp_path: Path, hanging: Callable[[], str]) -> None:
    """A donor stands still while they are dug."""
    (tmp_path / "f").write_bytes(b"x" * 4096)
    with pytest.raises(ToolHung, match="did not end within"):
        dig_holes(tmp_path / "f", patience_s=3.0)
    assert not Path(f"/proc/{hanging()}").exists()
    assert (tmp_path / "f").read_bytes() == b"x" * 4096


def test_restore_case_79_a_tool_that_hangs_does_not_outlive_a_restorer_that_was_killed(
    tmp_path: Path, hanging: Callable[[], str]
) -> None:
    """As it publishes a snapshot, in threads that are not the process's first."""
    (folder := tmp_path / "snapshot").mkdir()
    (folder / "f").write_bytes(b"x" * (2 << 20))
    script = (
        f"from pathlib import Path; from restorer.storage import objects; objects.seal(Path({str(folder)!r}), {{'f': 2 << 20}})"
    )
    with subprocess.Popen([sys.executable, "-c", script], env=modules.environment()) as sealing:
        pid = eventually(hanging, "the tool to run")
        assert Path(f"/proc/{pid}").exists()
        sealing.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the tool to end")


def test_no_tool_that_digs_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x" * 4096)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Environment, match="fallocate is missing; install util-linux"):
        dig_holes(tmp_path / "f")
    (tmp_path / "fallocate").write_text("#!/bin/sh\n")
    (tmp_path / "fallocate").chmod(0o755)
    with pytest.raises(Environment, match="setpriv is missing; install util-linux"):
        dig_holes(tmp_path / "f")


def test_copy_sparse_keeps_holes_and_size(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb+") as source, (tmp_path / "b").open("wb+") as target:
        source.seek(2 << 20)
        source.write(b"middle")
        source.truncate(5 << 20)
        source.flush()
        assert copy_sparse(source.fileno(), target.fileno()) <= 8192
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert allocated(tmp_path / "b") <= 8192


def test_full_disk_says_what_where_and_how_much(tmp_path: Path) -> None:
    full = pytest.raises(
        Environment, match=rf"disk full while testing: \d+ bytes are left at {tmp_path}; free at least \d+ bytes"
    )
    with full, disk_space("testing", tmp_path / "not" / "there", need=1 << 60):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError), disk_space("testing", tmp_path):
        raise FileNotFoundError


def test_an_unchanged_file_is_read_once(tmp_path: Path, hashed: list[int]) -> None:
    path = settled(tmp_path / "f", b"content")
    stamps = Stamps(tmp_path / "stamps.json")
    assert {stamps.sha256(path) for _ in range(3)} == {sha(b"content")}
    assert Stamps(tmp_path / "stamps.json").sha256(path) == sha(b"content")
    assert hashed == [path.stat().st_ino]
    assert (tmp_path / "stamps.json").stat().st_mode & 0o777 == 0o600


def test_a_file_written_a_moment_ago_is_not_remembered(
    tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns + SETTLE_NS)
    stamps = Stamps(tmp_path / "stamps.json")
    stamps.sha256(path)
    stamps.sha256(path)
    assert len(hashed) == 2


def test_a_flipped_byte_is_seen_even_with_size_and_mtime_put_back(tmp_path: Path) -> None:
    path = settled(tmp_path / "f", b"content")
    stamps = Stamps(tmp_path / "stamps.json")
    stamps.sha256(path)
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"C")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert stamps.sha256(path) == sha(b"Content")


def test_a_store_through_a_shared_mapping_is_seen(tmp_path: Path) -> None:
    path = settled(tmp_path / "f", bytes(8192))
    stamps = Stamps(tmp_path / "stamps.json")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapping:
        mapping[0] = 1
        while time.time_ns() <= path.stat().st_ctime_ns + SETTLE_NS:
            pass
        first = stamps.sha256(path)
        mapping[1] = 1
        assert stamps.sha256(path) != first


def test_a_symlink_that_moves_on_is_another_file(tmp_path: Path) -> None:
    settled(tmp_path / "a", b"a")
    settled(tmp_path / "b", b"b")
    link = tmp_path / "link"
    link.symlink_to("a")
    stamps = Stamps(tmp_path / "stamps.json")
    assert stamps.sha256(link) == sha(b"a")
    link.unlink()
    link.symlink_to("b")
    assert stamps.sha256(link) == sha(b"b")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format":1,"mar',
        b"\n{}",
        module._seal(b"", b"[]") + b"\n[]",
        module._seal(b"", b'{"/f":{}}') + b'\n{"/f":{}}',
        module._seal(b"", b"\xff") + b"\n\xff",
    ],
)
def test_a_torn_file_is_the_same_as_none(tmp_path: Path, content: bytes) -> None:
    path = settled(tmp_path / "f", b"content")
    (tmp_path / "stamps.json").write_bytes(content)
    (tmp_path / "stamps.json").chmod(0o600)
    assert Stamps(tmp_path / "stamps.json").sha256(path) == sha(b"content")


def test_marks_that_others_could_write_are_not_believed(tmp_path: Path, hashed: list[int]) -> None:
    path = settled(tmp_path / "f", b"content")
    Stamps(tmp_path / "stamps.json").sha256(path)
    forge(tmp_path / "stamps.json", path, key=b"")
    assert Stamps(tmp_path / "stamps.json").sha256(path) == "forged"
    (tmp_path / "stamps.json").chmod(0o620)
    assert Stamps(tmp_path / "stamps.json").sha256(path) == sha(b"content")


def forge(stamps: Path, path: Path, *, key: bytes) -> None:
    """What is remembered of a file becomes something else, under a seal of whoever has ``key``."""
    _, _, data = stamps.read_bytes().partition(b"\n")
    marks = json.loads(data)
    marks[str(path)]["sha256"] = "forged"
    data = json.dumps(marks, separators=(",", ":")).encode()
    stamps.write_bytes(module._seal(key, data) + b"\n" + data)


def test_every_byte_of_the_file_is_under_its_seal(tmp_path: Path) -> None:
    path = settled(tmp_path / "f", b"content")
    Stamps(tmp_path / "stamps.json", key=b"k").sha256(path)
    whole = (tmp_path / "stamps.json").read_bytes()
    assert Stamps(tmp_path / "stamps.json", key=b"k")._marks
    for at in range(len(whole)):
        (tmp_path / "stamps.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not Stamps(tmp_path / "stamps.json", key=b"k")._marks, at


def test_a_forged_hash_is_believed_by_nobody_without_this_boots_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = settled(tmp_path / "f", b"content"), tmp_path / "run"
    run.mkdir()
    key = module.boot_key(run)
    assert key == module.boot_key(run)
    Stamps(tmp_path / "stamps.json", key=key).sha256(path)
    for other in (b"", b"guessed", (run / "stamps.key").read_bytes()):
        forge(tmp_path / "stamps.json", path, key=other)
        assert Stamps(tmp_path / "stamps.json", key=key).sha256(path) == sha(b"content")
    # The next boot has another key, even where the folder outlives it.
    monkeypatch.setattr(module, "BOOT_ID", settled(tmp_path / "boot_id", b"another"))
    assert module.boot_key(run) != key


def test_a_key_that_others_could_have_read_is_replaced(tmp_path: Path) -> None:
    first = module.boot_key(tmp_path)
    (tmp_path / "stamps.key").chmod(0o640)
    second = module.boot_key(tmp_path)
    assert second != first
    assert (tmp_path / "stamps.key").stat().st_mode & 0o777 == 0o600
    assert module.boot_key(tmp_path) == second


def test_the_marks_are_bounded_and_the_ones_longest_unused_go(tmp_path: Path, hashed: list[int]) -> None:
    a, b, c = (settled(tmp_path / name, name.encode()) for name in "abc")
    stamps = Stamps(tmp_path / "stamps.json", limit=2)
    for path in (a, b, a, c, a):
        stamps.sha256(path)
    assert len(hashed) == 3
    stamps.sha256(b)
    assert len(hashed) == 4


def test_forgotten_and_moved_files(tmp_path: Path, hashed: list[int]) -> None:
    (tmp_path / "old").mkdir()
    path = settled(tmp_path / "old" / "f", b"content")
    stamps = Stamps(tmp_path / "stamps.json")
    stamps.sha256(path)
    (tmp_path / "old").rename(tmp_path / "new")
    stamps.moved(tmp_path / "old", tmp_path / "new")
    stamps.sha256(tmp_path / "new" / "f")
    assert len(hashed) == 1
    stamps.forget(tmp_path / "new" / "f")
    stamps.sha256(tmp_path / "new" / "f")
    assert len(hashed) == 2


def test_many_files_at_once_from_many_threads(tmp_path: Path) -> None:
    paths = [tmp_path / f"f{n}" for n in range(50)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * 5000)
    wanted = {path: sha(path.read_bytes()) for path in paths}
    stamps = Stamps(tmp_path / "stamps.json")
    seen: list[Path] = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: stamps.sha256_all(paths), range(4)))
    assert all(result == wanted for result in results)
    missing = stamps.sha256_all([*paths, tmp_path / "no"], progress=seen.append)
    assert isinstance(missing[tmp_path / "no"], FileNotFoundError)
    assert sorted(seen) == sorted([*paths, tmp_path / "no"])


def test_an_unwritable_home_costs_memory_of_hashes_not_correctness(tmp_path: Path) -> None:
    path = settled(tmp_path / "f", b"content")
    assert Stamps(tmp_path / "missing" / "stamps.json").sha256(path) == sha(b"content")


def test_leftovers_of_a_crash_in_mid_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".stamps.json.0123456789ab.tmp").write_bytes(b"{")
    Stamps(tmp_path / "stamps.json")
    assert os.listdir(tmp_path) == []
