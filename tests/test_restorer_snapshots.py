"""The snapshot store and the trees in it, on real files."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policies.manifest import Exchange, HostFacts, Manifest, MappedFile, Profile, canonical
from restorer.errors import Environment, SnapshotError
from restorer.storage import objects, trees
from restorer.storage import snapshots as module
from restorer.storage.snapshots import Fault, SnapshotStore, Staging, capture_tree, lay_tree, verify_files
from restorer.storage.stamps import Stamps
from restorer.system import files
from restorer.system.elf import build_id
from restorer.system.files import allocated, hash_file

HOST = HostFacts(
    hostname="h",
    arch="x86_64",
    kernel="6",
    cpu_model="c",
    cpu_flags=("a",),
    xsave_size=1,
    criu_version="4.2",
    criu_sha256="0",
    page_size=4096,
)
PROFILE = Profile(model="m", engine="http", command=("/e",), env={}, port=1, weights={})


def draft(**changes: object) -> Manifest:
    return Manifest(
        **{
            "created_ms": 1,
            "profile": PROFILE,
            "host": HOST,
            "objects": (),
            "files": (),
            "canary": (
                Exchange(path="/x", request={"temperature": 0}, answer={"logprob": "-0.25", "text": "é\u2028"}, tokens=1),
            ),
            "root_pid": 1000,
            "pids": (1000, 1001),
            "scratch": ("/dev/shm",),
            "criu_options": (),
            "cold_start_s": 1.25,
            "bytes": 0,
            "bytes_written": 0,
            "secrets": (),
            **changes,
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", Stamps(tmp_path / "stamps.json"))


def fill(staging: Staging) -> None:
    """Three images, one of them mostly zeros, and one private folder."""
    (staging.images / "core-1000.img").write_bytes(os.urandom(700))
    (staging.images / "inventory.img").write_bytes(os.urandom(50))
    (staging.images / "pages-1.img").write_bytes(os.urandom(1 << 20) + bytes(2 << 20) + os.urandom(1 << 20))
    (staging.scratch / "0").mkdir()
    (staging.scratch / "0" / "tree.json").write_text("[]")


def committed(store: SnapshotStore, **changes: object) -> Manifest:
    with store.stage() as staging:
        fill(staging)
        return store.commit(staging, draft(**changes))


def edit(path: Path, offset: int) -> None:
    """Flip a byte, as somebody with the right to do so."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(0o400)


def test_a_committed_snapshot_is_named_by_its_content_and_read_only(store: SnapshotStore) -> None:
    manifest = committed(store)
    folder = store.folder(manifest.id)
    assert (folder / "manifest.json").read_bytes() == canonical(manifest)
    assert [item.path for item in manifest.objects] == [
        "images/core-1000.img",
        "images/inventory.img",
        "images/pages-1.img",
        "scratch/0/tree.json",
    ]
    for item in manifest.objects:
        assert item.sha256 == hash_file(folder / item.path, sparse=True)
        assert stat.S_IMODE((folder / item.path).stat().st_mode) == 0o400
    assert store.load(manifest.id) == manifest == store.load(manifest.id[:3])
    assert list(store.list()) == [manifest]
    assert sorted(os.listdir(store.root)) == sorted([manifest.id, "verdicts"])
    assert store.verify(manifest.id, full=True) == store.verify(manifest.id, full=False) == []


def test_restore_case_31_nothing_is_written_twice(store: SnapshotStore) -> None:
    manifest = committed(store)
    size = sum(item.bytes for item in manifest.objects)
    assert manifest.bytes_written / size <= 1.02
    assert manifest.bytes <= size - (2 << 20) + 4 * 4096, "the zeros became holes"
    assert manifest.bytes == sum(allocated(store.folder(manifest.id) / item.path) for item in manifest.objects)


def test_the_first_verification_after_a_commit_reads_nothing(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = committed(store)
    monkeypatch.setattr("restorer.storage.stamps.hash_fd", lambda *_, **__: pytest.fail("a file was read"))
    assert store.verify(manifest.id, full=False) == []


def test_restore_case_27_a_flipped_byte_in_each_object_is_named(store: SnapshotStore) -> None:
    manifest = committed(store)
    for item in manifest.objects:
        path = store.folder(manifest.id) / item.path
        edit(path, item.bytes // 2)
        for full in (False, True):
            faults = store.verify(manifest.id, full=full)
            assert [fault.path for fault in faults] == [item.path]
            assert item.sha256 in faults[0].expected
        edit(path, item.bytes // 2)
    assert store.verify(manifest.id, full=False) == []


def test_restore_case_25_a_truncated_object_is_named_without_reading_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = committed(store)
    monkeypatch.setattr("restorer.storage.stamps.hash_fd", lambda *_, **__: pytest.fail("a file was read"))
    os.truncate(store.folder(manifest.id) / "images/pages-1.img", (4 << 20) - 4096)
    assert store.verify(manifest.id, full=False) == [Fault("images/pages-1.img", f"{4 << 20} bytes", f"{(4 << 20) - 4096} bytes")]


def test_only_a_full_verification_reads_what_is_believed_unchanged(store: SnapshotStore) -> None:
    manifest = committed(store)
    marks = store._stamps._marks
    path = store.folder(manifest.id) / "images/core-1000.img"
    edit(path, 0)  # bit rot: the content differs, while the inode looks as it did
    found = path.stat()
    marks[str(path)] |= {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    assert store.verify(manifest.id, full=False) == []
    seen: list[tuple[int, int]] = []
    assert [f.path for f in store.verify(manifest.id, full=True, progress=lambda *at: seen.append(at))] == [
        "images/core-1000.img"
    ]
    total = sum(item.bytes for item in manifest.objects)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_every_fault_is_reported_not_just_the_first(store: SnapshotStore) -> None:
    manifest = committed(store)
    folder = store.folder(manifest.id)
    (folder / "images/core-1000.img").unlink()
    (folder / "images/inventory.img").chmod(0o644)
    (folder / "images/extra.img").write_bytes(b"")
    (folder / "scratch/elsewhere").symlink_to("/etc")
    (folder / "images").chmod(0o770)
    faults = {fault.path: fault for fault in store.verify(manifest.id, full=False)}
    assert set(faults) == {"images", "images/core-1000.img", "images/inventory.img", "images/extra.img", "scratch/elsewhere"}
    assert faults["images/core-1000.img"].found == "No such file or directory"
    assert str(faults["images/inventory.img"]) == "images/inventory.img: expected mode 0400, found mode 0644"
    assert faults["images"].found == "mode 0770"


def test_a_changed_list_of_chunks_is_a_fault(store: SnapshotStore) -> None:
    manifest = committed(store)
    path = store.folder(manifest.id) / "chunks"
    edit(path, 20)
    assert [fault.path for fault in store.verify(manifest.id, full=True)] == ["chunks"]
    path.unlink()
    assert [fault.path for fault in store.verify(manifest.id, full=False)] == ["chunks"]


def test_a_snapshot_of_the_first_format_is_read_as_it_was(store: SnapshotStore) -> None:
    """It has no list of chunks; its name is the hash of the same bytes as ever."""
    manifest = committed(store)
    folder = store.folder(manifest.id)
    plain = tuple(item.model_copy(update={"sha256": hash_file(folder / item.path)}) for item in manifest.objects)
    older = manifest.model_copy(update={"format": 1, "chunks": None, "objects": plain})
    assert b"chunks" not in canonical(older)
    assert [a.path for a, b in zip(plain, manifest.objects, strict=True) if a.sha256 == b.sha256] == []
    for name in ("manifest.json", "chunks"):
        (folder / name).unlink()
    (folder / "manifest.json").write_bytes(canonical(older))
    folder.rename(store.folder(older.id))
    assert store.load(older.id) == older
    assert store.verify(older.id, full=True) == []
    assert store.sweep(older_than_s=0) == []


def test_an_object_replaced_by_a_symlink_or_by_another_owner_is_refused(store: SnapshotStore) -> None:
    manifest = committed(store)
    path = store.folder(manifest.id) / "images/inventory.img"
    path.rename(store.root / "away")
    path.symlink_to(store.root / "away")
    assert [fault.expected for fault in store.verify(manifest.id, full=False)] == ["a regular file"]
    if os.geteuid() == 0:
        path.unlink()
        (store.root / "away").rename(path)
        os.chown(path, 65534, 65534)
        assert [str(fault) for fault in store.verify(manifest.id, full=False)] == [
            "images/inventory.img: expected owner 0, found owner 65534"
        ]


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "images/../../x", "images//x", "manifest.json", "images/\0"])
def test_a_manifest_that_points_outside_is_refused(store: SnapshotStore, path: str) -> None:
    manifest = committed(store)
    objects = (manifest.objects[0].model_copy(update={"path": path}), *manifest.objects[1:])
    forged = manifest.model_copy(update={"objects": objects})
    store.folder(manifest.id).rename(store.folder(forged.id))
    (store.folder(forged.id) / "manifest.json").unlink()
    (store.folder(forged.id) / "manifest.json").write_bytes(canonical(forged))
    faults = store.verify(forged.id, full=False)
    assert path in [fault.path for fault in faults if fault.expected == "a path inside the snapshot"]


def test_an_edited_manifest_is_no_snapshot(store: SnapshotStore) -> None:
    manifest = committed(store)
    path = store.folder(manifest.id) / "manifest.json"
    for data in (canonical(manifest) + b"\n", canonical(manifest).replace(b"1.25", b"1.50"), b"{}", b"", b"\xff"):
        path.unlink()
        path.write_bytes(data)
        assert store.list() == []
        with pytest.raises(SnapshotError, match=r"manifest\.json"):
            store.load(manifest.id)


def test_ids_may_be_shortened_as_long_as_they_are_unambiguous(store: SnapshotStore) -> None:
    with pytest.raises(SnapshotError, match="there is no snapshot 'abc'"):
        store.load("abc")
    with pytest.raises(SnapshotError, match="there is no snapshot ''"):
        store.load("")
    first = committed(store, created_ms=5)
    (store.root / (first.id[:4] + "f" * 12)).mkdir()
    with pytest.raises(SnapshotError, match="could be"):
        store.load(first.id[:4])
    second = committed(store, created_ms=6)
    assert [found.created_ms for found in store.list()] == [6, 5]
    store.remove(first.id)
    assert list(store.list()) == [second]
    with pytest.raises(SnapshotError):
        store.remove("../snapshots")


def test_a_staging_that_fails_leaves_nothing(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, mode: int = 0) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_durable", full)
    with pytest.raises(Environment, match="disk full while committing a snapshot"):
        committed(store)
    assert os.listdir(store.root) == ["verdicts"]


def test_the_manifest_is_written_after_every_object_is_durable(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for name in ("dig_holes", "fsync", "fsync_tree", "write_durable"):
        real = getattr(files, name)
        spy = lambda *a, _name=name, _real=real: (steps.append(f"{_name} {a[0].name}"), _real(*a))[1]  # noqa: E731
        for user in (module, objects):
            if hasattr(user, name):
                monkeypatch.setattr(user, name, spy)
    manifest = committed(store)
    assert steps[0] == "dig_holes pages-1.img"
    assert {"fsync core-1000.img", "fsync inventory.img", "fsync pages-1.img", "fsync tree.json"} <= set(steps[:-1])
    assert steps[-2:] == ["fsync snapshots", "write_durable manifest.json"]
    assert store.load(manifest.id)


@pytest.mark.parametrize("step", ["dig_holes", "fsync", "fsync_tree", "write_durable"])
def test_restore_case_82_a_crash_while_another_is_made_leaves_the_one_there_was(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """There is no moment without a snapshot: ids are hashes, so that nothing is ever replaced."""
    first = committed(store)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for user in (module, objects):
            if hasattr(user, step):
                patch.setattr(user, step, crash)
        with pytest.raises(KeyboardInterrupt):
            committed(store, created_ms=first.created_ms + 1)
    assert [one.id for one in store.list()] == [first.id]
    assert store.verify(first, full=True) == []


def test_a_device_or_symlink_among_the_images_is_refused(store: SnapshotStore) -> None:
    with store.stage() as staging:
        (staging.images / "link").symlink_to("/etc/passwd")
        with pytest.raises(SnapshotError, match=r"images/link is not a regular file"):
            store.commit(staging, draft())
    assert os.listdir(store.root) == ["verdicts"]


def test_sweep_removes_debris_but_neither_snapshots_nor_work_in_progress(store: SnapshotStore) -> None:
    manifest = committed(store)
    half = committed(store, created_ms=2)
    (store.folder(half.id) / "manifest.json").unlink()
    later = store.root / ("ab" * 8)
    later.mkdir()
    (later / "manifest.json").write_text('{"format": 3}')
    abandoned = store.root / ".staging-dead"
    abandoned.mkdir()
    with store.stage() as staging:
        assert store.sweep(older_than_s=3600) == []
        assert sorted(store.sweep(older_than_s=0)) == sorted([".staging-dead", half.id])
        assert staging.images.is_dir()
    assert sorted(os.listdir(store.root)) == sorted([manifest.id, later.name, "verdicts"])


def test_sweep_knows_a_staging_of_another_process(store: SnapshotStore, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from restorer.storage.snapshots import *; from restorer.storage.stamps import Stamps
SnapshotStore(Path({str(store.root)!r}), Stamps(Path({str(tmp_path / "s")!r}))).stage(); print(flush=True)
input()"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        assert store.sweep(older_than_s=0) == []
        maker.kill()
    assert len(store.sweep(older_than_s=0)) == 1


def test_a_crash_while_removing_leaves_no_snapshot(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = committed(store)
    monkeypatch.setattr(module.shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.remove(manifest.id)
    monkeypatch.undo()
    assert store.list() == []
    assert list(store.sweep(older_than_s=0)) == [manifest.id]


def test_restore_case_15_a_changed_binary_or_library_is_refused_by_name(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path / "stamps.json")
    files = []
    for name in ("engine", "libm.so", "weights.gguf", "gone"):
        (tmp_path / name).write_bytes(name.encode() * 100)
        files.append(MappedFile(path=str(tmp_path / name), bytes=100 * len(name), sha256=stamps.sha256(tmp_path / name)))
    manifest = draft(files=tuple(files))
    assert verify_files(manifest, stamps) == []
    (tmp_path / "libm.so").write_bytes(b"libM.so" * 100)
    with (tmp_path / "weights.gguf").open("ab") as file:
        file.write(b"x")
    (tmp_path / "gone").unlink()
    faults = {Path(fault.path).name: fault for fault in verify_files(manifest, stamps)}
    assert set(faults) == {"libm.so", "weights.gguf", "gone"}
    assert faults["weights.gguf"][1:] == ("1200 bytes", "1201 bytes")
    assert faults["gone"].found == "No such file or directory"


def test_restore_case_17_a_library_of_another_driver_is_refused_and_both_versions_are_named(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path / "stamps.json")
    old, new = tmp_path / "libEGL_nvidia.so.560.35.03", tmp_path / "libEGL_nvidia.so.580.1"
    old.write_bytes(b"old")
    manifest = draft(files=(MappedFile(path=str(old), bytes=3, sha256=stamps.sha256(old)),))
    old.rename(new)
    (fault,) = verify_files(manifest, stamps)
    assert fault.path == str(old)
    assert fault.found == "No such file or directory; there is libEGL_nvidia.so.580.1"


def test_a_library_that_changed_is_named_with_its_builds(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path / "stamps.json")
    library = tmp_path / "engine"
    data = Path("/bin/sh").read_bytes()
    library.write_bytes(data)
    build = build_id(library)
    manifest = draft(files=(MappedFile(path=str(library), bytes=len(data), sha256=stamps.sha256(library), build_id=build),))
    library.write_bytes(b"other")
    (fault,) = verify_files(manifest, stamps)
    assert (fault.expected, fault.found) == (f"{len(data)} bytes, build {build}", "5 bytes, build none")


def listing(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything of a tree that a copy must repeat."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        facts = path.lstat()
        if stat.S_ISSOCK(facts.st_mode):
            continue
        content = (
            path.read_bytes() if path.is_file() and not path.is_symlink() else os.readlink(path) if path.is_symlink() else None
        )
        found[str(path.relative_to(root))] = (facts.st_mode, facts.st_uid, facts.st_gid, facts.st_mtime_ns, content)
    return found


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A private folder as an engine may leave it."""
    root = tmp_path / "private"
    (root / "sockets" / "deep").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o711)
    for name, data in {
        "sem.mp-1": b"sem" * 10,
        "link_remap.7": b"remap",
        "psm_1": bytes(1 << 20) + b"end",
        "-x": b"",
        ".hidden": b"h",
    }.items():
        (root / name).write_bytes(data)
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"not utf-8")
    os.link(root / "sem.mp-1", root / "sem.other")
    (root / "dangling").symlink_to("/nowhere")
    os.mkfifo(root / "fifo", 0o620)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "sockets" / "deep" / "ipc"))
    (root / "psm_1").chmod(0o4755)
    os.truncate(root / ".hidden", 64 << 20)
    root.chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(root / "psm_1", 12, 34)
        (root / "psm_1").chmod(0o4755)
    os.utime(root / "empty", ns=(10**18, 10**18 + 7))
    return root


def test_restore_case_19_and_20_private_files_are_captured_and_laid_for_every_restore(tmp_path: Path, private: Path) -> None:
    before = listing(private)
    copied = capture_tree(private, tmp_path / "stored")
    assert copied < 2 << 20, "holes are not copied"
    for n in range(2):
        lay_tree(tmp_path / "stored", tmp_path / f"clone{n}")
        assert listing(tmp_path / f"clone{n}") == before
        (tmp_path / f"clone{n}" / "link_remap.7").unlink()  # as the restore does
        assert (tmp_path / f"clone{n}" / "sem.mp-1").samefile(tmp_path / f"clone{n}" / "sem.other")
        assert not (tmp_path / f"clone{n}" / "sockets/deep/ipc").exists()
        assert (tmp_path / f"clone{n}" / "sockets/deep").is_dir()
        assert allocated(tmp_path / f"clone{n}" / ".hidden") < 1 << 20


def test_restore_case_30_files_laid_in_part_are_never_taken_for_a_whole(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many were laid before the end: what is stored is untouched, none goes on from there, and the next one is whole."""
    before = listing(private)
    capture_tree(private, tmp_path / "stored")
    real, left = trees._lay, 0

    def lay(*entry: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, "the end")
        return real(*entry)

    monkeypatch.setattr(trees, "_lay", lay)
    for count in range(1, len(before)):
        left, box = count, tmp_path / f"box{count}"
        with pytest.raises(OSError, match="the end"):
            lay_tree(tmp_path / "stored", box)
        if any(not path.is_dir() or path.is_symlink() for path in box.rglob("*")):
            left = len(before)
            with pytest.raises(Environment, match="is in the way"):
                lay_tree(tmp_path / "stored", box)
    left = len(before)
    lay_tree(tmp_path / "stored", tmp_path / "next")
    assert listing(tmp_path / "next") == before


def test_a_captured_tree_travels_through_the_store(store: SnapshotStore, private: Path, tmp_path: Path) -> None:
    before = listing(private)
    with store.stage() as staging:
        capture_tree(private, staging.scratch / "shm")
        manifest = store.commit(staging, draft())
    assert store.verify(manifest.id, full=True) == []
    lay_tree(store.folder(manifest.id) / "scratch" / "shm", tmp_path / "laid")
    assert listing(tmp_path / "laid") == before


def test_a_hundred_small_files_are_laid_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for n in range(100):
        (tmp_path / "a" / f"psm_{n}").write_bytes(os.urandom(4096))
    capture_tree(tmp_path / "a", tmp_path / "stored")
    lay_tree(tmp_path / "stored", tmp_path / "b")
    assert listing(tmp_path / "a") == listing(tmp_path / "b")


def test_laying_over_existing_folders_is_fine_but_files_in_the_way_are_not(tmp_path: Path, private: Path) -> None:
    capture_tree(private, tmp_path / "stored")
    (tmp_path / "laid" / "empty").mkdir(parents=True)
    (tmp_path / "laid" / "psm_1").write_bytes(b"old")
    with pytest.raises(Environment, match=r"psm_1 is in the way"):
        lay_tree(tmp_path / "stored", tmp_path / "laid")


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out"])
def test_a_stored_tree_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "stored" / "files").mkdir(parents=True)
    entries = [
        {"path": ".", "kind": "dir", "mode": 0o700, "uid": os.geteuid(), "gid": os.getegid(), "mtime_ns": 0},
        {"path": name, "kind": "symlink", "target": "x", "mode": 0, "uid": 0, "gid": 0, "mtime_ns": 0},
    ]
    (tmp_path / "stored" / "tree.json").write_text(json.dumps(entries))
    with pytest.raises(SnapshotError, match="outside of it"):
        lay_tree(tmp_path / "stored", tmp_path / "laid")
    (tmp_path / "stored" / "tree.json").write_text("[")
    with pytest.raises(SnapshotError, match="cannot be read"):
        lay_tree(tmp_path / "stored", tmp_path / "laid")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a device node")
def test_a_device_node_in_a_private_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    try:
        os.mknod(tmp_path / "a" / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("device nodes are not allowed here")
    with pytest.raises(SnapshotError, match="a/null is a device node"):
        capture_tree(tmp_path / "a", tmp_path / "stored")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_really_full_disk_is_an_environment_error_and_the_staging_is_gone(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(3 << 20))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        store = SnapshotStore(disk / "snapshots", Stamps(tmp_path / "stamps.json"))
        full = pytest.raises(Environment, match=r"disk full while copying .*source into the snapshot: \d+ bytes are left")
        with full, store.stage() as staging:
            capture_tree(source, staging.scratch / "0")
        assert os.listdir(store.root) == ["verdicts"]
    finally:
        subprocess.run(["umount", disk], check=True)
