"""The 19 corruptions: their constants, their seeds, and their pixels beside other ways of computing them."""

import colorsys
import functools
import hashlib
import io
import math

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from cxda_jax.data import weather_digital
from cxda_jax.data.corruptions import BLOCK, NAMES, SEVERITIES, corrupt

seeded = functools.partial(np.random.default_rng, 0)
DETERMINISTIC = "defocus_blur zoom_blur brightness contrast pixelate jpeg_compression gaussian_blur saturate"


def scenes(n, side):
    """Smooth colours, and a square of one colour in each image."""
    rng = np.random.default_rng(0)
    pixels = ndimage.zoom(rng.integers(0, 256, (n, 4, 4, 3)), (1, side / 4, side / 4, 1), order=1)
    pixels[:, side // 4 : side // 2, side // 3 : side // 2] = rng.integers(0, 256, (n, 1, 1, 3))
    return pixels.astype(np.uint8)


def test_constants_are_those_of_the_scripts():
    """As when they were compared with the scripts that made CIFAR-10-C and Tiny-ImageNet-C."""
    digests = {name: hashlib.sha256(repr(table).encode()).hexdigest()[:16] for name, table in SEVERITIES.items()}
    assert digests == {"cifar": "3d1e23d305b12862", "tiny": "1c9539c0b3422930"} and len(NAMES) == 19


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_images_stay_apart_in_batches_large_and_empty(name):
    assert corrupt(scenes(0, 16), name, 5, seeded()).shape == (0, 16, 16, 3)
    images, alike = scenes(BLOCK + 3, 16), name in DETERMINISTIC.split()
    images[-1] = images[-2]
    before = images.copy()
    for severity in (3, 5):  # of spatter, water and mud
        result = corrupt(images, name, severity, seeded())
        assert result.shape == images.shape and result.dtype == np.uint8 and (result != images).any((1, 2, 3)).all()
        assert np.array_equal(result[-1], result[-2]) == alike  # each image has its own draws
        assert np.array_equal(corrupt(images, name, severity, seeded()), result)
        assert np.array_equal(corrupt(images, name, severity, np.random.default_rng(1)), result) == alike
        others = images.copy()
        others[1] = 255 - others[1]
        # How many random numbers a Poisson draw takes depends on the pixels, so later images may differ.
        same = np.arange(len(images)) != 1 if name != "shot_noise" else [0]
        np.testing.assert_array_equal(corrupt(others, name, severity, seeded())[same], result[same])
    np.testing.assert_array_equal(images, before)


def in_hsv(x, change):
    pixels = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in x.reshape(-1, 3) / 255]
    return 255 * np.array(pixels).reshape(x.shape)


def by_pillow(x, change):
    return np.stack([np.asarray(change(Image.fromarray(image.astype(np.uint8)))) for image in x])


def pixelated(image, share):
    small = int(share * image.width)
    return image.resize((small, small), Image.Resampling.BOX).resize(image.size, Image.Resampling.BOX)


def saved(image, quality):
    image.save(file := io.BytesIO(), "JPEG", quality=quality)
    return Image.open(file)


def defocus_blur(x, radius, sigma):
    place, side = np.arange(-8, 9), x.shape[1]
    disk = np.array([[float(y * y + x * x <= radius * radius) for x in place] for y in place])
    rim = np.array([[math.exp(-(y * y + x * x) / (2 * sigma**2)) for x in (-1, 0, 1)] for y in (-1, 0, 1)])
    kernel = ndimage.convolve(disk / disk.sum(), rim / rim.sum(), mode="constant")
    padded = np.pad(x, ((0, 0), (8, 8), (8, 8), (0, 0)), mode="reflect")
    return sum(w * padded[:, r : r + side, c : c + side] for (r, c), w in np.ndenumerate(kernel))


def zoomed(image, zoom):
    """The centre of an image, enlarged by scipy."""
    side = len(image)
    crop = math.ceil(side / zoom)
    first = (side - crop) // 2
    large = ndimage.zoom(image[first : first + crop, first : first + crop], (zoom, zoom, 1), order=1)
    first = (len(large) - side) // 2
    return large[first : first + side, first : first + side]


def glass_blur(x, sigma, reach, rounds):
    """Glass blur of one image, pixel by pixel as the original does it."""
    x = np.trunc(ndimage.gaussian_filter(x[0], (sigma, sigma, 0), mode="nearest") + 1e-4)
    scan, rng = range(len(x) - reach, reach, -1), seeded()
    for _ in range(rounds):
        dy, dx = rng.integers(-reach, reach, (2, len(scan), len(scan), 1))[..., 0]
        for i, row in enumerate(scan):
            for j, column in enumerate(scan):
                one, other = x[row, column], x[row + dy[i, j], column + dx[i, j]]
                one[:], other[:] = other, one  # as in the original, the second assignment finds the first one's result
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")[None]


def plasma(n, side, decay):
    """Clouds, point by point: each is the mean of four around it, which end in the opposite edge, and some noise."""
    rng, maps, step, wobble = seeded(), np.zeros((n, side, side)), side, 100.0
    while step > 1:
        half = step // 2
        crossed, straight = [(1, 1), (1, -1), (-1, 1), (-1, -1)], [(0, 1), (1, 0), (0, -1), (-1, 0)]
        for down, right, around in ((half, half, crossed), (0, half, straight), (half, 0, straight)):
            noise = 2 * rng.random((n, side // step, side // step), np.float32) - 1.0
            for row, column in np.ndindex(noise.shape[1:]):
                y, x = row * step + down, column * step + right
                near = [maps[:, (y + half * i) % side, (x + half * j) % side] for i, j in around]
                maps[:, y, x] = np.mean(near, 0) + wobble**2 * noise[:, row, column]
        step, wobble = half, wobble / decay
    maps -= maps.min((1, 2), keepdims=True)
    return maps / maps.max((1, 2), keepdims=True)


def fog(x, density, decay):
    side = x.shape[1]
    clouds = plasma(len(x), 32, decay)[:, :side, :side, None]
    most = x.max((1, 2, 3), keepdims=True) / 255  # a black image has nothing to lighten
    return (x + 255 * density * clouds) * most / (most + density)


def frost(x, keep, add):
    ice, rng = weather_digital.ice_textures(), seeded()
    (n, side), which = x.shape[:2], rng.integers(0, 5, len(x))
    corners = rng.integers(0, 256, (2, n, 1))[..., 0].T
    crops = [np.roll(ice[i], -corner, (0, 1))[:side, :side] for i, corner in zip(which, corners, strict=True)]
    return keep * x + add * np.stack(crops)


def streaked(x, radius, sigma, angles):
    """Motion blur, copy by copy: each pixel averages those ahead of it, with the weights of half a gaussian."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    blurred, places = np.zeros_like(x), np.arange(x.shape[1])
    for image, result, angle in zip(x, blurred, np.deg2rad(angles), strict=True):
        for step, weight in zip(steps, weights, strict=True):
            rows, columns = (places + math.ceil(step * f(angle) - 0.5) for f in (math.sin, math.cos))
            result += weight / weights.sum() * image[rows.clip(0, len(image) - 1)][:, columns.clip(0, len(image) - 1)]
    return np.rint(blurred)


def snow(x, mean, deviation, zoom, threshold, radius, sigma, keep):
    rng = seeded()
    noise = np.moveaxis(mean + deviation * rng.standard_normal(x.shape[:3], np.float32).astype(float), 0, -1)
    flakes = np.moveaxis(zoomed(noise, zoom), -1, 0)[..., None]
    flakes = np.trunc(255 * np.where(flakes < threshold, 0, flakes.clip(max=1)) + 1e-4)
    flakes = streaked(flakes, radius, sigma, rng.uniform(-135, -45, len(x)))
    white = np.maximum(x, 1.5 * (x @ [0.299, 0.587, 0.114])[..., None] + 127.5)
    return keep * x + (1 - keep) * white + flakes + flakes[:, ::-1, ::-1]  # each falls twice, turned by half a circle


def elastic_transform(x, *constants):
    """An affine map that moves three points by random steps, then waves; sampled by scipy."""
    (n, side), rng, (amount, sigma, corners) = x.shape[:2], seeded(), (len(x[0]) * c for c in constants)
    grid = np.mgrid[:side, :side].astype(float)  # rows, then columns
    before = side // 2 + side // 3 * np.array([[1, 1], [-1, 1], [-1, -1]])
    after = before + rng.uniform(-corners, corners, (n, 3, 2))[..., ::-1]
    waves = rng.uniform(-1, 1, (2, n, side, side))[::-1] if amount else np.zeros((2, n, side, side))
    waves = amount * ndimage.gaussian_filter(waves, (0, 0, sigma, sigma), mode="reflect", truncate=3)
    result = np.empty_like(x)
    for i in range(n):
        to_image = np.linalg.inv(np.vstack([after[i].T, np.ones(3)]).T) @ before  # [3, 2]
        places = np.einsum("ihw,ij->jhw", np.stack([*grid, np.ones((side, side))]), to_image)
        for channel in range(3):
            moved = ndimage.map_coordinates(x[i, ..., channel], places, order=1, mode="mirror")
            result[i, ..., channel] = ndimage.map_coordinates(moved, grid + waves[:, i], order=1, mode="reflect")
    return result


def edges_of(drops):
    """Canny's edges of one image: ridges steeper than 50, in pieces that are somewhere steeper than 150."""
    right, down = ndimage.sobel(drops, 1, mode="nearest"), ndimage.sobel(drops, 0, mode="nearest")
    slope = np.pad(np.abs(right) + np.abs(down), 1)
    ridge = np.zeros(drops.shape, bool)
    for y, x in np.ndindex(drops.shape):
        eighth = round(math.atan2(down[y, x], right[y, x]) / (math.pi / 4)) % 4
        i, j = [(0, 1), (1, 1), (1, 0), (1, -1)][eighth]
        here = slope[y + 1, x + 1]
        ridge[y, x] = here > 50 and here >= slope[y + 1 + i, x + 1 + j] and here > slope[y + 1 - i, x + 1 - j]
    pieces, _ = ndimage.label(ridge, np.ones((3, 3)))
    return ridge & np.isin(pieces, np.unique(pieces[slope[1:-1, 1:-1] > 150]))


def watered(drops, strength):
    """Drops of water in one image: more light far from their edges, and on one side."""
    edges, mean = edges_of(drops), np.full((3, 3), 1 / 9)
    distance = ndimage.distance_transform_edt(~edges).clip(max=20) if edges.any() else np.full(drops.shape, 20.0)
    levels = np.trunc(ndimage.correlate(distance, mean, mode="mirror") + 1e-4)
    rank, lowest = np.searchsorted(np.sort(levels.ravel()), levels, side="right"), (levels == levels.min()).sum()
    light = np.rint(255 * (rank - lowest) / max(levels.size - lowest, 1))
    light = ndimage.correlate(light, [[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]], mode="mirror").clip(0, 255)
    drops = drops * np.rint(ndimage.correlate(light, mean, mode="mirror"))
    return strength * drops / max(drops.max(), 1)


def spatter(x, mean, deviation, sigma, threshold, strength, mud):
    noise = mean + deviation * seeded().standard_normal(x.shape[:3], np.float32)
    liquid = ndimage.gaussian_filter(noise, (0, sigma, sigma), mode="nearest", truncate=4)
    if mud:
        cover = (liquid > threshold).astype(float)
        cover = ndimage.gaussian_filter(cover, (0, strength, strength), mode="nearest", truncate=4)[..., None]
        return np.where(cover < 0.8, x, x * (1 - cover) + cover * [63, 42, 20])
    drops = np.trunc(255 * np.where(liquid < threshold, 0, liquid.clip(0, 1)))
    return x + np.array([175, 238, 238]) * np.stack([watered(image, strength) for image in drops])[..., None]


# name -> images float64 [n, side, side, 3] and a constant -> levels before they are truncated
EXPECTED = {
    "gaussian_noise": lambda x, c: x + 255 * c * seeded().standard_normal(x.shape, np.float32),
    "speckle_noise": lambda x, c: x + x * c * seeded().standard_normal(x.shape, np.float32),
    "shot_noise": lambda x, c: seeded().poisson(x * c / 255) * 255 / c,  # counts of photons
    "impulse_noise": lambda x, c: np.select([(u := seeded().random(x.shape, np.float32)) < c / 2, u < c], [0, 255], x),
    "contrast": lambda x, c: x.mean((1, 2), keepdims=True) + c * (x - x.mean((1, 2), keepdims=True)),
    "brightness": lambda x, c: in_hsv(x, lambda h, s, v: (h, s, min(v + c, 1))),
    "saturate": lambda x, c: in_hsv(x, lambda h, s, v: (h, min(s * c[0] + c[1], 1), v)),
    "pixelate": lambda x, c: by_pillow(x, lambda image: pixelated(image, c)),
    "jpeg_compression": lambda x, c: by_pillow(x, lambda image: saved(image, c)),
    "gaussian_blur": lambda x, c: ndimage.gaussian_filter(x, (0, c, c, 0), mode="nearest", truncate=4),
    "zoom_blur": lambda x, c: np.stack([np.mean([i, *(zoomed(i, z) for z in np.arange(1, c, 0.01))], 0) for i in x]),
    "motion_blur": lambda x, c: streaked(x, *c, seeded().uniform(-45, 45, len(x))),
}
OF_PARTS = defocus_blur, glass_blur, fog, frost, snow, elastic_transform, spatter
EXPECTED |= {function.__name__: lambda x, c, f=function: f(x, *c) for function in OF_PARTS}


@pytest.mark.parametrize("side, constants", [(24, "cifar"), (32, "tiny")])
@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_another_computation(name, side, constants):
    images = scenes(1 if name == "glass_blur" else 3, side)
    images[0, :6] = np.arange(6, dtype=np.uint8)[:, None, None] * 51  # greys, black and white among them
    images[2:] *= name != "fog"
    for severity, c in enumerate(SEVERITIES[constants][name], 1):
        result = corrupt(images, name, severity, seeded(), constants).astype(float)
        expected = np.clip(EXPECTED[name](images.astype(float), c), 0, 255).astype(np.uint8)
        assert np.abs(result - expected).max() <= (0 if name in ("pixelate", "jpeg_compression") else 1)
