"""A device's loop with LiteRT and numpy alone: answer for each image that comes, then let it join the buffer.

cxda export --model=glyphs --format=litert --out=exported
python docs/examples/phone.py exported FOLDER_OF_IMAGES

It needs `pip install ai-edge-litert numpy pillow`, and nothing of cxda_jax.
"""

import json
import sys
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from PIL import Image

folder, photos = map(Path, sys.argv[1:3])
known = json.loads((folder / "export.json").read_text())
height, width, channels = known["images"]["shape"]
interpreter = Interpreter(str(folder / "model.tflite"), num_threads=1)
encode, predict = (interpreter.get_signature_runner(name) for name in ("encode", "predict"))

places = known["encode"]["takes"]["present"]["shape"][0]
images, present = np.zeros((places, height, width, channels), np.uint8), np.zeros(places, np.float32)
before = after = encode(images=images, present=present)  # what the model knows of an empty buffer
REFRESH = 10  # encode anew after so many images; 1 adapts to each image at once


def shares(logits):
    odds = np.exp(logits[0] - logits.max())
    return odds / odds.sum()


for number, path in enumerate(sorted(photos.glob("*.png"))):
    photo = Image.open(path).convert("L" if channels == 1 else "RGB").resize((width, height))
    image = np.asarray(photo, np.uint8).reshape(1, height, width, channels)
    answers = [shares(predict(**memory, image=image)["logits"]) for memory in (before, after)]
    print(path.name, *(f"{known['class_names'][p.argmax()]} {100 * p.max():.0f} %" for p in answers), sep="  ")
    images[number % places], present[number % places] = image[0], 1  # a full buffer lets its oldest image go
    if (number + 1) % REFRESH == 0:
        after = encode(images=images, present=present)
