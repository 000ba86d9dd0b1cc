"""Rows of a profile from what other programs print: nccl-tests, and `nvidia-smi topo -m`."""

import re

from planner.errors import ProfileError
from planner.profile import CollectiveRow, TopologyRow

# The programs of nccl-tests and the names here; their `size` is that of the larger buffer, as `planner.collectives`
# counts bytes: what all_gather makes, what reduce_scatter reads.
_PROGRAMS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "sendrecv": "send_recv",
}  # fmt: skip
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\b")
_PROGRAM = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)_perf\b")
_CONNECTION = re.compile(r"^(X|NV\d+|PIX|PXB|PHB|NODE|SYS)$")


def nccl_tests_rows(text: str, origin: str = "the file") -> list[CollectiveRow]:
    """One row for each size of each program; of out of place and in place the faster, which torch can have.

    The program is told by its command line, by the heading that its launcher prints, or by the file's name.

    Raises:
        ProfileError: there are no results, or it is not known of what or of how many ranks.
    """
    named = _PROGRAM.search(text) or re.search(
        r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)", origin
    )
    ranks: dict[int, str] = {}
    rows: dict[str, CollectiveRow] = {}
    program = named[1] if named else ""
    for line in text.splitlines():
        if found := _PROGRAM.search(line):
            program = found[1]
        if found := _RANK.match(line):
            if int(found[1]) == 0:
                ranks = {}
            ranks[int(found[1])] = found[2]
        elif (times := _times(line)) is not None:
            if not program or len(ranks) < 2:
                missing = "which program printed it" if not program else "its ranks (the lines '# Rank 0 ...')"
                raise ProfileError(f"{origin} does not say {missing}; give the whole output of nccl-tests")
            size, microseconds = times
            if size > 0 and microseconds > 0:
                row = CollectiveRow(
                    collective=_PROGRAMS[program], ranks=len(ranks), nodes=len(set(ranks.values())), groups=1,
                    stride=1, num_bytes=size, seconds=microseconds * 1e-6, spread=0.0, repeats=1,
                )  # fmt: skip
                rows[row.key] = row
    if not rows:
        raise ProfileError(
            f"{origin} holds no results of nccl-tests; give the output of a program such as all_reduce_perf"
        )
    return list(rows.values())


def _times(line: str) -> tuple[float, float] | None:
    """Bytes and microseconds of a line of results: size, count, type, ..., then twice time, algbw, busbw, errors."""
    words = line.split()
    if len(words) < 11 or not (words[0].isdigit() and words[1].isdigit() and words[2][0].isalpha()):
        return None
    try:
        return float(words[0]), min(float(words[-8]), float(words[-4]))
    except ValueError:
        return None


def topology_rows(text: str, origin: str = "the file") -> list[TopologyRow]:
    """How each pair of devices is connected; network cards are left out.

    Raises:
        ProfileError: it is no such table.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]  # the heading is underlined
    head = next((line.split() for line in lines if re.match(r"^\s*GPU0\b", line) and "GPU" in line), None)
    if head is None:
        raise ProfileError(f"{origin} holds no table of nvidia-smi topo -m")
    columns = [name for name in head if re.fullmatch(r"GPU\d+|NIC\d+|mlx\S+", name)]
    rows = []
    for line in lines:
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or len(words) <= 1 or not _CONNECTION.match(words[1]):
            continue
        for column, word in zip(columns, words[1:], strict=False):
            if column.startswith("GPU") and _CONNECTION.match(word) and int(column[3:]) > int(words[0][3:]):
                rows.append(TopologyRow(first=int(words[0][3:]), second=int(column[3:]), connection=word))
    if not rows:
        raise ProfileError(f"{origin} has one device alone; there is nothing to connect")
    return rows
