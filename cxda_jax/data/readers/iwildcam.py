"""iWildCam (WILDS, version 2.0): animals at camera traps; a domain is a camera's location.

    <raw_dir>/iwildcam_v2.0/metadata.csv      split, location_remapped, y, filename and more, one line an image
    <raw_dir>/iwildcam_v2.0/categories.csv    y, name; what the data lacks has y=99999
    <raw_dir>/iwildcam_v2.0/train/<filename>  the images of all splits

The splits are WILDS's: no camera is in two of train, val and test. Its id_val and id_test
(other days of training cameras) are ignored. A camera with fewer than 40 images in a split is left out there, because a
task needs 40. Images are squashed to `size` by an antialiased bilinear filter, as WILDS does.
"""

import collections
from pathlib import Path

from PIL import Image

from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers.raw import IMAGENET, Check, RawData, find_folder, image_pieces, split_checks
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.disk.reading import read_table
from cxda_jax.errors import UserError, brief

MIN_IMAGES = 40  # 20 support images and 20 queries
COLUMNS = ("split", "location_remapped", "y", "filename")
INFO = StoreInfo("iwildcam", (), *IMAGENET, metric="macro_f1", provenance="iWildCam, WILDS version 2.0")


def find(raw_dir: Path, size: int = 112) -> RawData:
    root = find_folder(raw_dir, "iwildcam_v2.0")
    cameras, classes = _read_metadata(root / "metadata.csv", root / "train")
    names = _read_categories(root / "categories.csv", classes)
    published, warnings, pieces = PUBLISHED["iwildcam"], [], []
    sizes = {split: [len(files) for files in cameras[split].values()] for split in SPLITS}
    checks = [Check(f"{s} cameras in metadata.csv", len(sizes[s]), published.domains[i]) for i, s in enumerate(SPLITS)]
    checks += [Check(f"{s} images in metadata.csv", sum(sizes[s]), published.images[i]) for i, s in enumerate(SPLITS)]

    def convert(image: Image.Image) -> Image.Image:
        return image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)

    for split in SPLITS:
        small = [count for count in sizes[split] if count < MIN_IMAGES]
        if small:
            what = f"{len(small)} cameras with fewer than {MIN_IMAGES} images ({sum(small)} images)"
            warnings.append(f"{split}: left out {what}")
        for location, files in sorted(cameras[split].items()):
            if len(files) >= MIN_IMAGES:
                pieces += image_pieces(f"location {location}", split, files, size, convert)
    checks += [Check("classes", classes, published.classes), *split_checks(pieces, tasks=(745, 2125))]
    return RawData(INFO._replace(class_names=names), pieces, checks, warnings, MIN_IMAGES)


Cameras = dict[str, dict[int, list[tuple[Path, int]]]]  # split -> location -> images with labels


def _read_metadata(path: Path, images: Path) -> tuple[Cameras, int]:
    cameras: Cameras = {split: collections.defaultdict(list) for split in (*SPLITS, "id_val", "id_test")}
    present = set()
    for line, row in read_table(path, COLUMNS, "is it WILDS version 2.0? fetch it again"):
        try:
            location, label, name = int(row["location_remapped"]), int(row["y"]), row["filename"]
            if not name or Path(name).name != name:
                raise ValueError
            cameras[row["split"]][location].append((images / name, label))
        except (KeyError, ValueError, TypeError):
            what = brief(", ".join(f"{c}={row[c]!r}" for c in COLUMNS), 100)
            raise UserError(f"{path}: line {line} is not understood ({what}); fetch it again") from None
        present.add(label)
    if not present:
        raise UserError(f"{path}: no lines; fetch it again")
    if present != set(range(len(present))):
        raise UserError(f"{path}: labels y are not 0..{len(present) - 1} without gaps; fetch it again")
    return cameras, len(present)


def _read_categories(path: Path, classes: int) -> tuple[str, ...]:
    names = {}
    for line, row in read_table(path, ("y", "name"), "fetch it again"):
        if not (row["y"] or "").isdecimal() or not row["name"]:
            what = f"y={brief(repr(row['y']), 40)}, name={brief(repr(row['name']), 40)}"
            raise UserError(f"{path}: line {line} is not understood ({what}); fetch it again")
        names[int(row["y"])] = row["name"]
    if lacking := [y for y in range(classes) if y not in names]:
        raise UserError(f"{path}: no category with y={lacking[0]}, which metadata.csv uses; fetch it again")
    return tuple(names[y] for y in range(classes))
