"""Evaluation in which each image of a split is a query once: its tasks and its scores."""

import jax
import numpy as np
import pytest
import scipy.special

from cxda_jax.config.reading import read, replaced
from cxda_jax.data.episodes import Draw, EpisodeSpec, counting, exhaustive
from cxda_jax.studies import testing
from cxda_jax.training.evaluation import compile_task
from cxda_jax.training.experiment import build_on
from tests.conftest import make_store
from tests.nets import fill

SPEC = EpisodeSpec(num_domains=3, per_domain=4, num_query=6)
SIZES = (10, 11, 12, 13, 23, 30)  # of the domains, from the fewest images that a task needs


def drawn(spec=SPEC, seed=0, stream=2):
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    count, plans = exhaustive(Draw(spec, offsets, np.arange(len(SIZES)), seed, stream))
    return offsets, count, plans


@pytest.mark.parametrize("replacement", [False, True])
def test_each_image_is_a_query_once_and_the_support_is_drawn_as_usual(replacement):
    offsets, count, plans = drawn(SPEC._replace(replacement=replacement))
    plan = plans(range(count))
    counts, owner = counting(plan.query), np.repeat(np.arange(len(SIZES)), SIZES)
    assert count == sum(-(-size // 6) for size in SIZES)
    np.testing.assert_array_equal(np.sort(plan.query[counts]), np.arange(offsets[-1]))
    assert (plan.query[~counts] == np.repeat(plan.query[:, 0], (~counts).sum(1))).all() and not counts.all()
    for domain, size in enumerate(SIZES):
        of_domain = counts[owner[plan.query[:, 0]] == domain].sum(1)
        assert of_domain.sum() == size and of_domain.max() - of_domain.min() <= 1
    for support, query in zip(plan.support, plan.query, strict=True):
        blocks = owner[support].reshape(3, 4)
        assert (blocks == blocks[:, :1]).all() and len(set(blocks[:, 0])) == 3
        assert set(owner[query]) <= set(blocks[:, 0]) and len(set(owner[query])) == 1
        assert replacement or not set(support) & set(query) and len(set(support)) == 12
    assert {*owner[plan.query[: len(SIZES), 0]]} == {*range(len(SIZES))}  # the first tasks are of different domains


def test_a_task_depends_on_seed_stream_and_number_alone():
    _, count, plans = drawn()
    whole, again = plans(range(count)), drawn()[2]
    for ours, theirs in zip(again([5, 0]), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs[[5, 0]])
    for other in (drawn(seed=1)[2], drawn(stream=1)[2]):
        assert not any((ours == theirs).all(1).any() for ours, theirs in zip(other(range(count)), whole, strict=True))


@pytest.mark.slow
def test_the_mean_is_over_all_images_and_the_worst_tenth_over_tasks(tmp_path):
    """ERM answers an image alone, so all test images in one batch have the same answers."""
    uneven = make_store(tmp_path, sizes=(12,) * 6 + (10, 17, 31))
    episode = {name: value for name, value in SPEC._asdict().items() if name != "mixed"}
    evaluation = {"tasks": "exhaustive", "per_call": 3}
    experiment = build_on(replaced(read("glyphs:erm,smoke"), episode=episode, evaluation=evaluation), uneven)
    method, count = experiment.method, experiment.num_tasks["test"]
    variables = fill(jax.eval_shape(method.init, jax.random.key(0), experiment.example))
    evaluator = compile_task(method, experiment.source)
    tasks = testing.score(experiment, evaluator, variables, "test", count)
    test = slice(*uneven.offsets[[6, 9]])
    everything = experiment.example.replace(pixels=uneven.images[test])
    by_row = np.zeros(uneven.offsets[-1])
    logits = np.asarray(jax.jit(method.predict)(variables, everything))
    by_row[test] = logits.argmax(-1) == uneven.labels[test]
    assert 0 < by_row[test].mean() < 1 and tasks.mean == pytest.approx(by_row[test].mean(), abs=1e-12)
    plan = experiment.task_plans("test")(range(count))
    each = [by_row[np.unique(rows)].mean() for rows in plan.query]
    np.testing.assert_allclose(tasks.scores, each, atol=1e-12)
    assert tasks.worst_decile == pytest.approx(min(each)) and count == 2 + 3 + 6
    counted = counting(plan.query)
    np.testing.assert_array_equal(tasks.labels[counted], uneven.labels[plan.query[counted]])
    assert ((tasks.labels >= 0) == counted).all() and counted.sum() == 58
    sure = scipy.special.softmax(logits, -1).max(-1)[plan.query[counted] - test.start]
    np.testing.assert_allclose(tasks.confidence[counted], sure, rtol=1e-4)
