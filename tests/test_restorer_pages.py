"""Big memory taken out of CRIU's images and put back: on images made here, and on a real tree with the real CRIU."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restorer.checkpoint import filling as module
from restorer.checkpoint import images, pages
from restorer.checkpoint.filling import Filling
from restorer.checkpoint.images import Field, Image
from restorer.errors import EngineDied, SnapshotError
from restorer.system import pagecache

PAGE = mmap.PAGESIZE
HEAD = bytes.fromhex("19435654") + b"test"
FIELDS = st.builds(
    lambda number, value: Field(number, 0 if isinstance(value, int) else 2, value),
    st.integers(1, 200),
    st.integers(0, 2**64 - 1) | st.binary(max_size=300),
)


@given(st.lists(FIELDS))
def test_a_message_is_read_as_it_was_written(content: list[Field]) -> None:
    assert list(images.fields(images.encoded(content))) == content


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_an_image_is_read_as_it_was_written(messages: list[bytes]) -> None:
    path = Path(f"/dev/shm/rewake-test-{os.getpid()}.img")
    try:
        Image(HEAD, messages).write(path)
        assert images.read(path) == Image(HEAD, messages)
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "no image"), (b"PK\3\4abcd", "no image"), (HEAD + b"\1", "ends in"), (HEAD + b"\5\0\0\0ab", "ends in")],
)
def test_what_is_no_image_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "mm-1.img"
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=said):
        images.read(path)


@pytest.mark.parametrize("message", [b"\x08", b"\x12\x05ab", b"\x0b", b"\x09\1\2"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        list(images.fields(message))


def area(start: int, end: int, *, prot: int = 3, flags: int = 0x22, status: int = 1 | 1 << 9, madv: int | None = None) -> Field:
    """A VMA as CRIU writes it: shared memory id and file id are there too, and a field that nobody here knows."""
    values = {1: start, 2: end, 3: 0, 4: 0, 5: prot, 6: flags, 7: status, 8: 2**64 - 1, 9: madv, 10: 77}
    return Field(14, 2, images.encoded(Field(n, 0, v) for n, v in values.items() if v is not None))


def dump(folder: Path, areas: list[Field], present: list[tuple[int, bytes]], pid: int = 7) -> None:
    """The images of one process: its areas, and (address, content) of its pages."""
    Image(HEAD, [images.encoded([Field(1, 0, 5), *areas, Field(15, 0, 9)])]).write(folder / f"mm-{pid}.img")
    entries = [images.encoded(Field(n, 0, v) for n, v in ((1, at), (2, len(data) // PAGE), (4, 4))) for at, data in present]
    Image(HEAD, [images.encoded([Field(1, 0, 3)]), *entries]).write(folder / f"pagemap-{pid}.img")
    (folder / "pages-3.img").write_bytes(b"".join(data for _, data in present))


def left(folder: Path) -> list[int]:
    """Addresses of the pages that stay with CRIU."""
    return [images.numbers(message)[1] for message in images.read(folder / "pagemap-7.img").messages[1:]]


MIB = 1 << 20
BIG = 0x10000000


def test_only_big_writable_private_anonymous_memory_is_moved(tmp_path: Path) -> None:
    places = [BIG + number * 64 * MIB for number in range(7)]
    areas = [
        area(places[0], places[0] + 2 * MIB),
        area(places[1], places[1] + MIB - PAGE),
        area(places[2], places[2] + 2 * MIB, prot=1),
        area(places[3], places[3] + 2 * MIB, flags=0x01, status=1 | 1 << 8),
        area(places[4], places[4] + 2 * MIB, flags=0x02, status=1 | 1 << 6),
        area(places[5], places[5] + 2 * MIB, flags=0x122, status=3 | 1 << 9),
        area(places[6], places[6] + 2 * MIB, flags=0x40022),
    ]
    dump(tmp_path, areas, [(at, bytes([number + 1]) * PAGE) for number, at in enumerate(places)])
    assert pages.take_out(tmp_path, huge=False).bytes == PAGE
    assert left(tmp_path) == places[1:]
    assert (tmp_path / "pages-3.img").read_bytes() == b"".join(bytes([number]) * PAGE for number in range(2, 8))


def test_nothing_to_move_changes_nothing(tmp_path: Path) -> None:
    dump(tmp_path, [area(BIG, BIG + PAGE)], [(BIG, b"x" * PAGE)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert pages.take_out(tmp_path, huge=True).bytes == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert pages.taken_out(tmp_path) is None


def test_a_run_over_neighbours_is_moved_and_one_beyond_them_is_not(tmp_path: Path) -> None:
    middle, end = BIG + MIB, BIG + 2 * MIB
    areas = [area(BIG, middle), area(middle, end), area(end, end + PAGE)]
    dump(tmp_path, areas, [(middle - PAGE, b"a" * 2 * PAGE), (end - PAGE, b"b" * 2 * PAGE)])
    assert pages.take_out(tmp_path, huge=False).bytes == 2 * PAGE
    assert left(tmp_path) == [end - PAGE]


def test_zeros_are_not_put_back(tmp_path: Path) -> None:
    """They were written all the same, which is said of the snapshot."""
    dump(tmp_path, [area(BIG, BIG + 4 * MIB)], [(BIG, b"a" * PAGE + bytes(MIB) + b"b" * PAGE)])
    assert pages.take_out(tmp_path, huge=False) == (2 * PAGE, MIB)
    bulk = pages.taken_out(tmp_path)
    assert bulk is not None
    assert bulk.bytes == 2 * PAGE
    assert [path.name for path in bulk.paths] == ["bulk-3.img"]


def test_small_holes_are_filled_too(tmp_path: Path) -> None:
    dump(tmp_path, [area(BIG, BIG + 4 * MIB)], [(BIG, b"a" * PAGE + bytes(4 * PAGE) + b"b" * PAGE), (BIG + MIB, b"c" * PAGE)])
    assert pages.take_out(tmp_path, huge=False).bytes == 7 * PAGE
    bulk = pages.taken_out(tmp_path)
    assert bulk is not None
    assert bulk.plan.processes[0].runs == [(BIG, 6 * PAGE, 0), (BIG + MIB, PAGE, 6 * PAGE)]


@pytest.mark.parametrize(("madv", "expected"), [(None, 1 << 14), (1 << 10, 1 << 10 | 1 << 14), (1 << 15, 1 << 15)])
def test_huge_pages_are_advised_unless_the_engine_said_no(tmp_path: Path, madv: int | None, expected: int) -> None:
    dump(tmp_path, [area(BIG, BIG + 2 * MIB, madv=madv)], [(BIG, b"a" * PAGE)])
    pages.take_out(tmp_path, huge=True)
    (message,) = images.read(tmp_path / "mm-7.img").messages
    content = list(images.fields(message))
    assert [field.number for field in content] == [1, 14, 15]
    assert isinstance(content[1].value, bytes)
    assert images.numbers(content[1].value) == {1: BIG, 2: BIG + 2 * MIB, 3: 0, 4: 0, 5: 3, 6: 0x22, 7: 513, 8: 2**64 - 1,
                                                9: expected, 10: 77}  # fmt: skip


def test_a_pages_file_that_is_not_as_mapped_is_refused(tmp_path: Path) -> None:
    dump(tmp_path, [area(BIG, BIG + 2 * MIB)], [(BIG, b"a" * 2 * PAGE)])
    os.truncate(tmp_path / "pages-3.img", PAGE)
    with pytest.raises(SnapshotError, match=r"pages-3\.img holds 4096 bytes, and its map 8192"):
        pages.take_out(tmp_path, huge=False)


@pytest.fixture
def empty() -> Iterator[tuple[int, int, int]]:
    """(pid, address, pipe) of a child with 32 MiB of empty memory, which it sends through the pipe once it is continued."""
    memory = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.kill(os.getpid(), signal.SIGSTOP)
            view = memoryview(memory)
            while view:
                view = view[os.write(writing, view) :]
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, os.WUNTRACED)
    try:
        yield pid, address, reading
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


@contextlib.contextmanager
def filling(folder: Path, *, direct: bool = False) -> Iterator[Filling]:
    bulk = pages.taken_out(folder)
    assert bulk is not None
    found = Filling(bulk, direct=direct, threads=4)
    try:
        found.prepare()
        yield found
    finally:
        found.close()


def received(fd: int) -> bytes:
    return b"".join(iter(lambda: os.read(fd, MIB), b""))


def test_more_threads_wait_for_a_disk_than_for_the_processor_and_all_trees_share_the_buffers(
    tmp_path: Path, empty: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, address, reading = empty
    start = -(-address // PAGE) * PAGE
    data = os.urandom(24 * MIB)
    dump(tmp_path, [area(start, start + 32 * MIB)], [(start, data)])
    assert pages.take_out(tmp_path, huge=False).bytes == len(data)
    (file,) = tmp_path.glob("bulk-*.img")
    lent: list[int] = []
    whole = module.buffers.whole

    def noted(size: int) -> contextlib.AbstractContextManager[memoryview]:
        lent.append(size)
        return whole(size)

    monkeypatch.setattr(module.buffers, "whole", noted)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    # One buffer for all of them: they take turns, and all is filled.
    monkeypatch.setattr(module, "_ROOM", threading.BoundedSemaphore(1))
    bulk = pages.taken_out(tmp_path)
    assert bulk is not None
    for there, threads in ((False, 24), (True, 2)):
        pagecache.evict([file])
        if there:
            file.read_bytes()
        lent.clear()
        found = Filling(bulk, direct=True)
        try:
            found.prepare()
            found.put_back({7: pid})
        finally:
            found.close()
        assert len(lent) == threads
    os.kill(pid, signal.SIGCONT)
    assert received(reading)[start - address :][: len(data)] == data


def test_a_tree_that_is_long_in_coming_keeps_no_other_from_the_buffers(
    tmp_path: Path, empty: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, address, reading = empty
    start = -(-address // PAGE) * PAGE
    data = os.urandom(6 * MIB)
    dump(tmp_path, [area(start, start + 32 * MIB)], [(start, data)])
    pages.take_out(tmp_path, huge=False)
    monkeypatch.setattr(module, "_ROOM", threading.BoundedSemaphore(1))
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    with filling(tmp_path) as waiting, filling(tmp_path) as other:
        other.put_back({7: pid})
        # What the first had read and given away is read again, and nothing of it is left out.
        waiting.put_back({7: pid})
    os.kill(pid, signal.SIGCONT)
    assert received(reading)[start - address :][: len(data)] == data


def test_a_filling_that_is_given_up_lets_go_of_its_threads(tmp_path: Path) -> None:
    dump(tmp_path, [area(BIG, BIG + 8 * MIB)], [(BIG, os.urandom(6 * MIB))])
    pages.take_out(tmp_path, huge=False)
    with filling(tmp_path, direct=True) as found:
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fill memory")]
    found.close()


@pytest.mark.parametrize("direct", [False, True])
def test_memory_is_put_back_as_it_was(tmp_path: Path, empty: tuple[int, int, int], direct: bool) -> None:
    pid, address, reading = empty
    start = -(-address // PAGE) * PAGE
    expected = bytearray(32 * MIB)
    present = []
    for number in range(3000):
        at = number * 2 * PAGE
        data = number.to_bytes(4, "little") * (PAGE // 4) if number else bytes(PAGE)
        expected[at : at + PAGE] = data
        present.append((start + at, data))
    tail = os.urandom(5 * MIB)
    expected[26 * MIB : 31 * MIB] = tail
    present.append((start + 26 * MIB, tail))
    dump(tmp_path, [area(start, start + 32 * MIB)], present)
    assert pages.take_out(tmp_path, huge=False).bytes == 2999 * PAGE + 5 * MIB
    pagecache.evict([tmp_path / "bulk-3.img"])
    with filling(tmp_path, direct=direct) as found:
        found.put_back({7: pid})
    os.kill(pid, signal.SIGCONT)
    assert received(reading) == expected


def test_a_process_that_is_gone_or_lacks_the_memory_is_named(tmp_path: Path, empty: tuple[int, int, int]) -> None:
    pid, _, _ = empty
    dump(tmp_path, [area(PAGE, PAGE + 2 * MIB)], [(PAGE, b"a" * PAGE)])
    pages.take_out(tmp_path, huge=False)
    with filling(tmp_path) as found:
        with pytest.raises(EngineDied, match=r"the processes \[7\] are gone"):
            found.put_back({1: pid})
        with pytest.raises(EngineDied, match=f"memory of process {pid} cannot be filled at 0x1000: Bad address"):
            found.put_back({7: pid})


def test_a_plan_that_cannot_be_read_is_the_snapshots_fault(tmp_path: Path) -> None:
    (tmp_path / pages.PLAN).write_text('{"processes": [{"pid": "x"}]}')
    with pytest.raises(SnapshotError, match=r"bulk\.json cannot be read"):
        pages.taken_out(tmp_path)


def test_a_file_that_became_shorter_is_the_snapshots_fault(tmp_path: Path) -> None:
    dump(tmp_path, [area(BIG, BIG + 4 * MIB)], [(BIG, b"a" * 2 * PAGE)])
    pages.take_out(tmp_path, huge=False)
    os.truncate(tmp_path / "bulk-3.img", PAGE)
    with pytest.raises(SnapshotError, match="shorter than its plan"), filling(tmp_path):
        pass
