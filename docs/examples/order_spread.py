"""Measures how much a method's answers depend on what adapt() draws; for icrm that
is the order of the support. In a clone:

python -m docs.examples.order_spread runs/glyphs/icrm/0

It tests the run's best checkpoint on the same tasks with several draws. The first draw is that of `cxda evaluate`.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cxda_jax.evaluation import compile_task, evaluate
from cxda_jax.experiment import Experiment, build
from cxda_jax.study.identity import read_config
from cxda_jax.study.runs import restore_best
from cxda_jax.types import Variables


class Spread(NamedTuple):
    """Of several draws on the same tasks."""

    means: np.ndarray  # mean score of each draw [draws]
    by_task: float  # standard deviation of a task's score over the draws, the mean over tasks
    changed: float  # share of answers that differ from those of the first draw


def spread(experiment: Experiment, variables: Variables, draws: int = 5, num_tasks: int = 200) -> Spread:
    """Tests on the first test tasks, `draws` times."""
    evaluator, tasks = compile_task(experiment.method, experiment.source), experiment.task_plans("test")
    first = experiment.config["evaluation"]["seed"]
    tables = [
        evaluate(evaluator, variables, experiment.source, tasks, num_tasks, experiment.store.info.metric, first + draw)
        for draw in range(draws)
    ]
    changed = np.mean([table.predictions != tables[0].predictions for table in tables[1:]])
    scores = np.stack([table.scores for table in tables])
    return Spread(scores.mean(1), float(scores.std(0, ddof=1).mean()), float(changed))


def main(run: Path) -> None:
    experiment = build(read_config(run), Path.home() / ".cache" / "cxda_jax", splits=("test",))
    found = spread(experiment, restore_best(run, experiment)[0])
    means = ", ".join(f"{100 * mean:.1f}" for mean in found.means)
    print(f"{run}: means {means}; deviation of a task {100 * found.by_task:.1f}; answers changed {found.changed:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
