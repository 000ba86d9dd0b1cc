"""Tensor or context parallelism on one rank: the graph of its part, the operators that communicate, gradient sums.

The graph that a stage is lowered from has the sizes of one rank (`planner.shard.localize`): its `planner.*` operators
run over the process group of the mesh axis `tp` or `cp`. What is not split is whole and equal on all ranks of the axis.

Ranks of `cp` have parts of activations alone: every parameter is whole, and each rank finds a part of its gradient.
They are ranks of FSDP as those of `dp_shard` are, which averages over them what is to be summed: the loss is scaled.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.errors import PlanError, SolverError
from planner.graph import Graph, Node, Size
from planner.plan import Plan
from planner.runtime.parts import AXIS, TensorParallel
from planner.shard.localize import Localized, localize
from planner.shard.placement import Collective, Placement, Q, R, Sharding, effective, operands_of
from planner.shard.program import Prices, resharded
from planner.shard.stored import restored
from planner.trace.parallel import Communicator, Pretended, ProcessGroup, bound

DROPOUT = "planner.dropout.default"  # drops what one device drops, of which a rank takes its part
_log = logging.getLogger(__name__)
_MOST_COALESCED_BYTES = 2**25


@dataclass(frozen=True, eq=False, kw_only=True)
class Peers:
    """The ranks that run a graph together: which one this is, of how many, and what they communicate with.

    `operators` are the `planner.*` ones by name. `split_draws` are the random operators, counted in the order of the
    graph, of whose result a rank has a part.
    """

    rank: int = 0
    size: int = 1
    operators: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    split_draws: frozenset[int] = frozenset()

    @classmethod
    def of(cls, communicator: Communicator, split_draws: Collection[int] = (), *, axis: str = AXIS) -> "Peers":
        """The ranks of the axis that splits tensors."""
        return cls(
            rank=communicator.rank,
            size=communicator.size,
            operators=bound({axis: communicator}),
            split_draws=frozenset(split_draws),
        )


ALONE = Peers()


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What a rank runs of a graph of the model, and with whom; `pretended` peers give the shapes alone.

    `placements` are those of the tensors of the whole graph; others are R.
    """

    whole: Graph
    graph: Graph
    placements: Mapping[int, Placement] = field(default_factory=dict)
    peers: Peers = ALONE
    pretended: Peers = ALONE


class Axis:
    """The axis of a plan that splits tensors, as one rank sees it: how graphs of the model are split over it.

    `planned` is the part of the planned graph, by `shardings`; `parallel` how parameters and buffers are held, None
    where they are whole: without tensor parallelism. With neither `tp` nor `cp` the part is the whole.
    """

    def __init__(self, plan: Plan, graph: Graph, mesh: DeviceMesh, *, replicated: Collection[str] = ()) -> None:
        """`mesh` has the axes `tp` and `cp`; `replicated` operators are split in no other graph of the model either.

        Raises:
            PlanError: the plan's shardings are not for this graph.
        """
        self.name = plan.mesh.split_axis
        self.size = plan.mesh.split_degree
        self.loss_factor = plan.mesh.cp  # FSDP averages over `cp`, whose ranks have parts of a sum
        self._group = mesh[self.name].get_group()
        self._communicator = ProcessGroup(self._group)
        self._replicated = replicated
        self.shardings: tuple[Sharding, ...] = ()
        self.parallel: TensorParallel | None = None
        self.planned = Part(whole=graph, graph=graph)
        if self.size == 1:
            return
        of_block = [block.sharding for block in plan.block_plans if block.sharding is not None]
        self.shardings = restored(graph, plan.shardings, of_block, self.size)
        local = localize(graph, self.shardings, self.size, axis=self.name)
        self._placements = {
            described.name: local.placements.get(tensor, R)
            for tensor, described in enumerate(graph.tensors)
            if described.kind in ("parameter", "buffer")
        }
        if self.name == AXIS:
            self.parallel = TensorParallel(mesh[AXIS], self._placements)
        else:
            _check_whole(graph, local.placements)
        self.planned = self._part(graph, local)
        for number in sorted(self.planned.peers.split_draws)[:1]:
            node = [node for node in local.graph.nodes if node.is_random][number]
            _log.warning(
                "%s: %s draws inside a kernel, of which each rank runs a part: right as random numbers, but others "
                "than one device draws", node.source, node.op,
            )  # fmt: skip

    def part_of(self, graph: Graph) -> Part:
        """The part of another graph of the same model; parameters and buffers are held as planned.

        Raises:
            PlanError: they cannot be.
        """
        if self.size == 1:
            return Part(whole=graph, graph=graph)
        shardings = resharded(
            graph, self.size, _PRICES, self._placements, None, replicated=self._replicated,
            whole_parameters=self.parallel is None,
        )  # fmt: skip
        return self._part(graph, localize(graph, shardings, self.size, axis=self.name))

    def _part(self, whole: Graph, local: Localized) -> Part:
        graph = local.graph
        pairs = zip((n for n in whole.nodes if n.is_random), (n for n in graph.nodes if n.is_random), strict=True)
        split = [
            number
            for number, (before, after) in enumerate(pairs)
            if after.op != DROPOUT and _shapes(whole, before) != _shapes(graph, after)
        ]
        return Part(
            whole=whole,
            graph=graph,
            placements=local.placements,
            peers=Peers.of(self._communicator, split, axis=self.name),
            pretended=Peers.of(Pretended(self.size), split, axis=self.name),
        )

    def is_partial(self, name: str) -> bool:
        """Whether every rank has a part of the sum that is the gradient of a parameter, which nobody else takes."""
        return self.parallel is not None and self.parallel.of(name) == Q

    def is_split(self, name: str) -> bool:
        """Whether every rank has a part of a parameter."""
        return self.parallel is not None and self.parallel.of(name).is_split

    def sum(self, gradients: Iterable[torch.Tensor]) -> None:
        """All-reduce tensors in place: small ones together. All ranks give the same shapes in the same order."""
        bucket: list[torch.Tensor] = []
        bucket_bytes = 0
        for tensor in gradients:
            num_bytes = tensor.numel() * tensor.element_size()
            if bucket and (tensor.dtype != bucket[0].dtype or bucket_bytes + num_bytes > _MOST_COALESCED_BYTES):
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


def _shapes(graph: Graph, node: Node) -> list[tuple[Size, ...]]:
    return [graph.tensors[t].shape for t in node.outputs if t is not None]


def held(value: torch.Tensor) -> torch.Tensor:
    """What this rank computes with: its part of a parameter that is stored as a DTensor.

    Its gradient is stored as the parameter is. For one that is whole but only partly used here (placement Q), that is
    a part of the sum.
    """
    return value.to_local() if isinstance(value, DTensor) else value


def _some_seconds(kind: Collective, num_bytes: float) -> float:
    return 1e-5 + num_bytes / 2e11 * (2 if kind == "all_reduce" else 1)


# Of some usual cluster: the runtime knows none. Where parameters are held is planned; what is left to choose for
# another batch shape is where to communicate. The same on all ranks.
_PRICES = Prices(
    flop_per_second=4e14, bytes_per_second=2e12, kernel_seconds=4e-6, collective_seconds=_some_seconds,
    micro_batch=1, num_microbatches=1,
)  # fmt: skip


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


def replicated(
    graph: Graph,
    degree: int,
    operators: Collection[str],
    shardings: Sequence[Sharding],
    *,
    whole_parameters: bool = False,
) -> tuple[Sharding, ...]:
    """Other shardings of a graph that do not split some `operators` (conversions among them are not made).

    What is stored and handed on stays as it is in `shardings` but for what these operators read, if it can; if not,
    but for the blocks that have them; if not, all may change.

    Raises:
        PlanError, SolverError: it cannot be.
    """
    stored: dict[str, Placement] = {}
    carried: dict[int, Placement] = {}
    read: set[str] = set()
    near: set[str] = set()
    for block, sharding in zip(graph.blocks, shardings, strict=True):
        pairs = zip((*block.parameters, *block.buffers), (*sharding.parameters, *sharding.buffers), strict=True)
        here = {graph.tensors[tensor].name: placement for tensor, placement in pairs}
        stored |= here
        carried |= dict(zip(block.outputs, sharding.outputs, strict=True))
        nodes = [graph.nodes[i] for i in block.nodes if graph.nodes[i].op in operators]
        read.update(graph.tensors[t].name for node in nodes for t in operands_of(node))
        near.update(here if nodes else ())
    failure: PlanError | SolverError | None = None
    for kept, layouts in (
        ({name: placement for name, placement in stored.items() if name not in read}, carried),
        ({name: placement for name, placement in stored.items() if name not in near}, None),
        ({}, None),
    ):
        try:
            return resharded(
                graph, degree, _PRICES, kept, layouts, replicated=operators, whole_parameters=whole_parameters
            )
        except (PlanError, SolverError) as error:
            failure = error
    assert failure is not None
    raise failure
