"""Your own images: <raw_dir>/<domain>/<class>/<image>, of any sizes and of the formats that PIL reads; see images.py.

Domains are split by a CSV file with the columns domain and split (train, val, test), or at random by a seed. Domains
with too few images for a task are left out. A warning counts files of other kinds, and files in other places.
"""

import collections
from collections.abc import Container
from pathlib import Path

import numpy as np
from PIL import Image

from cxda_jax.config.fields import lookup
from cxda_jax.data.readers.images import read_colour, to_rgb, to_size
from cxda_jax.data.readers.raw import EXTENSIONS, IMAGENET, RawData, image_pieces, visible
from cxda_jax.data.store import FITS, SPLITS, StoreInfo
from cxda_jax.disk.reading import read_table
from cxda_jax.errors import UserError, brief

FRACTIONS = (0.7, 0.1, 0.2)
NEEDED = 5  # domains of each split, for tasks of the usual form


def find(
    raw_dir: Path,
    name: str = "folder",
    size: int = 64,
    fit: str = "squash",
    background: str = "white",
    split_csv: str = "",
    min_images: int = 40,
    seed: int = 0,
) -> RawData:
    if not raw_dir.is_dir():
        raise UserError("no such folder", "raw_dir", raw_dir, "give the one that holds DOMAIN/CLASS/IMAGE")
    made, colour = lookup("fit", fit, FITS), read_colour(background)
    images, others = images_and_others(raw_dir, split_csv)
    if not images:
        but = f"; found {some_of(others, raw_dir)}" if others else ""
        raise UserError(f"{raw_dir}: no images; expected DOMAIN/CLASS/IMAGE with {', '.join(EXTENSIONS)}{but}")
    class_names = sorted({path.parent.name for path in images})
    labels, files = {name: label for label, name in enumerate(class_names)}, collections.defaultdict(list)
    for path in images:
        files[path.parent.parent.name].append((path, labels[path.parent.name]))
    warnings = []
    if others:
        warnings.append(f"{raw_dir}: not read: {some_of(others, raw_dir)}; read are images in DOMAIN/CLASS/")
    for domain, labelled in files.items():
        if len(labelled) < min_images:
            warnings.append(f"{raw_dir / domain}: left out, {len(labelled)} images are fewer than {min_images}")
    large = [domain for domain, labelled in files.items() if len(labelled) >= min_images]
    splits = _read_splits(Path(split_csv), raw_dir, files) if split_csv else random_splits(large, seed)

    def convert(image: Image.Image) -> Image.Image:
        return to_size(to_rgb(image, colour), (size, size), fit, colour)

    pieces = []
    for split in SPLITS:
        mine = [domain for domain in large if splits.get(domain) == split]
        if len(mine) < NEEDED:
            what = f"{len(mine)} domains; tasks of {NEEDED} need more, or a lower episode.num_domains"
            warnings.append(f"{split}: {what}")
        for domain in mine:
            pieces += image_pieces(domain, split, files[domain], size, convert)
    if not pieces:
        raise UserError(f"{raw_dir}: no domain has {min_images} images; add images or lower --min_images")
    provenance = f"images of {raw_dir.name}, {made} to a square, transparency over {background}"
    info = StoreInfo(name, tuple(class_names), *IMAGENET, provenance=provenance, fit=fit, background=colour)
    return RawData(info, pieces, warnings=warnings, least=min_images)


def random_splits(domains: list[str], seed: int) -> dict[str, str]:
    """The split of each domain. Each split gets a domain if there are three."""
    order = np.random.default_rng(seed).permutation(domains)
    val, test = (max(1, round(share * len(domains))) if len(domains) > 2 else 0 for share in FRACTIONS[1:])
    cuts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    return {str(domain): split for split, mine in cuts.items() for domain in mine}


def images_and_others(raw_dir: Path, split_csv: str = "") -> tuple[list[Path], list[Path]]:
    """The images in DOMAIN/CLASS/, sorted, and all else but the file of the splits."""
    entries, others = visible(raw_dir.iterdir()), []
    for _ in range(2):  # from the domains to their classes, and to what lies in those
        others += [p for p in entries if not p.is_dir()]
        entries = [inner for p in entries if p.is_dir() for inner in visible(p.iterdir())]
    images = [p for p in entries if p.suffix.lower() in EXTENSIONS]
    others += [p for p in entries if p.suffix.lower() not in EXTENSIONS]
    return images, [p for p in others if not split_csv or p.resolve() != Path(split_csv).resolve()]


def some_of(others: list[Path], raw_dir: Path) -> str:
    return f"{len(others)} other files and folders, such as {brief(str(others[0].relative_to(raw_dir)))}"


def _read_splits(path: Path, raw_dir: Path, domains: Container[str]) -> dict[str, str]:
    """The split of each domain that the file names."""
    fix = "give a CSV file with the columns domain and split, in UTF-8"
    if not path.exists():
        raise UserError("No such file or directory", "split_csv", path, fix)
    splits = {}
    for line, row in read_table(path, ("domain", "split"), fix):
        domain, split = row["domain"], row["split"]
        what = ""
        if not domain or split not in SPLITS:
            got = f"{brief(repr(domain), 40)}, {brief(repr(split), 40)}"
            what = f"expected a domain and one of {', '.join(SPLITS)}, got {got}"
        elif domain not in domains:
            what = f"{raw_dir / brief(domain)} holds no images; remove the line"
        elif splits.setdefault(domain, split) != split:
            what = f"{brief(repr(domain))} is already in {splits[domain]!r}; remove a line"
        if what:
            raise UserError(f"{path}: line {line}: {what}")
    if not splits:
        raise UserError(f"{path}: no lines; {fix}")
    return splits
