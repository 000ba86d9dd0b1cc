"""What people say about distributed training, put to the planner: each claim is a query with figures and a verdict.

    python -m benchmarks.folklore [--json] [NAME...]     # all of them take a few minutes on 2 cores

A verdict follows from the figures: holds, does not hold, or holds if (with what it depends on). Plans that the search
can choose are searched, with what the claim fixes; offload, which it cannot choose yet, is the pricing path of
`autoplan validate` with a pinned plan (`planner.offload`); bucket sizes are `planner.buckets`. Nothing is measured
here: the figures are as good as the predictions in the README's table of accuracy, and offload has few published runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from planner.buckets import DEFAULT_BUCKET_BYTES, bucket_ends, exposed_reduction_seconds, pieces_seconds
from planner.cluster import Cluster, all_links
from planner.collectives import axis_group, group_slowdown
from planner.costs import price
from planner.engine import engine_named
from planner.errors import InfeasibleError
from planner.graph import Graph
from planner.offload import Host, host_named, usual_host
from planner.plan import Mesh, Plan
from planner.search import search, ways_to_split
from planner.search.engine import Sharded
from planner.simulate import Stage, run_pipeline
from planner.trace import trace
from planner.units import GB, GIB, MIB
from planner.validate.cases import case_of
from planner.validate.models import ModelSpec, num_parameters, rank_graph, trace_key
from planner.validate.price import Prediction, predict
from planner.validate.rows import Row
from planner.zoo.bert import BERTConfig
from planner.zoo.gpt import GPTConfig
from planner.zoo.llama import LlamaConfig
from planner.zoo.registry import CONFIGS, build

HOLDS, NOT, IF = "holds", "does not hold", "holds if"
HOSTED = "+ optimizer, gradients on host"
WITHIN = 0.02  # of the best step: as good as the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A claim, what the planner says of it, and what follows."""

    name: str
    claim: str
    origin: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    verdict: str  # HOLDS, NOT or IF
    why: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tested:
    """One case of a claim: its name, and whether the claim is true of it."""

    case: str
    holds: bool


def judged(tested: Iterable[Tested]) -> tuple[str, str]:
    """The verdict over all cases, and the cases that decide it.

    >>> judged([Tested("a", True), Tested("b", False)])
    ('holds if', 'true of a; not of b')
    """
    cases = list(tested)
    true, false = ([c.case for c in cases if c.holds == kind] for kind in (True, False))
    if not false:
        return HOLDS, f"true of {_listed(true)}"
    if not true:
        return NOT, f"not true of {_listed(false)}"
    return IF, f"true of {_listed(true)}; not of {_listed(false)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


# --- models and plans -------------------------------------------------------------------------------

# No model of the zoo has 24 billion parameters; a Llama of this depth and width has 24.1.
SPECS: Mapping[str, ModelSpec] = {
    "llama-24b": ModelSpec(
        architecture="llama", layers=48, hidden=6144, heads=48, key_value_heads=8, ffn_hidden=21504,
        vocabulary=32000, sequence=4096,
    ),
}  # fmt: skip


def spec_of(model: str) -> ModelSpec:
    """Sizes of a model of the zoo."""
    if model in SPECS:
        return SPECS[model]
    config = CONFIGS[model]
    if not isinstance(config, GPTConfig | LlamaConfig | BERTConfig):
        raise KeyError(f"{model} is no transformer of one stack")
    llama = config if isinstance(config, LlamaConfig) else None
    return ModelSpec(
        architecture="llama" if llama else "bert" if isinstance(config, BERTConfig) else "gpt",
        layers=config.layers,
        hidden=config.width,
        heads=config.heads,
        key_value_heads=llama.key_value_heads if llama else config.heads,
        ffn_hidden=llama.hidden if llama else 4 * config.width,
        vocabulary=config.vocabulary,
        sequence=config.context,
    )


@cache
def graph_of(model: str) -> Graph:
    """The graph of a model in bf16. Layers are alike: a transformer is traced shallow and made as deep as it is."""
    if model in SPECS or isinstance(CONFIGS[model], GPTConfig | LlamaConfig | BERTConfig):
        spec = spec_of(model)
        return rank_graph(trace_key(spec, 1, sequence_parallel=False, single_precision=False), spec.layers).graph
    return trace(*build(model, device="meta"), precision="bf16", device_kind="cuda", name=model)


@cache
def ways_of(model: str, cluster: Cluster, global_batch: int) -> Sharded:
    """The ways to split a model over ranks of a cluster, found when they are asked for."""
    return ways_to_split(graph_of(model), cluster, global_batch, "cuda")


@cache
def best_plan(model: str, cluster: Cluster, global_batch: int, fix: str = "") -> Plan | None:
    """The fastest plan with what is fixed, or None where nothing fits."""
    try:
        found = search(
            graph_of(model), cluster, global_batch=global_batch, pins=fix, top=1,
            sharded=None if "tp=1" in fix else ways_of(model, cluster, global_batch),
        )  # fmt: skip
    except InfeasibleError:
        return None
    return found.plans[0]


def seconds_of(plan: Plan | None) -> float:
    """Of its step; infinite where there is none."""
    return float("inf") if plan is None else plan.prediction.step_seconds


def pinned(
    model: str,
    *,
    gpu: str,
    num_devices: int,
    global_batch: int,
    micro_batch: int,
    zero: int = 3,
    recompute: str = "full",
    optimizer: float = 0.0,
    gradients: float = 0.0,
    parameters: float = 0.0,
    link: str = "",
    host: Host | None = None,
) -> Prediction:
    """A plan that is given, on one node, as FSDP2 of stock PyTorch would run it; shares of its state on the host."""
    spec, has_bf16 = spec_of(model), Cluster.load(gpu).device.supports("bfloat16")
    row = Row(
        id="folklore-1", model=model, layers=spec.layers, hidden=spec.hidden, heads=spec.heads,
        kv_heads=spec.key_value_heads, ffn_hidden=spec.ffn_hidden, vocab=spec.vocabulary, seq_len=spec.sequence,
        gpu=gpu, n_gpus=num_devices, gpus_per_node=num_devices, dp=num_devices, tp=1, pp=1, zero_stage=zero,
        activation_recompute=recompute, precision="bf16" if has_bf16 else "fp16", flash_attention=True,
        micro_batch=micro_batch, global_batch=global_batch,
    )  # fmt: skip
    case = case_of(row)
    cluster = case.cluster
    if link:
        cluster = replace(cluster, intra_node_link=next(each for each in all_links() if each.name == link))
    stages = tuple(
        replace(s, offloaded_optimizer=optimizer, offloaded_gradients=gradients, offloaded_parameters=parameters)
        for s in case.stages
    )
    engine = engine_named("stock")
    return predict(replace(case, engine=engine, cluster=cluster, stages=stages, host=host or case.host))


def best_pinned(micro_batches: Sequence[int], **given: Any) -> tuple[int, Prediction] | None:
    """The micro-batch that is fastest among those that fit, with its prediction; None where none fits."""
    tried = [(size, pinned(micro_batch=size, **given)) for size in micro_batches]
    fitting = [(size, found) for size, found in tried if found.fits]
    return min(fitting, key=lambda each: each[1].seconds, default=None)


def on(cluster: str, *, inter: str = "") -> Cluster:
    """A cluster by shorthand; if a network is named, with one card of it in each node."""
    place = Cluster.load(cluster)
    if not inter:
        return place
    return replace(place, nics_per_node=1, inter_node_link=next(each for each in all_links() if each.name == inter))


# --- the claims -------------------------------------------------------------------------------------


def bubble(model: str = "gpt3-6.7b", stages: Sequence[int] = (2, 4, 8, 16), counts: Sequence[int] = (8, 32)) -> Answer:
    """Equal stages by the simulator, and the best pipeline of a real model."""
    cluster = on("2x8xA100-80GB")
    rows, tested = [], []
    for m in counts:
        for p in stages:
            formula = (p - 1) / (m + p - 1)
            ends = run_pipeline([Stage(forward_seconds=1.0, backward_seconds=2.0, send_seconds=0.0)] * p, "gpipe", m)
            equal = 1 - 3 * m / max(ends.end_seconds)
            plan = best_plan(model, cluster, m, f"pp={p},devices={p},tp=1,num_microbatches={m}")
            real = None if plan is None else plan.prediction.bubble
            rows.append((p, m, percent(formula), percent(equal), percent(real), plan.schedule if plan else "-"))
            tested.append(Tested("equal stages", abs(equal - formula) < 1e-6))
            if real is not None:
                tested.append(Tested(f"{model} at {p} stages, m {m}", abs(real - formula) <= WITHIN))
    verdict, why = judged(tested)
    return Answer(
        name="bubble",
        claim="of p stages and m micro-batches, (p-1)/(m+p-1) of the time is bubble",
        origin="Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473), section 2.2",
        header=("stages", "m", "formula", "equal stages", model, "schedule"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (within {WITHIN:.0%} of the step)",
        notes=(
            "the model's stages are whole blocks, with embedding and head; its bubble is what the simulator finds idle",
        ),
    )


def pcie_box(
    models: Sequence[str] = ("bert-large", "gpt2-xl"),
    boxes: Sequence[str] = ("8xA10G", "8xRTX4090", "8xA100-80GB-PCIe"),
    global_batch: int = 256,
) -> Answer:
    """The best plans on 4 and on 8 devices, and plain data parallelism."""
    rows, tested = [], []
    for box in boxes:
        for model in models:
            times = {}
            for n in (4, 8):
                times[n] = seconds_of(best_plan(model, on(box), global_batch, f"devices={n}"))
                times[-n] = seconds_of(best_plan(model, on(box), global_batch, f"devices={n},pp=1,tp=1,zero=0"))
            gain, plain = times[4] / times[8], ratio(times[-4], times[-8])
            rows.append((box, model, text(times[4]), text(times[8]), times_text(gain), times_text(plain)))
            tested.append(Tested(f"{model} on {box} (x{gain:.2f})", gain < 1.3))
    verdict, why = judged(tested)
    return Answer(
        name="pcie-box",
        claim=f"in one PCIe box 8 GPUs are hardly faster than 4 (less than 1.3 times, global batch {global_batch})",
        origin="reports of users of boxes without NVLink (huggingface/accelerate issue 71, kohya-ss/sd-scripts issue "
        "1434); the figure of 256 is of unknown origin",
        header=("box", "model", "4 GPUs", "8 GPUs", "gain", "gain of DDP"),
        rows=tuple(rows),
        verdict=verdict,
        why=why,
        notes=("gain: step on 4 over step on 8, best plans; of DDP: with ZeRO-0 alone, - where it does not fit",),
    )


def offload_13b(
    model: str = "gpt3-13b",
    gpus: Sequence[str] = ("V100-32GB", "A100-40GB", "A100-80GB"),
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16),
    global_batch: int = 64,
) -> Answer:
    """One device: nothing, recomputation, and states of training in host memory."""
    ways: Mapping[str, Mapping[str, Any]] = {
        "nothing": {"recompute": "none"},
        "recompute": {},
        HOSTED: {"optimizer": 1.0, "gradients": 1.0},
        "+ parameters on host": {"optimizer": 1.0, "gradients": 1.0, "parameters": 1.0},
    }
    rows, tested, alone = [], [], ""
    spec = spec_of(model)
    tokens = global_batch * spec.sequence
    count = num_parameters(spec)
    for gpu in gpus:
        fits, host = {}, usual_host(Cluster.load(gpu).device)
        for way, given in ways.items():
            pins: dict[str, Any] = {
                "model": model, "gpu": gpu, "num_devices": 1, "global_batch": global_batch, "zero": 2, **given
            }  # fmt: skip
            least = pinned(micro_batch=1, **pins)
            found = best_pinned(micro_batches, **pins)
            on_host = 16 * count * ("optimizer" in given) + 2 * count * ("parameters" in given)
            fits[way] = found is not None and on_host <= host.memory_bytes
            rows.append(
                (
                    gpu, way, f"{max(least.peak_bytes) / GIB:.1f} GiB", f"{least.capacity_bytes / GIB:.1f} GiB",
                    found[0] if found else "-", text(found[1].seconds) if found else "-",
                    f"{6 * count * tokens / found[1].seconds / 1e12:.0f}" if found else "-",
                    percent(found[1].terms.offload_seconds / found[1].seconds) if found else "-",
                )
            )  # fmt: skip
            if way == HOSTED:
                alone = percent(least.terms.offload_seconds / least.seconds)
        tested.append(Tested(gpu, fits[HOSTED] and not fits["recompute"]))
    verdict, why = judged(tested)
    return Answer(
        name="offload-13b",
        claim="13 billion parameters train on one A100 with the optimizer on the host and recomputation, not without",
        origin="Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840): 13 B on one V100 of 32 GB",
        header=("GPU", "way", "at 1 sample", "capacity", "micro-batch", "step", "TFLOP/s", "for offload"),
        rows=tuple(rows),
        verdict=verdict,
        why=why,
        notes=(
            f"{count / 1e9:.1f} B parameters, {global_batch} samples of {spec.sequence} tokens a step; the host needs "
            f"{16 * count / GB:.0f} GB (masters, moments, gradients in float32), {18 * count / GB:.0f} GB with the "
            "parameters",
            f"with one sample a micro-batch, offload of optimizer and gradients is {alone} of the step on {gpus[-1]}",
        ),
    )


def zero_rule(
    models: Mapping[str, int] | None = None,
    counts: Sequence[int] = (2, 4, 8, 16, 32, 64),
) -> Answer:
    """Every stage at every count of devices, data parallel alone; and the planner's free choice of stages."""
    rows, tested, worst = [], [], 0.0
    for model, samples in (models or {"gpt2-xl": 8, "llama2-7b": 4}).items():
        for n in counts:
            cluster = on(f"{-(-n // 8)}x8xA100-80GB") if n >= 8 else on(f"{n}xA100-80GB")
            common = f"pp=1,tp=1,devices={n},dp_shard={n}"
            times = {
                zero: seconds_of(best_plan(model, cluster, samples * n, f"{common},zero={zero}")) for zero in (1, 2, 3)
            }
            rule = 1 if n <= 4 else 2 if n <= 16 else 3
            best = min(times.values())
            worst = max(worst, ratio(max(times.values()), best) - 1)
            free = best_plan(model, cluster, samples * n, "pp=1,tp=1")
            rows.append(
                (
                    model, n, *(text(times[zero]) for zero in (1, 2, 3)), f"ZeRO-{rule}",
                    percent(ratio(times[rule], best) - 1), _zeros(free), text(seconds_of(free)),
                )
            )  # fmt: skip
            tested.append(Tested(f"{model} on {n}", times[rule] <= (1 + WITHIN) * best < float("inf")))
    verdict, why = judged(tested)
    return Answer(
        name="zero-rule",
        claim="ZeRO-1 up to 4 GPUs, ZeRO-2 up to 16, ZeRO-3 beyond",
        origin="a rule of thumb of unknown origin; the DeepSpeed page of Hugging Face: the lowest stage that fits",
        header=("model", "GPUs", "ZeRO-1", "ZeRO-2", "ZeRO-3", "rule", "slower by", "planner", "its step"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (within {WITHIN:.0%} of the fastest of the three)",
        notes=(f"the slowest of the three is at most {worst:.1%} slower than the fastest, where all fit",),
    )


def _zeros(plan: Plan | None) -> str:
    if plan is None:
        return "nothing fits"
    stages = sorted({block.zero for stage in plan.stages for block in stage.blocks})
    shards = plan.mesh.dp_shard
    over = f" over {shards}" if 1 < shards < plan.mesh.num_devices else ""
    return f"ZeRO-{'/'.join(map(str, stages))}{over} on {plan.mesh.num_devices}"


def ddp_bucket(
    models: Mapping[str, int] | None = None,
    clusters: Sequence[tuple[str, str]] = (
        ("8xA100-80GB", ""), ("8xRTX4090", ""), ("4x8xA100-80GB", ""), ("4x8xA100-80GB", "ethernet-25g"),
    ),
    caps_mib: Sequence[int] = (1, 5, 25, 100, 250, 1000),
) -> Answer:  # fmt: skip
    """What the gradient reduction adds to the backward pass, by the cap of a bucket."""
    rows, tested, notes = [], [], []
    for model, micro_batch in (models or {"resnet50": 64, "bert-large": 8, "gpt2-xl": 4}).items():
        graph = graph_of(model)
        for name, inter in clusters:
            cluster = on(name, inter=inter)
            n = cluster.num_devices
            mesh = Mesh(dp_replicate=n)
            costs = price(
                graph, cluster, mesh=mesh, micro_batch=micro_batch, num_microbatches=1, schedule="1f1b",
                precision="bf16", optimizer="adamw",
            )  # fmt: skip
            group = axis_group(cluster, {"dp_replicate": n}, "dp_replicate")
            sizes, backward = gradients_in_order(graph, costs.backward_seconds[:, 0].tolist())
            compute = float(costs.seconds[:, 0].sum())
            slow = group_slowdown(cluster, group)
            added = {cap: exposed_reduction_seconds(sizes, backward, cap * MIB, group, slow) for cap in caps_mib}
            where = f"{model} on {name}{f' by {inter}' if inter else ''}"
            best = min(added, key=lambda cap: added[cap])
            default = exposed_reduction_seconds(sizes, backward, DEFAULT_BUCKET_BYTES, group, slow)
            rows.append((where, text(compute), *(text(added[cap]) for cap in caps_mib), f"{best} MiB",
                         percent((default - added[best]) / (compute + added[best]))))  # fmt: skip
            tested.append(Tested(where, default - added[best] <= WITHIN * (compute + added[best])))
        notes.append(f"{model}: {len(bucket_ends(sizes, DEFAULT_BUCKET_BYTES))} buckets of 25 MiB")
    verdict, why = judged(tested)
    return Answer(
        name="ddp-bucket",
        claim="the default bucket of DDP, 25 MB, is right; its size need not be tuned",
        origin="Li et al. 2020 (arXiv 2006.15704), section 5; that it is too small for large models: "
        "pytorch/pytorch issue 118421",
        header=("case", "passes", *(f"+ at {cap} MiB" for cap in caps_mib), "best", "lost at 25"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (within {WITHIN:.0%} of the step at the best size)",
        notes=(
            *notes,
            "one micro-batch a step; gradients in float32. The planner's ZeRO-0 reduces block by block",
        ),
    )


def gradients_in_order(graph: Graph, backward: Sequence[float]) -> tuple[list[float], list[float]]:
    """Bytes of gradients (float32) from the last block to the first, and backward seconds from one to the next.

    Inside of a block the seconds are divided by bytes: most of them are those of its matrix products.
    """
    sizes: list[float] = []
    seconds: list[float] = []
    seen: set[int] = set()
    late = 0.0
    for block, spent in zip(reversed(graph.blocks), reversed(backward), strict=True):
        own = [p for p in block.parameters if p not in seen and graph.tensors[p].requires_grad]
        seen.update(own)
        num_bytes = [4.0 * graph.tensors[p].num_elements.fixed for p in reversed(own)]
        whole = sum(num_bytes)
        if not whole:
            late += float(spent)
            continue
        sizes += num_bytes
        seconds += [late * (i == 0) + float(spent) * size / whole for i, size in enumerate(num_bytes)]
        late = 0.0
    if late:
        seconds[-1] += late
    return sizes, seconds


def partition(
    model: str = "gpt3-175b", cluster: str = "8x8xA100-80GB", micro_batches: Sequence[int] = (1, 4)
) -> Answer:
    """ZeRO-3 of a model in pieces of several sizes: what gathers add to a forward pass, and bytes of live pieces."""
    place = on(cluster)
    n = place.num_devices
    graph = graph_of(model)
    count = sum(t.num_elements.fixed for t in graph.tensors if t.kind == "parameter")
    whole = 2.0 * count
    layers = sum(block.kind == "block" for block in graph.blocks)
    sizes = {
        "W/(64N)": whole / (64 * n), "W/(16N)": whole / (16 * n), "W/(4N)": whole / (4 * n), "W/N": whole / n,
        "a layer": whole / layers,
    }  # fmt: skip
    group = axis_group(place, {"dp_shard": n}, "dp_shard")
    slow = group_slowdown(place, group)
    rows, tested = [], []
    for micro_batch in micro_batches:
        costs = price(
            graph, place, mesh=Mesh(dp_shard=n), micro_batch=micro_batch, num_microbatches=1, schedule="1f1b",
            precision="bf16", optimizer="adamw",
        )  # fmt: skip
        column = next(i for i, s in enumerate(costs.strategies) if (s.zero, s.recompute) == (1, 0))
        compute = float(costs.forward_seconds[:, column].sum())
        added = {name: pieces_seconds(whole, size, compute, group, slow) for name, size in sizes.items()}
        best = compute + min(added.values())
        for name, size in sizes.items():
            rows.append((micro_batch, name, f"{size / MIB:.0f} MiB", round(whole / size), f"{2 * size / GIB:.2f} GiB",
                         text(compute), text(added[name]), percent((compute + added[name]) / best - 1)))  # fmt: skip
        tested.append(Tested(f"micro-batch {micro_batch}", compute + added["W/(4N)"] <= (1 + WITHIN) * best))
    verdict, why = judged(tested)
    live = 2 * sizes["W/(4N)"] / place.capacity_bytes
    return Answer(
        name="partition",
        claim=f"parameters of W bytes over N GPUs are best moved in partitions of W/(4N) ({model} on {n})",
        origin="unknown; read here as the unit in which ZeRO-3 gathers parameters",
        header=("micro-batch", "unit", "bytes", "pieces", "two live", "forward", "gathers add", "over the best"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (within {WITHIN:.0%} of the best unit); two live units take {live:.1%} of a device",
        notes=("FSDP2, which the planner prices, gathers a block at a time",),
    )


def gpus_24b(
    model: str = "llama-24b",
    gpus: Sequence[str] = ("A100-40GB", "A100-80GB", "H200"),
    global_batch: int = 64,
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16),
) -> Answer:
    """The best plan on 4 and on 8 devices; where 4 do not hold it, with the optimizer on the host."""
    count = sum(t.num_elements.fixed for t in graph_of(model).tensors if t.kind == "parameter")
    rows, tested = [], []
    for gpu in gpus:
        cluster = on(f"8x{gpu}")
        four, eight = (best_plan(model, cluster, global_batch, f"devices={n}") for n in (4, 8))
        hosted = best_pinned(
            [size for size in micro_batches if global_batch // 4 % size == 0], model=model, gpu=gpu, num_devices=4,
            global_batch=global_batch, optimizer=1.0, gradients=1.0, parameters=1.0,
        )  # fmt: skip
        gain = ratio(seconds_of(four), seconds_of(eight))
        offloaded = ratio(hosted[1].seconds if hosted else float("inf"), seconds_of(eight))
        rows.append((gpu, text(seconds_of(four)), text(seconds_of(eight)), times_text(gain),
                     text(hosted[1].seconds) if hosted else "-", times_text(offloaded)))  # fmt: skip
        tested.append(Tested(gpu, four is None and eight is not None))
    verdict, why = judged(tested)
    return Answer(
        name="gpus-24b",
        claim=f"a model of 24 billion parameters needs 8 GPUs; 4 do not hold it ({count / 1e9:.1f} B here)",
        origin=f"16 bytes of a parameter: {16 * count / GB:.0f} GB, {16 * count / GB / 4:.0f} GB of each of 4",
        header=("GPU", "4 GPUs", "8 GPUs", "gain of 8", "4 with offload", "against 8"),
        rows=tuple(rows),
        verdict=verdict,
        why=why,
        notes=(f"best plans, {global_batch} samples of {spec_of(model).sequence} tokens; - : nothing fits",),
    )


def zero3_link(
    model: str = "llama2-13b", links: Sequence[str] = ("nvlink3", "pcie4", "pcie4-staged"),
    micro_batches: Sequence[int] = (1, 4, 16), num_microbatches: int = 4,
) -> Answer:  # fmt: skip
    """Links between 8 devices under ZeRO-3 with all states on the host, by micro-batch."""
    rows, tested = [], []
    for size in micro_batches:
        times, without = {}, {}
        for link in links:
            given: dict[str, Any] = {
                "model": model, "gpu": "A100-80GB", "num_devices": 8, "micro_batch": size,
                "global_batch": 8 * size * num_microbatches, "link": link,
            }  # fmt: skip
            times[link] = pinned(**given, optimizer=1.0, gradients=1.0, parameters=1.0)
            without[link] = pinned(**given)
        first = times[links[0]].seconds
        for link in links:
            slower = times[link].seconds / first
            rows.append((size, link, text(times[link].seconds), times_text(slower),
                         percent(times[link].terms.offload_seconds / times[link].seconds), text(without[link].seconds),
                         times_text(without[link].seconds / without[links[0]].seconds),
                         "yes" if times[link].fits else "no"))  # fmt: skip
            if link != links[0]:
                tested.append(Tested(f"{link} at micro-batch {size} (x{slower:.2f})", slower <= 1.1))
    verdict, why = judged(tested)
    return Answer(
        name="zero3-link",
        claim="under ZeRO-3 with offload NVLink is not worth its price: PCIe to the host is the bottleneck anyway",
        origin="unknown; against it Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), section 6.1: each GPU "
        "fetches its part by its own PCIe link, the rest comes by NVLink",
        header=("micro-batch", "link", "step", "against NVLink", "for offload", "no offload", "against NVLink", "fits"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (at most 1.1 times the step)",
        notes=(f"{model} on 8 A100-80GB, {num_microbatches} micro-batches a step, recomputed, all states on the host",),
    )


def host_memory(
    model: str = "llama2-13b", batches: Sequence[tuple[int, int]] = ((1, 1), (8, 1), (8, 16)),
    speeds: Sequence[float] = (0.5, 1.0, 2.0),
) -> Answer:  # fmt: skip
    """Host memory at half, its own and twice its speed, by batches of a device; and with one thread a process."""
    base = host_named("dgx-a100")
    hosts = {f"x{speed:g}": replace(base, memory_bytes_per_second=speed * base.memory_bytes_per_second)
             for speed in speeds}  # fmt: skip
    hosts["x1, one thread"] = replace(base, threads_per_process=1)
    hosts["desktop"] = host_named("desktop")
    rows, tested, thread = [], [], 0.0
    for micro_batch, m in batches:
        times = {
            name: pinned(
                model=model, gpu="A100-80GB", num_devices=8, micro_batch=micro_batch, global_batch=8 * micro_batch * m,
                optimizer=1.0, gradients=1.0, parameters=1.0, host=host,
            )
            for name, host in hosts.items()
        }  # fmt: skip
        one = times["x1"].seconds
        for name, found in times.items():
            rows.append((f"{m} x {micro_batch}", name, f"{hosts[name].memory_bytes_per_second / GB:.0f} GB/s",
                         text(found.seconds), times_text(found.seconds / one),
                         percent(found.terms.offload_seconds / found.seconds)))  # fmt: skip
        slow, fast = (times[f"x{speed:g}"].seconds / one for speed in (min(speeds), max(speeds)))
        thread = thread or times["x1, one thread"].seconds / one
        batch = f"{m} x {micro_batch} samples a step"
        tested.append(Tested(f"{batch} (half the speed x{slow:.2f}, twice x{fast:.2f})", slow >= 1.2))
    verdict, why = judged(tested)
    return Answer(
        name="host-memory",
        claim="with offload the speed of host memory decides the step: half of it is felt (1.2 times and more)",
        origin="Adam on the processor moves 28 bytes of each parameter (ZeRO-Offload, arXiv 2101.06840, section 4)",
        header=("samples", "host memory", "bandwidth", "step", "against x1", "for offload"),
        rows=tuple(rows),
        verdict=verdict,
        why=why,
        notes=(
            f"{model} on 8 A100-80GB, ZeRO-3 with all states on the host; samples of a device, micro-batches x size",
            "torchrun gives a process one thread (OMP_NUM_THREADS=1): "
            f"x{thread:.2f} at {batches[0][1]} x {batches[0][0]}",
        ),
    )


def checkpointing(
    models: Mapping[str, int] | None = None, selective: Sequence[tuple[str, int]] = (("gpt3-175b", 8),)
) -> Answer:
    """Saved activations without and with recomputation of every block; and of the core of attention alone."""
    rows, tested = [], []
    for model, micro_batch in (models or {"gpt2-xl": 4, "llama2-7b": 1, "bert-large": 8, "resnet50": 64}).items():
        graph = graph_of(model)
        costs = price(
            graph, on("1xA100-80GB"), mesh=Mesh(), micro_batch=micro_batch, num_microbatches=1, schedule="1f1b",
            precision="bf16", optimizer="adamw",
        )  # fmt: skip
        kept = [float(costs.activation_bytes[:, column].sum()) for column in (0, 1)]
        # Beside what is kept, one block that is recomputed saves everything anew.
        again = kept[1] + float((costs.activation_bytes[:, 0] - costs.activation_bytes[:, 1]).max())
        slower = float(costs.seconds[:, 1].sum() / costs.seconds[:, 0].sum())
        rows.append((model, "full", f"{kept[0] / GIB:.2f} GiB", f"{kept[1] / GIB:.2f} GiB",
                     percent(1 - kept[1] / kept[0]), percent(1 - again / kept[0]), times_text(slower)))  # fmt: skip
        tested.append(Tested(f"{model}, all blocks", 1 - again / kept[0] >= 0.7 - WITHIN))
    for model, tp in selective:
        for dropout in (0.1, 0.0):
            found = {way: _unfused(model, tp, way, dropout) for way in ("none", "selective", "full")}
            plain = found["none"].memory.activations_bytes
            for way in ("selective", "full"):
                kept_bytes = found[way].memory.activations_bytes
                rows.append((f"{model}, unfused, dropout {dropout:g}, tp {tp}", way, f"{plain / GIB:.2f} GiB",
                             f"{kept_bytes / GIB:.2f} GiB", percent(1 - kept_bytes / plain), "-",
                             times_text(found[way].seconds / found["none"].seconds)))  # fmt: skip
                tested.append(Tested(f"{model}, {way}, dropout {dropout:g}", 1 - kept_bytes / plain >= 0.7 - WITHIN))
    verdict, why = judged(tested)
    return Answer(
        name="checkpointing",
        claim="activation checkpointing saves 70 % of the memory of activations",
        origin="Korthikanti et al. 2022 (arXiv 2205.05198), section 5: 70 % (GPT-3) by recomputing the core of "
        "attention, which is kept no more where attention is fused",
        header=("model", "recomputed", "kept without", "kept with", "saved", "with a block at work", "passes"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (within {WITHIN:.0%})",
        notes=("passes: forward and backward, as a multiple of those without recomputation",),
    )


def _unfused(model: str, tp: int, recompute: str, dropout: float) -> Prediction:
    """One micro-batch of one sample as Megatron-LM runs it on `tp` A100, attention as three operators."""
    spec = spec_of(model)
    row = Row(
        id="folklore-1", model=model, layers=spec.layers, hidden=spec.hidden, heads=spec.heads,
        ffn_hidden=spec.ffn_hidden, vocab=spec.vocabulary, seq_len=spec.sequence, gpu="A100-80GB", n_gpus=tp,
        gpus_per_node=8, dp=1, tp=tp, pp=1, activation_recompute=recompute, precision="bf16", flash_attention=False,
        sequence_parallel=True, micro_batch=1, global_batch=1,
    )  # fmt: skip
    case = case_of(row)
    return predict(replace(case, dropout=dropout, spec=replace(case.spec, dropout=dropout)))


def hybrid(
    models: Sequence[tuple[str, int]] = (("gpt3-2.7b", 256), ("gpt3-13b", 256), ("gpt3-13b", 32)),
    networks: Sequence[tuple[str, str]] = (
        ("4x8xA100-80GB", ""), ("4x8xA100-80GB", "ethernet-100g"), ("4x8xA100-80GB", "ethernet-10g"),
    ),
) -> Answer:  # fmt: skip
    """The best plan against the best that is data parallel alone, with ZeRO over all ranks and without."""
    rows, tested = [], []
    for model, global_batch in models:
        for name, inter in networks:
            cluster = on(name, inter=inter)
            n = cluster.num_devices
            common = f"pp=1,tp=1,devices={n}"
            replicated = best_plan(model, cluster, global_batch, f"{common},zero=0")
            sharded = best_plan(model, cluster, global_batch, f"{common},dp_shard={n}")
            free = best_plan(model, cluster, global_batch, f"devices={n}")
            gain = ratio(seconds_of(sharded), seconds_of(free))
            where = f"{model}, batch {global_batch}, {cluster.nics_per_node} x {cluster.inter_node_link.name}"
            rows.append((where, text(seconds_of(replicated)), text(seconds_of(sharded)),
                         text(seconds_of(free)), _mesh(free), times_text(gain)))  # fmt: skip
            tested.append(Tested(f"{where} (x{gain:.2f})", 4 <= gain <= 8))
    verdict, why = judged(tested)
    return Answer(
        name="hybrid",
        claim="on 32 A100 hybrid parallelism is 4 to 8 times as fast as pure data parallelism",
        origin="unknown",
        header=("case", "DDP", "ZeRO over 32", "best", "its mesh", "gain"),
        rows=tuple(rows),
        verdict=verdict,
        why=f"{why} (4 to 8 times)",
        notes=("gain: over ZeRO over all 32 ranks, the pure data parallelism that fits; DDP is - where it does not",),
    )


def _mesh(plan: Plan | None) -> str:
    if plan is None:
        return "-"
    sizes = {name: getattr(plan.mesh, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


QUERIES: Mapping[str, Callable[[], Answer]] = {
    "bubble": bubble,
    "pcie-box": pcie_box,
    "offload-13b": offload_13b,
    "zero-rule": zero_rule,
    "ddp-bucket": ddp_bucket,
    "partition": partition,
    "gpus-24b": gpus_24b,
    "zero3-link": zero3_link,
    "host-memory": host_memory,
    "checkpointing": checkpointing,
    "hybrid": hybrid,
}


# --- text -------------------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    """A share, or - where there is none."""
    return "-" if share is None or share != share or share == float("inf") else f"{share:.1%}"


def text(seconds: float) -> str:
    """Seconds in a unit that can be read, or - where there is no plan."""
    if seconds == float("inf"):
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def ratio(one: float, other: float) -> float:
    """One over the other; nan where there is none of either."""
    return float("nan") if float("inf") in (one, other) else one / other


def times_text(factor: float) -> str:
    """A factor, or - where there is none."""
    return "-" if factor != factor else f"{factor:.2f}x"


def printed(answer: Answer) -> str:
    """An answer as text."""
    table = [answer.header, *(tuple(str(cell) for cell in row) for row in answer.rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(answer.header))]
    lines = [f"{answer.name}: {answer.claim}", f"  origin: {answer.origin}"]
    lines += ["    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
              for row in table]  # fmt: skip
    lines += [f"  {note}" for note in answer.notes]
    return "\n".join([*lines, f"  -> {answer.verdict.upper()}: {answer.why}", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUERIES)}")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in QUERIES]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(QUERIES)}")
    names = given.names or list(QUERIES)
    answers = []
    for number, name in enumerate(names, 1):
        start = time.perf_counter()
        answers.append(QUERIES[name]())
        spent = time.perf_counter() - start
        print(f"{number} of {len(names)}: {name}, {spent:.0f} s", file=sys.stderr, flush=True)
        if not given.json:
            print(printed(answers[-1]), flush=True)
    if given.json:
        print(json.dumps([asdict(answer) for answer in answers], indent=1))


if __name__ == "__main__":
    main()
