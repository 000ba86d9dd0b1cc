"""Rank 0 of 64 in one process: what torch says that a Llama on 8 tensor-parallel by 8 data ranks sends and holds.

    python -m tests.torch_oracle

Communication goes to torch's fake process group, tensors are fake: nothing is sent or allocated. A dispatch mode counts
collectives, `MemTracker` the bytes alive by category. `torch` is the model parallelised by torch's own
`parallelize_module` and `fully_shard`; `ours` are the lowered blocks of a plan, driven as the trainer drives them.
Prints JSON. A process of its own, for its default process group.
"""

import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public name for it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from planner.cluster import Cluster
from planner.costs import Strategy, price
from planner.graph import Graph
from planner.memory import elements, precision_named
from planner.plan import Mesh, Plan
from planner.runtime.blocks import INPUT, WEIGHTS
from planner.runtime.execute import GraphEngine
from planner.runtime.peers import Axes
from planner.runtime.weights import Values, take
from planner.runtime.zero import Sharder
from planner.search.sharded import prices
from planner.shard.placement import R, Sharding, split
from planner.shard.program import resharded, variants
from planner.shard.stored import stored
from planner.simulate import peak_bytes
from planner.trace import priced, trace
from tests.distributed_cases import Kind, make_plan
from tests.sharded import split_by

TP, DP, LAYERS, TOKENS, MICRO_BATCHES = 8, 8, 4, 512, 2
WIDTH, HEADS, KEY_VALUE_HEADS, VOCABULARY = 1024, 16, 8, 32000
HIDDEN = 2784  # 348 rows on a rank, which 8 data ranks hold as 8 times 44
CLUSTER = "8x8xH100-80GB"
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
KNOWN = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Collectives(TorchDispatchMode):
    """Notes every collective: pass, name, bytes of the whole tensor, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name and "wait" not in name:
            sizes = [x.numel() * x.element_size() for x in tree_leaves((result, args)) if isinstance(x, torch.Tensor)]
            self.seen.append((self.phase, KNOWN[re.sub("base|into|tensor|_", "", name.split(".")[1])], max(sizes)))
        return result


def torchs() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = make_model()
        ways: dict[str, ParallelStyle] = {f"self_attn.{n}": ColwiseParallel() for n in COLUMN[:3]}
        ways |= {f"mlp.{n}": ColwiseParallel() for n in COLUMN[3:]}
        ways |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], ways)
    for layer in model.model.layers:  # outside of the mode: a mesh reads values
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    collectives, tracker = Collectives(), MemTracker()
    with mode:
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        tracker.track_external(model)
        with collectives, tracker:
            loss = model(input_ids=ids, labels=ids).loss
            collectives.phase = "backward"
            loss.backward()
    return {"collectives": collectives.seen, **memory_of(tracker)}


def memory_of(tracker: MemTracker) -> dict[str, Any]:
    """Bytes by category at the peak, and around the passes of every module."""

    def by_category(snapshot: Any) -> dict[str, int]:
        (found,) = [kinds for device, kinds in snapshot.items() if device.type == "cpu"]
        return {str(kind).rpartition(".")[2].lower(): size for kind, size in found.items()}

    modules = {
        stats.mod_fqn.partition(".")[2]: {
            str(state.name).lower(): by_category(found[0]) for state, found in stats.snapshots.items()
        }
        for stats in tracker.memory_tracking.values()
    }
    return {
        "peak": by_category(tracker.get_tracker_snapshot("peak")),
        "end": by_category(tracker.get_tracker_snapshot("current")),
        "modules": modules,
    }


# --- the planner's -----------------------------------------------------------------------------------


def graph_and_shardings(precision: str, *, is_found: bool) -> tuple[Graph, tuple[Sharding, ...]]:
    """The model's trace, with its layers split by columns and rows, as torch's are, or as the program finds it."""
    with torch.device("meta"):
        model = make_model()
        ids = torch.zeros(2, TOKENS, dtype=torch.long)
    graph = trace(model, {"input_ids": ids, "labels": ids}, precision=precision, name="llama", device_kind="cpu")
    priced_as = prices(graph, Cluster.load(CLUSTER), {"tp": TP}, "tp", global_batch=DP)
    if is_found:
        return graph, variants(graph, TP, priced_as)[-1].shardings
    held = {}
    for tensor in graph.tensors:
        if tensor.kind == "parameter":
            leaf = tensor.name.split(".")[-2]
            dim = 0 if leaf in COLUMN else 1 if leaf in ROW else None
            held[tensor.name] = R if dim is None else split(dim, [tensor.shape[dim]])
    between = {t: R for block in graph.blocks for t in block.outputs}
    return graph, resharded(graph, TP, priced_as, held, between)


def plan_of(graph: Graph, shardings: Sequence[Sharding], precision: str, num_microbatches: int = MICRO_BATCHES) -> Plan:
    """ZeRO-3 over 8 data ranks, one sample in each micro-batch."""
    distinct, of_block = stored(shardings)
    plan = make_plan(
        graph, Kind(name="", dp=DP, zero=(3,)), global_batch=DP * num_microbatches, num_microbatches=num_microbatches,
        precision=precision, mesh=Mesh(dp_shard=DP, tp=TP), shardings=distinct,
    )  # fmt: skip
    blocks = tuple(replace(b, shardings=(i,)) for b, i in zip(plan.stages[0].blocks, of_block, strict=True))
    return replace(plan, stages=(replace(plan.stages[0], blocks=blocks),))


def ours(precision: str, *, is_found: bool = False) -> dict[str, Any]:
    graph, shardings = graph_and_shardings(precision, is_found=is_found)
    plan = plan_of(graph, shardings, precision)
    mesh = init_device_mesh("cpu", (1, 1, DP, TP), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    cpu = torch.device("cpu")
    with mode:
        model = make_model()
    axes = Axes(plan, graph, mesh, mesh)
    sharder = Sharder(mesh["dp_shard"], precision)
    values = Values(model, weights=None, seed=0, init=None, device=cpu)
    tensors = take(model, plan, graph, 0, cpu, values=values, wrapped=True, parallel=axes.parallel)
    engine = GraphEngine(plan, graph, tensors, mesh=mesh, axes=axes, sharder=sharder, device=cpu)
    del model, tensors, values
    collectives, tracker = Collectives(), MemTracker()
    stage = engine.stage
    with mode:
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        keywords = {f"{INPUT}{t}": ids for t in graph.inputs}
        keywords[f"{INPUT}{WEIGHTS}"] = torch.ones(1, 1, dtype=torch.float64)
        tracker.track_external(stage)
        with collectives, tracker:
            for is_last in (False, True):
                tracker.reset_mod_stats()
                sharder.before_micro_batch(is_last=is_last)
                collectives.phase = "forward"
                loss = stage(**keywords)
                collectives.phase = "backward"
                loss.backward()
                del loss
    return {
        "collectives": collectives.seen,
        **memory_of(tracker),
        "planned": planned(axes.planned.graph, graph, shardings, precision),
    }


def planned(local: Graph, whole: Graph, shardings: Sequence[Sharding], precision: str) -> dict[str, Any]:
    """What the planner says of the same step, without the modules of torch."""
    graph = priced(local, whole, TP, "cpu")
    policy = precision_named(precision)
    costs = price(
        graph, Cluster.load(CLUSTER), mesh=Mesh(dp_shard=DP, tp=TP), micro_batch=1,
        num_microbatches=MICRO_BATCHES, schedule="1f1b", precision=precision, optimizer="sgd",
        splits=split_by(shardings, TP),
    )  # fmt: skip
    strategy = costs.strategies.index(Strategy(zero=3, recompute=0))
    stage = [(position, strategy) for position in range(len(graph.blocks))]
    blocks = []
    for position, block in enumerate(graph.blocks):
        shapes = [(graph.tensors[t].shape, graph.tensors[t].requires_grad) for t in block.parameters]
        count = elements([cast("Any", shapes)], DP)
        kind = graph.classes[block.class_index]
        blocks.append(
            {
                "name": block.name,
                "inside": [(c.phase, c.collective, round(c.num_bytes.at(1))) for c in kind.collectives],
                "gathered": policy.compute_bytes * int(count.gathered[0]),
                "reduced": policy.reduce_bytes * int(count.reduced[0]),
                "shard": policy.master_bytes * int(count.shard[0]),
                "saved": float(costs.activation_bytes[position, strategy]),
            }
        )  # fmt: skip
    return {"blocks": blocks, "peak": peak_bytes(costs, [stage])[0]}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP * DP)
    found = {"torch": torchs(), "fp32": ours("fp32"), "bf16": ours("bf16"), "found": ours("bf16", is_found=True)}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
