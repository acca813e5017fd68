"""A made-up survey of camera traps, in the formats of SpeciesNet and of MegaDetector.

python -m tests.traps FOLDER    writes the files of docs/camera_traps.md
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

SPECIES = {  # class texts of SpeciesNet, whose last part is the common name
    "deer": "uuid-1;mammalia;cetartiodactyla;cervidae;odocoileus;virginianus;deer",
    "cow": "uuid-2;mammalia;cetartiodactyla;bovidae;bos;taurus;cow",
    "fox": "uuid-3;mammalia;carnivora;canidae;vulpes;vulpes;fox",
    "boar": "uuid-4;mammalia;cetartiodactyla;suidae;sus;scrofa;boar",
    "blank": "uuid-5;;;;;;blank",
}
OTHER = "uuid-6;mammalia;carnivora;felidae;lynx;lynx;lynx"  # that nobody labelled
NAMES = [*SPECIES]
MEGADETECTOR = {"1": "animal", "2": "person", "3": "vehicle"}


def survey(cameras, each, seed=0, prefix="camera", strength=2.2):
    """Files, labels and scores [n, species + 1] of a classifier; each camera has few of the species."""
    rng, count = np.random.default_rng(seed), len(NAMES)
    shares = rng.dirichlet(np.full(count, 0.3), cameras)
    labels = np.concatenate([rng.choice(count, each, p=own) for own in shares])
    logits = strength * np.eye(count + 1)[labels] + rng.normal(0, 1.2, (len(labels), count + 1))
    logits[:, -1] -= 2
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    files = [f"survey/{prefix}{i // each:02}/{i % each:04}.jpg" for i in range(len(labels))]
    return files, [NAMES[i] for i in labels], scores


def listed(scores, most):
    """Classes and scores of one image as SpeciesNet lists them."""
    texts, order = [*SPECIES.values(), OTHER], np.argsort(-scores, kind="stable")[:most]
    return {"classes": [texts[i] for i in order], "scores": [round(float(scores[i]), 4) for i in order]}


def box(conf, category="1"):
    return {"category": category, "label": {"1": "animal", "2": "human"}[category], "conf": conf,
            "bbox": [0.1, 0.2, 0.3, 0.4]}  # fmt: skip


def speciesnet(files, scores, most=5, targets=False):
    """As run_model of SpeciesNet 5.0.6 writes it: classes of each detection."""
    predictions = []
    for file, own in zip(files, scores, strict=True):
        raw = listed(own, most)
        if targets:
            raw |= {
                "target_classes": [*SPECIES.values()],
                "target_logits": [round(float(x), 4) for x in np.log(own[:-1]) + 3],
            }
        done = {"class": raw["classes"][0], "score": raw["scores"][0], "source": "classifier"}
        detections = [box(0.91) | {"raw_classifications": raw, "processed_classification": done}, box(0.04)]
        predictions.append({"filepath": file, "detections": detections, "model_version": "4.0.3a"})
    return {"info": {"format_version": "20261015"}, "predictions": predictions}


def older_speciesnet(files, scores, most=5):
    """As run_model of SpeciesNet up to 5.0.5 writes it: classes of each image."""
    predictions = []
    for file, own in zip(files, scores, strict=True):
        raw = listed(own, most)
        predictions.append({
            "filepath": file, "classifications": raw, "detections": [box(0.91)], "prediction": raw["classes"][0],
            "prediction_score": raw["scores"][0], "prediction_source": "classifier", "model_version": "4.0.1a",
        })  # fmt: skip
    return {"predictions": predictions}


def megadetector(files, scores, most=3):
    """The format 1.6 of MegaDetector, with a classifier's classes."""
    images = []
    for file, own in zip(files, scores, strict=True):
        order = np.argsort(-own, kind="stable")[:most]
        pairs = [[str(i + 10), round(float(own[i]), 3)] for i in order]
        found = {name: x for name, x in box(0.91).items() if name != "label"}
        images.append({"file": file, "detections": [found | {"classifications": pairs}, {**found, "conf": 0.04}]})
    return {
        "info": {"format_version": "1.6", "detector": "md_v5a.0.0.pt", "classifier": "made up"},
        "detection_categories": MEGADETECTOR,
        "classification_categories": {str(i + 10): name for i, name in enumerate([*NAMES, "lynx"])},
        "images": images,
    }


def write_json(path, content):
    path.write_text(json.dumps(content, indent=1))


def write_table(path, column, files, values):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("file", column), *zip(files, values, strict=True)])


def write_survey(folder, cameras=16, new=60, each=100):
    """Predictions and labels of some cameras, and of other ones with so many images each."""
    for name, table, *made in (("labelled", "labels", cameras, 130, 0), ("new", "new", new, each, 5)):
        files, labels, scores = survey(*made, prefix=name)
        write_json(folder / f"{name}.json", speciesnet(files, scores))
        write_table(folder / f"{table}.csv", "label", files, labels)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    write_survey(place)
