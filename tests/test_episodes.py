"""Plans and sources in full size, and over processes; test_properties.py has what holds for all specs."""

import functools
import itertools
import mmap
import time
import timeit
from pathlib import Path

import jax
import numpy as np
import pytest

from cxda_jax import memory
from cxda_jax.config import read
from cxda_jax.data.episodes import EpisodeSpec, check_spec, mixed_spec, sample_plans
from cxda_jax.data.sources import reader, tfdata_source
from cxda_jax.data.store import open_store, write_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import build_on
from cxda_jax.mesh import mesh_for
from tests.conftest import INFO, make_domains

ROOT = Path(__file__).parent.parent
SPEC = EpisodeSpec(num_domains=3, per_domain=5, num_query=7)
MIXED = mixed_spec(SPEC)


@pytest.fixture
def many(tmp_path):
    write_store(tmp_path / "many", INFO, make_domains(sizes=tuple(range(12, 42))))
    return open_store(tmp_path / "many")


def test_seeds_and_the_streams_of_one_seed_are_unrelated():
    """Over the same domains, so that equal draws would give equal tasks."""
    pairs = [(0, stream) for stream in range(5)] + [(1, 0)]  # seed and stream
    drawn = [sample_plans(SPEC, np.arange(11) * 50, np.arange(10), seed, range(500), stream) for seed, stream in pairs]
    for one, other in itertools.combinations([plan.support for plan in drawn], 2):
        assert not (one == other).all(1).any()
        alike = (one[:, ::5] // 50 == other[:, ::5] // 50).mean()  # each place holds each of ten domains alike often
        assert abs(alike - 0.1) < 5 * np.sqrt(0.09 / 1500)


def test_training_validation_test_and_calibration_draw_from_streams_of_their_own(tmp_path):
    """At equal seeds and over domains of equal sizes, where task n was the same draw for all of them."""
    write_store(tmp_path / "even", INFO, make_domains(sizes=(40,) * 15))
    store = open_store(tmp_path / "even")
    config = read("glyphs:erm,smoke")
    config["episode"] |= dict(zip(SPEC._fields[:3], SPEC[:3], strict=True))
    experiment = build_on(config | {"seed": 3, "evaluation": config["evaluation"] | {"seed": 3}}, store)
    plans = {split: experiment.task_plans(split)(range(20)) for split in ("train", "val", "test")}
    draws = [plans[split].support - first for split, first in (("train", 0), ("val", 200), ("test", 400))]
    draws.append(np.concatenate([experiment.train_plans(step).support for step in range(20)]))
    for one, other in itertools.combinations(draws, 2):
        assert ((one >= 0) & (one < 200)).all() and not (one == other).all(1).any()
    drawn = sample_plans(MIXED._replace(num_query=200), store.offsets, store.domains("train"), 3, [0]).query[0]
    assert not np.array_equal(experiment.calibration_images(), store.images[drawn])


def test_mixed_batches_hold_as_many_images_as_an_episode():
    assert MIXED.num_query == 22 and mixed_spec(EpisodeSpec()).num_query == 120


@pytest.mark.parametrize(("spec", "message"), [
    (SPEC._replace(num_domains=11), "^num_domains=11 but split 'train' of tiny has 10 domains"),
    (SPEC._replace(num_query=0), "^num_query=0 must be at least 1"),
    (SPEC._replace(per_domain=6), "domain 'd0' of split 'train' has 12 images, .* needs 13"),
    (MIXED._replace(num_query=166), "split 'train' of tiny has 165 images, a mixed batch needs 166"),
])  # fmt: skip
def test_impossible_specs_are_refused(many, spec, message):
    for possible in (SPEC, MIXED._replace(num_query=165)):
        check_spec(possible, many, "train")
    with pytest.raises(UserError, match=message):
        check_spec(spec, many, "train")


def test_sampling_is_fast():
    """512 tasks take less than half of what shuffling five whole domains for each would take on the same machine."""
    offsets, rng = np.arange(263) * 10_000, np.random.default_rng(0)
    ours = functools.partial(sample_plans, EpisodeSpec(), offsets, np.arange(262), 0, range(512))

    def shuffles():
        for _ in range(512 * 5):
            rng.permutation(10_000)

    fast, slow = (min(timeit.repeat(run, timer=time.process_time, number=1)) for run in (ours, shuffles))
    assert fast < slow / 2


def test_shards_are_the_parts_of_a_step(many, monkeypatch):
    """Each process reads its own tasks alone; together they are the step."""
    pytest.importorskip("tensorflow")

    def plan_of(step):
        return sample_plans(SPEC, many.offsets, many.domains("train"), 0, range(6 * step, 6 * step + 6))

    whole, parts = list(tfdata_source(many).own_batches(plan_of, 3, 6)), []
    on_a_mesh = tfdata_source(many)._replace(mesh="of all processes")
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for which in range(3):
        monkeypatch.setattr(jax, "process_index", lambda which=which: which)
        parts.append(list(on_a_mesh.own_batches(plan_of, 3, 6)))
    for episode, *of_step in zip(whole, *parts, strict=True):
        assert all(len(part.label) == 2 for part in of_step)
        together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *of_step)
        jax.tree.map(np.testing.assert_array_equal, episode, together)


class Noted(mmap.mmap):
    """A mapped file that notes what the system is told of it."""

    told = ()

    def madvise(self, *told):
        self.told = *self.told, told
        super().madvise(*told)


def test_the_system_hears_which_bytes_of_a_large_file_are_wanted(tmp_path, monkeypatch):
    """All of the rows', to the page, in a file of more bytes than 32 bits can count, if the memory cannot hold it."""
    shape, rows = (200_000, 100, 100, 3), np.array([[199_999, 3], [0, 150_000]], np.int32)
    with open(tmp_path / "sparse", "wb+") as file:
        file.truncate(np.prod(shape))
        for row in rows.ravel():
            file.seek(int(row) * 30_000)
            file.write(bytes([1 + row % 200]) * 30_000)
        file.flush()
        mapped = Noted(file.fileno(), 0, access=mmap.ACCESS_READ)
    images = np.ndarray(shape, np.uint8, mapped)
    monkeypatch.setattr(memory, "available", lambda: images.nbytes)
    np.testing.assert_array_equal(reader(images)(rows)[..., 0, 0, 0], 1 + rows % 200)
    assert not mapped.told
    monkeypatch.setattr(memory, "available", lambda: images.nbytes - 1)
    found = reader(images)(rows)
    assert found.shape == (2, 2, *shape[1:]) and (found == (1 + rows % 200)[..., None, None, None]).all()
    whole, *parts = mapped.told
    assert whole == (mmap.MADV_RANDOM,)
    for row, (wish, begin, length) in zip(rows.ravel(), parts, strict=True):
        assert wish == mmap.MADV_WILLNEED and begin % mmap.PAGESIZE == 0
        assert 0 <= 30_000 * int(row) - begin < mmap.PAGESIZE and begin + length == 30_000 * (int(row) + 1)
    np.testing.assert_array_equal(reader(found)(np.array([1, 0])), found[::-1])


def test_tasks_that_processes_cannot_share_are_named(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(
        UserError, match="tasks_per_step=12 cannot be shared by 8 devices of 4 processes; make it a multiple of 8"
    ):
        mesh_for(12)
