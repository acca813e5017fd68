"""Fine-tuning on the support, from ERM's checkpoint: FT-EM, FT-IM and SF-OCDA. They differ from ERM in adapt:

    w_t = w_{t-1} - (training optimiser, fresh, at a tenth of its rate)(gradient of L on the whole support)

FT-EM    L = mean entropy of the predictions                       (after TENT, Wang et al., 2021)
FT-IM    L = mean entropy - entropy of the mean prediction         (after SHOT, Liang et al., 2020)
SF-OCDA  L = cross-entropy of the checkpoint's own labels for the clean support, the input being augmented with
         probability 0.3                                           (after Zhao et al., 2022, as the paper uses it)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cxda_jax.config.fields import COUNT, NOT_NEGATIVE, SHARE, Field, Group, Range
from cxda_jax.data import augment
from cxda_jax.errors import UserError
from cxda_jax.losses import cross_entropy, entropy, infomax
from cxda_jax.machine import backend
from cxda_jax.methods.entry import BLUE, PURPLE, RED, Config, Entry, Style
from cxda_jax.methods.erm import blend_statistics, encode, erm
from cxda_jax.methods.optimizers import make_optimizer
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Inputs, Method, Variables

Objective = Callable[[Variables, Array], Array]  # (variables, the step's key) -> loss

FINETUNE = Group("Methods ft_em, ft_im, sf_ocda and cotta.", {
    "steps": Field(10, "Gradient steps a task.", COUNT, smoke=2),
    "rate": Field(0.1, "Share of optimizer.learning_rate.", NOT_NEGATIVE),
    "trainable": Field("all", "batch_norm: scales and biases of normalisation layers alone.",
                       choices=("all", "batch_norm")),
    "statistics": Field("frozen", "Of normalisation layers: frozen the checkpoint's; support the support's.",
                        choices=("frozen", "support")),
}, at_test=True)  # fmt: skip
SF_OCDA_FIELDS = Group("Method sf_ocda.", {
    "probability": Field(0.3, "Probability of augmented input.", SHARE),
    "draw": Field("step", "One decision for the whole support at each step, or one for each image.",
                  choices=("step", "image")),
    "confidence": Field(0.0, "Images whose largest probability is below this do not teach.",
                        Range(0, 1, (True, False))),
}, at_test=True)  # fmt: skip


class FineTuning(NamedTuple):
    """The options of fine-tuning on a support set.

    Attributes:
      optimizer: starts in a fresh state for each support set.
      steps: gradient steps, each on the whole support.
      trainable: "all", or "batch_norm" for the scales and biases of normalisation layers alone.
      statistics: "frozen": the checkpoint's normalise support and query. "support": the support's, with gradients
        through them; the query gets those of the final weights.
    """

    optimizer: optax.GradientTransformation
    steps: int = 10
    trainable: str = "all"
    statistics: str = "frozen"


def ft_em(net: Classifier, tuning: FineTuning) -> Method:
    """Fine-tuning on the entropy of the support's predictions."""
    return _on_the_clean_support(net, tuning, entropy)._replace(name="ft_em")


def ft_im(net: Classifier, tuning: FineTuning) -> Method:
    """Fine-tuning on the entropy minus that of the mean prediction."""
    return _on_the_clean_support(net, tuning, infomax)._replace(name="ft_im")


def sf_ocda(
    net: Classifier,
    tuning: FineTuning,
    strong: augment.Strong,
    probability: float = 0.3,
    draw: str = "step",
    confidence: float = 0.0,
) -> Method:
    """Fine-tuning on the checkpoint's own labels of the support.

    Args:
      net: the network, on images of 1 or 3 channels.
      tuning: the optimiser and the steps.
      strong: how the input is augmented.
      probability: of augmented input.
      draw: "step": one decision for the whole support at each step; "image": one for each image.
      confidence: support images whose largest probability in the checkpoint is below this do not teach.
    """
    augment.check_strong(strong)

    def objective_on(variables: Variables, pixels: Array) -> Objective:
        clean = augment.as_floats(pixels)
        own = forward(net, tuning, variables, clean)
        sure = jax.nn.softmax(own).max(-1) >= confidence
        labels = own.argmax(-1)

        def objective(variables: Variables, key: Array) -> Array:
            draw_key, strong_key = jax.random.split(key)
            if draw == "step":
                chosen = jax.random.bernoulli(draw_key, probability)
                pixels = jax.lax.cond(chosen, lambda: augment.strong(strong_key, clean, strong), lambda: clean)
            else:
                chosen = jax.random.bernoulli(draw_key, probability, (len(clean), 1, 1, 1))
                pixels = jnp.where(chosen, augment.strong(strong_key, clean, strong), clean)
            return cross_entropy(forward(net, tuning, variables, pixels), labels, sure if confidence else None)

        return objective

    return _descending(net, tuning, objective_on)._replace(name="sf_ocda", stochastic=True)


def _on_the_clean_support(net: Classifier, tuning: FineTuning, of_logits: Callable[[Array], Array]) -> Method:
    def objective_on(_: Variables, pixels: Array) -> Objective:
        return lambda variables, key: of_logits(forward(net, tuning, variables, pixels))

    return _descending(net, tuning, objective_on)


def _descending(net: Classifier, tuning: FineTuning, objective_on: Callable[[Variables, Array], Objective]) -> Method:
    """Fine-tuning on the objective that objective_on gives for erm's variables and the support's pixels."""

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        if not len(support.pixels):
            return variables
        objective = objective_on(variables, support.pixels)
        optimizer = trained_part(tuning, variables)

        def step(carried: Any, key: Array) -> Any:
            params, state = carried
            grads = jax.grad(lambda p: objective({**variables, "params": p}, key))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        start = (variables["params"], optimizer.init(variables["params"]))
        params, _ = repeat(step, start, jax.random.split(key, tuning.steps))
        return with_statistics(net, tuning, {**variables, "params": params}, support)

    return starting_from_erm(net, tuning)._replace(adapt=adapt)


def starting_from_erm(net: Classifier, tuning: FineTuning) -> Method:
    """erm() as the base of a method that fine-tunes erm's checkpoint."""
    return erm(net)._replace(trains_as="erm", feed_forward=False, uses_support=True)


def forward(net: Classifier, tuning: FineTuning, variables: Variables, pixels: Array) -> Any:
    """Logits [n, classes] of support images [n, h, w, c] while fine-tuning."""
    return net.apply(variables, pixels, batch=tuning.statistics == "support")


def with_statistics(net: Classifier, tuning: FineTuning, variables: Variables, support: Images) -> Variables:
    """Variables with the statistics that normalise the query."""
    if tuning.statistics == "frozen":
        return variables
    return blend_statistics(variables, encode(net, variables, support)[1], 1.0)


def trained_part(tuning: FineTuning, variables: Variables) -> optax.GradientTransformation:
    """The optimiser of the trainable parameters. The others get neither a gradient nor weight decay."""
    if tuning.trainable == "all":
        return tuning.optimizer
    normalised = {_parent(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables["batch_stats"])}
    if not normalised:
        fault = "the network has no batch normalisation to train"
        raise UserError(fault, "finetune.trainable", "batch_norm", "take 'all'")
    labels = jax.tree_util.tree_map_with_path(lambda path, _: _parent(path) in normalised, variables["params"])
    return optax.multi_transform({True: tuning.optimizer, False: optax.set_to_zero()}, labels)


def repeat(step: Callable[[Any, Array], Any], carried: Any, keys: Array) -> Any:
    """Applies carried = step(carried, key) for each of the keys [steps]."""
    if not backend.unrolls_loops():
        return jax.lax.scan(lambda carried, key: (step(carried, key), None), carried, keys)[0]
    for key in keys:
        carried = step(carried, key)
    return carried


def _parent(path: Any) -> str:
    return jax.tree_util.keystr(path[:-1])


def build_tuning(config: Config) -> FineTuning:
    """The options that a config asks for. The optimiser is that of the training, at a share of its rate."""
    training, tuning = config.optimizer, config.finetune
    if not (rate := training.learning_rate * tuning.rate) < math.inf:
        fault = f"times optimizer.learning_rate={training.learning_rate} it is infinite"
        raise UserError(fault, "finetune.rate", tuning.rate, "lower one of them")
    optimizer = make_optimizer(**{**training, "learning_rate": rate})
    return FineTuning(optimizer, tuning.steps, tuning.trainable, tuning.statistics)


def _sf_ocda(config: Config, inputs: Inputs) -> Method:
    strong = augment.Strong(**config.strong)
    return sf_ocda(build_net(config, inputs), build_tuning(config), strong, **config.sf_ocda)


FT_EM = Entry(
    lambda config, inputs: ft_em(build_net(config, inputs), build_tuning(config)),
    {"finetune": FINETUNE},
    style=Style(BLUE, "v", (3, 3), open=True),
    varied=True,
)
FT_IM = FT_EM._replace(
    build=lambda config, inputs: ft_im(build_net(config, inputs), build_tuning(config)),
    style=Style(PURPLE, "<", (3, 1.5, 1, 1.5, 1, 1.5), open=True),
)
_GROUPS = {"finetune": FINETUNE, "strong": augment.STRONG, "sf_ocda": SF_OCDA_FIELDS}
SF_OCDA = Entry(_sf_ocda, _GROUPS, Style(RED, ">", (6, 5), open=True))
