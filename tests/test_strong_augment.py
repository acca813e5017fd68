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


def make(shape=(12, 10, 3), n=1, seed=0):
    """Images with black, white and grey pixels among the random ones."""
    images = np.random.default_rng(seed).random((n, *shape)).astype(np.float32)
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
def test_brightness_contrast_and_saturation_equal_numpy_and_pil(factor):
    image = make((16, 16, 3))[0]
    grey = (image.astype(float) * [0.2989, 0.587, 0.114]).sum(-1, keepdims=True)
    ours = {
        "Brightness": (adjusted("brightness", image, factor), np.clip(image * factor, 0, 1)),
        "Contrast": (
            adjusted("contrast", image, factor), np.clip(factor * image + (1 - factor) * grey.mean(), 0, 1)
        ),
        "Color": (adjusted("saturation", image, factor), np.clip(factor * image + (1 - factor) * grey, 0, 1)),
    }  # fmt: skip
    picture = Image.fromarray(np.round(255 * image).astype(np.uint8))
    for name, (found, expected) in ours.items():
        close(found, expected)
        pil = np.asarray(getattr(ImageEnhance, name)(picture).enhance(factor), float) / 255
        assert np.abs(np.asarray(found) - pil).max() < 4 / 255  # PIL rounds at each turn


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.3])
def test_gamma_equals_numpy(exponent):
    image = make()[0]
    close(adjusted("gamma", image, exponent), np.clip(image.astype(float), 1e-8, 1) ** exponent)


def test_grey_images():
    image = make((9, 9, 1))[0]
    close(adjusted("contrast", image, 0.5), np.clip(0.5 * image + 0.5 * image.mean(), 0, 1))
    assert strong(KEY, image[None], Strong()).shape == (1, 9, 9, 1)
    names = [list(augment.ADJUSTMENTS)[i] for i in augment.adjustments(image.shape, Strong())]
    assert names == ["brightness", "contrast", "gamma"]
    with pytest.raises(UserError, match="1 or 3 channels, not 2"):
        strong(KEY, make((9, 9, 2), 2), Strong())


MOVES = [(0.0, (0, 0), 1.0), (15.0, (0, 0), 1.0), (0.0, (2, -1), 1.0), (0.0, (0, 0), 1.1), (-12.0, (-1, 2), 0.9)]


def scipy_affine(image, degrees, shift, scale, margin):
    """The inverse map that scipy wants: output pixel to input position; edges repeated."""
    angle = math.radians(degrees)
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / scale
    centre = (np.array(image.shape[:2]) - 1) / 2
    offset = centre - matrix @ (centre + margin + np.array(shift))
    shape = tuple(side + 2 * margin for side in image.shape[:2])
    return np.stack(
        [
            scipy.ndimage.affine_transform(image[..., c].astype(float), matrix, offset, shape, order=1, mode="nearest")
            for c in range(image.shape[-1])
        ],
        -1,
    )


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize(("degrees", "shift", "scale"), MOVES)
def test_affine_equals_scipy(degrees, shift, scale, margin):
    image = make()[0]
    ours = augment.affine(image, math.radians(degrees), jnp.array(shift), scale, margin)
    close(ours, scipy_affine(image, degrees, shift, scale, margin), 2e-5)


@pytest.mark.parametrize("sigma", [0.001, 0.1, 0.3, 0.5])
def test_blur_equals_scipy(sigma):
    image = make((14, 13, 3))[0]
    taps = np.exp(-0.5 * (np.arange(-2, 3) / sigma) ** 2)
    expected = image.astype(float)
    for axis in (0, 1):
        expected = scipy.ndimage.correlate1d(expected, taps / taps.sum(), axis)
    close(augment.blur(image, sigma), expected[2:-2, 2:-2])
    gaussian = scipy.ndimage.gaussian_filter(image.astype(float), (sigma, sigma, 0), radius=(2, 2, 0))
    close(augment.blur(image, sigma), gaussian[2:-2, 2:-2])


@pytest.mark.parametrize(("degrees", "shift", "scale"), MOVES)
def test_margins_stand_for_the_published_padding(degrees, shift, scale):
    """Pad by half of the side, affine, blur, crop at the centre: the same, the long way."""
    image, sigma = make((12, 12, 3))[0], 0.5
    padded = np.pad(image, ((6, 6), (6, 6), (0, 0)), mode="edge")
    moved = scipy_affine(padded, degrees, shift, scale, 0)
    blurred = scipy.ndimage.gaussian_filter(moved, (sigma, sigma, 0), radius=(2, 2, 0))
    drawn = draw_strong(KEY, image.shape, Strong())._replace(
        angle=jnp.float32(math.radians(degrees)),
        shift=jnp.array(shift),
        scale=jnp.float32(scale),
        sigma=jnp.float32(sigma),
    )
    for flip, expected in ((False, blurred[6:-6, 6:-6]), (True, blurred[6:-6, 6:-6][:, ::-1])):
        close(augment.move(jnp.asarray(image), drawn._replace(flip=jnp.array(flip)), Strong()), expected, 2e-5)


def draws(count=3000, shape=(16, 16, 3), options=Strong()):  # noqa: B008
    return jax.vmap(lambda key: draw_strong(key, shape, options))(jax.random.split(KEY, count))


def test_draws_fill_their_ranges():
    drawn, options, count = draws(), Strong(), 3000
    ranges = [
        *((drawn.amounts[:, i], 1 - s, 1 + s) for i, s in enumerate((0.4, 0.3, 0.5))),
        (drawn.amounts[:, 3], -0.06, 0.06),
        (drawn.amounts[:, 4], 0.7, 1.3),
        (jnp.rad2deg(drawn.angle), -15, 15),
        (drawn.scale, 0.9, 1.1),
        (drawn.sigma, 0.001, 0.5),
    ]
    for values, low, high in ranges:
        width = high - low
        assert low - 1e-5 <= values.min() < low + 0.01 * width and high - 0.01 * width < values.max() <= high + 1e-5
        assert abs(float(values.mean()) - (low + high) / 2) < 5 * width / math.sqrt(12 * count)
    assert set(np.unique(drawn.shift)) == {-2, -1, 0, 1, 2}  # an eighth of 16, in whole pixels
    assert abs(float(drawn.flip.mean()) - 0.5) < 5 * 0.5 / math.sqrt(count)
    assert not draws(options=options._replace(flip=False)).flip.any()


def test_every_order_is_as_likely():
    orders, counts = np.unique(draws(6000).order, axis=0, return_counts=True)
    assert len(orders) == 120 and np.abs(counts - 50).max() < 5 * math.sqrt(50)
    grey = np.unique(draws(shape=(16, 16, 1)).order, axis=0)
    assert len(grey) == 6


def test_the_order_drawn_is_the_order_applied():
    image = jnp.asarray(make()[0])
    used = augment.adjustments(image.shape, Strong())
    names = list(augment.ADJUSTMENTS)
    for seed in range(8):
        drawn = draw_strong(jax.random.key(seed), image.shape, Strong())
        expected = image
        for i in np.asarray(drawn.order):
            expected = adjusted(names[i], expected, drawn.amounts[i])
        close(augment.jitter(image, drawn, used), expected)


def test_off_is_the_identity_and_each_part_alone_is_not():
    images = make(n=4)
    np.testing.assert_array_equal(strong(KEY, images, OFF), images)
    whole, compiled = strong(KEY, images, Strong(noise=0.3)), jax.jit(strong, static_argnums=2)
    close(compiled(KEY, images, Strong(noise=0.3)), whole, 1e-5)
    for field, value in Strong()._asdict().items():
        if field == "invert":
            continue
        alone = strong(KEY, images, OFF._replace(**{field: value}))
        assert np.abs(np.asarray(alone) - images).max() > 1e-3, field


def test_inverted_images_are_augmented_as_their_negatives():
    images = make((9, 9, 1), 5)
    close(strong(KEY, images, Strong(invert=True)), 1 - strong(KEY, 1 - images, Strong()), 1e-6)
    white = strong(KEY, np.ones((5, 9, 9, 1), np.float32), Strong(noise=0, invert=True))
    close(white, np.ones((5, 9, 9, 1)), 1e-6)


def test_bytes_are_read_as_floats():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    close(strong(KEY, pixels, Strong()), strong(KEY, (pixels / 255).astype(np.float32), Strong()), 1e-6)


def test_noise_has_its_deviation():
    noisy = strong(KEY, np.full((4, 40, 40, 3), 0.5, np.float32), OFF._replace(noise=0.02))
    assert abs(float(noisy.std()) - 0.02) < 5 * 0.02 / math.sqrt(2 * noisy.size)
