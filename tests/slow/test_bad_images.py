"""Bad images are named and left out as far as allowed."""

import collections
import re

import numpy as np

from cxda_jax.data.readers import iwildcam
from cxda_jax.data.store import open_store
from cxda_jax.studies import preparing
from tests import raw_fixtures as raws
from tests.commands import command


def camera(table, size):
    """The rows of the camera that has so many images."""
    cameras = collections.defaultdict(list)
    for row in table:
        cameras[row["split"], row["location_remapped"]].append(row)
    return next(rows for rows in cameras.values() if len(rows) == size)


def wild_command(tmp_path, *arguments, code=0):
    where = f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data"
    return command("prepare", "--benchmark=iwildcam", *where, "--size=32", *arguments, code=code)


def test_bad_images_are_left_out_as_far_as_allowed(tmp_path):
    table, images = raws.write_iwildcam(tmp_path / "raw"), tmp_path / "raw" / "iwildcam_v2.0" / "train"
    preparing.prepare(iwildcam.find(tmp_path / "raw", size=32), tmp_path / "whole", 2)
    whole, bad = open_store(tmp_path / "whole"), [camera(table, 52)[3], camera(table, 47)[0]]
    (images / bad[0]["filename"]).write_bytes(b"nothing")
    (images / bad[1]["filename"]).unlink()
    line = wild_command(tmp_path, code=2)
    assert f"/{bad[0]['filename']}: not readable as an image" in line and "skip_bad=1 (1 bad of " in line
    line = wild_command(tmp_path, "--skip_bad=1", code=2)
    assert f"/{bad[1]['filename']}: missing" in line and "skip_bad=2 (2 bad of " in line
    output = wild_command(tmp_path, "--skip_bad=2")
    assert all(re.search(f"left out: .*{row['filename']}", output) for row in bad)
    found = open_store(tmp_path / "data" / "iwildcam")
    assert "2 bad images left out" in found.info.provenance and "2 bad images left out" in output
    kept = np.ones(len(whole.labels), bool)
    for row, place in zip(bad, (3, 0), strict=True):
        kept[whole.offsets[whole.domain_names.index(f"location {row['location_remapped']}")] + place] = False
    np.testing.assert_array_equal(found.images, whole.images[kept])
    np.testing.assert_array_equal(found.labels, whole.labels[kept])
