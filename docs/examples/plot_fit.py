"""What fit() promises for new cameras, and what twenty new ones get.

python docs/examples/plot_fit.py fit.png
"""

import sys

import matplotlib
import numpy as np
from cameras import CAMERAS, NEW, adapter, photograph

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = 0, 5, 20, 100
fitted = adapter()
gains = []  # [cameras, sizes], in points
for number in range(CAMERAS, CAMERAS + 20):
    camera = photograph(number, NEW, 250)
    z, s, y = (x[100:] for x in camera)  # 150 images to answer for; the first 100 may be in the buffer
    devices = [fitted.adapt(camera.logits[:n], camera.style[:n]) for n in SIZES]
    right = [(device.predict_logits(z, s).argmax(1) == y).mean() for device in devices]
    gains.append(100 * (np.array(right) - (z.argmax(1) == y).mean()))

mean, low, high = np.array([fitted.report["overall"][str(n)] for n in SIZES]).T
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.errorbar(range(4), mean, [mean - low, high - mean], fmt="o", capsize=4, label="fit() promises, with 95 % interval")
axes.plot(np.arange(4) + 0.15, np.transpose(gains), ".", color="grey", alpha=0.5)
axes.plot(np.arange(4) + 0.15, np.mean(gains, axis=0), "_", color="black", markersize=20, label="20 new cameras")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(
    xticks=range(4), xticklabels=SIZES, xlabel="unlabelled images in the buffer", ylabel="gain in accuracy, points"
)
axes.legend()
figure.savefig(sys.argv[1], dpi=120)
print("promised:", *np.round(mean, 1), "measured:", *np.round(np.mean(gains, axis=0), 1))
