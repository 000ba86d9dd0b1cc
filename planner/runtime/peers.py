"""Axes that split tensors, on one rank: the graph of its part, the operators that communicate, gradient sums.

The graph that a stage is lowered from has the sizes of one rank, made by one axis after the other
(`planner.shard.chain`): its `planner.*` operators run over the process groups of the mesh axes `cp` and `tp`. What an
axis does not split is whole and equal on all its ranks. Ranks of `ep` are data ranks, whose samples are their own: they
have parts of the parameters of experts alone.

Ranks of `cp` have parts of activations alone: every parameter is whole, and each rank finds a part of its gradient.
They are ranks of FSDP as those of `dp_shard` are, which averages over them what is to be summed: the loss is scaled.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.cluster import Cluster
from planner.collectives import COLLECTIVE_SECONDS, axis_group
from planner.errors import PlanError, SolverError
from planner.graph import Graph, Node, Size
from planner.memory import MOST_COALESCED_BYTES
from planner.plan import Plan
from planner.runtime.parts import AXIS, EXPERTS, TensorParallel
from planner.runtime.zero import local
from planner.shard.chain import AxisSplit, Link, chained
from planner.shard.placement import Placement, Q, R, Sharding, effective, operands_of
from planner.shard.program import Prices, resharded
from planner.shard.spread import spread_experts
from planner.shard.stored import restored
from planner.trace.parallel import Communicator, Pretended, ProcessGroup, bound

# What they drop is what one device drops, of which a rank takes its part.
DROPOUTS = ("planner.dropout.default", "planner.dropout_of_parts.default")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Peers:
    """The ranks that run a graph together: which one this is on each axis, and what they communicate with.

    `places` are this rank's number and the number of ranks by axis, outermost first; `operators` are the `planner.*`
    ones by name. `split_draws` are the random operators, counted in the order of the graph, of whose result a rank has
    a part, each with this rank's numbers on the axes that split it.
    """

    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    operators: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    split_draws: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, communicators: Mapping[str, Communicator], links: Sequence[Link] = ()) -> "Peers":
        """The ranks of the axes that split tensors, and what `links` split."""
        places = {axis: (c.rank, c.size) for axis, c in communicators.items()}
        draws: dict[int, tuple[int, ...]] = {}
        for link in links:
            for number in _split_draws(link):
                draws[number] = (*draws.get(number, ()), places[link.split.axis][0])
        return cls(places=places, operators=bound(communicators), split_draws=draws)


ALONE = Peers()


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What a rank runs of a graph of the model, and with whom; `pretended` peers give the shapes alone.

    `links` are how it is made of the whole graph, an axis after the other.
    """

    whole: Graph
    graph: Graph
    links: tuple[Link, ...] = ()
    peers: Peers = ALONE
    pretended: Peers = ALONE

    def placed(self, tensor: int) -> Mapping[str, Placement]:
        """How a tensor of the whole graph is placed, by axis."""
        return {link.split.axis: link.local.placements.get(tensor, R) for link in self.links}


class Axes:
    """The axes of a plan that split tensors, as one rank sees them: how graphs of the model are split over them.

    `planned` is the part of the planned graph; `parallel` how parameters and buffers are held, None where they are
    whole: without `tp` and `ep`. Where no axis splits, the part is the whole.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        mesh: DeviceMesh,
        sharding_mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None = None,
        *,
        replicated: Collection[str] = (),
    ) -> None:
        """`mesh` has the axes that split; `sharding_mesh` is that of FSDP, with `tp`, whose parameters it shards.

        `expert_mesh` has the ranks of `ep` apart from those of `dp_shard`.

        `replicated` operators are split in no other graph of the model either.

        Raises:
            PlanError: the plan's shardings are not for this graph.
        """
        self.size = plan.mesh.peers  # ranks that run the same samples
        self.loss_factor = plan.mesh.cp  # FSDP averages over `cp`, whose ranks have parts of a sum
        self.num_summands = plan.mesh.tp  # ranks whose partial gradients `sum` adds up
        self._group = mesh[AXIS].get_group()
        self.num_owners = plan.mesh.ep  # ranks whose samples an expert's gradient is summed over already
        of_axis = {axis: mesh if axis != EXPERTS else expert_mesh for axis, _ in plan.mesh.splits}
        self._communicators = {
            axis: ProcessGroup(each[axis].get_group()) for axis, each in of_axis.items() if each is not None
        }
        self._replicated = replicated
        self.parallel: TensorParallel | None = None
        whole, links = graph, list[Link]()
        for position, (axis, degree) in enumerate(plan.mesh.splits):
            of_block = [block.shardings[position] for block in plan.block_plans]
            shardings = restored(whole, plan.shardings, of_block, degree)
            links += chained(whole, [AxisSplit(axis=axis, degree=degree, shardings=shardings)])
            if axis == "cp":
                _check_whole(whole, links[-1].local.placements)
            whole = links[-1].local.graph
        self._placements = {link.split.axis: _stored_placements(graph, link) for link in links}
        if AXIS in self._placements or EXPERTS in self._placements:
            has_parts = AXIS in self._placements
            self.parallel = TensorParallel(
                mesh=sharding_mesh[AXIS] if has_parts else None,
                placements=self._placements.get(AXIS, {}),
                experts=None if expert_mesh is None else expert_mesh[(EXPERTS, AXIS) if has_parts else (EXPERTS,)],
                spread=self._placements.get(EXPERTS, {}),
            )
        self.planned = self._part(graph, tuple(links))
        for number in sorted(self.planned.peers.split_draws)[:1]:
            node = [node for node in self.planned.graph.nodes if node.is_random][number]
            _log.warning(
                "%s: %s draws inside a kernel, of which each rank runs a part: right as random numbers, but others "
                "than one device draws", node.source, node.op,
            )  # fmt: skip

    @property
    def splits(self) -> tuple[AxisSplit, ...]:
        """How the planned graph is split, an axis after the other."""
        return tuple(link.split for link in self.planned.links)

    def part_of(self, graph: Graph) -> Part:
        """The part of another graph of the same model; parameters and buffers are held as planned.

        Raises:
            PlanError: they cannot be.
        """
        whole, links = graph, list[Link]()
        for split in self.splits:
            if split.axis == EXPERTS:
                shardings = spread_experts(whole, split.degree, self._placements[EXPERTS])
            else:
                shardings = resharded(
                    whole, split.degree, usual_prices(split.degree), self._placements[split.axis], None,
                    replicated=self._replicated, whole_parameters=split.axis == "cp",
                )  # fmt: skip
            links += chained(whole, [AxisSplit(axis=split.axis, degree=split.degree, shardings=shardings)])
            whole = links[-1].local.graph
        return self._part(graph, tuple(links))

    def _part(self, whole: Graph, links: tuple[Link, ...]) -> Part:
        return Part(
            whole=whole,
            graph=links[-1].local.graph if links else whole,
            links=links,
            peers=Peers.of(self._communicators, links) if links else ALONE,
            pretended=Peers.of({link.split.axis: Pretended(link.split.degree) for link in links}, links),
        )

    def is_partial(self, name: str) -> bool:
        """Whether every rank has a part of the sum that is the gradient of a parameter, which nobody else takes."""
        return self.parallel is not None and self.parallel.of(name) == Q

    def is_split(self, name: str) -> bool:
        """Whether every rank of `tp` has a part of a parameter."""
        return self.parallel is not None and self.parallel.of(name).is_split

    def is_spread(self, name: str) -> bool:
        """Whether every rank of `ep` has a part of a parameter, those of its experts."""
        return self.parallel is not None and self.parallel.spread.get(name, R).is_split

    def sum(self, gradients: Iterable[torch.Tensor]) -> None:
        """All-reduce tensors in place: small ones together. All ranks give the same shapes in the same order."""
        bucket: list[torch.Tensor] = []
        bucket_bytes = 0
        for tensor in gradients:
            num_bytes = tensor.numel() * tensor.element_size()
            if bucket and (tensor.dtype != bucket[0].dtype or bucket_bytes + num_bytes > MOST_COALESCED_BYTES):
                self._reduce(bucket)
                bucket, bucket_bytes = [], 0
            if num_bytes:
                bucket.append(tensor)
                bucket_bytes += num_bytes
        if bucket:
            self._reduce(bucket)

    def _reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) == 1 and tensors[0].is_contiguous():
            dist.all_reduce(tensors[0], group=self._group)
            return
        flat = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        dist.all_reduce(flat, group=self._group)
        for tensor, value in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(value)


def _stored_placements(graph: Graph, link: Link) -> dict[str, Placement]:
    """How an axis holds each parameter and buffer, by name."""
    return {
        described.name: link.local.placements.get(tensor, R)
        for tensor, described in enumerate(graph.tensors)
        if described.kind in ("parameter", "buffer")
    }


def _split_draws(link: Link) -> list[int]:
    """The random operators, counted in the order of the graph, of whose result a rank of the axis draws a part."""
    before, after = ([n for n in graph.nodes if n.is_random] for graph in (link.whole, link.local.graph))
    return [
        number
        for number, (whole, part) in enumerate(zip(before, after, strict=True))
        if part.op not in DROPOUTS and _shapes(link.whole, whole) != _shapes(link.local.graph, part)
    ]


def _shapes(graph: Graph, node: Node) -> list[tuple[Size, ...]]:
    return [graph.tensors[t].shape for t in node.outputs if t is not None]


def held(value: torch.Tensor) -> torch.Tensor:
    """What this rank computes with: its part of a parameter that is stored as a DTensor.

    Its gradient is stored as the parameter is. For one that is whole but only partly used here (placement Q), that is
    a part of the sum.

    Not `DTensor.to_local` with gradients (torch 2.13): it takes a gradient that another parameter has as well for its
    own, so that what the next micro-batch adds to one is added to both. It also wraps each gradient, which autograd
    then adds by way of DTensor's dispatch.
    """
    if not isinstance(value, DTensor):
        return value
    part = local(value)
    if not (value.requires_grad and torch.is_grad_enabled()):
        return part
    leaf = part.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(partial(_hand_on, value))  # type: ignore[no-untyped-call]
    return leaf


def _hand_on(parameter: DTensor, leaf: torch.Tensor) -> None:
    """Add a gradient that autograd has left at a leaf to that of its parameter."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return
    if parameter.grad is not None:
        local(parameter.grad).add_(gradient)
        return
    parameter.grad = DTensor.from_local(
        gradient, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


# Whose prices say where to communicate for another batch shape than the planned one; where parameters are held is
# planned. The plan's own cluster may be a file that not all ranks can read, and all must choose alike.
_USUAL_NODE = "8xH100-80GB"


@cache
def usual_prices(degree: int) -> Prices:
    """What work and communication cost on `degree` neighbours of some usual cluster that every installation knows."""
    cluster = Cluster.load(f"{-(-degree // 8)}x{_USUAL_NODE}")
    device, group = cluster.device, axis_group(cluster, {"tp": degree}, "tp")
    return Prices(
        flop_per_second=device.peak_flop_per_second["bfloat16"],
        bytes_per_second=device.memory_bytes_per_second,
        kernel_seconds=device.kernel_launch_seconds,
        collective_seconds=lambda collective, num_bytes: COLLECTIVE_SECONDS[collective](num_bytes, group),
        micro_batch=1,
        num_microbatches=1,
    )


def _check_whole(graph: Graph, placements: Mapping[int, Placement]) -> None:
    """Refuse what context parallelism cannot hold.

    Raises:
        PlanError: a parameter or buffer is split, or a gradient of one is no part of a sum.
    """
    for tensor, placement in placements.items():
        described = graph.tensors[tensor]
        wanted = Q if described.requires_grad else R
        is_stored = described.kind in ("parameter", "buffer")
        if is_stored and effective(placement, has_gradient=described.requires_grad) != wanted:
            raise PlanError(
                f"the plan holds {described.name} as {placement} on the ranks of cp, which have all of each parameter "
                f"({wanted}); plan again"
            )


def replicated(graph: Graph, operators: Collection[str], splits: Sequence[AxisSplit]) -> tuple[AxisSplit, ...]:
    """How to split a graph otherwise, some `operators` not at all (conversions among them are not made).

    What is stored and handed on stays as it is in `splits` but for what these operators read, if it can; if not,
    but for the blocks that have them; if not, all may change.

    Raises:
        PlanError, SolverError: it cannot be.
    """
    links = list[Link]()
    for split in splits:
        # Of an axis that splits what another one has split before, only what is stored can stay.
        is_own = split.axis == EXPERTS  # what runs there runs on a rank's own samples, as on one device
        shardings = split.shardings if is_own else _without(graph, operators, split, keeps_layouts=not links)
        links += chained(graph, [replace(split, shardings=shardings)])
        graph = links[-1].local.graph
    return tuple(link.split for link in links)


def _without(
    graph: Graph, operators: Collection[str], split: AxisSplit, *, keeps_layouts: bool
) -> tuple[Sharding, ...]:
    """Other shardings of one axis."""
    stored: dict[str, Placement] = {}
    carried: dict[int, Placement] = {}
    read: set[str] = set()
    near: set[str] = set()
    for block, sharding in zip(graph.blocks, split.shardings, strict=True):
        pairs = zip((*block.parameters, *block.buffers), (*sharding.parameters, *sharding.buffers), strict=True)
        here = {graph.tensors[tensor].name: placement for tensor, placement in pairs}
        stored |= here
        carried |= dict(zip(block.outputs, sharding.outputs, strict=True))
        nodes = [graph.nodes[i] for i in block.nodes if graph.nodes[i].op in operators]
        read.update(graph.tensors[t].name for node in nodes for t in operands_of(node))
        near.update(here if nodes else ())
    failure: PlanError | SolverError | None = None
    for kept, layouts in (
        (
            {name: placement for name, placement in stored.items() if name not in read},
            carried if keeps_layouts else None,
        ),
        ({name: placement for name, placement in stored.items() if name not in near}, None),
        ({}, None),
    ):
        try:
            return resharded(
                graph, split.degree, usual_prices(split.degree), kept, layouts, replicated=operators,
                whole_parameters=split.axis == "cp",
            )  # fmt: skip
        except (PlanError, SolverError) as error:
            failure = error
    assert failure is not None
    raise failure
