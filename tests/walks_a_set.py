"""A model that prepares tables in the order in which Python walks a set, another one in every process.

As a script: prints the order, and the fingerprint of the graph.
"""

import sys

import torch
from torch import Tensor, nn

from planner.trace import trace

KINDS = {"full", "sliding", "near", "far", "global"}  # as Gemma-3 walks its layer types


class WalksASet(nn.Module):
    """Tables of positions, one a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in KINDS)
        for number, kind in enumerate(sorted(KINDS)):
            self.register_buffer(kind, torch.arange(8.0) + number)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        tables = {kind: torch.cos(positions[None, :, None].float() * getattr(self, kind)) for kind in KINDS}
        for layer, kind in zip(self.layers, sorted(KINDS), strict=True):
            x = torch.relu(layer(x)) * tables[kind]
        return (x**2).mean()


if __name__ == "__main__":
    graph = trace(WalksASet(), torch.randn(4, 6, 8), precision="fp32", device_kind="cpu")
    sys.stdout.write(f"{list(KINDS)} {graph.fingerprint}\n")
