"""Learns to adapt a classifier that you have, from what cxda features made of labelled images.

cxda fit --features=features.npz --out=adapter
cxda fit --features=features.npz --out=adapter --minutes=10 --seed=1
cxda fit --features=no_logits.npz --out=adapter --head=0.5

The images must be others than those that the classifier was trained on, from three domains or more. --out gets the
adapter, and report.html: what it gains on new domains. cxda_jax.load_adapter reads the folder. An adapter that is
there is replaced.

A file of your own will do, as of numpy.savez, with the arrays logits, labels, domains and style. If it has features,
the inputs of the last layer, the report says what such a layer gains that learns from these images.

Where there are features without logits, logistic regression learns a last layer from a part of the domains, the head:
--head is the part, or a number of domains. The adapter learns from the other domains, and keeps the head.

A buffer changes the odds of an image's classes by factors. With --floor=0.2 none is less than a fifth of the largest:
an answer that is five times as likely as every other one stays, so fewer images of rare classes are lost. Without
--floor held-out domains choose it; with --floor=0 all factors are allowed.
"""

from typing import Any

from absl import flags

from . import cli

flags.adopt_module_key_flags(cli)
_FEATURES = flags.DEFINE_string("features", "", "The .npz file of cxda features.", allow_override=True)
_OUT = flags.DEFINE_string("out", "", "The folder to write.", allow_override=True)
_MINUTES = flags.DEFINE_float("minutes", None, "That the training may take, if not five.", lower_bound=0.0)
_HEAD = flags.DEFINE_float(
    "head", None, "Without logits: the part or the number of domains for a head (0.5).", lower_bound=0.0
)
_FLOOR = flags.DEFINE_float(
    "floor", None, "The least factor of a buffer, as a part of its largest (0: any).", 0.0, 1.0, allow_override=True
)
_SEED = flags.DEFINE_integer("seed", None, "Of all that is random (0).", lower_bound=0, allow_override=True)


def main() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.adapter.adapter import PAGE, insist_on_place, is_adapter
        from cxda_jax.adapter.features import read_labelled
        from cxda_jax.adapter.fit import fit
        from cxda_jax.adapter.head import learn_head
        from cxda_jax.adapter.page import as_html
        from cxda_jax.disk import folders
        from cxda_jax.errors import UserError, naming
        from cxda_jax.machine import backend
        from cxda_jax.machine.progress import replaces, say
    path = Path(cli.insist(_FEATURES.value, "--features", "give the file of cxda features")).expanduser()
    out = Path(cli.insist(_OUT.value, "--out", "name the folder to write, such as --out=adapter")).expanduser()
    insist_on_place(out)  # before minutes are spent
    folders.insist_on_writable(out, "--out")
    backend.keep_compiled()
    found, head = read_labelled(path, without=True), None
    if found.logits is not None and _HEAD.value is not None:
        raise UserError(f"{path} has logits, so no head is learnt", "--head", _HEAD.value, "leave it out")
    if is_adapter(out):
        replaces(out)
    asked = {"minutes": _MINUTES.value, "seed": _SEED.value, "floor": _FLOOR.value}
    given: Any = {name: value for name, value in asked.items() if value is not None}
    if found.logits is None:
        with naming({"head": "--head"}):
            found, head = learn_head(found, 0.5 if _HEAD.value is None else _HEAD.value, _SEED.value or 0, say)
    adapter = fit(found.logits, found.labels, found.domains, found.style, found.features, **given, log=say)
    adapter = adapter._replace(origin=found.origin, head=head)
    adapter.save(out, as_html(adapter))
    say(f"{out}: adapter = cxda_jax.load_adapter({str(out)!r}); {out}/{PAGE} shows what it gains")


if __name__ == "__main__":
    cli.run(main)
