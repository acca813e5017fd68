"""Figures of attention weights: what they draw, and whether all of it can be read."""

import matplotlib.image
import numpy as np
import pytest

from cxda_jax.report.attention import histogram
from tests.test_plots import attention_grid, check_readable


def test_histogram_draws_densities():
    rng = np.random.default_rng(0)
    same, other = rng.lognormal(0.5, 1, (4, 50)), rng.lognormal(0, 1, (4, 200))
    figure = histogram(same, other)
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
    (axes,) = histogram(np.linspace(0.9, 1.1, 50), np.linspace(0.95, 1.05, 50)).axes
    assert [tick for tick in axes.get_xticks() if 0.9 <= tick <= 1.1] == pytest.approx([0.9, 0.95, 1, 1.05, 1.1])


@pytest.mark.parametrize("heads", [1, 3, 5, 8])
def test_histogram_of_heads(heads):
    rng = np.random.default_rng(0)
    same, other = rng.lognormal(0, 2, (heads, 50)), rng.lognormal(0, 2, (heads, 90))
    figure = histogram(same, other, by_head=True)
    check_readable(figure)
    assert [axes.get_title() for axes in figure.axes] == [
        f"head {h + 1}\nmedians {np.median(same[h]):.2f}, {np.median(other[h]):.2f}" for h in range(heads)
    ]


@pytest.mark.parametrize("same, other", [([1.0], []), ([], [1.0, 1.0]), ([0.0, 0.0], [0.0, 5.0]), ([0.0], [0.0])])
def test_histogram_of_little(same, other):
    figure = histogram(np.array(same), np.array(other))
    check_readable(figure)
    for stairs in figure.axes[0].patches:
        density, edges, _ = stairs.get_data()
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


@pytest.mark.parametrize("images, domains, shape, per_domain, shown", [
    (7, 1, (28, 28, 1), 5, 7), (13, 5, (28, 28, 1), 5, 13), (20, 20, (28, 28, 1), 5, 20),
    (40, 2, (32, 32, 3), 3, 12), (12, 2, (300, 448, 3), 5, 12),
])  # fmt: skip
def test_grid_of_other_forms(images, domains, shape, per_domain, shown):
    figure, *_ = attention_grid(images, domains, shape, per_domain=per_domain)
    check_readable(figure)
    pictures = [p for p in figure.axes[0].get_images() if isinstance(p, matplotlib.image.AxesImage)]
    assert len(pictures) == 1 + shown
    assert all(max(p.get_array().shape[:2]) <= 128 for p in pictures), "large images would make a large page"
    assert all(p.get_array().shape[2:] == (shape[2:] if shape[2] == 3 else ()) for p in pictures)
