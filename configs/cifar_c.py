"""CIFAR-C: CIFAR-10 under corruptions, a domain is a corruption at a severity. First: cxda prepare --help

cxda train --config=cifar_c:cxda --workdir=runs/cifar_c/cxda/0
"""

from cxda_jax.config.reading import default, shrink, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "cifar_c"
    c.method, smoke = variant(argument)
    c.data.name = "cifar_c"  # folder in --data_dir
    c.optimizer.learning_rate = 1e-2
    c.train.epochs = 100
    c.evaluation.every_epochs = 10
    c.evaluation.val_tasks = 850
    c.evaluation.test_tasks = 11_000
    if smoke:
        shrink(c)
    return c
