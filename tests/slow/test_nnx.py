"""The documentation's network in NNX, against plain NNX with its own train and eval mode, losses and gradients."""

import jax
import numpy as np
import optax
from flax import nnx

from cxda_jax.config.reading import default
from cxda_jax.methods.erm import bn, erm
from cxda_jax.nets.classifier import Classifier
from docs.examples.nnx_net import Layers, nnx_net
from tests.conftest import CLASSES, make_episode
from tests.nets import KEY, close, fill

WIDTH, SHAPE, SOME = 8, (16, 16, 1), 6  # of the support's images
EPISODE = jax.tree.map(np.asarray, make_episode())


class Plain(Layers):
    """Layers as NNX calls them, and a last layer."""

    def __init__(self, momentum):
        super().__init__(SHAPE[2], WIDTH, np.float32, "flax", rngs=nnx.Rngs(0))
        self.fc = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(1))
        self.bn0.momentum = self.bn1.momentum = momentum

    def __call__(self, images):
        x = (images.pixels / 255 - 0.4) / 0.2
        for conv, norm in ((self.conv0, self.bn0), (self.conv1, self.bn1)):
            x = nnx.relu(norm(conv(x)))
        return self.fc(x.mean((1, 2)))


def with_weights(variables, momentum):
    plain = Plain(momentum)
    nnx.update(plain, {**variables["params"]["trunk"]["layers"], "fc": variables["params"]["head"]["fc"]})
    nnx.update(plain, variables["batch_stats"]["trunk"]["layers"])
    return plain


def test_answers_gradients_and_statistics_equal_plain_nnx():
    net = Classifier(*nnx_net({**default().net, "width": WIDTH}, CLASSES), (0.4,), (0.2,))
    variables = fill(jax.eval_shape(erm(net).init, KEY, EPISODE.support))
    support, query = EPISODE.support, EPISODE.query
    some = jax.tree.map(lambda x: x[:SOME], support)

    @jax.jit
    def ours(variables):
        graded = jax.value_and_grad(lambda p: erm(net).loss({**variables, "params": p}, EPISODE, KEY), has_aux=True)
        (loss, aux), grads = graded(variables["params"])
        places = [None, np.arange(len(support.pixels)) < SOME, np.zeros(len(support.pixels), bool)]
        answers = [bn(net).predict(bn(net).adapt(variables, support.replace(present=p), KEY), query) for p in places]
        counted = net.apply(variables, support.pixels, SOME, mutable=["batch_stats"])[1]  # as accelerators ask
        found = grads["trunk"]["layers"], grads["head"]["fc"], aux["batch_stats"]["trunk"]["layers"]
        return loss, found, answers, net.apply({**variables, **counted}, query.pixels)

    @jax.jit
    def theirs(variables):
        def loss_of(plain):
            return optax.softmax_cross_entropy_with_integer_labels(plain(query), EPISODE.label).mean()

        def adapted_to(images):
            plain = with_weights(variables, 0.0)
            plain.train()
            plain(images)
            plain.eval()
            return plain(query)

        plain = with_weights(variables, 0.9)
        plain.eval()
        answer = plain(query)
        plain.train()
        loss, grads = nnx.value_and_grad(loss_of)(plain)
        grads, stats = nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(plain, nnx.BatchStat))
        fc = grads.pop("fc")
        return loss, (grads, fc, stats), [adapted_to(support), adapted_to(some), answer], adapted_to(some)

    found, expected = ours(variables), theirs(variables)
    close(found, expected, 1e-5)
    assert np.ptp([np.asarray(x) for x in expected[2]], axis=0).max() > 0.01, "the three answers differ"
