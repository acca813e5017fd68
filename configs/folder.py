r"""Your own images, DOMAIN/CLASS/IMAGE. First:

cxda prepare --benchmark=folder --raw_dir=MY_IMAGES --name=mine --size=64
cxda train --config=folder:cxda --config.data.name=mine --workdir=runs/mine/cxda/0
cxda train --config=folder:cxda --config.data.name=mine --config.net.name=resnet50 \
    --config.net.weights=resnet50-0676ba61.pth --workdir=runs/mine/cxda_resnet/0

`:cxda,small` is a network and a training that two cores manage in minutes, best on
images that were prepared with --size=32.
"""

from cxda_jax.config.reading import default, shrink, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "folder"
    c.method, smoke, small = variant(argument, "small")
    c.data.name = "folder"  # folder in --data_dir
    if small:
        c.net.width = 16
        c.cml.width = 8  # half of the network's, as in the paper
        c.optimizer.learning_rate = 3e-2
        c.train.steps = 2000
        c.evaluation.every_steps = 500
        c.evaluation.val_tasks = 50
        c.evaluation.test_tasks = 200
    if smoke:
        shrink(c)
    return c
