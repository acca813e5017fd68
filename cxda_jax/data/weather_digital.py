"""Weather and digital faults: the corruptions of corruptions.py that are neither noise nor blur.

They have the form that noise_blur.py describes.
"""

import functools

import numpy as np
from PIL import Image
from scipy import ndimage

from cxda_jax.data.noise_blur import smooth, streak, to_uint8, zoom_in

_LUMA = np.array([0.299, 0.587, 0.114], np.float32).astype(float)
_TURQUOISE, _MUD = np.array([175, 238, 238], np.float32), np.array([63, 42, 20], np.float32)
_ICE_SIDE, _ICE_SEED = 256, 19
# Of each photograph: means and spreads of red, green and blue, and how much brighter the needles are than the rest. The
# original's second and third photographs are the same picture, and it never uses its sixth.
ICE = (
    ((78, 149, 166), (27, 16, 15), 0.3), ((201, 205, 214), (21, 22, 23), -0.3), ((201, 205, 214), (21, 22, 23), -0.3),
    ((138, 153, 166), (29, 29, 30), 0.2), ((112, 123, 135), (44, 43, 42), 0.4),
)  # fmt: skip


def snow(x: np.ndarray, c: tuple, rng: np.random.Generator) -> np.ndarray:
    mean, deviation, zoom, threshold, radius, sigma, keep = c
    flakes = zoom_in(mean + deviation * rng.standard_normal(x.shape[:3], np.float32), zoom)
    flakes = to_uint8(255 * np.where(flakes < threshold, 0, flakes))
    flakes = np.rint(streak(flakes, radius, sigma, rng.uniform(-135, -45, len(x))))
    x = x.astype(np.float32)
    grey = (x * _LUMA).sum(-1, keepdims=True).astype(np.float32)  # the rounding of x @ _LUMA varies with the processor
    white = np.maximum(x, 1.5 * grey + 127.5)
    return keep * x + (1 - keep) * white + (flakes + flakes[:, ::-1, ::-1])[..., None]


def frost(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    n, side = x.shape[:2]
    which, corner = rng.integers(0, len(ICE), n), rng.integers(0, _ICE_SIDE, (2, n, 1))
    rows, columns = (corner + np.arange(side)) % _ICE_SIDE  # opposite edges of a texture join
    ice = ice_textures()[which[:, None, None], rows[:, :, None], columns[:, None]]
    return np.float32(c[0]) * x + np.float32(c[1]) * ice


@functools.cache
def ice_textures() -> np.ndarray:
    """Textures of ice, always the same ones: uint8 [textures, side, side, 3]."""
    rng = np.random.default_rng(_ICE_SEED)
    reliefs = [_crystals(rng, skew)[..., None] for _, _, skew in ICE]
    levels = [mean + relief * spread for (mean, spread, _), relief in zip(ICE, reliefs, strict=True)]
    return np.clip(levels, 0, 255).astype(np.uint8)


def _crystals(rng: np.random.Generator, skew: float, fields: int = 9) -> np.ndarray:
    """A relief [side, side] of mean 0 and spread 1. It has needles in patches, and each patch has its own direction."""
    down, right = np.meshgrid(*[np.fft.fftfreq(_ICE_SIDE)] * 2, indexing="ij")

    def noise(power: int, length: float, width: float, angle: float = 0.0) -> np.ndarray:
        along, across = np.cos(angle) * right + np.sin(angle) * down, np.cos(angle) * down - np.sin(angle) * right
        blur = np.exp(-2 * np.pi**2 * ((length * along) ** 2 + (width * across) ** 2))
        return _standard(np.fft.ifft2(blur * np.fft.fft2(rng.normal(size=down.shape) ** power)).real)

    patches = np.exp([3 * noise(1, 3, 3) for _ in range(fields)])
    angles = np.pi * (np.arange(fields) + rng.uniform(0, 1, fields)) / fields
    needles = np.stack([noise(3, 2.2, 0.3, angle) for angle in angles])  # cubes: few needles, and strong ones
    relief = (patches * needles).sum(0) / np.sqrt((patches**2).sum(0))
    relief = _standard(relief + 0.6 * noise(1, 20, 20) + 0.4 * noise(1, 5, 5) + 0.3 * noise(1, 0, 0))
    return _standard(np.exp(skew * 2.5 * np.tanh(relief / 2.5))) * np.sign(skew)


def _standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / x.std()


def fog(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    density, decay = c
    side = x.shape[1]
    clouds = plasma_maps(rng, len(x), 1 << (side - 1).bit_length(), decay)[:, :side, :side, None]
    most = x.max((1, 2, 3), keepdims=True).astype(np.float32)
    return (x + 255 * density * clouds) * (most / (most + 255 * density))


def plasma_maps(rng: np.random.Generator, n: int, side: int, decay: float) -> np.ndarray:
    """Diamond-square maps [n, side, side], each from 0 to 1. `side` is a power of two; opposite edges join."""
    maps = np.zeros((n, side, side), np.float32)
    step, wobble = side, 100.0**2

    def jitter(sums: np.ndarray) -> np.ndarray:
        return sums / 4 + wobble * (2 * rng.random(sums.shape, np.float32) - 1)

    while step > 1:
        half = step // 2
        corners, centres = maps[:, ::step, ::step], maps[:, half::step, half::step]
        pairs = corners + np.roll(corners, -1, 1)
        centres[:] = jitter(pairs + np.roll(pairs, -1, 2))
        maps[:, ::step, half::step] = jitter(centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 2))
        maps[:, half::step, ::step] = jitter(centres + np.roll(centres, 1, 2) + corners + np.roll(corners, -1, 1))
        step, wobble = half, wobble / decay**2
    maps -= maps.min((1, 2), keepdims=True)
    return maps / maps.max((1, 2), keepdims=True)


def spatter(x: np.ndarray, c: tuple, rng: np.random.Generator) -> np.ndarray:
    mean, deviation, sigma, threshold, strength, mud = c
    liquid = smooth(mean + deviation * rng.standard_normal(x.shape[:3], np.float32), sigma)
    if mud:
        cover = smooth((liquid > threshold).astype(np.float32), strength)
        cover = np.where(cover < 0.8, 0, cover)[..., None]
        return x * (1 - cover) + _MUD * cover
    drops = np.trunc(255 * np.clip(np.where(liquid < threshold, 0, liquid), 0, 1))
    drops *= light_on_drops(drops)
    drops *= strength / np.maximum(drops.max((1, 2), keepdims=True), 1)
    return x + _TURQUOISE * drops[..., None]


def light_on_drops(drops: np.ndarray) -> np.ndarray:
    """Levels of light on drops of water [n, h, w].

    It grows with the distance from edges and is brighter on one side.
    """
    distance = np.full(drops.shape, 20, np.float32)
    for one, edges in zip(distance, find_edges(drops), strict=True):
        if edges.any():
            np.minimum(one, np.asarray(ndimage.distance_transform_edt(~edges)), out=one)
    light = equalise(to_uint8(_mean_of_9(distance)))
    slope = np.array([[[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]])
    return np.rint(_mean_of_9(np.clip(ndimage.correlate(light, slope, mode="mirror"), 0, 255)))


def _mean_of_9(x: np.ndarray) -> np.ndarray:
    """Means over 3x3 pixels of [n, h, w]."""
    return ndimage.correlate(x, np.full((1, 3, 3), 1 / 9), mode="mirror")


def find_edges(levels: np.ndarray, low: float = 50, high: float = 150) -> np.ndarray:
    """Canny's edges of images [n, h, w]: ridges with a slope above `low` that touch one with a slope above `high`."""
    side = levels.shape[1]
    sobel = np.array([[[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]], np.float32)  # scipy's own would mix neighbouring images
    right, down = (ndimage.correlate(levels, k, mode="nearest") for k in (sobel, sobel.swapaxes(1, 2)))
    slope = np.abs(down) + np.abs(right)
    padded = np.pad(slope, ((0, 0), (1, 1), (1, 1)))

    def next_to(rows: int, columns: int) -> np.ndarray:
        return padded[:, 1 + rows : 1 + rows + side, 1 + columns : 1 + columns + side]

    gentle = np.tan(np.pi / 8)
    along = [np.abs(down) < gentle * np.abs(right), np.abs(right) < gentle * np.abs(down), down * right > 0]
    steps = [(0, 1), (1, 0), (1, 1), (1, -1)]
    ahead, behind = ([next_to(sign * r, sign * c) for r, c in steps] for sign in (1, -1))
    ridge = (slope >= np.select(along, ahead[:3], ahead[3])) & (slope > np.select(along, behind[:3], behind[3]))
    within = np.zeros((3, 3, 3), bool)  # diagonals join, images do not
    within[1] = True
    return np.asarray(ndimage.binary_propagation(ridge & (slope > high), within, ridge & (slope > low)))


def equalise(levels: np.ndarray) -> np.ndarray:
    """Each image's levels [n, h, w], integers, spread over 0..255 by rank; the lowest becomes 0."""
    n, bins = len(levels), int(levels.max()) + 1
    rows = np.arange(n)[:, None, None]
    counts = np.bincount((levels + bins * rows).ravel(), minlength=n * bins).reshape(n, bins)
    below = counts.cumsum(1)
    lowest = counts[np.arange(n), (counts > 0).argmax(1)][:, None]
    table = np.rint(np.maximum(below - lowest, 0) * (255 / np.maximum(below[:, -1:] - lowest, 1)))
    return table.astype(np.float32)[rows, levels]


def brightness(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    value = x.max(-1, keepdims=True).astype(np.float32)
    raised = np.minimum(value + 255 * c, 255)
    return np.where(value > 0, x * (raised / np.maximum(value, 1)), raised)  # hue and saturation stay


def contrast(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    means = x.mean((1, 2), keepdims=True, dtype=np.float32)
    return (x - means) * np.float32(c) + means


def elastic_transform(x: np.ndarray, c: tuple[float, float, float], rng: np.random.Generator) -> np.ndarray:
    n, side = x.shape[:2]
    amount, sigma, corners = (side * value for value in c)
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="xy"))  # x, then y
    centre, far = side // 2, side // 3
    before = centre + far * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + rng.uniform(-corners, corners, (n, 3, 2))
    # Maps a place in the result to its place in the image.
    back = np.linalg.solve(np.concatenate([after, np.ones((n, 3, 1))], 2), before)
    places = np.einsum("nij,ihw->njhw", back[:, :2], grid) + back[:, 2, :, None, None]
    x = sample_bilinear(x.astype(np.float32), places[:, 0], places[:, 1], mirror=True)
    if not amount:
        return x
    waves = rng.uniform(-1, 1, (2 * n, side, side)).astype(np.float32)
    waves = amount * smooth(waves, sigma, mode="reflect", truncate=3.0)
    return sample_bilinear(x, grid[0] + waves[:n], grid[1] + waves[n:], mirror=False)


def sample_bilinear(images: np.ndarray, x: np.ndarray, y: np.ndarray, mirror: bool) -> np.ndarray:
    """Bilinear samples of images float32 [n, h, h, 3] at places x and y [n, h, h].

    Outside, images are reflected at the outer edges of their outermost pixels; with `mirror`, at the centres of these.
    """
    side = images.shape[1]
    period = 2 * side - 2 if mirror else 2 * side

    def fold(index: np.ndarray) -> np.ndarray:
        index = index % period
        return np.where(index < side, index, (period if mirror else period - 1) - index)

    x0, y0 = np.floor(x).astype(int), np.floor(y).astype(int)
    fx, fy = (x - x0).astype(np.float32)[..., None], (y - y0).astype(np.float32)[..., None]
    left, right = fold(x0), fold(x0 + 1)
    first = side**2 * np.arange(len(images))[:, None, None]
    top, bottom = first + side * fold(y0), first + side * fold(y0 + 1)
    flat = images.reshape(-1, 3)
    above = flat[top + left] * (1 - fx) + flat[top + right] * fx
    below = flat[bottom + left] * (1 - fx) + flat[bottom + right] * fx
    return above * (1 - fy) + below * fy


def pixelate(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    side, small = x.shape[1], int(x.shape[1] * c)
    coarse = [Image.fromarray(one).resize((small, small), Image.Resampling.BOX) for one in x]
    return np.stack([np.asarray(one.resize((side, side), Image.Resampling.BOX)) for one in coarse])


def saturate(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    value = x.max(-1, keepdims=True).astype(np.float32)
    chroma = value - x.min(-1, keepdims=True)
    saturation = np.clip(chroma / np.maximum(value, 1) * c[0] + c[1], 0, 1)
    # How far each channel lies below the value, as a share of chroma; a grey's hue is 0, red.
    depth = np.where(chroma > 0, (value - x) / np.maximum(chroma, 1), np.array([0, 1, 1], np.float32))
    return value * (1 - saturation * depth)
