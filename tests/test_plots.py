"""Figures of a study and of attention: what they draw, and whether all of it can be read."""

import functools
import itertools
import re
from types import SimpleNamespace

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
SETTINGS = ["", ONE_STEP, *(f"num_domains={n}" for n in (1, 2, 10, 20)), *(f"support_size={n}" for n in (10, 50, 500))]
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


def assert_means(points, values):
    """The points of a line are means of lists, and its bars their standard errors."""
    np.testing.assert_allclose(points.y, [np.mean(v) for v in values])
    np.testing.assert_allclose(points.heights, [2 * np.std(v, ddof=1) / np.sqrt(len(v)) for v in values])


def drawn(axes):
    """Label to line, points and heights of error bars, as the axes hold them."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        heights = [np.ptp(ends[:, 1]) if len(ends) else 0 for ends in bars.get_segments()]
        found[container.get_label()] = SimpleNamespace(
            line=line, x=line.get_xdata(), y=line.get_ydata(), heights=heights
        )
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
    check_readable(drawn_whole(name))
    check_readable(draw(study(["ft_em"] if name == "accuracy_time" else METHODS, (0,)), name))
    assert draw([], name) is None
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
    (alone,) = drawn(draw([result("erm")], "accuracy_time").axes[0]).values()
    assert not any(alone.heights), "one seed has no bar"


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
    labels = {f"ft_em,{ONE_STEP},finetune.rate=1": 60.0, f"ft_em,finetune.rate=1,{ONE_STEP}": 10.0}
    axes = draw([result("ft_em", label=label, avg=avg) for label, avg in labels.items()], "accuracy_time").axes[0]
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


def test_variable_with_missing_cells():
    five, ten, few = "num_domains=5", "num_domains=10", "support_size=10"
    results = [result("cxda", 0, setting, avg) for setting, avg in (("", 50.0), (five, 55.0), (ten, 60.0))]
    results += [
        result("bn", seed, setting, avg) for seed, setting, avg in ((0, ten, 40.0), (1, ten, 42.0), (0, few, 1.0))
    ]
    figure = draw([*results, result("sla", avg=30.0)], "num_domains")
    found = drawn(figure.axes[0])
    assert list(found) == ["bn", "cxda"], "sla was tested on the usual tasks only"
    assert list(found["cxda"].x) == [5, 10] and list(found["cxda"].y) == [55, 60], "a result of the setting comes first"
    assert list(found["bn"].x) == [10] and list(found["bn"].y) == [41]
    assert found["bn"].heights == pytest.approx([2.0]) and list(drawn(figure.axes[1])["cxda"].y) == [35, 40]


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


def test_styles_differ_without_colour_and_are_the_same_in_all_figures():
    styles = plots.method_styles([result("bn", label=f"bn,batch_norm.momentum={i}") for i in range(12)])
    assert len(styles) == len(METHODS) + 12 and {name: styles[name] for name in METHODS} == plots.STYLES
    looks = [style.arguments() for style in styles.values()]
    for look in ("marker", "linestyle"):
        assert all(a[look] != b[look] for a, b in itertools.combinations(looks, 2))
    assert plots.method_styles([result("ft_em", label="ft_em,finetune.rate=1")])["ft_em,finetune.rate=1"].open
    lines = [drawn(drawn_whole(name).axes[0])["cxda"].line for name in FIGURES[:2]]
    lines += [line for line in drawn_whole("learning_curves").axes[0].lines if line.get_label() == "cxda"]
    assert len({(line.get_marker(), line.get_linestyle(), line.get_color()) for line in lines}) == 1


def attention_grid(images=100, domains=5, shape=(28, 28, 1), **other):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, *shape), dtype=np.uint8)
    weights = rng.dirichlet(np.ones(images))
    of = np.arange(images) % domains
    names = [f"test-{i:03d} DejaVuSansMono-BoldOblique" for i in range(domains + 1)]
    return attention.grid(pixels, of, weights, domains // 2, pixels[0], names, **other), pixels, weights, of


def test_files_are_the_same_again_and_share_no_ids(tmp_path):
    weights, all_ids = np.random.default_rng(0).lognormal(0, 1, 500), []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        found = {name: draw(study(["erm", "ft_em"]), name) for name in FIGURES[1::2]}
        found |= {"histogram": attention.histogram(weights[:100], weights[100:]), "grid": attention_grid(20)[0]}
        for name, figure in found.items():
            plots.save(figure, tmp_path / folder / f"{name}.of")
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() and path.stat().st_size > 1000
    for path in (tmp_path / "a").glob("*.of.svg"):
        text = path.read_text()
        assert text.startswith("<svg") and "<text" not in text and "<metadata" not in text and "DOCTYPE" not in text
        addresses = set(re.findall(r"https?://[^\"' )]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "nobody fetches these"
        ids = re.findall(r'\bid="([^"]*)"', text)
        targets = re.findall(r'href="([^"]*)"', text) + re.findall(r"url\(([^)]*)\)", text)
        assert all(t.startswith("data:image/png") or t.removeprefix("#") in ids for t in targets)
        all_ids += ids
    assert len(list(tmp_path.glob("a/*.png"))) == 4 and len(all_ids) == len(set(all_ids)) > 0


@pytest.mark.parametrize("heads", [1, 5])
def test_histograms_draw_densities_and_medians(heads):
    rng = np.random.default_rng(0)
    same, other = rng.lognormal(0.5, 1, (heads, 50)), rng.lognormal(0, 1, (heads, 200))
    figure = attention.histogram(same, other, by_head=heads > 1)
    check_readable(figure)
    for h, axes in enumerate(figure.axes):
        pair = (same[h], other[h])
        medians = f"medians {np.median(same[h]):.2f}, {np.median(other[h]):.2f}"
        assert axes.get_title() == (f"head {h + 1}\n" if heads > 1 else "") + medians
        for stairs, weights in zip(axes.patches, pair, strict=True):
            density, edges, _ = stairs.get_data()
            share = np.histogram(weights, edges)[0] / weights.size
            np.testing.assert_allclose(density * np.diff(np.log10(edges)), share, atol=1e-12)
            assert np.median(weights) in [line.get_xdata()[0] for line in axes.lines]
        assert axes.patches[0].get_linestyle() != axes.patches[1].get_linestyle()
    assert len(figure.axes) == heads


def test_histograms_of_little_and_of_nearly_uniform_weights():
    for same, other in [([1.0], []), ([], [1.0, 1.0]), ([0.0, 0.0], [0.0, 5.0]), ([0.0], [0.0])]:
        figure = attention.histogram(np.array(same), np.array(other))
        check_readable(figure)
        for density, edges, _ in (stairs.get_data() for stairs in figure.axes[0].patches):
            assert np.sum(density * np.diff(np.log10(edges))) == pytest.approx(1)
    (axes,) = attention.histogram(np.linspace(0.9, 1.1, 50), np.linspace(0.95, 1.05, 50)).axes
    assert [tick for tick in axes.get_xticks() if 0.9 <= tick <= 1.1] == pytest.approx([0.9, 0.95, 1, 1.05, 1.1])


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


@pytest.mark.parametrize(
    "images, domains, shape, per_domain, shown",
    [(7, 1, (28, 28, 1), 5, 7), (12, 2, (300, 448, 3), 5, 12), (40, 2, (32, 32, 3), 3, 12)],
)
def test_grid_of_other_forms(images, domains, shape, per_domain, shown):
    figure, *_ = attention_grid(images, domains, shape, per_domain=per_domain)
    check_readable(figure)
    pictures = [picture.get_array() for picture in figure.axes[0].get_images()]
    assert len(pictures) == 1 + shown
    assert all(max(p.shape[:2]) <= 128 for p in pictures), "large images would make a large page"
    assert all(p.shape[2:] == (shape[2:] if shape[2] == 3 else ()) for p in pictures)
