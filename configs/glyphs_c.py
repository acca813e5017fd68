"""Coloured digits under CIFAR-C's corruptions: the embedded stand-in for CIFAR-C. Nothing to download.

cxda train --config=glyphs_c:cxda --workdir=runs/glyphs_c/cxda/0
"""

from cxda_jax.config.reading import default, shrink, tuned_rate, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "glyphs_c"
    c.method, smoke = variant(argument)
    c.net.width = 16
    c.cml.width = 8  # half of the network's, as in the paper
    c.attention.features = "flat"
    c.augment.flip = False  # a mirrored digit is none
    c.strong.flip = False
    c.optimizer.learning_rate = tuned_rate("cifar10_c", c.method)
    c.train.epochs = 20
    c.evaluation.every_epochs = 2
    c.evaluation.val_tasks = 100
    c.evaluation.test_tasks = 600
    c.data.seed = 0
    c.data.images = 300  # per domain
    if smoke:
        shrink(c)
        c.data.images = 40
    return c
