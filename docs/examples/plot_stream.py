"""Images that come one at a time: a device answers, takes the image into its buffer, and forgets the oldest.

After 300 images the camera changes.

python docs/examples/plot_stream.py stream.png
"""

import sys
import time

import matplotlib
import numpy as np
from cameras import CAMERAS, NEW, adapter, photograph

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAST = 100  # images that the buffer keeps
CHANGE = 300
stream = [np.concatenate(x) for x in zip(*(photograph(CAMERAS + i, NEW, CHANGE) for i in (1, 6)), strict=True)]
logits, style, labels = stream
device = adapter().adapt(logits[:0], style[:0])  # an empty buffer
right, times = np.zeros((2, len(labels))), []
for i in range(len(labels)):
    begun = time.perf_counter()
    proba = device.predict_proba(logits[i : i + 1], style[i : i + 1])
    device = device.observe(logits[i : i + 1], style[i : i + 1])
    if len(device.images) > LAST:
        device = device.forget()
    times.append(time.perf_counter() - begun)
    right[:, i] = logits[i].argmax() == labels[i], proba.argmax() == labels[i]

print(f"{1000 * np.median(times):.1f} ms an image, {device.images.nbytes / 1000:.0f} kB of images")
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for name, each in zip(("classifier", "device"), right, strict=True):
    recent = np.convolve(each, np.ones(50), "valid") / 50
    axes.plot(np.arange(50, len(each) + 1), 100 * recent, label=f"{name}: {100 * each.mean():.1f} % of all")
axes.axvline(CHANGE, color="grey", linewidth=0.8)
axes.text(CHANGE + 5, 20, "another camera", color="grey")
axes.set(xlabel="images so far", ylabel="right among the last 50, %", ylim=(0, 100))
axes.legend(loc="lower left")
figure.savefig(sys.argv[1], dpi=120)
