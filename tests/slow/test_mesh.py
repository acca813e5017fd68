"""Training and evaluation over several devices and processes give what one device gives."""

import shutil

import numpy as np
from safetensors.numpy import load_file

from tests.fast.test_mesh import STEPS, alone, arrays, assert_same, finish, free_port, start, trained  # noqa: F401


def test_two_devices_train_and_test_as_one_and_take_over_what_one_saved(fixed_store, alone, tmp_path):
    """What one device saved is what two restore, bit for bit, and what two saved is what one restores."""
    shutil.copytree(alone / "small", tmp_path / "small_again")
    trained(fixed_store, tmp_path, "small,small_again", 1, 2, "rows")
    one, two = arrays(alone, "small"), arrays(tmp_path, "small")
    assert_same(one, arrays(tmp_path, "small_again"), exact=True)
    saved = load_file(tmp_path / "small" / "last" / str(STEPS) / "tree" / "arrays.safetensors")
    assert saved.keys() < two.keys()
    for name, array in saved.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)
    assert_same(one, two)
    floats = [exchange for exchange in two["exchanges"] if "f" in exchange.partition(" ")[2]]
    assert floats == ["all-reduce f32"] and len(one["exchanges"]) == 0
