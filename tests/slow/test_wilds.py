"""iWildCam and its score as the wilds package itself reads and computes them."""

import sys
from unittest import mock

import numpy as np
import pytest

from cxda_jax.data import store
from cxda_jax.training import metrics
from tests import raw_fixtures as raws
from tests.commands import command

# torchvision has no build for CPUs in the registry; wilds imports these modules of it, for detection alone.
TORCHVISION = ("", ".ops", ".ops.boxes", ".models", ".models.detection", ".models.detection._utils")


@pytest.fixture
def wilds_class(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("wilds", reason="pip install --no-deps wilds==2.0.0")
    for name in TORCHVISION:
        monkeypatch.setitem(sys.modules, f"torchvision{name}", mock.MagicMock())
    from wilds.datasets.iwildcam_dataset import IWildCamDataset

    return IWildCamDataset


def test_splits_cameras_labels_and_pixels_are_those_of_wilds(tmp_path, wilds_class):
    raws.write_iwildcam(tmp_path)
    theirs = wilds_class(version="2.0", root_dir=str(tmp_path))
    arguments = ("--benchmark=iwildcam", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}", "--name=wild", "--size=60")
    assert "train: left out 1 cameras with fewer than 40 images (39 images)" in command("prepare", *arguments)
    ours = store.open_store(tmp_path / "wild")
    assert ours.num_classes == theirs.n_classes
    assert ours.info.metric == "macro_f1" and ours.info.class_names == tuple(f"animal {y}" for y in range(5))
    for split in store.SPLITS:
        subset = theirs.get_subset(split)
        cameras = subset.metadata_array[:, theirs.metadata_fields.index("location")].numpy()
        names, sizes = np.unique(cameras, return_counts=True)
        kept = [f"location {name}" for name, size in zip(names, sizes, strict=True) if size >= 40]
        assert [ours.domain_names[d] for d in ours.domains(split)] == kept
        for d in ours.domains(split):
            mine = np.flatnonzero(cameras == int(ours.domain_names[d].split()[1]))
            for row, i in zip(range(*ours.offsets[d : d + 2]), mine, strict=True):
                image, label, _ = subset[i]
                pixels = np.asarray(image.convert("RGB").resize((60, 60), 2))  # bilinear, as torchvision's Resize
                np.testing.assert_array_equal(ours.images[row], pixels)
                assert ours.labels[row] == label


def test_macro_f1_is_that_of_wilds(wilds_class):
    """Over the classes that the labels have; one that only predictions have counts through their precision alone."""
    import torch
    from wilds.common.metrics.all_metrics import F1

    theirs, rng = F1(average="macro"), np.random.default_rng(0)
    for _ in range(50):
        labels, predictions = rng.integers(0, 6, (2, 20))
        expected = theirs.compute(torch.from_numpy(predictions), torch.from_numpy(labels), return_dict=False)
        assert metrics.macro_f1(predictions, labels) == pytest.approx(float(expected), abs=1e-6)
