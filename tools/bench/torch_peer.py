"""The paper's arithmetic in plain PyTorch: tests compare our results with it, and python -m tools.bench our speed.

Run as a process, it times itself for a benchmark that asks over pipes, one JSON object a line. So PyTorch has its own
threads and the C library's usual memory policy.
"""

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class TorchCNN(nn.Module):
    """ARM's small CNN on [n, channels, h, w]. train() normalises by the batch, eval() by the buffers."""

    def __init__(self, channels: int, num_classes: int, width: int = 128):
        super().__init__()
        inner = (nn.Conv2d(width, width, 5) for _ in range(2))
        self.convs = nn.ModuleList([nn.Conv2d(channels, width, 5, padding=2), *inner])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(3)])
        self.hidden, self.logits = nn.Linear(width, 200), nn.Linear(200, num_classes)

    def map(self, x: torch.Tensor, given: list | None = None, seen: list | None = None) -> torch.Tensor:
        """Images to maps, normalised by the mode's statistics or `given` ones; `seen` gets those of the batch."""
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x)
            if seen is not None:
                # norm(x) computes these two again. Its fused passes save more than that costs: normalising by hand
                # with these two tensors was 10 to 20 % slower, forward and backward.
                var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
                seen.append((mean, var))
            if given is None:
                x = norm(x)
            else:  # with gradients to the statistics
                mean, var = given[i]
                scale = norm.weight * torch.rsqrt(var + norm.eps)
                x = x * scale[:, None, None] + (norm.bias - mean * scale)[:, None, None]
            x = F.max_pool2d(F.relu(x), 2) if i else F.relu(x)
        return x

    def classify(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps [n, c, h, w], or pooled vectors [n, c], to logits."""
        pooled = maps.mean((2, 3)) if maps.ndim == 4 else maps
        return self.logits(F.relu(self.hidden(pooled)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.map(x))


class TorchAttention(nn.Module):
    """z = x_q + softmax(q k^T / sqrt(C / h)) v W over `heads` heads, on layer-normalised inputs."""

    def __init__(self, dim: int, heads: int = 8, ratio: int = 2, scale: str = "paper", shared_norm: bool = True):
        super().__init__()
        self.heads, self.width = heads, dim / heads / {"paper": 1, "head_dim": ratio}[scale]
        self.norm = nn.LayerNorm(dim)
        if not shared_norm:
            self.norm_query = nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim // ratio, bias=False) for _ in range(3))
        self.out = nn.Linear(dim // ratio, dim, bias=False)

    def forward(self, query: torch.Tensor, support: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adapted query tokens [m, C] and the weights [heads, m, n]."""

        def split(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(len(x), self.heads, -1).transpose(0, 1)

        q, s = getattr(self, "norm_query", self.norm)(query), self.norm(support)
        scores = split(self.query(q)) @ split(self.key(s)).transpose(1, 2) / math.sqrt(self.width)
        weights = scores.softmax(-1)
        drawn = (weights @ split(self.value(s))).transpose(0, 1).reshape(len(query), -1)
        return query + self.out(drawn), weights


class TorchCXDA(nn.Module):
    """BN (attention None) or CXDA: the support's statistics normalise the query; tokens are pooled or flat maps.

    `statistics`: "flow", exact, with gradients through them. "stop", without those. "buffers", buffers of momentum 1,
    as PyTorch users commonly write it; it equals "stop", except that PyTorch's buffers hold the unbiased variance.
    """

    def __init__(self, net: TorchCNN, attention: TorchAttention | None = None, features="pool", statistics="flow"):
        super().__init__()
        self.net, self.attention, self.features, self.statistics = net, attention, features, statistics
        if statistics == "buffers":
            for norm in net.norms:
                norm.momentum = 1.0

    def tokens(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.mean((2, 3)) if self.features == "pool" else maps.permute(0, 2, 3, 1).flatten(1)

    def forward(self, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Support [n, c, h, w] and query [m, c, h, w] to the query's logits."""
        seen = None if self.statistics == "buffers" else []
        support_maps = self.net.train().map(support, seen=seen)
        if self.statistics == "stop":
            seen = [(mean.detach(), var.detach()) for mean, var in seen]
        query_maps = self.net.eval().map(query, given=seen)
        if self.attention is None:
            return self.net.classify(query_maps)
        z = self.attention(self.tokens(query_maps), self.tokens(support_maps))[0]
        if self.features == "flat":
            n, c, h, w = query_maps.shape
            z = z.reshape(n, h, w, c).mean((1, 2))
        return self.net.classify(z)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(nn.Module):
    """ResNet-50 under torchvision's names, written from its description: the yardstick for ours."""

    def __init__(self, num_classes: int, stages=(3, 4, 6, 3), width: int = 64):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width)
        inputs, self.stages = width, len(stages)
        for i, blocks in enumerate(stages):
            layers = []
            for j in range(blocks):
                layers.append(Bottleneck(inputs, width * 2**i, 2 if i and not j else 1))
                inputs = 4 * width * 2**i
            setattr(self, f"layer{i + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))


def torch_tensors(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A Flax collection (parameters, gradients or statistics) by TorchCXDA's names and in PyTorch's layouts."""
    names = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    found = {}
    for part, layers in tree.items():
        for layer, leaves in layers.items():
            layer = layer.replace("conv", "convs.").replace("bn", "norms.")
            for leaf, value in leaves.items():
                value = torch.tensor(np.array(value))
                if leaf == "kernel":
                    value = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T
                found[f"{'attention' if part == 'attention' else 'net'}.{layer}.{names[leaf]}"] = value
    return found


def copy_weights(variables: Mapping[str, Any], module: nn.Module) -> nn.Module:
    """Loads Flax variables into a TorchCXDA or a TorchCNN, and returns it. Other names or shapes are an error."""
    found = torch_tensors(variables["params"]) | torch_tensors(variables["batch_stats"])
    if isinstance(module, TorchCNN):
        found = {name.removeprefix("net."): value for name, value in found.items()}
    counters = {name: value for name, value in module.state_dict().items() if name.endswith("num_batches_tracked")}
    module.load_state_dict(found | counters, strict=True)
    return module


class Work(NamedTuple):
    """A training step or an inference on one episode."""

    resnet: bool  # it takes queries alone: they normalise it in training, its buffers in inference
    image: list[int]  # height, width, channels
    classes: int
    width: int  # channels of the CNN
    heads: int  # of the attention; 0: no attention
    counts: list[int]  # support and query images
    train: bool


def make_module(work: Work, statistics: str) -> nn.Module:
    """The network of a work. `statistics` are those of TorchCXDA."""
    if work.resnet:
        return TorchResNet(work.classes).train(work.train)
    attention = TorchAttention(work.width, work.heads) if work.heads else None
    return TorchCXDA(TorchCNN(work.image[2], work.classes, work.width), attention, statistics=statistics)


class Timer:
    """Times the work that it has prepared, by name."""

    cpu = staticmethod(time.process_time)  # seconds that processors worked for this process

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as in our float32; CPUs have none
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.prepared: dict[str, Callable[[], Any]] = {}  # each call does one unit of work
        self.forget = self.prepared.clear

    def describe(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name() if self.device == "cuda" else platform.machine()
        return {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads()}

    def gemm(self, name: str, size: int, dtype: str) -> None:
        """Prepares a product of matrices [size, size]."""
        a = torch.rand(size, size, device=self.device, dtype=getattr(torch, dtype))
        self.prepared[name] = lambda: a @ a

    def episode(self, name: str, **options: Any) -> None:
        """Prepares a training step (forward, backward, SGD) or an inference. The options are fields of Work.

        The name says how it is written: "exact", the same numbers as ours, or "buffers" (see TorchCXDA). It goes on
        with any of "_channels_last" (that memory layout), "_compiled" (by torch.compile, in that layout) and "_bf16"
        (autocast).
        """
        torch.manual_seed(0)
        work = Work(**options)
        layout = torch.channels_last if "_channels_last" in name or "_compiled" in name else torch.contiguous_format
        statistics = "buffers" if name.startswith("buffers") else "flow"
        module = make_module(work, statistics).to(self.device, memory_format=layout)
        shape = work.image[2], *work.image[:2]
        counts = work.counts[1:] if work.resnet else work.counts
        images = [torch.rand(n, *shape, device=self.device).to(memory_format=layout) for n in counts]
        if "_compiled" in name:
            module = torch.compile(module)
        cast = torch.autocast(self.device, torch.bfloat16, enabled=name.endswith("_bf16"))
        labels = torch.randint(work.classes, (counts[-1],), device=self.device)
        sgd = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)

        def step() -> None:
            sgd.zero_grad()
            with cast:
                loss = F.cross_entropy(module(*images), labels)
            loss.backward()
            sgd.step()

        def infer() -> torch.Tensor:
            with torch.no_grad(), cast:
                return module(*images)

        self.prepared[name] = step if work.train else infer

    def time(self, name: str, calls: int) -> float:
        """Mean seconds of `calls` calls in a row."""
        began = time.perf_counter()
        for _ in range(calls):
            self.prepared[name]()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls


def serve() -> None:
    """Answers lines {"do": method of Timer, ...arguments} by {"answer": ...} or {"error": text} until stdin ends."""
    timer = Timer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = {"answer": getattr(timer, request.pop("do"))(**request)}
        except Exception as e:  # the process that asked tells the user
            found = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    serve()
