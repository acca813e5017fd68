"""The optimisers against PyTorch's, fed the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cxda_jax.errors import UserError
from cxda_jax.optimizers import make_optimizer, read_chain, schedules, transformations
from tests.lines import refused


@pytest.mark.parametrize(
    ("name", "momentum", "weight_decay"),
    [("sgd", 0.9, 1e-4), ("sgd", 0.9, 0.1), ("sgd", 0.0, 0.1), ("adam", 0.9, 0.0), ("adam", 0.9, 0.1)],
)
def test_twenty_steps_equal_torch(name, momentum, weight_decay):
    torch = pytest.importorskip("torch")
    rate, rng = 1e-2, np.random.default_rng(0)
    # Gradients that are independent of the parameters, so that differences cannot grow.
    start, *gradients = [[rng.normal(size=n).astype(np.float32) for n in ((4, 3), 5)] for _ in range(21)]
    tx = make_optimizer(name=name, learning_rate=rate, momentum=momentum, weight_decay=weight_decay)
    params = tuple(jnp.asarray(p) for p in start)
    state = tx.init(params)
    theirs = [torch.from_numpy(p.copy()).requires_grad_() for p in start]
    options = {"lr": rate, "weight_decay": weight_decay}
    peer = (
        torch.optim.SGD(theirs, momentum=momentum, **options) if name == "sgd" else torch.optim.Adam(theirs, **options)
    )
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(tuple(jnp.asarray(g) for g in gradient), state, params)
        params = optax.apply_updates(params, updates)
        for p, g in zip(theirs, gradient, strict=True):
            p.grad = torch.from_numpy(g)
        peer.step()
        for ours, their in zip(params, theirs, strict=True):
            np.testing.assert_allclose(ours, their.detach(), rtol=0, atol=1e-6)
    assert all(np.abs(ours - p).max() > 2 * rate for ours, p in zip(params, start, strict=True))


def test_an_unknown_optimizer_is_a_user_error():
    with pytest.raises(UserError, match="optimizer.name='rmsprop'"):
        make_optimizer(name="rmsprop", learning_rate=0.1, momentum=0.9, weight_decay=0.0)


def descend(tx, start, gradients):
    """The parameters after each update."""
    params, state, update, after = start, tx.init(start), jax.jit(tx.update), []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        after.append(params)
    return after


def drawn(steps, scale=1.0):
    """Parameters and gradients that are independent of them, so that differences cannot grow."""
    rng = np.random.default_rng(0)
    start, *gradients = [[scale * rng.normal(size=n).astype(np.float32) for n in ((4, 3), 5)] for _ in range(steps + 1)]
    return tuple(map(jnp.asarray, start)), [tuple(map(jnp.asarray, gradient)) for gradient in gradients]


def test_a_chain_equals_torchs_clipping_adamw_and_cosine():
    torch = pytest.importorskip("torch")
    steps, (start, gradients) = 30, drawn(30)
    text = "clip_by_global_norm(1.0), adamw(cosine_decay_schedule(1e-2, steps), b2=0.99, weight_decay=0.1)"
    ours = descend(read_chain("chain", text, steps), start, gradients)
    theirs = [torch.from_numpy(np.array(p)).requires_grad_() for p in start]
    peer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(peer, T_max=steps)
    for gradient, params in zip(gradients, ours, strict=True):
        for p, g in zip(theirs, gradient, strict=True):
            p.grad = torch.from_numpy(np.array(g))
        assert torch.nn.utils.clip_grad_norm_(theirs, 1.0) > 1.5  # it does clip
        peer.step()
        rates.step()
        for p, q in zip(params, theirs, strict=True):
            np.testing.assert_allclose(p, q.detach(), rtol=0, atol=2e-6)
    assert all(np.abs(p - s).max() > 0.05 for p, s in zip(ours[-1], start, strict=True))


@pytest.mark.parametrize(("text", "rates"), [
    ("sgd(0.5)", [0.5] * 6),
    ("sgd(learning_rate=5e-1,)", [0.5] * 6),
    (" identity(), scale(-0.5) ", [0.5] * 6),
    ("sgd(piecewise_constant_schedule(0.5, {2: 0.1, 4: 0.5}))", [0.5, 0.5, 0.05, 0.05, 0.025, 0.025]),
    ("sgd(linear_schedule(0.6, 0.0, steps))", [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ("sgd(join_schedules([constant_schedule(0.1), linear_schedule(0.3, 0.1, 2)], [3]))", [0.1, 0.1, 0.1, 0.3, 0.2, 0.1]),
    ("scale_by_schedule(constant_schedule(-0.2))", [0.2] * 6),
])  # fmt: skip
def test_a_chains_rates_are_those_that_its_text_says(text, rates):
    start, gradients = drawn(6)
    before = start
    for rate, gradient, after in zip(
        rates, gradients, descend(read_chain("chain", text, 6), start, gradients), strict=True
    ):
        for p, q, g in zip(before, after, gradient, strict=True):
            np.testing.assert_allclose(q, p - rate * g, rtol=0, atol=1e-6)
        before = after


def test_a_chain_replaces_the_other_fields_and_a_share_scales_its_updates():
    start, gradients = drawn(8)
    options = {"name": "adam", "learning_rate": 3.0, "momentum": 0.9, "weight_decay": 0.5}
    for share in (1.0, 0.1):
        found = descend(make_optimizer(**options, chain="adamw(2e-2, weight_decay=0.1)", share=share), start, gradients)
        lowered = descend(optax.adamw(2e-2 * share, weight_decay=0.1), start, gradients)
        plain = descend(make_optimizer(**options, share=share), start, gradients)
        slower = descend(make_optimizer(**options | {"learning_rate": 3.0 * share}), start, gradients)
        for ours, expected, p, q in zip(found, lowered, plain, slower, strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), ours, expected)
            jax.tree.map(np.testing.assert_array_equal, p, q)


def test_a_chain_that_remembers_the_first_parameters_holds_a_copy():
    """Else a step whose arguments are donated would get one array twice."""
    start, gradients = drawn(3)
    tx = read_chain("chain", "scale_by_distance_over_gradients(), scale(-1.0)", 3)
    places = {p.unsafe_buffer_pointer() for p in start}
    state = tx.init(start)
    assert not places & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    kept = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4, 3)]
    assert any(np.array_equal(leaf, start[0]) for leaf in kept) and len(descend(tx, start, gradients)) == 3


def test_the_names_of_a_chain_are_optaxs_own():
    assert {"sgd", "adamw", "nadam", "lion", "clip", "scale", "add_decayed_weights"} <= set(transformations())
    assert {"cosine_decay_schedule", "piecewise_constant_schedule", "join_schedules"} <= set(schedules())
    assert not {"apply_updates", "global_norm", "MultiSteps", "inject_hyperparams", "jax"} & {
        *transformations(),
        *schedules(),
    }
    assert all(getattr(optax, name) is f for name, f in {**transformations(), **schedules()}.items())


WRONG = {
    "adamq(0.1)": "optax has no transformation adamq, did you mean adam",
    "sgd(cosine(0.1, 5))": "optax has no schedule cosine",
    "sgd(sgd(0.1))": "optax has no schedule sgd",
    "apply_updates(1, 2)": "optax has no transformation apply_updates",
    "MultiSteps(1, 2)": "optax has no transformation MultiSteps",
    "eval('1')": "optax has no transformation eval",
    "__import__('os').system('touch pwned')": "is no call",
    "optax.sgd(0.1)": "is no call",
    "(lambda: 1)()": "is no call",
    "sgd": "sgd is no call",
    "3": "3 is no call",
    "()": r"\(\) is no call",
    "sgd(rate)": "rate is no number, text, steps or schedule",
    "sgd(steps.real)": "steps.real is no number",
    "sgd(steps ** steps)": "is no number",
    "sgd(open('x'))": "optax has no schedule open",
    "sgd([i for i in (1,)])": "is no number",
    "sgd(*(0.1,))": "is no number",
    "sgd(**{'learning_rate': 0.1})": "is no argument",
    "sgd(f'{steps}')": "is no number",
    "sgd(1e999)": "1e.*is not finite",
    "sgd(-1e999)": "not finite",
    "sgd({**{}})": "is no number",
    "sgd()": "missing 1 required positional argument: 'learning_rate'",
    "sgd('fast')": "",
    "sgd(0.1, 0.9, True, None, 5, 6)": "",
    "clip(1.0) adam(0.1)": "invalid syntax",
    "sgd(0.1": "",
    "lbfgs()": "",
    "add_noise(0.1, 0.5, 3)": "random keys, which no checkpoint keeps",
    "masked(1, 2)": "",
    "sgd(" + "(" * 300 + ")" * 300 + ")": "",
    "sgd(" + "1" * 2000 + ")": "2005 characters, 1000 at most",
    "sgd(" + "9" * 900 + ")": "",
}


@pytest.mark.parametrize(("text", "says"), WRONG.items(), ids=lambda text: text[:20])
def test_a_text_that_is_no_chain_is_refused_in_one_line_and_never_run(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(rf"^field=.*{says}.*; write it as 'clip\(1\.0\), adam\(1e-3\)'$"):
        read_chain("field", text, 5)
    assert not list(tmp_path.iterdir())
