"""Networks: trunks, heads, and the attention between them."""

from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk

__all__ = ["CNNHead", "CNNTrunk", "Classifier", "CrossAttention"]
