"""Whose fault a failure is, and what follows for the snapshot: quarantine, a pause, or nothing."""

from __future__ import annotations

import pytest

from policies.failures import SIGNATURES, Class, classify
from policies.restoring import Quarantine
from policies.verdicts import Note, failed, standing
from restorer.errors import ToolFailed

POLICY = Quarantine(hosts=2, failures=3, backoff_s=1.0, most_backoff_s=60.0)

CRIU_SAYS: list[tuple[str, Class]] = [
    ("(00.011) 1000: Error (criu/cr-restore.c:1228): Can't fork for 1000: File exists", "transient"),
    ("(00.02) 1001: Error (criu/sk-inet.c:900): inet: Can't bind inet socket (id 8): Address already in use", "transient"),
    ("(00.02) 1001: Error (criu/sk-inet.c:900): inet: Can't bind inet socket: Cannot assign requested address", "transient"),
    ("(00.01) 1000: Error (criu/files-reg.c:2221): File usr/lib/libx.so has bad size 12 (expect 13)", "host"),
    ("(00.01) 1000: Error (criu/files-reg.c:2182): Can't open file usr/lib/x on restore: No such file or directory", "host"),
    ("(00.00) Error (criu/image.c:130): Unexpected EOF on (empty-image)", "snapshot"),
    (
        "1000: Error (criu/protobuf.c:93): Read 1604 bytes while 3220 expected from mm-1000.img: No such file or directory",
        "snapshot",
    ),
    ("(00.02) 1000: Error (criu/pagemap.c:265): Can't read pages data (-9): Bad file descriptor", "snapshot"),
    ("(00.00) Error (criu/protobuf.c:70): Unexpected EOF on inventory.img", "snapshot"),
    ("(00.00) Error (criu/image.c:439): Unable to open core-1000.img: No such file or directory", "snapshot"),
    ("(00.00) Error (criu/cpu.c:381): cpu: CPU instruction capabilities do not match run time", "host"),
    ("(00.03) Error (criu/page-xfer.c:1): Can't write pages: No space left on device", "environment"),
    ("(00.03) 1000: Error (criu/mem.c:9): Can't mmap: Cannot allocate memory", "environment"),
    ("(00.03) Error (compel/src/lib/infect.c:99): suspending seccomp failed: Operation not permitted", "host"),
    ("(00.03) pie: 1000: Error (criu/pie/restorer.c:1): link_remap.4 vanished", "snapshot"),
    ("(00.03) Error (criu/something.c:1): nobody has seen this yet", "tool"),
]


@pytest.mark.parametrize(("line", "cls"), CRIU_SAYS)
def test_what_criu_writes_says_whose_fault_it_is(line: str, cls: str) -> None:
    log = f"(00.00) Warn  (criu/x.c:1): harmless\n{line}\n(00.04) Error (criu/cr-restore.c:2557): Restoring FAILED."
    verdict = classify("tool", "criu restore failed with status 1", log)
    assert (verdict.cls, verdict.evidence) == (cls, line)
    assert verdict.remedy
    assert not verdict.certain


def test_restore_case_74_what_an_engine_says_of_broken_state_is_proof() -> None:
    verdict = classify("transient", "the engine ended by itself", "torch: CUDA error: misaligned address")
    assert (verdict.cls, verdict.certain) == ("snapshot", True)


@pytest.mark.parametrize("kind", ["host", "snapshot", "environment", "cancelled"])
def test_who_has_compared_knows_and_is_not_overruled_by_a_log(kind: Class) -> None:
    verdict = classify(kind, "its own words", "No space left on device", certain=True)
    assert (verdict.cls, verdict.evidence, verdict.certain) == (kind, "its own words", kind == "snapshot")


def test_every_signature_is_reachable_and_has_a_remedy() -> None:
    assert all(one.remedy and one.cls in ("host", "snapshot", "transient", "environment") for one in SIGNATURES)
    assert len({one.pattern for one in SIGNATURES}) == len(SIGNATURES)


def note(cls: Class, host: str = "a", at_s: float = 0.0, *, certain: bool = False) -> Note:
    verdict = classify("snapshot", "e", certain=certain).model_copy(update={"cls": cls})
    return failed(verdict, host=host, facts="f", at_ms=int(at_s * 1000), reason=f"{cls} at {at_s:g}")


def test_proof_quarantines_at_once_but_only_where_it_was_found() -> None:
    notes = [note("snapshot", "a", certain=True)]
    assert standing(notes, "a", POLICY, 0).quarantined == "snapshot at 0"
    assert standing(notes, "b", POLICY, 0).quarantined is None, "another host has another copy"


def test_restore_case_78_quarantine_needs_distinct_hosts_and_counts_only_the_snapshots_own_fault() -> None:
    assert standing([note("snapshot", "a"), note("snapshot", "a")], "b", POLICY, 0).quarantined is None
    assert standing([note("snapshot", "a"), note("tool", "b"), note("host", "c")], "d", POLICY, 0).quarantined is None
    reason = standing([note("snapshot", "a"), note("snapshot", "b", 2)], "d", POLICY, 0).quarantined
    assert reason == "it failed by its own fault on a, b, the last: snapshot at 2"


def test_restore_case_78_a_failing_restore_waits_twice_as_long_each_time_and_is_never_tried_for_ever() -> None:
    """Each try takes 47 s; within a day there are few dozens of them, not two thousand."""
    notes: list[Note] = []
    now, tries = 0.0, 0
    while now < 86_400:
        found = standing(notes, "a", POLICY.model_copy(update={"most_backoff_s": 3600.0}), int(now * 1000))
        if found.held_ms:
            assert found.held is not None
            now += found.held_ms / 1000
            continue
        tries += 1
        now += 47
        notes.append(note("tool", "a", now))
    assert tries < 40
    pauses = [standing(notes[:n], "a", POLICY, int(notes[n - 1].at_ms)).held_ms for n in range(1, 9)]
    assert pauses == [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]


def test_three_uncertain_failures_in_a_row_quarantine_here_and_a_success_between_them_does_not() -> None:
    three = [note("snapshot", at_s=at) for at in (1, 2, 3)]
    assert standing(three, "a", POLICY, 0).quarantined == "3 restores in a row failed by its fault, the last: snapshot at 3"
    well = Note(what="restored", host="a", at_ms=2500)
    assert standing([*three, well], "a", POLICY, 0).quarantined is None
    assert standing([*three, well], "a", POLICY, 0).failures == 1


@pytest.mark.parametrize("cls", ["host", "environment", "cancelled"])
def test_what_is_not_the_snapshots_fault_neither_quarantines_nor_delays(cls: Class) -> None:
    notes = [note(cls, host, at) for host in ("a", "b") for at in range(10)]
    found = standing(notes, "a", POLICY, 10_000)
    assert (found.quarantined, found.held_ms) == (None, 0)


def test_a_release_by_any_host_forgives_all_that_was_before_it() -> None:
    notes = [note("snapshot", "a", certain=True), note("snapshot", "b"), Note(what="released", host="c", at_ms=1)]
    assert standing(notes, "a", POLICY, 5) == standing([], "a", POLICY, 5)
    again = standing([*notes, note("snapshot", "a", 2, certain=True)], "a", POLICY, 5)
    assert again.quarantined == "snapshot at 2"


def test_a_clock_that_was_set_back_holds_nothing_back_for_longer_than_its_pause() -> None:
    assert standing([note("tool", at_s=1_000_000)], "a", POLICY, 0).held_ms == 1000


def test_a_tool_that_was_killed_says_so_whatever_it_has_written_before() -> None:
    killed = ToolFailed("criu restore", -9, "(00.02) 1000: Warn something")
    assert str(killed).startswith("criu restore was ended by signal 9 (Killed)")
    assert (killed.verdict.cls, killed.verdict.evidence) == ("tool", "criu restore was ended by signal 9 (Killed)")
    assert "want of memory" in killed.verdict.remedy
    full = ToolFailed("criu dump", -7, "(00.02) Error (criu/x.c:1): No space left on device")
    assert (full.verdict.cls, full.brief) == ("environment", "criu dump was ended by signal 7 (Bus error)")
