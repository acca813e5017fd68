"""Figures of a study: what they draw, and whether all of it can be read."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from cxda_jax.report import attention, plots
from cxda_jax.study.results import Result
from tests.results import make_result

METHODS = list(plots.STYLES)
ONE_STEP = "finetune.steps=1"
SETTINGS = ["", ONE_STEP, *(f"num_domains={n}" for n in (1, 2, 10, 20)), *(f"support_size={n}" for n in (10, 50, 500))]


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


def study(methods=METHODS, seeds=(0, 1, 2)):
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


def of(results, method, setting="", field="avg"):
    return [r.row[field] for r in results if r.row["method"] == method and r.row["setting"] == setting]


def sem(values):
    return np.std(values, ddof=1) / np.sqrt(len(values))


def drawn(axes):
    """Label to points, and ends of error bars, as the axes hold them."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        found[container.get_label()] = SimpleNamespace(line=line, x=line.get_xdata(), y=line.get_ydata(), bars=bars)
    return found


def heights(bars):
    return [np.ptp(ends[:, 1]) if len(ends) else 0 for ends in bars.get_segments()]


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
    assert boxes
    for text, box in boxes:
        assert contains(figure.bbox, box), text
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (a, b)


@pytest.mark.parametrize("methods, seeds", [(["cxda"], (0,)), (["ft_em"], (0, 1)), (METHODS, (0, 1, 2))])
def test_all_figures_can_be_read(methods, seeds):
    results = study(methods, seeds)
    for name in ("accuracy_time", "num_domains", "support_size", "learning_curves"):
        check_readable(draw(results, name))


def test_nothing_to_draw():
    assert draw([], "accuracy_time") is draw([], "num_domains") is draw([], "learning_curves") is None
    assert draw([result()], "learning_curves") is None, "no curve came along"
    assert draw([result()], "num_domains") is None, "one number is no variation"


# Accuracy against time


def test_points_are_means_over_seeds():
    results = study()
    axes = draw(results, "accuracy_time").axes[0]
    found = drawn(axes)
    assert list(found) == METHODS and axes.get_title() == "glyphs"
    for method, points in found.items():
        settings = [ONE_STEP, ""] if method in ("ft_em", "ft_im") else [""]
        values = [of(results, method, setting) for setting in settings]
        times = [np.mean(of(results, method, setting, "adapt_ms")) + 3 for setting in settings]
        np.testing.assert_allclose(points.y, [np.mean(v) for v in values])
        np.testing.assert_allclose(points.x, times)
        np.testing.assert_allclose(heights(points.bars), [2 * sem(v) for v in values])
        assert (points.line.get_markerfacecolor() == "white") == (method in ("ft_em", "ft_im", "sf_ocda", "cotta"))
    alone = drawn(draw(study(["erm", "ft_em"], seeds=(0,)), "accuracy_time").axes[0])
    assert len(alone) == 2 and not any(any(heights(points.bars)) for points in alone.values()), "one seed has no bar"


def test_steps_are_named_and_joined():
    rows = [result("ft_em", avg=60.0, steps=7), result("ft_em", setting=ONE_STEP, avg=55.0), result("cxda", avg=70.0)]
    axes = draw(rows, "accuracy_time").axes[0]
    assert {text.get_text() for text in axes.texts} == {"ft_em, 1 step", "ft_em, 7 steps", "cxda"}
    line = drawn(axes)["ft_em"].line
    assert list(line.get_ydata()) == [55, 60] and line.get_linestyle() != "None"
    # The same steps asked for in two ways, or by a flag instead of a setting, are the same point.
    rows.append(result("ft_em", setting="finetune.steps=7", avg=1.0, steps=7))
    rows[1] = result("ft_em", label=f"ft_em,{ONE_STEP}", avg=55.0, steps=7)
    assert list(drawn(draw(rows, "accuracy_time").axes[0])["ft_em"].y) == [55, 60]


def test_the_first_result_of_a_seed_counts_and_a_lonely_point_has_its_label_beside_it():
    labels = [f"ft_em,{ONE_STEP},finetune.rate=1", f"ft_em,finetune.rate=1,{ONE_STEP}"]
    results = [result("ft_em", label=label, avg=avg) for label, avg in zip(labels, (60.0, 10.0), strict=True)]
    axes = draw(results, "accuracy_time").axes[0]
    assert list(drawn(axes)["ft_em,finetune.rate=1"].y) == [60]
    assert len(axes.texts) == 1 and not axes.texts[0].arrow_patch.get_visible()


@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_labels_of_near_points_do_not_overlap(spread):
    rng, results = np.random.default_rng(1), []
    for name, seed in itertools.product([*METHODS, "cxda,attention.heads=4", "bn,batch_norm.momentum=0.9"], range(3)):
        settings = ["", ONE_STEP] if name in ("ft_em", "ft_im") else [""]
        results += [result(name.split(",")[0], seed, s, 60 + spread * rng.standard_normal(), adapt_ms=12 + spread * rng.random(),
                           label=",".join(filter(None, [name, s]))) for s in settings]  # fmt: skip
    figure = draw(results, "accuracy_time")
    check_readable(figure)
    axes = figure.axes[0]
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    assert len(labels) == 17
    for text in labels:
        assert contains(axes.bbox, Text.get_window_extent(text))
        middle = Text.get_window_extent(text).get_points().mean(0)
        far = np.hypot(*(middle - axes.transData.transform(text.xy)))
        assert text.arrow_patch.get_visible() or far < 100
    assert any(text.arrow_patch.get_visible() for text in labels)


# Other numbers of domains and of support images


@pytest.mark.parametrize("kind, usual", [("num_domains", 5), ("support_size", 100)])
def test_variable(kind, usual):
    results = study()
    figure = draw(results, kind)
    for axes, field in zip(figure.axes, ("avg", "w10"), strict=True):
        assert axes.get_xscale() == ("log" if kind == "support_size" else "linear")
        found = drawn(axes)
        assert list(found) == METHODS
        for method, points in found.items():
            numbers = [int(s.partition("=")[2]) for s in SETTINGS if s.startswith(kind)]
            values = {n: of(results, method, f"{kind}={n}", field) for n in numbers}
            values[usual] = of(results, method, "", field)
            assert list(points.x) == sorted(values)
            np.testing.assert_allclose(points.y, [np.mean(values[n]) for n in sorted(values)])
            np.testing.assert_allclose(heights(points.bars), [2 * sem(values[n]) for n in sorted(values)])


def test_variable_with_missing_cells():
    five, ten, few = "num_domains=5", "num_domains=10", "support_size=10"
    results = [result("cxda", 0, setting, avg) for setting, avg in (("", 50.0), (five, 55.0), (ten, 60.0))]
    results += [
        result("bn", 0, ten, 40.0),
        result("bn", 1, ten, 42.0),
        result("bn", 0, few, 1.0),
        result("sla", avg=30.0),
    ]
    figure = draw(results, "num_domains")
    check_readable(figure)
    found = drawn(figure.axes[0])
    assert list(found) == ["bn", "cxda"], "sla was tested on the usual tasks only"
    assert list(found["cxda"].x) == [5, 10] and list(found["cxda"].y) == [55, 60], "a result of the setting comes first"
    assert list(found["bn"].x) == [10] and list(found["bn"].y) == [41]
    assert heights(found["bn"].bars) == pytest.approx([2.0])
    assert list(drawn(figure.axes[1])["cxda"].y) == [35, 40]


# Learning curves


def test_learning_curves():
    def curve(*scores):
        return [{"step": 1, "loss": 3.0}] + [{"step": 100 * k, "val_score": score} for k, score in enumerate(scores, 1)]

    first, second, third = curve(0.1, 0.2, 0.3), curve(0.3, 0.4), curve(0.5, 0.6, 0.7)
    results = [result("erm", 0, curve=first), result("erm", 1, curve=second), result("cxda", 0, curve=third)]
    results += [result("ft_em", 0, curve=first), result("bn", 0)]  # ft_em is from the same run of erm
    figure = draw(results, "learning_curves")
    check_readable(figure)
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["erm", "cxda"]
    for line, scores in zip(lines, [(10, 20, 30), (30, 40), (20, 30), (50, 60, 70)], strict=True):
        np.testing.assert_allclose(line.get_xydata(), [(100 * k, score) for k, score in enumerate(scores, 1)])
    assert lines[2].get_linewidth() > 2 * lines[0].get_linewidth()


def test_names_are_no_formulas(tmp_path):
    label, store = "cxda$\\frac{", "my$_{"
    results = [result(label=label, avg=avg, seed=s)._replace(store=store) for s, avg in enumerate((1.0, 2.0))]
    plots.save(draw(results, "accuracy_time"), tmp_path / "figure")
    assert {p.name for p in tmp_path.iterdir()} == {"figure.png", "figure.svg"}


# Styles


def test_styles_differ_without_colour():
    others = [result("bn", label=f"bn,batch_norm.momentum={i}") for i in range(12)]
    styles = plots.method_styles(others)
    assert len(styles) == 26 and {name: styles[name] for name in METHODS} == plots.STYLES
    looks = [style.arguments() for style in styles.values()]
    for look in ("marker", "linestyle"):
        assert all(a[look] != b[look] for a, b in itertools.combinations(looks, 2))
    assert plots.method_styles([result("ft_em", label="ft_em,finetune.rate=1")])["ft_em,finetune.rate=1"].open


def test_method_looks_the_same_in_all_figures():
    results = study(["erm", "ft_em", "cxda"])
    lines = [drawn(draw(results, name).axes[0])["cxda"].line for name in ("accuracy_time", "num_domains")]
    lines += [line for line in draw(results, "learning_curves").axes[0].lines if line.get_label() == "cxda"]
    assert len({(line.get_marker(), line.get_linestyle(), line.get_color()) for line in lines}) == 1


# Files


def attention_grid(images=100, domains=5, shape=(28, 28, 1), **other):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, *shape), dtype=np.uint8)
    weights = rng.dirichlet(np.ones(images))
    of = np.arange(images) % domains
    names = [f"test-{i:03d} DejaVuSansMono-BoldOblique" for i in range(domains + 1)]
    return attention.grid(pixels, of, weights, domains // 2, pixels[0], names, **other), pixels, weights, of


def figures():
    results = study(["erm", "bn", "ft_em", "cxda"])
    weights = np.random.default_rng(0).lognormal(0, 1, 500)
    found = {name: draw(results, name) for name in ("accuracy_time", "support_size", "learning_curves")}
    return {**found, "histogram": attention.histogram(weights[:100], weights[100:]), "grid": attention_grid()[0]}


def test_files_are_the_same_again_and_share_no_ids(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name, figure in figures().items():
            plots.save(figure, tmp_path / folder / f"{name}.of")
    paths = sorted((tmp_path / "a").iterdir())
    assert len(paths) == 10
    all_ids = []
    for path in paths:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() and path.stat().st_size > 1000
        if path.suffix == ".png":
            continue
        text = path.read_text()
        assert text.startswith("<svg") and "<text" not in text and "<metadata" not in text and "DOCTYPE" not in text
        addresses = set(re.findall(r"https?://[^\"' )]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "nobody fetches these"
        ids = re.findall(r'\bid="([^"]*)"', text)
        targets = re.findall(r'href="([^"]*)"', text) + re.findall(r"url\(([^)]*)\)", text)
        assert all(t.startswith("data:image/png") or t.removeprefix("#") in ids for t in targets)
        all_ids += ids
    assert len(all_ids) == len(set(all_ids)) > 0
