"""Says whether a buffer of unlabelled images can help a trained classifier, and through what. Nothing is trained.

cxda diagnose --run=runs/unipen/erm_iid/0
cxda diagnose --features=features.npz    # your own classifier on images that are new to it, by cxda features

The classifier answers the images of validation domains once; those of a file are all taken for such. For devices of one
domain and of five, with a domain's own shares of the classes, even ones and skewed ones, a table shows the accuracy
without adaptation, with what needs no training (prior_shift; mlls, which is calibrated on one half of the domains and
tested on the other), and with what no device can know, marked by a star:

    mlls, domain known*     mlls on the buffer's images of the query's own domain alone
    labels of its images*   the labels of these
    true shares*            the shares of the classes that the domain has in the task
    errors of the domain*   how much too often the classifier gives each class on images of the domain

The last lines say through which of them a buffer can help, and how many training images the classifier knows by heart.
What an adapter gains where errors follow the style of an image cannot be foreseen: cxda fit measures it.
"""

from absl import flags

from cxda_jax.errors import UserError

from . import cli

flags.adopt_module_key_flags(cli)
_RUN = flags.DEFINE_string(
    "run", "", "The run of a training; its plain network answers, without any support.", allow_override=True
)
_FEATURES = flags.DEFINE_string(
    "features", "", "In place of a run, the .npz file of cxda features.", allow_override=True
)
_SPLIT = flags.DEFINE_enum("split", "val", ["val", "test"], "Which domains to ask.", allow_override=True)


def main() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.adapter.features import read_labelled
        from cxda_jax.adapter.fit import diagnosed
        from cxda_jax.machine import backend
        from cxda_jax.studies.diagnosing import diagnose_run
    backend.keep_compiled()
    if _FEATURES.value:
        if _RUN.value:
            raise UserError("--run and --features: both are given; give the one that is to be asked")
        print(diagnosed(*read_labelled(Path(_FEATURES.value).expanduser())[:3]))
        return
    run = cli.insist(_RUN.value, "--run", "give a run of cxda train, such as runs/unipen/erm_iid/0, or --features")
    print(diagnose_run(Path(run), cli.DATA_DIR.value, _SPLIT.value))


if __name__ == "__main__":
    cli.run(main)
