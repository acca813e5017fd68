"""SupportBuffer: equal to adapting to what it holds, by one program for every fill, from several threads."""

import functools
from concurrent import futures
from unittest import mock

import jax
import numpy as np
import pytest

import cxda_jax
from cxda_jax.device.model import CompiledMethod, Model
from cxda_jax.machine import cost
from tests.conftest import CLASSES
from tests.lines import cut, refused
from tests.nets import CARD, build_method, case_of

RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (16, 16, 1), np.uint8) for _ in range(20)]
QUERIES = IMAGES[12:]


@functools.cache
def programs_of(name):
    """Each traced once for all tests."""
    case = case_of(name)
    return CompiledMethod(case.adapt, case.predict, jax.jit(case.method.attention))


def make(name) -> Model:
    case = case_of(name)
    return Model(CARD._replace(method=name), case.method, case.variables, programs_of(name))


def answers(model, held=None) -> np.ndarray:
    """Those of a buffer, or of a model that is adapted to some of the images."""
    found = (model if held is None else model.adapt([IMAGES[i] for i in held])).predict(QUERIES).probabilities
    assert found.shape == (len(QUERIES), CLASSES)
    return found


def close(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["cxda_any", "icrm"])
def test_it_equals_adapting_to_what_it_holds_and_compiles_once(name):
    """Answers, and attention to the images in their order. tests/fast/test_methods.py has the programs of all methods."""
    places, model = 3, make(name)
    buffer, held, compiled = cxda_jax.SupportBuffer(model, places), [], []
    empty = answers(buffer)
    for i in range(places + 2):
        assert buffer.observe(IMAGES[i]) == i % places
        held = [*held, i][-places:]
        programs = cost.Compilations()
        found = answers(buffer)
        compiled.append(programs.programs)
        if len(held) != 1:  # each number of images costs model.adapt() a program
            close(found, answers(model, held))
        np.testing.assert_array_equal(buffer.images(), [IMAGES[j] for j in held])
    assert not any(compiled[1:]), "nothing is compiled after the first answer"
    close(buffer.attention(QUERIES), model.adapt([IMAGES[i] for i in held]).attention(QUERIES))
    buffer.forget()
    close(answers(buffer), answers(model, held[1:]))
    assert buffer.observe(IMAGES[0]) == 2 and len(buffer) == places
    close(answers(buffer), answers(model, [*held[1:], 0]))
    buffer.forget(100)
    assert len(buffer) == 0
    close(answers(buffer), empty)


@pytest.mark.parametrize(("forgotten", "rest"), [(0, 15), (5, 0), (2, 3)])
def test_a_reservoir_is_a_uniform_sample_of_what_was_not_forgotten(forgotten, rest, tmp_path):
    """Each is held with the probability of a uniform sample, 5 of 27, 12 and 15, within four standard errors."""
    model, times, since = Model(CARD, build_method("bn"), None, None), 600, 12
    held, left = np.zeros(since), 0
    for seed in range(times):
        buffer = cxda_jax.SupportBuffer(model, 5, keep="reservoir", seed=seed)
        for _ in range(15):
            buffer.observe(IMAGES[since])
        buffer.forget(forgotten)
        if seed < 3:  # a saved one goes on as it would
            buffer.save(tmp_path / "it.npz")
            buffer = cxda_jax.SupportBuffer.load(tmp_path / "it.npz", model)
        for image in IMAGES[:since]:
            buffer.observe(image)
        kept = (buffer.images()[:, None] == np.array(IMAGES[:since])).all((2, 3, 4))
        held, left = held + kept.any(0), left + 5 - kept.sum()
    chance = 5 / (since + rest)
    error = 4 * np.sqrt(chance * (1 - chance) / times)
    assert np.abs(held / times - chance).max() < error and abs(left / times - chance * rest) <= error * rest


def test_a_saved_buffer_is_the_same_again(tmp_path):
    model, path = make("cxda_any"), tmp_path / "it.npz"
    buffer = cxda_jax.SupportBuffer(model, 3)
    for i in range(5):
        buffer.observe(IMAGES[i])
    buffer.save(path)
    saved = dict(np.load(path))
    for earlier in ({}, {"statistics": "lagged", "refresh": 7, "stale": 2, "base_pixels": saved["pixels"]}):
        np.savez(path, **saved, **earlier)  # an earlier version could answer by statistics of images before
        again = cxda_jax.SupportBuffer.load(path, model)
        np.testing.assert_array_equal(answers(again), answers(buffer))
    for both in (buffer, again):
        both.observe(IMAGES[9])
    np.testing.assert_array_equal(again.images(), buffer.images())
    assert (again.capacity, again.seen) == (3, 6)
    model.card = CARD._replace(shape=(8, 8, 1))
    with refused(r"\(16, 16, 1\).*\(8, 8, 1\)", tmp_path):
        cxda_jax.SupportBuffer.load(path, model)
    cut(path, 100)
    with refused("", tmp_path, named="it.npz"):
        cxda_jax.SupportBuffer.load(path, model)


def test_work_that_is_broken_off_is_done_by_the_next_answer(monkeypatch):
    model = make("cxda_any")
    buffer, like = (cxda_jax.SupportBuffer(model, 3) for _ in range(2))
    for both in (buffer, like):
        both.observe(IMAGES[0])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(model, "programs", model.programs._replace(adapt=mock.Mock(side_effect=KeyboardInterrupt)))
        buffer.predict(QUERIES)
    np.testing.assert_array_equal(answers(buffer), answers(like))


def test_threads_may_share_it():
    """Two write, one forgets and one asks; afterwards it equals adapting to what it holds."""
    model = make("cxda_any")
    buffer = cxda_jax.SupportBuffer(model, 3)
    works = [
        (lambda i: buffer.observe(IMAGES[i % 20]), 150), (lambda i: buffer.observe(IMAGES[-i % 20]), 150),
        (lambda i: buffer.predict(QUERIES[:1]), 100), (lambda i: buffer.forget(), 30),
    ]  # fmt: skip
    with futures.ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(lambda what, rounds: [*map(what, range(rounds))], *each) for each in works]:
            done.result()
    assert buffer.seen == 300
    close(answers(buffer), answers(model.adapt(buffer.images())))
