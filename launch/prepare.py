"""Turns the raw downloads of a benchmark, or your own images, into the one form that training reads.

python -m launch.prepare --benchmark=femnist --raw_dir=DOWNLOADS
python -m launch.prepare --benchmark=cifar_c --raw_dir=DOWNLOADS --strict
python -m launch.prepare --benchmark=cifar_c --raw_dir=DOWNLOADS --tfds
python -m launch.prepare --benchmark=tiny_imagenet_c --raw_dir=DOWNLOADS --regenerate
python -m launch.prepare --benchmark=iwildcam --raw_dir=DOWNLOADS --size=112
python -m launch.prepare --benchmark=folder --raw_dir=MY_IMAGES --name=mine --size=64 --fit=crop

--raw_dir holds the downloads. An archive in it that is named as a missing folder (femnist.zip, CIFAR-10-C.tar) or as published
(femnist-data.zip, tinyimagenet-c.zip) is extracted beside itself, without the folder around it that some have; one with links,
with names that lead out of its folder, or that unpacks to far too much is refused.
  femnist           femnist/{train,val,test}/*.json, as LEAF writes them; also femnist-data/
  cifar_c           CIFAR-10-C/*.npy and CIFAR-10-C-new/{train,val}/*.npy
                    --regenerate: cifar-10-batches-bin/ in place of CIFAR-10-C-new
                    --tfds: nothing; tensorflow-datasets fetches into it what is not there yet
  tiny_imagenet_c   Tiny-ImageNet-C/ and Tiny-ImageNet-C-new/{train,val}/
                    --regenerate: tiny-imagenet-200/ in place of Tiny-ImageNet-C-new
  iwildcam          iwildcam_v2.0/{metadata.csv,categories.csv,train/}
  folder            DOMAIN/CLASS/IMAGE; what is no image, or lies elsewhere, is counted in a warning

An image that cannot be read ends the run with its name; --skip_bad=N names up to N of them and leaves them out. Images of
files of their own are kept as they are decoded, so the same command, also with another --skip_bad, does not decode them again.

The result is written to --data_dir/--name under another name and renamed when whole, so what a stopped run leaves is
never taken for data. Beside it, sheet.png shows some images of some domains. A card of the splits comes last: domains,
images, classes, hash, and the paper's counts. Results on regenerated domains are not comparable with the paper's; every
result row says so.

--download first fetches into --raw_dir what PUBLISHED below lists and is not there yet, resumes what was cut short, and checks
sizes and hashes. For a benchmark that is not listed it says where its files come from.
"""

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from cxda_jax.analysis.sheet import draw_sheet
from cxda_jax.data.archives import extract
from cxda_jax.data.decoded import keeping
from cxda_jax.data.downloads import fetch
from cxda_jax.data.images import FITS
from cxda_jax.data.raw import Check, Packed, RawData, cores, large_enough, read_pieces
from cxda_jax.data.store import SPLITS, DomainStore, StoreInfo, open_store, write_store
from cxda_jax.experiment import READERS, lookup, renamed
from cxda_jax.files import locked
from cxda_jax.progress import Counter, duration
from cxda_jax.reading import reason
from cxda_jax.types import UserError, printable
from launch import cli

_BENCHMARK = flags.DEFINE_string("benchmark", None, f"One of {', '.join(READERS)}.", required=True)
flags.adopt_module_key_flags(cli)
_RAW_DIR = flags.DEFINE_string("raw_dir", None, "Where the downloads are.", required=True)
_NAME = flags.DEFINE_string("name", None, "Folder in --data_dir, config.data.name; the benchmark's name unless given.")
_DOWNLOAD = flags.DEFINE_bool("download", False, "First fetch the published files that --raw_dir lacks.")
_STRICT = flags.DEFINE_bool("strict", False, "Refuse raw files whose counts are not the paper's.")
_SKIP_BAD = flags.DEFINE_integer(
    "skip_bad", 0, "tiny_imagenet_c, iwildcam, folder: leave out up to so many bad images.", lower_bound=0
)
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Threads that read and decode; one for each core unless given.", lower_bound=1
)
_OPTIONS = [
    flags.DEFINE_bool("regenerate", None, "cifar_c, tiny_imagenet_c: make train and val domains from clean images."),
    flags.DEFINE_bool("tfds", None, "cifar_c: as --regenerate, all images through tensorflow-datasets."),
    flags.DEFINE_integer("size", None, "iwildcam (112), folder (64): side of the images.", lower_bound=8),
    flags.DEFINE_enum("fit", None, list(FITS), "folder (squash): how an image that is no square becomes one."),
    flags.DEFINE_string("background", None, "folder (white): behind transparency and padding; white, black or R,G,B."),
    flags.DEFINE_string("split_csv", None, "folder: a CSV file with the columns domain and split."),
    flags.DEFINE_integer("min_images", None, "folder (40): leave domains with fewer images out.", lower_bound=1),
    flags.DEFINE_integer(
        "seed", None, "folder (0): of the split. --regenerate (0): of the corruptions.", lower_bound=0
    ),
]


class Download(NamedTuple):
    """A published archive: the folder that it becomes, its name in --raw_dir and, where they are published, its size in
    bytes and its hash, "sha256:..." or "md5:..."."""

    folder: str
    file: str
    url: str
    size: int | None = None
    digest: str | None = None


# By benchmark. Only what a publisher states may stand here: these are tensorflow-datasets' addresses, sizes and hashes.
PUBLISHED: dict[str, tuple[Download, ...]] = {
    "cifar_c": (
        Download(
            "CIFAR-10-C",
            "CIFAR-10-C.tar",
            "https://zenodo.org/record/2535967/files/CIFAR-10-C.tar",
            2918471680,
            "sha256:c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
        ),
        Download(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            170052171,
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
}
BY_HAND = {
    "femnist": "ARM's README links its split; fetch femnist-data.zip by hand into --raw_dir",
    "tiny_imagenet_c": "fetch Tiny-ImageNet-C.tar (Zenodo), tinyimagenet-c.zip (ARM's README) by hand into --raw_dir",
    "iwildcam": "pip install 'cxda_jax[wilds]'; wilds.get_dataset('iwildcam', download=True, root_dir=RAW_DIR) in Python",
    "folder": "these are your own images; there is nothing to download",
}


def main() -> None:
    names = [flag.name for flag in (_RAW_DIR, _SKIP_BAD, *_OPTIONS)]
    with renamed({name: f"--{name}" for name in names}):  # as readers call what they are given
        read_and_write()


def read_and_write() -> None:
    find = lookup("--benchmark", _BENCHMARK.value, READERS)
    options = {flag.name: flag.value for flag in _OPTIONS if flag.value is not None}
    for name in options:
        if name not in inspect.signature(find).parameters:
            raise UserError(f"--{name}: {_BENCHMARK.value} has no such option; see --help")
    name = _NAME.value or _BENCHMARK.value
    if "name" in inspect.signature(find).parameters:  # of data that has no name of its own
        options["name"] = name
    target = Path(cli.DATA_DIR.value) / name
    if (target / "store.json").exists():
        print(card(open_store(target), []))
        print(f"{target} is there already; delete it to prepare it again")
        return
    raw_dir = Path(_RAW_DIR.value).expanduser()
    if _DOWNLOAD.value:
        download(_BENCHMARK.value, raw_dir)
    raw = unpacked(lambda: find(raw_dir, **options))
    for warning in raw.warnings:
        print(f"warning: {printable(warning)}", flush=True)
    if _SKIP_BAD.value and not any(piece.decoding for piece in raw.pieces):
        raise UserError(f"--skip_bad: {_BENCHMARK.value} has no such option; see --help")
    if _STRICT.value:
        insist(raw.checks)
    prepare(raw, target, _WORKERS.value or cores(), _SKIP_BAD.value)
    store = open_store(target)
    draw_sheet(store, target / "sheet.png", [d for split in SPLITS for d in some(store.domains(split))])
    print(card(store, raw.checks))
    print(f"{target}/sheet.png shows some of it")


def download(benchmark: str, raw_dir: Path) -> None:
    if benchmark not in PUBLISHED:
        what = BY_HAND.get(benchmark, "fetch its files by hand into --raw_dir; its reader's docstring names them")
        raise UserError(f"--download: no address of {benchmark} is known; {what}")
    try:
        raw_dir.mkdir(parents=True, exist_ok=True)
        with locked(raw_dir):  # two that append to the same file would spoil it
            for folder, file, url, size, digest in PUBLISHED[benchmark]:
                if not (raw_dir / folder).is_dir():
                    print(f"{raw_dir / file}: fetching {url}", flush=True)
                    fetch(url, raw_dir / file, size, digest)
    except OSError as e:
        raise UserError(f"--raw_dir={raw_dir}: {reason(e)}; give a folder that can be written to") from None


def unpacked(find: Callable[[], RawData]) -> RawData:
    """What a reader finds, once the archives that it meets are extracted."""
    while True:
        try:
            return find()
        except Packed as e:
            print(f"{e.archive}: extracting to {e.folder}", flush=True)
            extract(e.archive, e.folder)


def prepare(raw: RawData, target: Path, workers: int, skip_bad: int = 0) -> None:
    total, began = sum(piece.rows for piece in raw.pieces), time.monotonic()
    print(f"{target}: writing {total} images", flush=True)
    bad: list[str] = []

    def leave_out(fault: str) -> None:
        print(f"left out: {printable(fault)}", flush=True)
        bad.append(fault)

    def info() -> StoreInfo:
        known = raw.info.provenance
        return raw.info._replace(provenance=f"{known}; {len(bad)} bad images left out" if bad else known)

    with keeping(target, raw.pieces) as pieces:
        domains = read_pieces(pieces, workers, Counter("images", total), skip_bad, leave_out)
        write_store(
            target,
            info,
            large_enough(domains, raw.least, lambda what: print(f"warning: {printable(what)}", flush=True)),
        )
    print(f"{total - len(bad)} images in {duration(time.monotonic() - began)}", flush=True)


def some(domains: np.ndarray, count: int = 4) -> list[int]:
    """The first, the last and what lies evenly between."""
    return (
        sorted({int(domains[i]) for i in np.linspace(0, len(domains) - 1, count).astype(int)}) if len(domains) else []
    )


def insist(checks: list[Check]) -> None:
    for check in checks:
        if check.found != check.expected:
            raise UserError(
                f"--strict: {check.what}: {check.found}, but the paper's {check.expected}; fetch the files again"
            )


def card(store: DomainStore, checks: list[Check]) -> str:
    """What the store holds, split by split, and how that compares with what the paper used."""
    info, sizes = store.info, np.diff(store.offsets)
    height, width, channels = store.images.shape[1:]
    marks = f", {', '.join(info.marks)}" if info.marks else ""
    lines: list[Any] = [
        f"{info.name}: {store.num_classes} classes, {height}x{width}x{channels}{marks}; {printable(info.provenance)}",
        f"{'split':<8}{'domains':>8}{'images':>9}{'classes':>9}   images per domain",
    ]
    for split in SPLITS:
        domains = store.domains(split)
        labels = [store.labels[store.offsets[d] : store.offsets[d + 1]] for d in domains]
        classes = len(np.unique(np.concatenate(labels))) if labels else 0
        spread = f"{sizes[domains].min()} to {sizes[domains].max()}" if len(domains) else "-"
        lines.append(f"{split:<8}{len(domains):>8}{sizes[domains].sum():>9}{classes:>9}   {spread}")
    lines.append(f"sha256 {store.sha256}")
    for check in checks:
        verdict = "as in the paper" if check.found == check.expected else f"the paper's: {check.expected}"
        lines.append(f"{check.what}: {check.found}, {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
