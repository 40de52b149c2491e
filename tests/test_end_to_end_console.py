"""The console in a real browser, against `rewake up` with a real engine and the real CRIU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import APART, Browser, Page, axe, browser_of, expect, page_of, picture, tab_to
from e2e_installation import PROMPT, Installation, a_place, eventually, llama, manifest_of, network, rewritten, small

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with a_place("console") as made:
        yield made


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[Installation]:
    mapped = folder / "lib.bin"
    mapped.write_bytes(b"version 1")
    models = {
        "smollm2": llama(max_replicas=2),
        "strict": small(mapped, folder / "hold", on_restore_failure="reject"),
        "foreign": small(mapped, folder / "hold"),
    }
    one = Installation(folder, network(21), models, max_attempts=1, criu_timeout_s=120)
    (folder / "shelf").mkdir()
    one.configure(storage={"remotes": {"shelf": {"url": f"file://{folder}/shelf"}}})
    with one.running():
        one.snapshot("smollm2")
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_of() as one:
        yield one


@pytest.fixture
def page(browser: Browser, system: Installation) -> Iterator[Page]:
    with page_of(browser, system.base) as one:
        yield one


def token(system: Installation) -> str:
    return (system.run_dir / "admin-token").read_text().strip()


def sign_in(page: Page, system: Installation) -> None:
    page.get_by_label("Admin token").fill(token(system))
    page.keyboard.press("Enter")
    expect(page.locator("#link-text")).to_have_text("Live")


def row(page: Page, section: str, name: str) -> object:
    return page.locator(f"#{section} tr", has_text=name).first


def test_the_browser_does_not_hear_of_interfaces_that_other_tests_make() -> None:
    ask = "import socket; socket.socket(socket.AF_INET); socket.socket(socket.AF_NETLINK)"
    done = subprocess.run(
        [APART, "-c", ask],
        env={**os.environ, "REWAKE_CHROMIUM": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert f"Errno {errno.EAFNOSUPPORT}" in done.stderr


def test_a_wrong_token_is_refused_and_the_right_one_never_leaves_the_tab(page: Page, system: Installation) -> None:
    page.get_by_label("Admin token").fill("not-it")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This is not the admin token of this gateway.")
    expect(page.get_by_label("Admin token")).to_be_focused()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    sign_in(page, system)
    assert asked
    assert not any(token(system) in url for url in asked)
    assert page.evaluate("() => [document.cookie, Object.values(localStorage).join()]") == ["", ""]
    page.reload()
    expect(page.locator("#link-text")).to_have_text("Live")
    page.get_by_role("button", name="Sign out").click()
    assert page.evaluate("() => sessionStorage.length") == 0
    page.reload()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_cold_model_is_restored_by_keyboard_alone_and_each_stage_is_seen(page: Page, system: Installation) -> None:
    sign_in(page, system)
    expect(row(page, "models", "smollm2")).to_contain_text("cold")
    expect(page.locator("#snapshots")).to_contain_text("smollm2")
    with contextlib.ExitStack() as stack:
        stack.enter_context(system.held("before-restore"))
        tab_to(page, "Start smollm2")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Start smollm2?")
        expect(dialog).to_contain_text("restored from its snapshot")
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(page.get_by_role("button", name="Start smollm2")).to_be_focused()
        page.keyboard.press("Enter")
        tab_to(page, "Start")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        live = page.get_by_role("article", name="Start of smollm2#0")
        expect(live.get_by_role("row", name=re.compile("^restore processes ?, under way"))).to_be_visible()
        expect(live.get_by_role("row", name=re.compile("^verify bytes"))).to_be_visible()
        expect(live.get_by_role("row", name=re.compile("^cold start"))).to_be_visible()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(system.complete, "smollm2") for _ in range(3)]
            expect(page.locator("#held tbody tr")).to_have_count(3)
            expect(page.locator("#held")).to_contain_text("3 requests")
            picture(page, "restoring", full=True)
            stack.close()
            assert {one.result().headers["x-rewake-start"] for one in asked} == {"restored"}
    expect(row(page, "models", "smollm2")).to_contain_text("ready")
    expect(page.locator("#live")).to_contain_text("smollm2 is ready")
    expect(live).to_be_hidden()
    expect(page.locator("#starts")).to_contain_text("smollm2#0")
    expect(page.locator("#starts").get_by_role("row", name=re.compile("^canary"))).to_be_visible()
    expect(row(page, "replicas", "smollm2#0")).to_contain_text("restored")
    expect(page.locator("#held")).to_be_hidden()
    picture(page, "board", full=True)


def test_the_log_of_an_engine_grows_before_ones_eyes(page: Page, system: Installation) -> None:
    assert system.complete("smollm2").status_code == 200
    sign_in(page, system)
    tab_to(page, "Log of smollm2#0")
    page.keyboard.press("Enter")
    log = page.get_by_role("log", name="Log of smollm2#0")
    expect(log).to_contain_text("slot")
    before = len(log.inner_text())
    assert system.complete("smollm2").status_code == 200
    eventually(lambda: len(log.inner_text()) > before or page.wait_for_timeout(100), "more of the log")
    picture(page, "log")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Log of smollm2#0")).to_be_focused()


def test_a_snapshot_is_verified_and_explained(page: Page, system: Installation) -> None:
    folder = system.snapshot("foreign")
    host = manifest_of(folder).host
    rewritten(folder, host=host.model_copy(update={"kernel": "5.4.0-donor"}))
    foreign = system.newest().name
    sign_in(page, system)
    page.get_by_role("button", name=f"Explain whether {foreign} fits").click()
    dialog = page.get_by_role("dialog")
    fact = dialog.get_by_role("row", name=re.compile("^host.kernel"))
    expect(fact).to_contain_text("5.4.0-donor")
    expect(fact).to_contain_text("boot the donor's kernel")
    picture(page, "explain")
    page.keyboard.press("Escape")
    good = next(path.name for path in (system.folder / "state/snapshots").glob("[0-9a-f]*") if path.name != foreign)
    page.get_by_role("button", name=f"Verify every byte of {good}").click()
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.get_by_role("dialog", name=f"verify {good}")).to_contain_text(f"{good} is whole")
    page.keyboard.press("Escape")
    expect(row(page, "operations", f"verify {good}")).to_contain_text("succeeded")


def test_a_snapshot_is_pushed_and_pulled_again(page: Page, system: Installation) -> None:
    moved = system.snapshot("foreign").name
    sign_in(page, system)
    page.get_by_role("button", name=f"Push {moved} to the remote").click()
    page.get_by_role("button", name="Push", exact=True).click()
    expect(page.get_by_role("dialog", name=f"push {moved}")).to_contain_text(f"{moved} is in ")
    page.keyboard.press("Escape")
    assert system.cli("snapshot", "rm", moved).returncode == 0
    expect(page.locator("#snapshots")).not_to_contain_text(moved)
    page.get_by_role("button", name="Pull a snapshot to").click()
    page.get_by_role("button", name=f"Pull {moved}").click()
    page.get_by_role("button", name="Pull", exact=True).click()
    expect(page.get_by_role("dialog", name=f"pull {moved}")).to_contain_text(f"{moved} is on ")
    page.keyboard.press("Escape")
    expect(page.locator("#snapshots")).to_contain_text(moved)


def test_a_failed_restore_is_led_back_to_its_cause(page: Page, system: Installation) -> None:
    """CRIU refuses a file that changed between our check and its own: its line is quoted, and the remedy said."""
    system.snapshot("strict")
    before = system.calls("restore")
    with system.held("before-restore"):
        system.admin("scale-up", {"model": "strict", "replicas": 1})
        eventually(lambda: system.calls("restore") > before, "CRIU to be asked")
        (system.folder / "lib.bin").write_bytes(b"version 1, and more")
    sign_in(page, system)
    attention = page.locator(".attention")
    expect(attention).to_contain_text("strict cannot be started")
    attention.get_by_role("button", name="Why strict failed").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".quote").first).to_contain_text(re.compile(r"Error \(criu/.*lib\.bin has bad size"))
    expect(dialog.locator(".remedy")).to_contain_text("make a new snapshot")
    expect(dialog).to_contain_text("restore processes")
    picture(page, "why")
    dialog.get_by_role("button", name="Its log").click()
    expect(page.get_by_role("log", name="Log of strict#0")).to_contain_text("listening, 9 bytes mapped")
    expect(page.get_by_role("dialog")).to_contain_text("The engine has ended")
    page.keyboard.press("Escape")


def test_the_command_line_leads_to_the_same_cause_in_one_screen(system: Installation) -> None:
    """After the test above."""
    for name in ("strict", "strict#0"):
        told = system.cli("why", name)
        assert told.returncode == 0, told.stderr
        assert "lib.bin has bad size" in told.stdout
        assert "to mend it: a file that the engine uses is not the donor's" in told.stdout
        assert len(told.stdout.splitlines()) <= 24
    listed = next(line for line in system.cli("ps").stdout.splitlines() if line.startswith("strict#0"))
    assert re.search(r"criu restore failed: File \S+lib.bin has bad size", listed)
    assert len(listed.rpartition("Z")[2]) < 170
    assert "listening, 9 bytes mapped" in system.cli("logs", "strict#0").stdout
    frame = system.cli("top", "--once").stdout
    assert "rewake why strict" in frame
    assert system.cli("why", "nobody").returncode == 2


def test_a_replica_is_drained_after_a_question_and_a_move_says_why_not(page: Page, system: Installation) -> None:
    assert system.complete("smollm2").status_code == 200
    sign_in(page, system)
    page.get_by_role("button", name="Move smollm2#0 to another host").click()
    expect(page.get_by_role("dialog")).to_contain_text("is the only host that reports")
    page.keyboard.press("Escape")
    tab_to(page, "Drain and stop smollm2#0")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Drain smollm2#0?")).to_contain_text("Its snapshot stays")
    tab_to(page, "Drain and stop")
    page.keyboard.press("Enter")
    expect(row(page, "replicas", "smollm2#0")).to_contain_text("stopped")
    expect(row(page, "models", "smollm2")).to_contain_text("cold")


def test_restarted_gateways_are_not_noticed_and_a_lost_one_is_said(page: Page, system: Installation) -> None:
    sign_in(page, system)
    restarted = system.cli("restart")
    assert restarted.returncode == 0, restarted.stderr
    system.complete("smollm2")
    expect(row(page, "models", "smollm2")).to_contain_text("ready")
    assert system.stop() == 0
    expect(page.locator("#link-text")).to_contain_text("Gateway not reached")
    expect(page.locator("#live")).to_contain_text("Connection lost")
    picture(page, "lost")
    system.http = httpx.Client(base_url=system.base, timeout=60, trust_env=False)
    system.start()
    expect(page.locator("#link-text")).to_have_text("Live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 390])
def test_everybody_can_use_it(browser: Browser, system: Installation, scheme: str, width: int) -> None:
    """axe-core finds nothing on the sign-in, the board with all its panels, and the dialogs; no page is wider than its window."""
    system.admin("scale-up", {"model": "smollm2", "replicas": 1})
    with page_of(browser, system.base, scheme=scheme, width=width, bypass_csp=True) as page:  # type: ignore[arg-type]
        assert axe(page) == []
        sign_in(page, system)
        expect(row(page, "models", "smollm2")).to_contain_text("ready")
        assert axe(page) == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        picture(page, f"{scheme}-{width}", full=width < 1000)
        for button in ("Drain and stop smollm2#0", "Log of smollm2#0", "Explain whether"):
            page.get_by_role("button", name=button).first.click()
            expect(page.get_by_role("dialog")).to_be_visible()
            if button == "Explain whether":
                expect(page.get_by_role("dialog").locator(".verdict")).to_be_visible()
            assert axe(page) == []
            page.keyboard.press("Escape")


def test_the_page_is_cached_by_its_content_and_keeps_to_itself(system: Installation) -> None:
    first = system.http.get("/console")
    assert (first.status_code, first.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in first.headers["content-security-policy"]
    again = system.http.get("/console", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert PROMPT["prompt"] not in first.text
