"""The sizes of the published data sets, and empty stores of those sizes, for plans before a download.

The readers compare the counts with the files that they find.
"""

from typing import NamedTuple

import numpy as np

from cxda_jax.data.store import SPLITS, DomainStore, StoreInfo


class Published(NamedTuple):
    """Counts of three are of train, val and test."""

    image: tuple[int, int, int]
    classes: int
    domains: tuple[int, int, int]
    images: tuple[int, int, int]
    smallest: int = 0  # images of the smallest domain of each split; 0: all are alike


PUBLISHED = {
    "femnist": Published((28, 28, 1), 62, (262, 50, 35), (60_000, 8_400, 8_400), smallest=100),  # images: about
    "cifar_c": Published((32, 32, 3), 10, (56, 17, 22), (56_000, 17_000, 220_000)),
    "tiny_imagenet_c": Published((64, 64, 3), 200, (51, 17, 22), (102_000, 34_000, 220_000)),
    "iwildcam": Published((112, 112, 3), 182, (243, 32, 48), (129_809, 14_961, 42_791), smallest=40),
    "unipen": Published((28, 28, 1), 62, (184, 26, 52), (75_172, 9_160, 18_851), smallest=60),
    "qmnist": Published((28, 28, 1), 10, (300, 34, 250), (32_163, 3_716, 29_050), smallest=46),  # students tested
    "cifar10_c": Published((32, 32, 3), 10, (56, 17, 22), (56_000, 17_000, 220_000)),
}


def empty_store(name: str) -> DomainStore:
    """A store with as many domains and images as a published data set. The images are black and take no memory."""
    published, sizes = PUBLISHED[name], []
    for domains, images in zip(published.domains, published.images, strict=True):
        split = np.full(domains, images // domains)
        split[: images % domains] += 1
        if published.smallest:
            split[[0, -1]] = published.smallest, split[-1] + split[0] - published.smallest
        sizes += split.tolist()
    pixels = np.broadcast_to(np.zeros((), np.uint8), (sum(sizes), *published.image))
    return _store(name, published.domains, np.array(sizes), pixels)


def sample_store(name: str, domains: int = 8, images: int = 50) -> DomainStore:
    """A store of a few domains of random pixels, to time what does not depend on the number of images."""
    sizes = np.full(len(SPLITS) * domains, images)
    pixels = np.random.default_rng(0).integers(0, 256, (sizes.sum(), *PUBLISHED[name].image), np.uint8)
    return _store(name, (domains,) * len(SPLITS), sizes, pixels)


def _store(name: str, domains: tuple[int, ...], sizes: np.ndarray, pixels: np.ndarray) -> DomainStore:
    (*_, channels), classes = PUBLISHED[name][:2]
    names, splits = tuple(map(str, range(classes))), np.repeat(SPLITS, domains).tolist()
    return DomainStore(
        info=StoreInfo(name, names, (0.5,) * channels, (0.25,) * channels, marks=("made up",)),
        images=pixels,
        labels=(np.arange(len(pixels)) % classes).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        split=tuple(splits),
        domain_names=tuple(f"{split} {i}" for split, count in zip(SPLITS, domains, strict=True) for i in range(count)),
        sha256="",
    )
