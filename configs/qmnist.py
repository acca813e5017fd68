"""QMNIST: MNIST's digits, a domain is a writer. First:

cxda prepare --benchmark=qmnist --raw_dir=DOWNLOADS --split=students
cxda train --config=qmnist:cxda --workdir=runs/qmnist/cxda/0
"""

from cxda_jax.config.reading import default, shrink, tuned_rate, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "qmnist"
    c.method, smoke = variant(argument)
    c.data.name = "qmnist"  # folder in --data_dir
    # As configs/unipen.py: digits of the same size and look.
    c.net.width = 16
    c.cml.width = 8  # half of the network's, as in the paper
    c.attention.features = "flat"
    c.augment.flip = False  # a mirrored digit is none
    c.strong.flip = False
    c.optimizer.learning_rate = tuned_rate("unipen", c.method)
    c.train.epochs = 5  # of 321 steps for --split=students; validation has 99 % after three
    c.evaluation.every_epochs = 1
    c.evaluation.val_tasks = 100
    c.evaluation.test_tasks = 600
    if smoke:
        shrink(c)
    return c
