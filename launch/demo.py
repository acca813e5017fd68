"""Shows in seconds what adapting does. No training, no data set.

cxda demo
cxda demo --out=OUT --seed=3

Renders characters of five writers whom the model that comes with the package never saw: 100 unlabelled ones to adapt
to, and 300 to answer for. It then does what `cxda adapt` does, and opens the page in a browser. The folder of --out
then holds:

    buffer/ images/  the characters, as PNG files
    labels.csv       what they are, for the scores
    predictions.csv  the answers before and after adapting
    adapted.html     the page

--seed draws other writers.
"""

from absl import flags

from . import cli

flags.adopt_module_key_flags(cli)
_OUT = flags.DEFINE_string("out", "cxda_demo", "The folder to write.", allow_override=True)
_SEED = flags.DEFINE_integer("seed", None, "Which writers; 0 unless given.", 0, 10**6, allow_override=True)
_OPEN = flags.DEFINE_bool("open", True, "Open the page in a browser, if this is a terminal.")


def main() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.device.demo import demo
        from cxda_jax.machine import backend
    backend.keep_compiled()
    demo(Path(_OUT.value), _SEED.value or 0, _OPEN.value)


if __name__ == "__main__":
    cli.run(main)
