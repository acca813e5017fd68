"""Figures of a study and of attention: what they draw."""

import itertools
import re

import numpy as np
import pytest

from cxda_jax.config.registry import METHODS
from cxda_jax.studies import attention, plots
from tests.results import make_result

ONE_STEP = "finetune.steps=1"
SETTINGS = ["", ONE_STEP, *(f"num_domains={n}" for n in (1, 10, 20)), *(f"support_size={n}" for n in (10, 500))]


def result(method="cxda", seed=0, setting="", avg=50.0, label=None, steps=10, **row):
    trained = "erm" if method in METHODS and METHODS[method].style.open else method
    config = {"method": trained, "finetune": {"steps": steps}, "episode": {"num_domains": 5, "per_domain": 20},
              "evaluation": {"test_tasks": 6}}  # fmt: skip
    row = {"avg": avg, "w10": avg - 20, "adapt_ms": 12.0} | row
    return make_result(method, seed, "glyphs", setting, label, config, **row)._replace(store="glyphs")


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
    return [r.row[field] for r in WHOLE if r.row["method"] == method and r.row["setting"] == setting]


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


def test_one_step_and_the_usual_steps_are_joined_and_the_first_result_of_a_seed_counts():
    rows = [result("ft_em", avg=60.0, steps=7), result("ft_em", setting=ONE_STEP, avg=55.0), result("cxda", avg=70.0)]
    axes = draw(rows, "accuracy_time").axes[0]
    assert [text.get_text() for text in axes.texts] == ["1 step", "7 steps"], "of ft_em, which has both"
    # The same steps asked for in two ways, or by a flag instead of a setting, are the same point.
    rows.append(result("ft_em", setting="finetune.steps=7", avg=1.0, steps=7))
    rows[1] = result("ft_em", label=f"ft_em,{ONE_STEP}", avg=55.0, steps=7)
    assert drawn(draw(rows, "accuracy_time").axes[0])["ft_em"][1] == [55, 60]


@pytest.mark.parametrize("kind, usual", [("num_domains", 5), ("support_size", 100)])
def test_variable(kind, usual):
    for axes, field in zip(draw(WHOLE, kind).axes, ("avg", "w10"), strict=True):
        assert list(drawn(axes)) == SOME
        for method, (x, *points) in drawn(axes).items():
            numbers = [int(s.partition("=")[2]) for s in SETTINGS if s.startswith(kind)]
            values = {n: of(method, f"{kind}={n}", field) for n in numbers} | {usual: of(method, "", field)}
            assert x == sorted(values)
            assert_means(*points, [values[n] for n in sorted(values)])


def test_a_method_has_the_numbers_that_it_was_tested_with_and_there_may_be_nothing_to_draw():
    for name in ("num_domains", "support_size", "learning_curves"):
        assert draw([result()], name) is None, "no curve came along, and one number is no variation"
    five, ten, few = "num_domains=5", "num_domains=10", "support_size=10"
    rows = [("cxda", "", 50.0), ("cxda", five, 55.0), ("cxda", ten, 60.0)]
    rows += [("bn", ten, 40.0), ("bn", few, 1.0), ("sla", "", 3.0)]
    results = [result(method, 0, setting, avg) for method, setting, avg in rows]
    found = {label: points[:2] for label, points in drawn(draw(results, "num_domains").axes[0]).items()}
    assert found == {"bn": ([10], [40]), "cxda": ([5, 10], [55, 60])}, "a result of the setting comes first"


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


def test_histograms_draw_densities_and_medians():
    rng = np.random.default_rng(0)
    parts = rng.lognormal(0.5, 1, 50), rng.lognormal(0, 1, 200)
    (axes,) = attention.histogram(*parts).axes
    assert axes.get_title() == f"medians {np.median(parts[0]):.2f}, {np.median(parts[1]):.2f}"
    for stairs, weights in zip(axes.patches, parts, strict=True):
        density, edges, _ = stairs.get_data()
        share = np.histogram(weights, edges)[0] / weights.size
        np.testing.assert_allclose(density * np.diff(np.log10(edges)), share, atol=1e-12)
        assert np.median(weights) in [line.get_xdata()[0] for line in axes.lines]


def attention_grid(images=100, **other):
    rng = np.random.default_rng(0)
    pixels, weights = rng.integers(0, 256, (images, 28, 28, 1), dtype=np.uint8), rng.dirichlet(np.ones(images))
    of, names = np.arange(images) % 5, [f"test-{i:03d}" for i in range(6)]
    return attention.grid(pixels, of, weights, 2, pixels[0], names, **other), pixels, weights, of


def test_grid_shows_most_and_least_attended():
    figure, pixels, weights, of = attention_grid(text="label 'a', answer 'b'")
    (axes,) = figure.axes
    pictures = axes.get_images()
    assert len(pictures) == 1 + 5 * 10 and np.array_equal(pictures[0].get_array(), pixels[0, ..., 0])
    ranked = np.flatnonzero(of == 2)[np.argsort(-weights[of == 2])]
    chosen = [*ranked[:5], *ranked[-5:]]  # the query's own domain comes first
    for picture, image in zip(pictures[1:11], chosen, strict=True):
        assert np.array_equal(picture.get_array(), pixels[image, ..., 0])
    texts = [text.get_text() for text in axes.texts]
    start = texts.index(f"{100 * weights[chosen[0]]:.2f}")
    assert texts[start : start + 10] == [f"{100 * weights[i]:.2f}" for i in chosen]
    assert [text for text in texts if text.endswith("*")] == ["test-002 *"] and "label 'a', answer 'b'" in texts[0]
