"""Headless Chromium for tests of pages, where it and selenium are installed."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator:
    """A browser that keeps its files in `folder` and ends with the block; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "headless=new",
        "no-sandbox",  # it cannot be set up by root
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "disable-component-update",
        "no-first-run",
        f"user-data-dir={folder}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        opened.get("about:blank")  # the browser's own first page asks for files of its own
        yield opened
    finally:
        opened.quit()


def resize(browser, width: int, height: int = 900, scheme: str = "light") -> None:
    """Sets the viewport, which windows cannot make as narrow as telephones, and the preferred colour scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
