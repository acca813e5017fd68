"""The study's plan: the commands that make its records. In a clone, with the data in data/:

python -m docs.study.plan                              # prints them all, seed 0 of every part first
python -m docs.study.plan --only=unipen --seeds=0      # those of a part, at a seed
python -m docs.study.plan --only=unipen | bash -e      # does them; each goes on where it was stopped
python -m docs.study.plan --missing                    # those of parts and seeds that have no record yet

Two parts are printed only where --only names them: unipen_cells, for a fresh install on another day, and
cifar10_c_full with cifar10_c_curves, for a GPU. The rate of fine-tuning of the parts *_shares is what validation chose.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RECORDS = HERE / "records"
TRAINED = ("erm_iid", "erm", "bn", "cml", "cxda", "cxda_loo", "cxda_any", "icrm")
BASE = "erm_iid"  # what methods without a training of their own start from here
UNTRAINED = ("bn_alpha", "t3a", "lame", "feature_shift")
FINE_TUNE = ("ft_em", "ft_im", "sf_ocda", "cotta", "sla")
USUAL, CURVES, ALL = "usual", "usual,contexts", "usual,contexts,other_tasks"


class Part(NamedTuple):
    """The trainings and tests on a benchmark: methods, and for each seed the kinds of tests."""

    benchmark: str
    methods: tuple[str, ...]
    tests: tuple[str, ...]
    variant: str = ""

    @property
    def folder(self) -> str:
        """Parts of one benchmark and variant share their runs."""
        return f"runs/study/{'_'.join(filter(None, [self.benchmark, self.variant]))}"


PARTS = {
    "unipen": Part("unipen", TRAINED, (ALL, CURVES, CURVES, USUAL, USUAL)),
    "cifar10_c": Part("cifar10_c", TRAINED, (ALL, CURVES, USUAL), "small"),
    "unipen_sizes": Part("unipen", TRAINED, (CURVES, USUAL, USUAL), "sizes"),
    "glyphs": Part("glyphs", TRAINED, (CURVES, USUAL, USUAL)),
    "glyphs_c": Part("glyphs_c", TRAINED, (CURVES, USUAL, USUAL)),
    "qmnist": Part("qmnist", TRAINED, (CURVES,) * 3),
    "unipen_tuning": Part("unipen", FINE_TUNE, (USUAL,) * 3),
    "cifar10_c_tuning": Part("cifar10_c", FINE_TUNE, (USUAL,) * 3, "small"),
    "unipen_shares": Part("unipen", ("erm",), (USUAL,)),
    "cifar10_c_shares": Part("cifar10_c", ("erm",), (USUAL,), "small"),
    "cifar10_c_full": Part("cifar10_c", ("erm_iid", "bn", "cxda", "cxda_any"), (USUAL,)),
}
# One field of the paper's method changed, on unipen: by a name, the method and its fields.
CHANGES = {
    "patch": "cxda_p2p",
    "known_domains": "cxda_supervised",
    "pooled": "cxda --config.attention.features=pool",
    "statistics_stop": "cxda --config.batch_norm.statistics=stop",
    "statistics_own": "cxda --config.batch_norm.statistics=own",
    "statistics_blended": "cxda --config.batch_norm.prior=20",
    "statistics_running": "cxda --config.batch_norm.momentum=0",
    "scale_head": "cxda --config.attention.scale=head_dim",
    "flips": "cxda --config.augment.flip=True",
    "four_tasks": "cxda --config.train.tasks_per_step=4 --config.train.steps=751 --config.evaluation.every_steps=188",
    "labels_own": "cxda --config.train.support_loss=own",
    "icrm_small": "icrm --config.icrm.layers=2 --config.icrm.width=64",
}
# Trainings of seed 0 again, each with one thing changed that should not matter.
AGAIN = {"again": "cxda", "once more": "cxda", "one core": "taskset -c 0 cxda"}
SEEDS = {name: len(part.tests) for name, part in PARTS.items()}
SEEDS |= {"unipen_changes": 2, "unipen_spread": 1, "unipen_cells": 2, "cifar10_c_curves": 1}
ASKED_FOR = ("unipen_cells", "cifar10_c_full", "cifar10_c_curves")


def commands(name: str, seed: int) -> Iterator[str]:
    """The commands of a part at a seed; the last one writes its record."""
    runs = f"runs/study/{name}/*/{seed}"
    if name in PARTS:
        yield from of_part(name, PARTS[name], seed)
        runs = ",".join(f"{PARTS[name].folder}/{method}/{seed}" for method in PARTS[name].methods)
    elif name == "unipen_changes":
        for change, of in CHANGES.items():
            workdir = f"runs/study/{name}/{change}/{seed}"
            yield f"cxda train --config=unipen:{of} --config.seed={seed} --workdir={workdir} --data_dir=data"
    elif name == "unipen_spread":
        for method in ("cxda", BASE):
            for what, start in AGAIN.items():
                workdir = shlex.quote(f"runs/study/{name}/{method},{what}/{seed}")
                yield f"{start} train --config=unipen:{method} --workdir={workdir} --data_dir=data"
    elif name == "unipen_cells":
        for method in ("cxda_any", "icrm", "bn"):
            flags = f"--only={method} --seeds={seed} --tests=usual --study=runs/study/{name}/{method}"
            yield f"cxda reproduce --benchmark=unipen {flags} --data_dir=data"
        runs = f"runs/study/{name}/*/*/{seed}"
    else:  # cifar10_c_curves: models of cifar10_c_full with fewer images
        for method, sizes in ((BASE, ""), ("cxda_any", "--context=0,1,5,20 ")):
            model, copy = f"{PARTS['cifar10_c_full'].folder}/{method}/{seed}/model", f"runs/study/{name}/{method}"
            yield f"mkdir -p {copy} && cp -rn {model} {copy}/{seed}"
            yield f"cxda evaluate --runs={copy}/{seed} {sizes}--num_tasks=600 --data_dir=data"
    record = RECORDS / f"{name}-{seed}.records"
    yield f"cxda report --runs='{runs}' --report=runs/report/{name} --data_dir=data --record={record}"


def of_part(name: str, part: Part, seed: int) -> Iterator[str]:
    tests = part.tests[seed]
    most = " --most_images=100" * ("other_tasks" not in tests)  # larger buffers are shown in other tasks alone
    study = (
        f"cxda reproduce --benchmark={part.benchmark} --variant={part.variant} --seeds={seed} "
        f"--study={part.folder} --data_dir=data"
    )
    yield f"{study} --only={','.join(part.methods)} --tests={tests}{most}"
    if part.methods == TRAINED and "contexts" in tests:
        yield f"{study} --only={','.join((BASE, *UNTRAINED))} --tests=other_starts{most}"
    elif part.methods == TRAINED:
        others = f"--methods={','.join(UNTRAINED)} --from={BASE}"
        yield f"cxda evaluate --runs={part.folder}/{BASE}/{seed} {others} --data_dir=data"
    if name.endswith("_shares"):
        for method, entry in json.loads((HERE / "tuning.json").read_text())["shares"][part.benchmark].items():
            if entry["rate"] != 0.1:  # the paper's, which the part *_tuning has
                flags = f"--methods={method} --config.finetune.rate={entry['rate']:g}"
                yield f"cxda evaluate --runs={part.folder}/erm/{seed} {flags} --data_dir=data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts; all if empty")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[], help="all if empty")
    parser.add_argument("--missing", action="store_true", help="leave out what is recorded already")
    args = parser.parse_args()
    if unknown := set(args.only) - SEEDS.keys():
        parser.error(f"--only={','.join(sorted(unknown))}: no such part; choose from {', '.join(SEEDS)}")
    for seed in range(max(SEEDS.values())):
        for name, count in SEEDS.items():
            wanted = name in args.only or (not args.only and name not in ASKED_FOR)
            known = args.missing and (RECORDS / f"{name}-{seed}.records").exists()
            if wanted and not known and seed < count and (not args.seeds or seed in args.seeds):
                print(f"# {name}, seed {seed}", *commands(name, seed), sep="\n")


if __name__ == "__main__":
    main()
