"""The training of an adapter on a network that stays as it is: the network first, then the adapter.

Each image passes the network once. The adapter then learns from what the network says of it, which takes a minute.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, train
from cxda_jax.config import Config, of_method
from cxda_jax.data.episodes import Draw, Plan, domains_for, sample_plans, split_part
from cxda_jax.data.sources import device_source
from cxda_jax.errors import UserError
from cxda_jax.experiment import Experiment, adapter_spec, episode_spec
from cxda_jax.machine import backend
from cxda_jax.progress import Counter
from cxda_jax.types import Described, Images, Method, Variables

BATCH = 200  # images that pass the network at once
LITTLE = 0.02  # wrong answers; with fewer an adapter has nothing to learn


class Right(NamedTuple):
    """The network's share of right answers on images that it learnt from, and on those that the adapter learns from."""

    learnt: float
    others: float

    def __str__(self) -> str:
        on = f"right on {self.learnt:.1%} of the images that it learnt from, on {self.others:.1%} of the adapter's"
        said = f"the network is {on}: {1 - self.others:.1%} of these are left to ask the buffer"
        if 1 - self.others < LITTLE:
            said += "; warning: an adapter learns nothing from images known by heart; raise cxda_shares.held_out"
        return said


def network_config(config: Config, method: Method) -> Config:
    """The config of the training whose network the adapter takes."""
    assert method.frozen
    own = of_method(config, method.frozen.trains_as, for_tests=True)
    return {**own, "train": {**own["train"], "held_out": config[method.name]["held_out"]}}


def on_network(
    experiment: Experiment, state: train.TrainState, network: Variables
) -> tuple[Experiment, train.TrainState, Right]:
    """The experiment in which the adapter learns, its state at step 0, and how often the network is right.

    Its data are what the network says of the images. Its tasks are of any shares and mixture, in validation too.
    """
    config, store, method = experiment.config, experiment.store, experiment.method
    assert method.frozen
    share, classes = config[method.name]["held_out"], store.num_classes
    if not len(store.domains("val")):
        raise UserError(f"{method.name}: {store.info.name} has no validation domains, which choose its best weights")
    learnt = split_part(store, share, config["seed"], held=False).rows
    rows = split_part(store, share, config["seed"], held=True).rows if share else learnt
    kept = np.sort(np.concatenate([rows, np.flatnonzero(np.isin(store.row_domains(), store.domains("val")))]))
    variables = jax.tree.map(jnp.asarray, {k: {**state.variables[k], **network[k]} for k in network})
    describe = backend.jit(method.frozen.describe)

    def described(rows: np.ndarray, what: str) -> np.ndarray:
        count, parts = Counter(f"  {what}", len(rows)), []
        for start in range(0, len(rows), BATCH):  # the last batch repeats an image, so that one program takes all
            chosen = rows[np.minimum(np.arange(start, start + BATCH), len(rows) - 1)]
            parts.append(np.asarray(describe(variables, jnp.asarray(store.images[chosen]))))
            count(min(start + BATCH, len(rows)))
        return np.concatenate(parts)[: len(rows)]

    def right(images: np.ndarray, rows: np.ndarray) -> float:
        return float((images[:, :classes].argmax(1) == store.labels[rows]).mean())

    some = np.sort(np.random.default_rng(config["seed"]).permutation(learnt)[: len(rows)])
    known, images = described(some, "images that the network learnt from"), described(kept, "images for the adapter")
    own = images[np.isin(kept, rows)]
    counts = np.bincount(store.row_domains()[kept], minlength=len(store.split))
    data = store._replace(
        images=images[:, None, None],
        labels=store.labels[kept],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        split=tuple(name if n and name != "test" else "" for name, n in zip(store.split, counts, strict=True)),
    )
    tasks, spec = experiment.schedule.tasks_per_step, adapter_spec(episode_spec(config))
    draw = Draw(spec, data.offsets, domains_for(spec, data, "train")[0], config["seed"], 0, data.labels)

    def train_plans(step: int) -> Plan:
        return sample_plans(draw, range(step * tasks, (step + 1) * tasks))

    learning = experiment._replace(
        config={**config, "episode": {**config["episode"], "shares": "any", "mixture": "any", "replacement": False}},
        store=data,
        source=device_source(data, experiment.source.mesh),
        method=method.frozen.adapter,
        weak=augment.Weak(crop=False, flip=False, rotate=0.0),
        train_plans=train_plans,
        example=Images(jnp.asarray(data.images[:2]), jnp.zeros(2, jnp.int32)),
    )
    held = Described(own, store.labels[rows], store.row_domains()[rows])
    variables = method.frozen.measure(variables, held, store.labels[learnt])
    state = state.replace(variables=variables)
    return learning, state, Right(right(known, some), right(own, rows))
