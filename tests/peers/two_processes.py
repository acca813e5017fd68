"""One of several processes that train together on a store, save and restore: python two_processes.py STORE WHICH HOW_MANY PORT OUT"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax

from cxda_jax import augment, train
from cxda_jax.data.episodes import EpisodeSpec, sample_plans
from cxda_jax.data.sources import tfdata_source
from cxda_jax.data.store import open_store
from cxda_jax.disk import checkpoints
from cxda_jax.methods.erm import bn
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.types import Images

STEPS, TASKS = 3, 2


def main(path, which, count, port, out):
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, which)
    store, spec = open_store(path), EpisodeSpec(num_domains=2, per_domain=2, num_query=3)
    source, tx = tfdata_source(store), optax.sgd(1e-2, 0.9)
    method = bn(Classifier(CNNTrunk(2, convs=2), CNNHead(4, 4), (0.5,), (0.5,)))

    def plan_of(step):
        return sample_plans(spec, store.offsets, store.domains("train"), 0, range(step * TASKS, (step + 1) * TASKS))

    example, plain = Images(store.images[:2], np.zeros(2, np.int32)), augment.Weak(crop=False, rotate=0.0)
    # A state that is laid out as the step gives it, or the second step would be compiled too.
    everywhere = jax.NamedSharding(jax.sharding.Mesh(jax.devices(), ("tasks",)), jax.P())
    state = jax.jit(lambda: train.init_state(method, tx, 0, example), out_shardings=everywhere)()
    step = jax.jit(lambda *inputs: train.train_step(method, tx, plain, *inputs), out_shardings=everywhere)
    for batch in source.batches(plan_of, 0, STEPS):
        state, measured = step(state, source.assemble((), batch), jax.random.key(0))
    if which == 0:
        np.savez(out, *map(whole, jax.tree.leaves((state.variables, measured))))
    with checkpoints.Folder(Path(out).with_suffix("")) as folder:
        folder.save(STEPS, state.variables, {"count": count})
    restored, notes = checkpoints.restore(folder.path, state.variables)
    assert notes == {"count": count}
    print(*(checkpoints.weights_hash(jax.tree.map(whole, tree)) for tree in (state.variables, restored)))


def whole(x):
    return np.asarray(x.addressable_data(0))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
