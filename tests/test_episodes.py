"""Plans and sources in full size, and over processes; test_properties.py has what holds for all specs."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from cxda_jax.config import read
from cxda_jax.data.episodes import EpisodeSpec, Plan, check_spec, mixed_spec, sample_plans
from cxda_jax.data.sources import tfdata_source
from cxda_jax.data.store import open_store, write_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import build_on
from tests.conftest import INFO, make_domains
from tests.peers import two_processes

ROOT = Path(__file__).parent.parent
SPEC = EpisodeSpec(num_domains=3, per_domain=5, num_query=7)


@pytest.fixture
def many(tmp_path):
    write_store(tmp_path / "many", INFO, make_domains(sizes=tuple(range(12, 42))))
    return open_store(tmp_path / "many")


def plans(store, tasks, spec=SPEC, seed=0, split="train"):
    return sample_plans(spec, store.offsets, store.domains(split), seed, tasks)


def test_streams_of_one_seed_are_unrelated():
    """Over the same domains, so that equal draws would give equal tasks."""
    offsets, domains, spec = np.arange(11) * 50, np.arange(10), EpisodeSpec(3, 5, 7)
    drawn = [sample_plans(spec, offsets, domains, 0, range(500), stream) for stream in range(5)]
    chosen = [plan.support[:, ::5] // 50 for plan in drawn]
    for i in range(5):
        for j in range(i):
            assert not (drawn[i].support == drawn[j].support).all(1).any()
            alike = (chosen[i] == chosen[j]).mean()  # of ten domains each place holds either with equal chances
            assert abs(alike - 0.1) < 5 * np.sqrt(0.09 / 1500)


def test_training_validation_test_and_calibration_draw_from_streams_of_their_own(tmp_path):
    """At equal seeds and over domains of equal sizes, where task n was the same draw for all of them."""
    write_store(tmp_path / "even", INFO, make_domains(sizes=(40,) * 15))
    store = open_store(tmp_path / "even")
    config = read("glyphs:erm,smoke")
    config["episode"] |= {"num_domains": 3, "per_domain": 5, "num_query": 7}
    experiment = build_on(config | {"seed": 3, "evaluation": config["evaluation"] | {"seed": 3}}, store)
    plans = {split: experiment.task_plans(split)(range(20)) for split in ("train", "val", "test")}
    plans["training"] = Plan(
        *(np.concatenate(rows) for rows in zip(*map(experiment.train_plans, range(20)), strict=True))
    )
    first = {"training": 0, "train": 0, "val": 200, "test": 400}
    draws = {name: plan.support - first[name] for name, plan in plans.items()}
    assert all(((draw >= 0) & (draw < 200)).all() for draw in draws.values())
    for name, draw in draws.items():
        for other in set(draws) - {name}:
            assert not (draw == draws[other]).all(1).any(), (name, other)
    spec = EpisodeSpec(0, 0, 200, mixed=True)
    drawn = sample_plans(spec, store.offsets, store.domains("train"), 3, [0]).query[0]
    assert not np.array_equal(experiment.calibration_images(), store.images[drawn])


def test_mixed_batches_hold_as_many_images_as_an_episode_and_need_no_more(many):
    spec = mixed_spec(SPEC)
    assert spec.num_query == 22 and mixed_spec(EpisodeSpec()).num_query == 120
    with pytest.raises(UserError, match="split 'train' of tiny has 165 images, a mixed batch needs 166"):
        check_spec(spec._replace(num_query=166), many, "train")
    check_spec(spec._replace(num_query=165), many, "train")


def test_other_seeds_give_other_tasks(many):
    assert (plans(many, range(10), seed=1).support != plans(many, range(10)).support).any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_domains": 11}, "^num_domains=11 but split 'train' of tiny has 10 domains"),
        ({"num_query": 0}, "^num_query=0 must be at least 1"),
        ({"per_domain": 6}, "domain 'd0' of split 'train' has 12 images, .* needs 13"),
    ],
)
def test_impossible_specs_are_refused(many, change, message):
    check_spec(SPEC, many, "train")
    with pytest.raises(UserError, match=message):
        check_spec(SPEC._replace(**change), many, "train")


def test_a_domain_of_39_images_is_named_and_one_of_40_is_not(tmp_path):
    for size, fits in ((40, True), (39, False)):
        write_store(tmp_path / str(size), INFO, make_domains(sizes=(40,) * 14 + (size,)))
        store = open_store(tmp_path / str(size))
        if fits:
            check_spec(EpisodeSpec(), store, "test")
        else:
            with pytest.raises(UserError, match="domain 'd14' of split 'test' has 39 images"):
                check_spec(EpisodeSpec(), store, "test")


def test_sampling_is_fast():
    offsets = np.arange(263) * 10_000
    times = []
    for _ in range(5):
        began = time.process_time()
        sample_plans(EpisodeSpec(), offsets, np.arange(262), 0, range(512))
        times.append(time.process_time() - began)
    assert min(times) < 0.1


def test_shards_are_the_parts_of_a_step(many):
    """Each process reads its own tasks alone; together they are the step."""
    pytest.importorskip("tensorflow")

    def plan_of(step):
        return plans(many, range(6 * step, 6 * step + 6))

    whole = list(tfdata_source(many).batches(plan_of, 3, 6))
    parts = [list(tfdata_source(many, (which, 3)).batches(plan_of, 3, 6)) for which in range(3)]
    for step, episode in enumerate(whole):
        for part in parts:
            assert len(part[step].label) == 2
        jax.tree.map(
            lambda whole, *parts: np.testing.assert_array_equal(whole, np.concatenate(parts)),
            episode, *[part[step] for part in parts],
        )  # fmt: skip
    with pytest.raises(UserError, match="tasks_per_step=6 cannot be shared by 4 processes; make it a multiple of 4"):
        next(iter(tfdata_source(many, (0, 4)).batches(plan_of, 0, 1)))


def test_two_processes_train_as_one(tmp_path, store):
    """Over jax.distributed: the same parameters as one process that reads everything, but for the order of sums; a checkpoint
    that they write together gives them back."""
    pytest.importorskip("tensorflow")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def start(which, count):
        arguments = [tmp_path / "store", which, count, port, tmp_path / f"{count}.npz"]
        command = [sys.executable, "-m", "tests.peers.two_processes", *map(str, arguments)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    both = [start(0, 2), start(1, 2)]
    two_processes.main(tmp_path / "store", 0, 1, port, tmp_path / "1.npz")
    hashes = []
    for process in both:
        output, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        hashes += output.split()[-2:]
    assert len(set(hashes)) == 1 and len(hashes) == 4
    one, two = np.load(tmp_path / "1.npz"), np.load(tmp_path / "2.npz")
    for name in one.files:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=1e-5)
