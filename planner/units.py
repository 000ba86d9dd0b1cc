"""Print and parse quantities. SI inside the program; binary units only in text for memory."""

import re

from planner.errors import PlannerError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
GB = 10**9

_BYTE_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip


def format_bytes(num_bytes: float) -> str:
    """Bytes as text in binary units.

    >>> format_bytes(80 * 2**30), format_bytes(1536), format_bytes(12)
    ('80.0 GiB', '1.5 KiB', '12 B')
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds as text with three significant digits.

    >>> format_seconds(0.0123), format_seconds(12.3), format_seconds(4.2e-5)
    ('12.3 ms', '12.3 s', '42 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def format_count(count: float) -> str:
    """A large count with a decimal suffix.

    >>> format_count(7.05e10), format_count(989e12), format_count(12)
    ('70.5 B', '989 T', '12')
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def parse_bytes(text: str) -> int:
    """Bytes written as '80GB' (decimal) or '80GiB' (binary).

    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB")
    (80000000000, 1610612736)

    Raises:
        PlannerError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = match and _BYTE_UNITS.get((match[2] or "b").lower())
    if not match or not unit:
        raise PlannerError(f"{text!r} is no size in bytes; write it as 80GB or 80GiB")
    return int(float(match[1]) * unit)
