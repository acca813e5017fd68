"""Figures of a study: what they draw, and whether all of it can be read."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from cxda_jax.analysis import plots
from cxda_jax.analysis.results import Result

METHODS = list(plots.STYLES)
ONE_STEP = "finetune.steps=1"
SETTINGS = ["", ONE_STEP, *(f"num_domains={n}" for n in (1, 2, 10, 20)), *(f"support_size={n}" for n in (10, 50, 500))]


class Stub(Result):
    """A result whose curve lies in its config."""

    def curve(self):
        return self.config["curve"]


def result(method="cxda", seed=0, setting="", avg=50.0, label=None, curve=(), steps=10, **row):
    label = label or ",".join(filter(None, [method, setting]))
    row = {"label": label, "method": method, "benchmark": "glyphs", "seed": seed, "metric": "accuracy", "avg": avg,
           "w10": (avg or 0) - 20, "adapt_ms": 12.0, "predict_ms": 3.0, "setting": setting} | row  # fmt: skip
    trained = "erm" if plots.STYLES.get(method, plots.STYLES["erm"]).open else method
    config = {"method": trained, "finetune": {"steps": steps}, "episode": {"num_domains": 5, "per_domain": 20}}
    folder = Path(f"runs/{trained}/{seed}")
    return Stub(row, {**config, "curve": list(curve)}, folder / label, folder)


def study(methods=METHODS, seeds=(0, 1, 2), settings=SETTINGS, spread=10.0):
    """Results of a whole study, with some variation."""
    found, rng = [], np.random.default_rng(0)
    for method, setting in itertools.product(methods, settings):
        if setting == ONE_STEP and method not in ("ft_em", "ft_im"):
            continue
        level, ms = 50 + spread * rng.random(), (400 if plots.STYLES[method].open else 12) + spread * rng.random()
        curve = [{"step": 10, "loss": 1.0}] + [{"step": 100 * k, "val_score": 0.1 * k} for k in range(1, 9)]
        for seed in seeds:
            avg = level + 0.1 * spread * rng.standard_normal()
            found.append(result(method, seed, setting, avg, curve=curve, adapt_ms=ms))
    return found


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


def check_readable(figure):
    """All texts lie inside the figure, and none on another one."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, ticks = canvas.get_renderer(), set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks |= {
                label
                for tick in axis.get_major_ticks() + axis.get_minor_ticks()
                for label in (tick.label1, tick.label2)
            }
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


def contains(outer, box):
    return outer.x0 <= box.x0 and outer.y0 <= box.y0 and box.x1 <= outer.x1 and box.y1 <= outer.y1


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("methods", [["cxda"], ["ft_em"], METHODS])
def test_all_figures_can_be_read(methods, seeds):
    results = study(methods, seeds)
    check_readable(plots.accuracy_time(results, "glyphs"))
    check_readable(plots.variable(results, "glyphs", "num_domains"))
    check_readable(plots.variable(results, "glyphs", "support_size"))
    check_readable(plots.learning_curves(results, "glyphs"))


def test_nothing_to_draw():
    other = [result(benchmark="iwildcam"), result(avg=None), result("bn", adapt_ms=None)]
    for results in ([], other):
        assert plots.accuracy_time(results, "glyphs") is None
        assert plots.variable(results, "glyphs", "num_domains") is None
        assert plots.learning_curves(results, "glyphs") is None
    assert plots.variable([result()], "glyphs", "num_domains") is None, "one number is no variation"
    assert plots.attention_histogram(np.zeros(0), np.zeros(0)) is None
    assert plots.attention_histogram(np.ones((2, 3)), np.ones((2, 3)), heads=[]) is None
    empty = np.zeros((0, 8, 8, 1))
    assert plots.attention_grid(empty, np.zeros(0), np.zeros(0), 0, np.zeros((8, 8, 1)), ["a"]) is None


# Accuracy against time


def test_points_are_means_over_seeds():
    results = study()
    found = drawn(plots.accuracy_time(results, "glyphs").axes[0])
    assert list(found) == METHODS
    for method, points in found.items():
        settings = [ONE_STEP, ""] if method in ("ft_em", "ft_im") else [""]
        values = [of(results, method, setting) for setting in settings]
        times = [np.mean(of(results, method, setting, "adapt_ms")) + 3 for setting in settings]
        np.testing.assert_allclose(points.y, [np.mean(v) for v in values])
        np.testing.assert_allclose(points.x, times)
        np.testing.assert_allclose(heights(points.bars), [2 * sem(v) for v in values])
        assert (points.line.get_markerfacecolor() == "white") == (method in ("ft_em", "ft_im", "sf_ocda", "cotta"))


def test_one_seed_has_no_bar():
    found = drawn(plots.accuracy_time(study(seeds=(0,)), "glyphs").axes[0])
    assert not any(any(heights(points.bars)) for points in found.values())


def test_steps_are_named_and_joined():
    rows = [result("ft_em", avg=60.0, steps=7), result("ft_em", setting=ONE_STEP, avg=55.0), result("cxda", avg=70.0)]
    axes = plots.accuracy_time(rows, "glyphs").axes[0]
    assert {text.get_text() for text in axes.texts} == {"ft_em, 1 step", "ft_em, 7 steps", "cxda"}
    line = drawn(axes)["ft_em"].line
    assert list(line.get_ydata()) == [55, 60] and line.get_linestyle() != "None"
    # The same steps asked for in two ways, or by a flag instead of a setting, are the same point.
    rows.append(result("ft_em", setting="finetune.steps=7", avg=1.0, steps=7))
    rows[1] = result("ft_em", label=f"ft_em,{ONE_STEP}", avg=55.0, steps=7)
    assert list(drawn(plots.accuracy_time(rows, "glyphs").axes[0])["ft_em"].y) == [55, 60]


def test_first_result_of_a_seed_counts_and_old_rows_have_no_label():
    old = result(avg=60.0)
    row = {key: value for key, value in old.row.items() if key not in ("label", "setting")}
    axes = plots.accuracy_time([old._replace(row=row), result(avg=10.0)], "glyphs").axes[0]
    assert list(drawn(axes)["cxda"].y) == [60]


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.5])
def test_labels_of_near_points_do_not_overlap(spread):
    rng, results = np.random.default_rng(1), []
    for name, seed in itertools.product([*METHODS, "cxda,attention.heads=4", "bn,batch_norm.momentum=0.9"], range(3)):
        settings = ["", ONE_STEP] if name in ("ft_em", "ft_im") else [""]
        results += [result(name.split(",")[0], seed, s, 60 + spread * rng.standard_normal(), adapt_ms=12 + spread * rng.random(),
                           label=",".join(filter(None, [name, s]))) for s in settings]  # fmt: skip
    figure = plots.accuracy_time(results, "glyphs")
    check_readable(figure)
    axes = figure.axes[0]
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    assert len(labels) == 17
    for text in labels:
        assert contains(axes.bbox, Text.get_window_extent(text))
        far = np.hypot(
            *np.subtract(Text.get_window_extent(text).get_points().mean(0), axes.transData.transform(text.xy))
        )
        assert text.arrow_patch.get_visible() or far < 100
    assert any(text.arrow_patch.get_visible() for text in labels)


def test_lonely_point_has_its_label_beside_it():
    (text,) = plots.accuracy_time([result()], "glyphs").axes[0].texts
    assert not text.arrow_patch.get_visible()


# Other numbers of domains and of support images


@pytest.mark.parametrize("kind, usual", [("num_domains", 5), ("support_size", 100)])
def test_variable(kind, usual):
    results = study()
    figure = plots.variable(results, "glyphs", kind)
    for axes, field in zip(figure.axes, ("avg", "w10"), strict=True):
        assert axes.get_xscale() == ("log" if kind == "support_size" else "linear")
        found = drawn(axes)
        assert list(found) == METHODS
        for method, points in found.items():
            numbers = [int(s.partition("=")[2]) for s in SETTINGS if s.startswith(kind)]
            values = {n: of(results, method, f"{kind}={n}", field) for n in numbers} | {
                usual: of(results, method, "", field)
            }
            assert list(points.x) == sorted(values)
            np.testing.assert_allclose(points.y, [np.mean(values[n]) for n in sorted(values)])
            np.testing.assert_allclose(heights(points.bars), [2 * sem(values[n]) for n in sorted(values)])


def test_variable_with_missing_cells():
    results = [
        result("cxda", avg=50.0),
        result("cxda", setting="num_domains=5", avg=55.0),
        result("cxda", setting="num_domains=10", avg=60.0, w10=None),
        result("bn", setting="num_domains=10", avg=40.0),
        result("bn", 1, setting="num_domains=10", avg=42.0),
        result("bn", setting="support_size=10", avg=1.0),
        result("sla", avg=30.0),
    ]
    figure = plots.variable(results, "glyphs", "num_domains")
    check_readable(figure)
    found = drawn(figure.axes[0])
    assert list(found) == ["bn", "cxda"], "sla was tested on the usual tasks only"
    assert list(found["cxda"].x) == [5, 10] and list(found["cxda"].y) == [55, 60], "a result of the setting comes first"
    assert list(found["bn"].x) == [10] and list(found["bn"].y) == [41]
    assert heights(found["bn"].bars) == pytest.approx([2.0])
    np.testing.assert_equal(drawn(figure.axes[1])["cxda"].y, [35, np.nan])


# Learning curves


def test_learning_curves():
    def curve(*scores):
        return [{"step": 1, "loss": 3.0}] + [{"step": 100 * k, "val_score": score} for k, score in enumerate(scores, 1)]

    results = [
        result("erm", 0, curve=curve(0.1, 0.2, 0.3)),
        result("erm", 1, curve=curve(0.3, 0.4)),
        result("ft_em", 0, curve=curve(0.1, 0.2, 0.3)),  # from the same run of erm
        result("cxda", 0, curve=curve(0.5, 0.6, 0.7)),
        result("bn", 0),
    ]
    figure = plots.learning_curves(results, "glyphs")
    check_readable(figure)
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["erm", "cxda"]
    np.testing.assert_allclose(lines[0].get_xydata(), [(100, 10), (200, 20), (300, 30)])
    np.testing.assert_allclose(lines[1].get_xydata(), [(100, 30), (200, 40)])
    np.testing.assert_allclose(lines[2].get_xydata(), [(100, 20), (200, 30)])
    np.testing.assert_allclose(lines[3].get_xydata(), [(100, 50), (200, 60), (300, 70)])
    assert len(lines) == 4 and lines[2].get_linewidth() > 2 * lines[0].get_linewidth()


def test_learning_curves_from_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 5, "val_score": 0.25, "seconds": 1.0}\n'
    )
    read = Result(result().row, result().config, tmp_path, tmp_path)
    line = plots.learning_curves([read], "glyphs").axes[0].lines[0]
    np.testing.assert_allclose(line.get_xydata(), [(5, 25)])


def test_two_stores_of_one_name_have_two_figures():
    results = [result(method, avg=avg, data_name="mine", data_hash=digest)
               for digest, avg in (("1", 40.0), ("2", 60.0)) for method in ("erm", "cxda")]  # fmt: skip
    for store, avg in {"mine [1]": 40.0, "mine [2]": 60.0}.items():
        axes = plots.accuracy_time(results, store).axes[0]
        assert axes.get_title() == store and list(drawn(axes)["cxda"].y) == [avg]


def test_names_are_no_formulas(tmp_path):
    label, store = "cxda$\\frac{", "my$_{"
    results = [result(label=label, avg=avg, seed=s, data_name=store) for s, avg in enumerate((1.0, 2.0))]
    plots.save(plots.accuracy_time(results, store), tmp_path / "figure")
    assert {p.name for p in tmp_path.iterdir()} == {"figure.png", "figure.svg"}


# Styles


def different(styles):
    looks = [style.look() for style in styles]
    return all(
        a["marker"] != b["marker"] and a["linestyle"] != b["linestyle"] for a, b in itertools.combinations(looks, 2)
    )


def test_styles_differ_without_colour():
    others = [result("bn", label=f"bn,batch_norm.momentum={i}") for i in range(12)]
    found = plots.styles(others)
    assert len(found) == 25 and different(found.values())
    assert {name: found[name] for name in METHODS} == plots.STYLES
    assert plots.styles([result("ft_em", label="ft_em,finetune.rate=1")])["ft_em,finetune.rate=1"].open


def test_method_looks_the_same_in_all_figures():
    results = study(["erm", "ft_em", "cxda"])
    figures = plots.accuracy_time(results, "glyphs"), plots.variable(results, "glyphs", "num_domains")
    lines = [drawn(figure.axes[0])["cxda"].line for figure in figures]
    lines += [line for line in plots.learning_curves(results, "glyphs").axes[0].lines if line.get_label() == "cxda"]
    assert len({(line.get_marker(), line.get_linestyle(), line.get_color()) for line in lines}) == 1


# Attention


def test_histogram_draws_densities():
    rng = np.random.default_rng(0)
    same, other = rng.lognormal(0.5, 1, (4, 50)), rng.lognormal(0, 1, (4, 200))
    figure = plots.attention_histogram(same, other)
    check_readable(figure)
    (axes,) = figure.axes
    for stairs, weights in zip(axes.patches, (same, other), strict=True):
        density, edges, _ = stairs.get_data()
        assert np.sum(density * np.diff(np.log10(edges))) == pytest.approx(1)
        share = np.histogram(weights, edges)[0] / weights.size
        np.testing.assert_allclose(density * np.diff(np.log10(edges)), share, atol=1e-12)
        assert np.median(weights) in [line.get_xdata()[0] for line in axes.lines]
    assert axes.get_title() == f"medians {np.median(same):.2f}, {np.median(other):.2f}"
    assert axes.patches[0].get_linestyle() != axes.patches[1].get_linestyle()


def test_histogram_of_nearly_uniform_weights_has_ticks():
    (axes,) = plots.attention_histogram(np.linspace(0.9, 1.1, 50), np.linspace(0.95, 1.05, 50)).axes
    assert [tick for tick in axes.get_xticks() if 0.9 <= tick <= 1.1] == pytest.approx([0.9, 0.95, 1, 1.05, 1.1])


@pytest.mark.parametrize("heads", [[0], [1, 3, 4], range(5), range(8)])
def test_histogram_of_heads(heads):
    rng = np.random.default_rng(0)
    same, other = rng.lognormal(0, 2, (8, 50)), rng.lognormal(0, 2, (8, 90))
    figure = plots.attention_histogram(same, other, heads)
    check_readable(figure)
    assert len(figure.axes) == len(heads)
    for axes, head in zip(figure.axes, heads, strict=True):
        assert axes.get_title() == f"head {head + 1}\nmedians {np.median(same[head]):.2f}, {np.median(other[head]):.2f}"


@pytest.mark.parametrize("same, other", [([1.0], []), ([], [1.0, 1.0]), ([0.0, 0.0], [0.0, 5.0]), ([0.0], [0.0])])
def test_histogram_of_little(same, other):
    figure = plots.attention_histogram(np.array(same), np.array(other))
    check_readable(figure)
    for stairs in figure.axes[0].patches:
        density, edges, _ = stairs.get_data()
        assert np.sum(density * np.diff(np.log10(edges))) == pytest.approx(1)


def grid(images=100, domains=5, shape=(28, 28, 1), **other):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, *shape), dtype=np.uint8)
    weights = rng.dirichlet(np.ones(images))
    of = np.arange(images) % domains
    names = [f"test-{i:03d} DejaVuSansMono-BoldOblique" for i in range(domains + 1)]
    return plots.attention_grid(pixels, of, weights, domains // 2, pixels[0], names, **other), pixels, weights, of


def test_grid_shows_most_and_least_attended():
    figure, pixels, weights, of = grid(text="label 'a', answer 'b'")
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


@pytest.mark.parametrize("images, domains, shape, per_domain, shown", [
    (7, 1, (28, 28, 1), 5, 7), (13, 5, (28, 28, 1), 5, 13), (20, 20, (28, 28, 1), 5, 20),
    (40, 2, (32, 32, 3), 3, 12), (12, 2, (300, 448, 3), 5, 12),
])  # fmt: skip
def test_grid_of_other_forms(images, domains, shape, per_domain, shown):
    figure, *_ = grid(images, domains, shape, per_domain=per_domain)
    check_readable(figure)
    pictures = [p for p in figure.axes[0].get_images() if isinstance(p, matplotlib.image.AxesImage)]
    assert len(pictures) == 1 + shown
    assert all(max(p.get_array().shape[:2]) <= 128 for p in pictures), "large images would make a large page"
    assert all(p.get_array().shape[2:] == (shape[2:] if shape[2] == 3 else ()) for p in pictures)


# Files


def figures():
    results = study(["erm", "bn", "ft_em", "cxda"])
    weights = np.random.default_rng(0).lognormal(0, 1, 500)
    return {
        "time": plots.accuracy_time(results, "glyphs"),
        "variable": plots.variable(results, "glyphs", "support_size"),
        "curves": plots.learning_curves(results, "glyphs"),
        "histogram": plots.attention_histogram(weights[:100], weights[100:]),
        "grid": grid()[0],
    }


def test_files_are_the_same_again(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name, figure in figures().items():
            plots.save(figure, tmp_path / folder / f"{name}.of")
    for name in figures():
        for suffix in ("png", "svg"):
            one, again = ((tmp_path / folder / f"{name}.of.{suffix}").read_bytes() for folder in ("a", "b"))
            assert one == again and len(one) > 1000
        text = (tmp_path / "a" / f"{name}.of.svg").read_text()
        assert text.startswith("<svg") and "<text" not in text and "<metadata" not in text and "DOCTYPE" not in text
        addresses = set(re.findall(r"https?://[^\"' )]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, (
            "names, which nobody fetches"
        )
        ids = re.findall(r'\bid="([^"]*)"', text)
        targets = re.findall(r'href="([^"]*)"', text) + re.findall(r"url\(([^)]*)\)", text)
        assert len(ids) == len(set(ids))
        assert all(t.startswith("data:image/png") or t.removeprefix("#") in ids for t in targets)


def test_inlined_figures_share_no_ids():
    texts = [plots.svg_text(figure) for figure in figures().values()]
    found = [id for text in texts for id in re.findall(r'\bid="([^"]*)"', text)]
    assert len(found) == len(set(found))
