"""Rendered characters of many writers: the embedded stand-in for FEMNIST. Nothing to download.

cxda train --config=glyphs:cxda --workdir=runs/glyphs/cxda/0
cxda train --config=glyphs:erm --config.seed=1 --workdir=runs/glyphs/erm/1
cxda train --config=glyphs:bn,smoke --workdir=runs/smoke
cxda evaluate --runs='runs/glyphs/*/*'
"""

from cxda_jax.config.reading import default, shrink, tuned_rate, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "glyphs"
    c.method, smoke = variant(argument)
    c.net.width = 16
    c.cml.width = 8  # half of the network's, as in the paper
    c.attention.features = "flat"
    c.augment.fill = 1.0  # paper is white
    c.augment.flip = False  # a mirrored character is none
    c.strong.flip = False
    c.strong.invert = True  # white paper stays white whatever the brightness
    c.optimizer.learning_rate = tuned_rate("unipen", c.method)
    c.train.epochs = 6
    c.evaluation.every_epochs = 1
    c.evaluation.val_tasks = 100
    c.evaluation.test_tasks = 600
    c.data.seed = 0
    c.data.writers = (240, 40, 60)  # train, val, test
    c.data.drawings = 200  # per writer
    if smoke:
        shrink(c)
        c.data.writers = (6, 5, 5)
        c.data.drawings = 120
    return c
