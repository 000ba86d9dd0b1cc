"""How fast a core is at the moment: the seconds of a fixed piece of work.

Cores change their speed within seconds: by heat, by what other machines on the same hardware do, by power settings.
What was measured at different moments is comparable once it is scaled to one pace, but for work that does not change
as this mixture does. Only a CPU's: a GPU's clock is part of its data.
"""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_PRODUCTS, _SIZE = 20, 128  # of matrices that stay in the first caches
_SMALL_OPERATORS = 100
_REPEATS = 3
_Found = TypeVar("_Found")


def pace_seconds() -> float:
    """Seconds of the thread for products of matrices in its caches and for small operators, half each: about 1 ms.

    The median of a few repeats: what interrupts a core for a moment is no pace.
    """
    matrix, out = torch.ones(_SIZE, _SIZE), torch.empty(_SIZE, _SIZE)
    scalar = torch.ones(1)
    times = []
    with torch.no_grad():
        for _ in range(_REPEATS + 1):
            start = time.thread_time()
            for _ in range(_PRODUCTS):
                torch.mm(matrix, matrix, out=out)
            for _ in range(_SMALL_OPERATORS):
                torch.neg(scalar)
            times.append(time.thread_time() - start)
    return statistics.median(times[1:])


class Paced:
    """The pace of one piece of work after another: the mean of that before it and that after it."""

    def __init__(self) -> None:
        self._last = pace_seconds()

    def measure(self, work: Callable[[], _Found]) -> tuple[_Found, float]:
        """What `work` gives, and its pace in seconds."""
        before = self._last
        found = work()
        self._last = pace_seconds()
        return found, (before + self._last) / 2
