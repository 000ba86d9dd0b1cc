"""U-Net: convolutions down to a small, deep image and up again, each level of the way up joined by a skip.

Source: Ronneberger et al. 2015 (arXiv 1505.04597), figure 1: 23 convolutions. Those are padded here, so that the output
has the size of the input and skips need no cropping, as in most later work; the parameters are the paper's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig:
    """Sizes of a U-Net."""

    levels: int = 5
    channels: int = 64  # of the first level; doubled at each next one
    inputs: int = 1  # channels of the image
    classes: int = 2
    image: int = 512  # pixels on a side, a multiple of 2 to the levels - 1


class Pair(nn.Module):
    """Two 3x3 convolutions, each with ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, outputs, height, width]."""
        return F.relu(self.conv2(F.relu(self.conv1(x))))


class Down(nn.Module):
    """Half the resolution, then a pair."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.pair = Pair(inputs, 2 * inputs)

    def forward(self, x: Tensor) -> Tensor:  # [batch, channels, height, width]
        """[batch, 2 channels, height / 2, width / 2]."""
        y: Tensor = self.pair(F.max_pool2d(x, 2))
        return y


class Up(nn.Module):
    """Twice the resolution, joined with the skip of that level, then a pair."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2)
        self.pair = Pair(inputs, inputs // 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # [batch, channels, height, width]
        """[batch, channels / 2, 2 height, 2 width], which is also the shape of `skip`."""
        y: Tensor = self.pair(torch.cat((skip, self.enlarge(x)), dim=1))
        return y


class UNet(nn.Module):
    """Images in, mean loss of classifying each pixel out."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.channels << level for level in range(config.levels)]
        self.stem = Pair(config.inputs, config.channels)
        self.down = nn.ModuleList(Down(width) for width in widths[:-1])
        self.up = nn.ModuleList(Up(width) for width in widths[:0:-1])
        self.head = nn.Conv2d(config.channels, config.classes, 1)
        self.init_weights()

    def init_weights(self) -> None:
        """Convolutions as He et al. do, so that activations keep their variance."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=0.01)  # all classes about as likely

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats of `images` [batch, inputs, height, width], `labels` [batch, height, width]."""
        x = self.stem(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up in self.up:
            x = up(x, skips.pop())
        return F.cross_entropy(self.head(x), labels)
