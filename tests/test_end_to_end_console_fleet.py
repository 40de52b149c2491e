"""The console and the commands beside it for who looks after several hosts: a move, and a model that no host can run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from browser import Browser, Page, axe, browser_of, expect, page_of, picture, tab_to
from e2e_installation import PROGRAM, ROOT, eventually
from fleet import Fleet, fleet, streaming

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two hosts, and one gateway on neither."""
    hold = tmp_path_factory.mktemp("hold")
    models = {"m": streaming(hold / "m"), "nowhere": streaming(hold / "nowhere")}
    models["nowhere"]["engine"]["hosts"] = ["elsewhere-*"]
    with fleet(models, failure_backoff_s=600) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_of() as one:
        yield one


@pytest.fixture
def page(browser: Browser, pair: Fleet) -> Iterator[Page]:
    """Signed in."""
    with page_of(browser, pair.gateways[0].base, bypass_csp=True) as one:
        one.get_by_label("Admin token").fill(pair.gateways[0].headers["Authorization"].removeprefix("Bearer "))
        one.keyboard.press("Enter")
        expect(one.locator("#link-text")).to_have_text("Live")
        yield one


def cli(pair: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(PROGRAM), *arguments, "-c", str(pair.gateways[0].config)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)


def test_a_replica_is_moved_by_keyboard_to_the_host_that_is_named(page: Page, pair: Fleet) -> None:
    gateway = pair.gateways[0]
    assert gateway.complete("m").status_code == 200
    (before,) = gateway.replicas("m")
    here = before["host"]
    there = "b" if here == "a" else "a"
    row = page.locator("#replicas tr", has_text=before["incarnation"])
    expect(row).to_contain_text("admitted")
    tab_to(page, f"Move {before['id']} to another host")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Move {before['id']}?")
    expect(dialog).to_contain_text(f"Once it serves, {before['id']} on {here} gets no new requests")
    choice = dialog.get_by_label("To")
    assert choice.get_by_role("option").all_inner_texts() == ["the best of the others", there]
    assert axe(page) == []
    picture(page, "move")
    # Escape is no: nothing was asked.
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name=f"Move {before['id']} to another host")).to_be_focused()
    page.keyboard.press("Enter")
    dialog.get_by_label("To").select_option(there)
    tab_to(page, "Move")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#live")).to_contain_text(f"{before['id']} is being moved")
    # For a moment both are admitted.
    expect(row).to_contain_text(f"moved to {there}")
    expect(page.locator("#replicas tr", has_text="admitted").locator("td[data-label=Host]")).to_have_text(there)
    expect(page.locator("#operations tr", has_text="move m")).to_contain_text("succeeded")
    (after,) = gateway.replicas("m")
    assert (after["host"], after["incarnation"] == before["incarnation"]) == (there, False)
    assert gateway.complete("m").status_code == 200
    picture(page, "moved", full=True)


def test_the_command_moves_it_and_without_a_name_the_best_of_the_others_has_it(pair: Fleet) -> None:
    gateway = pair.gateways[0]
    assert gateway.complete("m").status_code == 200
    (before,) = gateway.replicas("m")
    moved = cli(pair, "move", before["id"])
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert "move of m succeeded" in moved.stdout
    (after,) = gateway.replicas("m")
    assert {before["host"], after["host"]} == {"a", "b"}


def test_a_log_is_read_from_whatever_host_it_is_on(pair: Fleet) -> None:
    gateway = pair.gateways[0]
    assert gateway.complete("m").status_code == 200
    (replica,) = gateway.replicas("m")
    assert replica["host"] in cli(pair, "ps").stdout
    found = cli(pair, "logs", replica["id"])
    assert found.returncode == 0, found.stderr
    log = pair.hosts[replica["host"]].state_dir / "boxes" / replica["incarnation"].partition("-")[0] / "private/engine.log"
    assert found.stdout.splitlines()[:5] == log.read_text().splitlines()[-50:][:5]


def test_a_model_that_fits_no_host_says_so_before_and_after_it_was_asked_for(page: Page, pair: Fleet) -> None:
    told = cli(pair, "why", "nowhere")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [
        "nowhere is cold",
        "no host that reports can start nowhere:",
        "    a: engine.hosts names elsewhere-*",
        "    b: engine.hosts names elsewhere-*",
    ]
    answer = pair.gateways[0].complete("nowhere")
    assert (answer.status_code, answer.headers["x-rewake-error"]) == (503, "restore_failed")
    assert answer.headers["x-should-retry"] == "false", "a client gains nothing by asking again at once"
    scaled = cli(pair, "scale", "nowhere", "1")
    assert scaled.returncode == 3, scaled.stderr
    assert "no other host can" in scaled.stdout
    told = cli(pair, "why", "nowhere")
    assert re.search(r"^    engine\.hosts of nowhere does not name [ab]$", told.stdout, re.MULTILINE)
    assert "to mend it: name a host in models.nowhere.engine.hosts that has a restorer" in told.stdout
    assert "no host that reports can start nowhere:" in told.stdout
    assert "rewake logs" not in told.stdout, "no engine was started, so there is no log"
    assert len(told.stdout.splitlines()) <= 24
    attention = page.locator(".attention")
    expect(attention).to_contain_text("nowhere cannot be started")
    attention.get_by_role("button", name="Why nowhere failed").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".quote").first).to_contain_text("engine.hosts of nowhere does not name")
    expect(dialog.locator(".remedy")).to_contain_text("Name a host in models.nowhere.engine.hosts")
    expect(dialog).to_contain_text("a: engine.hosts names elsewhere-*")
    expect(dialog.get_by_role("button", name="Its log")).to_have_count(0)
    assert axe(page) == []
    picture(page, "nowhere")


def test_without_any_restorer_that_is_what_is_said(page: Page, pair: Fleet) -> None:
    """The last of these tests: it ends them."""
    for host in pair.hosts.values():
        host.stop()
    eventually(lambda: not pair.reporting(), "their reports to end")
    assert "no restorer reports, so nothing can be started" in cli(pair, "why", "m").stdout
    expect(page.locator(".attention")).to_contain_text("No restorer reports")
    picture(page, "nobody")
