"""cxda_shares against its formulas in numpy's float64, and its training on what the network says of the images."""

import functools

import jax
import numpy as np
import pytest

from cxda_jax.config.reading import read
from cxda_jax.data.episodes import EpisodeSpec, check_spec, split_part
from cxda_jax.errors import UserError
from cxda_jax.methods.cxda_shares import draw_present
from cxda_jax.training.experiment import build_on
from cxda_jax.training.frozen import how_right, network_config, on_trunk
from cxda_jax.training.loop import init_state, train_step
from tests.nets import KEY, build_method


def test_a_buffer_fills_at_random():
    draw = jax.jit(jax.vmap(functools.partial(draw_present, n=20)))
    sizes = np.asarray(draw(jax.random.split(KEY, 400))).sum(1)
    assert 0.4 < (sizes == 20).mean() < 0.6 and (sizes >= 1).all()
    assert abs((sizes[sizes < 20] <= 4).mean() - np.log(5) / np.log(21)) < 0.1


def test_a_part_is_held_out_by_domains_or_by_images(fixed_store):
    """Of two domains it is images; both parts together are all training images."""
    train = np.flatnonzero(np.isin(fixed_store.row_domains(), fixed_store.domains("train")))
    many = fixed_store._replace(
        offsets=np.arange(fixed_store.offsets[-1] // 5 + 1) * 5,
        split=tuple(np.repeat(fixed_store.split, 6)), domain_names=tuple(map(str, range(54))),
    )  # fmt: skip
    for store, whole in ((fixed_store, False), (many, True)):
        held, others = (split_part(store, 0.4, 7, held) for held in (True, False))
        assert sorted([*held.rows, *others.rows]) == train.tolist()
        for part in (held, others):
            owner, sizes = store.row_domains()[part.rows], np.diff(part.offsets)
            np.testing.assert_array_equal(np.bincount(owner, minlength=len(store.split)), sizes)
            assert whole == set(sizes).issubset({0, 5})
        assert abs(len(held.rows) / len(train) - 0.4) < 0.06
        assert not np.array_equal(held.rows, split_part(store, 0.4, 8, True).rows)


def test_small_domains_can_be_left_out(fixed_store):
    spec = EpisodeSpec(1, 28, 5)
    with pytest.raises(UserError, match="has 30 images, per_domain"):
        check_spec(spec, fixed_store, "test")
    with pytest.raises(UserError, match="0 domains with 33 images"):
        check_spec(spec._replace(skip_small=True), fixed_store, "test")


@pytest.mark.parametrize(
    "method",
    [pytest.param("icrm", marks=pytest.mark.slow), pytest.param("cxda_loo", marks=pytest.mark.weekly)],
)
def test_a_method_learns_on_a_trunk_that_stays(method, fixed_store):
    """From images that the trunk's training left out; it begins with the parts of that network that it has too."""
    config = read(f"glyphs:{method},smoke")
    config["episode"] |= {"num_domains": 2, "per_domain": 4, "num_query": 3}
    config["net"]["width"], config["net"]["padding"], config["train"]["held_out"] = 8, "same", 0.4
    experiment = build_on(config, fixed_store)
    training = build_on(network_config(config, experiment.method), fixed_store)
    begun, other = (init_state(e.method, e.optimizer, seed, e.example) for seed, e in enumerate((experiment, training)))
    network, before = jax.device_get(other.variables), jax.device_get(on_trunk(begun, other.variables).variables)
    for kind, part in (("params", "trunk"), ("batch_stats", "trunk"), *[("params", "head")] * (method != "icrm")):
        jax.tree.map(np.testing.assert_array_equal, before[kind][part], network[kind][part])
    learner, plan = experiment.learner, experiment.train_plans(0)
    assert np.isin(np.concatenate([*plan.support, *plan.query]), split_part(fixed_store, 0.4, 0, True).rows).all()
    assert not np.isin(training.train_plans(0).query, split_part(fixed_store, 0.4, 0, True).rows).any()
    batch = jax.tree.map(lambda x: x, experiment.source.assemble(experiment.source.resident, plan))
    after = jax.device_get(jax.jit(functools.partial(train_step, learner))(on_trunk(begun, network), batch, KEY)[0])
    for name, tree in after.variables["params"].items():
        moved = [
            not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (tree, before["params"][name])), strict=True)
        ]
        assert not any(moved) if name == "trunk" else all(moved)
    right = how_right(training, network)
    assert 0 <= right.others <= 1 and "left to ask the buffer" in str(right)
    assert "warning" in str(right._replace(others=0.99))


def test_the_config_of_the_network_differs_by_the_method_alone():
    config = read("unipen:cxda_shares")
    network = network_config(config, build_method("cxda_shares"))
    assert network["method"] == "erm_iid" and "cxda_shares" not in network
    assert {k: v for k, v in network["train"].items() if k != "held_out"} == {
        k: v for k, v in config["train"].items() if k != "held_out"
    }
    assert network["optimizer"] == config["optimizer"] and network["net"] == config["net"]
