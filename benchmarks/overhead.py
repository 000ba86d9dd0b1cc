"""Time of lowered blocks on one device against the eager module that they were traced from: forward and backward.

    python -m benchmarks.overhead [MODEL ...] [--pairs 31] [--json]

Both compute with the same parameters, in float32 on one thread of a CPU, and take turns: eager, lowered, lowered,
eager, and so on. Blocks are driven as the trainer drives them, as one pipeline stage with weighed losses, without a
wrapper for data parallelism. Times are seconds of CPU of this process, so that other processes count only as far as
they share its caches. `ratio` is that of the medians, `quartiles` are those of the ratio of each pair.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn

from planner.graph import Graph
from planner.runtime.blocks import INPUT, WEIGHTS, Stage, constant, lower_block, lower_prelude
from planner.runtime.execute import tied_within
from planner.trace import trace
from planner.zoo.bert import BERT, BERTConfig
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.llama import Llama, LlamaConfig
from planner.zoo.resnet import ResNet, ResNetConfig

CPU = torch.device("cpu")
LIMIT = 1.02
VOCABULARY, CONTEXT = 4096, 256

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def _text(model: nn.Module, samples: int) -> Made:
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, samples, CONTEXT), generator=draws)
    return model, {"input_ids": ids[0], "labels": ids[1]}


def _gpt() -> Made:
    return _text(GPT(GPTConfig(layers=4, width=256, heads=8, context=CONTEXT, vocabulary=VOCABULARY)), 2)


def _llama() -> Made:
    config = LlamaConfig(
        layers=4, width=256, heads=8, key_value_heads=4, hidden=688, vocabulary=VOCABULARY, context=CONTEXT
    )
    return _text(Llama(config), 2)


def _bert() -> Made:
    return _text(BERT(BERTConfig(layers=4, width=256, heads=8, context=CONTEXT, vocabulary=VOCABULARY)), 2)


def _resnet() -> Made:
    draws = torch.Generator().manual_seed(0)
    model = ResNet(ResNetConfig(blocks=(2, 2, 2, 2), channels=32, classes=100, image=128))
    images = torch.randn(8, 3, 128, 128, generator=draws)
    return model, {"images": images, "labels": torch.randint(100, (8,), generator=draws)}


MODELS: dict[str, Callable[[], Made]] = {"gpt": _gpt, "llama": _llama, "bert": _bert, "resnet": _resnet}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Median seconds of a step, and how many times as long the lowered one takes."""

    model: str
    eager_seconds: float
    lowered_seconds: float
    ratio: float
    quartiles: tuple[float, float]


def lowered(graph: Graph, model: nn.Module) -> Stage:
    """All blocks as one stage, over the model's own parameters and buffers."""
    named = dict[str, torch.Tensor](model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
    attributes = {
        i: constant(graph, i, CPU) if tensor.kind == "constant" else named[tensor.name]
        for i, tensor in enumerate(graph.tensors)
        if tensor.kind in ("parameter", "buffer", "constant")
    }
    positions = range(len(graph.blocks))
    tied = tied_within(graph, positions)
    blocks = [
        lower_block(graph, block, tied=tied, attributes=attributes, micro_batch=1, device=CPU, weighed=True)
        for block in graph.blocks
    ]
    needed = [t for block in graph.blocks for t in block.shared]
    return Stage(
        graph, blocks, positions=positions, recompute=[False] * len(blocks),
        tied={t: model.get_parameter(graph.tensors[t].name) for t in tied},
        prelude=lower_prelude(graph, needed, attributes=attributes, micro_batch=1, device=CPU, weighed=True),
    )  # fmt: skip


def measure(name: str, pairs: int) -> Row:
    """Steps of both, in turns, after two of each that are not counted."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    graph = trace(model, batch, precision="fp32", device_kind="cpu")
    stage = lowered(graph, model)
    weight = torch.full((1, 1), 1 / batch["labels"].numel(), dtype=torch.float64)  # every label counts
    keywords = {f"{INPUT}{t}": batch[graph.tensors[t].name] for t in graph.inputs} | {f"{INPUT}{WEIGHTS}": weight}

    def eager() -> torch.Tensor:
        loss: torch.Tensor = model(**batch)
        return loss

    def by_blocks() -> torch.Tensor:
        loss: torch.Tensor = stage(**keywords)
        return loss

    def seconds(forward: Callable[[], torch.Tensor]) -> float:
        model.zero_grad()
        start = time.process_time()
        forward().backward()  # type: ignore[no-untyped-call]
        return time.process_time() - start

    torch.testing.assert_close(by_blocks(), eager(), rtol=1e-4, atol=0.0)
    for _ in range(2):
        seconds(eager)
        seconds(by_blocks)
    found: list[tuple[float, float]] = []
    for number in range(pairs):
        first, second = (eager, by_blocks) if number % 2 == 0 else (by_blocks, eager)
        one, two = seconds(first), seconds(second)
        found.append((one, two) if number % 2 == 0 else (two, one))
    each = statistics.quantiles((after / before for before, after in found), n=4)
    before, after = (statistics.median(times) for times in zip(*found, strict=True))
    return Row(
        model=name, eager_seconds=before, lowered_seconds=after, ratio=after / before, quartiles=(each[0], each[2])
    )


def rows(names: list[str], pairs: int) -> Iterator[Row]:
    """One row for each model."""
    torch.set_num_threads(1)
    for name in names:
        yield measure(name, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = rows(given.models, given.pairs)
    if given.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    print(f"{'model':10}{'eager s':>10}{'lowered s':>11}{'ratio':>8}   quartiles of pairs   at most {LIMIT}")
    for row in found:
        low, high = row.quartiles
        print(
            f"{row.model:10}{row.eager_seconds:>10.3f}{row.lowered_seconds:>11.3f}{row.ratio:>8.3f}"
            f"   {low:.3f} to {high:.3f}       {'yes' if row.ratio <= LIMIT else 'NO'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
