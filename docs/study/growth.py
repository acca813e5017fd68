"""How the time and the memory of fit() grow with domains, classes, images and numbers of style, on made-up images.

python -m docs.study.growth OUT.json               # each fit in a process of its own, fifteen minutes on two cores
python -m docs.study.growth OUT.json FIGURE.png    # draws

What a record holds already is not measured again.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import cxda_jax

USUAL = {"domains": 20, "classes": 10, "images": 10_000, "style": 100}
VARIED = {
    "domains": (5, 100, 500),
    "classes": (2, 10, 60, 1000),
    "images": (1000, 10_000, 100_000, 1_000_000),
    "style": (10, 100, 600, 2000, 5000),
}
BESIDE = {"domains": {"images": 65_000}}  # each of 500 has the images for a task
MINUTES = 60.0  # that fit() may take, so that no step is left out


def write_arrays(folder, domains, classes, images, style):
    """As a user has them on disk: domains differ in their looks, their class shares and how the classifier errs."""
    rng = np.random.default_rng(0)
    domain, looks = np.arange(images) % domains, rng.normal(size=(domains, 6))
    shares = rng.dirichlet(np.full(classes, 0.3), domains).cumsum(1)
    labels = np.minimum((rng.random(images)[:, None] > shares[domain]).sum(1), classes - 1)
    errs, seen = rng.normal(0, 0.5, (6, classes)), rng.normal(size=(6, style))
    arrays = {name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (images, width))
              for name, width in (("logits", classes), ("style", style))}  # fmt: skip
    for rows in np.array_split(np.arange(images), -(-images // 10_000)):
        of, noise = looks[domain[rows]], rng.normal(size=(len(rows), classes))
        arrays["logits"][rows] = 3 * (labels[rows, None] == np.arange(classes)) + 1.1 * noise + of @ errs
        arrays["style"][rows] = of @ seen + 2 * rng.normal(size=(len(rows), style))
    np.savez(folder / "known.npz", labels=labels, domains=domain)


def one(folder):
    """The seconds of a first fit(), which compiles, and the largest memory of the process in GB."""
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("logits", "style")]
    known, began = np.load(folder / "known.npz"), time.monotonic()
    adapter = cxda_jax.fit(arrays[0], known["labels"], known["domains"], style=arrays[1], minutes=MINUTES, log=str)
    seconds, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert adapter.report["steps"] == adapter.report["asked"]
    print(json.dumps({"seconds": round(seconds, 1), "GB": round(peak, 2), "corrects": adapter.report["corrects"]}))


def measure(out):
    record = json.loads(out.read_text()) if out.exists() else {"usual": USUAL, "fits": []}
    done = [fit["of"] for fit in record["fits"]]
    for of in [{**USUAL, **BESIDE.get(name, {}), name: n} for name, numbers in VARIED.items() for n in numbers]:
        if of in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_arrays(Path(folder), **of)
            command = [sys.executable, "-m", "docs.study.growth", "one", folder]
            ran = subprocess.run(command, check=True, capture_output=True, text=True)
        done.append(of)
        record["fits"].append({"of": of, **json.loads(ran.stdout.splitlines()[-1])})
        print(record["fits"][-1], flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def draw(record, out):
    from matplotlib import pyplot as plt

    _, panels = plt.subplots(2, len(VARIED), figsize=(11, 5), sharex="col", sharey="row", layout="constrained")
    for column, name in zip(panels.T, VARIED, strict=True):
        like = {**USUAL, **BESIDE.get(name, {})}
        of_name = [fit for fit in record["fits"] if all(fit["of"][x] == like[x] for x in like if x != name)]
        fits = sorted(of_name, key=lambda fit: fit["of"][name])
        for panel, what in zip(column, ("seconds", "GB"), strict=True):
            panel.loglog([fit["of"][name] for fit in fits], [fit[what] for fit in fits], "o-", subs=(2, 5))
            panel.grid(alpha=0.3)
            panel.yaxis.set_minor_formatter("{x:g}")
            panel.yaxis.set_major_formatter("{x:g}")
        column[1].set_xlabel({"style": "numbers of style", "domains": "domains of 65,000 images"}.get(name, name))
    panels[0, 0].set_ylabel("seconds of fit()")
    panels[1, 0].set_ylabel("largest memory, GB")
    plt.savefig(out, dpi=110)


if __name__ == "__main__":
    if sys.argv[1] == "one":
        one(Path(sys.argv[2]))
    elif sys.argv[2:]:
        draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
    else:
        measure(Path(sys.argv[1]))
