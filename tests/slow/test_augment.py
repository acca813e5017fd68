"""Augmentation against scipy, colorsys and PIL on fixed parameters, and its random draws."""

import math

import jax
import numpy as np
import pytest

from cxda_jax.data import augment
from cxda_jax.data.augment import Strong, strong
from cxda_jax.errors import UserError
from tests.fast.test_augment import COUNT, KEY, NAMES, NONE, adjusted, drawn, make  # noqa: F401
from tests.nets import assert_close as close

OFF = Strong(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0)


def test_strong_draws_fill_their_ranges_and_every_order_is_as_likely(drawn):
    found = drawn[2]
    ranges = [
        *zip(found.amounts.T, (0.6, 0.7, 0.5, -0.06, 0.7), (1.4, 1.3, 1.5, 0.06, 1.3), strict=True),
        (np.rad2deg(found.angle), -15, 15), (found.scale, 0.9, 1.1), (found.sigma, 0.001, 0.5),
    ]  # fmt: skip
    for values, low, high in ranges:
        width = high - low
        assert low - 1e-5 <= values.min() < low + 0.01 * width and high - 0.01 * width < values.max() <= high + 1e-5
        assert abs(float(values.mean()) - (low + high) / 2) < 5 * width / math.sqrt(12 * COUNT)
    assert set(np.unique(found.shift)) == {-2, -1, 0, 1, 2}  # an eighth of 16, in whole pixels
    assert abs(float(found.flip.mean()) - 0.5) < 5 * 0.5 / math.sqrt(COUNT)
    orders, counts = np.unique(found.order, axis=0, return_counts=True)
    assert len(orders) == 120 and np.abs(counts - 50).max() < 5 * math.sqrt(50)
    assert len(np.unique(drawn[3].order, axis=0)) == 6 and not drawn[3].flip.any()


def test_the_order_drawn_is_the_order_applied(drawn):
    image, jitter = make()[0], jax.jit(lambda image, one: augment.jitter(image, one, list(range(5))))
    for i in range(8):
        one, expected = jax.tree.map(lambda leaf, i=i: leaf[i], drawn[2]), image
        for which in one.order:
            expected = np.asarray(adjusted(expected, one.amounts[which])[NAMES[which]])
        close(jitter(image, one), expected, 2e-6)


def test_off_is_the_identity_and_each_part_alone_is_not():
    images, fields = make(n=4), [field for field in Strong._fields if field != "invert"]
    alone = [OFF._replace(**{field: getattr(Strong(), field)}) for field in fields]
    # One program for all is compiled three times as fast as one for each.
    cases = [(np.round(255 * images).astype(np.uint8), OFF), *((images, options) for options in (OFF, *alone))]
    of_bytes, off, *found = map(np.asarray, jax.jit(lambda: [strong(KEY, *case) for case in cases])())
    close(of_bytes, cases[0][0] / 255, 2e-6)
    np.testing.assert_array_equal(off, images)
    for field, image in zip(fields, found, strict=True):
        assert np.abs(image - images).max() > 1e-3, field
    noise = (found[-1] - images)[(images > 0.1) & (images < 0.9)]
    assert abs(float(noise.std()) - 0.005) < 5 * 0.005 / math.sqrt(2 * noise.size)


def test_grey_images_and_inverted_ones_are_augmented_as_their_negatives():
    images = make((9, 9, 1), 5)
    images[-1] = 1
    close(adjusted(images[0], 0.5)["contrast"], np.clip(0.5 * images[0] + 0.5 * images[0].mean(), 0, 1), 2e-6)
    assert [NAMES[i] for i in augment.adjustments(images[0].shape, Strong())] == ["brightness", "contrast", "gamma"]
    options = Strong(noise=0)
    both = jax.jit(lambda x: (strong(KEY, x, options._replace(invert=True)), 1 - strong(KEY, 1 - x, options)))
    inverted, negative = both(images)
    close(inverted, negative, 1e-6)
    close(inverted[-1], images[-1], 1e-6)  # white
    with pytest.raises(UserError, match="1 or 3 channels, not 2"):
        strong(KEY, make((9, 9, 2)), Strong())
