"""Compiles a training for accelerators that this machine does not have, and writes a passport: what it will need there.

python -m tools.ahead --config=cifar_c:cxda --topology=v5e:1x1 --config.net.dtype=bfloat16 --out=passport.json
python -m tools.ahead --config=cifar_c:cxda --topology=v5e:2x4 --tasks_per_step=64 --out=passport.json
python -m tools.ahead --config=iwildcam:cxda --topology=h100:8 --tasks_per_step=8 --out=passport.json

Topologies: v5e:1x1 to v5e:16x16, v6e:2x2 and so on, v4:2x2x1, v5p:2x2x1, and h100:1 to h100:8. TPUs need the package
libtpu, GPUs need jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12; the command says how to install them. No
accelerator is used, and no data: the sizes of the published data sets are known, unless the data set is prepared.

The passport says of the training step and of the evaluation, for each chip:
  fits               whether the chip's memory holds peak_bytes: arguments, results, temporary arrays and code
  flops              operations, as the compiler counts them; for GPUs as they are before compilation
  bytes_accessed     bytes that it moves, as the compiler counts them, those in fast memory on the chip included;
                     GPUs' counts none
  exchanges          what the chips exchange, with types and bytes
Nothing here was measured on an accelerator.
"""

from absl import flags

from launch import cli

flags.adopt_module_key_flags(cli)
_CONFIG = flags.DEFINE_string(
    "config", None, "NAME:METHOD[,smoke], or a file of yours in place of NAME.", allow_override=True
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "The kind of accelerator, and how many: v5e:2x4, v5p:2x2x1, h100:8.")
_TASKS = flags.DEFINE_integer(
    "tasks_per_step", None, "Tasks of a step, on all chips together; the config's if not given."
)
_OUT = flags.DEFINE_string("out", None, "The JSON file to write.", allow_override=True)


def main() -> None:
    import json
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"  # the compiler must not look for a device of its own
    with cli.loading(changes=True):
        from pathlib import Path

        from cxda_jax.config.reading import read
        from cxda_jax.disk.files import write_text
        from cxda_jax.errors import UserError
        from cxda_jax.machine.progress import replacing
        from tools.ahead import passport as ahead
    spec = cli.insist(_CONFIG.value, "--config", "name one, such as --config=cifar_c:cxda")
    target = ahead.read_target(
        cli.insist(_TOPOLOGY.value, "--topology", "name accelerators, such as v5e:2x4 or h100:8")
    )
    out = Path(cli.insist(_OUT.value, "--out", "name the JSON file to write"))
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: no folder {out.parent}; create it first")
    replacing('"topology"', out)
    changes = cli.CHANGES if _TASKS.value is None else [*cli.CHANGES, ("train.tasks_per_step", str(_TASKS.value))]
    passport = ahead.passport(read(spec, changes), target, cli.DATA_DIR.value, print)
    write_text(out, json.dumps(passport, indent=1) + "\n")
    print(ahead.table(passport))


if __name__ == "__main__":
    cli.run(main)
