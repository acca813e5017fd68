"""FEMNIST: handwritten characters, a domain is a writer. First: cxda prepare --help

cxda train --config=femnist:cxda --workdir=runs/femnist/cxda/0
"""

from cxda_jax.config.reading import default, shrink, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "femnist"
    c.method, smoke = variant(argument)
    c.data.name = "femnist"  # folder in --data_dir
    c.augment.fill = 1.0  # paper is white: 0 after 1 - x
    c.strong.invert = True  # white paper stays white whatever the brightness
    c.optimizer.learning_rate = 1e-4
    c.train.epochs = 200
    c.evaluation.every_epochs = 10
    c.evaluation.val_tasks = 420
    c.evaluation.test_tasks = 420
    if smoke:
        shrink(c)
    return c
