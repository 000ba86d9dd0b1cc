"""Experts over the ranks of an axis: rows are cut out or sent, and the loss and all gradients stay as they are."""

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import PlanError
from planner.graph import Batch, Node, Ref
from planner.graph import Tensor as Described
from planner.shard import program
from planner.shard.loads import expert_loads
from planner.shard.localize import localize
from planner.shard.placement import P, Placement, differentiable
from planner.shard.program import variants
from planner.shard.rules import options
from planner.shard.rules.special import inner_collectives
from planner.shard.stored import restored, stored
from planner.trace import grouped, priced, trace
from planner.trace.parallel import ProcessGroup, Threads
from planner.trace.parallel_experts import dispatched_experts_mm, inverse_order, masked_experts_mm
from tests import distributed_cases, families, models
from tests.distributed_cases import NUM_MICROBATCHES, TOLERANCE, graph_of, worst_error
from tests.distributed_references import reference
from tests.float64 import explicit_float32_as_float64
from tests.ranks import RankPool, run_ranks
from tests.shard_proofs import check, example, tensor
from tests.sharded import assert_equal, run_localized, run_whole, values_of
from tests.test_dispatch import Experts
from tests.test_shard_program import prices, toy_prices

MICRO_BATCH = 2
PRODUCT = grouped.NAME
MASKED, DISPATCHED = "planner.masked_experts_mm.default", "planner.dispatched_experts_mm.default"
OWN = PRODUCT  # every rank has all experts, and its own tokens


# --- operators on threads -------------------------------------------------------------------------

ROWS, EXPERTS, WIDTH, HIDDEN = 12, 4, 3, 5
LOADS = [(3, 3, 3, 3), (1, 7, 0, 4), (0, 0, 12, 0), (12, 0, 0, 0), (0, 0, 0, 12)]  # rows of each expert


def _drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _network(rows, first, second, ends):
    return grouped.grouped_mm(grouped.grouped_mm(rows, first, ends).sin(), second, ends)


def _ends(loads):
    return torch.tensor(loads).cumsum(0).to(torch.int32)


def _own(x, c):
    return x.chunk(c.size)[c.rank].clone().requires_grad_()


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("loads", LOADS, ids=str)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_masked_form_is_a_sum_of_what_experts_make(loads, degree, at_once):
    torch.manual_seed(0)
    rows, ends, upstream = _drawn(ROWS, WIDTH).requires_grad_(), _ends(loads), _drawn(ROWS, WIDTH)
    first, second = (_drawn(EXPERTS, *s).requires_grad_() for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    wanted = _network(rows, first, second, ends) if not at_once else grouped.grouped_mm(rows, first, ends)
    upstream = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (rows, first, second), upstream, allow_unused=True)

    def work(c):
        own = [rows.detach().clone().requires_grad_(), _own(first.detach(), c), _own(second.detach(), c)]
        if at_once:
            made = masked_experts_mm(c, own[0], own[1], ends, True, True, ROWS)
        else:
            inner = masked_experts_mm(c, own[0], own[1], ends, True, False, ROWS)
            count = EXPERTS // degree
            assert len(inner) == sum(loads[c.rank * count : (c.rank + 1) * count])
            made = masked_experts_mm(c, inner.sin(), own[2], ends, False, True, ROWS)
        return made.detach(), torch.autograd.grad(made, own, upstream, allow_unused=True)

    found = Threads(degree).run(work)
    torch.testing.assert_close(sum(made for made, _ in found), wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(g[0] for _, g in found), gradients[0], rtol=1e-12, atol=1e-12)
    for i in (1,) if at_once else (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for _, g in found]), gradients[i], rtol=1e-12, atol=1e-12)


def _dispatched(c, num_rows, loads, rows, first, second, upstream, middle):
    """The rows of a rank's own tokens through experts of all ranks; `middle` is a further product there."""
    ends = _ends(loads[c.rank])
    own = [rows[c.rank].clone().requires_grad_(), _own(first, c), _own(second, c)]
    x = dispatched_experts_mm(c, own[0], own[1], ends, True, False, num_rows)
    if middle is not None:
        x = dispatched_experts_mm(c, x, _own(middle, c), ends, False, False, num_rows)
    at_once = dispatched_experts_mm(c, own[0], own[1], ends, True, True, num_rows)
    if middle is None:
        same = torch.eye(HIDDEN, dtype=x.dtype).repeat(len(own[1]), 1, 1)
        torch.testing.assert_close(at_once, dispatched_experts_mm(c, x, same, ends, False, True, num_rows))
    made = dispatched_experts_mm(c, x.sin(), own[2], ends, False, True, num_rows)
    return made.detach(), *torch.autograd.grad(made, own, upstream[c.rank])


def _dispatch_case(degree, has_middle):
    """Every rank has other loads; one of them none at all of some expert, one all of one."""
    torch.manual_seed(0)
    loads = list(itertools.islice(itertools.cycle(LOADS[1:]), degree))
    rows, upstream = [_drawn(ROWS, WIDTH) for _ in loads], [_drawn(ROWS, WIDTH) for _ in loads]
    first, second = _drawn(EXPERTS, WIDTH, HIDDEN), _drawn(EXPERTS, HIDDEN, WIDTH)
    middle = _drawn(EXPERTS, HIDDEN, HIDDEN) if has_middle else None
    wanted = []
    whole = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    for mine, counts, gradient in zip(rows, loads, upstream, strict=True):
        x, ends = mine.clone().requires_grad_(), _ends(counts)
        inner = grouped.grouped_mm(x, whole[0], ends)
        inner = inner if middle is None else grouped.grouped_mm(inner, middle, ends)
        made = grouped.grouped_mm(inner.sin(), whole[1], ends)
        wanted.append((made.detach(), *torch.autograd.grad(made, (x, *whole), gradient)))
    return (ROWS, loads, rows, first, second, upstream, middle), wanted


def _assert_dispatched(found, wanted):
    for (made, of_rows, *_), (other, of_others, *_) in zip(found, wanted, strict=True):
        torch.testing.assert_close(made, other, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_rows, of_others, rtol=1e-12, atol=1e-12)
    for i in (2, 3):
        whole = sum(w[i] for w in wanted)
        torch.testing.assert_close(torch.cat([f[i] for f in found]), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("has_middle", [False, True])
def test_the_dispatched_form_sends_rows_to_experts_and_back(degree, has_middle):
    given, wanted = _dispatch_case(degree, has_middle)
    _assert_dispatched(Threads(degree).run(lambda c: _dispatched(c, *given)), wanted)


def _in_group(given):
    c = ProcessGroup(dist.distributed_c10d._get_default_group())
    empty = c.all_to_all_rows(torch.zeros(0, 2), [0, 0], [0, 0])
    return _dispatched(c, *given), empty.shape


@pytest.mark.distributed
def test_process_groups_send_rows(tmp_path):
    given, wanted = _dispatch_case(2, False)
    ranks = run_ranks(2, partial(_in_group, given), tmp_path=tmp_path)
    _assert_dispatched([found for found, _ in ranks], wanted)
    assert all(shape == (0, 2) for _, shape in ranks)


def test_the_inverse_of_an_order():
    places = torch.tensor([2, 0, 3, 1])
    assert inverse_order(None, places).tolist() == places.argsort().tolist()


# --- rules ----------------------------------------------------------------------------------------


def test_a_product_by_itself_is_split_by_features_and_by_experts():
    def ends(generator, shape):
        return torch.tensor([3, 3, 5, 7], dtype=torch.int32)

    rows = tensor(Batch(4), 8)
    check(
        example(
            PRODUCT, rows, tensor(4, 8, 12), tensor(4, values=ends, has_gradient=False), degrees=(2, 4),
            expected=("S1[8],S1[8],R>P", "Q,S2[12],R>S1[12]", "Q,S0[4],R>P", "P,Q,R>P"), never=("D", "L"),
        )
    )  # fmt: skip


def _is(form, option):
    """Whether an option has rows of own experts, cut out (masked) or sent (dispatched), or rows of own tokens."""
    placed = [p for p in (*option.operands, *option.outputs) if p is not None]
    if form == OWN:
        return option.op == PRODUCT and placed[0].kind == "L"
    return any(p.kind == "D" and bool(p.parts) == (form == DISPATCHED) for p in placed)


@pytest.mark.parametrize(("dtype", "is_split"), [("float32", False), ("bfloat16", False), ("float64", True)])
def test_features_are_split_where_the_kernel_takes_the_parts(dtype, is_split):
    """40 features over 4 ranks are rows of 40 or 20 bytes, and torch's kernel wants multiples of 16."""
    shapes = ((12, 40), (4, 40, 40), (4,), (12, 40))
    tensors = [
        Described(name=str(i), shape=shape, dtype="int32" if i == 2 else dtype, kind="activation")
        for i, shape in enumerate(shapes)
    ]
    node = Node(name="product", op=PRODUCT, args=(Ref(0), Ref(1), Ref(2)), outputs=(3,))
    found = options(node, tensors, 4, {}, {0, 1})
    split_dims = {o.operands[1].dim for o in found if o.operands[1].is_split}

    assert split_dims == ({0, 1, 2} if is_split else {0})


@pytest.mark.parametrize("fault", ["over rows", "not undone", "counts in the loss"])
def test_an_order_that_shows_has_no_rows_of_a_rank(fault):
    x = {"x": torch.randn(3, 6, 8)}
    for graph, is_proven in ((trace(Experts(), x, device_kind="cpu"), True), (trace(Experts(fault), x), False)):
        assert any(t.order is not None for t in graph.tensors) == is_proven
        (node,) = [n for n in graph.nodes if n.op == PRODUCT]
        found = options(node, graph.tensors, 2, {}, differentiable(graph))
        assert any(_is(MASKED, o) for o in found) == is_proven
        assert any(o.op == MASKED and o.outputs == (P,) for o in found)  # needs no order


# --- whole models ---------------------------------------------------------------------------------


class Routed(nn.Module):
    """[batch, 8, 6] through two of four experts each; a bias of the router makes some of them idle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(6, 6), nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 10)), nn.Parameter(torch.randn(4, 10, 6))
        self.scale = nn.Parameter(torch.randn(10))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(4, 10)), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        """A loss of all rows, and of how they are routed."""
        x = x + self.first(x)
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        experts, order = chosen.flatten().sort()
        ends = torch.histc(experts.double(), 4, 0, 3).cumsum(0).to(torch.int32)
        inner = torch._grouped_mm(tokens[order // 2], self.up, ends) * self.scale + self.up_bias[experts]
        outer = torch._grouped_mm(inner.relu(), self.down, ends) + self.down_bias[experts]
        rows = outer * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        result = rows[back].view(-1, 2, 6).sum(1).view(x.shape) + x
        loss: Tensor = result.square().mean() + scores.square().mean()
        return loss


# Further models of transformers: sigmoid routers in groups, biases of experts, shared experts. Config, model, settings.
SPARSE = {
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 4},
    ),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 4, "sliding_window": 4}),
    "deepseek-v3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
         "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
         "num_key_value_heads": 4},
    ),
    "ernie": (
        "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_intermediate_size": 24, "moe_k": 2},
    ),
}  # fmt: skip


def _sparse(config, model, settings):
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": families.VOCABULARY, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 8, "use_cache": False,
        "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return getattr(transformers, model)(getattr(transformers, config)(**{**common, **settings})).double().train()


@cache
def _model(name):
    """Graph and values of a model in float64."""
    torch.manual_seed(0)
    module: nn.Module
    if name == "routed":
        module, batch = Routed().double(), {"x": torch.randn(MICRO_BATCH, 8, 6, dtype=torch.float64)}
        graph = trace(module, {"x": torch.randn(4, 8, 6, dtype=torch.float64)}, precision="fp64", device_kind="cpu")
    elif name in SPARSE:
        with explicit_float32_as_float64():
            module = _sparse(*SPARSE[name])
            ids = torch.randint(3, families.VOCABULARY, (4, 8))
            graph = trace(module, {"input_ids": ids, "labels": ids}, precision="fp64", device_kind="cpu")
        batch = {"input_ids": ids[:MICRO_BATCH], "labels": ids[:MICRO_BATCH]}
    elif name in families.FAMILIES:
        module, batch = families.make(name), families.batch(name, MICRO_BATCH)
        with explicit_float32_as_float64():
            graph = trace(module, families.batch(name, 4), precision="fp64", device_kind="cpu")
    else:
        graph, module = graph_of(name), models.build(name)
        batch = models.batch(name, MICRO_BATCH, step=0)
    assert not graph.fallbacks, graph.fallbacks
    return graph, values_of(graph, module, batch)


@cache
def _forced(name, op, degree):
    """The best shardings in which all grouped products are of one form."""
    graph, _ = _model(name)

    def only(node, *rest):
        found = options(node, *rest)
        return tuple(o for o in found if _is(op, o)) if node.op == PRODUCT else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "options", only)
        return variants(graph, degree, toy_prices(1e12, 1e11, 1e-6, 1e10))


def _check_equal(name, op, degree, values):
    graph, _ = _model(name)
    wanted = run_whole(graph, values, MICRO_BATCH)
    for variant in _forced(name, op, degree):
        local = localize(graph, variant.shardings, degree)
        assert op in {node.op for node in local.graph.nodes}
        assert_equal(graph, run_localized(local, degree, values, MICRO_BATCH), wanted)
        assert restored(graph, *stored(variant.shardings), degree) == variant.shardings


@pytest.mark.parametrize("busy", [(), (1,), (0, 3)], ids=str)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("op", [MASKED, DISPATCHED, OWN])
def test_idle_experts_change_nothing(op, degree, busy):
    graph, values = _model("routed")
    (bias,) = [i for i, t in enumerate(graph.tensors) if t.name == "router.bias"]
    skewed = values[bias].clone()
    skewed[list(busy)] += 50.0
    _check_equal("routed", op, degree, values | {bias: skewed})


@pytest.mark.parametrize(
    ("name", "op", "degree"),
    [
        ("moe", MASKED, 4),
        ("moe", DISPATCHED, 2),
        ("mixtral+router", MASKED, 2),
        ("mixtral+router", DISPATCHED, 2),
    ],
)
def test_models_have_the_loss_and_gradients_of_one_device(name, op, degree):
    needs_mode = name in models.MODELS and models.MODELS[name].needs_float64_mode
    with explicit_float32_as_float64() if needs_mode else nullcontext():
        _check_equal(name, op, degree, _model(name)[1])


@pytest.mark.families
@pytest.mark.parametrize("op", [MASKED, DISPATCHED])
@pytest.mark.parametrize("name", ["qwen2-moe", "qwen2-moe+router", *SPARSE])
def test_families_have_the_loss_and_gradients_of_one_device(name, op):
    _check_equal(name, op, 2, _model(name)[1])


def _trained(op, *case):
    """A training run of one rank, with the forced shardings."""
    found = _forced(case[0], op, 2)[0].shardings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_cases, "found_shardings", lambda *_, **__: found)
        result = distributed_cases.train(*case)
    assert op in {option.op for sharding in found for option in sharding.options}
    return result


@pytest.mark.distributed
def test_ranks_train_as_one_device_while_they_dispatch(tmp_path):
    case = ("moe", "TP2xDP2 ZeRO-3, recompute", "sgd")
    with RankPool(1, tmp_path, groups=False, timeout_seconds=100) as eager:
        (expected,) = eager.run(reference, "moe", "sgd", NUM_MICROBATCHES)
    results = run_ranks(4, partial(_trained, DISPATCHED), *case, tmp_path=tmp_path, timeout_seconds=100)
    error, where = worst_error("moe", results, expected)
    assert error < TOLERANCE, where


class Counting:
    """A communicator that takes down what it is asked for."""

    def __init__(self, communicator, seen) -> None:
        self._communicator, self._seen = communicator, seen
        self.rank, self.size = communicator.rank, communicator.size

    def __getattr__(self, name):
        def counted(*args):
            if self.rank == 0:
                is_backward = torch._C._current_autograd_node() is not None
                self._seen.append((name.removesuffix("_rows"), "backward" if is_backward else "forward"))
            return getattr(self._communicator, name)(*args)

        return counted


@pytest.mark.parametrize("name", ["moe", "routed"])
@pytest.mark.parametrize("op", [MASKED, DISPATCHED])
def test_collectives_of_a_run_are_those_that_are_priced(op, name):
    graph, values = _model(name)
    local = localize(graph, _forced(name, op, 2)[0].shardings, 2)
    seen: list[tuple[str, str]] = []
    run_localized(local, 2, values, MICRO_BATCH, lambda c: Counting(c, seen))
    rank = priced(local.graph, graph, 2, "cpu")
    planned = Counter(
        (c.collective, c.phase) for block in rank.blocks for c in rank.classes[block.class_index].collectives
    )
    assert Counter(seen) == planned
    assert ("planner.rows_of_experts.default" in {n.op for n in local.graph.nodes}) == (name == "routed")
    assert (("all_to_all", "backward") in planned) == (op == DISPATCHED)


# --- prices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [MASKED, DISPATCHED])
def test_the_busiest_rank_is_priced(op):
    graph, _ = _model("moe")
    shardings = _forced("moe", op, 2)[0].shardings
    local = localize(graph, shardings, 2)
    index = next(i for i, b in enumerate(graph.blocks) if any(graph.nodes[n].op == PRODUCT for n in b.nodes))

    def work(of, kind, start):
        kernels = of.classes[of.blocks[index].class_index].kernels
        return sum(getattr(k, kind).per_sample for k in kernels if start in k.op)

    whole = work(graph, "flop", "grouped_mm")
    for imbalance in (1.0, 1.5):
        rank = priced(local.graph, graph, 2, "cpu", expert_imbalance=imbalance)
        assert work(rank, "flop", "grouped_mm") == pytest.approx(whole / 2 * imbalance)
        sent = [c.num_bytes.per_sample for c in rank.classes[rank.blocks[index].class_index].collectives
                if c.collective == "all_to_all"]  # fmt: skip
        product = next(n for n in (graph.nodes[i] for i in graph.blocks[index].nodes) if n.op == PRODUCT)
        rows = graph.tensors[product.args[0].tensor].num_bytes.per_sample
        assert sent.count(rows / 2 * imbalance) == (4 if op == DISPATCHED else 0)
        inner = [size for o in shardings[index].options for _, kind, size in
                 inner_collectives(o.op, o.args, graph.tensors, 2) if kind == "all_to_all"]  # fmt: skip
        assert not Counter(size.per_sample * imbalance for size in inner) - Counter(sent)


def _mixtral():
    """Blocks of the sizes of Mixtral 8x7B at 4096 tokens, two of them."""
    from planner.zoo.llama import Llama, LlamaConfig

    config = LlamaConfig(
        layers=2, width=4096, heads=32, key_value_heads=8, hidden=14336, vocabulary=32000, context=4096, experts=8
    )
    with torch.device("meta"):
        ids = torch.zeros(2, config.context, dtype=torch.int64)
        return trace(Llama(config), {"input_ids": ids, "labels": ids}, precision="bf16")


def test_experts_are_spread_where_that_is_cheapest():
    graph = _mixtral()
    spread, own = Placement.parse("S0[8]"), Placement.parse("L0*B[8192]")
    forms = {}
    for imbalance in (1.0, 3.0):
        fast = variants(graph, 8, replace(prices(8, micro_batch=1), expert_imbalance=imbalance))[0]
        (found,) = {
            tuple(option.operands[:2] for index, option in zip(block.nodes, sharding.options, strict=True)
                  if graph.nodes[index].op == PRODUCT)
            for block, sharding in zip(graph.blocks, fast.shardings, strict=True) if block.kind == "block"
        }  # fmt: skip
        forms[imbalance] = found
    assert forms[1.0] == ((own, spread), (Placement("D", 0, own.parts, own.repeats), spread))
    assert all(placed[1] != spread for placed in forms[3.0])  # the busiest rank would hold up all others


def test_measured_loads():
    found = expert_loads([100, 90, 10, 20, 5, 5, 5, 5], 4)
    assert found.imbalance == pytest.approx(190 / 60)
    assert found.balanced_imbalance == pytest.approx(105 / 60)
    assert sorted(found.order) == list(range(8))
    assert expert_loads([7, 7, 7, 7], 2).imbalance == 1.0
    for loads, degree, message in (([1, 2, 3], 2, "3 experts"), ([0, 0], 2, "above 0")):
        with pytest.raises(PlanError, match=message):
            expert_loads(loads, degree)
