"""Parameters and buffers that are views of one another: what is written to one changes the other behind a graph's back.

A graph, FSDP and every rank have each of them by its own name, so that they would come apart. One tensor under two
names is no such case, nor are pieces of one allocation that do not overlap (a flattened LSTM).
"""

from collections.abc import Collection, Iterator
from itertools import combinations

import torch
from torch import nn

from planner.errors import ModelError


def check_shared_parameters(model: nn.Module) -> None:
    """Refuse parameters that train and share memory with another parameter or buffer.

    Raises:
        ModelError: with both names.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for first, second in _pairs(model):
        if first in trained or second in trained:
            raise ModelError(
                f"{first} and {second} share memory without being one parameter, and training changes it; "
                "tie them as one parameter, or make one of the other in forward"
            )


def check_shared_buffers(model: nn.Module, written: Collection[str]) -> None:
    """Refuse buffers that share memory of which some, by name, are `written` in forward.

    Raises:
        ModelError: with both names.
    """
    for first, second in _pairs(model):
        if first in written or second in written:
            raise ModelError(
                f"{first} and {second} share memory, and forward writes to it; make one of the other in forward"
            )


def _pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of different tensors that overlap."""
    by_storage: dict[int, list[tuple[str, int, int]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = int(tensor.storage_offset()) * tensor.element_size()
        span = (name, start, start + int(extent) * tensor.element_size())
        # Meta tensors have no address; the storage object tells them apart as well.
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    for spans in by_storage.values():
        for (first, begin, end), (second, other, stop) in combinations(spans, 2):
            if begin < stop and other < end:
                yield first, second
