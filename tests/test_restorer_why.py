"""What `rewake why` prints of a story: one screen, whatever there is to tell."""

from __future__ import annotations

from typing import Any

from policies.story import Story, Try, Unfit
from restorer.cli.why import _lines

_SAID = "the engine ended by itself; its log ends: no such option"
_WHERE = {"id": "j1", "at_ms": 1, "host": "h", "replica": "m#0", "kind": "start", "number": 1, "step": "in 'start engine'"}
_WHAT = {"outcome": "failed", "fault": "transient", "quote": "the engine ended by itself", "remedy": "mend it", "said": _SAID}
TRIED = Try.model_validate(_WHERE | _WHAT)


def story(**more: Any) -> Story:
    nothing = {"brief": "", "next_try_s": None, "replicas": (), "tries": (), "unfit": (), "hosts": ("h",), "lacking": {}}
    return Story.model_validate({"model": "m", "state": "cold", **nothing, **more})


def test_nothing_to_tell_is_said() -> None:
    assert [*_lines(story())] == ["m is cold: nothing is on record against it"]


def test_many_snapshots_that_do_not_fit_still_leave_one_screen() -> None:
    command = "/opt/engine " + "--option " * 60
    reason = f"profile.command: expected {command}, found {command}-v; put the setting back, or make a new snapshot"
    hashes = f"profile.weights./m: expected {'a' * 64}, found {'b' * 64}; put it back"
    many = [Unfit(id=f"{n:016x}", host="h", reason=f"{reason}\n{hashes}") for n in range(40)]
    lines = [*_lines(story(tries=(TRIED,), unfit=many, brief="x"))]
    assert len(lines) <= 24
    assert max(map(len, lines)) < 300
    (command_line, _) = (line for line in lines if "profile.command" in line)
    assert command_line.endswith("put the setting back, or make a new snapshot")
    assert any(line.endswith("expected aaaaaaaaaaaa…, found bbbbbbbbbbbb…; put it back") for line in lines)
    assert "nor are 38 others" in lines


def test_what_is_quoted_is_not_said_twice_and_what_is_more_is_said() -> None:
    twice = TRIED.model_copy(update={"said": "restore of snapshot s failed: the engine ended by itself"})
    assert "all that was said:" not in [*_lines(story(tries=(twice,), brief="x"))]
    more = TRIED.model_copy(update={"said": "the engine ended by itself\nand this before it"})
    assert [*_lines(story(tries=(more,), brief="x"))][7:9] == ["all that was said:", "    and this before it"]


def test_what_is_past_comes_after_why_it_is_so_now() -> None:
    past = TRIED.model_copy(update={"past": True})
    replica = {"id": "m#0", "model": "m", "state": "admitted", "start": "cold", "reason": "it does not fit", "fence": 1}
    lines = [*_lines(story(state="ready", tries=(past,), replicas=[replica]))]
    assert lines[:2] == ["m is ready", "m#0: it does not fit"]
    assert lines[2].startswith("before that, 1970-01-01")
