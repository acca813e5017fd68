"""CoTTA (Wang et al., 2022): fine-tuning on the support towards a teacher, from ERM's checkpoint. At each step

    L = CE(softmax(teacher's logits), student)     the teacher's logits are the mean over augmented copies of the
                                                   support if the checkpoint is unsure of the clean support, else
                                                   those of it
    student <- a training step on L;  teacher <- a teacher + (1 - a) student
    every scalar of the student <- the checkpoint's with probability p

Unsure means that the mean confidence is below a threshold. calibrate() takes the threshold from the checkpoint's
confidences on training images. They are normalised as the support is: by the checkpoint's statistics, or in batches
by their own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cxda_jax.config.fields import COUNT, SHARE, Field, Group, Range
from cxda_jax.data import augment
from cxda_jax.losses import consistency
from cxda_jax.methods.entry import ORANGE, Config, Entry, Style
from cxda_jax.methods.erm import calibrated
from cxda_jax.methods.finetune import (
    FINETUNE,
    FineTuning,
    build_tuning,
    forward,
    repeat,
    starting_from_erm,
    trained_part,
    with_statistics,
)
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Inputs, Known, Method, Variables

COTTA_FIELDS = Group("Method cotta.", {
    "copies": Field(32, "Augmented copies that the teacher averages over.", COUNT, smoke=2),
    "average": Field(0.999, "The teacher keeps this share of itself at each step.", SHARE),
    "restore": Field(0.01, "Share of weights that return to the checkpoint's at each step.", SHARE),
    "quantile": Field(0.05, "The threshold is this quantile of the confidences on training images ...", SHARE),
    "margin": Field(0.05, "... minus this.", Range(-1, 1)),
    "answer": Field("student", "Whose predictions count.", choices=("student", "teacher")),
}, at_test=True)  # fmt: skip


class StudentAndTeacher(NamedTuple):
    """The two models that cotta adapts. One of them answers."""

    student: Variables
    teacher: Variables


class Teaching(NamedTuple):
    """The fields of cotta().

    Attributes:
      copies: augmented copies that the teacher averages over.
      average: a above, the share of itself that the teacher keeps at each step.
      restore: p above, the share of weights that return to the checkpoint's at each step.
      quantile: the threshold is this quantile of the confidences on training images ...
      margin: ... minus this.
      answer: "student" or "teacher", whose predictions count; the other's are in Method.also.
    """

    copies: int = 32
    average: float = 0.999
    restore: float = 0.01
    quantile: float = 0.05
    margin: float = 0.05
    answer: str = "student"


def cotta(
    net: Classifier, tuning: FineTuning, strong: augment.Strong, teaching: Teaching, support: int = 100
) -> Method:
    """CoTTA, which starts from the checkpoint of erm.

    Args:
      net: the network, on images of 1 or 3 channels.
      support: images of a support set. calibrate() takes batches of this size, and where batches have statistics of
        their own it leaves out a smaller last batch.
    """
    copies, average, restore, quantile, margin, answer = teaching
    augment.check_strong(strong)

    def calibrate(variables: Variables, known: Known) -> Variables:
        images, size = known.images, min(support, len(known.images))
        whole = images[: len(images) // size * size]
        batches = whole.reshape(-1, size, *images.shape[1:])
        confidences = jax.lax.map(lambda batch: confidence(forward(net, tuning, variables, batch)), batches).ravel()
        rest = images[len(whole) :]
        if len(rest) and tuning.statistics == "frozen":  # an image's confidence does not depend on its batch
            confidences = jnp.concatenate([confidences, confidence(forward(net, tuning, variables, rest))])
        return {**variables, "calibration": {"threshold": jnp.quantile(confidences, quantile) - margin}}

    def adapt(variables: Variables, support: Images, key: Array) -> StudentAndTeacher:
        source, kept = calibrated("cotta", variables)
        if not len(support.pixels):
            return StudentAndTeacher(source, source)
        clean, anchor = augment.as_floats(support.pixels), source["params"]
        # Neither the checkpoint nor the support changes, so one decision holds for all steps.
        unsure = confidence(forward(net, tuning, source, clean)).mean() < kept["threshold"]
        optimizer = trained_part(tuning, source)

        def logits_of(params: Any, pixels: Array) -> Any:
            return forward(net, tuning, {**source, "params": params}, pixels)

        def averaged(teacher: Any, key: Array) -> Array:
            keys = jax.random.split(key, copies)
            return jax.lax.map(lambda key: logits_of(teacher, augment.strong(key, clean, strong)), keys).mean(0)

        def step(carried: Any, key: Array) -> Any:
            student, teacher, state = carried
            augment_key, restore_key = jax.random.split(key)
            target = jax.lax.cond(unsure, averaged, lambda params, _: logits_of(params, clean), teacher, augment_key)
            grads = jax.grad(lambda params: consistency(logits_of(params, clean), target))(student)
            updates, state = optimizer.update(grads, state, student)
            student = optax.apply_updates(student, updates)
            teacher = jax.tree.map(lambda t, s: average * t + (1 - average) * s, teacher, student)
            return restored(restore_key, student, anchor, restore), teacher, state

        models = repeat(step, (anchor, anchor, optimizer.init(anchor)), jax.random.split(key, tuning.steps))[:2]
        return StudentAndTeacher(*(with_statistics(net, tuning, {**source, "params": p}, support) for p in models))

    other = "student" if answer == "teacher" else "teacher"
    base = starting_from_erm(net, tuning)._replace(predict=answer_of(net, answer), also={other: answer_of(net, other)})
    return base._replace(name="cotta", adapt=adapt, calibrate=calibrate, stochastic=True)


def answer_of(net: Classifier, model: str) -> Any:
    """The predict() of "student" or "teacher"."""
    return lambda adapted, query: net.apply(getattr(adapted, model), query.pixels)


def confidence(logits: Array) -> Array:
    """Logits [n, classes] to the largest probability of each image, [n]."""
    return jax.nn.softmax(logits).max(-1)


def restored(key: Array, params: Any, anchor: Any, probability: float) -> Any:
    """The tree `params`, in which each scalar is replaced by the one of `anchor` with this probability."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.tree.unflatten(tree, jax.random.split(key, len(leaves)))

    def drawn(key: Array, own: Array, other: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key, probability, own.shape), other, own)

    return jax.tree.map(drawn, keys, params, anchor)


def _build(config: Config, inputs: Inputs) -> Method:
    support = config.episode.num_domains * config.episode.per_domain
    strong, teaching = augment.Strong(**config.strong), Teaching(**config.cotta)
    return cotta(build_net(config, inputs), build_tuning(config), strong, teaching, support)


_GROUPS = {"finetune": FINETUNE, "strong": augment.STRONG, "cotta": COTTA_FIELDS}
COTTA = Entry(_build, _GROUPS, Style(ORANGE, "d", (6, 1.5, 3, 1.5), open=True))
