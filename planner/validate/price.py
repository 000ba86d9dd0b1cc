"""A case priced: what its ranks run, by the tracer and `planner.costs`, the seconds of its step, and its bytes."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.costs import price
from planner.engine_seconds import Work, data_groups, scattered_seconds, work_of
from planner.errors import PlannerError
from planner.graph import Graph
from planner.plan import Mesh
from planner.shard.chain import AxisSplit
from planner.validate.cases import Case, StageCase
from planner.validate.memory import MemoryTerms, measured_stage, stage_memory
from planner.validate.models import RankGraph, odd_parameters, rank_graph
from planner.validate.rows import RefusedError
from planner.validate.software import Implementation, implemented, layer_places
from planner.validate.step import Priced, Share, TimeTerms, step_terms

Floats = NDArray[np.float64]

KEPT = 64  # graphs of ranks and their tables; rows are priced in the order of their models


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A priced row. `memory` is of the rank that was measured, or of the fullest."""

    seconds: float
    terms: TimeTerms
    memory: MemoryTerms
    capacity_bytes: float
    notes: tuple[str, ...]
    peak_bytes: tuple[float, ...]  # of each stage, allocated

    @property
    def fits(self) -> bool:
        """Whether every stage holds what it needs."""
        return max(self.peak_bytes) <= self.capacity_bytes

    def memory_bytes(self, kind: str) -> float:
        """The peak as it was measured: allocated, reserved or nvidia-smi."""
        return self.memory.of_kind(kind)


def predict(case: Case) -> Prediction:
    """The step of a case, and the bytes of its ranks.

    Raises:
        RefusedError: its model cannot be traced, or nothing prices what it does.
    """
    try:
        return _predict(case)
    except PlannerError as error:
        raise RefusedError(str(error)) from None
    except (ArithmeticError, LookupError, ValueError) as error:  # one odd row must not end a report of a thousand
        raise RefusedError(f"a fault in pricing: {type(error).__name__}") from error


def _predict(case: Case) -> Prediction:
    found = shares(case)
    terms = step_terms(case, found, case.cluster.device, case.engine)
    memory = [
        stage_memory(case, share.stage, p, share.priced, share.weights, share.recomputed)
        for p, share in enumerate(found)
    ]
    peaks = tuple(each.allocated_bytes for each in memory)
    notes = case.notes
    odd = odd_parameters(case.row, case.spec)
    return Prediction(
        seconds=terms.total_seconds,
        terms=terms,
        memory=memory[measured_stage(case, peaks)],
        capacity_bytes=float(case.cluster.capacity_bytes),
        notes=(*notes, odd) if odd else notes,
        peak_bytes=peaks,
    )


def shares(case: Case) -> tuple[Share, ...]:
    """What each stage runs, before any constant of a device or an engine."""
    bounds = np.concatenate([[0.0], np.cumsum([stage.layers for stage in case.stages])])
    found = []
    for p, stage in enumerate(case.stages):
        priced = _tables(case, stage)
        found.append(Share(stage=stage, priced=priced, weights=_weights(priced, bounds[p], bounds[p + 1], p, case)))
    return tuple(found)


def _weights(priced: Priced, first: float, end: float, p: int, case: Case) -> Floats:
    """[L] shares of the blocks that a stage has: layers by position, what is around them with their neighbours."""
    layers = layer_places(priced.graph)
    count = len(set(layers.values()))
    weights = np.zeros(len(priced.graph.blocks))
    for block, layer in layers.items():
        weights[block] = max(0.0, min(end, layer + 1) - max(first, layer))
    for block in map(int, np.flatnonzero(~priced.is_layer)):
        before = len({layer for place, layer in layers.items() if place < block})
        if before in (0, count):
            weights[block] = float(p == (case.pp - 1 if before else 0))
        else:
            weights[block] = float(first < before <= end)
    return weights


def _tables(case: Case, stage: StageCase) -> Priced:
    """What one rank of such a stage costs, block by block."""
    rank = rank_graph(case.key(stage), case.spec.layers)
    if (found := len(set(layer_places(rank.graph).values()))) != case.spec.num_layers:
        raise RefusedError(f"a graph of {found} layers for a model of {case.spec.num_layers}")
    by = Implementation(
        unfused_attention=case.attention == "unfused",
        recomputes_attention=case.selective,
        attention_work=case.cp * case.spec.attention_lengths,
        gathers_again=case.key(stage).sequence_parallel,
        head=case.spec.head,
        is_causal=case.spec.is_causal,
        has_dropout=case.dropout > 0,
        tp=stage.tp,
        expert_ranks=case.ep,
        is_frozen=case.frozen_bytes > 0,
    )
    ranks = stage.dp * case.cp
    shards = case.shards if ranks % case.shards == 0 else ranks
    mesh = Mesh(pp=case.pp, dp_replicate=ranks // shards, dp_shard=shards, tp=stage.tp)
    precision = "fp32" if case.single_precision else "bf16"
    cluster = _room_for(case.cluster, mesh.num_devices)
    return _priced(
        _Rank(rank, by),
        cluster,
        mesh,
        stage.micro_batch,
        case.num_microbatches,
        precision,
        case.optimizer,
        case.zero,
        case.fp8,
        case.engine.loss_in_parts,
    )


@lru_cache(maxsize=256)
def _room_for(cluster: Cluster, num_devices: int) -> Cluster:
    """As many nodes as stages of unequal degrees need."""
    return replace(cluster, num_nodes=max(cluster.num_nodes, -(-num_devices // cluster.devices_per_node)))


@lru_cache(maxsize=KEPT)
def _implemented(rank: RankGraph, by: Implementation) -> Graph:
    return implemented(rank.graph, by)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's graph with its software, as a key: graphs are equal to themselves only."""

    rank: RankGraph
    by: Implementation


@lru_cache(maxsize=KEPT)
def _work(rank: _Rank, micro_batch: int, fp8: bool, loss_in_parts: bool) -> Work:
    graph = _implemented(rank.rank, rank.by)
    layers = layer_places(graph)
    parts = Counter(layers.values())  # a layer of a narrow model may be cut within
    calls = [1 / parts[layers[place]] if place in layers else 0.0 for place in range(len(graph.blocks))]
    return work_of(graph, micro_batch, fp8=fp8, loss_in_parts=loss_in_parts, calls=np.array(calls))


@lru_cache(maxsize=KEPT)
def _priced(
    rank: _Rank,
    cluster: Cluster,
    mesh: Mesh,
    micro_batch: int,
    num_microbatches: int,
    precision: str,
    optimizer: str,
    zero: int,
    fp8: bool,
    loss_in_parts: bool,
) -> Priced:
    graph = _implemented(rank.rank, rank.by)
    costs = price(
        graph, cluster, mesh=mesh, micro_batch=micro_batch, num_microbatches=num_microbatches, schedule="1f1b",
        precision=precision, optimizer=optimizer,
        splits=[AxisSplit(axis=axis, degree=degree, shardings=rank.rank.shardings) for axis, degree in mesh.splits],
    )  # fmt: skip
    column = {(s.zero, s.recompute): index for index, s in enumerate(costs.strategies)}
    stage_zero = zero if mesh.dp_shard > 1 else 0
    return Priced(
        graph=graph,
        costs=costs,
        scattered_seconds=scattered_seconds(costs, graph, cluster),
        columns=(column[stage_zero, 0], column[stage_zero, 1]),
        work=_work(rank, micro_batch, fp8, loss_in_parts),
        elements=_elements(graph, mesh.pp > 1),
        expert_elements=_elements(graph, mesh.pp > 1, experts_only=True),
        parameters=np.array([len(block.parameters) for block in graph.blocks], float),
        is_layer=np.isin(np.arange(len(graph.blocks)), list(layer_places(graph))),
        groups=data_groups(cluster, mesh),
    )


def _elements(graph: Graph, pipelined: bool, *, experts_only: bool = False) -> Floats:
    """[L] trainable parameters; one that is shared belongs to its first reader, in a pipeline to each of them.

    Those of experts have three dims.
    """
    seen, result = set[int](), []
    for block in graph.blocks:
        own = [p for p in block.parameters if (pipelined or p not in seen) and graph.tensors[p].requires_grad]
        seen.update(own)
        if experts_only:
            own = [p for p in own if len(graph.tensors[p].shape) == 3]
        result.append(sum(graph.tensors[p].num_elements.fixed for p in own))
    return np.array(result, float)


def features(case: Case) -> list[dict[str, Any]]:
    """What a step is made of before any constant of the hardware, stage by stage: for fitting those constants.

    FLOP and bytes are of one micro-batch on one rank, with how often each kernel runs in a step.
    """
    result: list[dict[str, Any]] = []
    bounds = np.concatenate([[0.0], np.cumsum([stage.layers for stage in case.stages])])
    for p, stage in enumerate(case.stages):
        priced = _tables(case, stage)
        weights = _weights(priced, bounds[p], bounds[p + 1], p, case)
        share = np.where(priced.is_layer, stage.recompute_share, 0.0)
        kernels: dict[tuple[str, str, str, float, float], float] = {}
        collectives: dict[tuple[str, str, float], float] = {}
        for block, weight, again in zip(priced.graph.blocks, weights, share, strict=True):
            if not weight:
                continue
            kind = priced.graph.classes[block.class_index]
            for kernel in kind.kernels:
                runs = weight * (1 + (again if kernel.phase == "forward" else 0.0)) * case.num_microbatches
                what = (
                    kernel.kind, kernel.op, kernel.phase, kernel.flop.at(stage.micro_batch),
                    kernel.num_bytes.at(stage.micro_batch),
                )  # fmt: skip
                kernels[what] = kernels.get(what, 0.0) + runs
            for made in kind.collectives:
                runs = weight * (1 + (again if made.phase == "forward" else 0.0)) * case.num_microbatches
                key = (made.collective, "tp", made.num_bytes.at(stage.micro_batch))
                collectives[key] = collectives.get(key, 0.0) + runs
        elements = float(weights @ priced.elements)
        result.append(
            {
                "kernels": [
                    {"kind": k, "op": op, "phase": phase, "flop": flop, "num_bytes": num_bytes, "count": count}
                    for (k, op, phase, flop, num_bytes), count in kernels.items()
                ],
                "collectives": [
                    {"collective": name, "axis": axis, "num_bytes": num_bytes, "count": count}
                    for (name, axis, num_bytes), count in collectives.items()
                ],
                "groups": {"tp": stage.tp, "dp": stage.dp, "cp": case.cp, "ep": case.ep, "shards": case.shards},
                "trainable_elements": elements,
                "num_microbatches": case.num_microbatches,
            }
        )
    return result
