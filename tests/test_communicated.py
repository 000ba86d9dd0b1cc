"""What a block communicates, said by the operator that causes it; sums that are made once a step."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.plan import Mesh
from planner.report import sharding_text
from planner.search import ranked_plans
from planner.search.communicated import communicated, summed_once_a_step
from planner.shard.localize import localize
from planner.shard.placement import Placement, Q, R, Sharding
from planner.shard.program import variants
from planner.trace import priced, trace
from tests.distributed_cases import graph_of
from tests.test_localize import PRICES


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


LINE = f"test_communicated.py:{Layer.forward.__code__.co_firstlineno + 1}"


def test_a_collective_is_said_by_what_makes_it_and_by_whose_gradient_it_sums():
    graph = trace(Layers(), {"x": torch.zeros(2, 32, 64)}, precision="fp32")
    local = priced(localize(graph, variants(graph, 2, PRICES)[0].shardings, 2).graph, graph, 2)
    found = [made for block in local.blocks for made in communicated(local, block, "tp", 2)]
    said = Counter((made.phase, made.collective, made.cause) for made in found)

    assert found
    assert {cause for phase, _, cause in said if phase == "forward"} == {f"what linear of down.weight ({LINE}) makes"}
    assert {cause for phase, _, cause in said if phase == "backward"} <= {
        f"gradient of what linear of up.weight ({LINE}) takes"
    }


@pytest.mark.parametrize("name", ["moe"])
def test_all_collectives_of_a_block_are_said_with_a_cause(name):
    graph = graph_of(name)
    for variant in variants(graph, 2, PRICES):
        local = priced(localize(graph, variant.shardings, 2).graph, graph, 2)
        for block in local.blocks:
            made = local.classes[block.class_index].collectives
            said = communicated(local, block, "tp", 3)
            assert Counter((c.phase, c.collective, c.num_bytes.at(3)) for c in made) == sum(
                (Counter({(c.phase, c.collective, c.num_bytes): c.count}) for c in said), Counter()
            )
            assert all(c.cause for c in said)
            assert communicated(local, block, "cp", 3) == ()


def test_partial_gradients_are_summed_once_a_step_each_rank_its_shard():
    graph = trace(Layers(), {"x": torch.zeros(2, 32, 64)}, precision="fp32")
    block = next(block for block in graph.blocks if len(block.parameters) == 4)
    split = Placement.parse("S0[256]")
    sharding = Sharding(options=(), parameters=(split, Q, Q, R), buffers=(), inputs=(), outputs=())
    names = [graph.tensors[t].name.removeprefix(f"{block.name}.") for t in block.parameters]
    sizes = [graph.tensors[t].num_elements.fixed for t in block.parameters]

    (made,) = summed_once_a_step(graph, block, sharding, shards=4, bytes_per_element=4)

    assert (made.phase, made.collective, made.count) == ("step", "all_reduce", 1)
    assert made.num_bytes == 4 * (sizes[1] + sizes[2]) / 4
    assert made.cause == f"gradients of {names[1]}, {names[2]}"
    whole = replace(sharding, parameters=(split, R, R, R))
    assert summed_once_a_step(graph, block, whole, shards=4, bytes_per_element=4) == ()


def test_show_prints_the_causes_the_sums_and_what_zero_does_with_cp():
    batch = {"x": torch.zeros(8, 32, 64)}
    fix = {"tp": 2, "dp": 2, "pp": 1, "micro_batch": 2}
    plan = ranked_plans(Layers(), "1x8xA100-80GB", batch=batch, precision="fp32", global_batch=8, fix=fix, top=1)[0]
    summed = summed_once_a_step(
        graph := trace(Layers(), batch, precision="fp32"), graph.blocks[0],
        Sharding(options=(), parameters=(Q,) * len(graph.blocks[0].parameters), buffers=(), inputs=(), outputs=()),
        shards=2, bytes_per_element=4,
    )  # fmt: skip
    assert "ranks of ZeRO" not in sharding_text(plan)

    with_sums = replace(plan, shardings=tuple(replace(s, collectives=summed) for s in plan.shardings))
    with_cp = replace(with_sums, mesh=Mesh(dp_shard=2, cp=2))

    assert "once a step: 1 x all_reduce of " in sharding_text(with_sums)
    assert "the 2 ranks of cp are ranks of ZeRO, too, 4 in all" in sharding_text(with_cp)
    assert type(with_sums).loads(with_sums.dumps()) == with_sums
