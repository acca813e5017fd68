"""Strong augmentation against numpy, colorsys, PIL and scipy on fixed parameters, and its random draws."""

import colorsys
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from PIL import Image, ImageEnhance

from cxda_jax import augment
from cxda_jax.augment import Strong, draw_strong, strong
from cxda_jax.errors import UserError

KEY = jax.random.key(0)
OFF = Strong(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0)
# Each shape and option is compiled once for all tests.
AFFINE = jax.jit(augment.affine, static_argnums=4)
MOVE = jax.jit(lambda image, drawn: augment.move(image, drawn, Strong()))
JITTER = jax.jit(lambda image, drawn: augment.jitter(image, drawn, list(range(5))))
DRAWS = jax.jit(
    lambda keys, shape, options: jax.vmap(lambda key: draw_strong(key, shape, options))(keys), static_argnums=(1, 2)
)
COUNT = 6000
KEYS = jax.random.split(KEY, COUNT)


def make(shape=(12, 12, 3), n=1):
    """Images with black, white and grey pixels among the random ones."""
    images = np.random.default_rng(0).random((n, *shape)).astype(np.float32)
    images[:, 0, 0], images[:, 0, 1], images[:, 0, 2] = 0, 1, 0.5
    return images


def adjusted(name, image, amount):
    """An adjustment, which takes planes [c, h, w], of [h, w, c]."""
    return jnp.moveaxis(augment.ADJUSTMENTS[name](jnp.moveaxis(jnp.asarray(image), -1, 0), amount), 0, -1)


def close(a, b, tolerance=2e-6):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("turns", [-0.5, -0.06, 0.0, 0.03, 0.4])
def test_hue_equals_colorsys(turns):
    image = make()[0]
    expected = np.empty_like(image)
    for at in np.ndindex(image.shape[:2]):
        h, s, v = colorsys.rgb_to_hsv(*image[at].astype(float))
        expected[at] = colorsys.hsv_to_rgb((h + turns) % 1, s, v)
    close(adjusted("hue", image, turns), expected)


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
def test_brightness_contrast_saturation_and_gamma_equal_numpy_and_pil(factor):
    image = make()[0]
    grey = (image.astype(float) * [0.2989, 0.587, 0.114]).sum(-1, keepdims=True)
    picture = Image.fromarray(np.round(255 * image).astype(np.uint8))
    for name, pils, reference in (
        ("brightness", "Brightness", 0), ("contrast", "Contrast", grey.mean()), ("saturation", "Color", grey)
    ):  # fmt: skip
        found = np.asarray(adjusted(name, image, factor))
        close(found, np.clip(factor * image + (1 - factor) * reference, 0, 1))
        pil = np.asarray(getattr(ImageEnhance, pils)(picture).enhance(factor), float) / 255
        assert np.abs(found - pil).max() < 4 / 255  # PIL rounds at each turn
    close(adjusted("gamma", image, factor), np.clip(image.astype(float), 1e-8, 1) ** factor)


def scipy_affine(image, degrees, shift, scale, margin):
    """The inverse map that scipy wants: output pixel to input position; edges repeated."""
    angle = math.radians(degrees)
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / scale
    centre = (np.array(image.shape[:2]) - 1) / 2
    offset = centre - matrix @ (centre + margin + np.array(shift))
    shape = tuple(side + 2 * margin for side in image.shape[:2])
    moved = [
        scipy.ndimage.affine_transform(plane, matrix, offset, shape, order=1, mode="nearest")
        for plane in np.moveaxis(image.astype(float), -1, 0)
    ]
    return np.stack(moved, -1)


@pytest.mark.parametrize(
    ("degrees", "shift", "scale"),
    [(0.0, (0, 0), 1.0), (15.0, (0, 0), 1.0), (0.0, (2, -1), 1.0), (0.0, (0, 0), 1.1), (-12.0, (-1, 2), 0.9)],
)
def test_moves_equal_scipys_and_margins_stand_for_the_published_padding(degrees, shift, scale):
    image, angle, sigma = make()[0], math.radians(degrees), 0.5
    for margin in (0, 2):
        close(
            AFFINE(image, angle, jnp.array(shift), scale, margin),
            scipy_affine(image, degrees, shift, scale, margin),
            2e-5,
        )
    # The long way: pad by half of the side, affine, blur, crop at the centre.
    padded = np.pad(image, ((6, 6), (6, 6), (0, 0)), mode="edge")
    moved = scipy_affine(padded, degrees, shift, scale, 0)
    blurred = scipy.ndimage.gaussian_filter(moved, (sigma, sigma, 0), radius=(2, 2, 0))[6:-6, 6:-6]
    drawn = augment.Drawn(jnp.arange(5), jnp.zeros(5), *map(jnp.asarray, (angle, shift, scale, sigma, False)))
    close(MOVE(image, drawn), blurred, 2e-5)
    close(MOVE(image, drawn._replace(flip=jnp.array(True))), blurred[:, ::-1], 2e-5)


@pytest.mark.parametrize("sigma", [0.001, 0.1, 0.3, 0.5])
def test_blur_equals_scipy(sigma):
    image = make((14, 13, 3))[0]
    taps = np.exp(-0.5 * (np.arange(-2, 3) / sigma) ** 2)
    expected = image.astype(float)
    for axis in (0, 1):
        expected = scipy.ndimage.correlate1d(expected, taps / taps.sum(), axis)
    close(augment.blur(image, sigma), expected[2:-2, 2:-2])
    gaussian = scipy.ndimage.gaussian_filter(image.astype(float), (sigma, sigma, 0), radius=(2, 2, 0))
    close(expected, gaussian)


def test_draws_fill_their_ranges():
    drawn = DRAWS(KEYS, (16, 16, 3), Strong())
    ranges = [
        *zip(drawn.amounts.T, (0.6, 0.7, 0.5, -0.06, 0.7), (1.4, 1.3, 1.5, 0.06, 1.3), strict=True),
        (jnp.rad2deg(drawn.angle), -15, 15),
        (drawn.scale, 0.9, 1.1),
        (drawn.sigma, 0.001, 0.5),
    ]
    for values, low, high in ranges:
        width = high - low
        assert low - 1e-5 <= values.min() < low + 0.01 * width and high - 0.01 * width < values.max() <= high + 1e-5
        assert abs(float(values.mean()) - (low + high) / 2) < 5 * width / math.sqrt(12 * COUNT)
    assert set(np.unique(drawn.shift)) == {-2, -1, 0, 1, 2}  # an eighth of 16, in whole pixels
    assert abs(float(drawn.flip.mean()) - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


def test_every_order_is_as_likely():
    orders, counts = np.unique(DRAWS(KEYS, (16, 16, 3), Strong()).order, axis=0, return_counts=True)
    assert len(orders) == 120 and np.abs(counts - 50).max() < 5 * math.sqrt(50)
    grey = DRAWS(KEYS, (16, 16, 1), Strong(flip=False))
    assert len(np.unique(grey.order, axis=0)) == 6 and not grey.flip.any()


def test_the_order_drawn_is_the_order_applied():
    image = jnp.asarray(make()[0])
    drawn = DRAWS(KEYS, (16, 16, 3), Strong())
    for i in range(8):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], drawn)
        expected = image
        for which in np.asarray(one.order):
            expected = adjusted(list(augment.ADJUSTMENTS)[which], expected, one.amounts[which])
        close(JITTER(image, one), expected)


def test_off_is_the_identity_and_each_part_alone_is_not():
    images, fields = make(n=4), [field for field in Strong._fields if field != "invert"]
    alone = [OFF._replace(**{field: getattr(Strong(), field)}) for field in fields]
    # One program for all is compiled three times as fast as one for each.
    off, *found = jax.jit(lambda images: [strong(KEY, images, options) for options in (OFF, *alone)])(images)
    np.testing.assert_array_equal(off, images)
    for field, image in zip(fields, found, strict=True):
        assert np.abs(np.asarray(image) - images).max() > 1e-3, field
    noise = (found[-1] - images)[(images > 0.1) & (images < 0.9)]
    assert abs(float(noise.std()) - 0.005) < 5 * 0.005 / math.sqrt(2 * noise.size)
    close(strong(KEY, images, alone[-1]), found[-1], 1e-5)  # not compiled
    pixels = np.round(255 * images).astype(np.uint8)
    close(strong(KEY, pixels, OFF), pixels / 255)  # bytes are read as floats


def test_grey_images_and_inverted_ones_are_augmented_as_their_negatives():
    images = make((9, 9, 1), 5)
    images[-1] = 1
    close(adjusted("contrast", images[0], 0.5), np.clip(0.5 * images[0] + 0.5 * images[0].mean(), 0, 1))
    names = [list(augment.ADJUSTMENTS)[i] for i in augment.adjustments(images[0].shape, Strong())]
    assert names == ["brightness", "contrast", "gamma"]
    inverted, negative = jax.jit(
        lambda x: (strong(KEY, x, Strong(noise=0, invert=True)), 1 - strong(KEY, 1 - x, Strong(noise=0)))
    )(images)
    close(inverted, negative, 1e-6)
    close(inverted[-1], images[-1], 1e-6)  # white
    with pytest.raises(UserError, match="1 or 3 channels, not 2"):
        strong(KEY, make((9, 9, 2)), Strong())
