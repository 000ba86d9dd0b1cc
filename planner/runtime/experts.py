"""How many tokens each expert got in training: the loads that `planner.shard.loads` makes a price of.

A grouped product is told where the run of rows of each expert ends. These ends are added up on the device, one addition
in each layer and micro-batch (2 us on a CPU). Left out are a forward that runs again in backward, evaluations, and all
but one of the ranks that see the same tokens.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn

from planner.graph import Graph
from planner.runtime.parts import EXPERTS
from planner.runtime.peers import Part
from planner.shard.loads import ends_of, expert_layers

_log = logging.getLogger(__name__)


class ExpertCounter(nn.Module):
    """Adds the ends of runs of rows to `total` [experts], where it is on."""

    def __init__(self, total: torch.Tensor) -> None:
        super().__init__()
        self.total = total  # no buffer: it is not the model's
        self.is_on = True

    def forward(self, ends: torch.Tensor) -> None:
        """Count the rows of one micro-batch."""
        if self.is_on:
            self.total.add_(ends)


@contextmanager
def not_counted(counters: Iterable[ExpertCounter]) -> Iterator[None]:
    """Within it nothing is counted: what runs has run before."""
    for counter in counters:
        counter.is_on = False
    try:
        yield
    finally:
        for counter in counters:
            counter.is_on = True


class ExpertCounts:
    """The counters of all layers of a model on one rank."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._sizes = {layer.name: layer.num_experts for layer in expert_layers(graph)}
        self._ends = torch.zeros(sum(self._sizes.values()), dtype=torch.int64, device=device)
        self._total_of = dict(zip(self._sizes, torch.split(self._ends, [*self._sizes.values()]), strict=True))

    def of(self, part: Part) -> dict[int, ExpertCounter]:
        """Counters for a graph of the model, by the tensor that the first product of a layer makes.

        Of ranks of an axis that have all tokens alike, the first counts.
        """
        layers = expert_layers(part.whole)
        if {layer.name: layer.num_experts for layer in layers} != self._sizes:
            _log.warning("batches of another shape than the planned one go through other experts, which nobody counts")
            return {}
        products = {node.outputs[0]: node for node in part.graph.nodes if node.outputs}
        result = {}
        for layer in layers:
            ends = ends_of(products[layer.product])
            assert ends is not None
            placed = part.placed(ends)
            places = {axis: rank for axis, (rank, _) in part.peers.places.items() if axis != EXPERTS}  # own samples
            if all(placed[axis].kind == "L" or rank == 0 for axis, rank in places.items()):
                result[layer.product] = ExpertCounter(self._total_of[layer.name])
        return result

    def read(self) -> dict[str, list[int]]:
        """The tokens that each expert of each layer got so far, on all ranks; a collective."""
        if not self._sizes:
            if dist.get_rank() == 0:
                _log.warning(
                    "no expert is counted, since the model has no grouped product of experts; multiply their tokens by "
                    "torch._grouped_mm, sorted by expert"
                )
            return {}
        ends = self._ends.clone()
        dist.all_reduce(ends)
        if dist.get_rank() == 0 and not ends.any():
            _log.warning("no expert has got a token yet: train a step first, then ask for the loads of experts")
        whole = zip(self._sizes, torch.split(ends.cpu(), [*self._sizes.values()]), strict=True)
        return {name: each.diff(prepend=each.new_zeros(1)).tolist() for name, each in whole}
