"""From a row to a case that can be priced: cluster, mesh, micro-batches, stages and what the software does.

Nothing is guessed silently: where a row leaves a choice open and no data about its source closes it, the row is
refused, and what was assumed is listed in the notes of the case.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from planner.cluster import Cluster, Device, all_links, device_named
from planner.engine import Engine, engine_named
from planner.errors import PlannerError
from planner.offload import Host, usual_host
from planner.validate.conventions import Conventions, conventions
from planner.validate.data import table
from planner.validate.models import ModelSpec, TraceKey, is_frozen, model_of, trace_key
from planner.validate.rows import LENGTH, RefusedError, Row

Attention = Literal["flash", "unfused"]
Recompute = Literal["none", "selective", "full"]
Pipeline = Literal["1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v"]

# Columns of a row that no plan decides, and what of a case a plan does decide.
NO_CHOICE = (
    "model", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "seq_len", "gpu", "gpu_mem_gb", "n_gpus",
    "gpus_per_node", "interconnect", "global_batch", "precision", "flash_attention", "compiled",
)  # fmt: skip
CHOICE = (
    "stages", "cp", "ep", "expert_tp", "sequence_parallel", "zero", "shards", "num_microbatches", "virtual_stages",
    "pipeline", "async_tp", "selective", "only_micro_batch",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """One pipeline stage. Shares are of its layers; `recompute_share` counts full recomputation."""

    layers: float
    tp: int
    dp: int
    micro_batch: int
    recompute_share: float
    offloaded_optimizer: float = 0.0
    offloaded_activations: float = 0.0
    offloaded_gradients: float = 0.0
    offloaded_parameters: float = 0.0
    recomputed_operators: float | None = None  # of a layer, where single operators are recomputed
    kept_share: float | None = None  # of what a layer saves, where its software names operators to recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row as a question to the cost model."""

    row: Row
    spec: ModelSpec
    cluster: Cluster
    host: Host
    engine: Engine
    software: str  # the engine, where it is no matter of the plan
    tier: str
    stages: tuple[StageCase, ...]
    cp: int
    ep: int
    expert_tp: int  # ranks that an expert is split over; 0: tp
    ties_embeddings: bool | None  # None: as the model has it
    has_head: bool  # a loss over the vocabulary
    frozen_bytes: float  # of an element of a linear layer where only adapters are trained; 0: all is trained
    dropout: float
    optimizer_operations: float  # sent for each parameter, where the optimizer is not one kernel for many
    conventions: Conventions  # of memory
    virtual_stages: int
    pipeline: Pipeline
    attention_speed: float  # rate of an older fused attention in units of the engine's
    async_tp: bool  # collectives of tensor parallelism beside the parts of the products that they belong to
    zero: int
    shards: int  # ranks that states are sharded over, of `dp * cp`
    num_microbatches: int
    rounded: float  # samples that are really run over those of the equal micro-batches
    selective: bool
    attention: Attention
    sequence_parallel: bool
    single_precision: bool
    fp8: bool  # linear layers
    compiled: bool
    optimizer: str
    only_micro_batch: bool  # what was measured is one micro-batch, without an optimizer step
    measured_seconds: float | None
    measured_tflops: tuple[float, str] | None  # TFLOP/s of a device, by model or hardware FLOP
    is_binned: bool  # samples of one length are batched together
    notes: tuple[str, ...]

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stages)

    @property
    def question(self) -> str:
        """Cases of the same one differ in the plan only: the same model, data, devices and software."""
        told = (getattr(self.row, name) for name in NO_CHOICE)
        return repr((self.row.prefix, self.software, self.is_binned, *told))

    @property
    def plan(self) -> str:
        """Rows of one question with the same one are one plan, measured several times."""
        return repr(tuple(getattr(self, name) for name in CHOICE))

    @property
    def keys(self) -> tuple[TraceKey, ...]:
        """The traces that its stages need."""
        return tuple(dict.fromkeys(self.key(stage) for stage in self.stages))

    def key(self, stage: StageCase) -> TraceKey:
        """The trace of one stage."""
        return trace_key(
            self.spec, stage.tp, sequence_parallel=self.sequence_parallel, single_precision=self.single_precision
        )


def case_of(row: Row, engine_name: str | None = None) -> Case:
    """What a row asks; `engine_name` is that of a row whose source is not known.

    Raises:
        RefusedError: it lacks what nothing known of its source fills, or contradicts itself.
    """
    if row.unreadable.startswith(LENGTH):
        raise RefusedError(LENGTH)
    if row.unreadable:
        raise RefusedError(f"a cell cannot be read ({row.unreadable.split(' ')[0]})")
    if row.is_inconsistent:
        raise RefusedError("the layout is inconsistent as published")
    source = _source_of(row)
    notes: list[str] = []
    stages_told = _stages_told(row)
    tp, pp, cp = _degree(row, source, "tp"), _degree(row, source, "pp"), row.cp or 1
    if stages_told:
        tp, pp = max(stage.tp for stage in stages_told), len(stages_told)
    num_devices = row.n_gpus or (row.dp or 1) * tp * pp * cp
    if row.dp and row.n_gpus and not stages_told and row.dp * tp * pp * cp != row.n_gpus:
        raise RefusedError("the layout is inconsistent as published")
    dp = row.dp or max(1, num_devices // (tp * pp * cp))
    if not stages_told and dp * tp * pp * cp != num_devices:
        raise RefusedError(f"dp x tp x pp x cp do not multiply to {num_devices} GPUs")
    micro_batch, num_microbatches, rounded = _batches(row, source, dp, pp, notes)
    recompute = row.activation_recompute or str(source.get("recompute", ""))
    if not recompute and (row.zero_stage or 0) >= 3 and "sharded_recompute" in source:
        recompute = str(source["sharded_recompute"])
    if not recompute:
        recompute = "none"
        notes.append("recomputation is not stated: none assumed")
    dropout = float(source.get("dropout", 0.0))
    if row.note("multi-latent-attention"):
        notes.append("multi-latent attention is priced as plain attention of the same heads")
    engine = _engine(row, source, engine_name)
    if not is_known(row):
        notes.append(f"its source is not known: taken to have run on {engine.name}")
    pads = bool(source.get("pads_vocabulary", not engine.by_block))
    spec = model_of(row, tp=tp, cp=cp, dropout=dropout, sequence=source.get("seq_len"), pads=pads)
    stated_tokens = spec.sequence * cp
    is_binned = spec.sequence == source.get("binned_from") and bool(row.note(str(source["binned_note"])))
    if is_binned and "binned_tokens" in source:
        spec = replace(spec, sequence=int(source["binned_tokens"]))
        notes.append(f"samples are binned by length: {spec.sequence} tokens on average of {stated_tokens}")
    elif is_binned:
        notes.append(f"samples are binned by length, to how many tokens is not stated: {stated_tokens} are priced")
    stages = stages_told or _equal_stages(row, source, spec, pp, tp, dp, micro_batch, recompute)
    total = sum(stage.layers for stage in stages)
    if abs(total - spec.num_layers) > 1e-6:
        stages = tuple(replace(stage, layers=stage.layers * spec.num_layers / total) for stage in stages)
    if pp > spec.num_layers:
        raise RefusedError(f"{pp} stages for {spec.num_layers} layers")
    if (row.ep or 1) > 1 and spec.experts % (row.ep or 1):
        raise RefusedError(f"ep={row.ep} is no divisor of {spec.experts} experts")
    if (row.ep or 1) > 1 and not row.note("MoE: ") and not re.search(r"\dexperts", row.model):
        notes.append(f"experts are not stated: {spec.experts}, {spec.experts_per_token} for each token")
    zero = row.zero_stage if row.zero_stage is not None else int(source.get("zero_stage", 0))
    if pp > 1 and zero == 3 and source.get("keeps_gathered"):
        zero = 2
    if pp > 1 and zero >= 2 and "pipelined_zero" in source:
        zero = int(source["pipelined_zero"])
    shards, zero = _shards(row, zero, dp, cp)
    precision = (row.precision or str(source.get("precision", "bf16"))).lower()
    precision = re.sub(r"float(16|32)", r"fp\1", precision.replace("bfloat16", "bf16"))
    cluster = _cluster(row, precision, num_devices)
    single = "tf32" in precision or precision == "fp32"
    return Case(
        row=row,
        spec=spec,
        cluster=cluster,
        host=usual_host(cluster.device),
        engine=engine,
        software=_software(row, source),
        tier=str(source.get("tier", "?")),
        stages=tuple(stages),
        cp=cp,
        ep=row.ep or 1,
        expert_tp=int(told[1]) if (told := re.search(r"etp(\d+)", row.model)) else 0,
        ties_embeddings=_ties(row, source),
        frozen_bytes=_frozen_bytes(precision) if is_frozen(row) else 0.0,
        has_head=not re.search(r"SQuAD", row.model),
        dropout=dropout,
        optimizer_operations=float(source.get("optimizer_operations", 0)),
        conventions=conventions(str(source.get("conventions", engine.name))),
        virtual_stages=row.vp_interleave or (int(source.get("vp_interleave", 1)) if pp > 1 else 1),
        pipeline=_pipeline(row),
        attention_speed=float(source.get("attention_speed", 1.0)),
        async_tp=_is_async(row, source),
        zero=zero,
        shards=shards,
        num_microbatches=num_microbatches,
        rounded=rounded,
        selective=recompute == "selective" and "selective_share" not in source and not stages_told,
        attention=_attention(row, source),
        sequence_parallel=bool(
            row.sequence_parallel if row.sequence_parallel is not None else source.get("sequence_parallel", False)
        ),
        single_precision=single,
        fp8=bool(re.search(r"fp8|float8", precision)),
        compiled=bool(row.compiled),
        optimizer=str(source.get("optimizer", "adamw")),
        only_micro_batch=source.get("time_of") == "micro_batch",
        # Adapters are tuned on samples of many lengths: memory is that of the longest, time that of an unstated mean.
        measured_seconds=None
        if is_frozen(row)
        else _measured_seconds(row, micro_batch * num_microbatches * dp * rounded, stated_tokens),
        measured_tflops=_measured_tflops(row, source),
        is_binned=is_binned,
        notes=tuple(notes),
    )


def _frozen_bytes(precision: str) -> float:
    """Bytes of an element of a frozen linear layer: Dettmers et al. 2023 (arXiv 2305.14314), section 3.

    4 bits with a float32 scale for 64 elements, or these scales in 8 bits with one more for 256 of them.
    """
    if "nf4-dq" in precision:
        return (4 + 8 / 64 + 32 / (64 * 256)) / 8
    if "nf4" in precision:
        return (4 + 32 / 64) / 8
    return 2.0


def _ties(row: Row, source: Mapping[str, Any]) -> bool | None:
    """Whether embedding and head are one matrix, where row or source say so."""
    if row.note(r"untie-embeddings|untied"):
        return False
    tied = source.get("ties_embeddings")
    return None if tied is None else bool(tied)


def tier_of(row: Row) -> str:
    """How far a row's source is to be trusted: A, B or C, ? where nothing is known of it."""
    return str(_source_of(row).get("tier", "?"))


def _source_of(row: Row) -> Mapping[str, Any]:
    """What is known of a row's source, its entry for the model or the GPU included."""
    sources = table("sources")
    found = dict(sources.get(row.prefix, sources["default"]))
    for column in ("model", "gpu"):
        entries = found.pop(column, [])
        found |= next((e for e in entries if re.search(e["pattern"], getattr(row, column), re.IGNORECASE)), {})
    return found


def _degree(row: Row, source: Mapping[str, Any], axis: str) -> int:
    value = getattr(row, axis)
    return int(value if value else source.get(axis, 1))


def _is_async(row: Row, source: Mapping[str, Any]) -> bool:
    return bool(source.get("async_tp")) or ("async_tp_note" in source and bool(row.note(str(source["async_tp_note"]))))


def _software(row: Row, source: Mapping[str, Any]) -> str:
    """The engine that a row's notes say, where rows of a source have several."""
    named: Mapping[str, str] = source.get("engine_of_note", {})
    return next((engine for pattern, engine in named.items() if row.note(pattern)), "")


def is_known(row: Row) -> bool:
    """Whether it is known what software the source of a row ran, and what its columns leave out."""
    return row.prefix in table("sources")


def _engine(row: Row, source: Mapping[str, Any], engine_name: str | None) -> Engine:
    name = str(source.get("engine", "megatron"))
    if not is_known(row):
        name = engine_name or ("stock" if (row.zero_stage or 0) >= 2 else "megatron")
    elif name == "megatron" and (row.zero_stage or 0) >= 3:
        name = "deepspeed"  # Megatron-LM shards no parameters
    engine = engine_named(_software(row, source) or name)
    overlaps = True if row.note("overlap-grad-reduce") else source.get("overlaps")
    if overlaps is not None:
        engine = replace(engine, overlaps_gradients=bool(overlaps), overlaps_gathers=bool(overlaps))
    return engine


def _batches(row: Row, source: Mapping[str, Any], dp: int, pp: int, notes: list[str]) -> tuple[int, int, float]:
    """Micro-batch, number of them, and samples really run over their product."""
    micro_batch = row.micro_batch or source.get("micro_batch")
    global_batch = row.global_batch or source.get("global_batch")
    if not global_batch:
        if not micro_batch:
            raise RefusedError("neither the micro-batch nor the global batch is stated")
        told = row.note(r"micro_num (\d+)")
        count = int(told[1]) if told else pp
        if not told and source.get("time_of") != "micro_batch":
            notes.append(f"the global batch is not stated: {count} micro-batches of a rank assumed")
        return int(micro_batch), count, 1.0
    if global_batch % dp and not source.get("rounds_micro_batches"):
        raise RefusedError(f"the global batch is no multiple of dp ({global_batch} samples, dp={dp})")
    samples = global_batch / dp
    if not row.micro_batch and pp > 1 and source.get("micro_batches") == "stages" and samples % pp == 0:
        micro_batch = samples // pp
        notes.append(f"the micro-batch is not stated: as many micro-batches as stages, of {micro_batch:g}")
    if not micro_batch:
        if samples > pp:
            raise RefusedError("the micro-batch is not stated")
        micro_batch = 1
        notes.append("the micro-batch is not stated: 1 assumed")
    if samples % micro_batch == 0:
        return int(micro_batch), int(samples // micro_batch), 1.0
    count = max(1, math.ceil(samples / micro_batch - 1e-9))
    if samples % count == 0:
        equal = int(samples // count)
        notes.append(f"{samples:g} samples of a rank are priced in micro-batches of {equal}, not of {micro_batch:g}")
        return equal, count, 1.0
    if not source.get("rounds_micro_batches") and samples > micro_batch:
        notes.append(f"{samples:g} samples of a rank are no multiple of the micro-batch {micro_batch}")
    return int(micro_batch), count, samples / (count * micro_batch)


def _stages_told(row: Row) -> tuple[StageCase, ...]:
    """Stages that the notes describe one by one, each with degrees of its own."""
    aceso = re.findall(r"stage\d+: \d+ GPU tp=(\d+) dp=(\d+) ops=(\d+) recompute=(\d+)%", row.notes)
    if aceso:
        return tuple(
            StageCase(
                layers=float(ops), tp=int(tp), dp=int(dp), recompute_share=int(share) / 100,
                recomputed_operators=13 * int(share) / 100,
                micro_batch=max(1, (row.micro_batch or 1) // int(dp)),
            )
            for tp, dp, ops, share in aceso
        )  # fmt: skip
    mist = re.findall(
        r"stage\d+: (\d+) layers on \d+ GPU, ckpt (\d+) layers, mb=(\d+) dp=(\d+) tp=(\d+) shard\(W,G,O\)=\([^)]*\) "
        r"offload\(W,G,O,A\)=\(([\d.]+),([\d.]+),([\d.]+),([\d.]+)\)",
        row.notes,
    )
    return tuple(
        StageCase(
            layers=float(layers), tp=int(tp), dp=int(dp), micro_batch=int(size),
            recompute_share=int(kept) / max(1, int(layers)), offloaded_optimizer=float(states),
            offloaded_activations=float(activations),
        )
        for layers, kept, size, dp, tp, _, _, states, activations in mist
    )  # fmt: skip


def _equal_stages(
    row: Row, source: Mapping[str, Any], spec: ModelSpec, pp: int, tp: int, dp: int, micro_batch: int, recompute: str
) -> tuple[StageCase, ...]:
    """As Megatron-LM cuts: equal numbers of layers, or what the notes say."""
    layers = [spec.num_layers / pp] * pp
    if row.note("first and last stage hold one layer less") and pp > 2:
        even = (spec.num_layers + 2) / pp
        layers = [even - 1, *[even] * (pp - 2), even - 1]
    cuts = re.search(r"\(24 transformer layers are entries (\d+)\.\.(\d+)\): \[([\d, ]+)\]", row.notes)
    if cuts:
        first, last = int(cuts[1]), int(cuts[2])
        bounds = [int(cut) for cut in cuts[3].split(",")]
        layers = [float(max(0, min(b, last + 1) - max(a, first))) for a, b in pairwise(bounds)]
    share = {"full": 1.0, "selective": float(source.get("selective_share", 0.0))}.get(recompute, 0.0)
    kept = source.get("selective_kept") if recompute == "selective" else None
    fraction = row.note(r"(?:fraction of blocks|ac_freq|selective fraction)\D{0,10}(0?\.\d+)")
    if recompute == "selective" and fraction:
        share = float(fraction[1])
    offload = row.offload.lower()
    optimizer = 1.0 if re.search(r"optim|full cpu|cpu offload|^cpu$", offload) else 0.0
    activations = 1.0 if "activation" in offload else 0.0
    return tuple(
        StageCase(
            layers=count, tp=tp, dp=dp, micro_batch=micro_batch, recompute_share=share, offloaded_optimizer=optimizer,
            offloaded_activations=activations, kept_share=None if fraction or kept is None else float(kept),
        )
        for count in layers
    )  # fmt: skip


def _shards(row: Row, zero: int, dp: int, cp: int) -> tuple[int, int]:
    """Ranks that states are sharded over, and the ZeRO stage; of one rank there is nothing to shard."""
    ranks = dp * cp
    if zero not in (0, 1, 2, 3):
        raise RefusedError(f"ZeRO stage {zero}")
    if zero == 0 or ranks == 1:
        return 1, 0
    group = row.note(r"zero1=(\d+)")
    shards = int(group[1]) if group else ranks
    if row.note(r"HSDP"):
        stated = row.note(r"HSDP[^;]*?shard(?:ed)?\D{0,12}(\d+)")
        shards = int(stated[1]) if stated else min(ranks, row.gpus_per_node or 8)
    shards = shards if shards > 1 and ranks % shards == 0 else ranks
    return shards, zero


def _pipeline(row: Row) -> Pipeline:
    stated = row.note(r"schedule (ZB-?V|ZB-?2p|ZB-?1p|ZB-?H2|ZB-?H1)")
    if stated:
        name = stated[1].upper().replace("-", "")
        return {"ZBV": "zb-v", "ZB2P": "zb-2p", "ZBH2": "zb-2p"}.get(name, "zb-1p")  # type: ignore[return-value]
    return "interleaved" if (row.vp_interleave or 1) > 1 else "1f1b"


def _attention(row: Row, source: Mapping[str, Any]) -> Attention:
    if row.note(r"transformer-impl=local|local_spec"):
        return "unfused"
    if row.flash_attention is not None:
        return "flash" if row.flash_attention else "unfused"
    return "unfused" if source.get("attention") == "unfused" else "flash"


def _measured_seconds(row: Row, samples: float, tokens: int) -> float | None:
    """Of a step of `samples` of `tokens` each: what is printed, or what follows from the throughput."""
    if row.iter_time_s:
        return row.iter_time_s
    if row.samples_per_s:
        return samples / row.samples_per_s
    if row.tokens_per_s_per_gpu and row.n_gpus:
        return samples * tokens / (row.tokens_per_s_per_gpu * row.n_gpus)
    return None


def _measured_tflops(row: Row, source: Mapping[str, Any]) -> tuple[float, str] | None:
    if row.tflops_per_gpu and "tflops" in source:
        return row.tflops_per_gpu, str(source["tflops"])
    return None


# --- the hardware -----------------------------------------------------------------------------------


def _cluster(row: Row, precision: str, num_devices: int) -> Cluster:
    """The devices and links of a row, as many nodes as it has."""
    if not row.gpu:
        raise RefusedError("the GPU is not stated")
    device = _device(row)
    per_node = row.gpus_per_node or min(device.devices_per_node, num_devices)
    per_node = max(1, min(per_node, num_devices))
    num_nodes = -(-num_devices // per_node)
    inter, cards = _network(row.interconnect, device, per_node)
    # All 16-bit rows are traced in bfloat16: a row in float16 runs at that rate. So do float32 rows at that of tf32.
    peaks = dict(device.peak_flop_per_second)
    if "tf32" in precision:
        if "tf32" not in peaks:
            raise RefusedError(f"{device.name} has no tf32")
        peaks["float32"] = peaks["tf32"]
    elif not re.search("bf16", precision) and "float16" in peaks:
        peaks["bfloat16"] = peaks["float16"]
    elif "bfloat16" not in peaks and not re.search("fp32", precision):
        raise RefusedError(f"{device.name} does not compute in {precision}")
    try:
        return _cluster_of(_hashable(replace(device, peak_flop_per_second=peaks)), num_nodes, per_node, cards,
                           _inside(row.interconnect, device), inter)  # fmt: skip
    except PlannerError as error:
        raise RefusedError(str(error)) from None


_DEVICES: dict[str, Device] = {}


def _hashable(device: Device) -> Device:
    """One object for equal devices: what is computed of a device is kept by it."""
    return _DEVICES.setdefault(repr(device), device)


@cache
def _cluster_of(device: Device, num_nodes: int, per_node: int, cards: int, intra: str, inter: str) -> Cluster:
    base = Cluster.load(f"{num_nodes}x{per_node}x{device_named('A100-80GB').name}")
    links = {link.name: link for link in all_links()}
    return replace(
        base,
        name=f"{num_nodes}x{per_node}x{device.name}",
        device=device,
        nics_per_node=cards,
        intra_node_link=links[intra],
        inter_node_link=links[inter],
    )


def _device(row: Row) -> Device:
    """The device that the words mean, with the stated size of its memory."""
    for entry in table("gpus")["gpu"]:
        if not re.search(entry["pattern"], row.gpu, re.IGNORECASE):
            continue
        if "notes" in entry and not re.search(entry["notes"], row.notes):
            continue
        if "refuse" in entry:
            raise RefusedError(str(entry["refuse"]))
        return _from_entry(entry, row)
    try:
        return device_named(row.gpu)
    except PlannerError as error:
        nearest = "".join(str(error).partition(";")[1:])
        raise RefusedError(f"GPU {row.gpu[:40]} is not known{nearest}") from None


def _from_entry(entry: Mapping[str, Any], row: Row) -> Device:
    size = f"{row.gpu_mem_gb:.0f}" if row.gpu_mem_gb else ""
    if not size and (stated := re.search(r"(\d+)\s*GB", row.gpu)):
        size = stated[1]
    device = device_named(entry.get("memory", {}).get(size, entry["device"]))
    changed = {
        key: entry[key]
        for key in ("name", "memory_bytes_per_second", "memory_bytes", "peak_flop_per_second", "intra_node_link")
        if key in entry
    }
    return replace(device, **changed) if changed else device


def _inside(text: str, device: Device) -> str:
    """The link inside a node: what the row says, or what the device usually has."""
    usual = device.intra_node_link
    if "NVLink" in text and "no NVLink" not in text and not usual.startswith("nvlink"):
        return {"7": "nvlink2", "8": "nvlink3", "9": "nvlink4"}.get(device.compute_capability[0], "nvlink3")
    if "PCIe" in text and "NVLink" not in text.replace("no NVLink", "") and usual.startswith("nvlink"):
        return "pcie4" if device.compute_capability >= "8" else "pcie3"
    return usual


def _network(text: str, device: Device, per_node: int) -> tuple[str, int]:
    """The link between nodes, and cards of a node.

    A row says 8x 200Gb/s, 1600 Gbps per node, or 400 Gb/s per GPU; what it does not say is the fabric's usual.
    """
    names = {link.name for link in all_links()}
    for entry in table("fabrics")["network"]:
        if not re.search(entry["pattern"], text, re.IGNORECASE):
            continue
        rates = {int(rate): name for rate, name in entry["links"].items()}
        rate, cards = int(entry["rate"]), int(entry.get("cards", max(1, per_node)))
        many = re.search(r"(\d+)x\s*(\d+)\s*Gb", text)
        of_node = re.search(r"(\d+)\s*Gb(?:ps|/s)[^;:,]*(?:per node|EFA|network)", text)
        of_device = re.search(r"(\d+)\s*Gb(?:ps|/s)[^;:,]*per GPU", text)
        if of_device:
            rate, cards = int(of_device[1]), per_node
        elif many:
            cards, rate = int(many[1]), int(many[2])
        elif of_node:
            total = int(of_node[1])
            rate = min(rates, key=lambda r: (r > total, abs(r - min(rate, total))))
            cards = max(1, round(total / rate))
        nearest = min(rates, key=lambda r: abs(r - rate))
        name = rates[nearest] if rates[nearest] in names else str(entry.get("fallback", device.inter_node_link))
        return name, max(1, round(cards * rate / nearest))
    return device.inter_node_link, max(1, device.nics_per_node * per_node // device.devices_per_node)
