r"""iWildCam: animals at camera traps, a domain is a camera's location; ResNet-50, macro-F1.

First: cxda prepare --help. The paper starts from torchvision's ImageNet weights (V1), a file of yours:

cxda train --config=iwildcam:cxda --config.net.weights=resnet50-0676ba61.pth \
    --workdir=runs/iwildcam/cxda/0
"""

from cxda_jax.config.reading import default, shrink, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "iwildcam"
    c.method, smoke = variant(argument)
    c.data.name = "iwildcam"  # folder in --data_dir
    c.net.name = "resnet50"
    c.icrm.features = "pool"  # as published for ResNet; flat maps would need a large first layer
    c.cotta.restore = 0.001
    c.optimizer.name = "adam"
    c.optimizer.learning_rate = 3e-5
    c.optimizer.momentum = 0.0  # Adam has its own
    c.optimizer.weight_decay = 0.0
    c.train.epochs = 50
    c.evaluation.every_epochs = 5
    c.evaluation.val_tasks = 745
    c.evaluation.test_tasks = 2125
    if smoke:
        shrink(c)
    return c
