"""Seconds of a collective: latency and bandwidth of the links that its group of ranks really uses.

A `Group` says where the ranks of one mesh axis lie and what share of links they get while all
the groups of that axis communicate at once; the functions price one collective on it.

Bytes are counted as PyTorch does: `all_reduce` and `broadcast` by the tensor that each rank holds,
`all_gather` by the gathered output, `reduce_scatter` by the unreduced input, `all_to_all` by what each rank
holds, `send_recv` by the message.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from planner.cluster import Cluster, Curve, Link, Slowdown
from planner.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks that take part in one collective, the worst placed group of its mesh axis."""

    num_ranks: int
    num_nodes: int  # nodes that the group touches
    ranks_per_node: int  # of the group, in the node that holds most of it
    intra: Link
    inter: Link
    intra_bytes_per_second: float  # of each rank to its neighbour in the node
    inter_bytes_per_second: float  # of the group out of one node: its share of the network cards
    intra_hop_bytes_per_second: float  # of one rank to a partner in its node
    inter_hop_bytes_per_second: float  # of one rank to a partner on another node

    def __post_init__(self) -> None:
        """Reject placements that cannot be."""
        if not 1 <= self.num_nodes <= self.num_ranks or self.ranks_per_node < 1:
            raise ClusterError(
                f"a group of {self.num_ranks} ranks cannot lie on {self.num_nodes} nodes with "
                f"{self.ranks_per_node} on one of them"
            )


def axis_group(cluster: Cluster, axis_sizes: Mapping[str, int], axis: str | tuple[str, ...]) -> Group:
    """The group of one mesh axis, or of several neighbouring axes taken together.

    `axis_sizes` goes outermost first and ranks are numbered row-major, so the last axis varies
    fastest and its ranks share a node first. All groups of the axis are taken to communicate at
    once: they divide the network cards of a node, and a shared link inside it, among them.

    >>> cluster = Cluster.load("2x8xA100-80GB")
    >>> group = axis_group(cluster, {"pp": 1, "dp_replicate": 2, "dp_shard": 8}, "dp_replicate")
    >>> group.num_ranks, group.num_nodes, group.ranks_per_node
    (2, 2, 1)

    Eight such groups leave a node at the same time, each by one of the eight cards:

    >>> group.inter_bytes_per_second == cluster.inter_node_link.bytes_per_second
    True

    Raises:
        ClusterError: the mesh has no such axis, or needs more devices than there are.
    """
    names = list(axis_sizes)
    axes = (axis,) if isinstance(axis, str) else axis
    if not axes or any(name not in names for name in axes):
        raise ClusterError(f"the mesh has no axis {axis!r}; it has {', '.join(names)}")
    first, last = names.index(axes[0]), names.index(axes[-1])
    if tuple(names[first : last + 1]) != axes:
        raise ClusterError(f"the axes {', '.join(axes)} are no neighbours in {', '.join(names)}")
    size = math.prod(axis_sizes[name] for name in axes)
    stride = math.prod(axis_sizes[name] for name in names[last + 1 :])
    return _group(cluster, size, stride, math.prod(axis_sizes.values()))


@cache
def _group(cluster: Cluster, size: int, stride: int, num_ranks: int) -> Group:
    if num_ranks > cluster.num_devices:
        raise ClusterError(
            f"the mesh needs {num_ranks} devices, cluster {cluster.name!r} has "
            f"{cluster.num_devices}; use a smaller mesh or more nodes"
        )
    num_nodes, ranks_per_node, leaving = _placement(size, stride, num_ranks, cluster.devices_per_node)
    intra, inter = cluster.intra_node_link, cluster.inter_node_link
    intra_rate = intra.bytes_per_second
    if intra.node_bytes_per_second is not None:
        active = min(cluster.devices_per_node, num_ranks)
        intra_rate = min(intra_rate, intra.node_bytes_per_second / active)
    share = intra.group_efficiency.at(ranks_per_node) if intra.group_efficiency else 1.0
    node_rate = inter.bytes_per_second * cluster.nics_per_node
    share_between = inter.group_efficiency.at(ranks_per_node) if inter.group_efficiency else 1.0
    cards_per_device = max(1.0, cluster.nics_per_node / cluster.devices_per_node)
    return Group(
        num_ranks=size,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        intra=intra,
        inter=inter,
        intra_bytes_per_second=intra_rate * share,
        inter_bytes_per_second=node_rate * share_between / max(1, leaving),
        intra_hop_bytes_per_second=intra_rate,
        inter_hop_bytes_per_second=min(node_rate / max(1, leaving), inter.bytes_per_second * cards_per_device),
    )


def _placement(size: int, stride: int, num_ranks: int, per_node: int) -> tuple[int, int, int]:
    """Most nodes of a group, most of its ranks in a node, most groups that leave one node.

    Ranks of a group are `stride` apart; `num_ranks` ranks fill nodes of `per_node`.

    >>> _placement(4, 2, 16, 8), _placement(2, 8, 16, 8), _placement(16, 1, 16, 8)
    ((1, 4, 0), (2, 1, 8), (2, 8, 1))
    """
    block = size * stride
    # Blocks repeat against the node boundaries with this period; nothing new lies beyond it.
    period = min(num_ranks, math.lcm(block, per_node))
    most_nodes = most_ranks = 1
    leaving: dict[int, int] = {}
    for start in range(0, period, block):
        for offset in range(stride):
            counts: dict[int, int] = {}
            for rank in range(start + offset, start + block, stride):
                counts[rank // per_node] = counts.get(rank // per_node, 0) + 1
            most_nodes = max(most_nodes, len(counts))
            most_ranks = max(most_ranks, *counts.values())
            if len(counts) > 1:
                for node in counts:
                    leaving[node] = leaving.get(node, 0) + 1
    return most_nodes, most_ranks, max(leaving.values(), default=0)


def hop_crosses_nodes(cluster: Cluster, axis_sizes: Mapping[str, int], stage: int) -> bool:
    """Whether some rank of pipeline stage `stage` lies on another node than its partner behind.

    >>> cluster = Cluster.load("2x8xA100-80GB")
    >>> [hop_crosses_nodes(cluster, {"pp": 4, "dp_shard": 4}, stage) for stage in range(3)]
    [False, True, False]
    """
    width = math.prod(size for name, size in axis_sizes.items() if name != "pp")
    ranks = range(stage * width, (stage + 1) * width)
    per_node = cluster.devices_per_node
    return any(rank // per_node != (rank + width) // per_node for rank in ranks)


def all_reduce_seconds(num_bytes: float, group: Group) -> float:
    """Seconds until every rank holds the sum of the `num_bytes` that each of them had.

    The fastest of three algorithms, as NCCL chooses:

    - a ring: 2 (n - 1) steps, each rank sends 2 (n - 1) / n · S;
    - across N nodes, a tree of nodes with a chain inside: 2 ceil(log2 N) steps between nodes,
      2 (N - 1) / N · S out of each node and 2 S along the chain;
    - in the switch, where the link has it and enough ranks: 2 steps, S up to the switch and down again; its bandwidth
      is that of the tensor.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 2009; NCCL src/graph/tuning.cc (hop counts) and NCCL 2.4 (trees); the
    traffic of the tree is that of two double-binary trees at N = 2 and for large N.

    By hand: 2 ranks send 2 · 1/2 · 1 MB at 1 GB/s in 2 steps of 10 us, after 5 us of launch.

    >>> link = _example_link()
    >>> round(all_reduce_seconds(1e6, example_group(2, link)), 9)
    0.001025
    """
    n, num_nodes = group.num_ranks, group.num_nodes
    if n == 1 or num_bytes <= 0:
        return 0.0
    sent = 2 * (n - 1) / n * num_bytes
    ways = [_ring_seconds("all_reduce", sent, 2 * (n - 1), 2 * _crossings(group), group)]
    rate = _in_switch_rate(group)
    if num_nodes == 1 and rate is not None:
        ways.append(
            group.intra.launch_seconds
            + 2 * group.intra.latency_seconds
            + num_bytes / (rate * group.intra.fraction("all_reduce", sent))
        )
    if num_nodes > 1:
        ways.append(_tree_seconds(num_bytes, group))
    return min(ways)


def all_gather_seconds(num_bytes: float, group: Group) -> float:
    """Seconds until every rank holds all `num_bytes`, of which each had 1/n.

    A ring: n - 1 steps, each rank sends (n - 1) / n · S; across nodes the whole ring passes every
    node's share of the network cards.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
    in MPICH", 2005, section 3; NCCL src/graph/tuning.cc.

    By hand: 4 ranks, 3 steps of 10 us and 3/4 · 1 MB at 1 GB/s, after 5 us of launch.

    >>> round(all_gather_seconds(1e6, example_group(4, _example_link())), 9)
    0.000785
    """
    return _one_pass_seconds("all_gather", num_bytes, group)


def reduce_scatter_seconds(num_bytes: float, group: Group) -> float:
    """Seconds until every rank holds its 1/n of the sum of the `num_bytes` that each of them had.

    The ring of `all_gather_seconds` run backwards: the same steps and bytes.

    >>> round(reduce_scatter_seconds(1e6, example_group(4, _example_link())), 9)
    0.000785
    """
    return _one_pass_seconds("reduce_scatter", num_bytes, group)


def all_to_all_seconds(num_bytes: float, group: Group) -> float:
    """Seconds until every rank has exchanged its `num_bytes`, an equal piece with each rank, itself included.

    Pairwise: n - 1 steps, each rank sends (n - 1) / n · S; what is for other nodes leaves with that of the other ranks
    of the node. Inside, each has the rate of a message between two ranks, whatever rings the group could form.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005,
    section 3.2 (long messages).

    By hand: 4 ranks, 3 steps of 10 us and 3/4 · 1 MB at 1 GB/s, after 5 us of launch.

    >>> round(all_to_all_seconds(1e6, example_group(4, _example_link())), 9)
    0.000785
    """
    n, in_node = group.num_ranks, group.ranks_per_node
    if n == 1 or num_bytes <= 0:
        return 0.0
    seconds = 0.0
    if in_node > 1:
        sent = (in_node - 1) / n * num_bytes
        seconds = sent / (group.intra_hop_bytes_per_second * group.intra.fraction("all_to_all", sent))
    if group.num_nodes > 1:
        leaving = in_node * (n - in_node) / n * num_bytes
        seconds = max(seconds, _leaving_seconds("all_to_all", leaving, group))
    far = n - in_node if group.num_nodes > 1 else 0
    hops = far * group.inter.latency_seconds + (n - 1 - far) * group.intra.latency_seconds
    return _launch_seconds(group) + hops + seconds


def broadcast_seconds(num_bytes: float, group: Group) -> float:
    """Seconds until every rank holds the `num_bytes` of one of them: a chain, in pieces.

    By hand: 4 ranks, 3 steps of 10 us and 1 MB at 1 GB/s, after 5 us of launch.

    >>> round(broadcast_seconds(1e6, example_group(4, _example_link())), 9)
    0.001035
    """
    if group.num_ranks == 1 or num_bytes <= 0:
        return 0.0
    return _ring_seconds("broadcast", num_bytes, group.num_ranks - 1, _crossings(group), group)


def send_recv_seconds(num_bytes: float, group: Group, *, crosses_nodes: bool | None = None) -> float:
    """Seconds until a neighbour on the axis has the `num_bytes` that a rank sends it.

    Without `crosses_nodes` (see `hop_crosses_nodes`) the hop is the worst of the axis: between
    nodes if the group touches several.

    By hand: 1 MB at 1 GB/s, 10 us, after 5 us of launch.

    >>> round(send_recv_seconds(1e6, example_group(2, _example_link())), 9)
    0.001015
    """
    if group.num_ranks == 1 or num_bytes <= 0:
        return 0.0
    crosses = group.num_nodes > 1 if crosses_nodes is None else crosses_nodes
    link = group.inter if crosses else group.intra
    rate = group.inter_hop_bytes_per_second if crosses else group.intra_hop_bytes_per_second
    seconds = num_bytes / (rate * link.fraction("send_recv", num_bytes))
    return link.launch_seconds + link.latency_seconds + seconds


def group_slowdown(cluster: Cluster, group: Group) -> Slowdown:
    """What computing and a collective of the group do to one another.

    Across nodes the links inside carry no more than leaves the node, and slow computing down by that share of what they
    do at full rate: 8 A100 beside an all-gather over 100 Gb/s compute 1.05 times as long, inside a node 1.9 times.

    >>> cluster = Cluster.load("2x8xA100-80GB")
    >>> inside, across = (axis_group(cluster, {"a": 2, "b": 8}, axis) for axis in ("b", "a"))
    >>> group_slowdown(cluster, inside).compute > group_slowdown(cluster, across).compute
    True
    """
    if group.num_ranks == 1:
        return Slowdown(1.0, 1.0)
    if group.num_nodes == 1:
        pair = cluster.device.overlap_slowdown.get(f"{group.intra.kind}_pair") if group.num_ranks == 2 else None
        return pair or cluster.slowdown(group.intra)
    across = cluster.slowdown(group.inter)
    if group.ranks_per_node == 1:
        return across
    share = min(1.0, group.inter_bytes_per_second / group.intra_bytes_per_second)
    inside = (1 + (factor - 1) * share for factor in cluster.slowdown(group.intra))
    return Slowdown(*map(max, across, inside))


def overlapped_seconds(compute_seconds: float, link_seconds: float, slowdown: Slowdown) -> float:
    """Seconds of computing and communicating at once, each slowed down until the shorter one is done.

    It is never more than one after the other, nor less than the longer one. Source: fits all pairs of a matrix product
    and an all-gather on 8 A100 within 1 %, where one factor on the longer of the two misses by 9 %
    (`benchmarks.fit_overlap`, Dazz993/Mist interference data).

    By hand: the transfer takes 0.5 · 1.2 = 0.6 s, in which 0.6 / 1.5 = 0.4 s of computing is done; 0.6 s are left.

    >>> round(overlapped_seconds(1.0, 0.5, Slowdown(1.5, 1.2)), 9)
    1.2
    """
    compute, link = slowdown.compute * compute_seconds, slowdown.link * link_seconds
    shorter, factor = (compute, slowdown.link) if compute <= link else (link, slowdown.compute)
    longer_seconds = link_seconds if compute <= link else compute_seconds
    return min(longer_seconds + shorter * (1 - 1 / factor), compute_seconds + link_seconds)


def _one_pass_seconds(collective: str, num_bytes: float, group: Group) -> float:
    n = group.num_ranks
    if n == 1 or num_bytes <= 0:
        return 0.0
    return _ring_seconds(collective, (n - 1) / n * num_bytes, n - 1, _crossings(group), group)


def _crossings(group: Group) -> int:
    """Hops between nodes on the way of one piece of data round a ring."""
    return min(group.num_nodes, group.num_ranks - 1) if group.num_nodes > 1 else 0


def _launch_seconds(group: Group) -> float:
    links = [group.intra] if group.ranks_per_node > 1 else []
    links += [group.inter] if group.num_nodes > 1 else []
    return max(link.launch_seconds for link in links)


def _ring_seconds(collective: str, sent: float, steps: int, crossings: int, group: Group) -> float:
    """Launch, hops, and the slower of the two links that the ring passes."""
    hops = crossings * group.inter.latency_seconds
    hops += (steps - crossings) * group.intra.latency_seconds
    seconds = 0.0
    if group.ranks_per_node > 1:
        fraction = group.intra.fraction(collective, sent)
        seconds = sent / (group.intra_bytes_per_second * fraction)
    if group.num_nodes > 1:
        seconds = max(seconds, _leaving_seconds(collective, sent, group))
    return _launch_seconds(group) + hops + seconds


def _tree_seconds(num_bytes: float, group: Group) -> float:
    num_nodes, in_node = group.num_nodes, group.ranks_per_node
    sent = 2 * (num_nodes - 1) / num_nodes * num_bytes
    hops = 2 * math.ceil(math.log2(num_nodes)) * group.inter.latency_seconds
    seconds = _leaving_seconds("all_reduce", sent, group)
    rate = _in_switch_rate(group)
    if in_node > 1 and rate is not None:
        passed = 2 * (in_node - 1) / in_node * num_bytes
        hops += 2 * group.intra.latency_seconds
        seconds = max(seconds, num_bytes / (rate * group.intra.fraction("all_reduce", passed)))
    elif in_node > 1:
        passed = 2 * num_bytes
        hops += 2 * (in_node - 1) * group.intra.latency_seconds
        fraction = group.intra.fraction("all_reduce", passed)
        seconds = max(seconds, passed / (group.intra_bytes_per_second * fraction))
    return _launch_seconds(group) + hops + seconds


def _leaving_seconds(collective: str, sent: float, group: Group) -> float:
    """Seconds for `sent` bytes out of a node, divided among the cards that the group has."""
    cards = max(1.0, group.inter_bytes_per_second / group.inter.bytes_per_second)
    fraction = group.inter.fraction(collective, sent / cards)
    return sent / (group.inter_bytes_per_second * fraction)


def _in_switch_rate(group: Group) -> float | None:
    link = group.intra
    least = link.in_switch_min_ranks or 2
    return link.in_switch_all_reduce_bytes_per_second if group.ranks_per_node >= least else None


COLLECTIVE_SECONDS: Mapping[str, Callable[[float, Group], float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
}


def example_group(num_ranks: int, link: Link) -> Group:
    """All ranks in one node on one link that nobody else uses: for examples and for tests."""
    return Group(
        num_ranks=num_ranks,
        num_nodes=1,
        ranks_per_node=num_ranks,
        intra=link,
        inter=link,
        intra_bytes_per_second=link.bytes_per_second,
        inter_bytes_per_second=link.bytes_per_second,
        intra_hop_bytes_per_second=link.bytes_per_second,
        inter_hop_bytes_per_second=link.bytes_per_second,
    )


def _example_link() -> Link:
    return Link(
        name="example",
        kind="pcie",
        bytes_per_second=1e9,
        latency_seconds=1e-5,
        launch_seconds=5e-6,
        efficiency={"any": Curve(points=((1.0, 1.0),))},
        source={"*": "example"},
    )
