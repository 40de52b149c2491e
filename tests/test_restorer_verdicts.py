"""Verdicts on disk and between hosts: durable, torn lines left out, an earlier version's read, others' heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.restoring import Quarantine
from policies.verdicts import Note
from restorer.coordination.jobs import JobStore
from restorer.coordination.verdicts import Verdicts

ID = "0123456789abcdef"


def blame(host: str, **more: Any) -> Note:
    return Note(what="failed", host=host, cls="snapshot", **{"reason": "bad", **more})


def test_notes_outlive_a_crash_in_mid_write_and_are_read_again_when_others_append(tmp_path: Path) -> None:
    ours, command = Verdicts(tmp_path, "a"), Verdicts(tmp_path, "a")
    assert ours.standing(ID).quarantined is None
    ours.note(ID, blame("a", certain=True, reason="first"))
    with (tmp_path / f"{ID}.jsonl").open("ab") as file:
        file.write(b'{"verdict": "fai')
    assert ours.standing(ID).quarantined == "first"
    command.note(ID, Note(what="released", host="a", at_ms=5))
    assert ours.standing(ID).quarantined is None
    assert [note.what for note in Verdicts(tmp_path, "a").notes(ID)] == ["failed", "released"]


def test_what_an_earlier_version_wrote_still_holds(tmp_path: Path) -> None:
    (tmp_path / f"{ID}.jsonl").write_text(
        '{"verdict": "quarantined", "reason": "its canary differed", "at_ms": 1, "host": "a"}\n'
    )
    assert Verdicts(tmp_path, "a").standing(ID).quarantined == "its canary differed"


def test_a_reload_changes_the_policy_in_force(tmp_path: Path) -> None:
    ours = Verdicts(tmp_path, "a", Quarantine(failures=1))
    ours.note(ID, blame("a"))
    assert ours.standing(ID).quarantined is not None
    ours.policy = Quarantine(failures=5)
    assert ours.standing(ID).quarantined is None


async def test_restore_case_78_hosts_hear_of_each_others_verdicts_through_the_store(
    store: Any, store_server: str, tmp_path: Path
) -> None:
    hosts = {name: (Verdicts(tmp_path / name, name), JobStore(store_server, "rewake", name)) for name in ("a", "b", "c")}
    try:
        for name in ("a", "b"):
            hosts[name][0].note(ID, blame(name, at_ms=1))
            assert hosts[name][0].standing(ID).quarantined is None
        for _ in range(2):
            for verdicts, jobs in hosts.values():
                await verdicts.exchange(jobs)
        for verdicts, _ in hosts.values():
            assert verdicts.standing(ID).quarantined == "it failed by its own fault on a, b, the last: bad"
        hosts["c"][0].note(ID, Note(what="released", host="c", at_ms=2))
        for _ in range(2):
            for verdicts, jobs in hosts.values():
                await verdicts.exchange(jobs)
        assert [verdicts.standing(ID).quarantined for verdicts, _ in hosts.values()] == [None] * 3
        await store.hset("rewake:verdicts", f"{ID}\tnewer", "not a list")
        await hosts["a"][0].exchange(hosts["a"][1])
    finally:
        for _, jobs in hosts.values():
            await jobs.close()
