"""A real Chromium for tests of the console: one browser, a page for each test, and what every page must keep to."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

__all__ = ["APART", "Browser", "Page", "axe", "browser_of", "expect", "page_of", "picture", "tab_to"]

expect.set_options(timeout=30_000)
APART = Path(__file__).with_name("chromium_apart.py")
_TABS = 120
Scheme = Literal["light", "dark"]


@contextlib.contextmanager
def browser_of() -> Iterator[Browser]:
    """Missing: skipped locally, failed in CI."""
    name = os.environ.get("REWAKE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
    if not Path(name).exists() or not name:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs REWAKE_CHROMIUM; `make test` installs it and sets this")
    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses root.
        browser = playwright.chromium.launch(
            executable_path=APART,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            env={**os.environ, "REWAKE_CHROMIUM": name},
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(browser: Browser, base: str, *, scheme: Scheme = "light", width: int = 1360, **more: Any) -> Iterator[Page]:
    """A page of the console; at its end it has broken no policy of its own, raised nothing, and asked nobody else."""
    context = browser.new_context(
        base_url=base, viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce", **more
    )
    page, faults, elsewhere = context.new_page(), list[str](), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda asked: None if asked.url.startswith(base) else elsewhere.append(asked.url))
    try:
        page.goto("/console")
        yield page
        assert faults == []
        assert elsewhere == []
    finally:
        context.close()


def tab_to(page: Page, name: str) -> None:
    """Press Tab until what has the focus is called so; fails when the keyboard does not lead there."""
    for _ in range(_TABS):
        focused = page.evaluate("() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        if (focused or "").strip() == name:
            return
        page.keyboard.press("Tab")
    pytest.fail(f"{name!r} is not reached by the keyboard")


def axe(page: Page) -> list[str]:
    """Every violation of accessibility rules on the page as it is; the page's policy must have been switched off for it."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']]}" for one in found]


def picture(page: Page, name: str, *, full: bool = False) -> None:
    """Keep a picture for people, where REWAKE_PICTURES names a folder."""
    if folder := os.environ.get("REWAKE_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)
