"""An image of any size becomes one like those of a store, beside PIL's or numpy's own computation."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from cxda_jax.data import glyphs, glyphs_c
from cxda_jax.data.readers import cifar10, cifar_c, femnist, iwildcam, qmnist, tiny_imagenet_c, unipen
from cxda_jax.data.readers.images import as_image, as_pixels
from cxda_jax.data.store import FITS
from tests.lines import refused

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (12, 20, 3), np.uint8)
GREY = COLOURS[..., 0]
WHITE, BLUE = (255, 255, 255), (10, 20, 200)


def fitted(thing, shape, fit="squash", background=WHITE):
    made = as_pixels(as_image(thing), shape, fit, background)
    assert made.shape == shape and made.dtype == np.uint8 and made.flags.writeable
    return made


def saved(tmp_path, pixels, name="a.png"):
    Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("fit", FITS)
def test_what_looks_like_the_data_already_stays_as_it_is(tmp_path, fit):
    for pixels in (COLOURS, GREY[..., None]):
        file = saved(tmp_path, pixels.squeeze())
        floats = ((pixels / 255).astype(kind) for kind in (np.float16, np.float32, np.float64))
        for same in (pixels, jnp.asarray(pixels), np.asfortranarray(pixels), file, str(file), *floats):
            np.testing.assert_array_equal(fitted(same, pixels.shape, fit, BLUE), pixels)
    np.testing.assert_array_equal(fitted(GREY, (12, 20, 1), fit)[..., 0], GREY)


def test_each_fit_is_what_pil_computes():
    image = Image.fromarray(RNG.integers(0, 256, (60, 60, 3), np.uint8))
    for *size, middle in ((30, 10, (0, 20, 60, 40)), (10, 30, (20, 0, 40, 60)), (90, 60, (0, 10, 60, 50))):
        expected = {
            "squash": image.resize(size, Image.Resampling.BILINEAR),
            "crop": image.crop(middle).resize(size, Image.Resampling.BILINEAR),
            "pad": ImageOps.pad(image, size, Image.Resampling.BILINEAR, color=BLUE),
        }
        assert {*FITS} == {*expected}
        for fit in FITS:
            np.testing.assert_array_equal(fitted(image, (*size[::-1], 3), fit, BLUE), expected[fit])
            grey = fitted(image, (*size[::-1], 1), fit, BLUE)
            np.testing.assert_array_equal(grey[..., 0], expected[fit].convert("L"))


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 2)])
def test_one_pixel_and_long_thin_images(size):
    grey = fitted(np.uint8([[BLUE]]), (1, 1, 1))[0, 0]
    for fit, shape in itertools.product(FITS, ((28, 28, 1), (8, 32, 3))):
        made = fitted(Image.new("RGB", size, BLUE), shape, fit, (0, 0, 0))
        ink = made.any(-1)
        assert (made[ink] == (BLUE if shape[2] == 3 else grey)).all()
        scale = min(shape[0] / size[1], shape[1] / size[0])
        padded = tuple(max(1, round(n * scale)) for n in size[::-1])
        assert (ink.any(1).sum(), ink.any(0).sum()) == (padded if fit == "pad" else shape[:2])
        assert ink.sum() == np.prod(padded) or fit != "pad"


def test_handwriting_is_padded_with_paper_and_the_other_data_are_squashed():
    for written in (glyphs, femnist, unipen, qmnist):
        paper = (written.INFO.background[0] / 255 - written.INFO.mean[0]) / written.INFO.std[0]
        assert written.INFO.fit == "pad" and paper == 0 and len(set(written.INFO.background)) == 1
    for other in (cifar_c, cifar10, tiny_imagenet_c, iwildcam, glyphs_c):
        assert other.INFO.fit == "squash"


def test_channels_and_transparency():
    alpha = RNG.integers(0, 256, (12, 20), np.uint8)
    share = alpha[..., None] / 255
    over = np.rint(COLOURS * share + np.array(BLUE) * (1 - share)).astype(np.uint8)
    np.testing.assert_array_equal(fitted(np.dstack([COLOURS, alpha]), (12, 20, 3), background=BLUE), over)
    grey = Image.fromarray(over).convert("L")
    np.testing.assert_array_equal(fitted(np.dstack([COLOURS, alpha]), (12, 20, 1), background=BLUE)[..., 0], grey)
    both = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(alpha)])
    over = np.rint(GREY * share[..., 0] + 255 * (1 - share[..., 0]))
    np.testing.assert_array_equal(fitted(both, (12, 20, 1))[..., 0], over)


def test_broken_and_missing_files(tmp_path):
    file = saved(tmp_path, RNG.integers(0, 256, (64, 64, 3), np.uint8))
    file.write_bytes(file.read_bytes()[:2000])
    with refused(r"a\.png: not readable as an image", tmp_path):
        as_image(file)
    with refused(r"no\.png: missing", tmp_path):
        as_image(str(tmp_path / "no.png"))
    file = saved(tmp_path, np.full((2, 2), np.nan, np.float32), "nan.tif")
    with refused(r"nan\.tif: .*NaN or infinite pixels", tmp_path):
        fitted(file, (2, 2, 1))


def test_what_is_no_image_is_named():
    for thing, said in (
        (np.zeros((5, 28, 28, 1), np.uint8), r"^one image at a time: got \(5, 28, 28, 1\)"),
        ([[1, 2], [3, 4]], "got int64"),
        (np.zeros((28, 28), int), "got int64"),
        (np.full((2, 2), 255.0), r"float64 \(2, 2\) with values in 255..255"),
        (np.array([[0, np.nan]]), "with values in nan..nan"),
    ):
        with refused(f"{said}.*; give a path, a PIL image, or an array"):
            as_image(thing)
    with refused(r"shape=\(8, 8, 4\): .*1 or 3 channels"):
        as_pixels(as_image(GREY), (8, 8, 4), "squash", WHITE)
    with refused("fit='stretch'"):
        as_pixels(as_image(GREY), (8, 8, 1), "stretch", WHITE)
