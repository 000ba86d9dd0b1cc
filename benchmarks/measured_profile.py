"""Forward and backward of a model on one core: predicted by rates, predicted by a profile, and as it is.

    python -m benchmarks.measured_profile [MODEL ...] [--micro-batch 4] [--steps 15] [--json]

All three are of one process on one thread, the real passes in seconds of the process's own time, so that other programs
count only as far as they share its caches. The blocks are lowered as the trainer lowers them. The profile is measured
at other micro-batches too (1 and 8): the one that is compared is among them, or between them with --between.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch

from benchmarks.overhead import lowered
from planner.costs import least_seconds
from planner.measure import local_cluster
from planner.measure.operators import measure_operators
from planner.measure.passes import cases
from planner.plan import Mesh
from planner.profile import Profile, measured_graph
from planner.runtime.blocks import INPUT, WEIGHTS
from planner.runtime.machine import this_machine
from planner.trace import trace
from planner.zoo.load import load_model
from planner.zoo.text import random_batch

MODELS = ("gpt-tiny", "llama-tiny", "bert-tiny", "resnet-tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of one micro-batch; errors are (predicted - actual) / actual."""

    model: str
    micro_batch: int
    actual_seconds: float
    by_rates_seconds: float
    by_profile_seconds: float
    by_rates_error: float
    by_profile_error: float


def compare(name: str, micro_batch: int, steps: int, *, between: bool) -> Row:
    """One model."""
    loaded = load_model(name, device="cpu", seed=0)
    graph = trace(loaded.module, loaded.batch, precision="fp32", name=name, device_kind="cpu")
    cluster = local_cluster(num_processes=1)
    sizes = (1, 8) if between else tuple(sorted({1, micro_batch, 8}))
    profile = measure_operators(
        cases([(graph, {})], sizes), Profile(machine=this_machine("cpu", 1)), budget_seconds=40.0,
        keep=lambda found: None, progress=lambda what, done, of: None,
    )  # fmt: skip
    predicted = [
        least_seconds(each, cluster, mesh=Mesh(), micro_batch=micro_batch)
        for each in (graph, measured_graph(graph, profile))
    ]
    actual = passes(graph, loaded, micro_batch, steps)
    errors = [seconds / actual - 1 for seconds in predicted]
    return Row(
        model=name, micro_batch=micro_batch, actual_seconds=actual, by_rates_seconds=predicted[0],
        by_profile_seconds=predicted[1], by_rates_error=errors[0], by_profile_error=errors[1],
    )  # fmt: skip


def passes(graph, loaded, micro_batch, steps):
    """Median seconds of the process for forward and backward of all blocks, gradients dropped in between."""
    torch.set_num_threads(1)
    batch = random_batch(loaded.batch, global_batch=micro_batch, seed=0, step=0)
    stage = lowered(graph, loaded.module)
    weight = torch.full((1, micro_batch), 1.0 / micro_batch, dtype=torch.float64)
    keywords = {f"{INPUT}{t}": batch[graph.tensors[t].name] for t in graph.inputs} | {f"{INPUT}{WEIGHTS}": weight}
    times = []
    for _ in range(steps + 3):
        loaded.module.zero_grad()
        start = time.process_time()
        stage(**keywords).backward()
        times.append(time.process_time() - start)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--between", action="store_true", help="measure at 1 and 8 alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [compare(m, arguments.micro_batch, arguments.steps, between=arguments.between) for m in arguments.models]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"{'model':16}{'actual':>10}{'by rates':>12}{'error':>9}{'by profile':>12}{'error':>9}")
    for row in rows:
        print(
            f"{row.model:16}{row.actual_seconds * 1e3:>7.1f} ms{row.by_rates_seconds * 1e3:>9.1f} ms"
            f"{row.by_rates_error:>+9.1%}{row.by_profile_seconds * 1e3:>9.1f} ms{row.by_profile_error:>+9.1%}"
        )


if __name__ == "__main__":
    main()
