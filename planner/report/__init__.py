"""What people see: plans as a table and as text, a cluster, a training run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cluster import Cluster
from planner.engine import STOCK
from planner.interval import are_tied, known_difference, residuals
from planner.plan import BlockPlan, CollectivePlan, Plan, Prediction, RingAttention, ShardingPlan, StagePlan
from planner.profile import Profile
from planner.shard.placement import Placement
from planner.shard.words import layout_words
from planner.units import format_bytes, format_count, format_seconds


def describe_choice(block: BlockPlan) -> str:
    """`ZeRO-3, recompute` for a block."""
    return f"ZeRO-{block.zero}" + (", recompute" if block.recompute == "full" else "")


def describe_layout(plan: Plan) -> str:
    """The mesh in a few characters: `pp 4 x dp 8 x tp 2`; `dp 2x8` for two replicas of eight shards.

    `dp 8 (ep 4)` where experts are spread over groups of four of the data-parallel ranks.
    """
    mesh = plan.mesh
    parts = [f"pp {mesh.pp}"] if mesh.pp > 1 else []
    hybrid = mesh.dp_replicate > 1 and mesh.shards > 1
    data = f"dp {mesh.dp_replicate}x{mesh.dp_shard * mesh.ep}" if hybrid else f"dp {mesh.dp}"
    data += f" (ep {mesh.ep})" if mesh.ep > 1 else ""
    parts += [data] if mesh.dp > 1 else []
    parts += [f"{axis} {getattr(mesh, axis)}" for axis in ("cp", "tp") if getattr(mesh, axis) > 1]
    return " x ".join(parts) or "1 device"


def describe_zero(plan: Plan) -> str:
    """ZeRO stages used, most blocks first: `3` or `3, 2`."""
    counts: dict[int, int] = {}
    for block in plan.block_plans:
        counts[block.zero] = counts.get(block.zero, 0) + 1
    return ", ".join(str(z) for z, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def describe_recompute(plan: Plan) -> str:
    """How many blocks are recomputed: `none`, `all`, `12%`."""
    blocks = plan.block_plans
    count = sum(b.recompute == "full" for b in blocks)
    if count in (0, len(blocks)):
        return "all" if count else "none"
    return f"{min(99, max(1, round(100 * count / len(blocks))))}%"


def describe_proof(plan: Plan) -> str:
    """How far a better plan of the same configuration can be."""
    gap = plan.prediction.gap
    return "the best" if gap <= 1e-6 else f"within {gap:.2%} of the best"


def ranking(plans: Sequence[Plan], *, cluster: Cluster, tied: Sequence[bool] = ()) -> RenderableType:
    """The ranked plans, the best of each configuration: 100 columns, up to thousands of devices.

    Those that are `tied` with the first have a mark.
    """
    first = plans[0]
    device = f"{cluster.num_devices} x {cluster.device.name}" if cluster.num_devices > 1 else cluster.device.name
    table = Table(
        title=f"{first.model} on {cluster.name} ({device}, {format_bytes(cluster.capacity_bytes)} usable each)\n"
        f"global batch {first.global_batch}, {first.precision}, {first.optimizer}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption_justify="left",
    )
    for heading in ("", "mesh", "devices", "ZeRO", "recom-\nputed", "micro-\nbatches", "sched-\nule"):
        table.add_column(
            heading, justify="left" if heading in ("mesh", "ZeRO", "sched-\nule") else "right", no_wrap=True
        )
    for heading in ("step", "MFU", "bubble", "peak\nmemory", "gap"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, plan in enumerate(plans, 1):
        prediction = plan.prediction
        peak = format_bytes(max(prediction.peak_bytes)) + (" ?" if _may_not_fit(prediction) else "")
        table.add_row(
            f"{rank}=" if any(tied[rank - 1 : rank]) else str(rank),
            describe_layout(plan),
            str(plan.devices),
            describe_zero(plan),
            describe_recompute(plan),
            f"{plan.num_microbatches} x {plan.micro_batch}",
            plan.schedule if plan.mesh.pp > 1 else "-",
            format_seconds(prediction.step_seconds),
            f"{prediction.mfu:.1%}",
            f"{prediction.bubble:.1%}" if plan.mesh.pp > 1 else "-",
            Text(peak, style="" if prediction.fits else "red"),
            f"{prediction.gap:.2%}",
        )
    over = [str(rank) for rank, plan in enumerate(plans, 1) if not plan.prediction.fits]
    if over:
        table.caption = Text(f"DOES NOT FIT in memory: {', '.join(over)}", style="red")
    lines = interval_lines(plans, tied)
    return Group(table, *lines) if lines else table


def interval_lines(plans: Sequence[Plan], tied: Sequence[bool] = ()) -> list[str]:
    """How far the figures of ranked plans are to be trusted, and what that says of their order."""
    first = plans[0].prediction
    step = _off(first.step_seconds, first.step_seconds_low, first.step_seconds_high)
    peak = _off(max(first.peak_bytes), first.peak_bytes_low, first.peak_bytes_high)
    known = residuals("step", first.measured_share)
    behind = f"{known.sources} published sources, each left out" if known.rows else "an estimate"
    if known.rows and first.measured_share > 0:
        behind = "published runs and models run on two cores, by the share of it that rests on measured times"
    lines = [f"8 of 10 measured steps are {step} off ({behind}), peaks {peak}"] if step and peak else []
    if any(_may_not_fit(plan.prediction) for plan in plans):
        lines.append("? fits, but with a peak so much off it does not")
    rivals = [plan.prediction for plan, is_tied in zip(plans, tied, strict=False) if is_tied]
    if rivals:
        most = max(math.expm1(known_difference(first, other)) for other in rivals)
        lines.append(f"= tied with the first: steps predicted less than {most:.0%} apart may be in the other order")
    return lines


def _off(predicted: float, low: float | None, high: float | None) -> str:
    if low is None or high is None or not predicted > 0:
        return ""
    return f"{low / predicted - 1:+.0%} to {high / predicted - 1:+.0%}"


def search_text(
    *, configurations: int, bounded: int, solved_exactly: int, gap: float, delta: float, seconds: float
) -> str:
    """What the search did and how far its answer can be from the best."""
    solved = (
        f"{solved_exactly} solved as integer programs" if solved_exactly else "the bounds of which prove the ranking"
    )
    return (
        f"{configurations} configurations considered, {bounded} bounded, {solved}, in {seconds:.1f} s.\n"
        f"No plan beats the first by more than {gap:.2%} in the integer program, which agrees with the simulator "
        f"within {delta:.0%}."
    )


def plan_text(plan: Plan) -> str:
    """A plan as text that a person understands, without colours.

    The same plan gives the same text.
    """
    prediction, mesh = plan.prediction, plan.mesh
    lines = [
        f"{plan.model} on {plan.cluster}: " + (f"{plan.devices} devices ({mesh})" if plan.devices > 1 else "1 device"),
        f"  global batch {plan.global_batch} = {mesh.dp} data-parallel rank{'s' * (mesh.dp > 1)} x "
        f"{plan.num_microbatches} micro-batch{'es' * (plan.num_microbatches > 1)} of {plan.micro_batch}"
        + (f", schedule {plan.schedule}" if mesh.pp > 1 else ""),
        f"  precision {plan.precision}, optimizer {plan.optimizer}"
        + (f", times of {plan.engine}" if plan.engine != STOCK else ""),
        f"  step {format_seconds(prediction.step_seconds)}, MFU {prediction.mfu:.1%}"
        + (f", bubble {prediction.bubble:.1%}" if mesh.pp > 1 else "")
        + f"; {describe_proof(plan)} of its configuration",
    ]
    if prediction.step_seconds_low is not None and prediction.step_seconds_high is not None:
        low, high = format_seconds(prediction.step_seconds_low), format_seconds(prediction.step_seconds_high)
        lines.append(f"  8 of 10 such steps take {low} to {high}{_peak_interval(prediction)}")
    if prediction.parts_seconds:
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in prediction.parts_seconds if s > 0)
        lines.append(f"  of which {parts}")
    if prediction.measured_share > 0:
        lines.append(f"  {prediction.measured_share:.0%} of it rests on measured times, the rest on rates")
    if prediction.corrections:
        lines.append(
            "  corrected by earlier runs: "
            + ", ".join(f"{name} x {factor:.2f}" for name, factor in prediction.corrections)
        )
    if not prediction.fits:
        over = max(prediction.peak_bytes) - prediction.capacity_bytes
        lines.append(f"  DOES NOT FIT: {format_bytes(over)} more than a device has")
    for index, stage in enumerate(plan.stages):
        peak = format_bytes(prediction.peak_bytes[index])
        lines.append(f"  stage {index}: peak {peak} of {format_bytes(prediction.capacity_bytes)}")
        lines += [f"    {line}" for line in _stage_lines(stage)]
    if plan.ring_attention is not None:
        lines.append(f"  {ring_text(plan.ring_attention)}")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _peak_interval(prediction: Prediction) -> str:
    low, high = prediction.peak_bytes_low, prediction.peak_bytes_high
    if low is None or high is None:
        return ""
    over = ", which may not fit" if _may_not_fit(prediction) else ""
    return f", with a peak of {format_bytes(low)} to {format_bytes(high)}{over}"


def _may_not_fit(prediction: Prediction) -> bool:
    high = prediction.peak_bytes_high
    return prediction.fits and high is not None and high > prediction.capacity_bytes


def ring_text(ring: RingAttention) -> str:
    """What ring attention would give, in a line."""
    return (
        f"with ring attention: step {format_seconds(ring.step_seconds)}, peak {format_bytes(max(ring.peak_bytes))}; "
        f"not taken: {ring.why_not}"
    )


_AXIS_WORDS = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}


def sharding_text(plan: Plan) -> str:
    """How each axis splits each block, and what that communicates; equal blocks once."""
    if not plan.mesh.splits:
        return f"{plan.model} on {plan.cluster}: tp 1 and cp 1, no rank has a part of a block"
    kinds = ", each of them over ".join(f"{degree} {_AXIS_WORDS[axis]} ranks" for axis, degree in plan.mesh.splits)
    lines = [
        f"{plan.model} on {plan.cluster}: split over {kinds}, collectives of one micro-batch of {plan.micro_batch}"
    ]
    if plan.mesh.cp > 1:
        lines.append(
            f"  the {plan.mesh.cp} ranks of cp are ranks of ZeRO, too, {plan.mesh.shards} in all: it sums gradients "
            "over them and shares out the states of all parameters"
        )
    if plan.mesh.ep > 1:
        lines.append(
            f"  the {plan.mesh.ep} ranks of ep are data-parallel ranks, each with samples of its own: experts are "
            "spread over them, all else is sharded by ZeRO as over other data-parallel ranks"
        )
    for names, shardings in _sharded_blocks(plan):
        first, last = (name or "the whole model" for name in (names[0], names[-1]))
        lines.append(f"  {first}" if len(names) == 1 else f"  {first} .. {last}, {len(names)} blocks alike")
        for sharding in shardings:
            indent = "    "
            if len(shardings) > 1:
                lines.append(f"    over {sharding.axis}")
                indent = "      "
            lines += [f"{indent}{line}" for line in _sharding_lines(sharding)]
    return "\n".join(lines)


def _sharding_lines(sharding: ShardingPlan) -> list[str]:
    """How one axis splits a block."""
    split = [line for line in sharding.words if not line.partition(": ")[2].startswith("whole")]
    whole = [line.partition(": ")[0] for line in sharding.words if line not in split]
    lines = [*split, *([f"whole on every rank: {', '.join(whole)}"] if whole else [])]
    handed_on = dict.fromkeys(layout_words(Placement.parse(text)) for text in sharding.outputs)
    lines += [f"hands on what it makes: {', '.join(handed_on)}"] if handed_on else []
    for phase, words in _PHASE_WORDS.items():
        made = [c for c in sharding.collectives if c.phase == phase]
        lines += [f"{words}: {_collective_text(c)}" for c in made]
        lines += [f"{words}: no collective"] if not made and phase != "step" else []
    return lines


_PHASE_WORDS = {"forward": "forward", "backward": "backward", "step": "once a step"}


def _collective_text(made: CollectivePlan) -> str:
    cause = f": {made.cause}" if made.cause else ""
    return f"{made.count} x {made.collective} of {format_bytes(made.num_bytes)}{cause}"


def sharding_data(plan: Plan) -> list[dict[str, Any]]:
    """The same as plain data, a row for each axis and each set of blocks alike."""
    return [
        {
            "blocks": list(names),
            axis: degree,
            "parameters": [
                {"words": words, "placement": placement}
                for words, placement in zip(sharding.words, sharding.parameters, strict=False)
            ],
            "inputs": list(sharding.inputs),
            "outputs": list(sharding.outputs),
            "collectives": [asdict(made) for made in sharding.collectives],
        }
        for names, shardings in _sharded_blocks(plan)
        for (axis, degree), sharding in zip(plan.mesh.splits, shardings, strict=True)
    ]


def _sharded_blocks(plan: Plan) -> list[tuple[list[str], list[ShardingPlan]]]:
    """The names of blocks that every axis splits alike, in order of the first, and their shardings by axis."""
    found: dict[tuple[int, ...], list[str]] = {}
    for block in plan.block_plans:
        if block.shardings:
            found.setdefault(block.shardings, []).append(block.name)
    return [(names, [plan.shardings[i] for i in indices]) for indices, names in found.items()]


def _stage_lines(stage: StagePlan) -> list[str]:
    """Runs of blocks that are treated alike, one line each."""
    lines = []
    for choice, run in groupby(stage.blocks, key=describe_choice):
        blocks = list(run)
        count = f"{len(blocks)} block{'s' * (len(blocks) > 1)}"
        first, last = (b.name or "the rest of the model" for b in (blocks[0], blocks[-1]))
        names = first if len(blocks) == 1 else f"{first} .. {last}"
        lines.append(f"{count}: {choice}  ({names})")
    return lines


def tie_text(here: Plan, there: Plan) -> str:
    """Whether two plans for the same are tied; else nothing."""
    same = ("model", "cluster_fingerprint", "graph_fingerprint", "global_batch", "precision", "optimizer", "engine")
    one, other = here.prediction, there.prediction
    if any(getattr(here, key) != getattr(there, key) for key in same) or not are_tied(one, other):
        return ""
    known = math.expm1(known_difference(one, other))
    return f"the two are tied: steps predicted less than {known:.0%} apart may be in the other order"


def difference(rows: Sequence[tuple[str, str, str]], here: str, there: str) -> RenderableType:
    """The differences of two plans."""
    if not rows:
        return Text("the plans are equal")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("", here, there):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def cluster_table(cluster: Cluster) -> RenderableType:
    """What is known of a cluster, each number with its source."""
    nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)} of {cluster.devices_per_node}"
    usable = f"{format_bytes(cluster.capacity_bytes)} usable each"
    head = Text(f"{cluster.name}: {nodes} {cluster.device.name}, {usable}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(no_wrap=True)
    for heading in ("value", "source"):
        table.add_column(heading, overflow="fold")
    for part, rows in groupby(cluster_rows(cluster), key=lambda row: row[0]):
        table.add_row(Text(part, style="bold"), "", "")
        for _, key, value, source in rows:
            table.add_row(f"  {key}", value, source)
    return Group(head, "", table)


def cluster_rows(cluster: Cluster) -> list[tuple[str, str, str, str]]:
    """(part, key, value, source) of all that is known of a cluster; words have no source."""
    counts = {key: getattr(cluster, key) for key in ("num_nodes", "devices_per_node", "nics_per_node")}
    usable = "memory_bytes less context_bytes, communicator_bytes and the allocator's slack"
    parts: list[tuple[str, Mapping[str, object], Mapping[str, str]]] = [
        (
            f"cluster {cluster.name}",
            {**counts, "capacity_bytes": cluster.capacity_bytes},
            {"capacity_bytes": usable, **cluster.source},
        ),
        (
            f"device {cluster.device.name}",
            # The device file's counts and links are defaults of a shorthand: those of the cluster count.
            {key: value for key, value in cluster.device.to_dict().items() if key not in _DEFAULTS},
            cluster.device.source,
        ),
    ]
    links = [("within a node", cluster.intra_node_link)]
    links += [("between nodes", cluster.inter_node_link)] if cluster.num_nodes > 1 else []
    parts += [(f"link {where}: {link.name}", link.to_dict(), link.source) for where, link in links]
    return [
        (
            part,
            key,
            _value_text(key, value),
            "" if isinstance(value, str | bool) else str(sources.get(key) or sources.get("*") or ""),
        )
        for part, values, sources in parts
        for key, value in values.items()
        if key not in _WORDS and value is not None
    ]


_WORDS = ("name", "source", "aliases", "cuda_names")
_DEFAULTS = ("devices_per_node", "nics_per_node", "intra_node_link", "inter_node_link")


def _value_text(key: str, value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name} {_value_text(key, item)}" for name, item in value.items())
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return f"{min(y for _, y in value):.3g} to {max(y for _, y in value):.3g} by size"
        return str(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("bytes"):
            return format_bytes(value)
        if key.endswith("bytes_per_second"):
            return f"{value / 1e9:.4g} GB/s"
        if key.endswith("flop_per_second"):
            return f"{value / 1e12:.4g} TFLOP/s"
        if key.endswith("seconds"):
            return format_seconds(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def model_table(rows: Sequence[tuple[str, int, str]]) -> RenderableType:
    """The models of the zoo: name, parameters, what it is."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("")
    for name, parameters, what in rows:
        table.add_row(name, format_count(parameters), what)
    return table


def profile_text(profile: Profile) -> str:
    """What a profile has, and where it was measured."""
    machine = profile.machine
    steady = [o.spread for o in profile.operators] + [c.spread for c in profile.collectives]
    lines = [
        f"{machine.device}, torch {machine.torch}, {machine.processes} at once, {machine.date}: "
        f"{len(profile.operators)} operators in {len(profile.blocks)} blocks, {len(profile.collectives)} collectives, "
        f"{len(profile.overlaps)} overlaps, {len(profile.optimizers)} optimizer steps, {len(profile.copies)} copies"
    ]
    if steady:
        lines.append(f"  median spread of a row {sorted(steady)[len(steady) // 2]:.1%}")
    for row in sorted(profile.blocks, key=lambda row: (row.name, row.micro_batch)):
        seconds = (row.forward_seconds + row.forward_host_seconds, row.backward_seconds + row.backward_host_seconds)
        if machine.kind != "cpu":  # the processor works beside the device
            seconds = (max(row.forward_seconds, row.forward_host_seconds),
                       max(row.backward_seconds, row.backward_host_seconds))  # fmt: skip
        lines.append(
            f"  {row.name}, micro-batch {row.micro_batch}: forward {format_seconds(seconds[0])}, backward "
            f"{format_seconds(seconds[1])}, saves {format_bytes(row.saved_bytes)} (spread {row.spread:.0%})"
        )
    return "\n".join(lines)


def comparison(
    *,
    predicted_step_seconds: float,
    measured_step_seconds: float,
    predicted_peak_bytes: Sequence[float],
    measured_peak_bytes: Sequence[float | None],
    memory_kind: str,
) -> RenderableType:
    """Predicted beside measured, after training; a peak that a rank does not know is -."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "step",
        format_seconds(predicted_step_seconds),
        format_seconds(measured_step_seconds),
        f"{measured_step_seconds / predicted_step_seconds:.2f}",
    )
    known = [peak for peak in measured_peak_bytes if peak is not None]
    predicted, measured = max(predicted_peak_bytes), max(known) if len(known) == len(measured_peak_bytes) else None
    table.add_row(
        f"peak memory ({memory_kind})",
        format_bytes(predicted),
        "-" if measured is None else format_bytes(measured),
        "-" if measured is None else f"{measured / predicted:.2f}",
    )
    return table
