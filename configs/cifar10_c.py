"""CIFAR-10's photographs under CIFAR-C's corruptions, all made here; a domain is a corruption at a severity. First:

cxda prepare --benchmark=cifar10_c --raw_dir=DOWNLOADS
cxda train --config=cifar10_c:cxda --workdir=runs/cifar10_c/cxda/0

`:cxda,small` is a network and a training that two cores manage in minutes. With `:cxda,skewed` classes are few.

Domains, severities, counts and hyper-parameters are the paper's for CIFAR-C. The published files differ in their random
numbers and in the textures of frost. Images from JPEG files carry JPEG's traces before any corruption.
"""

from cxda_jax.config.reading import default, shrink, tuned_rate, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "cifar10_c"
    c.method, smoke, small, skewed = variant(argument, "small", "skewed")
    c.data.name = "cifar10_c"  # folder in --data_dir
    c.optimizer.learning_rate = 1e-2
    c.train.epochs = 100
    c.evaluation.every_epochs = 10
    c.evaluation.val_tasks = 850
    c.evaluation.test_tasks = 11_000
    if small:
        c.net.width = 16
        c.cml.width = 8  # half of the network's, as in the paper
        c.attention.features = "flat"
        c.optimizer.learning_rate = tuned_rate("cifar10_c", c.method)
        c.train.epochs = 5  # of 560 steps
        c.evaluation.every_epochs = 1
        c.evaluation.val_tasks = 100
        c.evaluation.test_tasks = 600
    if skewed:
        c.episode.shares = "dirichlet"
    if smoke:
        shrink(c)
    return c
