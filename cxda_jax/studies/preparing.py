"""Makes a store of raw downloads or of a user's own images. launch/prepare.py says what each benchmark takes."""

import inspect
import json
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.config.fields import lookup
from cxda_jax.data.readers.archives import extract
from cxda_jax.data.readers.raw import Check, Packed, RawData, large_enough, read_pieces
from cxda_jax.data.store import AGAIN, SPLITS, DomainStore, StoreInfo, open_store, write_store
from cxda_jax.disk import files
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError, brief, printable
from cxda_jax.machine.backend import cores
from cxda_jax.machine.progress import Counter, duration
from cxda_jax.studies.sheet import draw_sheet
from cxda_jax.training.experiment import READERS

OPTIONS_FILE = "asked.json"  # in the folder of a store: the options that it was prepared with


class Download(NamedTuple):
    """A published archive."""

    folder: str  # that it becomes
    url: str  # which ends with its name in --raw_dir
    size: int  # bytes
    sha256: str


# Only what a publisher states may stand here: these are tensorflow-datasets' addresses, sizes and hashes.
CORRUPTED = Download("CIFAR-10-C", "https://zenodo.org/record/2535967/files/CIFAR-10-C.tar", 2918471680,
                     "c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7")  # fmt: skip
CLEAN = Download("cifar-10-batches-bin", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 170052171,
                 "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")  # fmt: skip
DOWNLOADS: dict[str, tuple[Download, ...]] = {"cifar_c": (CORRUPTED, CLEAN), "cifar10_c": (CLEAN,)}  # by benchmark
BY_HAND = {
    "femnist": "ARM's README links its split; fetch femnist-data.zip by hand into --raw_dir",
    "tiny_imagenet_c": "fetch Tiny-ImageNet-C.tar (Zenodo), tinyimagenet-c.zip (ARM's README) by hand into --raw_dir",
    "iwildcam": (
        "pip install 'cxda_jax[wilds]'; wilds.get_dataset('iwildcam', download=True, root_dir=RAW_DIR) in Python"
    ),
    "unipen": "fetch train_r01_v07 from https://doi.org/10.5281/zenodo.1195803 by hand into --raw_dir",
    "qmnist": (
        "fetch qmnist-{train,test}-{images-idx3-ubyte,labels-idx2-int}.gz of github.com/facebookresearch/qmnist "
        "by hand into --raw_dir"
    ),
    "folder": "these are your own images; there is nothing to download",
}


def prepare_benchmark(
    benchmark: str,
    raw_dir: Path,
    target: Path,
    options: Mapping[str, Any],
    strict: bool,
    skip_bad: int,
    workers: int | None,
) -> None:
    """Reads the raw files in `raw_dir`, writes them as the store `target` and prints its card.

    A store that is there already is left as it is, and its card is printed.

    Args:
      options: arguments of the benchmark's reader; those that are missing have its defaults.
      strict: whether counts that differ from the paper's are an error.
      skip_bad: how many images that cannot be read are left out before it is an error.
      workers: threads; None: one for each core.
    """
    find = lookup("--benchmark", benchmark, READERS)
    takes = inspect.signature(find).parameters
    for name in options:
        if name not in takes:
            raise UserError(f"--{name}: {benchmark} has no such option; see --help")
    named = {"name": target.name} if "name" in takes else {}  # data that have no name of their own
    asked = {"benchmark": benchmark} | {
        name: options.get(name, takes[name].default) for name in takes if name not in ("raw_dir", "name")
    }
    if split_csv := asked.get("split_csv"):
        asked["split_csv"] = (
            f"{split_csv} ({files.hash_file(Path(split_csv))[:12]})" if Path(split_csv).is_file() else split_csv
        )
    if (target / "store.json").exists():
        insist_on_equal(target, asked)
        print(card(open_store(target), []))
        print(f"{target} is there already; delete it to prepare it again")
        return
    raw = unpacked(lambda: find(raw_dir, **options, **named))
    for warning in raw.warnings:
        warn(warning)
    if skip_bad and not any(piece.are_files for piece in raw.pieces):
        raise UserError(f"--skip_bad: {benchmark} has no such option; see --help")
    for check in raw.checks:
        if strict and check.found != check.expected:
            what = f"{check.what}: {check.found}, but the paper's {check.expected}"
            raise UserError(f"--strict: {what}; fetch the files again")
    prepare(raw, target, workers or cores(), skip_bad)
    files.write_text(target / OPTIONS_FILE, json.dumps(files.sealed({"asked": asked}), indent=1) + "\n")
    store, shown = open_store(target), []
    for domains in map(store.domains, SPLITS):  # the first of a split, the last and what lies evenly between
        shown += np.unique(domains[np.linspace(0, len(domains) - 1, 4).astype(int)]).tolist() if len(domains) else []
    draw_sheet(store, target / "sheet.png", shown)
    print(card(store, raw.checks))
    print(f"{target}/sheet.png shows some of it")


def insist_on_equal(target: Path, asked: Mapping[str, Any]) -> None:
    """Raises a UserError where a store was prepared with other options.

    A store of an older version does not say its own.
    """
    if not (target / OPTIONS_FILE).exists():
        return
    content = read_object(target / OPTIONS_FILE, AGAIN)
    before = content.get("asked")
    if files.is_falsified(content) or not isinstance(before, dict):
        raise UserError(f"{target / OPTIONS_FILE} differs from its recorded hash; {AGAIN}")
    for name, value in asked.items():
        if before.get(name) != value:
            was = f"{target} was prepared with {brief(repr(before.get(name)), 60)}"
            raise UserError(f"--{name}={brief(str(value), 60)}: {was}; choose another --name, or delete it")


def show_published(benchmark: str, raw_dir: Path) -> None:
    """Prints how to fetch each published file that raw_dir lacks, and checks the size and the hash of those it has."""
    if benchmark not in DOWNLOADS:
        what = BY_HAND.get(benchmark, "fetch its files by hand into --raw_dir; its reader's docstring names them")
        raise UserError(f"--links: no address of {benchmark} is known; {what}")
    for folder, url, size, digest in DOWNLOADS[benchmark]:
        path = raw_dir / url.rpartition("/")[2]
        if (raw_dir / folder).is_dir():
            print(f"{raw_dir / folder}: is there")
        elif not path.is_file() or path.stat().st_size < size:
            print(f"curl -L -C - --create-dirs -o {shlex.quote(str(path))} {url}")  # goes on with a part of the file
        elif path.stat().st_size != size or files.hash_file(path) != digest:
            raise UserError(
                f"{path}: not the published file of {size} bytes and its hash; delete it and fetch it again"
            )
        else:
            print(f"{path}: has the published size and hash")


def unpacked(find: Callable[[], RawData]) -> RawData:
    """The data that a reader finds, once the archives that it meets are extracted."""
    while True:
        try:
            return find()
        except Packed as e:
            print(f"{e.archive}: extracting to {e.folder}", flush=True)
            extract(e.archive, e.folder)


def warn(what: str) -> None:
    print(f"warning: {printable(what)}", flush=True)


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

    domains = read_pieces(raw.pieces, workers, Counter("images", total), skip_bad, leave_out)
    write_store(target, info, large_enough(domains, raw.least, warn))
    print(f"{total - len(bad)} images in {duration(time.monotonic() - began)}", flush=True)


def card(store: DomainStore, checks: list[Check]) -> str:
    """The counts of the store, split by split, beside those of the paper."""
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
