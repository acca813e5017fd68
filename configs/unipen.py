"""UNIPEN: real handwriting of 62 classes, a domain is a writer. First:

cxda prepare --benchmark=unipen --raw_dir=DOWNLOADS
cxda train --config=unipen:cxda --workdir=runs/unipen/cxda/0

With `:cxda,own` a task is one writer's, with 100 images and the classes that the writer wrote; with `:cxda,skewed` each
writer of a task has few classes.

With `--scale=writer --name=unipen_sizes` for prepare and `:cxda,sizes` for train, sizes are kept: then o and O, s and
S, c and C differ only for somebody who knows the writer.
"""

from cxda_jax.config.reading import default, own_images, shrink, tuned_rate, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "unipen"
    c.method, smoke, sizes, own, skewed = variant(argument, "sizes", "own", "skewed")
    c.data.name = "unipen_sizes" if sizes else "unipen"  # folder in --data_dir
    # As configs/glyphs.py, which has the same classes, image size and look: a network that two cores train in
    # minutes. The paper's width for FEMNIST is 128, with pooled features.
    c.net.width = 16
    c.cml.width = 8  # half of the network's, as in the paper
    c.attention.features = "flat"
    c.augment.fill = 1.0  # paper is white
    c.augment.flip = False  # a mirrored character is none
    c.strong.flip = False
    c.strong.invert = True  # white paper stays white whatever the brightness
    c.optimizer.learning_rate = tuned_rate("unipen", c.method)
    c.train.epochs = 4  # of 751 steps
    c.evaluation.every_epochs = 1
    c.evaluation.val_tasks = 100
    c.evaluation.test_tasks = 600
    if own:
        own_images(c)
    if skewed:
        c.episode.shares = "dirichlet"
    if smoke:
        shrink(c)
    return c
