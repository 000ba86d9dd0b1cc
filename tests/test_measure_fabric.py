"""What ranks measure together, and what other programs measured."""

from dataclasses import replace

import pytest

from planner.errors import ProfileError
from planner.measure import fabric
from planner.measure.fabric import KINDS, Shape, measure_fabric, shapes
from planner.measure.imports import nccl_tests_rows, topology_rows
from planner.profile import CollectiveRow, Machine, OptimizerRow, OverlapRow, Profile
from tests.ranks import RankPool

MACHINE = Machine(
    device="cpu", kind="cpu", capability="none", driver="none", torch="2.13.0", python="3.11.7", host="0", processes=4,
    threads=1, date="2026-01-01",
)  # fmt: skip

ALL_REDUCE = """\
# nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  14131 on      node1 device  0 [0x10] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  14131 on      node1 device  1 [0x16] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid   9321 on      node2 device  0 [0x10] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid   9321 on      node2 device  1 [0x16] NVIDIA A100-SXM4-80GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    61.19   17.14   25.70      0    60.50   17.33   26.00      0
   134217728      33554432     float     sum      -1   1221.8  109.85  164.78      0   1230.1  109.11  163.67    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 95.0375
"""

TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0
GPU2\tSYS\tSYS\t X \tPIX\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tPIX\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def test_nccl_tests_become_rows():
    rows = nccl_tests_rows(ALL_REDUCE, "all_reduce_perf.txt")

    assert [(row.collective, row.ranks, row.nodes, row.num_bytes) for row in rows] == [
        ("all_reduce", 4, 2, 1048576.0),
        ("all_reduce", 4, 2, 134217728.0),
    ]
    assert [row.seconds for row in rows] == pytest.approx([60.5e-6, 1221.8e-6])  # the faster of the two forms


def test_the_command_line_in_an_output_tells_the_program():
    text = "$ mpirun -np 4 ./alltoall_perf -b 8 -e 128M\n" + ALL_REDUCE

    assert {row.collective for row in nccl_tests_rows(text, "out.txt")} == {"all_to_all"}


@pytest.mark.parametrize(
    ("text", "origin", "words"),
    [
        (ALL_REDUCE, "out.txt", "does not say which program printed it"),
        ("\n".join(ALL_REDUCE.splitlines()[8:]), "all_reduce.txt", "does not say its ranks"),
        ("", "all_reduce.txt", "holds no results"),
        ("total nonsense\n1 2 3\n", "all_reduce.txt", "holds no results"),
    ],
)
def test_other_text_is_refused(text, origin, words):
    with pytest.raises(ProfileError, match=words):
        nccl_tests_rows(text, origin)


def test_the_table_of_connections_is_read():
    rows = topology_rows(TOPOLOGY)

    assert [(row.first, row.second, row.connection) for row in rows] == [
        (0, 1, "NV12"), (0, 2, "SYS"), (0, 3, "SYS"), (1, 2, "SYS"), (1, 3, "SYS"), (2, 3, "PIX"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "GPU0", "\tGPU0\nGPU0\t X\n"])
def test_what_connects_nothing_is_refused(text):
    with pytest.raises(ProfileError, match=r"topo -m|one device alone"):
        topology_rows(text)


def test_groups_are_those_of_mesh_axes():
    members = {shape: shape.members(8) for shape in shapes(8)}

    assert members[Shape(8, 1, 1)] == [[*range(8)]]
    assert members[Shape(2, 4, 4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert members[Shape(4, 1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert members[Shape(4, 1, 1)] == [[0, 1, 2, 3]]
    for shape, groups in members.items():
        assert len(groups) == shape.groups
        assert all(len(set(group)) == shape.ranks for group in groups)
        assert len({rank for group in groups for rank in group}) == shape.ranks * shape.groups


def measure_small(what, known):
    vars(fabric).update(
        _CPU_SIZES=(1 << 10, 1 << 12), _OPTIMIZER_SHAPES=((1 << 8, 2),), _LEAST_REPEATS=2, _MOST_REPEATS=3
    )  # fmt: skip
    rows = list(measure_fabric(MACHINE, what, per_node=2, budget_seconds=60.0, known=known))
    return Profile(machine=MACHINE).with_rows(rows)


@pytest.mark.distributed
def test_ranks_measure_together_and_agree(tmp_path):
    with RankPool(4, tmp_path) as pool:
        found = pool.run(measure_small, ("collectives", "optimizer"), set())
        profile = found[0]
        assert all(other == profile for other in found)
        again = pool.run(measure_small, ("collectives", "optimizer"), profile.row_keys())
        (overlap,) = pool.run(
            measure_small, ("overlap",), {("overlaps", f"{name} 4") for name in fabric._OVERLAPPED[1:]}
        )[0].overlaps

    assert again[0] == Profile(machine=MACHINE)  # nothing is measured twice
    shapes_found = {(row.ranks, row.stride, row.groups, row.nodes) for row in profile.collectives}
    assert shapes_found == {(4, 1, 1, 2), (2, 1, 1, 1), (2, 1, 2, 1), (2, 2, 2, 2)}
    assert {row.collective for row in profile.collectives} == set(fabric._COLLECTIVES)
    assert len(profile.collectives) == 4 * 2 * len(fabric._COLLECTIVES)
    assert {row.optimizer for row in profile.optimizers} == {"adamw", "adam", "sgd", "momentum"}
    assert all(row.seconds > 0 for row in (*profile.collectives, *profile.optimizers))
    assert 1.0 <= overlap.slowdown <= 2.0
    assert {type(row) for row in profile.collectives} == {CollectiveRow}
    assert {type(row) for row in profile.optimizers} == {OptimizerRow}
    assert isinstance(overlap, OverlapRow)
    assert set(KINDS) >= {"collectives", "optimizer", "overlap"}


@pytest.mark.distributed
def test_that_the_budget_ended_is_told():
    here = replace(MACHINE, processes=1)
    found = {}
    for seconds in (1e-6, 60.0):
        found[seconds] = fabric.measure_here(
            Profile(machine=here), ("optimizer",), budget_seconds=seconds, keep=lambda _: None, progress=lambda *_: None
        )
    (part, is_cut), (whole, is_whole_cut) = found.values()
    assert (is_cut, is_whole_cut) == (True, False)
    assert 0 < len(part.optimizers) < len(whole.optimizers)
