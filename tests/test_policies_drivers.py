"""Drivers that are known to fail: refused with reason and remedy, unless the operator says otherwise."""

from __future__ import annotations

import pytest

from policies.config import ConfigError, parse
from policies.drivers import DENIED, immovable, refused
from policies.manifest import GpuFacts


def facts(driver: str | None, open_module: bool | None = False) -> GpuFacts:
    return GpuFacts(driver=driver, mps=False, gpus=(), open_module=open_module)


@pytest.mark.parametrize(
    ("driver", "open_module", "reason"),
    [
        ("560.35.03", False, "neither checkpoint a tree"),
        ("595.58.03", True, "can hang the whole host"),
        ("595", None, "can hang the whole host"),
        ("595.58", False, None),
        ("570.86", True, None),
        ("580.159.03", True, None),
        ("596.1", True, None),
        ("610.3", True, None),
        (None, True, None),
        ("weird", True, None),
    ],
)
def test_restore_case_55_a_driver_that_hangs_the_host_or_lacks_the_calls_is_refused(
    driver: str | None, open_module: bool | None, reason: str | None
) -> None:
    found = refused(facts(driver, open_module), {})
    assert len(found) == (reason is not None)
    if reason is not None:
        assert reason in found[0].remedy
        assert "install" in found[0].remedy
        assert "restorer.drivers: {'" in found[0].remedy
        assert found[0].found == driver


def test_before_580_state_stays_on_its_gpu() -> None:
    assert "onto another GPU" in immovable(facts("570.86"), {})[0].remedy
    assert not immovable(facts("580.159"), {})
    assert not immovable(None, {})


def test_the_operators_word_goes_before_the_table_and_the_longest_version_decides() -> None:
    here = facts("595.58.03", True)
    assert not refused(here, {"595": "allow"})
    assert refused(here, {"595": "allow", "595.58": "deny"})[0].remedy == "take it out of restorer.drivers"
    assert not refused(here, {"595": "deny", "595.58.03": "allow"})
    assert refused(here, {"59": "allow"})
    assert refused(facts("580.159", True), {"580": "deny"})
    assert not immovable(facts("570.1"), {"570": "allow"})


def test_an_override_names_a_version_and_a_word() -> None:
    for wrong in ({"595.x": "allow"}, {"595": "maybe"}):
        with pytest.raises(ConfigError, match=r"restorer\.drivers"):
            parse({"models": {"m": {"engine": {"kind": "http", "command": ["/x"]}}}, "restorer": {"drivers": wrong}})


def test_every_row_says_why_and_what_to_do() -> None:
    for row in DENIED:
        assert row.why
        assert row.remedy.startswith("install")
        assert row.since < row.before
