"""What holds for all inputs: scores, augmentation and ranges of fields."""

import math

import hypothesis.extra.numpy as hnp
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxda_jax.config.fields import Group
from cxda_jax.config.registry import schema
from cxda_jax.data import augment
from cxda_jax.training import metrics
from tests.lines import refused

SEEDS = st.integers(0, 2**32 - 1)

ANSWERS = st.tuples(st.integers(1, 6), st.integers(1, 40)).flatmap(
    lambda drawn: hnp.arrays(np.int32, (2, drawn[1]), elements=st.integers(0, drawn[0]))
)


@settings(max_examples=60)
@given(ANSWERS, SEEDS)
def test_scores_equal_scikit_learns_and_ignore_the_order_of_queries(answers, seed):
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, labels = answers
    theirs = {
        "accuracy": sklearn.accuracy_score(labels, predictions),
        "macro_f1": sklearn.f1_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0),
        "macro_f1_union": sklearn.f1_score(labels, predictions, average="macro", zero_division=0),
    }
    order = np.random.default_rng(seed).permutation(len(labels))
    for name, score in metrics.METRICS.items():
        found = score(predictions, labels)
        assert found == pytest.approx(theirs[name], abs=1e-12) and 0 <= found <= 1
        assert score(predictions[order], labels[order]) == pytest.approx(found, abs=1e-12)
        np.testing.assert_array_equal(metrics.scores(name, predictions[None], labels[None]), [found])


@given(hnp.arrays(float, st.integers(1, 60), elements=st.floats(0, 1)))
def test_the_worst_decile_is_the_mean_of_the_lowest_tenth(scores):
    count = max(1, math.floor(len(scores) / 10))
    assert metrics.worst_decile(scores) == pytest.approx(np.partition(scores, count - 1)[:count].mean(), abs=1e-12)


@given(hnp.arrays(float, st.integers(1, 30), elements=st.floats(-1e6, 1e6)))
def test_mean_and_standard_error_equal_scipys(values):
    scipy = pytest.importorskip("scipy.stats")
    mean, error = metrics.mean_sem(values)
    assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-9, abs=1e-6)
    assert error == pytest.approx(scipy.sem(values) if len(values) > 1 else math.nan, rel=1e-9, abs=1e-6, nan_ok=True)


def test_a_number_is_accepted_inside_its_range_alone():
    """Each number of the schema, at the ends of its range and beside them."""
    for entry in schema().values():
        for name, field in entry.fields.items() if isinstance(entry, Group) else ():
            if not field.within:
                continue
            low, high, (from_low, to_high) = field.within
            for end, inside, beyond in ((low, from_low, -math.inf), (high, to_high, math.inf)):
                if math.isfinite(end):
                    accepted = [math.nextafter(end, -beyond)] + [end] * inside
                    wrong = [math.nextafter(end, beyond), beyond, math.nan] + [end] * (not inside)
                    field.check(name, accepted[-1])
                    field.check(name, accepted[0])
                    for value in wrong:
                        with refused(f"^{name}={value}: must be .*{low:.10g}"):
                            field.check(name, value)


@pytest.mark.slow
@pytest.mark.parametrize("augmented", [
    lambda key, pixels: augment.weak(key, pixels, augment.Weak(True, True, 90.0, 0.5, 0.7)),
    lambda key, pixels: augment.strong(key, pixels, augment.Strong()),
], ids=["weak", "strong"])  # fmt: skip
def test_augmented_images_are_in_range_and_each_is_drawn_by_itself(augmented):
    augmented, rng = jax.jit(augmented), np.random.default_rng(0)
    for seed in range(4):
        images = rng.uniform(-0.1, 1.1, (5, 8, 8, 3)).clip(0, 1).astype(np.float32)  # with exact blacks and whites
        images[4] = images[3]
        key, neighbour = jax.random.key(seed), seed % 5
        out = np.asarray(augmented(key, images))
        assert out.shape == images.shape and out.dtype == np.float32
        assert out.min() >= -1e-5 and out.max() <= 1 + 1e-5 and (out[3] != out[4]).any()
        np.testing.assert_array_equal(out, augmented(key, images))
        others = 1 - images
        others[neighbour] = images[neighbour]
        np.testing.assert_array_equal(np.asarray(augmented(key, others))[neighbour], out[neighbour])
        assert (out != np.asarray(augmented(jax.random.key(seed + 100), images))).any()
