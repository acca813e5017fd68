"""What a query attends to, as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.types import Episode


def draw_attention(
    path: Path,
    episode: Episode,
    answers: np.ndarray,
    attention: np.ndarray,
    domain_names: tuple[str, ...],
    class_names: tuple[str, ...],
    query: int = 0,
    count: int = 5,
) -> None:
    """One query of an episode with its `count` most and least attended support images: weight (the mean over heads,
    as a multiple of uniform attention) and domain; a star marks the query's own domain.

    answers: class numbers [queries]; attention: weights [queries, heads, support].
    """
    weights = attention[query].mean(0)
    order = np.argsort(-weights, kind="stable")
    count = min(count, len(order))
    figure = Figure(figsize=(1.7 * (count + 1), 4.6), layout="constrained")
    axes = figure.subplots(2, count + 1, squeeze=False)
    own, domains = int(episode.query.domain[query]), np.asarray(episode.support.domain)
    for row, (title, chosen) in enumerate({"most": order[:count], "least": order[::-1][:count]}.items()):
        for axis, i in zip(axes[row][1:], chosen, strict=True):
            _show(axis, episode.support.pixels[i])
            axis.set_title(f"{weights[i] * len(weights):.2f} x uniform", fontsize=9)
            star = "* " if domains[i] == own else ""
            axis.set_xlabel(star + domain_names[domains[i]].replace(" ", "\n"), fontsize=8)
        axes[row][1].set_ylabel(f"{title} attended", fontsize=10)
    _show(axes[0][0], episode.query.pixels[query])
    truth, answer = class_names[int(episode.label[query])], class_names[int(answers[query])]
    axes[0][0].set_title(f"query {truth!r}\nanswer {answer!r}", fontsize=9)
    axes[0][0].set_xlabel("* " + domain_names[own].replace(" ", "\n"), fontsize=8)
    axes[1][0].axis("off")
    figure.savefig(path, dpi=120)


def _show(axis, pixels) -> None:
    image = np.asarray(pixels)
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
    axis.set_xticks([])
    axis.set_yticks([])
