"""Arrays in the format's own library and in ours: the same bits, both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as theirs

from cxda_jax.disk import files, safetensors
from cxda_jax.errors import UserError

SHAPES = {"scalar": (), "none": (0, 3), "some": (4, 5), "a/path/of/names": (7,)}


def of_type(name):
    rng = np.random.default_rng(0)
    return {
        key: np.asarray(rng.integers(0, 2, shape) if name == "BOOL" else rng.normal(size=shape) * 100).astype(safetensors.TYPES[name])
        for key, shape in SHAPES.items()
    }  # fmt: skip


def assert_same(found, arrays):
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("name", safetensors.TYPES)
def test_arrays_of_every_type(tmp_path, name):
    arrays = of_type(name)
    files.write_hashed(tmp_path / "ours", safetensors.pieces(arrays, {"step": "7"}))
    found, notes = safetensors.read(tmp_path / "ours", "ours", "fix")
    assert_same(found, arrays)
    assert notes == {"step": "7"}
    if name == "BF16":  # NumPy's side of the library knows it by its own name; PyTorch's knows it
        torch = pytest.importorskip("safetensors.torch")
        read = torch.load_file(tmp_path / "ours")
        assert all(value.dtype.is_floating_point and value.element_size() == 2 for value in read.values())
        single = {key: array.astype(np.float32) for key, array in arrays.items()}
        assert_same({key: value.float().numpy() for key, value in read.items()}, single)
        torch.save_file(read, tmp_path / "theirs")
    else:
        assert_same(theirs.load_file(tmp_path / "ours"), arrays)
        theirs.save_file(arrays, tmp_path / "theirs")
    assert_same(safetensors.read(tmp_path / "theirs", "theirs", "fix")[0], arrays)


def test_arrays_in_other_orders_of_axes_and_bytes(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    odd = {"turned": array.T, "strided": array[:, ::2], "swapped": array.astype(">f8")}
    files.write_hashed(tmp_path / "a", safetensors.pieces(odd))
    jax.tree.map(np.testing.assert_array_equal, safetensors.read(tmp_path / "a", "a", "fix")[0], odd)


def test_a_tree_by_its_paths():
    tree = {"params": {"a": jnp.ones(2)}, "list": [jnp.zeros(1), np.True_]}
    assert list(safetensors.named(tree)) == ["list/0", "list/1", "params/a"]
    arrays = {name: np.asarray(leaf) for name, leaf in safetensors.named(tree).items()}
    fitted = safetensors.fit(arrays, tree)
    assert fitted["list"][1].dtype == bool and isinstance(fitted["list"], list)
    np.testing.assert_array_equal(fitted["params"]["a"], tree["params"]["a"])
    with pytest.raises(ValueError, match="^params/a is missing or of another shape$"):
        safetensors.fit(arrays | {"params/a": np.ones(3, np.float32)}, tree)
    with pytest.raises(ValueError, match="^the network has no more$"):
        safetensors.fit(arrays | {"more": np.ones(3)}, tree)


@pytest.mark.parametrize(
    ("leaf", "kind"), [(jax.random.key(0), "key<fry>"), (3, "int"), (jnp.zeros(2, jnp.float8_e4m3fn), "float8_e4m3fn")]
)
def test_what_the_format_has_no_name_for(leaf, kind):
    with pytest.raises(UserError) as e:
        safetensors.named({"extra": {"state": leaf}})
    assert str(e.value) == f"extra/state: {kind} cannot be saved; keep an array, of a random key its key_data()"
