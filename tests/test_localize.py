"""The graph of a rank: it computes what the whole graph computes, whatever options its nodes have."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from planner.errors import PlanError
from planner.graph import Affine, Batch, Block, Node, Ref, Tensor, reads, sample_runs
from planner.shard.localize import localize
from planner.shard.placement import P, Placement, Q, R, Sharding, differentiable, local_shape
from planner.shard.program import Prices, variants
from planner.shard.rules import options
from planner.shard.stored import restored, stored
from planner.trace import priced, trace
from planner.trace.parallel import Communicator
from planner.trace.pricing import price_nodes
from tests import models
from tests.distributed_cases import graph_of
from tests.sharded import Chance, assert_equal, run_localized, run_whole, step, values_of

MICRO_BATCH = 2
MODELS = ("gpt", "gpt-tied", "llama", "bert", "t5", "vit", "moe", "resnet", "unet")
PRICES = Prices(
    flop_per_second=3e14, bytes_per_second=2e12, kernel_seconds=0.0, micro_batch=MICRO_BATCH, num_microbatches=4,
    collective_seconds=lambda _, num_bytes: num_bytes / 1e12,
)  # fmt: skip


def replicated(graph, degree):
    """Every node as it is."""
    moving = differentiable(graph)
    return [
        Sharding(
            options=tuple(options(graph.nodes[i], graph.tensors, degree, {}, moving)[0] for i in block.nodes),
            parameters=(R,) * len(block.parameters),
            buffers=(R,) * len(block.buffers),
            inputs=(R,) * len(block.inputs),
            outputs=(R,) * len(block.outputs),
        )
        for block in graph.blocks
    ]


def example(name):
    graph = graph_of(name)
    return graph, values_of(graph, models.build(name), models.batch(name, MICRO_BATCH, step=0))


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_what_is_not_split_is_the_whole_graph(name):
    graph = graph_of(name)
    local = localize(graph, replicated(graph, 2), 2)
    assert local.graph.fingerprint == graph.fingerprint
    assert set(local.placements.values()) <= {R}
    assert priced(local.graph, graph, 2).classes == tuple(graph.classes)


def assert_made_once(graph):
    """No tensor is made by two nodes, and none is read before it is made."""
    made = {t for t, described in enumerate(graph.tensors) if described.kind != "activation"}
    for index in sorted({*graph.prelude.nodes, *(i for block in graph.blocks for i in block.nodes)}):
        assert made.issuperset(reads(graph.nodes[index]))
        outputs = {t for t in graph.nodes[index].outputs if t is not None}
        assert made.isdisjoint(outputs)
        made |= outputs
    assert graph.loss in made


def assert_any_sharding_is_equal(name, degree, seeds):
    graph, values = example(name)
    wanted = run_whole(graph, values, MICRO_BATCH)
    for seed in seeds:
        shardings = Chance(graph, degree, seed).shardings
        local = localize(graph, shardings, degree)
        assert_equal(graph, run_localized(local, degree, values, MICRO_BATCH), wanted)
        assert restored(graph, *stored(shardings), degree) == shardings


def assert_variants_are_equal(name, degree):
    graph, values = example(name)
    wanted = run_whole(graph, values, MICRO_BATCH)
    for variant in variants(graph, degree, PRICES):
        local = localize(graph, variant.shardings, degree)
        assert local.graph.fingerprint != graph.fingerprint
        assert_made_once(local.graph)
        assert_equal(graph, run_localized(local, degree, values, MICRO_BATCH), wanted)
        assert restored(graph, *stored(variant.shardings), degree) == variant.shardings


@pytest.mark.parametrize(("name", "degree"), [("llama", 4), ("bert", 2), ("t5", 2), ("moe", 2), ("resnet", 2)])
def test_any_sharding_gives_the_loss_gradients_and_buffers_of_one_device(name, degree):
    assert_any_sharding_is_equal(name, degree, range(1))


@pytest.mark.parametrize(("name", "degree"), [("gpt-tied", 2), ("llama", 2), ("moe", 2), ("vit", 2), ("unet", 4)])
def test_what_the_program_finds_gives_the_loss_gradients_and_buffers_of_one_device(name, degree):
    assert_variants_are_equal(name, degree)


@pytest.mark.matrix
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_equal_in_many_shardings(name, degree):
    assert_any_sharding_is_equal(name, degree, range(1, 9))
    assert_variants_are_equal(name, degree)


# --- what is handed on and written ----------------------------------------------------------------


class InPlace(nn.Module):
    """Writes into what a product made, or into a view of it; the other one of the two may be read afterwards."""

    def __init__(self, *, into_view, reads_again):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.into_view, self.reads_again = into_view, reads_again

    def forward(self, x):
        made = self.first(x)
        seen = made.unsqueeze(0)
        written = nn.functional.relu_(seen if self.into_view else made)
        other = made if self.into_view else seen.squeeze(0)
        result = self.second(written)
        return (result + other if self.reads_again else result).square().mean()


def in_place(*, into_view=False, reads_again=False):
    """A graph whose first product is a partial sum, which all that follows takes as a whole."""
    torch.manual_seed(0)
    model = InPlace(into_view=into_view, reads_again=reads_again).double()
    batch = {"x": torch.randn(4, 8, dtype=torch.float64)}
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    first = next(i for i, node in enumerate(graph.nodes) if node.op == "aten.linear.default")
    found = options(graph.nodes[first], graph.tensors, 2, {}, differentiable(graph))
    partial_sum = next(option for option in found if str(option) == "S1[8],S1[8],P>P")
    shardings = [
        replace(s, options=tuple(partial_sum if i == first else o for i, o in zip(b.nodes, s.options, strict=True)))
        for b, s in zip(graph.blocks, replicated(graph, 2), strict=True)
    ]
    return graph, values_of(graph, model, batch), shardings


def test_what_is_written_after_a_conversion_is_written_into_a_copy():
    graph, values, shardings = in_place()
    local = localize(graph, shardings, 2)
    found = [node for node in local.graph.nodes if "relu" in node.op]
    assert [(node.op, node.mutates, node.aliases) for node in found] == [("aten.relu.default", (), ())]
    assert_equal(graph, run_localized(local, 2, values, 4), run_whole(graph, values, 4))


def test_what_is_read_again_must_be_written_where_it_is():
    graph, _, shardings = in_place(reads_again=True)
    with pytest.raises(
        PlanError, match=r"relu_.* would have to be converted before, but unsqueeze is read again later"
    ):
        localize(graph, shardings, 2)
    graph, values, shardings = in_place(into_view=True)
    local = localize(graph, shardings, 2)  # nobody looks at what was made
    assert_equal(graph, run_localized(local, 2, values, 4), run_whole(graph, values, 4))
    graph, _, shardings = in_place(into_view=True, reads_again=True)
    with pytest.raises(PlanError, match=r"relu_.* writes into a converted copy of linear, which is read again later"):
        localize(graph, shardings, 2)


class Seen(nn.Module):
    """Reads a view before and after what it is of was written."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        made = self.first(x)
        seen = made.unsqueeze(0)
        before = seen.sum(0).mean()
        nn.functional.relu_(made)
        return before + self.second(seen).square().mean()


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_copy_of_what_was_there_before_a_write_is_not_used_after_it(num_blocks):
    torch.manual_seed(0)
    model, batch = Seen().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    write = next(i for i, node in enumerate(graph.nodes) if "relu_" in node.op)
    graph = recut(graph, *[write] * (num_blocks - 1))  # with two blocks, the view is handed on after the write
    chosen = {
        "aten.linear.default": "Q,S0[8],S0[8]>S1[8]",
        "aten.unsqueeze.default": "S1[8]>S2[8]",
        "relu": "S1[8]>S1[8]",
    }
    shardings = replicated(graph, 2)
    for position, block in enumerate(graph.blocks):
        picked = list(shardings[position].options)
        for place, index in enumerate(block.nodes):
            node = graph.nodes[index]
            wanted = chosen.pop("relu" if "relu_" in node.op else node.op, None)
            found = options(node, graph.tensors, 2, {}, differentiable(graph))
            picked[place] = next((o for o in found if str(o).replace("R,S0", "Q,S0") == wanted), picked[place])
        shardings = changed(shardings, position, options=tuple(picked))
    assert not chosen
    local = localize(graph, shardings, 2)
    values = values_of(graph, model, batch)
    assert [node.op for node in local.graph.nodes].count("planner.gather.default") == 2
    assert_made_once(local.graph)
    assert_equal(graph, run_localized(local, 2, values, 4), run_whole(graph, values, 4))


def recut(graph, *lasts):
    """A graph with other blocks: each ends with one of `lasts`, and the last one with the loss."""
    nodes = sorted(i for block in graph.blocks for i in block.nodes)
    blocks: list[Block] = []
    for start, stop in pairwise((-1, *lasts, nodes[-1])):
        inside = tuple(i for i in nodes if start < i <= stop)
        made = {t: None for i in inside for t in graph.nodes[i].outputs}
        outside = [t for t in dict.fromkeys(t for i in inside for t in reads(graph.nodes[i])) if t not in made]
        later = {graph.loss, *(t for i in nodes if i > stop for t in reads(graph.nodes[i]))}
        blocks.append(
            replace(
                graph.blocks[0], name=str(len(blocks)), nodes=inside, class_index=len(blocks),
                inputs=tuple(t for t in outside if graph.tensors[t].kind == "activation"),
                shared=tuple(t for t in outside if graph.tensors[t].kind == "input"),
                outputs=tuple(t for t in made if t in later),
                parameters=tuple(t for t in outside if graph.tensors[t].kind == "parameter"),
            )
        )  # fmt: skip
    return replace(graph, blocks=tuple(blocks), classes=())


def test_a_part_of_the_loss_is_weighed_as_it_is_made():
    graph = in_place()[0]
    (term,) = graph.loss_terms
    graph = recut(replace(graph, loss=term.tensor))
    (block,) = graph.blocks  # without the reshape that follows
    graph = replace(graph, blocks=(replace(block, nodes=block.nodes[:-1], outputs=(term.tensor,)),))
    (sharding,) = replicated(graph, 2)
    *others, mean = sharding.options
    as_partial = replace(mean, outputs=(P,))  # a sum over ranks, as a mean over a split dim is
    local = localize(graph, [replace(sharding, options=(*others, as_partial))], 2).graph
    (made,) = (node for node in local.nodes if node.outputs == (local.loss_terms[0].tensor,))
    assert made.op == "aten.mean.default"
    assert local.loss_terms == (replace(term, tensor=made.outputs[0]),)
    assert local.loss == term.tensor != made.outputs[0]


def changed(shardings, position, **fields):
    return [replace(s, **fields) if i == position else s for i, s in enumerate(shardings)]


def test_shardings_that_do_not_fit_are_refused():
    graph = graph_of("llama")
    fitting = replicated(graph, 2)
    split = Placement.parse("S1[12]")
    last = len(fitting) - 1
    with pytest.raises(PlanError, match="5 shardings were given for the 6 blocks"):
        localize(graph, fitting[1:], 2)
    with pytest.raises(PlanError, match=r"is R in one block and S1\[12\] in block .*; it must be the same"):
        localize(graph, changed(fitting, 2, inputs=(split,)), 2)
    with pytest.raises(PlanError, match=r"result .* is Q; a result must be R"):
        localize(graph, changed(fitting, last, outputs=(Q,)), 2)
    with pytest.raises(PlanError, match=r"cannot be split as S1\[12\] in 5"):
        localize(graph, changed(fitting, 0, outputs=(split,)), 5)
    with pytest.raises(PlanError, match="has 1 inputs, its sharding 0"):
        localize(graph, changed(fitting, 1, inputs=()), 2)
    with pytest.raises(PlanError, match=r"is stored as P; what is stored must be whole or split"):
        localize(graph, changed(fitting, 1, parameters=(P, *fitting[1].parameters[1:])), 2)
    first, *others = fitting[0].options
    options_of = (replace(first, operands=(P, *first.operands[1:])), *others)
    parameters = (Q, *fitting[0].parameters[1:])
    with pytest.raises(PlanError, match=r"needs .* as P, which is Q and cannot become it"):
        localize(graph, changed(fitting, 0, parameters=parameters, options=options_of), 2)


def test_a_stored_sharding_that_no_rule_allows_is_refused():
    graph = graph_of("llama")
    plans, of_block = stored(replicated(graph, 2))
    assert len(plans) == 3  # equal blocks share one
    wrong = replace(plans[1], nodes=("S0[5]>S0[5]", *plans[1].nodes[1:]))
    with pytest.raises(PlanError, match=r"no rule lets aten\..* run as S0\[5\]>S0\[5\] on 2 ranks; plan again"):
        restored(graph, (plans[0], wrong, *plans[2:]), of_block, 2)
    with pytest.raises(PlanError, match="'X' is no placement"):
        restored(graph, (replace(plans[0], nodes=("X>R", *plans[0].nodes[1:])), *plans[1:]), of_block, 2)
    with pytest.raises(PlanError, match="does not say what a node takes and makes"):
        restored(graph, (replace(plans[0], nodes=("R", *plans[0].nodes[1:])), *plans[1:]), of_block, 2)
    with pytest.raises(PlanError, match="its sharding 0; plan again"):
        restored(graph, (replace(plans[0], nodes=()), *plans[1:]), of_block, 2)
    with pytest.raises(PlanError, match="has sharding 7; the plan has 3 of them"):
        restored(graph, plans, (7, *of_block[1:]), 2)
    with pytest.raises(PlanError, match="the plan says of 1 how they are split"):
        restored(graph, plans, of_block[:1], 2)


@pytest.mark.parametrize(
    ("runs", "rows", "split", "left"),
    [
        (1, 64, "S0*B[64]", 1),  # tokens of every sample
        (8, 64, "S0[64B]", 4),  # heads in front of the samples
        (8, 64, "S0*2[32B]", 4),
        (4, 64, "S1[6]", 4),
    ],
)
def test_conversions_keep_the_runs_of_samples(runs, rows, split, left):
    placement = Placement.parse(split)
    shape = (Batch(rows), 6)
    tensors = [Tensor(name="in", shape=(runs, Batch(1), rows // runs, 6), dtype="float32", kind="input")] + [
        Tensor(name=name, shape=local_shape(shape, placed, 2), dtype="float32", kind="activation")
        for name, placed in (("whole", R), ("cut", placement), ("again", R))
    ]
    cut, gather = step(R, placement), step(placement, R)
    calls = [("aten.view.default", ()), (cut.op, cut.args), (gather.op, gather.args)]
    nodes = [
        Node(name=op, op=op, args=(Ref(position), *args), outputs=(position + 1,))
        for position, (op, args) in enumerate(calls)
    ]
    found = sample_runs(tensors, nodes)
    assert (found[1], found[2], found[3]) == (runs, left, runs)


# --- prices ---------------------------------------------------------------------------------------


class Counting:
    """A communicator that takes down what the first rank asks for."""

    def __init__(self, seen: list[tuple[str, str, int]], communicator: Communicator) -> None:
        self._communicator, self._seen = communicator, seen
        self.rank, self.size = communicator.rank, communicator.size

    def _count(self, name, num_bytes):
        if self.rank == 0:
            phase = "backward" if torch._C._current_autograd_node() is not None else "forward"
            self._seen.append((name, phase, num_bytes))

    def all_reduce(self, x):
        self._count("all_reduce", x.numel() * x.itemsize)
        return self._communicator.all_reduce(x)

    def all_gather(self, x):
        self._count("all_gather", x.numel() * x.itemsize * self.size)
        return self._communicator.all_gather(x)

    def reduce_scatter(self, x):
        self._count("reduce_scatter", x.numel() * x.itemsize)
        return self._communicator.reduce_scatter(x)

    def all_to_all(self, x):
        self._count("all_to_all", x.numel() * x.itemsize)
        return self._communicator.all_to_all(x)

    def all_to_all_rows(self, x, sends, receives):
        result = self._communicator.all_to_all_rows(x, sends, receives)
        self._count("all_to_all", max(x.numel(), result.numel()) * x.itemsize)
        return result


@pytest.mark.parametrize(("name", "micro_batch"), [("llama", 2), ("gpt-tied", 3), ("bert", 3)])
def test_collectives_of_a_run_are_those_that_are_priced(name, micro_batch):
    graph = graph_of(name)
    values = values_of(graph, models.build(name), models.batch(name, micro_batch, step=0))
    shardings = Chance(graph, 2, 5).shardings if name == "bert" else variants(graph, 2, PRICES)[0].shardings
    local = localize(graph, shardings, 2)
    seen: list[tuple[str, str, int]] = []
    run_localized(local, 2, values, micro_batch, partial(Counting, seen))

    rank = priced(local.graph, graph, 2, "cpu")
    planned = [
        (c.collective, c.phase, c.num_bytes.at(micro_batch))
        for block in rank.blocks
        for c in rank.classes[block.class_index].collectives
    ]
    assert Counter(seen) == Counter(planned)
    assert {phase for _, phase, _ in seen} == {"forward", "backward"}
    assert all(c.axis == "tp" for kind in rank.classes for c in kind.collectives)


def test_a_rank_does_its_share_of_the_work_and_keeps_its_share_of_what_is_saved():
    graph = graph_of("llama")
    variant = variants(graph, 2, PRICES)[-1]
    rank = priced(localize(graph, variant.shardings, 2).graph, graph, 2)
    middle = len(graph.blocks) // 2
    whole, part = (g.classes[g.blocks[middle].class_index] for g in (graph, rank))
    for phase in ("forward", "backward"):
        assert 0.49 < part.flop(phase).at(4) / whole.flop(phase).at(4) < 0.6
    assert part.saved.at(4) < whole.saved.at(4)
    assert rank.blocks[middle].saved.at(4) < graph.blocks[middle].saved.at(4)
    assert {block.class_index for block in rank.blocks} == set(range(len(rank.classes)))


def test_an_operator_of_a_rank_launches_the_kernels_of_the_device():
    sizes = {"query": 4, "key": 1, "value": 1, "made": 4}
    tensors = [
        Tensor(name=name, shape=(Batch(1), heads, 64, 64), dtype="bfloat16", kind="activation")
        for name, heads in sizes.items()
    ]
    node = Node(
        name="attention", op="planner.shared_heads_attention.default", args=(Ref(0), Ref(1), Ref(2), None, 0.0, True),
        kwargs=(("heads", 8), ("axis", "tp")), outputs=(3,),
    )  # fmt: skip
    found = price_nodes(tensors, [node], [0, 1, 2], (), [3], axes={"tp": 2})
    assert [k.op for k in found.kernels if k.kind == "attention"] == [
        "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_flash_attention_backward.default",
    ]  # fmt: skip
    assert found.collectives == ()


def test_bytes_of_collectives_grow_with_the_micro_batch():
    tensors = [Tensor(name=n, shape=(Batch(1), 6), dtype="float32", kind="activation") for n in "ab"]
    node = Node(name="sum", op="planner.reduce_copy.default", args=(Ref(0),), kwargs=(("axis", "tp"),), outputs=(1,))
    found = price_nodes(tensors, [node], [0], (), [1], axes={"tp": 2}).collectives
    assert [(c.collective, c.phase, c.num_bytes) for c in found] == [
        ("all_reduce", "forward", Affine(0.0, 24.0)), ("all_reduce", "backward", Affine(0.0, 24.0)),
    ]  # fmt: skip
