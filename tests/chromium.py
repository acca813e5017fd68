"""A headless Chromium for tests of pages, where it and selenium are installed."""

import json
import shutil

import pytest

FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking",
         "disable-component-update", "no-first-run")  # fmt: skip
BINARY, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    if not BINARY or not DRIVER:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    opened = open_browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield opened
    finally:
        opened.quit()


def open_browser(profile):
    """A browser whose profile is in a folder; quit() ends it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BINARY
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    opened.get("about:blank")  # the browser's own first page asks for files of its own
    return opened


def find(page, selector):
    return page.find_element("css selector", selector)


def settled(page, script="return live.ready && live.state().encodedChange === live.state().changes"):
    """Waits until a script says yes; without one, until the live page has answered."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 60, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def asked(page) -> set[str]:
    """The addresses that the browser asked for since its log was last read, without those that hold their own data."""
    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    return {url for url in urls if not url.startswith("data:")}
