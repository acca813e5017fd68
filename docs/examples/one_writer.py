"""Adapts models to drawings of one writer, and asks about others of the same writer. In a clone,
with unipen in --data_dir:

python -m docs.examples.one_writer --data_dir=DATA --out=docs/results/one-writer.json unipen

Each test writer with at least 130 drawings is asked about 30 to 200, chosen at random, with 0 to 100 others in the
buffer. Training had five writers in each buffer. The interval is a bootstrap over the writers.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import cxda_jax
from cxda_jax.data.store import open_store
from cxda_jax.metrics import bootstrap_interval
from cxda_jax.progress import Counter, say
from cxda_jax.study.training import commit

SIZES, LEAST, MOST = (0, 1, 5, 20, 40, 100), 30, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="where `cxda prepare --benchmark=unipen` put it")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write")
    parser.add_argument("models", nargs="+", help="models, as for cxda adapt")
    given = parser.parse_args()
    store, rng = open_store(given.data_dir / "unipen"), np.random.default_rng(0)
    rows = [rng.permutation(np.arange(*store.offsets[d : d + 2])) for d, s in enumerate(store.split) if s == "test"]
    rows = [own for own in rows if len(own) >= SIZES[-1] + LEAST]
    loaded = [cxda_jax.load(path) for path in given.models]
    count, told = Counter("models", len(loaded)), []
    for done, model in enumerate(loaded):
        names, shares = np.array(model.card.class_names), np.zeros((len(rows), len(SIZES)))
        for i, own in enumerate(rows):
            asked = own[SIZES[-1] :][:MOST]
            for j, size in enumerate(SIZES):
                answers = model.adapt(store.images[own[:size]]).predict(store.images[asked]).names
                shares[i, j] = 100 * np.mean(np.array(answers) == names[store.labels[asked]])
        gains = (shares - shares[:, :1]).T
        about = {
            "method": model.card.method,
            "seed": model.card.seed,
            "commit": model.card.commit,
            "step": model.card.step,
        }
        told.append(about | {
            "right": [round(float(x), 2) for x in shares.mean(0)],
            "gain": [[round(float(x), 2) for x in (gain.mean(), *bootstrap_interval(gain))] for gain in gains],
        })  # fmt: skip
        say(f"{given.models[done]}, {model.card.method}: right with {SIZES} images: {told[-1]['right']}")
        count(done)
    result = {"commit": commit(), "data_hash": store.sha256, "writers": len(rows), "buffer": SIZES, "models": told}
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
