"""Makes the records of the study, one file for each part and seed, in docs/study/records. In a clone,
with the data in --data_dir:

python -m docs.study.run --data_dir=DATA --folder=runs/study
python -m docs.study.run --data_dir=DATA --folder=runs/study --only=unipen --seeds=0
python -m docs.study.run --data_dir=DATA --folder=runs/study --dry_run

It goes on where it was stopped. A part whose records are there is left out. Seed 0 of all parts comes first. Two
parts are done only where --only names them. unipen_cells does recorded cells again; it is for a fresh clone, a fresh
environment and another day. cifar10_c_full has the paper's width and length, which need a GPU; cifar10_c_curves
tests two of its models with fewer images.
"""

import argparse
import concurrent.futures as futures
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cxda_jax.disk.manifest import NAME
from cxda_jax.experiment import open_data
from cxda_jax.progress import duration
from cxda_jax.study import records
from cxda_jax.study.results import distinct, read_results
from docs.study import tune
from docs.study.details import details

RECORDS = Path(__file__).parent / "records"
TRAINED = ("erm_iid", "erm", "bn", "cml", "cxda", "cxda_loo", "cxda_any", "icrm")
BASE = "erm_iid"  # what methods without a training of their own start from here
UNTRAINED = ("bn_alpha", "t3a", "lame", "feature_shift")


class Part(NamedTuple):
    """The trainings and tests on a benchmark, for each seed."""

    benchmark: str
    methods: tuple[str, ...]
    tests: tuple[str, ...]  # kinds of tests, for each seed
    variant: str = ""
    others: tuple[str, ...] = UNTRAINED  # methods that start from BASE, if that is trained

    @property
    def folder(self) -> str:
        """Parts of one benchmark and variant share their runs."""
        return "_".join(filter(None, [self.benchmark, self.variant]))

    def calls(self, seed: int) -> Iterator[tuple[tuple[str, ...], str]]:
        """Methods and kinds of tests of each command of `cxda reproduce`."""
        yield self.methods, self.tests[seed]
        if "contexts" in self.tests[seed]:
            yield (BASE, *self.others), "other_starts"  # from BASE alone


USUAL, CURVES, ALL = "usual", "usual,contexts", "usual,contexts,other_tasks"
PARTS = {
    "unipen": Part("unipen", TRAINED, (ALL, CURVES, CURVES, USUAL, USUAL)),
    "cifar10_c": Part("cifar10_c", TRAINED, (ALL, CURVES, USUAL), "small"),
    "unipen_sizes": Part("unipen", TRAINED, (CURVES, USUAL, USUAL), "sizes"),
    "glyphs": Part("glyphs", TRAINED, (CURVES, USUAL, USUAL)),
    "glyphs_c": Part("glyphs_c", TRAINED, (CURVES, USUAL, USUAL)),
    "qmnist": Part("qmnist", TRAINED, (CURVES,) * 3),
    "unipen_tuning": Part("unipen", (*tune.FINE_TUNE, "sla"), (USUAL,) * 3),
    "cifar10_c_tuning": Part("cifar10_c", (*tune.FINE_TUNE, "sla"), (USUAL,) * 3, "small"),
    "unipen_shares": Part("unipen", ("erm",), (USUAL,)),
    "cifar10_c_shares": Part("cifar10_c", ("erm",), (USUAL,), "small"),
    "cifar10_c_full": Part("cifar10_c", ("erm_iid", "bn", "cxda", "cxda_any"), (USUAL,), others=()),
}
# Parts in which what fine-tunes is tested at the share of erm's rate that validation chose,
# where that is not the paper's.
SHARES = ("unipen_shares", "cifar10_c_shares")
# One field of the paper's method changed, on unipen: its name, the method, and the fields.
CHANGES: dict[str, tuple[str, dict[str, object]]] = {
    "patch": ("cxda_p2p", {}),
    "known_domains": ("cxda_supervised", {}),
    "pooled": ("cxda", {"attention.features": "pool"}),
    "statistics_stop": ("cxda", {"batch_norm.statistics": "stop"}),
    "statistics_own": ("cxda", {"batch_norm.statistics": "own"}),
    "statistics_blended": ("cxda", {"batch_norm.prior": 20}),
    "statistics_running": ("cxda", {"batch_norm.momentum": 0}),
    "scale_head": ("cxda", {"attention.scale": "head_dim"}),
    "flips": ("cxda", {"augment.flip": True}),
    "four_tasks": ("cxda", {"train.tasks_per_step": 4, "train.steps": 751, "evaluation.every_steps": 188}),
    "labels_own": ("cxda", {"train.support_loss": "own"}),
    "icrm_small": ("icrm", {"icrm.layers": 2, "icrm.width": 64}),
}
# Trainings of seed 0 again, each with one thing changed that should not matter: what runs the command.
AGAIN = {
    "again": (sys.executable,),
    "once more": (sys.executable,),  # on the machine of the one before
    "one core": ("taskset", "-c", "0", sys.executable),
}
REPEATED = ("cxda", "erm_iid")
CELLS = ("cxda_any", "icrm", "bn")  # of a recorded seed, once more from a fresh install on another day

# How many seeds each part is to have.
SEEDS = {name: len(part.tests) for name, part in PARTS.items()} | {
    "unipen_changes": 2,
    "unipen_spread": 1,
    "unipen_cells": 2,
    "cifar10_c_curves": 1,
}

# What another clone, environment and day are to do, and what needs a GPU or starts from that.
ASKED_FOR = ("unipen_cells", "cifar10_c_full", "cifar10_c_curves")
# Models of cifar10_c_full that cifar10_c_curves tests, and with how many images beside the usual 100.
CURVED = {"erm_iid": (), "cxda_any": (0, 1, 5, 20)}
CURVE_TASKS = 600


def units(only: list[str], seeds: list[int]) -> Iterator[tuple[str, int]]:
    """Each part and seed: seed 0 of all parts, then seed 1, and so on. Those of ASKED_FOR only where they are named."""
    for seed in range(max(SEEDS.values())):
        for name, count in SEEDS.items():
            if seed < count and (name in only or (not only and name not in ASKED_FOR)) and (not seeds or seed in seeds):
                yield name, seed


def study(name: str, seed: int, folder: Path, data_dir: str, dry_run: bool, workers: int = 2) -> list[Path]:
    """Trains and tests a part at a seed, and returns the folders of its runs."""
    part = PARTS[name]
    where = folder / part.folder
    for methods, tests in part.calls(seed):
        flags = [
            f"--benchmark={part.benchmark}",
            f"--variant={part.variant}",
            f"--seeds={seed}",
            f"--data_dir={data_dir}",
        ]
        flags += [f"--only={','.join(methods)}", f"--tests={tests}", f"--study={where}", f"--workers={workers}"]
        if "other_tasks" not in tests:
            flags += ["--most_images=100"]  # this page shows larger buffers in other tasks alone
        start = [sys.executable, "-m", "cxda_jax", "reproduce"]
        subprocess.run([*start, *flags, *["--dry_run"] * dry_run], check=True)
    if BASE in part.methods and "contexts" not in part.tests[seed]:  # else the second of the calls has tested them
        labels = {f"{method},from={BASE}": method for method in part.others}
        evaluate(where / BASE / str(seed), labels, [f"--from={BASE}"], data_dir, dry_run)
    return sorted(where.glob(f"*/{seed}"))


def evaluate(run: Path, labels: Mapping[str, str], flags: list[str], data_dir: str, dry_run: bool) -> None:
    """Tests methods on the weights of a run, unless that was done.

    Args:
      labels: the methods by what `cxda evaluate` calls their results, which are folders of the run.
    """
    missing = [method for label, method in labels.items() if not (run / label / "result.json").exists()]
    given = [f"--runs={run}", f"--methods={','.join(missing)}", *flags, f"--data_dir={data_dir}"]
    command = [sys.executable, "-m", "cxda_jax", "evaluate", *given]
    if missing and dry_run:
        print(*command)
    elif missing:
        subprocess.run(command, check=True)


def fine_tune(name: str, seed: int, folder: Path, data_dir: str, dry_run: bool, workers: int = 2) -> list[Path]:
    """Trains a part of SHARES at a seed, tests it at the shares that validation chose,
    and returns the folder of its run."""
    if not tune.shares(PARTS[name].benchmark):
        raise SystemExit(
            f"{name}: no rate of fine-tuning is chosen; first run python -m docs.study.tune --data_dir={data_dir}"
        )
    run = folder / PARTS[name].folder / "erm" / str(seed)
    study(name, seed, folder, data_dir, dry_run, workers)
    for method, share in chosen_shares(name).items():
        evaluate(run, {tune.label(method, share): method}, [f"--config.finetune.rate={share:g}"], data_dir, dry_run)
    return [run]


def chosen_shares(name: str) -> dict[str, float]:
    """By method that fine-tunes: the share that validation chose, where that is not the paper's."""
    shares = tune.shares(PARTS[name].benchmark)
    return {method: share for method, share in shares.items() if share != tune.PAPER_SHARE}


def belongs(name: str, row: Mapping[str, Any]) -> bool:
    """Whether a result is of a part. Parts share their runs."""
    at_shares = {tune.label(method, share) for method, share in chosen_shares(name).items()}
    if name in SHARES or row["label"] in at_shares:
        return name in SHARES and row["label"] in at_shares
    part = PARTS[name]
    return row["method"] in (*part.methods, *part.others * (BASE in part.methods))


def change(seed: int, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folder and the command of each training of CHANGES at a seed."""
    for name, (method, fields) in CHANGES.items():
        changed = [f"--config.{field}={value}" for field, value in fields.items()]
        run = folder / "unipen_changes" / name / str(seed)
        flags = [f"--config=unipen:{method}", f"--config.seed={seed}", *changed, f"--workdir={run}"]
        yield run, [sys.executable, "-m", "cxda_jax", "train", *flags]


def again(folder: Path, other_python: str | None) -> Iterator[tuple[Path, list[str]]]:
    """The folder and the command of each training of AGAIN, and of those with other versions."""
    others = {"other versions": (other_python,)} if other_python else {}
    for method in REPEATED:
        for name, command in (AGAIN | others).items():
            run = folder / "unipen_spread" / f"{method},{name}" / "0"
            flags = [f"--config=unipen:{method}", f"--workdir={run}"]
            yield run, [*command, "-m", "cxda_jax", "train", *flags]


def cells(seed: int, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folder and the command of each of CELLS: the one that the page gives to a reader."""
    for method in CELLS:
        study_folder = folder / "unipen_cells" / method
        of_seed = RECORDS / f"unipen-{seed}.records"
        flags = [f"--cell={method}/{seed}", f"--records={of_seed}", f"--study={study_folder}"]
        command = [sys.executable, "-m", "cxda_jax", "reproduce", "--benchmark=unipen", *flags]
        yield study_folder / method / str(seed), command


def curves(seed: int, folder: Path, data_dir: str, dry_run: bool) -> list[Path]:
    """Tests the models of CURVED, as cifar10_c_full has left them at a seed,
    and returns the folders of copies of them."""
    runs = []
    for method, sizes in CURVED.items():
        run = folder / "cifar10_c_curves" / method / str(seed)
        runs.append(run)
        model = folder / PARTS["cifar10_c_full"].folder / method / str(seed) / "model"
        if not dry_run and not run.exists():
            if not model.exists():
                raise SystemExit(f"{model}: missing; first run cifar10_c_full of this seed in this --folder")
            half = run.with_name(f"{seed}.half")  # a copy that was broken off must not count as one
            shutil.copytree(model, half, dirs_exist_ok=True)
            half.rename(run)
        if not dry_run and model.exists() and (run / NAME).read_bytes() != (model / NAME).read_bytes():
            raise SystemExit(f"{run}: a copy of another training than {model}; delete it, so that this one is copied")
        flags = [f"--context={','.join(map(str, sizes))}"] * bool(sizes)
        whole = [f"--runs={run}", *flags, f"--num_tasks={CURVE_TASKS}", f"--data_dir={data_dir}"]
        command = [sys.executable, "-m", "cxda_jax", "evaluate", *whole]
        if dry_run:
            print(*command)
        elif len([*run.glob("**/result.json")]) < max(1, len(sizes)):
            subprocess.run(command, check=True)
    return runs


def train(trainings: Iterator[tuple[Path, list[str]]], data_dir: str, dry_run: bool) -> list[Path]:
    """Trains and tests, two at a time, and returns the folders of the runs."""
    runs = []
    with futures.ThreadPoolExecutor(2) as pool:
        jobs = []
        for run, start in trainings:
            runs.append(run)
            whole = [*start, f"--data_dir={data_dir}"]
            if dry_run:
                print(*whole)
            elif not (run / "result.json").exists():
                jobs.append(pool.submit(subprocess.run, whole, check=True))
        for job in jobs:
            job.result()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="where `cxda prepare` put the data")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="of the runs")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts; all if empty")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[], help="all if empty")
    parser.add_argument(
        "--other_python", help="for unipen_spread: a Python with another version of JAX; none leaves it out"
    )
    parser.add_argument("--workers", type=int, default=2, help="trainings at once; on a GPU they share its memory")
    parser.add_argument("--dry_run", action="store_true", help="list what there is to do, and how long it takes")
    args = parser.parse_args()
    if unknown := set(args.only) - SEEDS.keys():
        parser.error(f"--only={','.join(sorted(unknown))}: no such part; choose from {', '.join(SEEDS)}")
    if args.workers < 1:
        parser.error(f"--workers={args.workers}: at least one training at a time")
    asked = [*units(args.only, args.seeds)]
    todo = [(n, s) for n, s in asked if not (RECORDS / f"{n}-{s}.records").exists()]
    print(f"{len(asked)} parts and seeds, {len(asked) - len(todo)} of them recorded in {RECORDS}", flush=True)
    RECORDS.mkdir(exist_ok=True)
    began = time.monotonic()
    for done, (name, seed) in enumerate(todo):
        rest = f"  eta {duration((time.monotonic() - began) / done * (len(todo) - done))}" if done else ""
        print(f"== [{done + 1}/{len(todo)}] {name}, seed {seed}{rest}", flush=True)
        if name in PARTS:
            do = fine_tune if name in SHARES else study
            runs = do(name, seed, args.folder, args.data_dir, args.dry_run, args.workers)
        elif name == "cifar10_c_curves":
            runs = curves(seed, args.folder, args.data_dir, args.dry_run)
        else:
            trainings = {
                "unipen_changes": change(seed, args.folder),
                "unipen_spread": again(args.folder, args.other_python),
                "unipen_cells": cells(seed, args.folder),
            }[name]
            runs = train(trainings, args.data_dir, args.dry_run)
        if args.dry_run:
            continue
        results, faults = read_results(runs)
        if name in PARTS:
            results = [r for r in distinct(results)[0] if belongs(name, r.row)]
        if faults:
            raise SystemExit("\n".join(faults))
        if seed == 0 and name in (*PARTS, "unipen_cells") and name not in SHARES:
            text = json.dumps(details(results, open_data(results[0].config, args.data_dir)))
            (RECORDS / f"{name}-0.json").write_text(text + "\n")
        records.write(RECORDS / f"{name}-{seed}.records", results)
        print(f"== {name}, seed {seed}: {len(results)} results recorded", flush=True)


if __name__ == "__main__":
    main()
