"""Measures speed beside PyTorch that does the same work, and writes every figure to a JSON file.

python -m tools.bench --suite=step --out=docs/results/benchmark-cpu.json

One unit of work is an episode of 100 support and 20 query images. Nothing is augmented, since the peers augment
nothing.
The suites:
  step  training steps and inference beside PyTorch, share of the matrix-product peak, memory
  gpu   everything that is promised of a GPU, whole trainings included, in 8 minutes and without TensorFlow
Rows of step:
  train        loss, gradients and the SGD update
  infer        adapt to the support and predict the queries
  exact        the peer that computes the same numbers; _channels_last: in that memory layout; _compiled: in that
               layout and by torch.compile; _bf16: with autocast
  buffers      the peer with running buffers, as PyTorch users commonly write it
ratio = our median / the peer's: below 1 we are faster.

Run it on an idle machine. Ours and the peers take turns. PyTorch runs in a process of its own, and its threads spin
while they wait for each other. Other work on the machine makes that many times slower, which would flatter us. The
record holds `others`, the share of the cores that other processes took; above 5 in 100 a warning is printed.
"""

from absl import flags

from launch import cli

flags.adopt_module_key_flags(cli)
_SUITE = flags.DEFINE_enum("suite", "step", ("step", "gpu"), "What to measure.")
_OUT = flags.DEFINE_string("out", None, "The JSON file to write.", allow_override=True)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings of each contender, in turns.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 128, "Channels of the CNN.", lower_bound=2)
_GEMM = flags.DEFINE_integer(
    "gemm", 0, "Side of the matrices whose product gives the peak; 0: 2048 on CPUs, 8192 elsewhere.", lower_bound=0
)
_SHAPES = flags.DEFINE_list("shapes", [], "step: image shapes, of femnist, cifar_c, tiny_imagenet_c; all if empty.")
_PEERS = flags.DEFINE_bool("peers", True, "Time PyTorch too.")
_BUDGET = flags.DEFINE_integer("budget_s", 480, "gpu: leave out what would begin after so many seconds.", lower_bound=0)
_SMALL = flags.DEFINE_bool("small", False, "Few images and steps: shows that a suite runs, and measures nothing.")
_ONLY = flags.DEFINE_list(
    "only", [], "gpu: parts whose names begin so, such as 'step,training cifar_c'; all if empty.", allow_override=True
)


def main() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.errors import UserError
        from cxda_jax.machine import backend
        from tools.bench import suites
    backend.keep_freed_memory()
    out = Path(cli.insist(_OUT.value, "--out", "name the JSON file to write"))
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: no folder {out.parent}; create it first")
    suites.run(
        _SUITE.value, out, _PEERS.value, _GEMM.value, width=_WIDTH.value, repeats=_REPEATS.value,
        budget_s=_BUDGET.value, small=_SMALL.value, shapes=tuple(_SHAPES.value), only=tuple(_ONLY.value),
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
