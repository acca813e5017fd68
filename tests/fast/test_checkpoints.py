"""What is on disk is what was written, or somebody says so."""

import hashlib
import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as theirs

from cxda_jax.disk import checkpoints, files, manifest, models, safetensors
from cxda_jax.errors import UserError
from tests.lines import refused, rot
from tests.nets import assert_equal_trees

TREE = {"params": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.linspace(0, 1, 5, dtype="f")}}}


def plus(number):
    return jax.tree.map(lambda x: x + np.float32(number), TREE)


def save(path, *steps, keep=2):
    with checkpoints.Folder(path, keep) as folder:
        for step in steps:
            folder.save(step, plus(step), {"step": step})


def test_the_newest_two_stay_and_every_file_that_is_read_is_in_the_manifest(tmp_path):
    assert checkpoints.restore(tmp_path / "none", TREE) is None
    save(tmp_path, 1, 2, 3)
    assert checkpoints.steps(tmp_path) == [3, 2]
    assert [manifest.find_fault(tmp_path / s, checkpoints.READ) for s in "32"] == ["", ""]
    folder = tmp_path / "3"
    told = json.loads((folder / "manifest.json").read_text())["sha256"]
    for name, digest in told.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for file in [*folder.rglob("*")]:  # are indeed not read
        if file.is_file() and file.relative_to(folder).as_posix() not in {*told, "manifest.json"}:
            file.unlink()
    tree, notes = checkpoints.restore(tmp_path, TREE)
    assert notes == {"step": 3}
    assert_equal_trees(tree, plus(3))


def test_damage_is_an_error_that_names_the_file(tmp_path):
    save(tmp_path / "best", 1, 2)
    changed = "differs from its recorded hash"
    for number, (harm, fault) in enumerate([
        (rot, f"arrays.safetensors {changed}"),
        (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json is unreadable"),
        (lambda f: (f / "notes" / "metadata").unlink(), "notes/metadata is missing"),
    ]):  # fmt: skip
        copied = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "best", copied)
        harm(copied / "2")
        assert fault in manifest.find_fault(copied / "2", checkpoints.READ)
        with refused(f"^{{tmp}}/{number}/2: .*{fault}", tmp_path):
            checkpoints.restore(copied, TREE)


def test_with_no_good_checkpoint_nothing_is_taken_for_one(tmp_path):
    save(tmp_path, 1, 2)
    rot(tmp_path / "1")
    rot(tmp_path / "2")
    said = []
    with refused("no good checkpoint", tmp_path):
        checkpoints.restore(tmp_path, TREE, damaged=said.append)
    assert len(said) == 2 and "2 is damaged" in said[0] and "set aside as damaged-2" in said[0]
    assert {p.name for p in tmp_path.iterdir()} == {"damaged-1", "damaged-2"}


def test_a_model_is_plain_files_that_others_can_read_and_other_networks_refuse(tmp_path):
    notes = {"step": 7, "score": 0.25, "name": 'a "quoted" ü'}
    models.write_model(tmp_path / "model", TREE, {"seed": 0}, notes)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"weights.safetensors", "config.json", "manifest.json"}
    tree, found = models.read_model(tmp_path / "model", TREE)
    assert_equal_trees(tree, TREE)
    assert found == notes
    plain = theirs.load_file(tmp_path / "model" / "weights.safetensors")
    assert_equal_trees(plain, {"params/a": TREE["params"]["a"], "params/b/c": TREE["params"]["b"]["c"]})
    with refused("", tmp_path, named="params/d"):
        models.read_model(tmp_path / "model", {"params": {**TREE["params"], "d": np.ones(2)}})
    rot(tmp_path / "model")
    with refused("recorded hash", tmp_path):
        models.read_model(tmp_path / "model", TREE)


def test_weights_hash_sees_one_bit():
    arrays = plus(0)
    before = checkpoints.weights_hash(arrays)
    assert before == checkpoints.weights_hash(jax.device_put(arrays))
    arrays["params"]["b"]["c"].view(np.uint8)[0] ^= 1
    assert checkpoints.weights_hash(arrays) != before


def test_one_process_at_a_time_writes_to_a_folder_and_a_file_is_whole_or_not_there(tmp_path):
    def fail(partial):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    in_use = pytest.raises(UserError, match=f"{tmp_path} .* {os.getpid()} ")
    with files.locked(tmp_path), in_use, files.locked(tmp_path):
        pass
    with files.locked(tmp_path):  # is free again
        files.write_text(tmp_path / "a.json", "old")
        with pytest.raises(OSError):
            files.write_whole(tmp_path / "a.json", fail)
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "lock"} and (tmp_path / "a.json").read_text() == "old"


def test_what_killed_writers_left_stops_no_later_save(tmp_path):
    save(tmp_path, 2)
    for name in ("4.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-17", "4.orbax-checkpoint-tmp-1700000000000000"):
        (tmp_path / name / "tree").mkdir(parents=True)
        (tmp_path / name / "tree" / checkpoints.ARRAYS).write_bytes(b"half")
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "4"]
    assert_equal_trees(checkpoints.restore(tmp_path, TREE)[0], plus(4))


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
    for change in {"params/a": np.ones(3, np.float32)}, {"params/a": np.ones(2, np.float16)}, {"more": np.ones(3)}:
        with pytest.raises(ValueError, match=f"{[*change][0]}"):
            safetensors.as_tree(arrays | change, tree)
    with refused("^extra/state: key<fry>"):
        safetensors.named({"extra": {"state": jax.random.key(0)}})
