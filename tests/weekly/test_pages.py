"""Four pages in headless Chromium: the report, those of fit() and of an adapted model, and the live page."""

import json
import re
import shutil

import numpy as np
import pytest

import cxda_jax
from cxda_jax.adapter.page import as_html
from cxda_jax.device.page import write_adapted
from cxda_jax.export.pair import by_model
from cxda_jax.pages.page import write_page
from tests.fast.test_adapted_page import made_adapter, make_page
from tests.pages import HOSTILE, render
from tests.slow.test_report import make_report

FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking",
         "disable-component-update", "no-first-run")  # fmt: skip
BINARY, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    if not BINARY or not DRIVER:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BINARY
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    opened.get("about:blank")  # the browser's own first page asks for files of its own
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def model():
    return cxda_jax.load("unipen")


@pytest.fixture(scope="module")
def addresses(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_page(folder / "report.html", make_report(HOSTILE))
    write_adapted(folder / "adapted.html", make_page(m=24, n=40, mark=HOSTILE))
    (folder / "fitted.html").write_text(as_html(made_adapter(mark=HOSTILE)))
    render(model, folder).rename(folder / "live.html")
    return {path.stem: path.as_uri() for path in folder.iterdir()}


@pytest.fixture
def opened(browser, addresses, request):
    """The page that a test has in its name. No test may leave a line in the console."""
    name = next(name for name in addresses if name in request.node.name)
    browser.get_log("performance")
    browser.get(addresses[name])
    if name == "live":
        settled(browser)
    yield browser
    assert browser.get_log("browser") == []


def find(page, selector):
    return page.find_element("css selector", selector)


def settled(page, script="return live.ready && live.state().encodedChange === live.state().changes"):
    """Waits until a script says yes; without one, until the live page has answered."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 60, poll_frequency=0.05).until(lambda b: b.execute_script(script))


@pytest.mark.parametrize("name", ["report", "adapted", "fitted", "live"])
def test_nothing_is_asked_of_anybody(opened, addresses, name):
    sent = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith("data:")} == {addresses[name]}  # the rest holds its own data
    assert opened.execute_script("return document.images.length") == 0


@pytest.mark.parametrize("name", ["adapted", "fitted"])
def test_a_phone_need_not_scroll_sideways(opened, name):
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert opened.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [380, 380]
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def pixels(page, script) -> np.ndarray:
    """Images of the page, as JAX takes them."""
    lists = page.execute_script(f"return {script}.map((item) => Array.from(item.bytes))")
    return np.array(lists, np.uint8).reshape(-1, 28, 28, 1)


def test_live_answers_and_attention_are_those_of_jax(opened, model):
    opened.execute_script("const s = byId('hand'); s.value = '5'; s.dispatchEvent(new Event('change'))")
    settled(opened)
    support, queries = pixels(opened, "live.state().buffer"), pixels(opened, "live.state().questions")
    before, (after, weights) = by_model(model, support[:0], queries)[0], by_model(model, support, queries)
    names = np.array(model.card.class_names)
    for i in (0, 7, 19):
        opened.execute_script(f"byId('questions').children[{i}].click()")
        for name, logits in {"before": before, "after": after}.items():
            told = opened.execute_script(f"return live.logits.{name}")
            assert np.allclose(told, logits[i], atol=1e-4 * np.abs(logits).max())
            assert find(opened, f"#{name} .name").text[0] == names[logits[i].argmax()]
        labels = opened.execute_script("return [...byId('buffer').children].map((b) => b.ariaLabel)")
        shown = [float(re.search(r"attention ([\d.]+)", label)[1]) for label in labels]
        assert shown == pytest.approx(100 * weights[i].mean(0), abs=0.051)
