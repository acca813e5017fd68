"""ResNet-50 (He et al., 2016) as torchvision builds it (v1.5: the 3x3 convolution carries the stride), under its names.

    conv 7x7 / 2, BN, ReLU, max-pool 3x3 / 2; 3, 4, 6, 3 bottlenecks of 64, 128, 256, 512 channels,
    each with 4 times as many channels at its end                                      -> map [n, h / 32, w / 32, 2048]
    global average pool; dense num_classes                                             -> logits

Convolutions are padded on both sides, as in PyTorch. ("SAME" pads those with a stride on one side only.)
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.adapters import LatentAdapters
from cxda_jax.nets.convolution import convolve, max_pool
from cxda_jax.nets.initial import initialisers
from cxda_jax.nets.normalisation import BatchNorm


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, plus the input; where the shape changes, plus a 1x1 convolution of the input."""

    width: int
    stride: int = 1
    adapters: int = 0
    zero_adapters: bool = False
    dtype: Any = jnp.float32
    all_convs: bool = False
    initial: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool | jax.Array = False) -> jax.Array:
        out = 4 * self.width
        y = BatchNorm(True, name="bn1")(_conv(self, "conv1", x, self.width, 1), batch)
        y = BatchNorm(True, name="bn2")(_conv(self, "conv2", y, self.width, 3, self.stride), batch)
        y = BatchNorm(name="bn3")(_conv(self, "conv3", y, out, 1), batch)
        if x.shape[-1] != out or self.stride > 1:
            x = BatchNorm(name="downsample_bn")(_conv(self, "downsample_conv", x, out, 1, self.stride), batch)
        return nn.relu(x + y)


class ResNetTrunk(nn.Module):
    """Normalised images [n, h, w, c] to feature maps [n, h', w', 4 * width * 2 ** (stages - 1)]."""

    width: int = 64
    stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each
    dtype: Any = jnp.float32
    adapters: int = 0  # beside each convolution whose kernel is larger than one pixel
    zero_adapters: bool = False  # they start at zero
    all_convs: bool = False  # there are adapters beside the convolutions with kernels of one pixel too
    initial: str = "torch"  # how layers start; see initialisers()

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool | jax.Array = False) -> jax.Array:
        x = BatchNorm(True, name="bn1")(_conv(self, "conv1", x, self.width, 7, 2), batch)
        x = max_pool(x, 3, 2, pad=1)
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                options = (2 if i and not j else 1, self.adapters, self.zero_adapters, self.dtype)
                options = (*options, self.all_convs, self.initial)
                x = Bottleneck(self.width * 2**i, *options, name=f"layer{i + 1}_{j}")(x, batch)
        return x


class LinearHead(nn.Module):
    """Pooled features [n, c] to logits [n, num_classes], or with `classify=False` to themselves."""

    num_classes: int
    dtype: Any = jnp.float32
    last: str = "fc"  # the name of the last layer
    initial: str = "torch"  # see initialisers()

    @nn.compact
    def __call__(self, x: jax.Array, classify: bool = True) -> jax.Array:
        start = initialisers(self.initial, x.shape[-1])
        last = nn.Dense(self.num_classes, dtype=self.dtype, name=self.last, **start)
        return last(x) if classify else x


def _conv(parent: Any, name: str, x: jax.Array, features: int, kernel: int, stride: int = 1) -> jax.Array:
    """A convolution without bias, padded by half of its kernel, plus its latent adapters if the parent has any."""
    pad, strides = (kernel // 2, kernel // 2), (stride, stride)
    y = nn.Conv(
        features, (kernel, kernel), strides, (pad, pad), use_bias=False, dtype=parent.dtype, name=name,
        conv_general_dilated=convolve, **initialisers(parent.initial, kernel**2 * x.shape[-1]),
    )(x)  # fmt: skip
    if not parent.adapters or (kernel == 1 and not parent.all_convs):
        return y
    options = (features, parent.adapters, 0, parent.zero_adapters, parent.dtype, stride, parent.initial)
    return y + LatentAdapters(*options, name=name.replace("conv", "adapters"))(x)
