"""Your own images: <raw_dir>/<domain>/<class>/<image>, of any sizes and of the formats that PIL reads; see images.py.

Domains are split by a CSV file with the columns domain and split (train, val, test), or at random by a seed. Domains with too
few images for a task are left out. A warning counts files of other kinds, and files in other places.
"""

import collections
import functools
from pathlib import Path

import numpy as np

from cxda_jax.data.readers.images import FITS, read_any, read_colour
from cxda_jax.data.readers.raw import EXTENSIONS, IMAGENET_MEAN, IMAGENET_STD, RawData, image_pieces, visible
from cxda_jax.data.store import SPLITS, StoreInfo
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
        raise UserError(f"raw_dir={raw_dir}: no such folder; give the one that holds DOMAIN/CLASS/IMAGE")
    if fit not in FITS:
        raise UserError(f"fit={brief(repr(fit))}: give one of {', '.join(FITS)}")
    colour = read_colour(background)
    domains, others = _images_and_others(raw_dir, split_csv)
    if not domains:
        but = f"; found {_kinds(others)}" if others else ""
        raise UserError(f"{raw_dir}: no images; expected DOMAIN/CLASS/IMAGE with {', '.join(EXTENSIONS)}{but}")
    class_names = sorted({c for classes in domains.values() for c in classes})
    files = {
        domain: [(path, label) for label, c in enumerate(class_names) for path in classes.get(c, ())]
        for domain, classes in domains.items()
    }
    warnings = []
    if others:
        such = others[0].relative_to(raw_dir)
        warnings.append(f"{raw_dir}: not read: {_kinds(others)}, such as {such}; read are images in DOMAIN/CLASS/")
    for domain in [d for d, labelled in files.items() if len(labelled) < min_images]:
        warnings.append(f"{raw_dir / domain}: left out, {len(files.pop(domain))} images are fewer than {min_images}")
    splits = _read_splits(Path(split_csv), raw_dir, domains) if split_csv else random_splits(sorted(files), seed)
    read, pieces = functools.partial(read_any, fit=fit, background=colour), []
    for split in SPLITS:
        mine = [domain for domain in sorted(files) if splits.get(domain) == split]
        if len(mine) < NEEDED:
            warnings.append(
                f"{split}: {len(mine)} domains; tasks of {NEEDED} need more, or a lower episode.num_domains"
            )
        for domain in mine:
            pieces += image_pieces(domain, split, files[domain], (size, size), read, f"{fit} {colour}")
    if not pieces:
        raise UserError(f"{raw_dir}: no domain has {min_images} images; add images or lower min_images")
    provenance = f"images of {raw_dir.name}, {FITS[fit]}, transparency over {background}"
    info = StoreInfo(name, tuple(class_names), IMAGENET_MEAN, IMAGENET_STD, provenance=provenance)
    return RawData(info, pieces, warnings=warnings, least=min_images)


def random_splits(domains: list[str], seed: int) -> dict[str, str]:
    """The split of each domain. Each split gets a domain if there are three."""
    order = np.random.default_rng(seed).permutation(domains)
    val, test = (max(1, round(share * len(domains))) if len(domains) > 2 else 0 for share in FRACTIONS[1:])
    cuts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    return {str(domain): split for split, mine in cuts.items() for domain in mine}


def _folders(path: Path) -> list[Path]:
    return [p for p in visible(path.iterdir()) if p.is_dir()]


def _images_and_others(raw_dir: Path, split_csv: str) -> tuple[dict[str, dict[str, list[Path]]], list[Path]]:
    """The images, domain -> class -> files, and all else but the file of the splits."""
    domains, others = {}, [p for p in visible(raw_dir.iterdir()) if not p.is_dir()]
    for domain in _folders(raw_dir):
        classes = {c.name: visible(c.iterdir()) for c in _folders(domain)}
        images = {c: [p for p in entries if _is_image(p)] for c, entries in classes.items()}
        others += [p for entries in classes.values() for p in entries if not _is_image(p)]
        others += [p for p in visible(domain.iterdir()) if not p.is_dir()]
        if any(images.values()):
            domains[domain.name] = {c: files for c, files in images.items() if files}
    return domains, [p for p in others if not split_csv or p.resolve() != Path(split_csv).resolve()]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def _kinds(paths: list[Path]) -> str:
    """How many files there are of each suffix, in words."""
    counts = collections.Counter("folders" if p.is_dir() else brief(p.suffix.lower(), 10) or "others" for p in paths)
    shown = [f"{count} {kind}" for kind, count in counts.most_common(4)]
    return ", ".join(shown) + (" and more" if len(counts) > 4 else "")


def _read_splits(path: Path, raw_dir: Path, domains: dict) -> dict[str, str]:
    """The split of each domain that the file names."""
    fix = "give a CSV file with the columns domain and split, in UTF-8"
    if not path.exists():
        raise UserError(f"split_csv={path}: No such file or directory; {fix}")
    splits = {}
    for line, row in read_table(path, ("domain", "split"), fix):
        domain, split = row.get("domain"), row.get("split")
        if not domain or split not in SPLITS:
            raise UserError(
                f"{path}: line {line}: expected a domain and one of {', '.join(SPLITS)}, got {brief(repr(domain), 40)}, "
                f"{brief(repr(split), 40)}"
            )
        if domain not in domains:
            raise UserError(f"{path}: line {line}: {raw_dir / brief(domain)} holds no images; remove the line")
        if splits.setdefault(domain, split) != split:
            raise UserError(
                f"{path}: line {line}: {brief(repr(domain))} is already in {splits[domain]!r}; remove a line"
            )
    if not splits:
        raise UserError(f"{path}: no lines; {fix}")
    return splits
