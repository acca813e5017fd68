"""The same arithmetic in plain PyTorch, written from the paper: the yardstick for correctness and for speed."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class TorchCNN(nn.Module):
    """ARM's small CNN; `track` in norm() tells whether a pass uses its own batch statistics."""

    def __init__(self, channels: int, num_classes: int, width: int = 128):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(channels, width, 5, padding=2), nn.Conv2d(width, width, 5), nn.Conv2d(width, width, 5)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(3)])
        self.hidden = nn.Linear(width, 200)
        self.logits = nn.Linear(200, num_classes)

    def map(self, x: torch.Tensor, statistics: list | None = None) -> tuple[torch.Tensor, list]:
        """Feature maps and the batch statistics of each layer. With `statistics` those normalise instead, and
        gradients flow through them; without, the module's own mode decides (train: batch, eval: running)."""
        seen = []
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x)
            if statistics is not None:
                mean, var = statistics[i]
                x = (
                    F.batch_norm_flow(x, mean, var, norm)
                    if hasattr(F, "batch_norm_flow")
                    else _normalise(x, mean, var, norm)
                )
            else:
                if self.training:
                    seen.append((x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)))
                x = norm(x)
            x = F.relu(x)
            x = F.max_pool2d(x, 2) if i else x
        return x, seen

    def classify(self, maps: torch.Tensor) -> torch.Tensor:
        pooled = maps.mean((2, 3)) if maps.ndim == 4 else maps
        return self.logits(F.relu(self.hidden(pooled)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.map(x)[0])


def _normalise(x, mean, var, norm):
    scale = norm.weight * torch.rsqrt(var + norm.eps)
    return x * scale[None, :, None, None] + (norm.bias - mean * scale)[None, :, None, None]


class TorchAttention(nn.Module):
    """z = x_q + softmax(q k^T / sqrt(C / h)) v W over `heads` heads, on layer-normalised inputs."""

    def __init__(self, dim: int, heads: int = 8, ratio: int = 2):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim // ratio, bias=False) for _ in range(3))
        self.out = nn.Linear(dim // ratio, dim, bias=False)

    def forward(self, query: torch.Tensor, support: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def split(x):
            return x.reshape(len(x), self.heads, -1).transpose(0, 1)

        q, s = self.norm(query), self.norm(support)
        scores = split(self.query(q)) @ split(self.key(s)).transpose(1, 2) / math.sqrt(self.dim / self.heads)
        weights = scores.softmax(-1)
        drawn = (weights @ split(self.value(s))).transpose(0, 1).reshape(len(query), -1)
        return query + self.out(drawn), weights


class TorchCXDA(nn.Module):
    """BN (attention None) or CXDA: the support's statistics normalise the query; attention over pooled or flat maps."""

    def __init__(self, net: TorchCNN, attention: TorchAttention | None = None, features: str = "pool"):
        super().__init__()
        self.net, self.attention, self.features = net, attention, features

    def tokens(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.mean((2, 3)) if self.features == "pool" else maps.permute(0, 2, 3, 1).flatten(1)

    def forward(self, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        self.train()
        support_maps, statistics = self.net.map(support)
        query_maps = self.net.map(query, statistics)[0]
        if self.attention is None:
            return self.net.classify(query_maps)
        z = self.attention(self.tokens(query_maps), self.tokens(support_maps))[0]
        if self.features == "flat":
            n, c, h, w = query_maps.shape
            z = z.reshape(n, h, w, c).mean((1, 2))
        return self.net.classify(z)
