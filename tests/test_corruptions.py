import colorsys
import io
import math
import re

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from cxda_jax.data import corruptions
from cxda_jax.data.corruptions import NAMES, SEVERITIES, corrupt
from cxda_jax.types import UserError

DETERMINISTIC = {
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate",
}  # fmt: skip
STOCHASTIC = [name for name in NAMES if name not in DETERMINISTIC]
LEVELS = range(1, 6)


def scenes(n: int, side: int, seed: int = 0) -> np.ndarray:
    """Coloured discs and bars over gradients and texture: uint8 [n, side, side, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.meshgrid(np.linspace(0, 1, side), np.linspace(0, 1, side), indexing="ij")
    pixels = np.empty((n, side, side, 3))
    for image in pixels:
        ends = rng.uniform(0.1, 0.9, (2, 3))
        slope = np.clip(0.5 + (x - 0.5) * rng.uniform(-1, 1) + (y - 0.5) * rng.uniform(-1, 1), 0, 1)[..., None]
        texture = ndimage.gaussian_filter(rng.normal(size=(side, side)), side / 32)
        image[:] = ends[0] + slope * (ends[1] - ends[0]) + 0.06 * (texture / texture.std())[..., None]
        for _ in range(3):
            row, column, radius = rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8), rng.uniform(0.08, 0.25)
            disc = (y - row) ** 2 + (x - column) ** 2 < radius**2
            bar = (abs(y - row) < radius) & (abs(x - column) < radius / 3)
            image[disc if rng.random() < 0.5 else bar] = rng.uniform(0, 1, 3)
    return (255 * pixels.clip(0, 1)).astype(np.uint8)


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def distance(images: np.ndarray, name: str, severity: int, constants: str, seed: int = 0) -> float:
    return np.abs(corrupt(images, name, severity, seeded(seed), constants).astype(float) - images).mean()


def assert_close(result: np.ndarray, expected: np.ndarray, levels: float = 1.0) -> None:
    """`expected` is not truncated yet."""
    assert np.abs(result - np.clip(expected, 0, 255).astype(np.uint8).astype(float)).max() <= levels


def test_names_and_constants():
    assert len(NAMES) == len(set(NAMES)) == 19 and len(STOCHASTIC) == 11
    assert list(SEVERITIES) == ["cifar", "tiny"]
    for table in SEVERITIES.values():
        assert tuple(table) == NAMES and all(len(values) == 5 for values in table.values())


@pytest.mark.parametrize(
    ("name", "cifar", "tiny"),
    [
        ("gaussian_noise", (0.04, 0.10), (0.04, 0.18)),
        ("shot_noise", (500, 50), (250, 15)),
        ("impulse_noise", (0.01, 0.07), (0.01, 0.14)),
        ("defocus_blur", ((0.3, 0.4), (1.5, 0.1)), ((0.5, 0.6), (3, 0.1))),
        ("glass_blur", ((0.05, 1, 1), (0.4, 1, 2)), ((0.1, 1, 1), (0.9, 2, 2))),
        ("motion_blur", ((6, 1), (9, 2.5)), ((10, 1), (12, 3))),
        ("zoom_blur", (1.06, 1.26), (1.06, 1.26)),
        ("snow", ((0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)),
                 ((0.1, 0.2, 1, 0.6, 8, 3, 0.8), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6))),
        ("frost", ((1, 0.2), (0.75, 0.45)), ((1, 0.3), (0.7, 0.55))),
        ("fog", ((0.2, 3), (1.5, 1.75)), ((0.4, 3), (2, 1.75))),
        ("brightness", (0.05, 0.3), (0.1, 0.5)),
        ("contrast", (0.75, 0.15), (0.4, 0.05)),
        ("elastic_transform", ((0, 0, 0.08), (0.1, 0.03, 0.03)), ((0, 0, 0.08), (0.16, 0.03, 0.02))),
        ("pixelate", (0.95, 0.65), (0.9, 0.5)),
        ("jpeg_compression", (80, 40), (65, 25)),
        ("speckle_noise", (0.06, 0.2), (0.15, 0.35)),
        ("gaussian_blur", (0.4, 1), (0.5, 1.5)),
        ("spatter", ((0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.5, 0.68, 0.6, 1)),
                    ((0.62, 0.1, 0.7, 0.7, 0.6, 0), (0.65, 0.1, 0.5, 0.67, 0.6, 1))),
        ("saturate", ((0.3, 0), (2.5, 0.2)), ((0.3, 0), (30, 0.2))),
    ],
)  # fmt: skip
def test_first_and_last_constants_are_the_scripts(name, cifar, tiny):
    for constants, (first, last) in (("cifar", cifar), ("tiny", tiny)):
        values = SEVERITIES[constants][name]
        assert values[0] == first and values[-1] == last


def test_constants_in_between_are_the_scripts():
    assert SEVERITIES["cifar"]["jpeg_compression"] == (80, 65, 58, 50, 40)
    assert SEVERITIES["cifar"]["contrast"] == (0.75, 0.5, 0.4, 0.3, 0.15)
    assert SEVERITIES["cifar"]["saturate"] == ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
    assert SEVERITIES["tiny"]["fog"] == ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75))
    assert SEVERITIES["tiny"]["glass_blur"] == ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2))
    # The lists of zooms that the scripts' aranges give; a rounding error adds a last one to the first two.
    assert [len(np.arange(1, end, 0.01)) for end in SEVERITIES["cifar"]["zoom_blur"]] == [7, 12, 16, 21, 26]


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_shape_dtype_and_seeds(name, constants):
    images = scenes(3, 32)
    kept = images.copy()
    for severity in LEVELS:
        result = corrupt(images, name, severity, seeded(1), constants)
        assert result.shape == images.shape and result.dtype == np.uint8
        assert result.tobytes() != images.tobytes()
        assert result.tobytes() == corrupt(images, name, severity, seeded(1), constants).tobytes()
        other = corrupt(images, name, severity, seeded(2), constants)
        assert (result.tobytes() == other.tobytes()) == (name in DETERMINISTIC)
    np.testing.assert_array_equal(images, kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("side", "constants"), [(16, "cifar"), (17, "tiny"), (48, "cifar"), (64, "tiny")])
def test_other_sides(name, side, constants):
    images = scenes(2, side)
    for severity in (1, 3, 5):
        result = corrupt(images, name, severity, seeded(), constants)
        assert result.shape == images.shape and (result != images).any((1, 2, 3)).all()


@pytest.mark.parametrize("name", NAMES)
def test_images_do_not_share_draws(name):
    images = np.repeat(scenes(1, 32), 2, 0)
    for severity in LEVELS:
        first, second = corrupt(images, name, severity, seeded(3))
        assert np.array_equal(first, second) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", sorted(DETERMINISTIC))
def test_a_batch_is_its_images(name):
    images = scenes(corruptions._BLOCK + 1, 16)
    result = corrupt(images, name, 5, seeded())
    for i in (0, 1, corruptions._BLOCK - 1, corruptions._BLOCK):
        np.testing.assert_array_equal(result[i], corrupt(images[i : i + 1], name, 5, seeded())[0])


@pytest.mark.parametrize("name", NAMES)
def test_images_do_not_mix(name):
    images = scenes(3, 32)
    for severity in (3, 5):  # of spatter, water and mud
        result = corrupt(images, name, severity, seeded())
        for changed in (0, 1, 2):
            others = images.copy()
            others[changed] = 255 - others[changed]
            # How many random numbers a Poisson draw takes depends on the pixels, so later images may differ.
            kept = [i for i in range(3) if i != changed and (name != "shot_noise" or i < changed)]
            np.testing.assert_array_equal(corrupt(others, name, severity, seeded())[kept], result[kept])


def test_large_and_empty_batches():
    images = scenes(2 * corruptions._BLOCK + 3, 16)
    for name in NAMES:
        result = corrupt(images, name, 5, seeded())
        assert (result != images).any((1, 2, 3)).all()
        assert corrupt(images[:0], name, 5, seeded()).shape == (0, 16, 16, 3)


# How far images move from the clean ones grows with severity, but where the constants themselves forbid it:
#   saturate           goes below 1, to 0.3 and 0.1, before it goes above
#   spatter            is water at first, then mud, which covers less
#   elastic_transform  has less and less of the affine map, which moves pixels further than the waves that grow
#   frost              takes from the image what it adds of ice, so that images as bright as ice move less
#   glass_blur         changes sigma, reach and rounds in turn; a wider gaussian smooths what was shuffled
#   motion_blur        has sigma 2 at CIFAR's severities 3 and 4; what the larger radius adds weighs 1e-9
UNEVEN = {"saturate", "spatter", "elastic_transform", "frost", "glass_blur"}


def grows(values) -> bool:
    return bool((np.diff(values) > 0).all())


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_severity_moves_images_further(name, constants):
    images = scenes(48, {"cifar": 32, "tiny": 64}[constants])
    far = [distance(images, name, severity, constants) for severity in LEVELS]
    if name == "saturate":
        assert grows(far[:2]) and grows(far[2:])
    elif name == "spatter":
        assert grows(far[:3]) and grows(far[3:])
    elif name == "elastic_transform":
        assert far[4] < 0.75 * far[0] and (np.diff(far) < 0.05 * far[0]).all()
    elif name == "glass_blur":
        groups = {"cifar": ((0, 1, 2), (3, 4)), "tiny": ((0, 1), (2, 3), (4,))}[constants]  # by reach times rounds
        for fewer, more in zip(groups[:-1], groups[1:], strict=True):
            assert max(far[i] for i in fewer) < min(far[i] for i in more)
    elif name == "motion_blur" and constants == "cifar":
        assert grows(far[:3]) and far[3] == pytest.approx(far[2], rel=1e-3) and far[4] > far[3]
    elif name != "frost":
        assert name not in UNEVEN and grows(far)


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
def test_frost_hides_more_of_an_image(constants):
    images = scenes(48, 32)
    left = []
    for severity in LEVELS:
        results = [corrupt(x, "frost", severity, seeded(), constants).astype(float) for x in (images, images[::-1])]
        left.append(np.abs(results[0] - results[1]).mean())  # the ice is the same
    assert grows([-v for v in left])


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
def test_noise_has_its_moments(constants):
    grey = np.full((40, 32, 32, 3), 128, np.uint8)
    for severity, c in enumerate(SEVERITIES[constants]["gaussian_noise"], 1):
        if c <= 0.12:  # beyond, clipping shows
            noisy = corrupt(grey, "gaussian_noise", severity, seeded(), constants)
            assert noisy.mean() == pytest.approx(127.5, abs=0.3)  # truncation takes half a level
            assert noisy.std() == pytest.approx(255 * c, rel=0.02)
    for severity, c in enumerate(SEVERITIES[constants]["speckle_noise"], 1):
        for value in (40, 80):
            noisy = corrupt(np.full_like(grey, value), "speckle_noise", severity, seeded(), constants)
            assert noisy.mean() == pytest.approx(value - 0.5, abs=0.3)
            assert noisy.std() == pytest.approx(value * c, rel=0.02)
    for severity, c in enumerate(SEVERITIES[constants]["shot_noise"], 1):
        value = 60
        noisy = corrupt(np.full_like(grey, value), "shot_noise", severity, seeded(), constants)
        assert noisy.mean() == pytest.approx(value - 0.5, abs=0.6)
        assert noisy.std() == pytest.approx(math.sqrt(255 * value / c), rel=0.02)
        assert len(np.unique(noisy)) <= c + 1  # counts of photons
    for severity, c in enumerate(SEVERITIES[constants]["impulse_noise"], 1):
        noisy = corrupt(grey, "impulse_noise", severity, seeded(), constants)
        assert set(np.unique(noisy)) == {0, 128, 255}
        for value in (0, 255):
            assert (noisy == value).mean() == pytest.approx(c / 2, rel=0.12)


def test_noise_differs_between_channels():
    grey = np.full((4, 32, 32, 3), 128, np.uint8)
    for name in ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"):
        channels = corrupt(grey, name, 5, seeded()).reshape(-1, 3).T.astype(float)
        assert np.abs(np.corrcoef(channels) - np.eye(3)).max() < 0.1


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
def test_contrast(constants):
    images = scenes(3, 32)
    for severity, c in enumerate(SEVERITIES[constants]["contrast"], 1):
        means = images.mean((1, 2), keepdims=True)
        assert_close(corrupt(images, "contrast", severity, seeded(), constants), means + c * (images - means))


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
def test_brightness_and_saturate_work_in_hsv(constants):
    images = scenes(1, 16)
    images[0, :6] = np.arange(0, 6, dtype=np.uint8)[:, None, None] * 51  # greys, black and white among them
    hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in images.reshape(-1, 3) / 255]
    for severity in LEVELS:
        c = SEVERITIES[constants]["brightness"][severity - 1]
        expected = np.array([colorsys.hsv_to_rgb(h, s, min(v + c, 1)) for h, s, v in hsv]).reshape(images.shape)
        assert_close(corrupt(images, "brightness", severity, seeded(), constants), 255 * expected)
        factor, offset = SEVERITIES[constants]["saturate"][severity - 1]
        expected = [colorsys.hsv_to_rgb(h, min(s * factor + offset, 1), v) for h, s, v in hsv]
        expected = 255 * np.array(expected).reshape(images.shape)
        assert_close(corrupt(images, "saturate", severity, seeded(), constants), expected)


@pytest.mark.parametrize("side", [32, 48])
def test_pixelate_and_jpeg_are_pillows(side):
    images = scenes(3, side)
    for constants, table in SEVERITIES.items():
        for severity in LEVELS:
            small = int(table["pixelate"][severity - 1] * side)
            pixelated = corrupt(images, "pixelate", severity, seeded(), constants)
            compressed = corrupt(images, "jpeg_compression", severity, seeded(), constants)
            for image, coarse, lossy in zip(images, pixelated, compressed, strict=True):
                shrunk = Image.fromarray(image).resize((small, small), Image.Resampling.BOX)
                np.testing.assert_array_equal(coarse, np.asarray(shrunk.resize((side, side), Image.Resampling.BOX)))
                file = io.BytesIO()
                Image.fromarray(image).save(file, "JPEG", quality=table["jpeg_compression"][severity - 1])
                np.testing.assert_array_equal(lossy, np.asarray(Image.open(file)))


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
def test_gaussian_blur_is_scipys(constants):
    images = scenes(2, 32)
    for severity, sigma in enumerate(SEVERITIES[constants]["gaussian_blur"], 1):
        expected = np.empty(images.shape)
        for i in range(len(images)):
            for channel in range(3):
                plane = images[i, ..., channel].astype(float)
                expected[i, ..., channel] = ndimage.gaussian_filter(plane, sigma, mode="nearest", truncate=4)
        assert_close(corrupt(images, "gaussian_blur", severity, seeded(), constants), expected)


@pytest.mark.parametrize("constants", ["cifar", "tiny"])
def test_defocus_blur_correlates_with_a_soft_disk(constants):
    images = scenes(2, 32)
    place = np.arange(-8, 9)
    for severity, (radius, sigma) in enumerate(SEVERITIES[constants]["defocus_blur"], 1):
        disk = np.array([[float(y * y + x * x <= radius * radius) for x in place] for y in place])
        rim = np.array([[math.exp(-(y * y + x * x) / (2 * sigma**2)) for x in (-1, 0, 1)] for y in (-1, 0, 1)])
        kernel = ndimage.convolve(disk / disk.sum(), rim / rim.sum(), mode="constant")
        padded = np.pad(images.astype(float), ((0, 0), (8, 8), (8, 8), (0, 0)), mode="reflect")
        expected = np.zeros(images.shape)
        for (row, column), weight in np.ndenumerate(kernel):
            expected += weight * padded[:, row : row + 32, column : column + 32]
        assert_close(corrupt(images, "defocus_blur", severity, seeded(), constants), expected)


def zoomed(image: np.ndarray, zoom: float) -> np.ndarray:
    """The centre of an image, enlarged by scipy."""
    side = len(image)
    crop = math.ceil(side / zoom)
    first = (side - crop) // 2
    large = ndimage.zoom(image[first : first + crop, first : first + crop], (zoom, zoom, 1), order=1)
    first = (len(large) - side) // 2
    return large[first : first + side, first : first + side]


@pytest.mark.parametrize("side", [16, 33, 48])
def test_zooms_are_scipys(side):
    images = scenes(1, side)[0].astype(float)
    for zoom in (1, 1.01, 1.1, 1.25, 1.75, 2.25):
        ours = np.moveaxis(corruptions._zoom(np.moveaxis(images, -1, 0).astype(np.float32), zoom), 0, -1)
        np.testing.assert_allclose(ours, zoomed(images, zoom), atol=1e-3)


def test_zoom_blur_averages_zooms():
    images = scenes(1, 32)
    for severity, end in enumerate(SEVERITIES["cifar"]["zoom_blur"], 1):
        parts = [images[0].astype(float)] + [zoomed(images[0].astype(float), z) for z in np.arange(1, end, 0.01)]
        assert_close(corrupt(images, "zoom_blur", severity, seeded())[0], np.mean(parts, 0))


@pytest.mark.parametrize(("constants", "side"), [("cifar", 64), ("tiny", 64)])
def test_motion_blur_keeps_means(constants, side):
    images = np.full((12, side, side, 3), 90, np.uint8)
    images[:, 26:38, 26:38] = scenes(12, 12)
    for severity in LEVELS:
        flat = np.full((3, side, side, 3), 200, np.uint8)
        assert (corrupt(flat, "motion_blur", severity, seeded(), constants) == 200).all()
        moved = corrupt(images, "motion_blur", severity, seeded(), constants)
        np.testing.assert_allclose(moved.mean((1, 2)), images.mean((1, 2)), atol=0.1)


def test_streaks_are_half_gaussians_in_a_direction():
    dot = np.zeros((3, 21, 21), np.uint8)
    dot[:, 10, 10] = 200
    streaks = corruptions._streak(dot, 4, 2.0, np.array([0.0, 90.0, -45.0]))
    weights = np.exp(-(np.arange(9) ** 2) / 8)
    weights *= 200 / weights.sum()
    back = 10 - np.arange(9)  # a pixel averages what lies ahead, so a dot trails behind
    np.testing.assert_allclose(streaks[0, 10, back], weights, rtol=1e-4)
    np.testing.assert_allclose(streaks[1, back, 10], weights, rtol=1e-4)
    assert streaks[2, 12, 8] > 0 and streaks[2, 8, 12] == 0
    np.testing.assert_allclose(streaks.sum((1, 2)), 200, rtol=1e-4)


def test_glass_blur_takes_pixels_from_next_to_them():
    images = scenes(3, 32)
    result = corrupt(images, "glass_blur", 1, seeded())  # its sigma blurs nothing
    inside = result[:, 2:, 2:]
    sources = [images[:, 2 + dy : 32 + dy, 2 + dx : 32 + dx] for dy in (-1, 0) for dx in (-1, 0)]
    matches = np.stack([(inside == source).all(-1) for source in sources])
    assert matches.any(0).all()
    assert all(0.2 < match.mean() < 0.9 for match in matches)
    np.testing.assert_array_equal(result[:, :2], images[:, :2])
    np.testing.assert_array_equal(result[:, :, :2], images[:, :, :2])


@pytest.mark.parametrize(("severity", "reach", "rounds"), [(4, 2, 1), (5, 2, 2)])
def test_glass_blur_goes_from_pixel_to_pixel(severity, reach, rounds):
    image = scenes(1, 24)
    sigma = SEVERITIES["tiny"]["glass_blur"][severity - 1][0]
    x = np.trunc(ndimage.gaussian_filter(image[0].astype(float), (sigma, sigma, 0), mode="nearest") + 1e-4)
    scan = range(24 - reach, reach, -1)
    rng = seeded()
    for _ in range(rounds):
        dy, dx = rng.integers(-reach, reach, (2, len(scan), len(scan), 1))[..., 0]
        for i, row in enumerate(scan):
            for j, column in enumerate(scan):
                one, other = x[row, column], x[row + dy[i, j], column + dx[i, j]]
                one[:], other[:] = other, one  # as in the original, the second assignment finds the first one's result
    expected = ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")
    assert_close(corrupt(image, "glass_blur", severity, seeded(), "tiny")[0], expected)


@pytest.mark.parametrize("side", [16, 32, 64])
def test_plasma_maps(side):
    for decay in (3, 2.5, 1.75):
        maps = corruptions._plasma(seeded(), 20, side, decay)
        assert maps.shape == (20, side, side)
        np.testing.assert_array_equal(maps.min((1, 2)), 0)
        np.testing.assert_array_equal(maps.max((1, 2)), 1)
        assert np.abs(maps[0] - maps[1]).max() > 0.1
    smooth, rough = (np.abs(np.diff(corruptions._plasma(seeded(), 20, side, d))).mean() for d in (3, 1.75))
    assert smooth < rough


def test_fog_adds_its_map():
    images = scenes(3, 24)
    images[2] = 0  # nothing to lighten: the original scales by the image's brightest value
    for severity, (density, decay) in enumerate(SEVERITIES["cifar"]["fog"], 1):
        clouds = corruptions._plasma(seeded(), 3, 32, decay)[:, :24, :24, None]
        most = images.max((1, 2, 3), keepdims=True) / 255
        expected = (images + 255 * density * clouds) * most / (most + density)
        assert_close(corrupt(images, "fog", severity, seeded()), expected)


def test_snow_only_brightens():
    images = scenes(4, 32)
    black = np.zeros_like(images)
    for severity in LEVELS:
        assert (corrupt(images, "snow", severity, seeded()) >= images - (images > 0)).all()
        flakes = corrupt(black, "snow", severity, seeded())
        np.testing.assert_array_equal(flakes, flakes[:, ::-1, ::-1])  # each falls twice, turned by half a circle
        assert (flakes == flakes[..., :1]).all()
        keep = SEVERITIES["cifar"]["snow"][severity - 1][-1]
        assert flakes.min() >= int(127.5 * (1 - keep))


def test_ice_resembles_its_photographs():
    ice = corruptions._ice()
    assert ice is corruptions._ice() and ice.dtype == np.uint8
    for texture, (mean, spread, _) in zip(ice, corruptions._ICE, strict=True):
        np.testing.assert_allclose(texture.mean((0, 1)), mean, atol=2)
        np.testing.assert_allclose(texture.std((0, 1)), spread, atol=4)
        grey = texture.mean(-1) - texture.mean()
        assert 0.3 < (grey[:, 1:] * grey[:, :-1]).mean() / grey.var() < 0.8  # neither noise nor fog
    corruptions._ice.cache_clear()
    np.testing.assert_array_equal(corruptions._ice(), ice)


def test_frost_adds_a_crop_of_ice():
    black = np.zeros((30, 32, 32, 3), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(corruptions._ice()[..., 1], (32, 32), (1, 2))
    result = corrupt(black, "frost", 1, seeded())[..., 1]
    corners = seeded()
    which, corner = corners.integers(0, 5, 30), corners.integers(0, 256, (2, 30, 1))[..., 0]
    assert len(set(which)) == 5
    for i in np.flatnonzero((corner < 256 - 32).all(0)):
        np.testing.assert_array_equal(result[i], windows[which[i], corner[0, i], corner[1, i]] // 5)


@pytest.mark.parametrize(("mirror", "mode"), [(True, "mirror"), (False, "reflect")])
def test_samples_are_scipys(mirror, mode):
    images = scenes(2, 16).astype(np.float32)
    x, y = seeded().uniform(-12, 28, (2, 2, 16, 16))
    result = corruptions._sample(images, x, y, mirror)
    for i in range(2):
        for channel in range(3):
            expected = ndimage.map_coordinates(images[i, ..., channel].astype(float), (y[i], x[i]), order=1, mode=mode)
            np.testing.assert_allclose(result[i, ..., channel], expected, atol=1e-2)


def test_elastic_transform_at_severity_1_is_affine():
    ramp = np.repeat(np.arange(20, 212, 6, dtype=np.uint8)[:, None], 32, 1)
    images = np.stack([np.stack([ramp, ramp.T, ramp.T[:, ::-1]], -1)] * 8)
    inside = corrupt(images, "elastic_transform", 1, seeded())[:, 10:22, 10:22].astype(float)
    for axis in (1, 2):
        slope = np.diff(inside, axis=axis)
        assert np.ptp(slope, axis=(1, 2)).max() <= 2.01  # truncation on either side
    assert np.ptp(np.diff(inside, axis=1).mean((1, 2)), axis=0).max() > 0.3  # each image has its own map
    waves = corrupt(images, "elastic_transform", 5, seeded())[:, 10:22, 10:22].astype(float)
    assert np.ptp(np.diff(waves, axis=1), axis=(1, 2)).min() > 4


def test_elastic_transform_moves_the_three_points():
    images = np.zeros((6, 32, 32, 3), np.uint8)
    before = np.array([[26, 26], [26, 6], [6, 6]])  # x, y
    for x, y in before:
        images[:, y - 1 : y + 2, x - 1 : x + 2] = 255
    result = corrupt(images, "elastic_transform", 1, seeded())[..., 0].astype(float)
    after = before + seeded().uniform(-0.08 * 32, 0.08 * 32, (6, 3, 2))
    for image, points in zip(result, after, strict=True):
        rows, columns = np.mgrid[:32, :32]
        for x, y in points:
            weight = image * (np.hypot(rows - y, columns - x) < 4)
            assert abs((weight * rows).sum() / weight.sum() - y) < 0.5
            assert abs((weight * columns).sum() / weight.sum() - x) < 0.5


def test_spatter_is_turquoise_water_or_brown_mud():
    black = np.zeros((16, 32, 32, 3), np.uint8)
    for constants, table in SEVERITIES.items():
        for severity, c in enumerate(table["spatter"][:3], 1):
            drops = corrupt(black, "spatter", severity, seeded(), constants).astype(float)
            wet = drops[..., 1] > 0
            assert 0.001 < wet.mean() < 0.5
            np.testing.assert_array_equal(drops[..., 1], drops[..., 2])
            np.testing.assert_allclose(drops[..., 0], drops[..., 1] * 175 / 238, atol=1)
            np.testing.assert_allclose(drops.max((1, 2, 3)), int(238 * c[4]), atol=1)
        for severity in (4, 5):
            mud = corrupt(black + 255, "spatter", severity, seeded(), constants).reshape(-1, 3).astype(float)
            np.testing.assert_allclose(mud.min(0), (63, 42, 20), atol=2)
            cover = (255 - mud) / (255 - np.array([63, 42, 20]))
            assert np.ptp(cover, axis=1).max() < 0.01 and (cover[cover > 0.01] > 0.79).all()


def test_edges_outline_each_images_shapes():
    y, x = np.mgrid[:24, :24]
    radius = np.hypot(y - 12, x - 12)
    discs = np.stack([255.0 * (radius < 7), 0 * radius, 90.0 * (radius < 7)]).astype(np.float32)
    edges = corruptions._edges(discs)
    assert edges[0].any() and (np.abs(radius[edges[0]] - 7) < 1.5).all()
    _, regions = ndimage.label(~edges[0])  # type: ignore
    assert regions == 2  # inside and outside
    assert not edges[1].any()
    np.testing.assert_array_equal(edges[2], edges[0])  # Canny's edges know no height once it is above the thresholds
    # Weak slopes count where they join a strong one, and only within an image.
    weak = np.zeros((2, 24, 24), np.float32)
    weak[:, :, 12:] = 30  # 4 times that is a slope of 120, between the thresholds
    weak[0, :4, 12:] = 200
    edges = corruptions._edges(weak)
    assert edges[0, 8:].any() and not edges[1].any()


def test_light_does_not_leak_between_images():
    drops = np.trunc(
        255 * np.clip(ndimage.gaussian_filter(seeded().normal(0.65, 0.2, (5, 24, 24)), (0, 0.8, 0.8)), 0, 1)
    )
    drops = np.where(drops < 178, 0, drops).astype(np.float32)
    drops[3] = 0
    light = corruptions._light(drops)
    for i in range(5):
        np.testing.assert_allclose(light[i], corruptions._light(drops[i : i + 1])[0], atol=1)
    assert light.min() >= 0 and light.max() <= 255 and light[0].std() > 20


def test_equalised_levels():
    levels = np.array([[[3, 3], [4, 7]], [[5, 5], [5, 5]]])
    np.testing.assert_array_equal(corruptions._equalise(levels), [[[0, 0], [128, 255]], [[0, 0], [0, 0]]])


IMAGES = np.zeros((1, 16, 16, 3), np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "rain"}, f"corruption='rain' is unknown; choose from {', '.join(NAMES)}"),
        ({"severity": 0}, "severity=0 is not one of 1, 2, 3, 4, 5"),
        ({"severity": 6}, "severity=6 is not one of 1, 2, 3, 4, 5"),
        ({"severity": 2.0}, "severity=2.0 is not one of 1, 2, 3, 4, 5"),
        ({"constants": "imagenet"}, "constants='imagenet' is not one of cifar, tiny"),
        ({"images": IMAGES.astype(np.float32)}, "float32 [1, 16, 16, 3]"),
        ({"images": IMAGES[0]}, "uint8 [16, 16, 3]"),
        ({"images": IMAGES[..., :1]}, "uint8 [1, 16, 16, 1]"),
        ({"images": IMAGES[:, 1:]}, "uint8 [1, 15, 16, 3]"),
        ({"images": IMAGES[:, 1:, 1:]}, "uint8 [1, 15, 15, 3]"),
    ],
)
def test_mistakes_are_named(change, message):
    if "images" in change:
        message = f"images: {message} must be uint8 [n, side, side, 3] with a side of at least 16"
    call = {"images": IMAGES, "name": "fog", "severity": 1, "rng": seeded(), "constants": "cifar"} | change
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        corrupt(**call)
