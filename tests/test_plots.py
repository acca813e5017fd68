"""Figures of a study and of attention: what they draw, and whether all of it can be read."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from cxda_jax.report import attention, plots
from cxda_jax.study.results import Result
from tests.results import make_result

pytestmark = pytest.mark.gate
METHODS = list(plots.STYLES)
ONE_STEP = "finetune.steps=1"
SETTINGS = ["", ONE_STEP, *(f"num_domains={n}" for n in (1, 10, 20)), *(f"support_size={n}" for n in (10, 500))]
FIGURES = ("accuracy_time", "num_domains", "support_size", "learning_curves")


class Stub(Result):
    """A result whose curve lies in its config."""

    def curve(self):
        return self.config["curve"]


def result(method="cxda", seed=0, setting="", avg=50.0, label=None, curve=(), steps=10, **row):
    trained = "erm" if plots.STYLES.get(method, plots.STYLES["erm"]).open else method
    config = {"method": trained, "finetune": {"steps": steps}, "episode": {"num_domains": 5, "per_domain": 20},
              "evaluation": {"test_tasks": 6}, "curve": list(curve)}  # fmt: skip
    row = {"avg": avg, "w10": avg - 20, "adapt_ms": 12.0} | row
    return Stub(*make_result(method, seed, "glyphs", setting, label, config, **row)[:4], store="glyphs")


def study(methods, seeds=(0, 1, 2)):
    """Results of a whole study, with some variation."""
    results, rng = [], np.random.default_rng(0)
    for method, setting in itertools.product(methods, SETTINGS):
        if setting == ONE_STEP and method not in ("ft_em", "ft_im"):
            continue
        level, ms = 50 + 10 * rng.random(), (400 if plots.STYLES[method].open else 12) + 10 * rng.random()
        curve = [{"step": 10, "loss": 1.0}] + [{"step": 100 * k, "val_score": 0.1 * k} for k in range(1, 9)]
        results += [result(method, s, setting, level + rng.standard_normal(), curve=curve, adapt_ms=ms) for s in seeds]
    return results


def draw(results, name):
    """The figure that reports call so."""
    styles = plots.method_styles(results)
    return plots.variable(results, name, styles) if name in plots.AXES else getattr(plots, name)(results, styles)


SOME = ["erm", "bn", "cxda", "ft_em", "ft_im", "cotta", "sla"]
WHOLE = study(SOME)
drawn_whole = functools.cache(lambda name: draw(WHOLE, name))


def of(method, setting="", field="avg"):
    return [r.row[field] for r in WHOLE if r.row["method"] == method and r.row["setting"] == setting]


class Points(NamedTuple):
    line: Any
    x: Any
    y: Any
    heights: Any  # of error bars


def assert_means(points, values):
    """The points of a line are means of lists, and its bars their standard errors."""
    np.testing.assert_allclose(points.y, [np.mean(v) for v in values])
    np.testing.assert_allclose(points.heights, [2 * np.std(v, ddof=1) / np.sqrt(len(v)) for v in values])


def drawn(axes):
    """The points of each label, as the axes hold them."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        heights = [np.ptp(ends[:, 1]) if len(ends) else 0 for ends in bars.get_segments()]
        found[container.get_label()] = Points(line, line.get_xdata(), line.get_ydata(), heights)
    return found


def contains(outer, box):
    return outer.x0 <= box.x0 and outer.y0 <= box.y0 and box.x1 <= outer.x1 and box.y1 <= outer.y1


def check_readable(figure):
    """All texts lie inside the figure, and none on another one."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, ticks = canvas.get_renderer(), set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            both = axis.get_major_ticks() + axis.get_minor_ticks()
            ticks |= {label for tick in both for label in (tick.label1, tick.label2)}
            if axes.axison and (box := axis.get_tightbbox(renderer)):
                assert contains(figure.bbox, box), axis
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in ticks]
    texts = [t for t in texts if t.axes is None or t.axes.axison or t in t.axes.texts]
    boxes = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in texts]
    assert boxes and all(contains(figure.bbox, box) for _, box in boxes)
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (a, b)


@pytest.mark.parametrize("name", FIGURES)
def test_all_figures_can_be_read_and_there_may_be_nothing_to_draw(name):
    check_readable(drawn_whole(name) if name == "accuracy_time" else draw(study(METHODS, (0,)), name))
    if name == "accuracy_time":
        check_readable(draw([result(label="cxda$\\frac{")._replace(store="my$_{")], name))  # names are no formulas
    else:
        assert draw([result()], name) is None, "no curve came along, and one number is no variation"


def test_points_are_means_over_seeds():
    axes = drawn_whole("accuracy_time").axes[0]
    found = drawn(axes)
    assert list(found) == SOME and axes.get_title() == "glyphs"
    for method, points in found.items():
        settings = [ONE_STEP, ""] if method in ("ft_em", "ft_im") else [""]
        assert_means(points, [of(method, setting) for setting in settings])
        np.testing.assert_allclose(points.x, [np.mean(of(method, setting, "adapt_ms")) + 3 for setting in settings])
        assert (points.line.get_markerfacecolor() == "white") == (method in ("ft_em", "ft_im", "cotta"))


def test_steps_are_named_and_joined_and_the_first_result_of_a_seed_counts():
    rows = [result("ft_em", avg=60.0, steps=7), result("ft_em", setting=ONE_STEP, avg=55.0), result("cxda", avg=70.0)]
    axes = draw(rows, "accuracy_time").axes[0]
    assert {text.get_text() for text in axes.texts} == {"ft_em, 1 step", "ft_em, 7 steps", "cxda"}
    line = drawn(axes)["ft_em"].line
    assert list(line.get_ydata()) == [55, 60] and line.get_linestyle() != "None"
    # The same steps asked for in two ways, or by a flag instead of a setting, are the same point.
    rows.append(result("ft_em", setting="finetune.steps=7", avg=1.0, steps=7))
    rows[1] = result("ft_em", label=f"ft_em,{ONE_STEP}", avg=55.0, steps=7)
    assert list(drawn(draw(rows, "accuracy_time").axes[0])["ft_em"].y) == [55, 60]
    rows = [result("ft_em", label=f"ft_em,{ONE_STEP},finetune.rate=1", avg=60.0)]
    axes = draw([*rows, result("ft_em", label=f"ft_em,finetune.rate=1,{ONE_STEP}", avg=10.0)], "accuracy_time").axes[0]
    assert list(drawn(axes)["ft_em,finetune.rate=1"].y) == [60]
    assert len(axes.texts) == 1 and not axes.texts[0].arrow_patch.get_visible()


@pytest.mark.parametrize("kind, usual", [("num_domains", 5), ("support_size", 100)])
def test_variable(kind, usual):
    for axes, field in zip(drawn_whole(kind).axes, ("avg", "w10"), strict=True):
        assert axes.get_xscale() == ("log" if kind == "support_size" else "linear")
        assert list(drawn(axes)) == SOME
        for method, points in drawn(axes).items():
            numbers = [int(s.partition("=")[2]) for s in SETTINGS if s.startswith(kind)]
            values = {n: of(method, f"{kind}={n}", field) for n in numbers} | {usual: of(method, "", field)}
            assert list(points.x) == sorted(values)
            assert_means(points, [values[n] for n in sorted(values)])


def test_a_method_has_the_numbers_that_it_was_tested_with():
    five, ten, few = "num_domains=5", "num_domains=10", "support_size=10"
    rows = (
        ("cxda", "", 50.0),
        ("cxda", five, 55.0),
        ("cxda", ten, 60.0),
        ("bn", ten, 40.0),
        ("bn", few, 1.0),
        ("sla", "", 3.0),
    )
    results = [result(method, 0, setting, avg) for method, setting, avg in rows]
    found = {label: [*map(list, (of.x, of.y))] for label, of in drawn(draw(results, "num_domains").axes[0]).items()}
    assert found == {"bn": [[10], [40]], "cxda": [[5, 10], [55, 60]]}, "a result of the setting comes first"


def test_learning_curves():
    def curve(*scores):
        return [{"step": 1, "loss": 3.0}] + [{"step": 100 * k, "val_score": score} for k, score in enumerate(scores, 1)]

    first, second, third = curve(0.1, 0.2, 0.3), curve(0.3, 0.4), curve(0.5, 0.6, 0.7)
    results = [result("erm", 0, curve=first), result("erm", 1, curve=second), result("cxda", 0, curve=third)]
    results += [result("ft_em", 0, curve=first), result("bn", 0)]  # ft_em is from the same run of erm
    lines = draw(results, "learning_curves").axes[0].lines
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["erm", "cxda"]
    for line, scores in zip(lines, [(10, 20, 30), (30, 40), (20, 30), (50, 60, 70)], strict=True):
        np.testing.assert_allclose(line.get_xydata(), [(100 * k, score) for k, score in enumerate(scores, 1)])
    assert lines[2].get_linewidth() > 2 * lines[0].get_linewidth()


def attention_grid(images=100, domains=5, shape=(28, 28, 1), **other):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, *shape), dtype=np.uint8)
    weights = rng.dirichlet(np.ones(images))
    of = np.arange(images) % domains
    names = [f"test-{i:03d} DejaVuSansMono-BoldOblique" for i in range(domains + 1)]
    return attention.grid(pixels, of, weights, domains // 2, pixels[0], names, **other), pixels, weights, of


def test_files_are_the_same_again_and_share_no_ids(tmp_path):
    all_ids = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        found = {"curves": draw(study(["erm", "ft_em"]), "learning_curves"), "grid": attention_grid(8)[0]}
        for name, figure in found.items():
            plots.save(figure, tmp_path / folder / f"{name}.of")
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() and path.stat().st_size > 1000
    for path in (tmp_path / "a").glob("*.of.svg"):
        text = path.read_text()
        assert text.startswith("<svg") and "<text" not in text and "DOCTYPE" not in text
        all_ids += re.findall(r'\bid="([^"]*)"', text)
    assert len(list(tmp_path.glob("a/*.png"))) == 2 and len(all_ids) == len(set(all_ids)) > 0


def test_histograms_draw_densities_and_medians():
    rng, heads = np.random.default_rng(0), 5
    same, other = rng.lognormal(0.5, 1, (heads, 50)), rng.lognormal(0, 1, (heads, 200))
    figure = attention.histogram(same, other, by_head=True)
    check_readable(figure)
    for h, axes in enumerate(figure.axes):
        pair = (same[h], other[h])
        medians = f"medians {np.median(same[h]):.2f}, {np.median(other[h]):.2f}"
        assert axes.get_title() == f"head {h + 1}\n{medians}"
        for stairs, weights in zip(axes.patches, pair, strict=True):
            density, edges, _ = stairs.get_data()
            share = np.histogram(weights, edges)[0] / weights.size
            np.testing.assert_allclose(density * np.diff(np.log10(edges)), share, atol=1e-12)
            assert np.median(weights) in [line.get_xdata()[0] for line in axes.lines]
        assert axes.patches[0].get_linestyle() != axes.patches[1].get_linestyle()
    assert len(figure.axes) == heads


def test_histograms_of_little():
    for same, other in [([1.0], []), ([0.0, 0.0], [0.0, 5.0])]:
        figure = attention.histogram(np.array(same), np.array(other))
        check_readable(figure)
        for density, edges, _ in (stairs.get_data() for stairs in figure.axes[0].patches):
            assert np.sum(density * np.diff(np.log10(edges))) == pytest.approx(1)


def test_grid_shows_most_and_least_attended():
    figure, pixels, weights, of = attention_grid(text="label 'a', answer 'b'")
    check_readable(figure)
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
    starred = [text for text in texts if text.endswith("*")]
    assert len(starred) == 1 and starred[0].startswith("test-002") and "label 'a', answer 'b'" in texts[0]


def test_grids_of_few_large_images_in_colours():
    for images, domains, shown in ((7, 1, 6), (40, 2, 12)):
        figure, *_ = attention_grid(images, domains, (300, 448, 3), per_domain=3)
        check_readable(figure)
        pictures = [picture.get_array() for picture in figure.axes[0].get_images()]
        assert len(pictures) == 1 + shown and all(picture.shape[2] == 3 for picture in pictures)
        assert all(max(picture.shape) <= 128 for picture in pictures), "large images would make a large page"
