"""Figures of a study and of attention: what they draw."""

import itertools
import re

import numpy as np

from cxda_jax.config.registry import METHODS
from cxda_jax.studies import plots
from tests.results import make_result

ONE_STEP = "finetune.steps=1"
SETTINGS = ["", ONE_STEP, *(f"num_domains={n}" for n in (1, 10, 20)), *(f"support_size={n}" for n in (10, 500))]


def result(method="cxda", seed=0, setting="", avg=50.0, label=None, steps=10, **row):
    trained = "erm" if method in METHODS and METHODS[method].style.open else method
    config = {"method": trained, "finetune": {"steps": steps}, "episode": {"num_domains": 5, "per_domain": 20},
              "evaluation": {"test_tasks": 6}}  # fmt: skip
    row = {"avg": avg, "w10": avg - 20, "adapt_ms": 12.0} | row
    return make_result(method, seed, "glyphs", setting, label, config, store="glyphs", **row)


def draw(results, name):
    """The figure that reports call so."""
    styles = plots.method_styles(results)
    return plots.variable(results, name, styles) if name in plots.AXES else getattr(plots, name)(results, styles)


# Results of a whole study, with some variation.
SOME, WHOLE, RNG = ["erm", "cxda", "ft_em", "cotta"], [], np.random.default_rng(0)
for one, form in itertools.product(SOME, SETTINGS):
    if form != ONE_STEP or one == "ft_em":
        level, ms = 50 + 10 * RNG.random(), (400 if METHODS[one].style.open else 12) + 10 * RNG.random()
        WHOLE += [result(one, seed, form, level + RNG.standard_normal(), adapt_ms=ms) for seed in range(3)]


def of(method, setting="", field="avg"):
    return [getattr(r, field) for r in WHOLE if r.method == method and str(r.setting) == setting]


def assert_means(y, heights, values):
    """The points of a line are means of lists, and its bars their standard errors."""
    np.testing.assert_allclose(y, [np.mean(v) for v in values])
    np.testing.assert_allclose(heights, [2 * np.std(v, ddof=1) / np.sqrt(len(v)) for v in values])


def drawn(axes):
    """The x, y and heights of error bars of each label, as the axes hold them."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        heights = [np.ptp(ends[:, 1]) if len(ends) else 0 for ends in bars.get_segments()]
        found[container.get_label()] = list(line.get_xdata()), list(line.get_ydata()), heights
    return found


def test_points_are_means_over_seeds():
    found = drawn(draw(WHOLE, "accuracy_time").axes[0])
    assert list(found) == SOME
    for method, (x, *points) in found.items():
        settings = [ONE_STEP, ""] if method == "ft_em" else [""]
        assert_means(*points, [of(method, setting) for setting in settings])
        np.testing.assert_allclose(x, [np.mean(of(method, setting, "adapt_ms")) + 3 for setting in settings])


def test_files_are_the_same_again_and_share_no_ids(tmp_path):
    all_ids = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        plots.save(draw(WHOLE, "accuracy_time"), folder / "times.of")
        plots.save(draw(WHOLE, "num_domains"), folder / "domains.of")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() and path.stat().st_size > 1000
    for path in (tmp_path / "a").glob("*.of.svg"):
        text = path.read_text()
        assert text.startswith("<svg") and "<text" not in text and "DOCTYPE" not in text
        all_ids += re.findall(r'\bid="([^"]*)"', text)
    assert len(list(tmp_path.glob("a/*.png"))) == 2 and len(all_ids) == len(set(all_ids)) > 0
