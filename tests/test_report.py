from dataclasses import replace

import pytest
from rich.console import Console

from planner import report
from planner.cluster import Cluster, all_devices, all_presets
from planner.plan import Mesh
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
