"""Pictures of the page in each state, over real servers: ``python -m tests.ui.screenshots FOLDER``.

Those that ``docs/page.md`` shows are made by ``python -m tests.ui.screenshots --docs``.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser

from integration import EmbeddedServers
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.ui.browser import Watched, chromium
from tests.ui.worlds import TROUBLE, World

DOCS = Path(__file__).parent.parent.parent / "docs" / "page"
#: The pictures of the docs show so many pixels from the top, in so many colours.
HIGH, COLOURS = 1700, 96
LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}


def take(browser: Browser, url: str, name: str, folder: Path, looks: dict[str, dict[str, bool]]) -> None:
    """One picture of the whole page for each look."""
    for look, options in looks.items():
        with Watched(browser, **options) as tab:
            tab.page.goto(url)
            tab.page.wait_for_selector(".connection.live, .connection.stale, .connection.lost")
            tab.page.wait_for_selector(".badge")
            time.sleep(7)  # so that a trend can be seen
            tab.page.screenshot(path=folder / f"{name}-{look}.png", full_page=True)
            if tab.errors:
                print(name, look, tab.errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("screenshots"))
    parser.add_argument("--docs", action="store_true", help="write those that the docs show, where they show them")
    options = parser.parse_args()
    folder = DOCS if options.docs else options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    looks = {"light": LOOKS["light"]} if options.docs else LOOKS
    with (
        tempfile.TemporaryDirectory() as data,
        EmbeddedServers(Path(data) / "servers") as servers,
        chromium() as browser,
        contextlib.chdir(data),
        World(servers, "shop", Path()) as world,
    ):
        orders, port = world.start("orders", partitions=12)
        _, core_port = world.start_core()
        payments, payments_port = world.start("payments")
        stopped, _ = world.start("returns")
        root = world.root_page()
        world.send("returns", 500)
        stopped.wait_for_commit(1, PATIENCE_S)
        stopped.stop()
        world.send("orders", 5_000)
        world.send_unreadable("orders")
        orders.wait_for_commit(5, PATIENCE_S)
        TROUBLE[world.topic("orders")] = "could not convert string to float: '12,50 EUR'"
        world.send("orders", 100)
        wait_for(lambda: orders.status().attempts_failed >= 3)
        TROUBLE[world.topic("orders")] = "failed"
        wait_for(lambda: orders.status().last_error is not None and "price list" in str(orders.status().last_error))
        del TROUBLE[world.topic("orders")]
        world.send("payments", 2_000)
        payments.wait_for_commit(2, PATIENCE_S)
        TROUBLE[world.topic("payments")] = "away"
        world.send("payments", 4_000)
        with world.sending("orders", each=300, every_s=0.4):
            time.sleep(25)
            take(browser, f"http://127.0.0.1:{port}/topology?id=orders", "running", folder, looks)
            take(browser, f"http://127.0.0.1:{payments_port}/topology?id=payments", "waiting", folder, looks)
            take(browser, f"http://127.0.0.1:{root}/", "all", folder, looks)
            if not options.docs:
                take(browser, f"http://127.0.0.1:{root}/topology?id=orders", "root", folder, looks)
            take(browser, f"http://127.0.0.1:{root}/topology?id=returns", "stopped", folder, looks)
            take(browser, f"http://127.0.0.1:{core_port}/topology?id=numbers", "core", folder, looks)
            if options.docs:
                take(
                    browser, f"http://127.0.0.1:{port}/topology?id=orders", "running", folder, {"phone": LOOKS["phone"]}
                )
                take(browser, f"http://127.0.0.1:{port}/topology?id=orders", "running", folder, {"dark": LOOKS["dark"]})
    if options.docs:
        for path in folder.glob("*.png"):
            shrink(path)
    print(folder)


def shrink(path: Path) -> None:
    """Make a picture small enough for a repository."""
    with Image.open(path) as picture:
        top = picture.convert("RGB").crop(
            (0, 0, picture.width, min(picture.height, HIGH * picture.width // 1280 + HIGH // 4))
        )
    top.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
