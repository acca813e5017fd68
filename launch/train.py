"""Trains one method on one benchmark, then tests its best checkpoint.

cxda train --config=glyphs:cxda --workdir=runs/glyphs/cxda/0
cxda train --config=glyphs:bn --config.seed=1 --workdir=runs/glyphs/bn/1
cxda train --config=glyphs:cxda,smoke --workdir=runs/smoke

Several devices share the tasks of a step, if train.tasks_per_step is a multiple of their number. Several hosts do so
with --distributed, the same command on each of them; the first process alone writes. Where one of them ends, all end
with one line within a minute, and the same command on all of them goes on:
srun --ntasks-per-node=1 cxda train --config=glyphs:cxda --workdir=RUN --config.train.tasks_per_step=16 --distributed

The same command again resumes a run that was stopped, exactly. SIGTERM and Ctrl-C save and stop; a second one stops at
once. Where a loss is not finite the run stops before it does harm; --replay_step=N shows the episode of any step. The
workdir then holds:
  config.json      the resolved config; evaluation rebuilds everything from it
  manifest.json    its hash, and the identity of the data and of the machine: other data are refused without
                   --other_data
  metrics.jsonl    loss, accuracy, episodes/s, data_wait_ms; validation scores
  last/ best/      checkpoints: the newest state, and the weights that validated best, with SHA-256 hashes
  model/           the best weights alone, with a card: cxda adapt and cxda_jax.load need nothing else of the run
  result.json      the mean over the test tasks, that of the worst tenth, and ms/task
  predictions.npz  plans, labels and predictions of every test task
  attention.png    a query's answers without support images and with them, and what it attends to
  cost.json        where the time went, speed, memory

Compiled programs are kept in ~/.cache/cxda_jax/compiled, or where $JAX_COMPILATION_CACHE_DIR says.
"""

from absl import flags

from . import cli

_CONFIG = flags.DEFINE_string(
    "config", None, "NAME:METHOD[,smoke], or a file of yours in place of NAME.", allow_override=True
)
cli.define_distributed()
_OTHER_DATA = cli.define_other_data()
flags.adopt_module_key_flags(cli)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept.")
_REPLAY = flags.DEFINE_integer(
    "replay_step", None, "Train nothing: show the episode of this step, and its loss under the run's newest state.",
    lower_bound=0,
)  # fmt: skip


def main() -> None:
    with cli.loading(changes=True, goes_on=True):
        from pathlib import Path

        from cxda_jax.config.reading import read
        from cxda_jax.machine import backend
        from cxda_jax.studies import training
    backend.keep_freed_memory()
    backend.keep_compiled()
    spec = cli.insist(_CONFIG.value, "--config", "name one, such as --config=glyphs:cxda")
    workdir = cli.insist(
        _WORKDIR.value, "--workdir", "name the folder of the run, such as --workdir=runs/glyphs/cxda/0"
    )
    run = read(spec, cli.CHANGES), Path(workdir), cli.DATA_DIR.value, _OTHER_DATA.value
    if _REPLAY.value is None:
        with cli.joined():
            if trained := training.train_run(*run):
                training.test_run(trained)
    else:
        print(training.replay(*run, step=_REPLAY.value))


if __name__ == "__main__":
    cli.run(main)
