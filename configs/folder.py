r"""Your own images, DOMAIN/CLASS/IMAGE. First:

python -m launch.prepare --benchmark=folder --raw_dir=MY_IMAGES --name=mine --size=64
python -m launch.train --config=configs/folder.py:cxda --config.data.name=mine --workdir=runs/mine/cxda/0
python -m launch.train --config=configs/folder.py:cxda --config.data.name=mine --config.net.name=resnet50 \
    --config.net.weights=resnet50-0676ba61.pth --workdir=runs/mine/cxda_resnet/0
"""

from cxda_jax.config import default, shrink, variant


def get_config(argument=None):
    c = default()
    c.benchmark = "folder"
    c.method, smoke = variant(argument)
    c.data.name = "folder"  # folder in --data_dir
    if smoke:
        shrink(c)
    return c
