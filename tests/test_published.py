"""Published counts: the readers' own, and what a study will take before the data are there."""

import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from cxda_jax.data.published import PUBLISHED, empty_store, sample_store
from cxda_jax.data.store import SPLITS
from cxda_jax.experiment import READERS
from launch.suites import SHAPES
from tests import raw_fixtures
from tests.lines import ROOT


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_that_readers_expect(name, tmp_path):
    getattr(raw_fixtures, f"write_{name}")(tmp_path)
    found, compared = PUBLISHED[name], 0
    for check in READERS[name](tmp_path).checks:
        split, what = check.what.split()[0], check.what.split(maxsplit=1)[-1]
        if split == "classes":
            assert check.expected == found.classes
        elif what == "images // 20":
            assert check.expected == pytest.approx(found.images[SPLITS.index(split)] // 20, rel=0.01)
        else:
            counts = found.images if what.startswith("images") else found.domains
            assert check.expected == counts[SPLITS.index(split)]
        compared += 1
    assert compared >= 5 and (found.image, found.classes) == SHAPES[name][:2]


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
    assert (
        store.images.shape
        == (sum(PUBLISHED[name].images), *PUBLISHED[name].image)
        == (len(store.labels), *store.images.shape[1:])
    )
    sample = sample_store(name)
    assert sample.images.nbytes < 50e6 and sample.images.std() > 70 and len(sample.labels) == sample.offsets[-1]


def test_a_dry_run_needs_no_data(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "launch.reproduce", "--benchmark=cifar_c", "--dry_run", "--smoke", "--only=erm",
         f"--data_dir={tmp_path}", f"--study={tmp_path}/study"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert f"no prepared data in {tmp_path}" in lines[0] and "published" in lines[0] and "made-up" in lines[0]
    assert [line.split(":")[0] for line in lines[1:3]] == ["[1/1] timing erm"] * 2
    assert re.fullmatch(r"-{12} +\S+  train erm seed 0", lines[3]) and lines[-1].startswith("3 jobs; ")
