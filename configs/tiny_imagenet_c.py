r"""TinyImageNet-C: Tiny ImageNet under corruptions, a domain is a corruption at a severity; ResNet-50.

First: cxda prepare --help. The paper starts from torchvision's ImageNet weights (V1), a file of yours:

cxda train --config=tiny_imagenet_c:cxda --config.net.weights=resnet50-0676ba61.pth \
    --workdir=runs/tiny_imagenet_c/cxda/0
"""

from cxda_jax.config.reading import default, shrink, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "tiny_imagenet_c"
    c.method, smoke = variant(argument)
    c.data.name = "tiny_imagenet_c"  # folder in --data_dir
    c.net.name = "resnet50"
    c.icrm.features = "pool"  # as published for ResNet; flat maps would need a large first layer
    c.cotta.restore = 0.001
    c.optimizer.learning_rate = 1e-2
    c.train.epochs = 50
    c.evaluation.every_epochs = 5
    c.evaluation.val_tasks = 1700
    c.evaluation.test_tasks = 11_000
    if smoke:
        shrink(c)
    return c
