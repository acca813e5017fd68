"""Weak augmentation against scipy, and its random parameters; test_properties.py has what holds for all options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import augment

KEYS = jax.random.split(jax.random.key(3), 400)
WEAK = jax.jit(augment.weak, static_argnums=2)
DRAW = jax.jit(
    lambda options: jax.vmap(lambda key: augment.draw_weak(key, (32, 32, 3), options))(KEYS), static_argnums=0
)


def image(shape):
    return np.random.default_rng(0).random(shape, np.float32)


@pytest.mark.parametrize("shift, flip, angle", [((0, 0), False, 25.0), ((2, -1), True, 0.0), ((-2, 1), True, -30.0)])
def test_warp_against_scipy(shift, flip, angle):
    """Pad and crop, then flip, then rotate: each step by scipy or numpy."""
    ndimage = pytest.importorskip("scipy.ndimage")
    x = image((16, 20, 3))
    h, w, _ = x.shape
    theirs = np.pad(x, ((4, 4), (4, 4), (0, 0)), constant_values=0.25)
    theirs = theirs[4 - shift[0] : 4 - shift[0] + h, 4 - shift[1] : 4 - shift[1] + w]
    theirs = theirs[:, ::-1] if flip else theirs
    a = np.deg2rad(angle)
    matrix = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])
    centre = np.array([(h - 1) / 2, (w - 1) / 2])
    options = {"offset": centre - matrix @ centre, "order": 1, "mode": "grid-constant", "cval": 0.25}
    theirs = np.stack([ndimage.affine_transform(theirs[..., c], matrix, **options) for c in range(3)], -1)
    ours = augment.warp(jnp.asarray(x), jnp.array(shift), jnp.array(flip), jnp.float32(a), 0.25)
    # float32 coordinates against scipy's float64
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_each_image_draws_its_own_at_the_stated_rate_and_bytes_are_read_as_floats():
    pixels = np.round(255 * np.repeat(image((16, 16, 3))[None], 40, 0)).astype(np.uint8)
    x = np.float32(pixels / 255)
    out = np.asarray(WEAK(KEYS[0], x, augment.Weak()))
    untouched = np.mean([np.abs(a - b).max() < 1e-5 for a, b in zip(out, x, strict=True)])
    assert 0 < untouched < 0.4  # 1/8 expected, and a shift may draw 0
    assert len({o.tobytes() for o in out}) > 25
    np.testing.assert_allclose(augment.weak(KEYS[0], pixels, augment.Weak(False, False, 0.0)), x, atol=1e-6)
    np.testing.assert_allclose(WEAK(KEYS[0], pixels, augment.Weak()), out, atol=1e-6)


def test_draws_follow_the_probabilities_and_ranges():
    shift, flip, angle = DRAW(augment.Weak())
    five = 5 * np.sqrt(0.25 / len(KEYS))
    assert abs(flip.mean() - 0.5) < five and abs((angle != 0).mean() - 0.5) < five
    assert np.abs(shift).max() == 4 and np.abs(np.rad2deg(angle)).max() <= 30
    assert np.abs(np.corrcoef(np.asarray(flip), np.asarray(angle != 0))[0, 1]) < 0.25
    assert not any(np.any(o) for o in DRAW(augment.Weak(False, False, 0.0)))
