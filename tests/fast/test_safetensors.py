"""Arrays in the format's own library and in ours: the same bits, both ways."""

import jax
import numpy as np
import pytest
from safetensors import numpy as theirs

from cxda_jax.disk import files, safetensors
from tests.lines import refused

SHAPES = {"scalar": (), "none": (0, 3), "some": (4, 5), "a/path/of/names": (7,)}


def of_types(*names):
    """Arrays of each type and shape, by their names."""
    rng = np.random.default_rng(0)

    def array(kind, shape):
        return np.asarray(rng.normal(size=shape) * 100 if kind != np.bool_ else rng.random(shape) < 0.5).astype(kind)

    return {f"{name}/{key}": array(safetensors.TYPES[name], SHAPES[key]) for name in names for key in SHAPES}


def assert_same(found, arrays):
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_arrays_of_every_type_are_read_by_both_libraries(tmp_path):
    arrays = of_types(*(name for name in safetensors.TYPES if name != "BF16"))
    arrays |= {"turned": np.arange(6.0).reshape(2, 3).T, "strided": np.arange(9.0)[::2], "swapped": np.arange(4.0)}
    swapped = {"swapped": arrays["swapped"].astype(">f8")}
    files.write_hashed(tmp_path / "ours", safetensors.pieces(arrays | swapped, {"step": "7"}))
    found, notes = safetensors.read(tmp_path / "ours", "ours", "fix")
    assert_same(found, arrays)
    assert notes == {"step": "7"}
    assert_same(theirs.load_file(tmp_path / "ours"), arrays)
    theirs.save_file(of_types("F32", "BOOL", "I64"), tmp_path / "theirs")
    assert_same(safetensors.read(tmp_path / "theirs", "theirs", "fix")[0], of_types("F32", "BOOL", "I64"))


def test_a_tree_by_its_paths():
    tree = {"params": {"a": np.ones(2, np.float32)}, "list": [np.zeros(1, np.float32), np.True_]}
    arrays = {name: np.asarray(leaf) for name, leaf in safetensors.named(tree).items()}
    assert list(arrays) == ["list/0", "list/1", "params/a"]
    fitted = safetensors.as_tree(arrays, tree)
    assert jax.tree.structure(fitted) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, fitted, tree)
    for place in (None, jax.devices()[0]):  # the restored state has the program of the fresh one
        like = jax.device_put(tree, place)
        assert {leaf.committed for leaf in jax.tree.leaves(safetensors.as_tree(arrays, like))} == {place is not None}
    for change, said in (
        ({"params/a": np.ones(3, np.float32)}, "params/a is missing or of another shape"),
        ({"params/a": np.ones(2, np.float16)}, "params/a is missing or of another shape"),
        ({"more": np.ones(3)}, "the network has no more"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            safetensors.as_tree(arrays | change, tree)
    with refused("^extra/state: key<fry> cannot be saved; keep an array, of a random key its key_data"):
        safetensors.named({"extra": {"state": jax.random.key(0)}})
