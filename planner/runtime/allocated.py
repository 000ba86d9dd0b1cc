"""What torch's allocator gives out on a CPU, which keeps no statistics there as it does on CUDA.

The tensors that there are before a step are counted one by one; what a step takes and gives back is in the records of
torch's profiler. Neither is the interpreter's memory, nor what the C library keeps of freed memory for later.
"""

import contextlib
import gc
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")
Allocation = tuple[int, int, int]  # time, address, bytes (negative: given back)


def with_peak(step: Callable[[], T], *, before_bytes: int = 0) -> tuple[T, int | None]:
    """What a step returns, and the most bytes that were given out at once while it ran, less some that do not count.

    None where this release of torch does not tell. What the step frees of what was there before it is not seen: let
    go of it before.
    """
    gc.collect()
    held = held_bytes() - before_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    records = allocations(profiler)
    if records is None:
        return result, None
    return result, held + rise_bytes([*records, *_not_told(records, _storages())])


def held_bytes() -> int:
    """Bytes of all tensors on the CPU that this process has; what only a graph for backward holds is not among them."""
    return sum(_storages().values())


def _storages() -> dict[int, int]:
    """Bytes of each storage on the CPU by its address."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(Exception):  # fake and wrapped ones have no storage
                # A gradient that nobody has asked for yet is no object.
                for tensor in (thing, thing.grad) if thing.is_leaf and thing.grad is not None else (thing,):
                    storage = tensor.untyped_storage()
                    if storage.device.type == "cpu" and storage.data_ptr():
                        sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def allocations(profiler: profile) -> list[Allocation] | None:
    """The records of a profiler that had `profile_memory`; None where this release of torch has none."""
    try:  # private in torch 2.13: there is no public way to the addresses
        kind = torch._C._profiler._EventType.Allocation
        found, tree = [], list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
        while tree:
            event = tree.pop()
            tree += event.children
            if event.tag == kind and event.extra_fields.device.type == "cpu":
                found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    except AttributeError:
        return None
    return found


def _not_told(records: Iterable[Allocation], there: Collection[int]) -> list[Allocation]:
    """Records of giving back for blocks that have none, and at whose addresses nothing is any more.

    Threads of gloo make none for tensors that they were the last to hold. How long they did is not known: such a block
    counts while it is taken, not longer.

    >>> _not_told([(1, 64, 10), (2, 128, 5), (3, 64, -10), (4, 64, 8), (5, 256, 1), (6, 256, 1)], {64})
    [(6, 256, -1), (3, 128, -5), (7, 256, -1)]
    """
    taken: dict[int, Allocation] = {}
    gone = []
    for record in sorted(records):
        before = taken.pop(record[1], None)
        if record[2] > 0:
            gone += [before] if before else []
            taken[record[1]] = record
    gone += [block for address, block in taken.items() if address not in there]
    return [(at + 1, address, -num_bytes) for at, address, num_bytes in gone]


def rise_bytes(records: Iterable[Allocation]) -> int:
    """The most bytes at once, beyond what was there before.

    What other threads give back is not recorded: a block is gone, too, when another one gets its place.

    >>> rise_bytes([(1, 64, 10), (2, 128, 5), (3, 64, -10), (4, 128, 8)]), rise_bytes([(1, 64, -10)])
    (15, 0)
    """
    live: dict[int, int] = {}
    starts: list[int] = []  # addresses of `live`, sorted
    held = most = 0
    for _, address, num_bytes in sorted(records):
        if num_bytes < 0:
            gone = [address] if address in live else []
        else:
            first = bisect_left(starts, address)
            if first and starts[first - 1] + live[starts[first - 1]] > address:
                first -= 1
            gone = starts[first : bisect_left(starts, address + num_bytes)]
        for each in gone:
            held -= live.pop(each)
            del starts[bisect_left(starts, each)]
        if num_bytes > 0:
            live[address] = num_bytes
            insort(starts, address)
            held += num_bytes
            most = max(most, held)
    return most
