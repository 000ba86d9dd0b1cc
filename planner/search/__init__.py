"""`autoplan(model, cluster)`: trace, search, and return the fastest plan that fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, float64, nn

from planner.cluster import Cluster
from planner.engine import STOCK, Engine, engine_named
from planner.errors import ModelError, PlanError
from planner.graph import Graph
from planner.measure import local_cluster
from planner.plan import OPTIMIZERS, Plan
from planner.profile import Profile, measured_cluster
from planner.search.choices import Pins
from planner.search.engine import OBJECTIVES, Progress, Search, Sharded, Statistics, search
from planner.search.measuring import Measuring, as_measured, part_as_measured
from planner.search.sharded import ShardedGraph, divides, prices
from planner.shard.chain import AxisSplit
from planner.shard.loads import check_expert_loads, worst_loads
from planner.shard.localize import localize
from planner.shard.program import Variant, variants
from planner.shard.spread import spread_experts
from planner.trace import priced, trace
from planner.trace.kernels import priced_by_bytes
from planner.zoo.infer import infer_batch

__all__ = [
    "OBJECTIVES", "SAMPLES_PER_DEVICE", "Pins", "Search", "Statistics", "autoplan", "cluster_named",
    "default_precision", "ranked_plans", "search", "search_model",
]  # fmt: skip

SAMPLES_PER_DEVICE = 8  # of the default global batch
LossFunction = Callable[[Any, Any], Tensor]
Loads = Mapping[str, Sequence[int]]  # tokens of each expert, by layer


def autoplan(model: nn.Module, cluster: Cluster | str = "local", **options: Any) -> Plan:
    """The fastest plan that fits, of all ways this release knows to train `model` on `cluster`.

    The weights may be on `meta`; nothing is rewritten. Options are those of `ranked_plans`. Without `global_batch`
    it is 8 samples per device of the cluster, which a note of the plan states.

    Raises:
        PlannerError: no plan fits, or something given is wrong; one sentence.
    """
    return ranked_plans(model, cluster, **options, top=1)[0]


def ranked_plans(
    model: nn.Module,
    cluster: Cluster | str = "local",
    *,
    batch: Any = None,
    loss_fn: LossFunction | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    objective: str = "time",
    fix: Pins | Mapping[str, Any] | str | None = None,
    top: int = 5,
    name: str = "",
    expert_loads: Loads | None = None,
    engine: str = STOCK,
) -> tuple[Plan, ...]:
    """The best plans, best first, each of another configuration.

    `batch` is an example (any number of samples, `meta` will do): a dict of keyword arguments, a tuple of arguments,
    or a tensor; it is inferred for models of the zoo and of Hugging Face. `loss_fn(output, batch)` returns the scalar
    mean loss if the model does not. `precision` is bf16, fp32 or fp64; by default bf16 where the device has it.
    `fix` pins choices, such as {"pp": 2, "zero": 1}. `expert_loads` are what `trainer.expert_loads()` of a run gave,
    tokens of each expert by layer: experts that are spread over ranks are priced by them, not as equally busy.
    `engine` is the training system whose times count, such as megatron (`profiles/engines`): memory and choices stay
    those of stock PyTorch, which runs the plan.

    Raises:
        PlannerError: no plan fits, or something given is wrong; one sentence.
    """
    return search_model(
        model, cluster, batch=batch, loss_fn=loss_fn, global_batch=global_batch, precision=precision,
        optimizer=optimizer, objective=objective, fix=fix, top=top, name=name, expert_loads=expert_loads, engine=engine,
    ).plans  # fmt: skip


def search_model(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    batch: Any = None,
    loss_fn: LossFunction | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    objective: str = "time",
    fix: Pins | Mapping[str, Any] | str | None = None,
    top: int = 5,
    name: str = "",
    expert_loads: Loads | None = None,
    progress: Progress | None = None,
    time_limit_seconds: float | None = None,
    profile: Profile | Measuring | None = None,
    engine: str = STOCK,
) -> Search:
    """`ranked_plans` with the statistics of the search, for the command line.

    Seconds of a `profile` come before those of the roofline; it may be a function that measures a graph.

    Raises:
        PlannerError: no plan fits, or something given is wrong; one sentence.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model must be an nn.Module, is {model!r:.60}; give an instance, not a class")
    if not isinstance(cluster, str | Cluster):
        raise PlanError(f"the cluster must be a Cluster or text such as '2x8xA100-80GB', is {cluster!r:.40}")
    if global_batch is not None and (isinstance(global_batch, bool) or not isinstance(global_batch, int)):
        raise PlanError(f"global_batch must be a whole number of samples, is {global_batch!r:.40}")
    pins = Pins.of(fix)
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    place = cluster_named(cluster) if isinstance(cluster, str) else cluster
    software = _software(engine, place, has_profile=profile is not None)
    notes = [] if software is None else [_NOT_STOCK.format(engine=engine)]
    if global_batch is None:
        global_batch = SAMPLES_PER_DEVICE * place.num_devices
        notes.append(f"no global batch was given: {global_batch}, {SAMPLES_PER_DEVICE} per device, is assumed")
    if batch is None:
        batch = infer_batch(model)
    report = progress or (lambda *_: None)
    device_kind: Literal["cuda", "cpu"] = "cpu" if place.device.kind == "cpu" else "cuda"
    graph = trace(
        model,
        batch,
        precision=precision or default_precision(place),
        loss_fn=loss_fn,
        name=name,
        device_kind=device_kind,
        progress=lambda what: report(what, 0, 0),
    )
    graph, measured = as_measured(graph, profile)
    if measured is not None:
        place = measured_cluster(place, measured)
    if expert_loads is not None:
        check_expert_loads(graph, expert_loads)
        most = min(place.devices_per_node, place.num_devices)
        fixed = [degree for degree in (pins.ep, pins.tp) if degree is not None and degree > 1]
        degrees = fixed or [d for d in range(2, most + 1) if most % d == 0]
        notes.append(_loads_note(expert_loads, degrees))
    notes += [
        f"no graph, so neither pipeline, tensor parallelism nor recomputation: {fallback}"
        for fallback in graph.fallbacks
    ]
    if graph.couples_samples:
        notes.append(f"{graph.couples_samples}: one micro-batch on one data-parallel rank")
    notes += [
        priced_by_bytes(op)
        for op in sorted({k.op for kind in graph.classes for k in kind.kernels if not k.has_formula})
    ]
    if graph.one_data_rank:
        notes.append(f"{graph.one_data_rank}: one data-parallel rank")
    chosen = precision or default_precision(place)
    if chosen != "fp64" and any(p.dtype == float64 for p in model.parameters()):
        notes.append(f"the model has float64 parameters, which are trained in fp32: precision is {chosen}")
    if precision is None and chosen == "fp32" and device_kind == "cuda":
        notes.append(f"{place.device.name} does not compute in bf16, and fp16 cannot be planned: precision is fp32")
    notes += [
        f"{line}: the model's own checkpoint is not run; the plan decides what is recomputed"
        for line in graph.checkpoints
    ]
    if graph.not_separable:
        notes.append(
            f"{graph.not_separable}: the result is that of one device with the same micro-batches, "
            "not that of one whole batch"
        )
    if graph.fallbacks and not graph.couples_samples:
        notes.append(
            "without a graph it is not known whether the loss is a mean over samples; only then batches may be split"
        )
    return search(
        graph, place, global_batch=global_batch, precision=precision or default_precision(place),
        optimizer=optimizer, objective=objective, pins=pins, top=top, notes=notes, progress=progress,
        time_limit_seconds=time_limit_seconds,
        sharded=ways_to_split(graph, place, global_batch, device_kind, expert_loads, profile),
        engine=software,
        runs=() if measured is None else [run for run in measured.runs if run.graph == graph.fingerprint],
    )  # fmt: skip


_NOT_STOCK = (
    "the times are those of {engine} (profiles/engines); memory, and what autoplan run and plan.apply do, are those of "
    "stock PyTorch"
)


def _software(name: str, cluster: Cluster, *, has_profile: bool) -> Engine | None:
    """The engine whose seconds count; None for what is priced anyway."""
    if name == STOCK:
        return None
    engine = engine_named(name)
    if cluster.device.kind == "cpu":
        raise PlanError(f"engine {name} is known on GPUs only, {cluster.name} has none; leave the engine out")
    if has_profile:
        raise PlanError(f"the times of a profile are those of stock PyTorch, not of {name}; leave out one of the two")
    return engine


def _loads_note(loads: Loads, degrees: Sequence[int]) -> str:
    """What measured loads mean for the degrees at which experts may be spread."""
    said = []
    for degree in (d for d in degrees if d > 1 and any(len(tokens) % d == 0 for tokens in loads.values())):
        as_they_are, reordered = worst_loads(loads, degree)
        said.append(f"{as_they_are:.2f} over {degree} ranks of tp ({reordered:.2f} over as many of ep, which reorders)")
    if not said:
        return (
            "the loads of experts that were given change no price: no tp and no ep that is tried divides their number"
        )
    return (
        "experts that are spread over ranks are priced by the loads that were given; tokens of the busiest rank in the "
        f"worst layer, as a multiple of a fair share: {', '.join(said)}"
    )


def ways_to_split(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    device_kind: Literal["cuda", "cpu"],
    expert_loads: Loads | None = None,
    profile: Profile | Measuring | None = None,
) -> Sharded:
    """The ways to split a model, made when the search asks for degrees of axes; with the seconds of a profile.

    A profile may be what measures parts of the model as they are made.

    Of several axes, the ways of the first are those of it alone; the others split the fastest of those that share out
    anything. A model that is faster unsplit is split as over faster links.
    """
    made: dict[tuple[tuple[str, int], ...], tuple[ShardedGraph, ...]] = {}

    def split(*splits: tuple[str, int]) -> tuple[ShardedGraph, ...]:
        if splits not in made:
            made[splits] = tuple(_ways(splits))
        return made[splits]

    def _ways(splits: tuple[tuple[str, int], ...]) -> Iterator[ShardedGraph]:
        ways = split(*splits[:-1]) if len(splits) > 1 else (ShardedGraph(name="", graph=graph),)
        outer = next((way for way in ways if way.divides), ways[0])
        axis, degree = splits[-1]
        as_they_are, reordered = worst_loads(expert_loads or {}, dict(splits).get("ep", degree))
        imbalance = (
            reordered
            if any(p.order for each in outer.splits for s in each.shardings for p in s.parameters)
            else as_they_are
        )
        if axis == "ep":
            found: tuple[Variant, ...] = (
                Variant(name="", shardings=spread_experts(outer.graph, degree, loads=expert_loads)),
            )
            imbalance = reordered if any(p.order for s in found[0].shardings for p in s.parameters) else as_they_are
        else:
            each = prices(graph, cluster, dict(splits), axis, global_batch=global_batch, expert_imbalance=imbalance)
            found = variants(outer.graph, degree, each, whole_parameters=axis == "cp")
            if not any(divides(variant.shardings) for variant in found):
                # Slower than on one rank, of a small model for example; whoever fixes the degree wants it all the same.
                found = variants(outer.graph, degree, each.of_fast_links, whole_parameters=axis == "cp")
        for variant in found:
            local = localize(outer.graph, variant.shardings, degree, axis=axis).graph
            yield ShardedGraph(
                name=variant.name,
                graph=part_as_measured(
                    priced(
                        local, outer.graph, degree, device_kind, axis=axis, outer=dict(splits[:-1]),
                        expert_imbalance=imbalance,
                    ),
                    graph, dict(splits), profile,
                ),
                splits=(*outer.splits, AxisSplit(axis=axis, degree=degree, shardings=variant.shardings)),
                wholes=(*outer.wholes, outer.graph),
            )  # fmt: skip

    return split


def cluster_named(text: str, num_processes: int | None = None, progress: Progress | None = None) -> Cluster:
    """A cluster by preset, file, shorthand, or `local`: this machine, measured.

    Raises:
        ClusterError: nothing has this name.
    """
    if text.strip().lower() == "local":
        report = progress or (lambda *_: None)
        return local_cluster(
            num_processes=num_processes,
            progress=lambda part, what: report(f"measuring this machine: {what}", round(100 * part), 100),
        )
    return Cluster.load(text)


def default_precision(cluster: Cluster) -> str:
    """bf16 where the device has it, else fp32; fp32 on a CPU."""
    return "bf16" if cluster.device.kind != "cpu" and cluster.device.supports("bfloat16") else "fp32"
