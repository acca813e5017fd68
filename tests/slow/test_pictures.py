"""Pictures and lines that name classes and domains: any name is shown as the text that it is."""

import os

import numpy as np
from PIL import Image

from cxda_jax.data.store import open_store
from cxda_jax.studies.examples import Example, draw_attention
from cxda_jax.studies.sheet import draw_strips
from tests.commands import command

COUNTS = {"compared": 480, "corrected": 61, "spoiled": 12}
DOMAINS = ("$x_{", b"caf\xe9", "日本", "\U0001fae0 face", "a\x1b[31m\n\tb", "long" * 60, " ", "$a$ & <b>")
CLASSES = ("$\\frac$", "_{", b"na\xefve", "猫")


def test_a_data_set_with_any_names_is_prepared_and_drawn(tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xe9")
    for d, domain in enumerate([*DOMAINS, b"left $\xff out"]):
        for label, name in enumerate(CLASSES):
            folder = os.path.join(os.fsencode(root), b"raw", os.fsencode(domain), os.fsencode(name))
            os.makedirs(folder)
            for i in range(2 if d < len(DOMAINS) else 1):
                Image.new("L", (8, 8), 20 * d + 50 * label).save(os.path.join(os.fsdecode(folder), f"{i}.png"))
    arguments = (f"--raw_dir={root}/raw", f"--data_dir={root}/data", "--size=8", "--min_images=8", "--name=names")
    printed, store = command("prepare", "--benchmark=folder", *arguments), open_store(root / "data" / "names")
    domains, classes = store.domain_names, store.info.class_names
    assert set(domains) == set(map(os.fsdecode, DOMAINS)) and set(classes) == set(map(os.fsdecode, CLASSES))
    assert "left $\\udcff out: left out, 4 images are fewer than 8" in printed and f"sha256 {store.sha256}" in printed
    names = [classes[label] for label in store.labels[:8]]
    draw_strips(tmp_path / "step1.png", [(f"query, {domain}", store.images[:8], names) for domain in domains])
    weights, of = np.full(len(store.labels), 1 / len(store.labels)), store.row_domains()
    for own in range(len(classes)):
        example = Example(store.images[own], own, own, 0, 3, store.images[:1], of[:1], weights[:1])
        draw_attention(tmp_path / f"{own}.png", example, COUNTS, domains, classes, f"on {name}")
    pictures = [root / "data" / "names" / "sheet.png", *tmp_path.glob("*.png")]
    assert len(pictures) == 6 and all(path.stat().st_size > 1000 for path in pictures)
