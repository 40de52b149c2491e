"""The journal: ahead of each step, whole after a crash at any byte, bounded, and undone in reverse by whoever comes next."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually

import rewake
from policies.failures import Verdict
from policies.journal import MOST_TEXT, Undo, decoded
from restorer.errors import Environment, ToolHung
from restorer.operations import undo
from restorer.records import journal as journals
from restorer.records.journal import Journal, Journals
from restorer.records.stages import Stages

ROOT = Path(__file__).resolve().parents[1]
WHAT: dict[str, Any] = {
    "operation": "op",
    "job": "op/0",
    "kind": "start",
    "model": "m",
    "replica": "m#0",
    "attempt": 1,
    "host": "h",
}


def lines(journal: Journal) -> list[bytes]:
    return journal.path.read_bytes().rstrip(b"\0").splitlines()


async def test_a_step_is_in_the_file_before_it_is_taken_and_on_the_disk_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = Journals(tmp_path).begin(**WHAT)
    stages = Stages(journal=journal)
    with stages.timed("stage", Undo(what="staging", name=".staging-0")):
        assert b'"name":"stage"' in lines(journal)[-1]
        await stages.durable()
        assert synced
        assert not journal._dirty
    assert b'"do":"done"' in lines(journal)[-1]
    trail = await journal.close("succeeded")
    assert [(step.name, step.ms is not None) for step in trail.steps] == [("stage", True)]


async def test_a_crash_at_any_byte_loses_at_most_the_line_that_it_cut(tmp_path: Path) -> None:
    journal = Journals(tmp_path).begin(**WHAT)
    for name in ("one", "two"):
        journal.done(journal.step(name, Undo(what="box", name=name)), 0.001, bytes=7, tier="disk")
    journal.failed(journal.step("three"), 0.002, OSError("went wrong\nbadly"))
    journal.undone(1, "gone")
    verdict = Verdict(cls="tool", evidence="e", remedy="r")
    await journal.close("failed", "why", verdict)
    data = journal.path.read_bytes().rstrip(b"\0")
    whole = decoded(data)
    assert whole is not None
    assert (whole.outcome, whole.detail, whole.verdict) == ("failed", "why", verdict)
    assert [step.undone for step in whole.steps] == [None, "gone", None]
    assert whole.steps[2].error == "went wrong\nbadly"
    assert [step.n for step in whole.pending] == [0]
    seen = 0
    for end in range(len(data)):
        for tail in (b"", bytes(50), b"\0garbage", b"{}"):
            trail = decoded(data[:end] + tail)
            count = 0 if trail is None else len(trail.steps)
            assert seen <= count, "what was whole stays known"
        seen = count
        assert trail is None or trail.outcome is None
    assert seen == 3


async def test_what_a_restorer_left_open_is_written_on_and_closed_by_the_next(tmp_path: Path) -> None:
    left = Journals(tmp_path).begin(**WHAT)
    left.step("take box", Undo(what="box", name="b1"))
    with left.path.open("r+b") as file:
        file.seek(len(left.path.read_bytes().rstrip(b"\0")))
        file.write(b'{"do":"step","n":1,"name":"torn')
    later = Journals(tmp_path)
    (found,) = later.abandoned()
    assert found.trail.last == "in 'take box'"
    assert later.abandoned() == [], "somebody is at it"
    found.undone(0, "done")
    await later.end(found, "interrupted", "it was undone")
    (trail,) = later.history()
    assert (trail.outcome, trail.detail, trail.steps[0].undone) == ("interrupted", "it was undone", "done")
    assert Journals(tmp_path).abandoned() == []


async def test_what_cannot_be_undone_stays_on_record_and_is_tried_again(tmp_path: Path) -> None:
    host: Any = _Host(tmp_path)
    ours = host.journals.begin(**WHAT)
    ours.step("take box", Undo(what="box", name="stuck"))
    await host.journals.end(ours, None, "")
    assert await undo.reconcile(host, {}) != []
    host.boxes["stuck"] = ToolHung("pid 1 did not die")
    ours = host.journals.begin(**WHAT)
    ours.step("take box", Undo(what="box", name="stuck"))
    await host.journals.end(ours, None, "")
    (trail,) = await undo.reconcile(host, {})
    assert trail.outcome is None
    host.boxes["stuck"] = SimpleNamespace(id="stuck", alive=True)
    (trail,) = await undo.reconcile(host, {})
    assert (trail.outcome, trail.steps[0].undone) == ("interrupted", "box stuck was ended")
    assert await undo.reconcile(host, {}) == []


async def test_undoing_goes_backwards_stops_at_its_mark_and_is_idempotent(tmp_path: Path) -> None:
    host: Any = _Host(tmp_path)
    host.boxes |= {name: SimpleNamespace(id=name, alive=False) for name in ("a", "b", "c")}
    journal = host.journals.begin(**WHAT)
    journal.step("one", Undo(what="box", name="a"))

    async def fail() -> None:
        async with undo.unwinding(host, journal):
            journal.step("two", Undo(what="box", name="b"))
            journal.step("note")
            journal.step("three", Undo(what="box", name="c"))
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert host.discarded == ["c", "b"]
    assert await undo.unwind(host, journal)
    assert await undo.unwind(host, journal)
    assert host.discarded == ["c", "b", "a"]
    await host.journals.end(journal, "failed")


async def test_a_box_that_goes_on_is_kept_and_the_attempt_has_succeeded(tmp_path: Path) -> None:
    """The restorer died between the write that admitted the replica and the end of its journal."""
    host: Any = _Host(tmp_path)
    host.boxes["kept"] = SimpleNamespace(id="kept", alive=True)
    Journals(host.journals.folder).begin(**WHAT).step("take box", Undo(what="box", name="kept"))
    (trail,) = await undo.reconcile(host, {"kept": "replica m#0 runs in it"})
    assert (trail.outcome, host.discarded) == ("succeeded", [])
    assert trail.steps[0].undone == "box kept goes on: replica m#0 runs in it"


async def test_a_staging_folder_is_removed_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    host: Any = _Host(tmp_path)
    (host.snapshots.root / ".staging-1/images").mkdir(parents=True)
    (host.snapshots.root / "other").mkdir()
    for name in (".staging-1", ".staging-1", "../snapshots", ".staging-missing"):
        journal = host.journals.begin(**WHAT)
        journal.step("stage", Undo(what="staging", name=name))
        assert await undo.unwind(host, journal)
        await host.journals.end(journal, "failed")
    assert sorted(path.name for path in host.snapshots.root.iterdir()) == ["other"]


async def test_a_full_disk_refuses_the_step_but_not_what_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journals(tmp_path).begin(**WHAT)
    number = journal.step("one")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(Environment, match="disk full while writing the journal"):
            journal.step("two")
        journal.done(number, 0.1)
    assert (await journal.close("failed")).steps[0].ms == 100.0


async def test_room_is_reserved_and_old_attempts_are_dropped_but_never_open_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "KEPT", 3)
    store = Journals(tmp_path)
    store.reserve(2)
    assert len(os.listdir(tmp_path)) == 2
    still = store.begin(**WHAT)
    assert len(os.listdir(tmp_path)) == 2, "it took the room that was reserved"
    for _ in range(6):
        await store.end(store.begin(**WHAT), "succeeded")
    store.reserve(1)
    assert len(store.history()) == 3 + 1
    assert still.trail.id in {trail.id for trail in store.history()}
    assert sum((tmp_path / name).stat().st_size for name in os.listdir(tmp_path)) <= 5 * 16 << 10
    journal = store.begin(**WHAT)
    journal.step("x" * 100_000)
    assert len(lines(journal)[-1]) < MOST_TEXT + 200
    await store.end(journal, "failed")
    await store.end(still, "failed")


KILLED = """
    import asyncio, os, signal
    from pathlib import Path
    from policies.journal import Undo
    from restorer.records.journal import Journals
    from restorer.records.stages import Stages

    async def main():
        def hook(name, when):
            if (name, when) == ({name!r}, {when!r}):
                os.kill(os.getpid(), signal.SIGKILL)
        journal = Journals(Path({folder!r}), hook).begin(
            operation="op", job="op/0", kind="start", model="m", replica="m#0", attempt=1, host="h")
        stages = Stages(journal=journal)
        with stages.timed("one", Undo(what="box", name="b1")):
            pass
        with stages.timed("two", Undo(what="box", name="b2")):
            Path({folder!r}, "effect").touch()
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("name", "when", "steps", "effect"),
    [("one", "before", 1, False), ("one", "after", 1, False), ("two", "before", 2, False), ("two", "after", 2, True)],
)
def test_restore_case_79_kill_9_at_a_step_leaves_it_on_record(
    tmp_path: Path, name: str, when: str, steps: int, effect: bool
) -> None:
    script = textwrap.dedent(KILLED).format(name=name, when=when, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == -9
    (trail,) = Journals(tmp_path).history()
    assert (len(trail.steps), (tmp_path / "effect").exists()) == (steps, effect)
    assert [step.n for step in trail.pending] == list(reversed(range(steps)))
    assert trail.last == (f"after {name!r}" if when == "after" else f"in {name!r}")


async def test_a_full_disk_costs_no_journal_as_long_as_an_old_one_gives_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Journals(tmp_path)
    old = await store.end(store.begin(**WHAT), "succeeded")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal = store.begin(**WHAT | {"job": "op/1"})
    assert journal.trail.id == old.id
    with pytest.raises(Environment, match="disk full while opening a journal"):
        store.begin(**WHAT)
    await store.end(journal, "failed")
    assert [(one.job, one.outcome) for one in store.history()] == [("op/1", "failed")]


async def test_syncing_goes_on_in_the_background_until_all_is_on_the_disk(tmp_path: Path) -> None:
    journal = Journals(tmp_path).begin(**WHAT)
    for number in range(20):
        journal.step(str(number))
    await eventually(
        lambda: not journal._dirty and journal._syncing is not None and journal._syncing.done(), what="all to be on the disk"
    )
    await journal.close("succeeded")


class _Host:
    """As much of a host as undoing touches."""

    def __init__(self, folder: Path) -> None:
        self.journals = Journals(folder / "journal")
        self.snapshots = SimpleNamespace(root=folder / "snapshots")
        self.snapshots.root.mkdir()
        self.boxes = _Boxes()
        self.discarded: list[str] = []

    async def discard(self, box: Any) -> None:
        if isinstance(box, Exception):
            raise box
        self.discarded.append(box.id)
        del self.boxes[box.id]


class _Boxes(dict[str, Any]):
    def known(self, id: str) -> Any:
        return self.get(id)


async def test_the_command_lists_attempts_and_shows_each_step_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "rewake.yaml"
    config.write_text(f"state_dir: {tmp_path}/state\nmodels: {{m: {{engine: {{kind: http, command: [/bin/true]}}}}}}\n")
    (tmp_path / "state").mkdir()
    store = Journals(tmp_path / "state/journal")
    journal = store.begin(**WHAT)
    journal.done(journal.step("take box", Undo(what="box", name="b1")), 0.0125)
    journal.failed(journal.step("dump"), 0.5, OSError("no luck"))
    journal.undone(0, "box b1 was ended")
    await store.end(journal, "failed", "no luck", Verdict(cls="tool", evidence="Error (criu/x.c:1): no luck", remedy="look"))
    store.begin(**WHAT | {"replica": "m#1"})

    def shown(*arguments: str) -> str:
        assert rewake.main(["journal", *arguments, "-c", str(config)]) == 0
        return " ".join(capsys.readouterr().out.split())

    listed = await asyncio.to_thread(shown)
    assert "[tool] Error (criu/x.c:1): no luck; look" in listed
    assert "under way" in listed
    one = await asyncio.to_thread(shown, "m#0")
    for text in ("12.5 ms", "box b1", "undone: box b1 was ended", "failed: no luck", "fault: [tool]"):
        assert text in one
    assert len(json.loads(await asyncio.to_thread(shown, "--json", "--last", "1"))) == 1
    assert await asyncio.to_thread(rewake.main, ["journal", "nothing", "-c", str(config)]) == 2
    assert "lists them" in capsys.readouterr().err
