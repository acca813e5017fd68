"""ResNet-50 in plain PyTorch under torchvision's names, written from its description: the yardstick for ours."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride > 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(nn.Module):
    def __init__(self, num_classes: int, stages=(3, 4, 6, 3), width: int = 64, channels: int = 3):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for i, blocks in enumerate(stages):
            layers = []
            for j in range(blocks):
                layers.append(Bottleneck(inputs, width * 2**i, 2 if i and not j else 1))
                inputs = 4 * width * 2**i
            setattr(self, f"layer{i + 1}", nn.Sequential(*layers))
        self.stages = len(stages)
        self.fc = nn.Linear(inputs, num_classes)

    def map(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.map(x).mean((2, 3)))
