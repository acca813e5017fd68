"""Answers that a device gives or keeps back: the part that is wrong, by the part that is given.

python docs/examples/plot_abstention.py abstention.png
"""

import sys

import matplotlib
import numpy as np
import scipy.special
from cameras import CAMERAS, NEW, adapter, photograph

matplotlib.use("Agg")
import matplotlib.pyplot as plt

fitted = adapter()
answers = {"classifier": [], "with 100 images": []}  # pairs (confidence, wrong) of all new cameras
for number in range(CAMERAS, CAMERAS + 30):
    camera = photograph(number, NEW, 200)
    z, s, y = (x[100:] for x in camera)
    adapted = fitted.adapt(camera.logits[:100], camera.style[:100]).predict_proba(z, s)
    for proba, kept in zip((scipy.special.softmax(z, axis=1), adapted), answers.values(), strict=True):
        kept.append((proba.max(1), proba.argmax(1) != y))

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for name, kept in answers.items():
    confidence, wrong = np.concatenate(kept, axis=1)
    surest = np.argsort(-confidence)
    given = np.arange(1, len(wrong) + 1)
    axes.plot(100 * given / len(wrong), 100 * np.cumsum(wrong[surest]) / given, label=name)
for risk, marker in ((0.05, "o"), (0.1, "s")):
    sure = confidence >= fitted.threshold_for(risk)  # of the adapted answers
    if sure.any():
        place = 100 * sure.mean(), 100 * wrong[sure].mean()
        axes.plot(*place, marker, color="black", label=f"threshold_for({risk}), {place[1]:.1f} % wrong")
axes.set(xlabel="answers given, the surest first, %", ylabel="of these wrong, %", ylim=(0, None))
axes.legend()
figure.savefig(sys.argv[1], dpi=120)
