"""Your own images, as a viewer shows them: each kind beside another computation."""

import shutil
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from cxda_jax.data.readers import images
from cxda_jax.data.readers.images import as_image, as_pixels
from cxda_jax.data.store import FITS
from cxda_jax.errors import UserError
from cxda_jax.training.experiment import READERS
from tests.lines import refused

SIDE = 16
WHITE = 255, 255, 255
RNG = np.random.default_rng(0)
COLOURS, WIDE = RNG.integers(0, 256, (SIDE, SIDE, 3), np.uint8), RNG.integers(0, 256, (16, 30, 3), np.uint8)
ALPHA = RNG.integers(0, 256, (SIDE, SIDE), np.uint8)
ALPHA[:4], ALPHA[4:8] = 0, 255
# Levels that lie just above the middle between two of 8 bits.
DEEP = (np.arange(SIDE * SIDE) * 257 + 129).clip(max=65535).reshape(SIDE, SIDE).astype(np.uint16)


def read(tmp_path, image, name="a.png", size=SIDE, options=None, **saving):
    """What the reader of folders makes of an image."""
    file = tmp_path / "raw" / "domain" / "class" / name
    shutil.rmtree(file.parent, ignore_errors=True)
    file.parent.mkdir(parents=True)
    image.save(file, **saving)
    (piece,) = READERS["folder"](tmp_path / "raw", size=size, min_images=1, **options or {}).pieces
    images, _, *faults = piece.read()
    if faults and faults[0]:
        raise UserError(faults[0][0])
    return images[0]


def three(grey):
    return np.stack([grey] * 3, -1)


def over(colours, alpha, background=WHITE):
    share = alpha[..., None] / 255
    return np.rint(colours * share + np.array(background) * (1 - share))


def test_integers_of_16_and_32_bits(tmp_path):
    for name, pixels in (("a.png", DEEP), ("a.tif", DEEP // 16), ("a.pgm", DEEP)):  # by the range of their type
        found = read(tmp_path, Image.fromarray(pixels), name)
        np.testing.assert_array_equal(found, three(np.rint(pixels / 65535 * 255)))
    big = Image.frombytes("I;16B", (SIDE, SIDE), DEEP.astype(">u2").tobytes())
    wide = DEEP.astype(np.int32)
    for image in (big, Image.fromarray(wide)):
        np.testing.assert_array_equal(read(tmp_path, image, "a.tif"), three(np.rint(DEEP / 257)))


def test_what_is_wider_is_scaled_by_its_own_range_and_refused_without_one(tmp_path):
    unit = RNG.uniform(0.2, 0.7, (SIDE, SIDE)).astype(np.float32)
    found = read(tmp_path, Image.fromarray(unit), "a.tif")
    np.testing.assert_array_equal(found, three(np.rint(255 * unit.astype(np.float64))))
    for wide in (1000 * unit - 400, DEEP.astype(np.int32) * 30_000 - 10**9):
        exact = wide.astype(np.float64)
        expected = three(np.rint((exact - exact.min()) / np.ptp(exact) * 255))
        np.testing.assert_array_equal(read(tmp_path, Image.fromarray(wide), "a.tif"), expected)
    assert (read(tmp_path, Image.fromarray(np.full_like(unit, 7)), "a.tif") == 0).all()
    unit[3, 5] = np.nan
    with refused("NaN", tmp_path, named="a.tif"):
        read(tmp_path, Image.fromarray(unit), "a.tif")


def test_nothing_but_images_is_opened_and_none_that_is_too_large(tmp_path, monkeypatch):
    path = tmp_path / "photo.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) print\n")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", mock.Mock(side_effect=AssertionError("a program runs it")))
    with refused("", tmp_path, named="photo.png"):
        as_pixels(as_image(path), (8, 8, 3), "pad", (0, 0, 0))
    with pytest.raises(UserError, match="mode I "):
        as_image(Image.fromarray(np.zeros((8, 8), np.int32)))
    monkeypatch.setattr(images, "MOST_PIXELS", 10**6)
    Image.new("L", (2000, 2000)).save(path)
    with refused("", tmp_path, named="photo.png: 2000 x 2000"):
        as_image(path)


def test_what_transparent_pixels_hide_stays_hidden(tmp_path):
    for colour, background in [(None, WHITE), ("black", (0, 0, 0)), ("10,200,30", (10, 200, 30))]:
        options, grey = {"background": colour} if colour else {}, COLOURS[..., 0]
        for pixels, opaque in ((COLOURS, COLOURS), (grey, three(grey))):
            image = Image.fromarray(np.dstack([pixels, ALPHA]))
            np.testing.assert_array_equal(read(tmp_path, image, options=options), over(opaque, ALPHA, background))
        grey = Image.fromarray(over(COLOURS, ALPHA, background).astype(np.uint8)).convert("L")
        of_one = as_pixels(as_image(np.dstack([COLOURS, ALPHA])), (SIDE, SIDE, 1), "squash", background)
        np.testing.assert_array_equal(of_one[..., 0], grey)
        hidden = np.zeros((SIDE, 30, 4), np.uint8)
        found = read(tmp_path, Image.fromarray(hidden), options=options)  # laid over before it is made smaller
        np.testing.assert_array_equal(found, np.broadcast_to(background, found.shape))


def test_palettes(tmp_path):
    palette = RNG.integers(0, 256, (4, 3), np.uint8)
    index = RNG.integers(0, 4, (SIDE, SIDE), np.uint8)
    image = Image.fromarray(index).convert("P")
    image.putpalette(palette.tobytes())
    alpha = np.array([0, 90, 255, 255], np.uint8)
    expected = over(palette[index], alpha[index])
    np.testing.assert_array_equal(read(tmp_path, image, transparency=alpha.tobytes()), expected)
    np.testing.assert_array_equal(read(tmp_path, image), palette[index])
    expected = over(palette[index], np.where(index == 2, 0, 255))
    np.testing.assert_array_equal(read(tmp_path, image, "b.gif", transparency=2), expected)


TURNS = {  # by EXIF's number of the orientation
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip


def test_images_stand_as_the_camera_says(tmp_path):
    for orientation, turn in TURNS.items():
        exif = Image.Exif()
        exif[274] = orientation
        np.testing.assert_array_equal(read(tmp_path, Image.fromarray(COLOURS), exif=exif), turn(COLOURS))
        tall = np.zeros((2 * SIDE, SIDE, 3), np.uint8)
        tall[SIDE:] = 255  # turned before it is brought to a square
        found = read(tmp_path, Image.fromarray(tall), exif=exif)
        dark = turn(np.repeat([[0], [255]], SIDE // 2, 0) * np.ones((SIDE, SIDE)))
        assert np.abs(found[..., 0] - dark).mean() < 30


def test_a_folder_is_read_with_its_fit_and_background(tmp_path):
    image = Image.fromarray(WIDE)
    for fit in FITS:
        found = read(tmp_path, image, size=24, options={"fit": fit, "background": "1,2,3"})
        np.testing.assert_array_equal(found, as_pixels(as_image(image), (24, 24, 3), fit, (1, 2, 3)))


OBLONG = RNG.integers(0, 256, (12, 20, 3), np.uint8)
GREY, BLUE = OBLONG[..., 0], (10, 20, 200)


def fitted(thing, shape, fit="squash", background=WHITE):
    made = as_pixels(as_image(thing), shape, fit, background)
    assert made.shape == shape and made.dtype == np.uint8 and made.flags.writeable
    return made


def saved(tmp_path, pixels, name="a.png"):
    Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("fit", FITS)
def test_what_looks_like_the_data_already_stays_as_it_is(tmp_path, fit):
    for pixels in (OBLONG, GREY[..., None]):
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
