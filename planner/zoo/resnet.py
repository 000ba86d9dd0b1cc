"""ResNet with bottleneck blocks, the stride in the 3x3 convolution (the usual "v1.5").

Source: He et al. 2015 (arXiv 1512.03385), table 1.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4  # a bottleneck block puts out four times the channels of its 3x3 convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a ResNet."""

    blocks: tuple[int, ...]  # of each resolution
    channels: int = 64  # of the first resolution's 3x3 convolutions; doubled at each next one
    classes: int = 1000
    image: int = 224  # pixels on a side


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * channels
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:  # [batch, channels, height, width]
        """[batch, 4 channels, height / stride, width / stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        z: Tensor = self.relu(y)
        return z


class ResNet(nn.Module):
    """Images in, mean classification loss out."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(3, config.channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.channels)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.ModuleList()
        inputs = config.channels
        for level, count in enumerate(config.blocks):
            channels = config.channels << level
            for index in range(count):
                stride = 2 if level and not index else 1
                self.blocks.append(Bottleneck(inputs, channels, stride))
                inputs = EXPANSION * channels
        self.head = nn.Linear(inputs, config.classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Convolutions as He et al. do; the rest as torch does."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats of `images` [batch, 3, height, width] with class `labels` [batch]."""
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        for block in self.blocks:
            x = block(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)
