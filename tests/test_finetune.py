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
from cxda_jax.methods.finetune import FineTuning, ft_em, ft_im, sf_ocda
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


def adapted_by(method, episode, name="erm", key=KEY):
    return method.adapt(checkpoint(name), episode.support, key)


def largest_difference(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("trainable", ["all", "batch_norm"])
@pytest.mark.parametrize("statistics", ["frozen", "support"])
def test_two_steps_of_ft_em_equal_torch(peer, trainable, statistics):
    torch = peer.torch
    (shape, classes), net = FEMNIST, make_net(*FEMNIST)
    method = ft_em(net, tuning(steps=2, trainable=trainable, statistics=statistics))
    start = initialised(method, shape)
    module = peer.TorchCNN(shape[2], classes, 16)

    def error_of(seed):
        support = make_images(shape, 10, seed)
        ours = peer.torch_tensors(method.adapt(start, support, KEY)["params"])
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


@pytest.mark.parametrize("make", [ft_em, ft_im])
def test_each_step_lowers_its_own_loss(make, episode):
    loss, predict = {ft_em: entropy, ft_im: infomax}[make], case_of("erm").predict
    values = [float(loss(predict(checkpoint(), episode.support)))]
    for steps in (1, 4):
        adapted = adapted_by(build_method(make.__name__, finetune__steps=steps), episode)
        values.append(float(loss(predict(adapted, episode.support))))
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("name", TUNED)
def test_a_rate_of_zero_is_erm(name, episode):
    method = build_method(name, finetune__rate=0.0)
    logits = method.predict(adapted_by(method, episode, name), episode.query)
    np.testing.assert_array_equal(logits, TINY.apply(checkpoint(), episode.query.pixels))


@pytest.mark.parametrize("name", TUNED)
def test_statistics_of_the_support_and_only_batch_norm_trained(name, episode):
    """The statistics are those of the final weights, of which `batch_norm` moves scales and biases alone."""
    method = build_method(name, finetune__statistics="support", finetune__trainable="batch_norm")
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
    method = build_method("ft_im", finetune__steps=3)
    unrolled = adapted_by(method, episode)["params"]
    monkeypatch.setattr(backend, "unrolls_loops", lambda: False)
    close(adapted_by(method, episode)["params"], unrolled, 1e-6)


# SF-OCDA


def test_sf_ocda_without_augmentation_is_self_training(episode):
    method = build_method("sf_ocda", sf_ocda__probability=0.0, finetune__steps=3)
    variables, net = checkpoint(), TINY
    labels = net.apply(variables, episode.support.pixels).argmax(-1)
    optimizer = make_optimizer("sgd", 5e-2, 0.9, 1e-4)
    params, state = variables["params"], optimizer.init(variables["params"])
    for _ in range(3):

        def objective(p):
            log_p = jax.nn.log_softmax(net.apply({**variables, "params": p}, episode.support.pixels))
            return -(jax.nn.one_hot(labels, 4) * log_p).sum(-1).mean()

        updates, state = optimizer.update(jax.grad(objective)(params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for seed in (0, 9):
        assert largest_difference(adapted_by(method, episode, key=jax.random.key(seed))["params"], params) < 1e-6


def test_sf_ocda_draws_a_step_or_an_image_at_the_stated_rate(monkeypatch, episode):
    """Augmentation is made visible: it blackens what it touches, and a black support gives another update."""
    monkeypatch.setattr(augment, "strong", lambda key, pixels, options: jnp.zeros_like(pixels))
    count, draws = {"step": 0, "image": 0}, 60
    for draw in count:
        methods = [sf_ocda(TINY, tuning(steps=1), QUIET, probability, draw) for probability in (0.3, 0.0, 1.0)]
        adapt, never, always = (jax.jit(lambda key, m=m: adapted_by(m, episode, key=key)) for m in methods)
        never, always = never(KEY)["params"]["head"], always(KEY)["params"]["head"]
        for seed in range(draws):
            head = adapt(jax.random.key(seed))["params"]["head"]
            clean, black = largest_difference(head, never) < 1e-7, largest_difference(head, always) < 1e-7
            assert draw == "image" or clean != black
            count[draw] += not clean
    assert abs(count["step"] / draws - 0.3) < 4 * (0.21 / draws) ** 0.5
    assert count["image"] > 0.9 * draws  # that all 15 images stay clean has probability 0.005


def test_sf_ocda_unsure_images_do_not_teach(episode):
    method = build_method("sf_ocda", sf_ocda__probability=0.0)
    variables = checkpoint()
    sure = confidence(TINY.apply(variables, episode.support.pixels))
    threshold = float(np.sort(sure)[7])
    filtered = build_method("sf_ocda", sf_ocda__probability=0.0, sf_ocda__confidence=threshold - 1e-6)
    kept = jax.tree.map(lambda x: x[np.asarray(sure) >= threshold - 1e-6], episode.support)
    assert len(kept.pixels) == 8
    got = filtered.adapt(variables, episode.support, KEY)["params"]
    assert largest_difference(got, method.adapt(variables, kept, KEY)["params"]) < 1e-6
    assert largest_difference(got, method.adapt(variables, episode.support, KEY)["params"]) > 1e-5


# CoTTA


def test_restoring_follows_its_probability():
    anchor = {"a": jnp.zeros((300, 200)), "b": jnp.zeros(5000)}
    params = jax.tree.map(jnp.ones_like, anchor)
    for probability in (0.0, 0.01, 0.3, 1.0):
        back = jax.tree.map(lambda x: 1 - x, restored(KEY, params, anchor, probability))
        for leaf in back.values():
            bound = 4.5 * (probability * (1 - probability) / leaf.size) ** 0.5
            assert abs(float(leaf.mean()) - probability) <= bound
    first, second = (restored(k, params, anchor, 0.5)["b"] for k in jax.random.split(KEY))
    assert (first != second).any()


@pytest.mark.parametrize("unsure", [True, False])
def test_ten_steps_of_cotta_equal_a_numpy_re_derivation(monkeypatch, episode, unsure):
    """Gradients of the student come from jax; targets, optimiser, teacher, restoring and gate are derived again."""
    steps, copies, average, restore = 10, 3, 0.9, 0.2
    net = TINY
    method = cotta(net, tuning(steps=steps), augment.Strong(noise=0.1), copies, average, restore)
    variables = {**checkpoint(), "calibration": {"threshold": 2.0 if unsure else -1.0}}
    masks = []

    def recorded(key, params, anchor, probability):
        zeros, ones = (jax.tree.map(f, params) for f in (jnp.zeros_like, jnp.ones_like))
        masks.append(jax.tree.map(np.asarray, restored(key, zeros, ones, probability)))
        return restored(key, params, anchor, probability)

    monkeypatch.setattr(cotta_module, "restored", recorded)
    seen = []
    monkeypatch.setattr(augment, "strong", lambda key, x, options: seen.append(key) or x * jax.random.uniform(key))
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: jnp.stack([f(x) for x in xs]))
    monkeypatch.setattr(jax.lax, "cond", lambda chosen, yes, no, *x: (yes if chosen else no)(*x))
    adapted = method.adapt(variables, episode.support, KEY)
    assert len(seen) == (steps * copies if unsure else 0) and len({str(k) for k in seen}) == len(seen)

    pixels = np.asarray(episode.support.pixels, np.float32) / 255
    anchor = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
    student, teacher, velocity = anchor, anchor, jax.tree.map(np.zeros_like, anchor)

    def logits_of(params, x):
        as_float32 = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        return net.apply({"params": as_float32, "batch_stats": variables["batch_stats"]}, x)

    for step in range(steps):
        if unsure:
            keys = seen[step * copies : (step + 1) * copies]
            target = np.mean([logits_of(teacher, pixels * float(jax.random.uniform(k))) for k in keys], axis=0)
        else:
            target = np.asarray(logits_of(teacher, pixels))
        target = np.exp(target - target.max(-1, keepdims=True))
        target /= target.sum(-1, keepdims=True)
        grads = jax.grad(lambda p, t=target: -(t * jax.nn.log_softmax(logits_of(p, pixels))).sum(-1).mean())(
            jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), student)
        )
        velocity = jax.tree.map(
            lambda v, g, p: MOMENTUM * v + np.asarray(g, np.float64) + DECAY * p, velocity, grads, student
        )
        student = jax.tree.map(lambda p, v: p - RATE * v, student, velocity)
        teacher = jax.tree.map(lambda t, s: average * t + (1 - average) * s, teacher, student)
        student = jax.tree.map(lambda s, a, m: np.where(m > 0, a, s), student, anchor, masks[step])
    assert largest_difference(adapted.student["params"], student) < 1e-5
    assert largest_difference(adapted.teacher["params"], teacher) < 1e-5
    assert largest_difference(adapted.student["params"], anchor) > 1e-2
    assert 0.15 < np.mean([m.mean() for mask in masks for m in jax.tree.leaves(mask) if m.size > 1000]) < 0.25


def test_the_threshold_is_a_quantile_of_the_confidences(episode):
    method, variables = build_method("cotta"), checkpoint()
    images = make_images((16, 16, 1), 230, 3).pixels
    sure = np.asarray(jax.nn.softmax(TINY.apply(variables, images)).max(-1))
    calibrated = method.calibrate(variables, images)
    np.testing.assert_allclose(calibrated["calibration"]["threshold"], np.quantile(sure, 0.05) - 0.05, atol=1e-6)
    with pytest.raises(ValueError, match="calibrate"):
        method.adapt(variables, episode.support, KEY)


def test_the_threshold_is_taken_of_what_the_gate_sees():
    """With the support's statistics, of batches as large as a support, each with its own; an unfilled last one is left out."""
    net, images, variables = TINY, make_images((16, 16, 1), 70, 3).pixels, checkpoint()
    method = cotta(net, tuning(steps=1, statistics="support"), QUIET, copies=1, quantile=0.0, margin=0.0, support=15)
    threshold = method.calibrate(variables, images)["calibration"]["threshold"]
    by_hand = [confidence(net.apply(variables, images[i : i + 15], batch=True)) for i in range(0, 60, 15)]
    np.testing.assert_allclose(threshold, np.min(by_hand), atol=1e-6)
    assert abs(threshold - confidence(net.apply(variables, images)).min()) > 1e-3
    # A support that calibrated the threshold meets just that threshold: its mean is above its smallest, below its largest.
    for quantile, unsure in ((0.0, False), (1.0, True)):
        support = Images(images[:15], jnp.zeros(15, jnp.int32))
        students = []
        for strong in (QUIET, QUIET._replace(noise=1.0)):  # only an open gate looks at augmented copies
            options = {"copies": 1, "restore": 0.0, "quantile": quantile, "margin": 0.0, "support": 15}
            method = cotta(net, tuning(steps=1, statistics="support"), strong, **options)
            calibrated = method.calibrate(variables, images[:15])
            students.append(method.adapt(calibrated, support, KEY).student["params"])
        assert (largest_difference(*students) > 1e-5) is unsure


def test_the_gate_opens_where_the_checkpoint_is_unsure(episode, monkeypatch):
    """With copies that blacken the support, an open gate gives another student; the closed one does not look at them."""
    monkeypatch.setattr(augment, "strong", lambda key, pixels, options: jnp.zeros_like(pixels))
    method, variables = cotta(TINY, tuning(steps=2), QUIET, copies=2, restore=0.0), checkpoint()
    mean = float(confidence(TINY.apply(variables, episode.support.pixels)).mean())
    students = [
        method.adapt({**variables, "calibration": {"threshold": mean + shift}}, episode.support, KEY).student["params"]
        for shift in (-1.0, -1e-3, 1e-3, 1.0)
    ]
    assert largest_difference(students[0], students[1]) < 1e-6
    assert largest_difference(students[2], students[3]) < 1e-6
    assert largest_difference(students[1], students[2]) > 1e-5


def test_a_teacher_with_average_one_and_no_restoring_stays(episode):
    adapted = adapted_by(build_method("cotta", cotta__average=1.0, cotta__restore=0.0), episode, "cotta")
    jax.tree.map(np.testing.assert_array_equal, adapted.teacher["params"], checkpoint()["params"])
    assert largest_difference(adapted.student["params"], checkpoint()["params"]) > 1e-6


def test_all_scalars_restored_is_erm(episode):
    method = build_method("cotta", cotta__restore=1.0)
    logits = method.predict(adapted_by(method, episode, "cotta"), episode.query)
    np.testing.assert_array_equal(logits, TINY.apply(checkpoint(), episode.query.pixels))


def test_teacher_and_student_answer_as_asked(episode):
    student, teacher = (
        build_method("cotta", cotta__answer=name, cotta__average=0.5) for name in ("student", "teacher")
    )
    variables = {**checkpoint(), "calibration": {"threshold": 2.0}}
    adapted = student.adapt(variables, episode.support, KEY)
    assert list(student.also) == ["teacher"] and list(teacher.also) == ["student"]
    one, two = student.predict(adapted, episode.query), teacher.predict(adapted, episode.query)
    assert np.abs(np.asarray(one - two)).max() > 1e-5
    np.testing.assert_array_equal(one, teacher.also["student"](adapted, episode.query))
    np.testing.assert_array_equal(two, student.also["teacher"](adapted, episode.query))
