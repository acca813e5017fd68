"""Figures of a study: their points are means over seeds, and their files are the same again."""

import itertools

import numpy as np
import pytest

from cxda_jax.studies import plots
from tests.results import make_result

METHODS, ONE_STEP, RNG = ["erm", "cxda", "ft_em"], "finetune.steps=1", np.random.default_rng(0)


def result(method, seed, setting):
    config = {"method": "erm" if method == "ft_em" else method, "finetune": {"steps": 10},
              "episode": {"num_domains": 5, "per_domain": 20}, "evaluation": {"test_tasks": 6}}  # fmt: skip
    row = {"avg": 50 + 10 * RNG.random(), "w10": 30 + 10 * RNG.random(), "adapt_ms": 12 + 400 * RNG.random()}
    return make_result(method, seed, "glyphs", setting, config=config, store="glyphs", **row)


SETTINGS = "", ONE_STEP, *(f"num_domains={n}" for n in (1, 10))
STUDY = [result(method, seed, setting) for method, setting, seed in itertools.product(METHODS, SETTINGS, range(3))
         if setting != ONE_STEP or method == "ft_em"]  # fmt: skip


def draw(name):
    """The figure that reports call so."""
    styles = plots.method_styles(STUDY)
    return plots.variable(STUDY, name, styles) if name in plots.AXES else getattr(plots, name)(STUDY, styles)


def of(method, setting, field):
    return [getattr(r, field) for r in STUDY if (r.method, str(r.setting)) == (method, setting)]


@pytest.mark.parametrize(("name", "field", "settings"), [
    ("accuracy_time", "avg", {"erm": [""], "cxda": [""], "ft_em": [ONE_STEP, ""]}),
    ("num_domains", "avg", dict.fromkeys(METHODS, ["num_domains=1", "", "num_domains=10"])),
])  # fmt: skip
def test_points_are_means_over_seeds_and_bars_their_standard_errors(name, field, settings):
    containers = draw(name).axes[0].containers
    assert [container.get_label() for container in containers] == METHODS
    for container, (method, its) in zip(containers, settings.items(), strict=True):
        line, _, (bars,) = container.lines
        values = np.array([of(method, setting, field) for setting in its])
        np.testing.assert_allclose(line.get_ydata(), values.mean(1))
        heights = [np.ptp(ends[:, 1]) for ends in bars.get_segments()]
        np.testing.assert_allclose(heights, 2 * values.std(1, ddof=1) / np.sqrt(3))
