"""Exemplars of several workers in one folder."""

from __future__ import annotations

from pathlib import Path

from gateway.exemplars import Bucket, Exemplars

FAST = Bucket("rewake_request_seconds", ("m", "restored"), "0.5")
SLOW = Bucket("rewake_request_seconds", ("m", "cold"), "+Inf")


def seen(exemplars: Exemplars) -> dict[Bucket, tuple[str, float, float]]:
    return {bucket: (one.labels["trace_id"], one.value, float(one.timestamp or 0)) for bucket, one in exemplars.all().items()}


def test_any_worker_shows_the_last_of_all(tmp_path: Path) -> None:
    first, second = Exemplars.shared(tmp_path, 0), Exemplars.shared(tmp_path, 1)
    first.note(FAST, "aaaa", 0.2, 1000.0)
    second.note(FAST, "bbbb", 0.3, 1001.0)
    second.note(SLOW, "cccc", 70.0, 999.0)
    assert seen(first) == {FAST: ("aaaa", 0.2, 1000.0)}  # the other has not left its own yet
    second.flush()
    assert seen(first) == {FAST: ("bbbb", 0.3, 1001.0), SLOW: ("cccc", 70.0, 999.0)}
    first.note(FAST, "dddd", 0.1, 1002.0)
    assert seen(first)[FAST] == ("dddd", 0.1, 1002.0)
    first.flush()
    assert seen(second) == {FAST: ("dddd", 0.1, 1002.0), SLOW: ("cccc", 70.0, 999.0)}


def test_what_a_worker_that_ended_has_left_stays_until_something_newer(tmp_path: Path) -> None:
    gone = Exemplars.shared(tmp_path, 0)
    gone.note(FAST, "aaaa", 0.2, 1000.0)
    gone.flush()
    successor = Exemplars.shared(tmp_path, 0)
    assert seen(successor) == {FAST: ("aaaa", 0.2, 1000.0)}
    successor.note(SLOW, "bbbb", 70.0, 1001.0)
    successor.flush()
    assert seen(Exemplars.shared(tmp_path, 1)) == {SLOW: ("bbbb", 70.0, 1001.0)}


def test_without_news_nothing_is_written(tmp_path: Path) -> None:
    exemplars = Exemplars.shared(tmp_path, 0)
    exemplars.flush()
    assert not [*tmp_path.iterdir()]
    exemplars.note(FAST, "aaaa", 0.2, 1000.0)
    exemplars.flush()
    (file,) = tmp_path.iterdir()
    before = file.stat().st_ino
    exemplars.flush()
    assert file.stat().st_ino == before


def test_what_is_not_understood_and_a_folder_that_is_gone_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "exemplars_1.json").write_text('[["half of a')
    (tmp_path / "exemplars_2.json").write_text('{"another": "version"}')
    (tmp_path / "exemplars_3.json").write_text("[1, 2]")
    exemplars = Exemplars.shared(tmp_path, 0)
    exemplars.note(FAST, "aaaa", 0.2, 1000.0)
    assert seen(exemplars) == {FAST: ("aaaa", 0.2, 1000.0)}
    lost = Exemplars.shared(tmp_path / "gone", 0)
    lost.note(FAST, "aaaa", 0.2, 1000.0)
    lost.flush()
    assert seen(lost) == {FAST: ("aaaa", 0.2, 1000.0)}


def test_alone_there_are_only_its_own() -> None:
    alone = Exemplars(None)
    alone.note(FAST, "aaaa", 0.2, 1000.0)
    alone.flush()
    assert seen(alone) == {FAST: ("aaaa", 0.2, 1000.0)}
