"""Augmentation against scipy, colorsys and PIL on fixed parameters, and its random draws."""

import colorsys
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from PIL import Image, ImageEnhance

from cxda_jax.data import augment
from cxda_jax.data.augment import Strong, Weak, strong
from tests.nets import assert_close as close

KEY = jax.random.key(3)
COUNT = 6000
NONE = Weak(False, False, 0.0)
NAMES = list(augment.ADJUSTMENTS)
# Each is compiled once for all tests.
WARP = jax.jit(augment.warp)
MOVE = jax.jit(lambda image, drawn: augment.move(image, drawn, Strong()))


@jax.jit
def adjusted(image, amount):
    """All adjustments, which take planes [c, h, w], of [h, w, c]."""
    planes = jnp.moveaxis(image, -1, 0)
    names = NAMES if len(planes) == 3 else ["brightness", "contrast", "gamma"]
    return {name: jnp.moveaxis(augment.ADJUSTMENTS[name](planes, amount), 0, -1) for name in names}


@pytest.fixture(scope="module")
def drawn():
    """Random parameters of weak parts, of none, of strong ones, and of those of grey images."""
    weak, strong = augment.draw_weak, augment.draw_strong
    cases = (weak, 32, 3, Weak()), (weak, 32, 3, NONE), (strong, 16, 3, Strong()), (strong, 16, 1, Strong(flip=False))
    of_one = jax.vmap(lambda key: [draw(key, (side, side, channels), how) for draw, side, channels, how in cases])
    return jax.tree.map(np.asarray, jax.jit(of_one)(jax.random.split(KEY, COUNT)))


def make(shape=(12, 12, 3), n=1):
    """Images with black, white and grey pixels among the random ones."""
    images = np.random.default_rng(0).random((n, *shape)).astype(np.float32)
    images[:, 0, 0], images[:, 0, 1], images[:, 0, 2] = 0, 1, 0.5
    return images


def moved_by_scipy(image, degrees, shift=(0, 0), scale=1.0, **outside):
    """An image turned and enlarged around its centre. scipy wants the inverse map: output pixel to input position."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix, centre = np.array([[cos, -sin], [sin, cos]]) / scale, (np.array(image.shape[:2]) - 1) / 2
    options = {"offset": centre - matrix @ (centre + shift), "order": 1, **outside}
    return np.stack([scipy.ndimage.affine_transform(image[..., c], matrix, **options) for c in range(3)], -1)


@pytest.mark.parametrize("shift, flip, angle", [((0, 0), False, 25.0), ((2, -1), True, 0.0), ((-2, 1), True, -30.0)])
def test_a_weak_warp_equals_scipys_steps(shift, flip, angle):
    """Pad and crop, then flip, then rotate."""
    x = make((16, 20, 3))[0]
    h, w, _ = x.shape
    theirs = np.pad(x, ((4, 4), (4, 4), (0, 0)), constant_values=0.25)
    theirs = theirs[4 - shift[0] : 4 - shift[0] + h, 4 - shift[1] : 4 - shift[1] + w]
    theirs = theirs[:, ::-1] if flip else theirs
    theirs = moved_by_scipy(theirs, angle, mode="grid-constant", cval=0.25)
    # float32 coordinates against scipy's float64
    close(WARP(x, np.array(shift), np.array(flip), np.float32(np.deg2rad(angle)), 0.25), theirs, 2e-5)


def test_weak_draws_follow_the_probabilities_and_ranges(drawn):
    shift, flip, angle = drawn[0]
    three = 3 * np.sqrt(0.25 / COUNT)
    assert abs(flip.mean() - 0.5) < three and abs((angle != 0).mean() - 0.5) < three
    assert abs(shift.any(1).mean() - 0.5 * 80 / 81) < three  # a shift of 0 is one of 81
    assert np.unique(shift).tolist() == [*range(-4, 5)]
    assert -30.001 <= np.rad2deg(angle).min() < -29.9 and 29.9 < np.rad2deg(angle).max() <= 30.001
    assert np.abs(np.corrcoef([flip, angle != 0, shift.any(1)]) - np.eye(3)).max() < 0.1
    assert not any(map(np.any, drawn[1]))


@pytest.mark.parametrize("amount", [-0.5, 0.0, 0.4, 1.4])
def test_adjustments_equal_colorsys_numpy_and_pil(amount):
    image = make()[0]
    found, grey = adjusted(image, amount), (image.astype(float) * [0.2989, 0.587, 0.114]).sum(-1, keepdims=True)
    expected = np.empty_like(image)
    for at in np.ndindex(image.shape[:2]):
        h, s, v = colorsys.rgb_to_hsv(*image[at].astype(float))
        expected[at] = colorsys.hsv_to_rgb((h + amount) % 1, s, v)
    close(found["hue"], expected, 2e-6)
    if amount >= 0:
        picture = Image.fromarray(np.round(255 * image).astype(np.uint8))
        names = ("brightness", "Brightness", 0), ("contrast", "Contrast", grey.mean()), ("saturation", "Color", grey)
        for name, pils, reference in names:
            close(found[name], np.clip(amount * image + (1 - amount) * reference, 0, 1), 2e-6)
            pil = np.asarray(getattr(ImageEnhance, pils)(picture).enhance(amount), float) / 255
            assert np.abs(found[name] - pil).max() < 4 / 255  # PIL rounds at each turn
        close(found["gamma"], np.clip(image.astype(float), 1e-8, 1) ** amount, 2e-6)


@pytest.mark.parametrize("degrees, shift, scale, sigma", [(15.0, (2, -1), 1.1, 0.5), (-12.0, (-1, 2), 0.9, 0.001)])
def test_strong_moves_equal_scipys_the_long_way(degrees, shift, scale, sigma):
    """Pad by half of the side with repeated edges, affine, blur, crop at the centre, flip."""
    image = make()[0]
    padded = np.pad(image.astype(float), ((6, 6), (6, 6), (0, 0)), mode="edge")
    moved = moved_by_scipy(padded, degrees, shift, scale, mode="nearest")
    blurred = scipy.ndimage.gaussian_filter(moved, (sigma, sigma, 0), radius=(2, 2, 0))[6:-6, 6:-6]
    one = augment.Drawn(np.arange(5), np.zeros(5), math.radians(degrees), np.array(shift), scale, sigma, np.False_)
    close(MOVE(image, one), blurred, 2e-5)
    close(MOVE(image, one._replace(flip=np.True_)), blurred[:, ::-1], 2e-5)


OFF = Strong(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_order_drawn_is_the_order_applied(drawn):
    image, jitter = make()[0], jax.jit(lambda image, one: augment.jitter(image, one, list(range(5))))
    for i in range(8):
        one, expected = jax.tree.map(lambda leaf, i=i: leaf[i], drawn[2]), image
        for which in one.order:
            expected = np.asarray(adjusted(expected, one.amounts[which])[NAMES[which]])
        close(jitter(image, one), expected, 2e-6)


@pytest.mark.slow
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
        out = np.asarray(augmented(jax.random.key(seed), images))
        assert out.min() >= -1e-5 and out.max() <= 1 + 1e-5 and (out[3] != out[4]).any()
        others = 1 - images
        others[seed] = images[seed]
        np.testing.assert_array_equal(np.asarray(augmented(jax.random.key(seed), others))[seed], out[seed])
