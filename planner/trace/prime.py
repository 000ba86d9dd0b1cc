"""The batch size of an export: a prime, so that what it divides is known to be made from the batch."""

import math
from collections.abc import Sequence
from fractions import Fraction

from torch import nn

from planner.errors import ModelError
from planner.trace.batch import Leaf

LARGEST_EXACT = 2.0**53  # up to it every whole number is a float
NEAR = 64  # constants this near to a multiple of the prime may be made from it
# They divide few usual sizes; the first that the model's own sizes allow is taken.
PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)


def near_batch(prime: int) -> frozenset[int]:
    """Sizes that come from the batch and are no multiple of it: halves, thirds, quarters, one more or less."""
    parts = {prime // k + more for k in (2, 3, 4) for more in (0, 1)}
    return frozenset(parts | {k * prime + more for k in (1, 2) for more in (-1, 1)})


def prime_for(model: nn.Module, given: Sequence[Leaf]) -> int:
    """A prime that no size of the model or of a sample can be mistaken for.

    Raises:
        ModelError: a size of the model stands against each of the primes.
    """
    sizes = {s for t in (*model.parameters(), *model.buffers()) for s in t.shape}
    for leaf in given:
        for size in leaf.tensor.shape[1:] if leaf.is_batched else leaf.tensor.shape:
            sizes |= {size - 1, size, size + 1}  # labels are shifted by one
    for prime in PRIMES:
        if not any(size and size % prime == 0 for size in sizes) and not sizes & near_batch(prime):
            return prime
    raise ModelError(f"sizes of the model are too near to each of {PRIMES}; change one of them")


def is_near(number: float, prime: int) -> bool:
    """Whether a whole number may be the batch size, a multiple of it, or one of them and a little more or less."""
    if not prime / 2 < number < 8 * prime or number != int(number):
        return False
    return min(number % prime, prime - number % prime) <= NEAR


def comes_roughly_from(number: float, prime: int) -> bool:
    """`comes_from` for a number that was rounded to float32 or bfloat16: it asks for a second look only."""
    size = abs(number)
    return any(abs(size * prime**power - k) <= 4e-3 * k for power in (1, 0.5) for k in (0.5, 1, 2))


def comes_from(number: float, prime: int) -> bool:
    """Whether a float is made from the batch size `prime`: a ratio with it, its root, or its logarithm.

    >>> comes_from(1 / 1009, 1009), comes_from(math.log(1009), 1009), comes_from(0.1, 1009)
    (True, True, False)
    """
    if not math.isfinite(number) or not number:
        return False

    def is_ratio(value: float, largest: int, tolerance: float) -> bool:
        near = Fraction(value).limit_denominator(largest)
        exact = abs(float(near) - value) <= tolerance * abs(value)
        return exact and bool(near) and (near.numerator % prime == 0 or near.denominator % prime == 0)

    size = abs(number)
    if is_ratio(size, 10**7, 4.5e-16):
        return True
    if 1e-100 < size < 1e100 and is_ratio(size * size, 10**6, 1e-15):
        return True
    return size < 50 and (is_ratio(math.exp(size), 100, 4e-15) or is_ratio(2.0**size, 100, 4e-15))
