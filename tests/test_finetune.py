"""FT-EM, FT-IM, SF-OCDA and CoTTA: single steps against PyTorch, whole runs against numpy, and their closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import augment, backend
from cxda_jax.experiment import make_optimizer
from cxda_jax.losses import entropy, infomax
from cxda_jax.methods import cotta as cotta_module
from cxda_jax.methods.cotta import confidence, cotta, restored
from cxda_jax.methods.finetune import FineTuning, ft_em, sf_ocda
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.types import Images
from tests.nets import (
    FEMNIST,
    KEY,
    assert_within_some_draw,
    build_method,
    case_of,
    close,
    initialised,
    make_images,
    make_net,
    nchw,
)  # fmt: skip

TUNED = ["ft_em", "ft_im", "sf_ocda", "cotta"]
TINY = Classifier(CNNTrunk(8), CNNHead(4), (0.5,), (0.5,))  # the network of build_method()
QUIET = augment.Strong(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0)
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-2


def tuning(**options):
    return FineTuning(make_optimizer("sgd", RATE, MOMENTUM, DECAY), **options)


def checkpoint(name="erm"):
    """Variables of erm, as all methods here start from; for cotta calibrated."""
    return case_of(name).variables


def logits_of(variables, pixels):
    return case_of("erm").predict(variables, Images(pixels, jnp.zeros(len(pixels), jnp.int32)))


def adapted_by(method, episode, name="erm", key=KEY):
    return jax.jit(method.adapt)(checkpoint(name), episode.support, key)


def largest_difference(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(("trainable", "statistics"), [("all", "support"), ("batch_norm", "frozen")])
def test_two_steps_of_ft_em_equal_torch(peer, trainable, statistics):
    torch = peer.torch
    (shape, classes), net = FEMNIST, make_net(*FEMNIST)
    method = ft_em(net, tuning(steps=2, trainable=trainable, statistics=statistics))
    start, adapt = initialised(method, shape), jax.jit(method.adapt)
    module = peer.TorchCNN(shape[2], classes, 16)

    def error_of(seed):
        support = make_images(shape, 10, seed)
        ours = peer.torch_tensors(adapt(start, support, KEY)["params"])
        peer.copy_weights(start, module)
        module.train(statistics == "support")
        norms = {id(p) for norm in module.norms for p in norm.parameters()}
        trained = [p for p in module.parameters() if trainable == "all" or id(p) in norms]
        sgd = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        for _ in range(2):
            sgd.zero_grad()
            log_p = torch.log_softmax(module(nchw(support.pixels)), -1)
            (-(log_p.exp() * log_p).sum(-1).mean()).backward()
            sgd.step()
        before = peer.torch_tensors(start["params"])
        errors, moved = [], 0
        for name, value in module.named_parameters():
            errors.append(float((ours["net." + name] - value.detach()).abs().max()))
            moved += int((value != before["net." + name]).any())
        assert moved == (len(before) if trainable == "all" else 6)
        return max(errors)

    assert_within_some_draw(error_of, 2e-6)


@pytest.mark.parametrize(("name", "loss"), [("ft_em", entropy), ("ft_im", infomax)])
def test_each_step_lowers_its_own_loss(name, loss, episode):
    one, two = adapted_by(build_method(name, finetune__steps=1), episode), adapted_by(case_of(name).method, episode)
    values = [float(loss(logits_of(v, episode.support.pixels))) for v in (checkpoint(), one, two)]
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("name", TUNED)
def test_a_rate_of_zero_is_erm(name, episode):
    method = build_method(name, finetune__rate=0.0, finetune__steps=1)
    logits = method.predict(adapted_by(method, episode, name), episode.query)
    np.testing.assert_array_equal(logits, TINY.apply(checkpoint(), episode.query.pixels))


@pytest.mark.parametrize("name", TUNED)
def test_statistics_of_the_support_and_only_batch_norm_trained(name, episode):
    """The statistics are those of the final weights, of which `batch_norm` moves scales and biases alone."""
    method = build_method(name, finetune__statistics="support", finetune__trainable="batch_norm", finetune__steps=1)
    adapted = adapted_by(method, episode, name)
    adapted = getattr(adapted, "student", adapted)
    expected = case_of("bn").adapt(adapted, episode.support, KEY)
    close(adapted["batch_stats"], expected["batch_stats"])
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), adapted["params"], checkpoint()["params"])
    for path, has_moved in jax.tree_util.tree_leaves_with_path(moved):
        assert has_moved == ("'bn" in jax.tree_util.keystr(path)), path
    frozen = case_of(name).adapt(checkpoint(name), episode.support, KEY)
    frozen = getattr(frozen, "student", frozen)
    jax.tree.map(np.testing.assert_array_equal, frozen["batch_stats"], checkpoint()["batch_stats"])


def test_a_loop_equals_its_unrolled_form(monkeypatch, episode):
    case = case_of("ft_im")
    unrolled = case.adapt(checkpoint(), episode.support, KEY)["params"]
    monkeypatch.setattr(backend, "unrolls_loops", lambda: False)
    close(adapted_by(case.method, episode)["params"], unrolled, 1e-6)


# SF-OCDA


def test_a_chain_fine_tunes_at_its_share_and_counts_fine_tunings_steps(episode):
    """Over two steps, at rates of 0.1 and then half of it, in weights w: w - 0.1 g(w), and so on."""
    chain = "sgd(linear_schedule(1.0, 0.0, steps))"
    method = build_method("ft_em", optimizer__chain=chain, finetune__steps=2, finetune__rate=0.1)
    predict, support = case_of("erm").predict, episode.support
    variables = checkpoint()
    descent = jax.jit(jax.grad(lambda params: entropy(predict({**variables, "params": params}, support))))
    expected = variables["params"]
    for rate in (0.1, 0.05):
        expected = jax.tree.map(lambda p, g, rate=rate: p - rate * g, expected, descent(expected))
    found = adapted_by(method, episode)["params"]
    close(found, expected, 1e-5)
    assert largest_difference(found, variables["params"]) > 1e-3


def test_sf_ocda_without_augmentation_is_self_training(episode):
    method = build_method("sf_ocda", sf_ocda__probability=0.0)
    variables, pixels = checkpoint(), episode.support.pixels
    labels = jax.nn.one_hot(logits_of(variables, pixels).argmax(-1), 4)
    optimizer = make_optimizer("sgd", 5e-2, 0.9, 1e-4)
    params, state = variables["params"], optimizer.init(variables["params"])

    @jax.jit
    @jax.grad
    def gradient(params):
        return -(labels * jax.nn.log_softmax(TINY.apply({**variables, "params": params}, pixels))).sum(-1).mean()

    for _ in range(2):
        updates, state = optimizer.update(gradient(params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    adapt = jax.jit(method.adapt)
    for seed in (0, 9):
        assert largest_difference(adapt(variables, episode.support, jax.random.key(seed))["params"], params) < 1e-6


def test_sf_ocda_draws_a_step_or_an_image_at_the_stated_rate(monkeypatch, episode):
    """Augmentation is made visible: it blackens what it touches, and a black support gives another update."""
    monkeypatch.setattr(augment, "strong", lambda key, pixels, options: jnp.zeros_like(pixels))

    def head_of(probability, draw):
        adapt = jax.jit(sf_ocda(TINY, tuning(steps=1), QUIET, probability, draw).adapt)
        return lambda key: adapt(checkpoint(), episode.support, key)["params"]["head"]

    never, always = (head_of(probability, "step")(KEY) for probability in (0.0, 1.0))
    count, draws = {"step": 0, "image": 0}, 60
    for draw in count:
        drawn = head_of(0.3, draw)
        for seed in range(draws):
            head = drawn(jax.random.key(seed))
            clean, black = largest_difference(head, never) < 1e-7, largest_difference(head, always) < 1e-7
            assert draw == "image" or clean != black
            count[draw] += not clean
    assert abs(count["step"] / draws - 0.3) < 4 * (0.21 / draws) ** 0.5
    assert count["image"] > 0.9 * draws  # that all 15 images stay clean has probability 0.005


def test_sf_ocda_unsure_images_do_not_teach(episode):
    sure = np.asarray(confidence(logits_of(checkpoint(), episode.support.pixels)))
    threshold = float(np.sort(sure)[7]) - 1e-6
    options = {"sf_ocda__probability": 0.0, "finetune__steps": 1}
    method, filtered = (build_method("sf_ocda", **options, sf_ocda__confidence=c) for c in (0.0, threshold))
    kept = episode.replace(support=jax.tree.map(lambda x: x[sure >= threshold], episode.support))
    assert len(kept.support.pixels) == 8
    got = adapted_by(filtered, episode)["params"]
    assert largest_difference(got, adapted_by(method, kept)["params"]) < 1e-6
    assert largest_difference(got, adapted_by(method, episode)["params"]) > 1e-5


# CoTTA


def test_restoring_follows_its_probability():
    anchor = {"a": jnp.zeros((300, 200)), "b": jnp.zeros(5000)}
    params, drawn = jax.tree.map(jnp.ones_like, anchor), jax.jit(restored)
    for probability in (0.0, 0.01, 0.3, 1.0):
        for leaf in drawn(KEY, params, anchor, probability).values():
            bound = 4.5 * (probability * (1 - probability) / leaf.size) ** 0.5
            assert abs(1 - float(leaf.mean()) - probability) <= bound
    first, second = (drawn(k, params, anchor, 0.5)["b"] for k in jax.random.split(KEY))
    assert (first != second).any()


@pytest.mark.parametrize("unsure", [True, False])
def test_steps_of_cotta_equal_a_numpy_re_derivation(monkeypatch, episode, unsure):
    """Gradients of the student come from jax; targets, optimiser, teacher, restoring and gate are derived again."""
    steps, copies, average, restore = 5, 3, 0.9, 0.2
    method = cotta(TINY, tuning(steps=steps), augment.Strong(noise=0.1), copies, average, restore)
    variables = {**checkpoint(), "calibration": {"threshold": 2.0 if unsure else -1.0}}
    masks, seen, draw = [], [], jax.jit(restored)

    def recorded(key, params, anchor, probability):
        zeros, ones = (jax.tree.map(f, params) for f in (jnp.zeros_like, jnp.ones_like))
        masks.append(jax.tree.map(np.asarray, draw(key, zeros, ones, probability)))
        return draw(key, params, anchor, probability)

    monkeypatch.setattr(cotta_module, "restored", recorded)
    monkeypatch.setattr(cotta_module, "forward", jax.jit(cotta_module.forward, static_argnums=(0, 1)))
    monkeypatch.setattr(augment, "strong", lambda key, x, options: seen.append(key) or x * jax.random.uniform(key))
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: jnp.stack([f(x) for x in xs]))
    monkeypatch.setattr(jax.lax, "cond", lambda chosen, yes, no, *x: (yes if chosen else no)(*x))
    adapted = method.adapt(variables, episode.support, KEY)
    assert len(seen) == (steps * copies if unsure else 0) and len({str(k) for k in seen}) == len(seen)

    pixels = np.asarray(episode.support.pixels, np.float32) / 255
    anchor = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
    student, teacher, velocity = anchor, anchor, jax.tree.map(np.zeros_like, anchor)

    @jax.jit
    def logits_of(params, x):
        return TINY.apply({**checkpoint(), "params": jax.tree.map(jnp.float32, params)}, x)

    @jax.jit
    @jax.grad
    def gradient(params, target):
        return -(target * jax.nn.log_softmax(logits_of(params, pixels))).sum(-1).mean()

    for step in range(steps):
        keys = seen[step * copies : (step + 1) * copies]
        copied = [pixels * float(jax.random.uniform(key)) for key in keys] if unsure else [pixels]
        target = np.mean([logits_of(teacher, x) for x in copied], axis=0)
        target = np.exp(target - target.max(-1, keepdims=True))
        target /= target.sum(-1, keepdims=True)
        grads = gradient(jax.tree.map(np.float32, student), target)
        velocity = jax.tree.map(
            lambda v, g, p: MOMENTUM * v + np.asarray(g, np.float64) + DECAY * p, velocity, grads, student
        )
        student = jax.tree.map(lambda p, v: p - RATE * v, student, velocity)
        teacher = jax.tree.map(lambda t, s: average * t + (1 - average) * s, teacher, student)
        student = jax.tree.map(lambda s, a, m: np.where(m > 0, a, s), student, anchor, masks[step])
    assert largest_difference(adapted.student["params"], student) < 1e-5
    assert largest_difference(adapted.teacher["params"], teacher) < 1e-5
    assert largest_difference(adapted.student["params"], anchor) > 1e-3
    assert 0.15 < np.mean([m.mean() for mask in masks for m in jax.tree.leaves(mask) if m.size > 1000]) < 0.25


@pytest.mark.parametrize("statistics", ["frozen", "support"])
def test_the_threshold_is_a_quantile_of_what_the_gate_sees(statistics):
    """Of all images, or with the support's statistics of batches as large as a support; an unfilled last one is left out."""
    images, variables = make_images((16, 16, 1), 35, 3).pixels, checkpoint()
    method = cotta(TINY, tuning(statistics=statistics), QUIET, copies=1, quantile=0.25, margin=0.1, support=15)
    threshold = jax.jit(method.calibrate)(variables, images)["calibration"]["threshold"]
    batches = [TINY.apply(variables, images[i : i + 15], batch=True) for i in (0, 15)]
    plain = confidence(TINY.apply(variables, images))
    seen = plain if statistics == "frozen" else confidence(jnp.concatenate(batches))
    np.testing.assert_allclose(threshold, np.quantile(seen, 0.25) - 0.1, atol=1e-6)
    assert statistics == "frozen" or abs(threshold + 0.1 - np.quantile(plain, 0.25)) > 1e-3


def test_cotta_adapts_calibrated_variables_alone(episode):
    with pytest.raises(ValueError, match="calibrate"):
        case_of("cotta").method.adapt(checkpoint(), episode.support, KEY)


@pytest.mark.parametrize("statistics", ["frozen", "support"])
def test_the_gate_opens_where_the_checkpoint_is_unsure(episode, monkeypatch, statistics):
    """With copies that blacken the support, an open gate gives another student; the closed one does not look at them."""
    monkeypatch.setattr(augment, "strong", lambda key, pixels, options: jnp.zeros_like(pixels))
    method = cotta(TINY, tuning(steps=1, statistics=statistics), QUIET, copies=2, restore=0.0)
    mean = float(confidence(TINY.apply(checkpoint(), episode.support.pixels, batch=statistics == "support")).mean())
    adapt = jax.jit(lambda threshold: method.adapt(
        {**checkpoint(), "calibration": {"threshold": threshold}}, episode.support, KEY
    ).student["params"])  # fmt: skip
    far_below, below, above, far_above = (adapt(mean + shift) for shift in (-1.0, -1e-3, 1e-3, 1.0))
    assert largest_difference(far_below, below) < 1e-6 and largest_difference(above, far_above) < 1e-6
    assert largest_difference(below, above) > 1e-5


def test_a_teacher_with_average_one_and_no_restoring_stays(episode):
    method = build_method("cotta", cotta__average=1.0, cotta__restore=0.0, finetune__steps=1)
    adapted = adapted_by(method, episode, "cotta")
    jax.tree.map(np.testing.assert_array_equal, adapted.teacher["params"], checkpoint()["params"])
    assert largest_difference(adapted.student["params"], checkpoint()["params"]) > 1e-6


def test_all_scalars_restored_is_erm_and_both_models_answer_as_asked(episode):
    student, teacher = (
        build_method("cotta", cotta__answer=name, cotta__average=0.5, cotta__restore=1.0)
        for name in ("student", "teacher")
    )
    variables = {**checkpoint(), "calibration": {"threshold": 2.0}}
    adapted = jax.jit(student.adapt)(variables, episode.support, KEY)
    assert list(student.also) == ["teacher"] and list(teacher.also) == ["student"]
    one, two = student.predict(adapted, episode.query), teacher.predict(adapted, episode.query)
    np.testing.assert_array_equal(one, TINY.apply(checkpoint(), episode.query.pixels))
    assert np.abs(np.asarray(one - two)).max() > 1e-5
    np.testing.assert_array_equal(one, teacher.also["student"](adapted, episode.query))
    np.testing.assert_array_equal(two, student.also["teacher"](adapted, episode.query))
