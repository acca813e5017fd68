"""The training of a method on a network that stays as it is: the network first, then the method.

An adapter learns from what the network says of the images, each of which passes the network once. That takes a minute.
Other methods begin with the trunk of the network, and with its head where theirs has the same form.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.config.reading import Config, of_method, replaced
from cxda_jax.data import augment
from cxda_jax.data.episodes import Draw, Plan, check_spec, domains_for, sample_plans, split_part
from cxda_jax.data.sources import device_source
from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.training import loop
from cxda_jax.training.answers import in_batches, plain_answers
from cxda_jax.training.evaluation import TaskTable
from cxda_jax.training.experiment import Experiment
from cxda_jax.training.selection import Selection
from cxda_jax.types import Described, Images, Method, Variables

SAMPLED = 2000  # images of each kind that say how often the network is right
LITTLE = 0.02  # wrong answers; with fewer there is nothing to learn


class NetworkAccuracy(NamedTuple):
    """A network's shares of right answers: on images that it learnt from, and on those that are learnt from next."""

    learnt: float
    others: float

    def __str__(self) -> str:
        own, next_ones = f"{self.learnt:.1%} of its own images", f"{self.others:.1%} of those for the next training"
        said = (
            f"the network is right on {own}, on {next_ones}: {1 - self.others:.1%} of these are left to ask the buffer"
        )
        if 1 - self.others < LITTLE:
            said += "; warning: nothing is learnt from images known by heart; raise held_out"
        return said


def network_config(config: Config, method: Method, held_out: float) -> Config:
    """The config of the training whose network the method takes, and which leaves so much of its data out."""
    assert method.frozen
    own = of_method(config, method.frozen.trains_as, for_tests=True)
    return replaced(own, train={"held_out": held_out})


def begin(
    experiment: Experiment, state: loop.TrainState, network: Callable[[], Variables]
) -> tuple[Experiment, loop.TrainState]:
    """The experiment in which a method learns, which is another one for an adapter, and its state at step 0.

    network() gives the network that the method takes. Where it takes none, nothing changes.
    """
    if not experiment.method.frozen:
        return experiment, state
    if experiment.method.frozen.described:
        return on_descriptions(experiment, state, network())
    return experiment, on_trunk(state, network())


def network_accuracy(experiment: Experiment, network: Variables) -> NetworkAccuracy:
    """How often a network is right, by the experiment of its own training."""
    store, seed = experiment.store, experiment.config.seed
    share, found = experiment.config.train.held_out, []
    for held in (False, bool(share)):
        rows = split_part(store, share, seed, held).rows
        rows = np.sort(np.random.default_rng(seed).permutation(rows)[:SAMPLED])
        said = plain_answers(experiment, network, rows, "images that show what is left to ask")
        found.append(float((said.argmax(1) == store.labels[rows]).mean()))
    return NetworkAccuracy(*found)


def on_trunk(state: loop.TrainState, network: Variables) -> loop.TrainState:
    """The state at step 0 of a method that takes the trunk of the network, and other parts of the same form."""
    taken = {}
    for kind, new in state.variables.items():
        alike = {name: tree for name, tree in network[kind].items() if name in new and same_form(tree, new[name])}
        taken[kind] = {**new, **jax.tree.map(jnp.asarray, alike)}
    return state.replace(variables=taken)


def same_form(a: Any, b: Any) -> bool:
    return jax.tree.map(jnp.shape, a) == jax.tree.map(jnp.shape, b)


def on_descriptions(
    experiment: Experiment, state: loop.TrainState, network: Variables
) -> tuple[Experiment, loop.TrainState]:
    """The experiment in which an adapter learns, and its state at step 0.

    Its data are what the network says of the images. Its tasks are of any shares and mixture, in validation too.
    """
    config, store, method = experiment.config, experiment.store, experiment.method
    assert method.frozen and method.frozen.described
    (describe, adapter, measure), share = method.frozen.described, experiment.recipe.held_out
    if not len(store.domains("val")):
        raise UserError(f"{method.name}: {store.info.name} has no validation domains, which choose its best weights")
    learnt = split_part(store, share, config.seed, held=False).rows
    rows = split_part(store, share, config.seed, held=True).rows if share else learnt
    kept = np.sort(np.concatenate([rows, np.flatnonzero(np.isin(store.row_domains(), store.domains("val")))]))
    counts = np.bincount(store.row_domains()[kept], minlength=len(store.split))
    data = store._replace(
        labels=store.labels[kept],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        split=tuple(name if n and name != "test" else "" for name, n in zip(store.split, counts, strict=True)),
    )
    tasks, spec = experiment.schedule.tasks_per_step, experiment.recipe.spec
    draw = Draw(spec, data.offsets, domains_for(spec, data, "train")[0], config.seed, 0, data.labels)

    def train_plans(step: int) -> Plan:
        return sample_plans(draw, range(step * tasks, (step + 1) * tasks))

    variables = jax.tree.map(jnp.asarray, {k: {**state.variables[k], **network[k]} for k in network})
    describing = backend.jit(describe)
    images = in_batches(lambda pixels: describing(variables, pixels), store, kept, "images for the adapter")
    own, data = images[np.isin(kept, rows)], data._replace(images=images[:, None, None])
    learning = experiment._replace(
        store=data,
        spec=spec,
        source=device_source(data, experiment.source.mesh),
        method=adapter,
        weak=augment.Weak(crop=False, flip=False, rotate=0.0),
        train_plans=train_plans,
        example=Images(jnp.asarray(data.images[:2]), jnp.zeros(2, jnp.int32)),
    )
    held = Described(own, store.labels[rows], store.row_domains()[rows])
    return learning, state.replace(variables=measure(variables, held, store.labels[learnt]))


def selection(
    learning: Experiment,
    untrained: Variables,
    score: Callable[[Variables], float],
    tested: Callable[[Experiment, Variables], TaskTable],
) -> Selection:
    """The choice of the weights of an adapter that learns by on_descriptions().

    Args:
      learning: its experiment.
      untrained: the variables at step 0.
      score: of validation.
      tested: what an experiment with the same store finds on its validation tasks.
    """
    store, classes = learning.store, learning.store.num_classes
    even = learning.spec._replace(shares="even", mixture="even", skip_small=True)
    balanced = learning._replace(spec=even, exhaustive=False)

    def gain(variables: Variables) -> float:
        try:
            check_spec(even, store, "val")
        except UserError:
            return 0.0  # no domain has the images for it
        found = tested(balanced, variables)
        query = balanced.task_plans("val")(range(len(found.labels))).query
        plain = store.images[query, 0, 0, :classes].argmax(-1)
        counted = found.labels >= 0
        return float((found.predictions == found.labels)[counted].mean() - (plain == found.labels)[counted].mean())

    return Selection(score, gain, (untrained, score(untrained)))
