"""Your own images: <raw_dir>/<domain>/<class>/<image>, of any sizes and formats that PIL reads.

Domains are split by a CSV file with the columns domain and split (train, val, test), or at random by a seed. Those with
fewer images than a task needs are left out.
"""

from pathlib import Path

import numpy as np

from cxda_jax.data.raw import EXTENSIONS, IMAGENET_MEAN, IMAGENET_STD, RawData, image_pieces, visible
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.reading import read_table
from cxda_jax.types import UserError, brief

FRACTIONS = (0.7, 0.1, 0.2)
NEEDED = 5  # domains of each split, for tasks of the usual form


def find(raw_dir: Path, size: int = 64, split_csv: str = "", min_images: int = 40, seed: int = 0) -> RawData:
    if not raw_dir.is_dir():
        raise UserError(f"--raw_dir={raw_dir}: no such folder; give the one that holds DOMAIN/CLASS/IMAGE")
    found = {domain.name: _images(domain) for domain in _folders(raw_dir)}
    found = {domain: classes for domain, classes in found.items() if any(classes.values())}
    if not found:
        raise UserError(f"{raw_dir}: no images; expected DOMAIN/CLASS/IMAGE with {', '.join(EXTENSIONS)}")
    class_names = sorted({name for classes in found.values() for name, files in classes.items() if files})
    files = {
        domain: [(path, label) for label, name in enumerate(class_names) for path in classes.get(name, ())]
        for domain, classes in found.items()
    }
    warnings = []
    for domain in [d for d, labelled in files.items() if len(labelled) < min_images]:
        warnings.append(f"{raw_dir / domain}: left out, {len(files.pop(domain))} images are fewer than {min_images}")
    splits = _read_splits(Path(split_csv), raw_dir, found) if split_csv else random_splits(sorted(files), seed)
    pieces = []
    for split in SPLITS:
        mine = [domain for domain in sorted(files) if splits.get(domain) == split]
        if len(mine) < NEEDED:
            warnings.append(
                f"{split}: {len(mine)} domains; tasks of {NEEDED} need more, or a lower episode.num_domains"
            )
        for domain in mine:
            pieces += image_pieces(domain, split, files[domain], (size, size), resize=True)
    if not pieces:
        raise UserError(f"{raw_dir}: no domain has {min_images} images; add images or lower --min_images")
    info = StoreInfo("folder", tuple(class_names), IMAGENET_MEAN, IMAGENET_STD, provenance=f"images of {raw_dir.name}")
    return RawData(info, pieces, warnings=warnings)


def random_splits(domains: list[str], seed: int) -> dict[str, str]:
    """At least one domain for each split where there are three."""
    order = np.random.default_rng(seed).permutation(domains)
    val, test = (max(1, round(share * len(domains))) if len(domains) > 2 else 0 for share in FRACTIONS[1:])
    cuts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    return {str(domain): split for split, mine in cuts.items() for domain in mine}


def _folders(path: Path) -> list[Path]:
    return [p for p in visible(path.iterdir()) if p.is_dir()]


def _images(domain: Path) -> dict[str, list[Path]]:
    return {c.name: [p for p in visible(c.iterdir()) if p.suffix.lower() in EXTENSIONS] for c in _folders(domain)}


def _read_splits(path: Path, raw_dir: Path, domains: dict) -> dict[str, str]:
    """Domains that the file does not name are left out."""
    fix = "give a CSV file with the columns domain and split, in UTF-8"
    if not path.exists():
        raise UserError(f"--split_csv={path}: No such file or directory; {fix}")
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
