"""Published counts: what readers compare with, and what a study takes before the data are there."""

import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from cxda_jax.bench.cases import SHAPES
from cxda_jax.data.published import PUBLISHED, empty_store, sample_store
from cxda_jax.data.store import SPLITS
from cxda_jax.experiment import READERS
from tests import raw_fixtures
from tests.lines import ROOT


@pytest.mark.parametrize("name, counts, tasks", [
    ("femnist", (262, 50, 35), (420, 420)),
    ("cifar_c", (56, 17, 22, 56_000, 17_000, 220_000), ()),
    ("tiny_imagenet_c", (51, 17, 22, 102_000, 34_000, 220_000), ()),
    ("iwildcam", (243, 32, 48, 129_809, 14_961, 42_791, 182), (745, 2125)),
])  # fmt: skip
def test_readers_compare_with_the_papers_counts(name, counts, tasks, tmp_path):
    raw_fixtures.WRITERS[name](tmp_path)
    assert tuple(check.expected for check in READERS[name](tmp_path).checks) == counts + tasks
    assert [images // 20 for images in PUBLISHED[name].images[1:] if tasks] == pytest.approx(tasks, rel=0.01)
    assert (PUBLISHED[name].image, PUBLISHED[name].classes) == SHAPES[name][:2]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_store_of_those_counts_takes_no_memory(name):
    tracemalloc.start()
    store = empty_store(name)
    assert tracemalloc.get_traced_memory()[1] < 30e6  # labels; iWildCam's pixels would take 7 GB
    tracemalloc.stop()
    sizes = np.diff(store.offsets)
    for split, domains, images in zip(SPLITS, PUBLISHED[name].domains, PUBLISHED[name].images, strict=True):
        assert len(store.domains(split)) == domains and sizes[store.domains(split)].sum() == images
        assert sizes[store.domains(split)].min() == (PUBLISHED[name].smallest or images // domains)
    assert store.images.shape == (len(store.labels), *PUBLISHED[name].image)
    sample = sample_store(name)
    assert sample.images.nbytes < 50e6 and sample.images.std() > 70 and len(sample.labels) == sample.offsets[-1]


def test_a_dry_run_needs_no_data(tmp_path):
    arguments = ("--benchmark=cifar_c", "--dry_run", "--smoke", "--only=erm", f"--data_dir={tmp_path}")
    command = [sys.executable, "-m", "launch.reproduce", *arguments, f"--study={tmp_path}/study"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert f"no prepared data in {tmp_path}" in lines[0] and "published" in lines[0] and "made-up" in lines[0]
    assert [line.split(":")[0] for line in lines[1:3]] == ["[1/1] timing erm"] * 2
    assert re.fullmatch(r"-{12} +\S+  train erm seed 0", lines[3]) and lines[-1].startswith("4 jobs; ")
