"""ICRM: its transformer against PyTorch's layers, what each image sees, and what a step teaches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.config import load
from cxda_jax.evaluation import compile_task, evaluate
from cxda_jax.experiment import build_on
from cxda_jax.methods.icrm import append, draw_order, icrm, with_transformer
from cxda_jax.nets.transformer import CausalTransformer
from docs.examples.order_spread import spread
from tests.lines import refused
from tests.nets import (
    CIFAR,
    FEMNIST,
    KEY,
    assert_close,
    close,
    fill,
    initialised,
    make_episode,
    make_net,
    tensor,
    total,
)

SMALL = {"width": 16, "layers": 3, "heads": 4, "context": 10}
TOKENS = jnp.asarray(np.random.default_rng(3).normal(size=(14, 12)), jnp.float32)  # more than a sequence and the next


@pytest.fixture(scope="module")
def net():
    return CausalTransformer(**SMALL)


@pytest.fixture(scope="module")
def variables(net):
    """Larger weights than initial ones, so that the context matters."""
    return jax.tree.map(lambda x: 3 * x, fill(jax.eval_shape(lambda: net.init(KEY, TOKENS, SMALL["context"]))))


class Peer:
    """The transformer made of PyTorch's own encoder layers, with weights of ours."""

    def __init__(self, torch, params):
        self.torch, self.named = torch, {}
        width, heads = SMALL["width"], SMALL["heads"]
        self.layers = [
            torch.nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 1e-5,
                batch_first=True, norm_first=True,
            )
            for _ in range(SMALL["layers"])
        ]  # fmt: skip
        self.read_in, self.norm = torch.nn.Linear(TOKENS.shape[1], width), torch.nn.LayerNorm(width, 1e-5)
        self.position = torch.nn.Parameter(torch.zeros(SMALL["context"] + 1, width))
        for i, layer in enumerate(self.layers):
            of_layer = jax.tree.map(lambda x, i=i: x[i], params["blocks"])
            places = {
                "norm1": layer.norm1, "norm2": layer.norm2, "out": layer.self_attn.out_proj, "hidden": layer.linear1,
                "shrink": layer.linear2,
            }  # fmt: skip
            for name, place in places.items():
                self._take((name, i), of_layer[name], place.weight, place.bias)
            self._take(("attend", i), of_layer["attend"], layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)
        self._take(("read_in", None), params["read_in"], self.read_in.weight, self.read_in.bias)
        self._take(("norm", None), params["norm"], self.norm.weight, self.norm.bias)
        self._fill(("position", None, ""), params["position"], self.position)

    def _take(self, key, ours, weight, bias):
        kernel = "kernel" if "kernel" in ours else "scale"
        self._fill((*key, kernel), ours[kernel], weight)
        self._fill((*key, "bias"), ours["bias"], bias)

    def _fill(self, key, ours, theirs):
        with self.torch.no_grad():
            theirs.copy_(tensor(ours).T if key[-1] == "kernel" else tensor(ours))
        self.named[key] = theirs

    def __call__(self, tokens):
        """A sequence [n, d] to features [n, width]."""
        x = (self.read_in(tensor(tokens)) + self.position[: len(tokens)])[None]
        hidden = self.torch.nn.Transformer.generate_square_subsequent_mask(len(tokens))
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        return self.norm(x)[0]

    def weights(self, tokens):
        """Of the last token on those before it [heads, n - 1], the mean over the layers, by PyTorch's own attention."""
        x, found = (self.read_in(tensor(tokens)) + self.position[: len(tokens)])[None], []
        hidden = self.torch.nn.Transformer.generate_square_subsequent_mask(len(tokens))
        for layer in self.layers:
            y = layer.norm1(x)
            found.append(layer.self_attn(y, y, y, attn_mask=hidden, average_attn_weights=False)[1][0, :, -1, :-1])
            x = layer(x, src_mask=hidden)
        return self.torch.stack(found).mean(0)

    def errors(self, grads):
        """The largest difference of each parameter's gradient, relative to the largest of PyTorch's."""
        for (name, layer, kind), parameter in self.named.items():
            ours = grads["blocks"][name] if layer is not None else grads[name]
            ours = np.asarray(ours[kind] if kind else ours)
            ours = ours if layer is None else ours[layer]
            theirs = parameter.grad.numpy()
            yield np.abs((ours.T if kind == "kernel" else ours) - theirs).max() / np.abs(theirs).max()


def test_features_and_gradients_equal_torchs_encoder_layers(peer, net, variables):
    """A sequence, and images of which each stands alone behind it."""
    torch, length = peer.torch, SMALL["context"]
    theirs = Peer(torch, variables["params"])
    sequence, others = TOKENS[:length], TOKENS[length:]
    expected = torch.cat([theirs(sequence), *(theirs(jnp.concatenate([sequence, t[None]]))[-1:] for t in others)])
    features = jax.jit(lambda v: net.apply(v, TOKENS, length))(variables)
    assert_close(features, expected.detach(), 1e-5)
    weights = np.random.default_rng(5).normal(size=features.shape).astype(np.float32)
    (expected * torch.from_numpy(weights)).sum().backward()
    grads = jax.jit(jax.grad(lambda v: (net.apply(v, TOKENS, length) * weights).sum()))(variables)["params"]
    assert len(theirs.named) == 12 * SMALL["layers"] + 5 and max(theirs.errors(grads)) < 1e-4


def test_weights_equal_torchs_attention(peer, net, variables):
    theirs, cache = Peer(peer.torch, variables["params"]), net.apply(variables, TOKENS[:6], method="encode")
    weights = net.apply(variables, TOKENS[7:9], cache, method="weights")
    assert weights.shape == (2, SMALL["heads"], SMALL["context"]) and not weights[..., 6:].any()
    for i in (0, 1):
        assert_close(weights[i, :, :6], theirs.weights(TOKENS[jnp.array([0, 1, 2, 3, 4, 5, 7 + i])]).detach(), 1e-5)


def test_a_cached_sequence_answers_as_the_whole_pass_at_every_length(net, variables):
    """Images come one by one, and two programs serve all lengths."""
    traced, length = [], SMALL["context"]

    def compiled(name):
        def called(*arguments):
            traced.append(name)
            return net.apply(variables, *arguments, method=name)

        return jax.jit(called)

    following, append_to, encode = compiled("next"), compiled("append"), compiled("encode")
    whole = jax.jit(lambda tokens: net.apply(variables, tokens, length))(TOKENS)
    cache, traced[:] = encode(TOKENS[:0]), []
    for n in range(length):
        close(following(TOKENS[n : n + 4], cache)[0], whole[n])
        cache = append_to(TOKENS[n], cache)
    close(following(TOKENS[length:], cache), whole[length:])
    assert traced == ["next", "append"] and cache.held.all()
    jax.tree.map(np.testing.assert_array_equal, append_to(TOKENS[11], cache), cache)  # it is full
    close(encode(TOKENS[:length]), cache)


def test_an_image_sees_the_images_before_it_alone_bit_for_bit(net, variables):
    features = jax.jit(lambda tokens: net.apply(variables, tokens, 9))
    before, places = features(TOKENS), np.arange(len(TOKENS))
    for i in places:
        changed = np.asarray(jnp.abs(features(TOKENS.at[i].add(1.0)) - before).max(-1))
        sees = (places == i) | (places > i if i < 9 else False)
        assert (changed[~sees] == 0).all() and (changed[sees] > 1e-4).all(), i


def test_what_is_beyond_the_length_of_a_cache_is_not_read(net, variables):
    cache = jax.jit(lambda tokens: net.apply(variables, tokens, method="encode"))(TOKENS[:4])
    other = cache._replace(keys=cache.keys.at[:, 4:].set(7.0), values=cache.values.at[:, 4:].set(-7.0))
    following = jax.jit(lambda cache: net.apply(variables, TOKENS[4:6], cache, method="next"))
    np.testing.assert_array_equal(following(cache), following(other))


def test_a_new_transformer_begins_as_published():
    """Uniform kernels of variance 2 / (inputs + outputs), zero biases, each layer with its own draw."""
    params = jax.jit(lambda: CausalTransformer(64, 4, 4, 50).init(KEY, TOKENS, 9)["params"])()
    for name, fans in (("attend", 64 + 192), ("out", 64 + 64), ("hidden", 64 + 256), ("shrink", 256 + 64)):
        kernel = params["blocks"][name]["kernel"]
        assert float(kernel.var() * fans) == pytest.approx(2, rel=0.05)
        assert float(jnp.abs(kernel).max()) <= (6 / fans) ** 0.5
        assert len({float(layer.sum()) for layer in kernel}) == 4 and not params["blocks"][name]["bias"].any()
    assert float(params["position"].var() * (51 + 64)) == pytest.approx(2, rel=0.1)
    assert not params["read_in"]["bias"].any()


# The method


def make(shape=FEMNIST[0], classes=FEMNIST[1], **options):
    net = with_transformer(make_net(shape, classes, 8), **SMALL | options)
    return net, icrm(net)


class Example(NamedTuple):
    """A method with weights, an episode, and its functions, compiled."""

    net: Any
    method: Any
    variables: Any
    episode: Any
    adapt: Any
    add: Any

    def of_none(self, variables):
        """What it adapts to before there is any image."""
        return self.adapt(variables, jax.tree.map(lambda x: x[:0], self.episode.support), KEY)


@pytest.fixture(scope="module")
def example():
    net, method = make()
    add = jax.jit(lambda adapted, image: append(net, adapted, image))
    episode = make_episode(*FEMNIST, support=8, query=5)
    return Example(net, method, initialised(method, FEMNIST[0]), episode, jax.jit(method.adapt), add)


def test_a_step_teaches_each_image_from_those_before_it_as_they_would_be_answered(example):
    """The loss is that of answers to a support that grows by one image at a time; the queries come after all of it."""
    net, method, variables, episode, *_ = example
    loss, aux = jax.jit(method.loss)(variables, episode, KEY)
    order = np.asarray(draw_order(KEY, episode.support, SMALL["context"]))
    assert sorted(order) == list(range(8)) and list(order) != sorted(order)
    pixels = jnp.concatenate([episode.support.pixels, episode.query.pixels])
    exact = jax.jit(lambda pixels: net.apply(variables, pixels, True, mutable=["batch_stats"], method="map")[1])(pixels)
    adapted = example.of_none({**variables, **exact})  # by the episode's own statistics, as the step
    predict = jax.jit(method.predict)
    rows, labels = [], [*np.asarray(episode.support_label)[order], *np.asarray(episode.label)]
    for i in order:
        rows.append(predict(adapted, jax.tree.map(lambda x, i=i: x[i : i + 1], episode.support)))
        adapted = example.add(adapted, episode.support.pixels[i])
    rows.append(predict(adapted, episode.query))
    close(aux["logits"], rows[-1])
    logits = np.concatenate(rows).astype(np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(13), labels]
    assert float(loss) == pytest.approx(losses.mean(), rel=1e-5)
    moved = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, variables["batch_stats"], exact["batch_stats"])
    close(aux["batch_stats"], moved)


def test_images_that_come_one_by_one_give_what_the_whole_support_gives(example):
    support = example.episode.support
    whole, adapted = example.adapt(example.variables, support, KEY), example.of_none(example.variables)
    for i in draw_order(KEY, support, SMALL["context"]):
        adapted = example.add(adapted, support.pixels[i])
    close(adapted.cache, whole.cache)
    jax.tree.map(np.testing.assert_array_equal, adapted.variables, example.variables)


def test_of_a_support_larger_than_the_context_a_random_choice_counts():
    _, method = make()
    support = make_episode(*FEMNIST, support=25).support
    variables = initialised(method, FEMNIST[0])
    adapt = jax.jit(method.adapt)
    whole, chosen = adapt(variables, support, KEY), np.asarray(draw_order(KEY, support, 10))
    assert len(set(chosen)) == 10 and chosen.max() >= 10 and whole.cache.held.all()
    left_out = np.setdiff1d(np.arange(25), chosen)
    hidden = support.replace(pixels=support.pixels.at[left_out].set(0.5))
    jax.tree.map(np.testing.assert_array_equal, adapt(variables, hidden, KEY).cache, whole.cache)
    seen = support.replace(pixels=support.pixels.at[chosen[0]].set(0.5))
    assert float(jnp.abs(adapt(variables, seen, KEY).cache.keys - whole.cache.keys).max()) > 1e-4
    episode = make_episode(*FEMNIST, support=25)
    assert np.isfinite(jax.jit(method.loss)(variables, episode, KEY)[0])


def test_of_more_places_than_the_context_the_last_images_count():
    _, method = make()
    support = make_episode(*FEMNIST, support=25).support
    variables, places = initialised(method, FEMNIST[0]), np.arange(25)
    present = (places % 3 != 1) & (places > 1)  # 15 of 25
    adapt, predict = jax.jit(method.adapt), jax.jit(method.predict)
    whole = adapt(variables, support.replace(present=jnp.asarray(present)), KEY)
    chosen = np.flatnonzero(present)[-SMALL["context"] :]
    assert np.flatnonzero(whole.cache.held).tolist() == chosen.tolist()
    alone = support.replace(pixels=support.pixels[chosen], domain=support.domain[chosen], present=jnp.ones(10, bool))
    close(*(predict(x, support) for x in (whole, adapt(variables, alone, KEY))))


def test_attention_is_in_the_order_of_the_support():
    _, method = make()
    support = make_episode(*FEMNIST, support=14).support
    variables, order = initialised(method, FEMNIST[0]), draw_order(KEY, support, SMALL["context"])
    weights = method.attention(method.adapt(variables, support, KEY), support)
    drawn = support.replace(pixels=support.pixels[order], domain=support.domain[order], present=jnp.ones(10, bool))
    close(weights[..., order], method.attention(method.adapt(variables, drawn, KEY), support))
    left_out = np.setdiff1d(np.arange(14), order)
    assert len(left_out) == 4 and not weights[..., left_out].any() and weights.shape[-1] == 14


@pytest.mark.parametrize(("benchmark", "features", "token"), [(FEMNIST, "flat", 4 * 4 * 8), (CIFAR, "pool", 8)])
def test_parameter_counts(benchmark, features, token):
    """Those of GPT-2 beside the trunk's, at the published size: 2.4 million."""
    (shape, classes), images = benchmark, make_episode(*benchmark).support
    _, method = make(shape, classes, features=features, width=128, layers=12, heads=4, context=100)
    params = jax.eval_shape(method.init, KEY, images)["params"]
    assert set(params) == {"trunk", "transformer", "head"}
    block = 12 * 128**2 + 13 * 128  # attention 4, MLP 8 matrices; their biases, and two layer normalisations
    assert total(params["transformer"]) == 12 * block + 101 * 128 + 2 * 128 + token * 128 + 128
    assert total(params["head"]) == 128 * classes + classes


@pytest.mark.parametrize(("options", "says"), [
    ({"heads": 3}, "heads=3 does not divide width=16; choose a divisor"), ({"layers": 0}, "layers=0 must be at least 1"),
    ({"context": 0}, "context=0 must be at least 1"), ({"features": "patch"}, "features='patch' is unknown; .*flat, pool"),
])  # fmt: skip
def test_wrong_options_are_named(options, says):
    with refused(f"^(icrm.)?{says}"):
        make(**options)


def test_the_spread_over_draws_is_of_equal_tasks(fixed_store):
    """Of answers at random among 4 classes three quarters change; of a method that draws nothing, none."""
    changes = {"episode.num_domains": "3", "episode.per_domain": "4", "episode.num_query": "5"}
    experiment = build_on(load("configs/glyphs.py:erm,smoke", list(changes.items())), fixed_store, ("test",))
    guess = experiment.method._replace(
        adapt=lambda variables, support, key: key,
        predict=lambda key, query: jax.random.normal(key, (len(query.pixels), 4)),
        stochastic=True,
    )
    variables, tasks = jax.jit(guess.init)(KEY, experiment.example), experiment.task_plans("test")
    for method, changed in ((guess, 0.75), (experiment.method, 0.0)):
        found = spread(experiment._replace(method=method), variables, draws=3, num_tasks=100)
        evaluator = compile_task(method, experiment.source)
        usual = evaluate(evaluator, variables, experiment.source, tasks, 100, "accuracy")
        assert found.means[0] == pytest.approx(usual.mean)
        assert found.changed == pytest.approx(changed, abs=0.07) and (found.by_task > 1e-6) is (changed > 0)
