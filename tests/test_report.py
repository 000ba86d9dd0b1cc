import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from planner import report
from planner.cluster import Cluster, all_devices, all_presets
from planner.plan import Mesh
from planner.report.tracing import trace_data, trace_text
from planner.trace import trace
from tests.test_plan import PLAN

COLUMNS = 100
GOLDEN = """\
gpt-small on 1x4xA100-80GB (4 x A100-80GB, 73.6 GiB usable each)
global batch 32, bf16, adamw
                                  recom-   micro-  sched-                            peak
   mesh         devices  ZeRO      puted  batches  ule       step    MFU  bubble   memory    gap
─────────────────────────────────────────────────────────────────────────────────────────────────
1  pp 2 x dp 2        4  1, 3, 2     40%    8 x 2  1f1b    250 ms  41.0%   12.5%  3.0 GiB  0.05%
2  dp 4               4  1, 3, 2     40%    8 x 2  -       250 ms  41.0%       -  3.0 GiB  0.05%"""


def _printed(renderable, width=COLUMNS):
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _large(rank):
    blocks = tuple(replace(b, name=f"{b.name}.{i}") for i in range(20) for b in PLAN.block_plans)
    return replace(
        PLAN,
        model="llama3-405b",
        mesh=Mesh(pp=16, dp_shard=64),
        stages=tuple(replace(PLAN.stages[0], blocks=blocks) for _ in range(16)),
        num_microbatches=128,
        prediction=replace(PLAN.prediction, step_seconds=123.4 * rank, gap=0.001, peak_bytes=(71.9 * 2**30,) * 16),
    )


def test_the_ranking_fits_in_100_columns():
    text = _printed(report.ranking([_large(1), _large(2)], cluster=Cluster.load("128x8xH100-80GB")))
    wide = _printed(report.ranking([_large(1), _large(2)], cluster=Cluster.load("128x8xH100-80GB")), width=300)

    assert text == wide
    assert max(len(line) for line in text.splitlines()) <= COLUMNS
    assert "pp 16 x dp 64" in text
    assert "llama3-405b on 128x8xH100-80GB (1024 x H100-80GB" in text


def test_hybrid_sharding_shows_replicas_times_shards():
    plan = replace(PLAN, mesh=Mesh(pp=2, dp_replicate=4, dp_shard=8))

    assert report.describe_layout(plan) == "pp 2 x dp 4x8"
    assert "64 devices (pp 2, dp_replicate 4, dp_shard 8)" in report.plan_text(plan)


def test_the_ranking_in_full():
    other = replace(PLAN, mesh=Mesh(dp_shard=4), stages=(replace(PLAN.stages[0], blocks=PLAN.block_plans),))

    assert _printed(report.ranking([PLAN, other], cluster=Cluster.load("1x4xA100-80GB"))) == GOLDEN


def test_what_does_not_fit_is_said_under_the_ranking():
    plan = replace(PLAN, prediction=replace(PLAN.prediction, capacity_bytes=2.0 * 2**30))
    text = _printed(report.ranking([PLAN, plan], cluster=Cluster.load("1x4xA100-80GB")))

    assert text.splitlines()[-1] == "DOES NOT FIT in memory: 2"


@pytest.mark.parametrize(
    "cluster", [*all_presets(), *(Cluster.load(f"2x4x{device.name}") for device in all_devices())], ids=lambda c: c.name
)
def test_every_number_of_a_cluster_has_a_source(cluster):
    rows = report.cluster_rows(cluster)
    words = {"kind", "compute_capability", "synchronous_dispatch"}

    assert [(part, key) for part, key, _, source in rows if not source and key not in words] == []
    assert {key for _, key, _, _ in rows} > {"capacity_bytes", "peak_flop_per_second", "bytes_per_second"}


def test_a_cluster_in_100_columns():
    text = _printed(report.cluster_table(Cluster.load("2x8xA100-80GB")))

    assert text.startswith("2x8xA100-80GB: 2 nodes of 8 A100-80GB, 73.6 GiB usable each\n\n")
    assert max(len(line) for line in text.splitlines()) <= COLUMNS
    assert "link between nodes: infiniband-hdr" in text


def test_predicted_beside_measured():
    text = _printed(
        report.comparison(
            predicted_step_seconds=0.1,
            measured_step_seconds=0.15,
            predicted_peak_bytes=[1 << 30, 2 << 30],
            measured_peak_bytes=[1 << 30, 3 << 30],
            memory_kind="allocated",
        )
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]

    assert "predicted measured measured / predicted" in lines
    assert "step 100 ms 150 ms 1.50" in lines
    assert "peak memory (allocated) 2.0 GiB 3.0 GiB 1.50" in lines


def test_equal_plans_are_said_to_be_equal():
    assert _printed(report.difference([], "a.json", "b.json")) == "the plans are equal"


def test_a_difference_is_a_table_of_both_files():
    lines = [
        " ".join(line.split()) for line in _printed(report.difference([("mesh.pp", "2", "4")], "a", "b")).splitlines()
    ]

    assert "a b" in lines
    assert "mesh.pp 2 4" in lines


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        y: Tensor = self.dropout(torch.tanh(self.linear(x)))
        return y


class Odd(nn.Module):
    """Tied, frozen and unused parameters, dropout, a counter, a table made in forward, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + torch.arange(8.0)
        for layer in self.layers:
            x = layer(x)
        q = self.frozen(x).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 100:
                break
        return x.square().mean()


@pytest.fixture(scope="module")
def odd():
    ids = torch.zeros(2, 6, dtype=torch.int64)
    return trace(Odd(), {"ids": ids, "labels": ids}, precision="fp32", name="odd", device_kind="cpu")


TRACED = {
    "model", "precision", "has_graph", "fingerprint", "parameters", "flop", "inputs", "classes", "blocks", "ties",
    "attention", "dropout", "custom_operators", "updated_buffers", "prelude", "samples", "fallbacks",
}  # fmt: skip
COSTS = {"parameters", "flop_forward", "flop_backward", "saved_bytes", "saved_bytes_fixed", "input_bytes"}


def test_what_was_traced_is_json_with_stable_keys(odd):
    data = trace_data(odd, precision="fp32")

    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data) == TRACED
    assert set(data["classes"][0]) == COSTS | {"index", "blocks", "example"}
    assert set(data["blocks"][0]) == COSTS | {"name", "kind", "class", "crosses", "crosses_bytes"}
    assert {block["name"] for block in data["blocks"]} >= {"layers.0", "layers.1", "layers.2"}


def test_what_was_traced_by_hand(odd):
    data = trace_data(odd, precision="fp32")
    layer = next(block for block in data["blocks"] if block["name"] == "layers.1")

    assert data["parameters"] == {
        "total": 128 + 3 * 72 + 72 + 20,
        "trainable": 128 + 3 * 72 + 20,
        "frozen": 72,
        "unused": 20,
        "unused_names": ["unused.weight", "unused.bias"],
    }
    assert data["inputs"][0] == {"name": "ids", "shape": ["batch", 6], "dtype": "int64"}
    assert layer["parameters"] == 72
    assert layer["flop_forward"] == 2 * 6 * 8 * 8
    assert layer["flop_backward"] == 2 * layer["flop_forward"]
    assert layer["crosses_bytes"] == layer["input_bytes"] == 6 * 8 * 4
    assert [cross["shape"] for cross in layer["crosses"]] == [["batch", 6, 8]]
    assert sum(c["blocks"] for c in data["classes"]) == len(data["blocks"])
    assert data["flop"]["forward"] == sum(b["flop_forward"] for b in data["blocks"])
    [tie] = data["ties"]
    assert tie["names"] == ["tokens.weight", "head.weight"]
    assert len(tie["blocks"]) == 2
    assert [(d["block"], d["rate"]) for d in data["dropout"]] == [(f"layers.{i}", 0.25) for i in range(3)]
    assert all("test_report.py:" in d["source"] for d in data["dropout"])
    assert {b["buffer"] for b in data["updated_buffers"]} == {f"layers.{i}.calls" for i in range(3)}
    assert data["attention"] == {"causal": 1, "full": 0, "masked": 0}
    assert data["prelude"]["bytes"] >= 8 * 4
    assert data["has_graph"]
    assert not data["fallbacks"]


def test_what_was_traced_in_100_columns(odd):
    text = _printed(trace_text(odd, precision="fp32"))
    lines = text.splitlines()

    assert max(len(line) for line in lines) <= COLUMNS
    assert lines[0].startswith("odd: 436 parameters, 5 blocks of 3 classes, fp32")
    assert "layers.0 .. layers.2" in text
    for remark in (
        "tied: tokens.weight = head.weight, read by ",
        "frozen: 72 of 436 parameters",
        "unused: 20 parameters that the loss does not read (unused.weight, unused.bias)",
        "attention: 1 causal",
        "dropout: 3 places at rate 0.25 (test_report.py:",
        "buffers that forward updates: 3 (layers.0.calls, layers.1.calls, layers.2.calls; test_report.py:",
    ):
        assert any(line.startswith(remark) for line in lines), remark


def test_a_fallback_is_told_with_its_line_and_cure():
    graph = trace(Branching(), {"x": torch.zeros(2, 8)}, precision="fp32", name="branching", device_kind="cpu")
    data = trace_data(graph, precision="fp32")
    text = " ".join(_printed(trace_text(graph, precision="fp32")).split())

    assert not data["has_graph"]
    [fallback] = data["fallbacks"]
    assert "test_report.py:" in fallback["source"]
    assert all(fallback.values())
    assert f"no graph: {fallback['source']}: {fallback['reason']}; {fallback['cure']}" in text
    assert data["parameters"]["total"] == 3 * 72
    assert data["blocks"][-1]["name"] == ""


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class WithReversal(Branching):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Reversal.apply(layer(x))
        return x.square().mean()


def test_code_with_a_backward_of_its_own_is_named():
    graph = trace(WithReversal(), {"x": torch.zeros(2, 8)}, precision="fp32", device_kind="cpu")
    data = trace_data(graph, precision="fp32")

    assert len(data["custom_operators"]) == 3
    assert all("Reversal" in c["name"] and "test_report.py:" in c["source"] for c in data["custom_operators"])
    assert "your own code, called as it is: 3 (" in _printed(trace_text(graph, precision="fp32"), width=200)


def test_a_search_says_what_proved_its_ranking():
    text = partial(report.search_text, configurations=9, bounded=4, gap=0.001, delta=0.06, seconds=1.0)

    assert text(solved_exactly=0).startswith(
        "9 configurations considered, 4 bounded, the bounds of which prove the ranking, in 1.0 s.\n"
    )
    assert text(solved_exactly=2).startswith(
        "9 configurations considered, 4 bounded, 2 solved as integer programs, in 1.0 s.\n"
    )
