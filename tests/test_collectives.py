import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Cluster, Curve, Link, Slowdown
from planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    broadcast_seconds,
    example_group,
    group_slowdown,
    hop_crosses_nodes,
    overlapped_seconds,
    reduce_scatter_seconds,
    send_recv_seconds,
)
from planner.errors import ClusterError

ALL = (all_reduce_seconds, all_gather_seconds, reduce_scatter_seconds, send_recv_seconds, broadcast_seconds)


def link(**changes):
    values = {
        "name": "link",
        "kind": "nvlink",
        "bytes_per_second": 1e9,
        "latency_seconds": 1e-5,
        "launch_seconds": 0.0,
        "efficiency": {"any": Curve(points=((1.0, 1.0),))},
        "source": {"*": "test"},
    }
    return Link(**{**values, **changes})


def cluster(num_nodes=4, devices_per_node=8, nics_per_node=8, **links):
    return dataclasses.replace(
        Cluster.load("8xH100"),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        nics_per_node=nics_per_node,
        intra_node_link=links.get("intra", link()),
        inter_node_link=links.get("inter", link(kind="infiniband", bytes_per_second=1e8, latency_seconds=1e-4)),
    )


def test_all_reduce_of_two_ranks_by_hand():
    # 2 steps of 10 us, each rank sends 2 * 1/2 * 1 MB at 1 GB/s.
    assert all_reduce_seconds(1e6, example_group(2, link())) == pytest.approx(1.02e-3)


def test_all_gather_over_two_nodes_by_hand():
    group = axis_group(cluster(), {"dp": 16}, "dp")

    # 15 hops, 2 of them between nodes; 15/16 MB out of a node by 8 cards of 100 MB/s.
    assert (group.num_nodes, group.ranks_per_node) == (2, 8)
    assert all_gather_seconds(1e6, group) == pytest.approx(13e-5 + 2e-4 + 15 / 16 * 1e6 / 8e8)


def test_all_reduce_over_two_nodes_by_hand():
    group = axis_group(cluster(), {"dp": 16}, "dp")

    # Tree: 2 hops between nodes, 14 inside; 1 MB out of a node by 800 MB/s, 2 MB along the chain.
    assert all_reduce_seconds(1e6, group) == pytest.approx(2e-4 + 14e-5 + 2e6 / 1e9)


def test_all_to_all_over_two_nodes_by_hand():
    group = axis_group(cluster(), {"dp": 16}, "dp")

    # 8 steps between nodes, 7 inside; half of what the 8 ranks of a node have leaves it, by 800 MB/s.
    assert all_to_all_seconds(1e6, group) == pytest.approx(8e-4 + 7e-5 + 8 * 8 / 16 * 1e6 / 8e8)
    assert all_to_all_seconds(1e6, axis_group(cluster(), {"dp": 1}, "dp")) == 0.0


def test_the_switch_reduces_for_enough_ranks_only():
    switch = link(in_switch_all_reduce_bytes_per_second=4e9, in_switch_min_ranks=5)

    assert all_reduce_seconds(1e8, example_group(4, switch)) == all_reduce_seconds(1e8, example_group(4, link()))
    # Up to the switch and down again in two hops: 800 MB at 4 GB/s of the tensor, however many ranks.
    assert all_reduce_seconds(8e8, example_group(8, switch)) == pytest.approx(2e-5 + 8e8 / 4e9)


def test_a_pipeline_hop_goes_by_the_link_it_crosses():
    group = axis_group(cluster(), {"pp": 8, "dp": 4}, "pp")

    assert send_recv_seconds(1e6, group, crosses_nodes=False) == pytest.approx(1e-5 + 1e-3)
    # Two stages of 4 ranks in a node: 4 groups touch it and leave it, but a rank has one card of 100 MB/s.
    assert send_recv_seconds(1e6, group) == pytest.approx(1e-4 + 1e6 / 1e8)
    assert [hop_crosses_nodes(cluster(), {"pp": 8, "dp": 4}, stage) for stage in range(7)] == [
        False, True, False, True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "ranks", "nodes", "in_node", "share"),
    [
        ("dp_shard", 4, 1, 4, 8e8),
        ("dp_replicate", 2, 1, 2, 8e8),
        (("dp_replicate", "dp_shard"), 8, 1, 8, 8e8),
        ("pp", 4, 4, 1, 1e8),
        (("pp", "dp_replicate", "dp_shard"), 32, 4, 8, 8e8),
    ],
)
def test_inner_axes_share_a_node_first(axis, ranks, nodes, in_node, share):
    group = axis_group(cluster(), {"pp": 4, "dp_replicate": 2, "dp_shard": 4}, axis)

    assert (group.num_ranks, group.num_nodes, group.ranks_per_node) == (ranks, nodes, in_node)
    assert group.inter_bytes_per_second == pytest.approx(share)


def test_concurrent_groups_share_the_network_cards():
    oversubscribed = cluster(nics_per_node=2)

    group = axis_group(oversubscribed, {"dp_replicate": 4, "dp_shard": 8}, "dp_replicate")

    assert group.inter_bytes_per_second == pytest.approx(2e8 / 8)


def test_a_shared_link_is_divided_among_the_devices_that_use_it():
    pcie = cluster(intra=link(kind="pcie", node_bytes_per_second=2e9))

    assert axis_group(pcie, {"dp": 8}, "dp").intra_bytes_per_second == pytest.approx(2.5e8)
    assert axis_group(pcie, {"dp": 2}, "dp").intra_bytes_per_second == pytest.approx(1e9)


def test_small_groups_on_a_cube_mesh_are_slower():
    cube = cluster(intra=link(group_efficiency=Curve(points=((2.0, 0.5), (4.0, 1.0)))))

    assert axis_group(cube, {"dp": 2}, "dp").intra_bytes_per_second == pytest.approx(5e8)
    assert axis_group(cube, {"dp": 4}, "dp").intra_bytes_per_second == pytest.approx(1e9)


def test_one_group_may_not_use_all_cards_of_a_node():
    """Four groups of one device a node send four times at once; one group of all devices has less than all cards."""
    slow = link(
        kind="infiniband", bytes_per_second=1e8, group_efficiency=Curve(points=((1.0, 1.0), (4.0, 0.5), (8.0, 0.5)))
    )
    nodes = cluster(inter=slow)

    assert axis_group(nodes, {"dp": 32}, "dp").inter_bytes_per_second == pytest.approx(4e8)
    assert axis_group(nodes, {"dp": 4, "tp": 8}, "dp").inter_bytes_per_second == pytest.approx(1e8)
    assert axis_group(nodes, {"dp": 4, "tp": 8}, "dp").inter_hop_bytes_per_second == pytest.approx(1e8)


def test_groups_that_do_not_fill_nodes_evenly_count_their_worst():
    # Ranks 0 to 5, 6 to 11: the second group lies on two nodes of 8.
    group = axis_group(cluster(), {"pp": 2, "dp": 6}, "dp")

    assert (group.num_nodes, group.ranks_per_node) == (2, 6)


def brute_force_placement(size, stride, num_ranks, per_node):
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(num_ranks):
        block, offset = divmod(rank, size * stride)
        groups.setdefault((block, offset % stride), []).append(rank // per_node)
    nodes = max(len(set(group)) for group in groups.values())
    in_node = max(group.count(node) for group in groups.values() for node in group)
    leaving: dict[int, int] = {}
    for group in groups.values():
        if len(set(group)) > 1:
            for node in set(group):
                leaving[node] = leaving.get(node, 0) + 1
    return nodes, in_node, max(leaving.values(), default=1)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_placement_equals_counting_all_ranks(outer, size, stride, per_node):
    num_ranks = outer * size * stride
    many = cluster(num_nodes=math.ceil(num_ranks / per_node), devices_per_node=per_node, nics_per_node=1)

    group = axis_group(many, {"outer": outer, "own": size, "inner": stride}, "own")

    nodes, in_node, leaving = brute_force_placement(size, stride, num_ranks, per_node)
    assert (group.num_nodes, group.ranks_per_node) == (nodes, in_node)
    assert group.inter_bytes_per_second == pytest.approx(1e8 / leaving)


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.sampled_from(["8x8xH100", "4x8xA100", "2x8xV100", "2x8xA10G"]))
def test_more_bytes_are_never_faster(one, other, name):
    small, large = sorted((one, other))
    real = Cluster.load(name)
    for sizes, axis in (({"pp": 2, "dp": 8}, "pp"), ({"dp": 8}, "dp"), ({"dp": 16}, "dp")):
        group = axis_group(real, sizes, axis)
        for seconds in ALL:
            assert seconds(small, group) <= seconds(large, group) * (1 + 1e-9)


@given(st.integers(1, 500), st.integers(1, 500), st.floats(1, 1e12))
def test_more_ranks_on_one_link_are_never_faster(one, other, num_bytes):
    few, many = sorted((one, other))
    for seconds in ALL:
        assert seconds(num_bytes, example_group(few, link())) <= seconds(num_bytes, example_group(many, link())) * (
            1 + 1e-9
        )


@pytest.mark.parametrize("seconds", ALL)
def test_one_rank_and_no_bytes_cost_nothing(seconds):
    assert seconds(1e9, example_group(1, link())) == 0
    assert seconds(0, example_group(4, link())) == 0


@given(st.floats(0, 10), st.floats(0, 10), st.builds(Slowdown, st.floats(1, 4), st.floats(1, 4)))
def test_overlap_lies_between_the_longer_and_the_sum(compute, transfer, slowdown):
    both = overlapped_seconds(compute, transfer, slowdown)

    assert max(compute, transfer) * (1 - 1e-12) <= both <= compute + transfer


def test_overlap_by_hand_whichever_is_done_first():
    slow = Slowdown(2.0, 1.25)

    # 1 s of transfer takes 1.25 s, in which 0.625 s are computed; of 3 s, 2.375 are left.
    assert overlapped_seconds(3.0, 1.0, slow) == pytest.approx(1.25 + 2.375)
    # 1 s of computing takes 2 s, in which 1.6 s are transferred; of 3 s, 1.4 are left.
    assert overlapped_seconds(1.0, 3.0, slow) == pytest.approx(2.0 + 1.4)
    assert overlapped_seconds(1.0, 0.5, Slowdown(2.0, 2.0)) == pytest.approx(1.5)  # one after the other
    assert overlapped_seconds(1.0, 0.5, Slowdown(4.0, 4.0)) == pytest.approx(1.5)  # never longer


def test_two_devices_in_slots_slow_one_another_down_by_figures_of_their_own():
    table = {"pcie": Slowdown(1.2, 1.0), "pcie_pair": Slowdown(3.0, 1.3), "ethernet": Slowdown(1.1, 1.0)}
    box = cluster(num_nodes=1, intra=link(kind="pcie"), inter=link(kind="ethernet"))
    box = dataclasses.replace(box, device=dataclasses.replace(box.device, overlap_slowdown=table))

    assert group_slowdown(box, axis_group(box, {"a": 4, "b": 2}, "b")) == (3.0, 1.3)
    assert group_slowdown(box, axis_group(box, {"a": 2, "b": 4}, "b")) == (1.2, 1.0)


def test_an_all_to_all_is_messages_between_pairs_unless_it_was_measured():
    half, any_curve = Curve(points=((1.0, 0.5),)), Curve(points=((1.0, 1.0),))
    curves = {"any": any_curve, "send_recv": half}
    few = Curve(points=((2.0, 0.5), (4.0, 0.5), (8.0, 1.0)))  # of rings, which pairs do not need
    pairs = cluster(intra=link(latency_seconds=0.0, efficiency=curves, group_efficiency=few))
    measured = cluster(intra=link(latency_seconds=0.0, efficiency={**curves, "all_to_all": any_curve}))

    assert all_to_all_seconds(1e6, axis_group(pairs, {"ep": 4}, "ep")) == pytest.approx(0.75e6 / 0.5e9)
    assert all_to_all_seconds(1e6, axis_group(measured, {"ep": 4}, "ep")) == pytest.approx(0.75e6 / 1e9)


def test_across_slow_links_computing_is_slowed_down_by_their_share_of_the_links_inside():
    table = {"nvlink": Slowdown(2.0, 1.5), "infiniband": Slowdown(1.1, 1.0)}
    many = cluster()
    many = dataclasses.replace(many, device=dataclasses.replace(many.device, overlap_slowdown=table))
    sizes = {"a": 2, "b": 16}

    assert group_slowdown(many, axis_group(many, {"a": 4, "b": 8}, "b")) == (2.0, 1.5)
    assert group_slowdown(many, axis_group(many, {"a": 4, "b": 8}, "a")) == (1.1, 1.0)
    # 8 cards of 100 MB/s: 0.8 of the 1 GB/s inside.
    assert group_slowdown(many, axis_group(many, sizes, "b")) == pytest.approx((1.8, 1.4))
    assert group_slowdown(many, axis_group(many, {"a": 32, "b": 1}, "b")) == (1.0, 1.0)


def test_published_bandwidth_of_eight_a100():
    # nccl-tests on 8 A100 with NVSwitch, 1 GiB all-reduce: 229 GB/s bus bandwidth, 8204 us
    # (stas00/ml-engineering, network benchmarks).
    group = axis_group(Cluster.load("8xA100"), {"dp": 8}, "dp")

    assert all_reduce_seconds(2**30, group) == pytest.approx(8204e-6, rel=0.05)


def test_wrong_meshes_are_refused():
    with pytest.raises(ClusterError, match=r"needs 64 devices, cluster .* has 32"):
        axis_group(cluster(), {"dp": 64}, "dp")
    with pytest.raises(ClusterError, match="no axis 'tp'; it has dp"):
        axis_group(cluster(), {"dp": 4}, "tp")
    with pytest.raises(ClusterError, match="no neighbours"):
        axis_group(cluster(), {"a": 2, "b": 2, "c": 2}, ("a", "c"))
    with pytest.raises(ClusterError, match="cannot lie on 3 nodes"):
        dataclasses.replace(example_group(2, link()), num_nodes=3)
    assert isinstance(example_group(2, link()), Group)
