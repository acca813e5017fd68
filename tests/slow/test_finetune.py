"""FT-EM, FT-IM, SF-OCDA and CoTTA: single steps and whole runs against numpy, and their closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.data import augment
from cxda_jax.machine import backend
from cxda_jax.methods import cotta as cotta_module
from cxda_jax.methods.cotta import Teaching, cotta, restored
from cxda_jax.methods.finetune import FineTuning, sf_ocda
from cxda_jax.training.experiment import make_optimizer
from cxda_jax.types import Known
from tests import nets
from tests.conftest import make_episode
from tests.nets import KEY, TINY, build_method, case_of, close, softmax

QUIET = augment.Strong(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0)
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-2
EPISODE = jax.tree.map(np.asarray, make_episode())
SUPPORT = EPISODE.support


@pytest.fixture(autouse=True)
def cheap_augmentation(monkeypatch):
    """Another darkness for each key. tests/fast/test_augment.py has the real one, which is slow to compile."""
    case_of("erm")  # outside of any trace
    monkeypatch.setattr(augment, "strong", lambda key, pixels, options: pixels * jax.random.uniform(key))


def start():
    """What all methods here start from."""
    return case_of("erm").variables


def tuning(**options):
    return FineTuning(make_optimizer("sgd", RATE, MOMENTUM, DECAY), **options)


def params_of(method, support=SUPPORT, key=KEY):
    return jax.jit(method.adapt)(start(), support, key)["params"]


@jax.jit
def logits_of(params, pixels):
    return TINY.apply({**start(), "params": params}, pixels)


@jax.jit
def batched(params, pixels):
    """Normalised by the statistics of these images."""
    return TINY.apply({**start(), "params": params}, pixels, batch=True)


def confidence(logits):
    return softmax(np.float64(logits)).max(-1)


def single(params):
    return jax.tree.map(np.float32, params)


def largest_difference(a, b):
    return max(np.abs(np.subtract(x, y)).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_statistics_of_the_support_and_only_batch_norm_trained():
    """The statistics are those of the final weights, of which `batch_norm` moves scales and biases alone."""
    changes = {"finetune__statistics": "support", "finetune__trainable": "batch_norm", "finetune__steps": 1}
    methods = [build_method(name, **changes, cotta__copies=1) for name in ("sf_ocda", "cotta")]
    given = {**start(), "calibration": {"threshold": 0.5}}
    for adapted in jax.jit(lambda: [method.adapt(given, SUPPORT, KEY) for method in methods])():
        own = getattr(adapted, "student", adapted)
        own = {kind: own[kind] for kind in ("params", "batch_stats")}
        close(own["batch_stats"], case_of("bn").adapt(own, SUPPORT, KEY)["batch_stats"])
        moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), own["params"], start()["params"])
        for path, has_moved in jax.tree_util.tree_leaves_with_path(moved):
            assert has_moved == ("'bn" in jax.tree_util.keystr(path)), path


def test_a_loop_equals_its_unrolled_form(monkeypatch):
    unrolled = case_of("ft_em").adapt(start(), SUPPORT, KEY)["params"]
    monkeypatch.setattr(backend, "unrolls_loops", lambda: False)
    close(params_of(build_method("ft_em")), unrolled, 1e-6)


@pytest.mark.parametrize(("name", "statistics"), [
    ("ft_em", "support"), pytest.param("ft_im", "frozen", marks=pytest.mark.weekly), ("sf_ocda", "frozen")
])  # fmt: skip
def test_sgd_descends_on_the_methods_loss_at_its_share_of_the_rate(name, statistics):
    """Over two steps, at half of the training's rate of 1, in weights w: w - 0.5 g(w), and so on."""
    own = np.eye(4)[np.argmax(logits_of(start()["params"], SUPPORT.pixels), -1)]  # sf_ocda teaches itself
    answer = batched if statistics == "support" else logits_of

    @jax.jit
    @jax.grad
    def descent(params):
        log_p = jax.nn.log_softmax(answer(params, SUPPORT.pixels))
        p, mean = jnp.exp(log_p), jnp.exp(log_p).mean(0)
        entropy = -(p * log_p).sum(-1).mean()
        losses = {"ft_em": entropy, "ft_im": entropy + (mean * jnp.log(mean)).sum()}
        return losses.get(name, -(own * log_p).sum(-1).mean())

    options = {"finetune__steps": 2, "finetune__rate": 0.5, "finetune__statistics": statistics}
    training = {"learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    options |= {f"optimizer__{field}": value for field, value in training.items()} | {"sf_ocda__probability": 0.0}
    adapt, expected = jax.jit(build_method(name, **options).adapt), start()["params"]
    for _ in range(2):
        expected = jax.tree.map(lambda p, g: p - 0.5 * np.asarray(g), expected, descent(single(expected)))
    found = adapt(start(), SUPPORT, KEY)
    close(found["params"], expected, 1e-5)
    assert largest_difference(found["params"], start()["params"]) > 1e-4


def test_sf_ocda_draws_a_step_or_an_image_at_the_stated_rate(monkeypatch):
    """Augmentation is made visible: it blackens what it touches, and a black support gives another update."""
    monkeypatch.setattr(augment, "strong", lambda key, pixels, options: jnp.zeros_like(pixels))
    kinds = {"never": (0.0, "step"), "step": (0.3, "step"), "image": (0.3, "image")}
    methods = {kind: sf_ocda(TINY, tuning(steps=1), QUIET, *drawn) for kind, drawn in kinds.items()}

    @jax.jit
    def heads(key):
        return {k: m.adapt(start(), SUPPORT, key)["params"]["head"] for k, m in methods.items()}

    count, draws = {"step": 0, "image": 0}, 60
    for seed in range(draws):
        found = heads(jax.random.key(seed))
        for kind in count:
            count[kind] += largest_difference(found[kind], found["never"]) > 1e-7
    assert abs(count["step"] / draws - 0.3) < 4 * (0.21 / draws) ** 0.5
    assert count["image"] > 0.9 * draws  # that all 15 images stay clean has probability 0.005


def test_steps_of_cotta_equal_a_numpy_re_derivation(monkeypatch):
    """Gradients of the student come from jax; targets, optimiser, teacher, restoring and gate are derived again."""
    steps, copies, average, restore, masks, factors = 2, 2, 0.9, 0.2, [], []
    tuned, teaching = tuning(steps=steps, statistics="support"), Teaching(copies, average, restore)
    method = cotta(TINY, tuned, augment.Strong(noise=0.1), teaching)

    def recorded(key, params, anchor, probability):
        masks.append(restored(key, *(jax.tree.map(f, params) for f in (jnp.zeros_like, jnp.ones_like)), probability))
        return restored(key, params, anchor, probability)

    def strong(key, x, options):
        factors.append(jax.random.uniform(key))
        return x * factors[-1]

    monkeypatch.setattr(cotta_module, "restored", recorded)
    monkeypatch.setattr(augment, "strong", strong)
    monkeypatch.setattr(backend, "unrolls_loops", lambda: True)
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: jnp.stack([f(x) for x in xs]))
    monkeypatch.setattr(jax.lax, "cond", lambda chosen, yes, no, *x: jnp.where(chosen, yes(*x), no(*x)))
    adapt = jax.jit(lambda variables: (method.adapt(variables, SUPPORT, KEY), masks, factors))
    pixels = SUPPORT.pixels.astype(np.float32) / 255
    anchor = jax.tree.map(lambda x: np.asarray(x, np.float64), start()["params"])

    @jax.jit
    @jax.grad
    def gradient(params, target):
        return -(target * jax.nn.log_softmax(batched(params, pixels))).sum(-1).mean()

    mean = confidence(batched(start()["params"], pixels)).mean()
    for unsure, shift in ((True, 1e-3), (False, -1e-3)):
        adapted, drawn, by = adapt({**start(), "calibration": {"threshold": np.float32(mean + shift)}})
        assert len(by) == len({*map(float, by)}) == steps * copies
        student, teacher, velocity = anchor, anchor, jax.tree.map(np.zeros_like, anchor)
        for step in range(steps):
            shown = [pixels * np.float32(f) for f in by[step * copies : (step + 1) * copies]] if unsure else [pixels]
            target = softmax(np.mean([batched(single(teacher), x) for x in shown], axis=0))
            grads = gradient(single(student), np.float32(target))
            velocity = jax.tree.map(lambda v, g, p: MOMENTUM * v + np.float64(g) + DECAY * p, velocity, grads, student)
            student = jax.tree.map(lambda p, v: p - RATE * v, student, velocity)
            teacher = jax.tree.map(lambda t, s: average * t + (1 - average) * s, teacher, student)
            student = jax.tree.map(lambda s, a, m: np.where(m > 0, a, s), student, anchor, drawn[step])
        assert largest_difference(adapted.student["params"], student) < 1e-5
        assert largest_difference(adapted.teacher["params"], teacher) < 1e-5
        assert largest_difference(adapted.student["params"], anchor) > 1e-3
        assert 0.15 < np.mean([np.mean(m) for mask in drawn for m in jax.tree.leaves(mask) if m.size > 1000]) < 0.25


@pytest.mark.parametrize("statistics", ["frozen", "support"])
def test_the_threshold_is_a_quantile_of_what_the_gate_sees(statistics):
    """Of all images, or with the support's statistics of batches as large as it; an unfilled last one is left out."""
    images = nets.make_images((16, 16, 1), 35, 3).pixels
    teaching = Teaching(copies=1, quantile=0.25, margin=0.1)
    method = cotta(TINY, tuning(statistics=statistics), QUIET, teaching, support=15)
    threshold = float(jax.jit(method.calibrate)(start(), Known(images, *[None] * 4))["calibration"]["threshold"])
    plain = confidence(logits_of(start()["params"], images))
    batches = np.asarray(images)[:30].reshape(2, 15, 16, 16, 1)
    own = confidence(np.concatenate([batched(start()["params"], batch) for batch in batches]))
    seen = plain if statistics == "frozen" else own
    np.testing.assert_allclose(threshold, np.quantile(seen, 0.25) - 0.1, atol=1e-6)


def test_all_scalars_restored_is_erm_and_both_models_answer_as_asked():
    """A teacher that keeps half of itself has moved; restored, the student is the checkpoint."""
    changes = {"cotta__average": 0.5, "cotta__restore": 1.0, "cotta__copies": 1, "finetune__steps": 1}
    student, teacher = (build_method("cotta", cotta__answer=name, **changes) for name in ("student", "teacher"))

    @jax.jit
    def answers(variables, query):
        adapted = student.adapt(variables, SUPPORT, KEY)
        asked = student.predict, teacher.also["student"], teacher.predict, student.also["teacher"]
        return [predict(adapted, query) for predict in asked]

    one, same, two, alike = answers({**start(), "calibration": {"threshold": 2.0}}, EPISODE.query)
    close(one, logits_of(start()["params"], EPISODE.query.pixels), 1e-6)
    assert np.abs(np.subtract(one, two)).max() > 1e-5
    np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(two, alike)
