"""ICRM: its transformer against PyTorch's layers, what each image sees, and what a step teaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.icrm import append, draw_order, icrm, with_transformer
from cxda_jax.nets.transformer import CausalTransformer
from tests import nets
from tests.nets import FEMNIST, KEY, assert_close, close, fill, make_episode, tensor, torch_named

SMALL = {"width": 16, "layers": 3, "heads": 4, "context": 10}
# The method, with 14 support images of which its context holds 10.
BUILT = with_transformer(nets.make_net(*FEMNIST, 8), **SMALL)
METHOD = icrm(BUILT)


def test_the_layer_that_reads_out_starts_as_published():
    last = jax.device_get(jax.jit(METHOD.init)(KEY, nets.make_images((28, 28, 1), 2)))["params"]["head"]["fc"]
    reach = (6 / (SMALL["width"] + FEMNIST[1])) ** 0.5  # Xavier's
    assert 0.95 * reach < np.abs(last["kernel"]).max() <= reach and not last["bias"].any()


LENGTH = SMALL["context"]
NET = CausalTransformer(**SMALL)
TOKENS = np.random.default_rng(3).normal(size=(14, 12)).astype(np.float32)  # more than a sequence and the next
apply = jax.jit(NET.apply, static_argnames=("length", "method"))


@pytest.fixture(scope="module")
def known():
    """Larger weights than initial ones, so that the context matters."""
    shapes = jax.eval_shape(lambda: NET.init(KEY, jnp.asarray(TOKENS), LENGTH))
    return jax.tree.map(lambda x: jax.device_put(3 * np.asarray(x)), fill(shapes))


def torch_names(tree):
    """Parameters or gradients of the transformer, by the names of PyTorch's layers."""
    places = {"out": "self_attn.out_proj", "attend": "self_attn.in_proj", "hidden": "linear1", "shrink": "linear2"}
    found = torch_named({name: tree[name] for name in ("read_in", "norm")})
    for i in range(SMALL["layers"]):
        block = jax.tree.map(lambda x, i=i: np.asarray(x)[i], dict(tree["blocks"]))
        found |= torch_named(block, lambda layers, i=i: f"layers.{i}.{places.get(layers[0], layers[0])}")
    return {name.replace("in_proj.", "in_proj_"): x for name, x in found.items()} | {"place": tensor(tree["position"])}


@pytest.fixture(scope="module")
def theirs(known):
    """PyTorch's own encoder layers, with weights of ours."""
    torch = pytest.importorskip("torch")
    width = SMALL["width"]
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    options = {"layer_norm_eps": 1e-5, "batch_first": True, "norm_first": True}
    layer = functools.partial(torch.nn.TransformerEncoderLayer, width, SMALL["heads"], 4 * width, 0.0, gelu, **options)
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(layer() for _ in range(SMALL["layers"]))
    module.norm = torch.nn.LayerNorm(width, 1e-5)
    module.read_in = torch.nn.Linear(TOKENS.shape[1], width)
    module.place = torch.nn.Parameter(torch.zeros(LENGTH + 1, width))
    module.load_state_dict(torch_names(known["params"]))
    return module


def read(module, tokens):
    """The features of a sequence; and weights of its last token on those before it, the means over the layers."""
    from torch import nn, stack

    x, found = (module.read_in(tensor(tokens)) + module.place[: len(tokens)])[None], []
    hidden = nn.Transformer.generate_square_subsequent_mask(len(tokens))
    for layer in module.layers:
        y = layer.norm1(x)
        found.append(layer.self_attn(y, y, y, attn_mask=hidden, average_attn_weights=False)[1][0, :, -1, :-1])
        x = layer(x, src_mask=hidden)
    return module.norm(x)[0], stack(found).mean(0)


def test_features_gradients_and_weights_equal_torchs_encoder_layers(theirs, known):
    """Of a sequence, and of images of which each stands alone behind it."""
    ends = [read(theirs, np.append(TOKENS[:LENGTH], t[None], 0))[0][-1:] for t in TOKENS[LENGTH:]]
    expected = [*read(theirs, TOKENS[:LENGTH])[0][:, None], *ends]
    factors = np.random.default_rng(5).normal(size=(len(TOKENS), 1, SMALL["width"])).astype(np.float32)
    sum((x * tensor(f)).sum() for x, f in zip(expected, factors, strict=True)).backward()

    def objective(variables):
        features = NET.apply(variables, TOKENS, LENGTH)
        return (features * factors[:, 0]).sum(), features

    (_, features), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(known)
    assert_close(features, np.concatenate([x.detach() for x in expected]), 1e-5)
    grads, named = torch_names(grads["params"]), dict(theirs.named_parameters())
    assert grads.keys() == named.keys() and len(named) == 12 * SMALL["layers"] + 5
    for name, parameter in named.items():  # relative to the largest of PyTorch's
        assert (grads[name] - parameter.grad).abs().max() < 1e-4 * parameter.grad.abs().max(), name
    weights = np.asarray(apply(known, TOKENS[7:9], apply(known, TOKENS[:6], method="encode"), method="weights"))
    assert weights.shape == (2, SMALL["heads"], LENGTH) and not weights[..., 6:].any()
    for i in (0, 1):
        assert_close(weights[i, :, :6], read(theirs, TOKENS[[*range(6), 7 + i]])[1].detach(), 1e-5)


def test_a_cached_sequence_answers_as_the_whole_pass_at_every_length(known):
    """Images come one by one, and two programs serve all lengths."""
    following, append_to = (jax.jit(functools.partial(NET.apply, known, method=name)) for name in ("next", "append"))
    whole = np.asarray(apply(known, TOKENS, length=LENGTH))
    cache = jax.tree.map(np.asarray, apply(known, TOKENS[:0], method="encode"))
    for n in range(LENGTH):
        close(following(TOKENS[n : n + 4], cache)[0], whole[n])
        cache = jax.tree.map(np.asarray, append_to(TOKENS[n], cache))
    close(following(TOKENS[LENGTH:], cache), whole[LENGTH:])
    assert [program._cache_size() for program in (following, append_to)] == [1, 1] and cache.held.all()
    jax.tree.map(np.testing.assert_array_equal, append_to(TOKENS[11], cache), cache)  # it is full
    few = apply(known, TOKENS[:3], np.ones(3, bool), method="encode")  # which has no place to spare
    for_two = functools.partial(apply, known, TOKENS[4:6], method="next")
    close(for_two(append_to(TOKENS[3], few)), for_two(apply(known, TOKENS[:4], method="encode")))
    close(apply(known, TOKENS[:LENGTH], method="encode"), cache)


EPISODE = jax.tree.map(np.asarray, make_episode(*FEMNIST, support=14, query=5))
SUPPORT = EPISODE.support
adapt, predict, attention = (jax.jit(f) for f in (METHOD.adapt, METHOD.predict, METHOD.attention))


@pytest.fixture(scope="module")
def variables():
    return nets.initialised(METHOD, FEMNIST[0])


@pytest.fixture(scope="module")
def order():
    """In which the support is read."""
    order = np.asarray(draw_order(KEY, SUPPORT, LENGTH))
    assert len(set(order)) == 10 and order.max() >= 10 and list(order) != sorted(order)
    return order


def rows_of(images, rows):
    return jax.tree.map(lambda x: x[rows], images)


def test_a_step_teaches_each_image_from_those_before_it_as_they_would_be_answered(variables, order):
    """The loss is that of answers to a support that grows by one image at a time; the queries come after all of it."""
    loss, aux = jax.jit(METHOD.loss)(variables, EPISODE, KEY)
    pixels = np.concatenate([SUPPORT.pixels[order], EPISODE.query.pixels])
    own = jax.jit(lambda pixels: BUILT.apply(variables, pixels, True, mutable=["batch_stats"], method="map")[1])(pixels)
    add = jax.jit(lambda adapted, image: append(BUILT, adapted, image))
    seen = {**variables, **own}  # by the episode's own statistics, as the step
    whole, adapted = adapt(seen, SUPPORT, KEY), jax.jit(METHOD.adapt)(seen, rows_of(SUPPORT, []), KEY)
    rows, labels = [], [*EPISODE.support_label[order], *EPISODE.label]
    for i in order:
        rows.append(predict(adapted, rows_of(SUPPORT, [i])))
        adapted = add(adapted, SUPPORT.pixels[i])
    close(adapted.cache, whole.cache)
    jax.tree.map(np.testing.assert_array_equal, adapted.variables, whole.variables)
    rows.append(predict(adapted, EPISODE.query))
    close(aux["logits"], rows[-1])
    logits = np.concatenate(rows).astype(np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(15), labels]
    assert float(loss) == pytest.approx(losses.mean(), rel=1e-5)
    running = variables["batch_stats"], own["batch_stats"]
    moved = jax.tree.map(lambda old, new: 0.9 * np.asarray(old) + 0.1 * np.asarray(new), *running)
    close(aux["batch_stats"], moved)


def test_of_a_support_larger_than_the_context_a_random_choice_counts(variables, order):
    """And attention is in the order of the support."""
    drawn = rows_of(SUPPORT, order).replace(present=np.ones(10, bool))
    whole, alone = (adapt(variables, support, KEY) for support in (SUPPORT, drawn))
    close(alone.cache, whole.cache)
    weights = np.asarray(attention(whole, EPISODE.query))
    assert weights.shape == (5, SMALL["heads"], 14) and not weights[..., np.setdiff1d(np.arange(14), order)].any()
    close(weights[..., order], attention(alone, EPISODE.query))


def test_of_more_places_than_the_context_the_last_images_count(variables):
    present = ~np.isin(np.arange(14), (1, 6))  # 12 of 14
    chosen = np.flatnonzero(present)[-LENGTH:]
    whole = adapt(variables, SUPPORT.replace(present=present), KEY)
    assert np.flatnonzero(whole.cache.held).tolist() == chosen.tolist()
    alone = adapt(variables, rows_of(SUPPORT, chosen).replace(present=np.ones(10, bool)), KEY)
    close(*(predict(x, EPISODE.query) for x in (whole, alone)))
