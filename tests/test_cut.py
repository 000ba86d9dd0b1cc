"""Blocks come from the structure of the model, whatever its names; each node is in one block."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph import Graph
from planner.trace import trace
from tests import models
from tests.test_trace import assert_covered_once, assert_equals_eager, mlp, mlp_batch, numbers

BATCH = {"x": numbers(3, 8)}


def blocks_of(graph: Graph) -> list[int]:
    """Class of each block that is no glue."""
    return [b.class_index for b in graph.blocks if b.kind == "block"]


def traced(model: nn.Module, batch: object = BATCH) -> Graph:
    graph = trace(model.double(), batch, precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    assert_covered_once(graph)
    return graph


def transformer(name: str, layers: int) -> Any:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes = {"vocab_size": models.VOCABULARY}
    with torch.device("meta"):
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=16, n_head=2, n_positions=32, **sizes))
        common = {"num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        if name == "llama":
            return LlamaForCausalLM(LlamaConfig(**common, **sizes))
        return BertForMaskedLM(BertConfig(**common, **sizes))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("layers", [2, 3, 7])
def test_n_layers_are_n_blocks_of_one_class(name, layers):
    graph = trace(transformer(name, layers), models.batch("gpt", 2, step=0), precision="bf16")
    assert not graph.fallbacks, graph.fallbacks
    assert_covered_once(graph)
    found = blocks_of(graph)
    assert len(found) == layers
    assert len(set(found)) == 1
    assert {b.kind for b in graph.blocks if b.class_index not in found} == {"glue"}
    assert all(len(carried) == 1 for carried in graph.carried)


@pytest.mark.parametrize(("name", "counts"), [("gpt", [4]), ("llama", [4]), ("resnet", [1, 1, 1, 1, 1])])
def test_blocks_of_the_zoo(name, counts):
    graph = trace(models.build(name, device="meta"), models.batch(name, 2, step=0))
    assert sorted(Counter(blocks_of(graph)).values()) == counts
    assert all(len(carried) == 1 for carried in graph.carried)


def test_blocks_of_an_mlp():
    graph = traced(mlp(), mlp_batch(2, 0))
    assert len(blocks_of(graph)) == 4
    assert len(set(blocks_of(graph))) == 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Attributes(nn.Module):
    """Layers that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.l0, self.l1, self.l2, self.l3, self.l4, self.l5 = (Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for each in (self.l0, self.l1, self.l2, self.l3, self.l4, self.l5):
            x = each(x)
        return x.square().mean()


class Functional(nn.Module):
    """No submodules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(32, 32) / 6) for _ in range(12))

    def forward(self, x: Tensor) -> Any:
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = x + F.gelu(x @ up) @ down
        return x.square().mean()


class Shared(nn.Module):
    """One layer called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(8, 8), Layer(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for _ in range(4):
            x = self.layer(x)
        return self.head(x).square().mean()


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        out = self.norm(self.linear(x))
        out += x
        return F.relu_(out)


class InPlace(nn.Module):
    """Residual blocks that write in place, the way torchvision writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.Sequential(*(InPlaceBlock() for _ in range(4)))

    def forward(self, x: Tensor) -> Any:
        return self.blocks(F.relu_(self.stem(x))).square().mean()


class AcrossBlocks(nn.Module):
    """Each layer changes the running sum that an earlier one made: no boundary may lie between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros_like(x)
        for each in self.layers:
            total.add_(torch.tanh(each(x)))
        for each in self.head:
            total = torch.tanh(each(total))
        return total.square().mean()


class UNet(nn.Module):
    """Every layer of the way down is read again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer() for _ in range(3))
        self.up = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        kept = []
        for each in self.down:
            x = each(x)
            kept.append(x)
        for each in self.up:
            x = each(x + kept.pop())
        return x.square().mean()


class Stage(nn.Module):
    """A stage of equal layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.items = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        for each in self.items:
            x = each(x)
        return x


class Stages(nn.Module):
    """Stages of equal layers: the layers are the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.stages = nn.ModuleList([Stage(2), Stage(4)])

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for each in self.stages:
            x = each(x)
        return x.square().mean()


class BiasedLayer(nn.Module):
    """A layer that reads a bias [8, 8] which it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        return self.layer(x @ bias)


class BiasTable(nn.Module):
    """A bias that is made of a parameter alone: it has no batch dim, and every layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 1)
        self.layers = nn.ModuleList(BiasedLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        places = torch.arange(8)
        bias = self.table((places[:, None] - places[None, :]).clamp(-2, 2) + 2).squeeze(-1)
        for layer in self.layers:
            x = layer(x, bias)
        return x.square().mean()


CASES = {  # model: (blocks that are no glue, or None; classes of them)
    "attributes": (Attributes, 6, 1),
    "functional": (Functional, None, None),
    "shared": (Shared, 4, 1),
    "in-place": (InPlace, 4, 1),
    "across-blocks": (AcrossBlocks, None, None),
    "u-net": (UNet, 6, None),
    "stages": (Stages, 6, 1),
    "bias-table": (BiasTable, 4, 2),  # the first layer's x needs no gradient
}


@pytest.mark.parametrize("case", CASES)
def test_models_of_every_structure(case):
    make, count, classes = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    width = 32 if case == "functional" else 8
    graph = traced(model, {"x": numbers(3, width)})
    found = blocks_of(graph)
    assert count in (None, len(found))
    assert classes in (None, len(set(found)))
    assert len(graph.blocks) > 2
    assert_equals_eager(graph, model, {"x": numbers(5, width)})
    if case == "u-net":
        assert max(len(carried) for carried in graph.carried) == 3
    elif case == "bias-table":
        assert [len(carried) for carried in graph.carried] == [1, 2, 2, 2, 1]
        bias = next(t for t in graph.carried[1] if not graph.tensors[t].is_batched)
        assert graph.tensors[bias].shape == (8, 8)
    elif case != "across-blocks":
        assert all(len(carried) == 1 for carried in graph.carried)


def test_a_block_that_is_called_again_shares_its_parameters_with_itself():
    graph = traced(Shared())
    tied = {graph.tensors[p].name for p, _ in graph.tie_groups}
    assert "layer.up.weight" in tied
    assert all(len(blocks) == 4 for _, blocks in graph.tie_groups)


def test_writers_stay_with_what_they_write():
    graph = traced(AcrossBlocks())
    block_of = {i: b for b, block in enumerate(graph.blocks) for i in block.nodes}
    makers = {t: i for i, n in enumerate(graph.nodes) for t in n.outputs if t is not None}
    for index, node in enumerate(graph.nodes):
        for tensor in node.mutates:
            if tensor in makers:
                assert block_of[makers[tensor]] == block_of[index]


class Contrastive(nn.Module):
    """Every sample is compared with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for each in self.layers:
            x = each(x)
        z = F.normalize(x, dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


def test_a_loss_that_compares_samples_says_so_and_has_a_graph():
    graph = traced(Contrastive())
    assert "test_cut.py:" in graph.couples_samples
    assert "compares samples" in graph.couples_samples
    assert len(blocks_of(graph)) == 3
    last = graph.classes[graph.blocks[-1].class_index]
    assert last.flop("forward").at(4) > 0
    assert_equals_eager(graph, Contrastive().double(), {"x": numbers(5, 8)})


def test_classes_tell_dropout_from_none_and_trainable_from_frozen_inputs():
    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in (0.1, 0.2, 0.0))
            self.layers[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            for each in self.layers:
                x = each(x)
            return x.square().mean()

    graph = traced(Rates())
    assert len(set(blocks_of(graph))) == 3
    flop = [graph.classes[c].flop("backward").at(1) for c in blocks_of(graph)]
    assert flop[0] == 0  # frozen, and nothing before it trains
    assert flop[1] == pytest.approx(flop[2] / 2)  # its input needs no gradient
