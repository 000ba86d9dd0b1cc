"""How much of a model's work has a sharding rule: models of the zoo at real sizes, Hugging Face families small.

    python -m benchmarks.sharding_rules [MODEL ...] [--degree 2] [--json]

MODEL is a name of the zoo, a Hugging Face model type (made small), or a family of tests/families.py as `family:NAME`.
FLOP and bytes of a node are those of the kernels that its forward launches at micro-batch 1, on fake tensors. A node is
split if some option of its rule splits a tensor, and lighter if a rank then does less than all of its work (two ranks
that split the queries of a causal attention do not: each gets a mask instead). Run it from the root of the repository;
it needs transformers.
"""

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.graph import Graph, Node, Tensor, reads
from planner.shard.placement import differentiable
from planner.shard.rules import TABLE, has_rule, options
from planner.trace import pricing

ZOO = ("gpt2-xl", "llama3-8b", "bert-large", "t5-large", "vit-l16", "mixtral-8x7b", "resnet50", "unet")
MODEL_TYPES = (
    "albert", "electra", "deberta-v2", "xlnet", "gpt_neo", "gptj", "gpt_neox", "falcon", "qwen2", "qwen3", "mistral",
    "olmo2", "cohere", "swin", "convnext", "segformer", "dinov2", "pegasus", "m2m_100", "funnel", "roformer", "olmoe",
    "gemma2", "granite",
)  # fmt: skip
FAMILIES = (
    "gpt2", "llama", "bert", "t5", "vit", "mixtral", "qwen2-moe+router", "gemma3", "phi3", "opt", "whisper",
    "distilbert", "bart", "mamba",
)  # fmt: skip
TARGETS = {"resnet50": 0.95, "unet": 0.95}
TARGET = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Coverage of one model: of its forward FLOP and bytes, operators without rule and how often they occur."""

    model: str
    nodes: int
    flop_share: float  # in nodes that a rule splits
    lighter_share: float  # in nodes of which a rank then does less than all
    bytes_share: float
    without_rule: dict[str, int]
    without_split: dict[str, int]  # operators that compute and have a rule, which splits nothing here

    @property
    def is_met(self) -> bool:
        """Whether the model reaches its target."""
        return self.flop_share >= TARGETS.get(self.model, TARGET)


@dataclass(frozen=True, slots=True)
class _Covered:
    """Of one node: its work, whether an option splits it, and whether one makes it less."""

    flop: float
    num_bytes: float
    is_split: bool
    is_lighter: bool


def coverage(name: str, graph: Graph, degree: int) -> Row:
    """Coverage of the blocks of a graph on `degree` ranks."""
    moving = differentiable(graph)
    known: dict[object, _Covered] = {}
    found: list[_Covered] = []
    without_rule: Counter[str] = Counter()
    without_split: Counter[str] = Counter()
    for node in (graph.nodes[i] for block in graph.blocks for i in block.nodes):
        key = _key(node, graph.tensors, moving)
        if key not in known:
            ways = options(node, graph.tensors, degree, {}, moving)
            is_split = any(p is not None and p.is_part for o in ways for p in (*o.operands, *o.outputs))
            known[key] = _Covered(*_work(node, graph.tensors), is_split, any(o.share < 1 for o in ways))
        found.append(known[key])
        if not has_rule(node.op):
            without_rule[node.op] += 1
        elif found[-1].flop and not found[-1].is_split:
            without_split[node.op] += 1
    flop, num_bytes = sum(c.flop for c in found) or 1.0, sum(c.num_bytes for c in found) or 1.0
    return Row(
        model=name,
        nodes=len(found),
        flop_share=sum(c.flop for c in found if c.is_split) / flop,
        lighter_share=sum(c.flop for c in found if c.is_lighter) / flop,
        bytes_share=sum(c.num_bytes for c in found if c.is_split) / num_bytes,
        without_rule=dict(without_rule),
        without_split=dict(without_split),
    )


def _work(node: Node, tensors: Sequence[Tensor]) -> tuple[float, float]:
    """FLOP and bytes of the kernels that the forward of one node launches at micro-batch 1."""
    made = [t for t in node.outputs if t is not None]
    kernels, _ = pricing.price_forward(tensors, [node], made)
    return sum(k.flop.at(1) for k in kernels), sum(k.num_bytes.at(1) for k in kernels)


def _key(node: Node, tensors: Sequence[Tensor], moving: Iterable[int]) -> object:
    """Equal for nodes that do equal work: what they are called with, tensors by shape and dtype."""
    distinct = {t: i for i, t in enumerate(dict.fromkeys(reads(node)))}
    shapes = tuple((tensors[t].shape, tensors[t].dtype, t in moving) for t in distinct)
    arguments = repr((node.args, node.kwargs))
    for tensor, position in distinct.items():
        arguments = arguments.replace(f"Ref(tensor={tensor})", f"Operand({position})")
    return node.op, shapes, arguments


def graph_of(name: str) -> Graph:
    """The graph of a model for CUDA, without weights."""
    from planner.trace import trace
    from planner.zoo import NAMES, load_model

    if name.startswith("family:"):
        from tests import families

        family = name.partition(":")[2]
        return trace(families.make(family), families.batch(family, 2), precision="fp64", device_kind="cpu")
    if name in NAMES:
        loaded = load_model(name, device="meta")
        return trace(loaded.module, loaded.batch, precision="bf16")
    from benchmarks.architectures import write_config

    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(str(write_config(name, Path(folder), small=True)), device="meta")
        return trace(loaded.module, loaded.batch, precision="bf16", loss_fn=loaded.loss_fn)


def rows(names: Iterable[str], degree: int) -> Iterator[Row]:
    """A row for each model that has a graph and whose work is linear in the samples."""
    for name in names:
        graph = graph_of(name)
        if not graph.fallbacks and not graph.couples_samples:
            yield coverage(name, graph, degree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*ZOO, *(f"family:{f}" for f in FAMILIES), *MODEL_TYPES])
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options_given = parser.parse_args()
    warnings.simplefilter("ignore")
    names = TABLE
    found = rows(options_given.models, options_given.degree)
    if options_given.json:
        print(json.dumps({"rules": len(names), "models": [asdict(row) for row in found]}, indent=1))
        return
    print(f"{len(names)} operators have a rule")
    print(f"{'model':24}{'nodes':>7}{'FLOP split':>12}{'lighter':>9}{'bytes':>9}  target  without rule, without split")
    for row in found:
        missing = [f"{op} x{n}" for one in (row.without_rule, row.without_split) for op, n in sorted(one.items())]
        print(
            f"{row.model:24}{row.nodes:>7}{row.flop_share:>12.2%}{row.lighter_share:>9.2%}{row.bytes_share:>9.2%}  "
            f"{'met' if row.is_met else 'MISSED':8}{', '.join(missing)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
