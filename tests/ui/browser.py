"""Debian's Chromium, without a window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from integration.server_programs import find_program
from tests.kit.waiting import PATIENCE_S

PHONE = {"width": 375, "height": 812}
DESK = {"width": 1280, "height": 900}
#: How long a test waits for what it must see.
PATIENT_MS = 1_000 * PATIENCE_S


@contextmanager
def chromium() -> Iterator[Browser]:
    """Installs the package where it is missing and this may. Raises ``ServerError``, which says
    what to install."""
    program = find_program("chromium", "chromium")
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def too_wide(page: Page) -> int:
    """By how many pixels the page must be scrolled sideways, but in a box of its own."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def violations(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds, in its words."""
    found = Axe().run(page).response
    assert len(found["passes"]) > 10
    return list(found["violations"])


class Watched:
    """A tab, and what went wrong in it: errors of scripts, warnings, refused requests."""

    def __init__(self, browser: Browser, *, dark: bool = False, phone: bool = False, script: bool = True) -> None:
        self.context = browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport=PHONE if phone else DESK,
            java_script_enabled=script,
            device_scale_factor=2 if phone else 1,
        )
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.requested: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._noted)
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.on("dialog", lambda dialog: self.errors.append(f"a dialog: {dialog.message}"))

    def _noted(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def close(self) -> None:
        self.context.close()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
