"""Ring attention: its price by hand, what plans say of it, and that nobody can ask for it."""

import functools
import json
from dataclasses import replace

import pytest

from planner.cluster import Cluster, Curve, Link, Slowdown
from planner.collectives import example_group
from planner.errors import PlanError
from planner.graph import Graph
from planner.plan import Mesh, Plan
from planner.report import plan_text
from planner.search import ways_to_split
from planner.search.choices import Pins
from planner.search.ring import NO_RING, Links, _ring_graph, ring_seconds
from planner.trace import trace
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.registry import batch_of_module
from tests.test_context_parallel import llama, long_plan

NO_SLOWDOWN = Slowdown(1.0, 1.0)


def links(ranks: int, slowdown: Slowdown = NO_SLOWDOWN, *, overlaps: bool = True) -> Links:
    """1 GB/s and nothing else, so that bytes are nanoseconds."""
    link = Link(
        name="example", kind="pcie", bytes_per_second=1e9, latency_seconds=0.0, launch_seconds=0.0,
        efficiency={"any": Curve(points=((1.0, 1.0),))}, source={"*": "example"},
    )  # fmt: skip
    return Links(example_group(ranks, link), slowdown, overlaps)


# --- the formula ---


@pytest.mark.parametrize(
    ("ranks", "key_value_bytes", "expected"),
    [
        (1, 1e9, (8.0, 16.0)),
        (4, 1e9, (4 * 2.0, 4 * 4.0 + 1.0)),  # all hidden, but that the last gradients have to get home
        (4, 3e9, (3 * 3.0 + 2.0, 4.0 + 2 * 6.0 + 4.0 + 3.0)),  # forward, and two of four steps of backward, wait
        (4, 5e9, (3 * 5.0 + 2.0, 5.0 + 2 * 10.0 + 5.0 + 5.0)),  # nothing is hidden whole
        (2, 3e9, (4.0 + 4.0, 8.0 + 8.0 + 3.0)),
    ],
)
def test_a_ring_takes_the_longer_of_computing_and_sending_in_each_step(ranks, key_value_bytes, expected):
    assert ring_seconds(ranks, 8.0, 16.0, key_value_bytes, links(ranks)) == pytest.approx(expected, rel=1e-12)


def test_computing_and_sending_slow_one_another_or_do_not_overlap():
    # Sending takes 1 s · 1.5 while 1.5 s / 1.25 = 1.2 s of the 2 s are computed: a step takes 2.3 s.
    slowed = ring_seconds(4, 8.0, 0.0, 1e9, links(4, Slowdown(1.25, 1.5)))
    assert slowed[0] == pytest.approx(3 * 2.3 + 2.0, rel=1e-12)
    after_another = ring_seconds(4, 8.0, 16.0, 1e9, links(4, overlaps=False))
    assert after_another == pytest.approx((3 * 3.0 + 2.0, 2 * 5.0 + 2 * 6.0 + 1.0), rel=1e-12)


# --- in the graph of a rank ---


@pytest.mark.parametrize("heads", [8, 6], ids=["heads exchanged for tokens", "keys and values gathered"])
def test_a_ring_does_the_work_of_a_fair_share_and_holds_its_own_keys_and_values(heads):
    config = GPTConfig(vocabulary=128, context=32_768, width=64 * heads, layers=2, heads=heads)
    model = GPT(config).to("meta")
    whole, cluster = trace(model, batch_of_module(model), precision="bf16", name="gpt"), Cluster.load("1x4xA100-80GB")
    rank = ways_to_split(whole, cluster, 4, "cuda")(("cp", 4))[0].graph
    found = _ring_graph(rank, cluster, Mesh(cp=4), 1)
    assert found is not None
    ringed, exposed = found
    block = whole.blocks[1]
    before, after, of_all = (g.classes[g.blocks[1].class_index] for g in (rank, ringed, whole))

    for phase, passes in (("forward", 1), ("backward", 2.5)):
        triangle = 2 * 2 * 32_768**2 / 2 * 64 * heads * passes  # a multiply-add is two; QK^T and PV
        steps = [k for k in after.kernels if k.kind == "attention" and k.phase == phase]
        assert len(steps) == 4
        assert sum(k.flop.at(1) for k in of_all.kernels if (k.kind, k.phase) == ("attention", phase)) == triangle
        assert sum(k.flop.at(1) for k in steps) == pytest.approx(triangle / 4)
    assert before.collectives
    assert after.collectives == ()
    both = 2 * 2 * 32_768 * 64 * heads  # bytes of the keys and values of all ranks
    is_gathered = any(made.collective == "all_gather" for made in before.collectives)
    assert is_gathered == (heads == 6)
    assert before.saved.at(1) - after.saved.at(1) == pytest.approx(0.75 * both if is_gathered else 0)
    assert exposed[1, 0] >= 0
    assert exposed[1, 1] > exposed[1, 0]  # the gradients' way home
    assert block.class_index == whole.blocks[2].class_index


def test_a_ring_on_slow_links_is_priced_as_sending_and_as_computing_on_fast_ones():
    seconds = {}
    for name in ("1x4xA100-80GB", "4x1xA100-80GB"):
        rank, cluster = llama_of_four(), Cluster.load(name)
        found = _ring_graph(rank, cluster, Mesh(cp=4), 1)
        assert found is not None
        seconds[name] = found[1][1]
    assert (seconds["4x1xA100-80GB"] > 2 * seconds["1x4xA100-80GB"]).all()


@functools.cache
def llama_of_four() -> Graph:
    graph, cluster = llama(2, 4096), Cluster.load("1x4xA100-80GB")
    return ways_to_split(graph, cluster, 4, "cuda")(("cp", 4))[0].graph


# --- in plans ---


def test_a_plan_of_context_parallelism_says_what_ring_attention_would_give_and_why_it_is_not_taken():
    plan = long_plan()
    ring = plan.ring_attention
    assert ring is not None
    assert plan.mesh.cp == 2
    assert 0.9 * plan.prediction.step_seconds < ring.step_seconds < plan.prediction.step_seconds
    assert 0.5 * max(plan.prediction.peak_bytes) < max(ring.peak_bytes) <= max(plan.prediction.peak_bytes)
    line = next(line for line in plan_text(plan).splitlines() if "ring attention" in line)
    assert line.startswith("  with ring attention: step ")
    assert "not taken: torch's ring attention (torch.distributed.tensor.experimental" in line
    assert NO_RING not in plan.notes
    assert json.loads(plan.dumps())["ring_attention"] == {
        "step_seconds": ring.step_seconds, "peak_bytes": list(ring.peak_bytes), "why_not": ring.why_not,
    }  # fmt: skip
    assert Plan.loads(plan.dumps()) == plan


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"peak_bytes": [1.0, 2.0]}, "ring_attention has 2 peak_bytes for 1 stages"),
        ({"step_seconds": "soon"}, r"ring_attention\.step_seconds must be a number"),
        ({"faster": True}, r"ring_attention\.faster is no key of a plan"),
    ],
)
def test_a_plan_file_with_another_ring_is_refused(changed, fault):
    data = json.loads(long_plan().dumps())
    data["ring_attention"] |= changed
    with pytest.raises(PlanError, match=fault):
        Plan.loads(json.dumps(data))


def test_a_plan_whose_ring_is_left_out_reads_as_before():
    data = json.loads(long_plan().dumps())
    del data["ring_attention"]
    assert Plan.loads(json.dumps(data)) == replace(long_plan(), ring_attention=None)


def test_ring_attention_cannot_be_fixed():
    with pytest.raises(PlanError, match="attention=ring cannot be fixed, it is priced and not executed: torch's ring"):
        Pins.of("cp=2,attention=ring")
    with pytest.raises(PlanError, match="attention=gathered cannot be fixed, its form is chosen by price"):
        Pins.of({"attention": "gathered"})
