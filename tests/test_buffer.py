"""SupportBuffer: equal to adapting to what it holds, at every fill, by one program, from several threads, in bounded memory."""

import gc
import resource
import threading

import jax
import numpy as np
import pytest

import cxda_jax
from cxda_jax import cost
from cxda_jax.device.model import Model, Programs
from cxda_jax.disk import models
from cxda_jax.errors import UserError
from tests.conftest import CLASSES
from tests.nets import ALL, build_method, case_of

CARD = models.Card(
    "",
    0,
    0,
    "tiny",
    "",
    "",
    "",
    tuple("abcd"),
    (16, 16, 1),
    "pad",
    (255, 255, 255),
    (0.5,),
    (0.5,),
    "accuracy",
    None,
    None,
    "",
    "",
)
RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (16, 16, 1), np.uint8) for _ in range(20)]
QUERIES = IMAGES[12:]
PLACES = 6
TAKING = [
    n for n in ALL if n != "cxda_supervised" and (build_method(n).takes_places or not build_method(n).uses_support)
]


def make(name, **options) -> Model:
    case = case_of(name)
    method = build_method(name, **options) if options else case.method
    optional = (jax.jit(f) if f else None for f in (method.attention, method.remember))
    return Model(
        CARD._replace(method=name),
        method,
        case.variables,
        Programs(jax.jit(method.adapt), jax.jit(method.predict), *optional),
    )


def close(buffer, model, held, tolerance=1e-5):
    wanted = model.adapt([IMAGES[i] for i in held]).predict(QUERIES).probabilities
    assert wanted.shape == (len(QUERIES), CLASSES)
    np.testing.assert_allclose(buffer.predict(QUERIES).probabilities, wanted, atol=tolerance)


@pytest.mark.parametrize("name", TAKING)
def test_it_equals_adapting_at_every_fill_and_compiles_once(name):
    places, model = 3, make(name)
    buffer, held = cxda_jax.SupportBuffer(model, places), []
    close(buffer, model, [])
    compiled = []
    for i in range(places + 2):
        buffer.observe(IMAGES[i])
        held = [*held, i][-places:]
        programs = cost.Compilations()
        answers = buffer.predict(QUERIES)
        compiled.append(programs.programs)
        assert len(buffer) == len(held) and len(answers.names) == len(QUERIES)
        np.testing.assert_array_equal(buffer.images(), [IMAGES[j] for j in held])
        close(buffer, model, held)
    assert not any(compiled[1:]), "nothing is compiled after the first answer"
    buffer.forget(2)
    close(buffer, model, held[2:])
    buffer.forget(100)
    assert len(buffer) == 0
    close(buffer, model, [])
    buffer.observe(IMAGES[0])
    close(buffer, model, [0])


def test_lagged_and_frozen_statistics_are_those_of_their_times():
    model = make("cxda")
    exact, lagged, frozen = (
        cxda_jax.SupportBuffer(model, PLACES, statistics=kind, refresh=4) for kind in ("exact", "lagged", "frozen")
    )
    probabilities = []
    for i in range(10):
        for buffer in (exact, lagged, frozen):
            buffer.observe(IMAGES[i])
        probabilities.append([buffer.predict(QUERIES).probabilities for buffer in (exact, lagged, frozen)])
    gaps = np.array([[np.abs(other - of[0]).max() for other in of[1:]] for of in probabilities])
    assert (gaps[:4, 1] < 1e-6).all(), "frozen is exact until it freezes"
    assert (gaps[4:, 1] > 1e-5).all()
    assert (gaps[[4, 8], 0] < 1e-5).all(), "lagged is exact after each refresh"
    assert (gaps[[1, 2, 3, 5, 6, 7, 9], 0] > 1e-5).all()
    # By hand: the newcomer under the statistics of the images before it.
    support = model.as_images([*IMAGES[:1], *IMAGES[:1]]).replace(present=jax.numpy.array([True, False]))
    adapted = model.programs.adapt(model.variables, support, jax.random.key(0))
    adapted = model.programs.remember(adapted, 1, model.as_images(IMAGES[1:2]))
    by_hand = model.adapted_to(adapted).predict(QUERIES).probabilities
    np.testing.assert_allclose(probabilities[1][1], by_hand, atol=1e-5)
    lagged.refresh()
    np.testing.assert_allclose(lagged.predict(QUERIES).probabilities, probabilities[-1][0], atol=1e-5)
    lagged.forget(1)
    assert len(lagged) == PLACES - 1
    assert lagged.attention(QUERIES).shape[::2] == (len(QUERIES), PLACES - 1)


def test_all_three_are_one_where_an_images_memory_is_its_own():
    model = make("cxda_any", cxda_any__prior=0.0)
    buffers = [
        cxda_jax.SupportBuffer(model, PLACES, statistics=kind, refresh=3) for kind in ("exact", "lagged", "frozen")
    ]
    for i in range(10):
        for buffer in buffers:
            buffer.observe(IMAGES[i])
        if i == 7:
            for buffer in buffers:
                buffer.forget(2)
        first, *others = (buffer.predict(QUERIES).probabilities for buffer in buffers)
        for other in others:
            np.testing.assert_allclose(other, first, atol=1e-6)


@pytest.mark.parametrize("name", ["cxda_loo", "icrm"])
def test_attention_is_on_the_images_it_holds_in_their_order(name):
    model = make(name)
    buffer = cxda_jax.SupportBuffer(model, 3)
    for i in range(5):
        buffer.observe(IMAGES[i])
    weights = buffer.attention(QUERIES)
    np.testing.assert_allclose(weights, model.adapt(IMAGES[2:5]).attention(QUERIES), atol=1e-5)
    if name == "cxda_loo":  # in icrm the image itself has a share
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_a_reservoir_holds_each_image_as_likely():
    model, held = make("bn"), np.zeros(20)
    for seed in range(200):
        buffer = cxda_jax.SupportBuffer(model, 5, keep="reservoir", seed=seed)
        for image in IMAGES:
            buffer.observe(image)
        kept = [i for i, image in enumerate(IMAGES) if (buffer.images() == image).all((1, 2, 3)).any()]
        assert len(buffer) == 5 == len(kept)
        held[kept] += 1
    assert np.abs(held / 200 - 5 / 20).max() < 4 * np.sqrt(0.25 * 0.75 / 200)


def test_a_saved_buffer_is_the_same_again(tmp_path):
    model = make("cxda_any")
    buffer = cxda_jax.SupportBuffer(model, PLACES, statistics="lagged", refresh=7)
    for i in range(9):
        buffer.observe(IMAGES[i])
    buffer.refresh()
    buffer.save(tmp_path / "it.npz")
    again = cxda_jax.SupportBuffer.load(tmp_path / "it.npz", model)
    np.testing.assert_array_equal(again.images(), buffer.images())
    np.testing.assert_allclose(again.predict(QUERIES).probabilities, buffer.predict(QUERIES).probabilities, atol=1e-6)
    for both in (buffer, again):
        both.observe(IMAGES[9])
    np.testing.assert_array_equal(again.images(), buffer.images())
    assert (again.capacity, again.statistics, again.refresh_every, again.seen) == (PLACES, "lagged", 7, 10)
    (tmp_path / "broken.npz").write_bytes((tmp_path / "it.npz").read_bytes()[:100])
    with pytest.raises(UserError, match=r"broken.npz: not a buffer that save\(\) wrote"):
        cxda_jax.SupportBuffer.load(tmp_path / "broken.npz", model)
    other = make("bn")
    other.card = other.card._replace(shape=(8, 8, 1))
    np.savez(tmp_path / "exact.npz", **{**np.load(tmp_path / "it.npz"), "statistics": "exact"})
    with pytest.raises(UserError, match=r"holds images uint8 \(16, 16, 1\), the model takes \(8, 8, 1\)"):
        cxda_jax.SupportBuffer.load(tmp_path / "exact.npz", other)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ft_em", {}, "ft_em has no program for every number of images; use Model.adapt"),
        ("cxda_supervised", {}, "cxda_supervised must know the domain of each image"),
        ("bn", {"statistics": "lagged"}, "statistics='lagged': bn keeps nothing of one image alone; choose exact"),
        ("cxda", {"capacity": 0}, "capacity=0: give a whole number from 1"),
        ("cxda", {"refresh": 0}, "refresh=0: give"),
        ("cxda", {"keep": "oldest"}, "keep='oldest' is not one of newest, reservoir"),
    ],
)
def test_what_cannot_be_is_one_line(name, options, message):
    with pytest.raises(UserError, match=message):
        cxda_jax.SupportBuffer(make(name), **options)


def test_threads_may_share_it():
    """Two write, one asks and one refreshes; afterwards it equals adapting to what it holds."""
    model = make("cxda_loo")
    buffer, faults = cxda_jax.SupportBuffer(model, PLACES, statistics="lagged", refresh=5), []
    buffer.predict(QUERIES[:1])

    def work(what, rounds):
        try:
            for i in range(rounds):
                what(i)
        except Exception as e:  # a thread's exception would be lost
            faults.append(e)

    works = [
        (lambda i: buffer.observe(IMAGES[i % 20]), 150), (lambda i: buffer.observe(IMAGES[-i % 20]), 150),
        (lambda i: buffer.predict(QUERIES[:1]), 100), (lambda i: buffer.refresh(), 20), (lambda i: buffer.forget(1), 30),
    ]  # fmt: skip
    threads = [threading.Thread(target=work, args=each) for each in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and buffer.seen == 300
    buffer.refresh()
    wanted = model.adapt(list(buffer.images())).predict(QUERIES).probabilities
    np.testing.assert_allclose(buffer.predict(QUERIES).probabilities, wanted, atol=1e-5)


@pytest.mark.parametrize("statistics", ["exact", "lagged"])
def test_ten_thousand_images_leave_the_memory_flat(statistics):
    model = make("cxda_any")
    buffer = cxda_jax.SupportBuffer(model, 3, statistics=statistics, refresh=10)

    def go_on(rounds):
        for i in range(rounds):
            buffer.observe(IMAGES[i % 20])
            buffer.predict(QUERIES[:1])
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = go_on(1000)
    assert go_on(9000) - before < 20_000  # kB: less than 3 bytes an image and answer
    assert len(buffer) == 3 and buffer.seen == 10_000
