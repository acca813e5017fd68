"""Measures what the three kinds of statistics of a SupportBuffer cost, and how
often their answers are right. In a clone:

python -m docs.examples.buffer_kinds

For each seed it renders the writers of `cxda demo` and lets their 100 unlabelled images arrive one by one. The buffer then has
100 places that are full. It asks for answers to the 300 other images. Times are medians over 50 further images: observe() and
then predict() of one image, which is what a device does that answers for each image that it takes.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

import cxda_jax
from cxda_jax.device import adapting, demo

SEEDS, TIMED = 10, 50


def main() -> None:
    model, right, times = cxda_jax.load("glyphs"), defaultdict(list), defaultdict(list)
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            demo.demo(out, seed)
            buffer, queries = (
                [model.fit(path) for path in adapting.listed(out / part)] for part in ("buffer", "images")
            )
            known = adapting.read_labels(str(out / "labels.csv"), model)
            labels = [known[path.name] for path in adapting.listed(out / "images")]
        right["without adapting"].append(share(model.predict(queries), labels))
        for kind in ("exact", "lagged", "frozen"):
            held = cxda_jax.SupportBuffer(model, capacity=len(buffer), statistics=kind, refresh=20)
            for image in buffer:
                held.observe(image)
                held.adapted()  # as a device that answers for each image
            right[kind].append(share(held.predict(queries), labels))
            for image in queries[:TIMED]:
                began = time.perf_counter()
                held.observe(image)
                held.predict([image])
                times[kind].append(1000 * (time.perf_counter() - began))
    for name, shares in right.items():
        spent = (
            f"; {statistics.median(times[name]):.2f} ms, 95 % within {np.quantile(times[name], 0.95):.2f}"
            if name in times
            else ""
        )
        print(f"{name}: {100 * np.mean(shares):.1f} % right{spent}")


def share(answers: cxda_jax.Answers, labels: list[str]) -> float:
    return float(np.mean([name == label for name, label in zip(answers.names, labels, strict=True)]))


if __name__ == "__main__":
    main()
