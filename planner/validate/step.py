"""The predicted seconds of a step: kernels of the traced graph under a training system, stages as they are run.

An engine moves other bytes in its elementwise chains, takes other times to send a kernel, and hides other
communication; the rest is `planner.costs`, as for any plan. What stock PyTorch does not do, or the search does not
choose, is a term of its own, each from a published formula: gradients reduced at the end in one piece, interleaved and
zero-bubble schedules, context and expert parallelism as extra collectives, optimizer and activations in host memory,
stages of unequal degrees. Terms add up to the step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Device
from planner.collectives import (
    all_gather_seconds,
    all_to_all_seconds,
    axis_group,
    reduce_scatter_seconds,
)
from planner.costs import Costs, inside_seconds
from planner.engine import Engine
from planner.engine_seconds import (
    BlockSeconds,
    DataGroups,
    Work,
    block_seconds,
    in_one_piece,
    on_processor,
    prelude_seconds,
)
from planner.graph import Graph
from planner.memory import precision_named
from planner.offload import adam_seconds, copy_bytes_per_second, exposed_copy_seconds, gradient_copies
from planner.simulate import Stage, run_pipeline
from planner.validate.cases import Case, StageCase
from planner.validate.rows import RefusedError

Floats = NDArray[np.float64]

# Of the bubble of 1F1B, what a schedule leaves: Qi et al. 2023 (arXiv 2401.10241), table 1: with forward, input- and
# weight-gradient passes of equal length ZB-H1 (ZB-1p) has a third, ZB-H2 (ZB-2p) and ZB-V none.
BUBBLE_LEFT = {"1f1b": 1.0, "interleaved": 1.0, "zb-1p": 1 / 3, "zb-2p": 0.0, "zb-v": 0.0}
LONG_RUN = 6  # micro-batches for each stage after which every further one takes as long as the last


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """Where the seconds of a step go, means over the stages; they add up. Recomputation is in the first three."""

    gemm_seconds: float = 0.0
    attention_seconds: float = 0.0
    memory_bound_seconds: float = 0.0
    launch_seconds: float = 0.0  # waiting for the CPU, beyond the kernels
    tp_seconds: float = 0.0
    dp_seconds: float = 0.0  # exposed: in the passes and once a step
    cp_seconds: float = 0.0
    ep_seconds: float = 0.0
    pp_seconds: float = 0.0  # messages between stages
    offload_seconds: float = 0.0
    bubble_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """The step."""
        return float(sum(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """The tables of one stage's degrees: rows are blocks."""

    graph: Graph
    costs: Costs
    scattered_seconds: Floats  # [L - 1] a message over the cut if ranks of tp send it in parts
    work: Work
    columns: tuple[int, int]  # strategies without and with recomputation
    elements: Floats  # [L] trainable parameters of a rank
    expert_elements: Floats  # [L] of these, those of experts
    parameters: Floats  # [L] how many parameters there are
    is_layer: NDArray[np.bool_]
    groups: DataGroups


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What one stage has of its tables: [L] shares of the blocks."""

    stage: StageCase
    priced: Priced
    weights: Floats

    @property
    def recomputed(self) -> Floats:
        """[L] how often the forward pass of a block runs again."""
        return np.where(self.priced.is_layer, self.stage.recompute_share, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StageSeconds:
    stage: Stage
    terms: TimeTerms  # of one micro-batch, both passes
    end: TimeTerms  # once a step, after the last pass
    norm_seconds: float  # once a step, all stages together


def _engine_of(case: Case, engine: Engine) -> Engine:
    """The engine as a run uses it."""
    collectives = engine.async_collectives if case.async_tp else engine.collectives
    return replace(engine, collectives=collectives, attention_speed=engine.attention_speed * case.attention_speed)


def step_terms(case: Case, shares: Sequence[Share], device: Device, engine: Engine, *, exact: bool = True) -> TimeTerms:
    """Where the seconds of a step go; the stages in order. Without `exact`, pipelines by a closed formula.

    Raises:
        RefusedError: a stage has nothing to do.
    """
    engine = _engine_of(case, engine)
    memo: dict[int, tuple[BlockSeconds, BlockSeconds]] = {}
    results = [_stage(case, share, p, device, engine, memo) for p, share in enumerate(shares)]
    m = case.num_microbatches
    stages = [result.stage for result in results]
    end_seconds, transfers = _pipeline(stages, m) if exact else _closed_pipeline(stages, m)
    busy = max(m * (r.stage.forward_seconds + r.stage.backward_seconds) + r.stage.start_seconds for r in results)
    waiting = max(0.0, max(end_seconds) - busy)
    left = waiting * BUBBLE_LEFT[case.pipeline] / case.virtual_stages
    hops = 2 * sum(r.stage.send_seconds for r in results) * (case.virtual_stages - 1) if case.pp > 1 else 0.0
    ready = [end + result.end.dp_seconds for end, result in zip(end_seconds, results, strict=True)]
    owners = [p for p, result in enumerate(results) if result.end.pp_seconds]
    if len(owners) > 1:  # they sum the gradients of what they share when the last of them has its own
        done = max(ready[p] for p in owners) + max(results[p].end.pp_seconds for p in owners)
        ready = [done if p in owners else seconds for p, seconds in enumerate(ready)]
    steps = [result.end.optimizer_seconds + result.end.offload_seconds for result in results]
    step = max(ready) + max(steps) + results[0].norm_seconds + left - waiting + hops
    mean = 1 / len(results)
    parts: dict[str, float] = {}
    for result in results:
        for name, seconds in asdict(result.terms).items():
            parts[name] = parts.get(name, 0.0) + mean * m * seconds
        for name, seconds in asdict(result.end).items():
            parts[name] = parts.get(name, 0.0) + mean * seconds
    parts["dp_seconds"] += results[0].norm_seconds + mean * sum(result.stage.start_seconds for result in results)
    parts["pp_seconds"] += mean * sum(transfers) + hops
    if case.only_micro_batch:
        parts["optimizer_seconds"] = 0.0
        step = sum(parts.values())
    parts["bubble_seconds"] = step - sum(parts.values())
    return TimeTerms(**{name: seconds * case.rounded for name, seconds in parts.items()})


def _stage(
    case: Case, share: Share, p: int, device: Device, engine: Engine, memo: dict[int, tuple[BlockSeconds, BlockSeconds]]
) -> _StageSeconds:
    """One stage: seconds of its passes, and of what it does once a step."""
    priced, weights, stage = share.priced, share.weights, share.stage
    costs = priced.costs
    if not weights.any():
        raise RefusedError(f"stage {p} of {case.pp} has no layer")
    if id(priced) not in memo:
        memo[id(priced)] = _both(case, share, device, engine)
    plain, again = memo[id(priced)]
    recomputed = share.recomputed

    def mixed(one: Floats, other: Floats) -> float:
        return float(weights @ ((1 - recomputed) * one + recomputed * other))

    forward = mixed(plain.forward, again.forward)
    backward = mixed(plain.backward, again.backward)
    times = np.stack([1 + recomputed, np.ones_like(recomputed)], axis=1)  # forward runs again in the backward pass
    gemm, attention, memory = (float(weights @ (times * part).sum(axis=1)) for part in plain.by_kind)
    inside = engine.collectives * float(weights @ (times * inside_seconds(costs)).sum(axis=1))
    exposed = mixed(plain.exposed, again.exposed) - inside
    forward += prelude_seconds(priced.work, device, engine, compiled=case.compiled)
    launch = forward + backward - exposed - gemm - attention - memory - inside
    if engine.receives_all_at_once:
        forward, backward, launch = (
            forward + costs.pass_seconds,
            backward + costs.pass_seconds,
            launch + 2 * costs.pass_seconds,
        )
    # Each of its chunks of the model is passed by itself.
    passing = on_processor(device, engine.pass_seconds) * case.virtual_stages
    forward, backward, launch = forward + passing, backward + passing, launch + 2 * passing
    extra = _extra(case, stage, priced, weights, attention, gemm)
    forward += sum(extra.values()) / 3
    backward += 2 * sum(extra.values()) / 3
    start, reduce = _synchronised(case, share, plain, engine)
    end = TimeTerms(
        dp_seconds=reduce,
        optimizer_seconds=on_processor(device, engine.step_seconds)
        + _optimizer_seconds(stage, priced, weights, engine)
        + case.optimizer_operations * float(weights @ priced.parameters) * engine.dispatch * device.dispatch_seconds,
        pp_seconds=float((weights * costs.tie_seconds[:, priced.columns[0]]).max(initial=0.0)),
        offload_seconds=_offloaded_step(case, stage, priced, weights),
    )
    after = int(np.flatnonzero(weights > 0)[-1])
    hop = 0.0
    if p < case.pp - 1:
        hops = priced.scattered_seconds if engine.scatters_messages else costs.hop_seconds
        hop = engine.hop_seconds + float(hops[min(after, len(hops) - 1)])
    return _StageSeconds(
        stage=Stage(forward_seconds=forward, backward_seconds=backward, send_seconds=hop, start_seconds=start),
        terms=TimeTerms(
            gemm_seconds=gemm, attention_seconds=attention, memory_bound_seconds=memory, launch_seconds=launch,
            tp_seconds=inside, dp_seconds=exposed, **extra,
        ),
        end=end,
        norm_seconds=costs.norm_seconds,
    )  # fmt: skip


def _both(case: Case, share: Share, device: Device, engine: Engine) -> tuple[BlockSeconds, BlockSeconds]:
    """Without and with recomputation; where a stage has only one of the two, that one twice."""
    priced = share.priced
    found = [
        block_seconds(priced.work, priced.costs, device, engine, column, compiled=case.compiled)
        for column in priced.columns[: 2 if any(stage.recompute_share for stage in case.stages) else 1]
    ]
    return found[0], found[-1]


def _extra(
    case: Case, stage: StageCase, priced: Priced, weights: Floats, attention: float, gemm: float
) -> dict[str, float]:
    """Seconds of one micro-batch, both passes, of what the graph does not hold: cp, ep, activations to the host."""
    spec, cluster = case.spec, case.cluster
    layers = float(weights[priced.is_layer].sum())
    tokens = spec.sequence * stage.micro_batch
    extra = {}
    if case.cp > 1:
        # Keys and values go round once forward, with their gradients once more backward, beside attention
        # (Liu et al. 2023, arXiv 2310.01889).
        group = axis_group(cluster, {"pp": case.pp, "dp": stage.dp, "cp": case.cp, "tp": stage.tp}, "cp")
        heads = max(1, spec.key_value_heads // stage.tp)
        num_bytes = 2.0 * 2 * tokens * case.cp * heads * spec.head
        link = 3 * layers * all_gather_seconds(num_bytes, group)
        extra["cp_seconds"] = max(0.0, link - 0.8 * attention) + 0.05 * link
    if case.ep > 1 and spec.experts:
        # Tokens go to their experts and back, forward and backward (Lepikhin et al. 2020, arXiv 2006.16668).
        ep = min(case.ep, max(1, stage.dp * case.cp))
        group = axis_group(
            cluster, {"pp": case.pp, "dp": max(1, stage.dp * case.cp // ep), "ep": ep, "tp": stage.tp}, "ep"
        )
        num_bytes = 2.0 * tokens * spec.experts_per_token * spec.hidden / (stage.tp if case.sequence_parallel else 1)
        extra["ep_seconds"] = 4 * layers * all_to_all_seconds(num_bytes, group)
    if stage.offloaded_activations:
        kept = float(weights @ priced.costs.activation_bytes[:, priced.columns[1 if stage.recompute_share else 0]])
        moved = 2 * stage.offloaded_activations * kept / _host_rate(case)
        extra["offload_seconds"] = exposed_copy_seconds(moved, gemm + attention)
    if stage.offloaded_parameters or stage.offloaded_gradients:
        extra["offload_seconds"] = extra.get("offload_seconds", 0.0) + _streamed(
            case, stage, priced, weights, gemm + attention
        )
    return extra


def _host_rate(case: Case) -> float:
    """Bytes a second between host memory and a device while all of its node that are used copy."""
    used = min(case.cluster.devices_per_node, sum(stage.tp * stage.dp for stage in case.stages) * case.cp)
    return copy_bytes_per_second(case.host, case.cluster, used)


def _streamed(case: Case, stage: StageCase, priced: Priced, weights: Floats, beside: float) -> float:
    """Seconds of one micro-batch: parameters from the host in both passes, gradients to it (`planner.offload`).

    Where devices have no link of their own, gathers and copies take the same one, one after the other.
    """
    policy = precision_named(priced.costs.precision)
    elements = float(weights @ priced.elements)
    own = elements / max(1, case.shards)
    num_bytes = 2 * stage.offloaded_parameters * policy.compute_bytes * own
    num_bytes += stage.offloaded_gradients * policy.reduce_bytes * own * gradient_copies(case.num_microbatches)
    same_link = 0.0
    if case.cluster.intra_node_link.kind == "pcie" and case.zero >= 2:
        same_link = reduce_scatter_seconds(policy.reduce_bytes * elements, priced.groups.shards)
        if case.zero == 3:
            same_link += 2 * all_gather_seconds(policy.compute_bytes * elements, priced.groups.shards)
    return exposed_copy_seconds(num_bytes / _host_rate(case), beside, same_link=same_link)


def _synchronised(case: Case, share: Share, plain: BlockSeconds, engine: Engine) -> tuple[float, float]:
    """Seconds before the first pass and after the last one: gathers and reductions of data parallelism."""
    priced, weights = share.priced, share.weights
    costs = priced.costs
    zero = costs.strategies[priced.columns[0]].zero
    gather, reduce = float(weights @ plain.gather), float(weights @ plain.reduce)
    if engine.by_block or zero >= 2:
        return gather, reduce
    if share.stage.dp * case.cp == 1:
        return 0.0, 0.0
    return in_one_piece(
        float(weights @ priced.elements), zero, engine, precision_named(costs.precision), priced.groups,
        forward_seconds=float(weights @ plain.forward), backward_seconds=float(weights @ plain.backward),
    )  # fmt: skip


def _optimizer_seconds(stage: StageCase, priced: Priced, weights: Floats, engine: Engine) -> float:
    """The step on the device, of what is not stepped on the host."""
    whole = float(weights @ priced.costs.optimizer_seconds[:, priced.columns[0]])
    return (1 - stage.offloaded_optimizer) * engine.optimizer_traffic * whole


def _offloaded_step(case: Case, stage: StageCase, priced: Priced, weights: Floats) -> float:
    """Gradients to the host, Adam on the CPU, parameters back: once a step, of a rank's own part."""
    if not stage.offloaded_optimizer:
        return 0.0
    own = stage.offloaded_optimizer * float(weights @ priced.elements) / max(1, case.shards)
    copied = 4 * (1 - stage.offloaded_gradients) + 2 * (1 - stage.offloaded_parameters)
    processes = min(case.cluster.devices_per_node, sum(each.tp * each.dp for each in case.stages) * case.cp)
    return copied * own / _host_rate(case) + adam_seconds(own, case.host, processes)


def _pipeline(stages: Sequence[Stage], m: int) -> tuple[list[float], list[float]]:
    """`simulate.run_pipeline`, ends and transfers; a long one by what its last micro-batches take each."""
    if len(stages) == 1:
        one = stages[0]
        return [one.start_seconds + m * (one.forward_seconds + one.backward_seconds)], [0.0]
    steady = LONG_RUN * len(stages)
    if m <= steady + 2:
        found = run_pipeline(stages, "1f1b", m)
        return list(found.end_seconds), list(found.transfer_seconds)
    short, longer = run_pipeline(stages, "1f1b", steady), run_pipeline(stages, "1f1b", steady + 2)
    more = (m - steady) / 2

    def grown(a: Sequence[float], b: Sequence[float]) -> list[float]:
        return [x + more * (y - x) for x, y in zip(a, b, strict=True)]

    return (
        grown(short.end_seconds, longer.end_seconds),
        grown(short.transfer_seconds, longer.transfer_seconds),
    )


def _closed_pipeline(stages: Sequence[Stage], m: int) -> tuple[list[float], list[float]]:
    """1F1B by formula: the slowest stage m times, the others once, two messages for each micro-batch."""
    busy = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    hops = [2 * stage.send_seconds for stage in stages]
    start = max(stage.start_seconds for stage in stages)
    hop = max(hops)
    end = start + (m - 1) * (max(busy) + hop) + sum(busy) + sum(hops)
    return [end] * len(stages), [m * hop] * len(stages)
