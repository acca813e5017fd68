"""Measures speed beside PyTorch that does the same work, and writes every figure to a JSON file.

python -m launch.benchmark --suite=step --out=docs/results/benchmark-cpu.json
python -m launch.benchmark --suite=layers --out=docs/results/benchmark-layers.json
python -m launch.benchmark --suite=task --out=docs/results/benchmark-task.json --width=32
python -m launch.benchmark --suite=data --out=docs/results/benchmark-data.json
python -m launch.benchmark --suite=scale --out=docs/results/benchmark-scale.json --width=32
python -m launch.benchmark --suite=gpu --out=docs/results/benchmark-gpu.json

One unit of work is an episode of 100 support and 20 query images; nothing is augmented, since the peers do not. The suites:
  step    training steps and inference beside PyTorch, share of the matrix-product peak, memory, top operations
  layers  each convolution, forwards and back: where a step's time goes
  task    milliseconds a test task, for each method, alone and several at once; forms of per-task fine-tuning
  data    choosing images, gathering and streaming them against the size of the store, augmentation
  scale   time against support images, domains, tasks a step and at once, seeds in one program; a plot beside the record
  gpu     all that is promised of a GPU, whole trainings included, in 8 minutes and without TensorFlow
Of step:
  train flow   loss, gradients and the SGD update; gradients flow through the support's statistics, as by default
  train stop   the same without those gradients (--config.batch_norm.statistics=stop)
  infer        adapt to the support and predict the queries
  exact        the peer that computes the same numbers; _channels_last: in that memory layout; _compiled: in that layout and
               by torch.compile; _bf16: with autocast
  buffers      the peer as one writes it by habit, with running buffers: it must be compared with `stop`

Run it from the repository's root on an idle machine: ours and the peers take turns, but PyTorch's threads spin while they
wait for each other, and on a machine with other work that makes it many times slower, which would flatter us. The record
holds `others`, the share of the cores that other processes took, and a warning is printed where it exceeds 5 in 100. PyTorch runs
in a process of its own, in its default setting. ratio = our median / the peer's: below 1 we are faster.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import jax
from absl import flags

from cxda_jax import backend
from cxda_jax.types import UserError
from launch import cli, gpu, growth, layers, suites
from launch.measure import describe, open_peer, watch_others

SUITES = {
    "step": suites.step_suite,
    "layers": layers.layers_suite,
    "task": suites.task_suite,
    "data": growth.data_suite,
    "scale": growth.scale_suite,
    "gpu": gpu.gpu_suite,
}

flags.adopt_module_key_flags(cli)
_SUITE = flags.DEFINE_enum("suite", "step", list(SUITES), "What to measure.")
_OUT = flags.DEFINE_string("out", None, "The JSON file to write.", required=True)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings of each contender, in turns.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 128, "Channels of the CNN.", lower_bound=2)
_GEMM = flags.DEFINE_integer(
    "gemm", 0, "Side of the matrices whose product gives the peak; 0: 4096 on CPUs, 8192 elsewhere.", lower_bound=0
)
_SHAPES = flags.DEFINE_list("shapes", [], "step: image shapes, of " + ", ".join(suites.SHAPES) + "; all if empty.")
_CASES = flags.DEFINE_list("cases", [], "step: methods, of bn, cxda, erm_iid; all if empty.")
_PEERS = flags.DEFINE_bool("peers", True, "Time PyTorch too.")
_BUDGET = flags.DEFINE_integer("budget_s", 480, "gpu: leave out what would begin after so many seconds.", lower_bound=0)
_SMALL = flags.DEFINE_bool("small", False, "Few images and steps: shows that a suite runs, and measures nothing.")
_ONLY = flags.DEFINE_list("only", [], "gpu: parts whose names begin so, such as 'step,training cifar_c'; all if empty.")
_DATE = flags.DEFINE_string("date", None, "Date written to the record; today's by default.")


def main() -> None:
    backend.keep_freed_memory()
    for flag, known in ((_SHAPES, suites.SHAPES), (_CASES, suites.METHODS_TIMED)):
        for name in flag.value:
            if name not in known:
                raise UserError(f"--{flag.name}={name} is not one of {', '.join(known)}")
    out = Path(_OUT.value)
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: no folder {out.parent}; create it first")
    side = _GEMM.value or (4096 if jax.default_backend() == "cpu" else 8192)
    with open_peer(_PEERS.value and _SUITE.value in ("step", "gpu")) as peer:
        record: dict[str, Any] = {
            "suite": _SUITE.value,
            "date": _DATE.value or datetime.date.today().isoformat(),
        } | describe(peer)
        others = watch_others(peer)

        def keep(found: dict[str, Any]) -> None:
            record.update(found, others=others())
            out.write_text(json.dumps(record, indent=1) + "\n")

        options = suites.Options(
            peer, keep, _WIDTH.value, _REPEATS.value, side, _BUDGET.value, _SMALL.value,
            tuple(_SHAPES.value or suites.SHAPES), tuple(_CASES.value or suites.METHODS_TIMED), tuple(_ONLY.value),
        )  # fmt: skip
        SUITES[_SUITE.value](options)
    if record.get("growth"):
        growth.draw_growth(record["growth"], out.with_suffix(".svg"))
        growth.draw_growth(record["growth"], out.with_suffix(".png"))
    if (record["others"] or 0) > 0.05:
        print(f"warning: other processes took {record['others']:.0%} of the cores; do not quote these figures")
    print(f"written to {out}")


if __name__ == "__main__":
    cli.run(main)
