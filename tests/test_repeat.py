"""A graph made deep by repeating its layers is the graph of the deep model: blocks, names, shapes, bytes, prices."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from planner.cluster import Cluster
from planner.costs import price
from planner.errors import PlanError
from planner.graph import reads
from planner.plan import Mesh
from planner.repeat import repeated, runs
from planner.trace import trace
from planner.zoo.bert import BERTConfig
from planner.zoo.gpt import GPTConfig
from planner.zoo.llama import LlamaConfig
from planner.zoo.registry import _batch, _module
from planner.zoo.t5 import T5Config

DEPTH = 6
CONFIGS: dict[str, Any] = {
    "gpt": GPTConfig(layers=3, width=32, heads=4, context=16, vocabulary=64, dropout=0.1),
    "llama": LlamaConfig(layers=3, width=32, heads=4, key_value_heads=2, hidden=48, vocabulary=64, context=16),
    "experts": LlamaConfig(
        layers=3, width=32, heads=4, key_value_heads=2, hidden=48, vocabulary=64, context=16, experts=4
    ),
    "bert": BERTConfig(layers=3, width=32, heads=4, context=16, vocabulary=64),
    "t5": T5Config(layers=4, width=32, heads=4, head=8, hidden=48, vocabulary=64),
}


@cache
def traced(name, layers):
    config = replace(CONFIGS[name], layers=layers)
    with torch.device("meta"):
        model = _module(config)
    return trace(model, _batch(config, 16), precision="bf16", device_kind="cuda", name="model")


def tables(graph):
    costs = price(
        graph, Cluster.load("8xA100-80GB"), mesh=Mesh(pp=2, dp_shard=4), micro_batch=2, num_microbatches=4,
        schedule="1f1b", precision="bf16", optimizer="adamw",
    )  # fmt: skip
    return costs.forward_seconds, costs.backward_seconds, costs.state_bytes, costs.activation_bytes, costs.hop_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_repeated_layers_are_those_of_the_deep_model(name):
    config = CONFIGS[name]
    short, deep = traced(name, config.layers), traced(name, DEPTH)
    made = repeated(short, [len(run) + DEPTH - config.layers for run in runs(short)])
    graph = made.graph
    assert [b.name for b in graph.blocks] == [b.name for b in deep.blocks]
    assert [short.blocks[o].class_index for o in made.origins] == [b.class_index for b in graph.blocks]
    for ours, theirs in zip(graph.blocks, deep.blocks, strict=True):
        assert graph.classes[ours.class_index] == deep.classes[theirs.class_index]
        assert (ours.saved, ours.input_bytes) == (theirs.saved, theirs.input_bytes)
        for field in ("inputs", "shared", "outputs", "parameters", "buffers"):
            shapes = [
                [(g.tensors[t].shape, g.tensors[t].dtype) for t in getattr(b, field)]
                for g, b in ((graph, ours), (deep, theirs))
            ]
            assert shapes[0] == shapes[1], (ours.name, field)
        names = [[g.tensors[t].name for t in b.parameters] for g, b in ((graph, ours), (deep, theirs))]
        assert names[0] == names[1]
    assert graph.num_parameters == deep.num_parameters
    assert graph.flop_per_sample() == deep.flop_per_sample()
    assert graph.tie_groups == () or len(graph.tie_groups) == len(deep.tie_groups)
    for ours, theirs in zip(tables(graph), tables(deep), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_repeated_nodes_read_what_the_layer_before_made(name):
    config = CONFIGS[name]
    short, deep = traced(name, config.layers), traced(name, DEPTH)
    graph = repeated(short, [len(run) + DEPTH - config.layers for run in runs(short)]).graph
    assert [n.op for n in graph.nodes] == [n.op for n in deep.nodes]
    assert [n.path for n in graph.nodes] == [n.path for n in deep.nodes]
    assert len(graph.dropout_nodes) == len(deep.dropout_nodes)
    makers = [
        [sorted(_makers(g, n)) for n in range(len(g.nodes))] for g in (graph, deep)
    ]  # which nodes each node reads from
    assert makers[0] == makers[1]


def _makers(graph, node):
    made = {t: i for i, n in enumerate(graph.nodes) for t in n.outputs if t is not None}
    return [made[t] for t in reads(graph.nodes[node]) if t in made]


def test_fewer_layers_than_were_traced_are_refused():
    short = traced("gpt", 3)
    with pytest.raises(PlanError, match="runs of 3 equal blocks"):
        repeated(short, [2])
