"""Gradients reduced in buckets beside the backward pass, as DistributedDataParallel does. No torch.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704),
section 3.2, and torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`): parameters go into
buckets in about the reverse order of the forward pass; a bucket is closed by the parameter that reaches the cap (none
is divided), the first bucket at 1 MiB; a bucket is reduced when all of it is there and the one before is reduced.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Slowdown
from planner.collectives import Group, all_gather_seconds, all_reduce_seconds, overlapped_seconds
from planner.units import MIB

Floats = NDArray[np.float64]

FIRST_BUCKET_BYTES = 1 * MIB  # dist._DEFAULT_FIRST_BUCKET_BYTES
DEFAULT_BUCKET_BYTES = 25 * MIB  # bucket_cap_mb


def bucket_ends(num_bytes: Sequence[float], cap: float, first: float = FIRST_BUCKET_BYTES) -> list[int]:
    """Ends of the buckets of gradients that come in this order, each of so many bytes.

    >>> bucket_ends([1.0, 1.0, 3.0, 1.0, 1.0], cap=3.0, first=1.0)
    [1, 3, 5]
    """
    ends, held, limit = [], 0.0, min(first, cap)
    for index, size in enumerate(num_bytes):
        held += size
        if held >= limit:
            ends.append(index + 1)
            held, limit = 0.0, cap
    return ends if ends and ends[-1] == len(num_bytes) else [*ends, len(num_bytes)]


def exposed_reduction_seconds(
    num_bytes: Sequence[float], backward: Sequence[float], cap: float, group: Group, slowdown: Slowdown
) -> float:
    """What all-reduces of buckets of `cap` bytes add to a backward pass.

    Args:
        num_bytes: Of gradients in the order in which they come.
        backward: Seconds of the backward pass from the gradient before to each.
        cap: Of a bucket, in bytes.
        group: The ranks of data parallelism.
        slowdown: What computing and reducing at once do to each other (as `costs._queued_seconds`).

    By hand: two gradients after 1 s each. One bucket waits for both; of two, one is reduced beside the second.
    """
    if group.num_ranks == 1:
        return 0.0
    sizes, ready = np.asarray(num_bytes, float), np.cumsum(np.asarray(backward, float))
    end, first, beside, total = 0.0, 0, 0.0, float(ready[-1])
    for last in bucket_ends(list(sizes), cap):
        seconds = all_reduce_seconds(float(sizes[first:last].sum()), group)
        start = max(end, float(ready[last - 1]))
        end = start + seconds
        beside += max(0.0, min(end, total) - start)
        first = last
    lost = min(1.0, slowdown.link * (1 - 1 / slowdown.compute))
    return max(0.0, end - total) + lost * beside


def pieces_seconds(num_bytes: float, piece: float, compute: float, group: Group, slowdown: Slowdown) -> float:
    """What gathers of `num_bytes` in equal pieces add to `compute` seconds of a pass that needs them one by one.

    A piece is used while the next is gathered, each slowing the other; beside the first nothing runs.
    """
    number = max(1, round(num_bytes / piece))
    each, used = all_gather_seconds(num_bytes / number, group), compute / number
    return each + (number - 1) * (overlapped_seconds(used, each, slowdown) - used)
