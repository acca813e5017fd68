"""What holds for all inputs: scores, augmentation and ranges of fields."""

import jax
import numpy as np
import pytest

from cxda_jax.data import augment


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
