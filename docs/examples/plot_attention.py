"""Four questions to the package's own model, and the images of the buffer that each answer attends to.

Two writers whom the model never saw are mixed in the buffer. An even attention would give 2 % to each of its 50 images.

python docs/examples/plot_attention.py attention.png
"""

import sys

import matplotlib
import numpy as np

import cxda_jax
from cxda_jax.data import glyphs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

QUESTIONS, MOST = 4, 5
writers = list(glyphs.domains(1000, (0, 0, 2), 30))  # training had seed 0
buffer = [image for writer in writers for image in writer.images[:25]]
questions = [image for writer in writers for image in writer.images[25 : 25 + QUESTIONS // 2]]
labels = [glyphs.CHARACTERS[label] for writer in writers for label in writer.labels[25 : 25 + QUESTIONS // 2]]

model = cxda_jax.load("glyphs_icrm")
adapted = model.adapt(buffer)
before, after = model.predict(questions).names, adapted.predict(questions).names
weights = adapted.attention(questions).mean(axis=1)  # over the heads: [questions, images of the buffer]

figure, axes = plt.subplots(QUESTIONS, 1 + MOST, figsize=(6, 5), layout="constrained")
for i, (question, row) in enumerate(zip(questions, axes, strict=True)):
    most = np.argsort(-weights[i])[:MOST]
    shown = [(question, f"{labels[i]}: {before[i]}, then {after[i]}")]
    shown += [(buffer[j], f"writer {1 + j // 25}, {weights[i, j]:.0%}") for j in most]
    for place, (image, title) in zip(row, shown, strict=True):
        place.imshow(image[..., 0], cmap="gray", vmin=0, vmax=255)
        place.set_title(title, fontsize=8)
        place.axis("off")
figure.suptitle("asked: true, answer before and after adapting     most attention in the buffer", fontsize=9)
figure.savefig(sys.argv[1], dpi=120)
