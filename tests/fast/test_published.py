"""Published data: their counts, which readers compare with and plans take, and how to fetch them."""

import hashlib

import numpy as np
import pytest

from cxda_jax.data.published import PUBLISHED, empty_store
from cxda_jax.data.store import SPLITS
from cxda_jax.studies import preparing
from cxda_jax.training.experiment import READERS
from tests import raw_fixtures
from tests.commands import command


def test_missing_files_get_a_command_and_others_are_checked(tmp_path, monkeypatch):
    content, raw = b"data" * 100, tmp_path / "raw files"
    files = [preparing.Download(name, f"https://a/{name}.zip", 400, hashlib.sha256(content).hexdigest())
             for name in ("whole", "part", "extracted")]  # fmt: skip
    monkeypatch.setattr(preparing, "DOWNLOADS", {"femnist": files})
    (raw / "extracted").mkdir(parents=True)
    (raw / "whole.zip").write_bytes(content)
    (raw / "part.zip").write_bytes(content[:7])
    arguments = ("--benchmark=femnist", "--links", f"--raw_dir={raw}")
    assert command("prepare", *arguments).splitlines() == [
        f"{raw}/whole.zip: has the published size and hash",
        f"curl -L -C - --create-dirs -o '{raw}/part.zip' https://a/part.zip",
        f"{raw}/extracted: is there",
    ]
    (raw / "whole.zip").write_bytes(content[:-1] + b"!")
    assert "whole.zip: not the published file" in command("prepare", *arguments, code=2)


@pytest.mark.slow
@pytest.mark.parametrize("name, form, counts, tasks", [
    ("femnist", ((28, 28, 1), 62), (262, 50, 35), (420, 420)),
    ("cifar_c", ((32, 32, 3), 10), (56, 17, 22, 56_000, 17_000, 220_000), ()),
    ("tiny_imagenet_c", ((64, 64, 3), 200), (51, 17, 22, 102_000, 34_000, 220_000), ()),
    ("iwildcam", ((112, 112, 3), 182), (243, 32, 48, 129_809, 14_961, 42_791, 182), (745, 2125)),
])  # fmt: skip
def test_readers_compare_with_the_papers_counts(name, form, counts, tasks, tmp_path):
    getattr(raw_fixtures, f"write_{name}")(tmp_path)
    assert tuple(check.expected for check in READERS[name](tmp_path).checks) == counts + tasks
    assert PUBLISHED[name][:2] == form
    assert [images // 20 for images in PUBLISHED[name].images[1:] if tasks] == pytest.approx(tasks, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["femnist", "iwildcam"])
def test_a_store_of_those_counts_takes_no_memory(name):
    store = empty_store(name)
    assert store.images.base.nbytes < 100 and store.images.shape == (len(store.labels), *PUBLISHED[name].image)
    sizes = np.diff(store.offsets)
    for split, domains, images in zip(SPLITS, PUBLISHED[name].domains, PUBLISHED[name].images, strict=True):
        assert len(store.domains(split)) == domains and sizes[store.domains(split)].sum() == images
        assert sizes[store.domains(split)].min() == PUBLISHED[name].smallest
