"""Tensor parallelism in the trainer, beside the equality matrix: what is communicated, drawn, added up and refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.graph import Graph, Ref
from planner.runtime.inputs import Fed
from planner.runtime.peers import Peers
from planner.runtime.random import Draw, Draws
from planner.shard.localize import localize
from planner.trace import trace
from tests import random_cases
from tests import tensor_parallel_cases as cases
from tests.distributed_cases import Kind, found_shardings, relative
from tests.ranks import RankPool

CPU = torch.device("cpu")
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor_parallel")


# --- what is communicated ---


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("llama", Kind(name="", tp=2, variant="leanest")),
        ("gpt", Kind(name="", tp=2)),
        ("bert", Kind(name="", tp=2, variant="lean")),
        ("unet", Kind(name="", tp=2)),
    ],
    ids=["llama leanest", "gpt fast", "bert lean", "unet fast"],
)
def test_a_step_communicates_what_the_plan_says(two: RankPool, model: str, kind: Kind) -> None:
    for found, planned, sums in two.run(cases.counted_and_planned, model, kind):
        assert sum(planned.values()) > 0
        assert found == planned
        assert sums <= 1  # partial gradients, all together


@pytest.mark.distributed
def test_stages_and_data_ranks_communicate_what_the_plan_says(four: RankPool) -> None:
    for kind in (Kind(name="", pp=2, tp=2, variant="leanest"), Kind(name="", dp=2, tp=2, zero=(3,))):
        for found, planned, _ in four.run(cases.counted_and_planned, "gpt-tied", kind):
            assert found == planned


# --- what is added up ---


@pytest.mark.distributed
def test_partial_gradients_of_several_calls_add_up(two: RankPool, four: RankPool) -> None:
    assert max(two.run(cases.accumulated, Kind(name="", tp=2))) < TOLERANCE
    assert max(four.run(cases.accumulated, Kind(name="", tp=2, dp=2, zero=(1,)))) < TOLERANCE
    assert max(four.run(cases.accumulated, Kind(name="", tp=2, pp=2))) < TOLERANCE


@pytest.mark.distributed
def test_a_mean_over_targets_that_the_ranks_hold_as_parts_is_weighed_by_its_counts(two: RankPool) -> None:
    for errors in two.run(cases.train_all_partial):
        assert max(errors) < TOLERANCE, errors


@pytest.mark.distributed
def test_sums_are_taken_together_by_dtype_and_size(two: RankPool) -> None:
    for found in two.run(cases.sums_of, [3, 0, 2**22 + 1, 5, 7, 2**22]):
        assert found == [[3.0], [], [3.0], [3.0], [3.0], [3.0]]


# --- what is drawn ---


@pytest.mark.distributed
def test_ranks_that_split_a_tensor_drop_what_one_device_drops(two: RankPool, folder: Path) -> None:
    what = tuple(w for w in random_cases.WHAT if w != "attention")
    graph = random_cases.graph_of(what)
    for variant in ("fast", "leanest"):
        local = localize(graph, found_shardings(graph, 2, variant), 2).graph
        assert sum(node.op == "planner.dropout.default" for node in local.nodes) >= 2, "nothing is split"
    with RankPool(1, folder) as pool:
        wanted_losses, wanted = pool.run(random_cases.train, Kind(name=""), 1, 0, what)[0]

    for kind, count in (
        (Kind(name="", tp=2), 1),
        (Kind(name="", tp=2, variant="leanest", recompute=("full",)), 2),
    ):
        for losses, state in two.run(random_cases.train, kind, count, 0, what):
            assert max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)) < TOLERANCE
            assert max(relative(state[key], value) for key, value in wanted.items()) < TOLERANCE


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.4).sum()


def dropping() -> tuple[Graph, int]:
    graph = trace(Dropped(), {"x": torch.ones(5, 6, 8, dtype=torch.float64)}, precision="fp64", device_kind="cpu")
    (index,) = (i for i, node in enumerate(graph.nodes) if node.is_random)
    return graph, index


@pytest.mark.parametrize(("dim", "parts", "repeats"), [(2, (8,), 1), (2, (2,), 4), (1, (4, 2), 1)])
@pytest.mark.parametrize("is_by_sample", [True, False])
def test_the_parts_of_a_mask_are_those_of_one_device(
    dim: int, parts: tuple[int, ...], repeats: int, is_by_sample: bool
) -> None:
    graph, index = dropping()
    node = graph.nodes[index]
    operand = next(arg for arg in node.args if isinstance(arg, Ref))
    if not is_by_sample:  # samples cannot be told apart: all draw at once
        graph.__dict__["sample_runs"] = dict.fromkeys(graph.sample_runs)
    whole = Draw(graph, index, device=CPU)(Draws(3, 1, 2), 5, torch.ones(5, 6, 8, dtype=torch.float64))
    local = replace(
        node, op="planner.dropout.default", args=(operand, node.args[1], True, dim, parts, repeats),
        kwargs=(("axis", "tp"),),
    )  # fmt: skip
    runs = graph.sample_runs
    graph = replace(graph, nodes=tuple(local if n is node else n for n in graph.nodes))
    graph.__dict__["sample_runs"] = runs

    def part(rank: int) -> Tensor:
        peers = Peers(places={"tp": (rank, 2)})
        shape = [size // 2 if d == dim else size for d, size in enumerate((5, 6, 8))]
        made: Tensor = Draw(graph, index, device=CPU, peers=peers)(
            Draws(3, 1, 2), 5, torch.ones(shape, dtype=torch.float64)
        )
        return made

    both = [part(0), part(1)]
    joined = torch.empty_like(whole)
    start, position = 0, 0
    for size in parts * repeats:
        for piece in both:
            joined.narrow(dim, start, size // 2).copy_(piece.narrow(dim, position, size // 2))
            start += size // 2
        position += size // 2
    assert 0 < (whole == 0).double().mean() < 1
    assert torch.equal(joined, whole)


def test_what_a_kernel_draws_inside_differs_between_ranks_that_split_it() -> None:
    graph = random_cases.graph_of(("attention",) * 4)
    index = next(i for i, node in enumerate(graph.nodes) if node.is_random)
    node = graph.nodes[index]
    operands = dict.fromkeys(arg.tensor for arg in node.args if isinstance(arg, Ref))
    q = torch.randn(3, 1, 6, 4, dtype=torch.float64)

    def attention(rank: int, split: bool) -> Tensor:
        peers = Peers(places={"tp": (rank, 2)}, split_draws={0: (rank,)} if split else {})
        made: Tensor = Draw(graph, index, device=CPU, peers=peers)(Draws(0, 0, 0), 3, *(q for _ in operands))
        return made

    assert torch.equal(attention(0, split=True), attention(0, split=True))
    assert not torch.equal(attention(0, split=True), attention(1, split=True))
    assert torch.equal(attention(0, split=False), attention(1, split=False))


@pytest.mark.distributed
def test_attention_with_dropout_trains_on_ranks_that_split_heads(two: RankPool) -> None:
    what = ("attention",) * 4
    (first, state), (again, other) = two.run(random_cases.train, Kind(name="", tp=2, variant="leanest"), 2, 0, what)

    assert first == again
    assert all(torch.equal(state[name], value) for name, value in other.items())
    assert first[-1] < first[0] * 1.05


# --- what is refused ---


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("no sharding", "tp=2 and does not say how block"),
        ("unknown sharding", "sharding 99"),
        ("sharding without tp", "tp=1 and says how block"),
        ("no rule", "no rule lets"),
        ("no graph", "without a graph nothing can be split over tp=2; plan with tp=1"),
        ("ep", "ZeRO-0 blocks use dp_replicate and all blocks or none; the plan has dp_replicate=1"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_in_a_sentence(two: RankPool, change: str, sentence: str) -> None:
    first, second = two.run(cases.refusal, change)

    assert sentence in first
    assert first == second


@pytest.mark.distributed
def test_ranks_of_one_data_rank_are_given_the_same_batch(two: RankPool) -> None:
    for values, counts, same in two.run(cases.different_batches, Kind(name="", tp=2)):
        assert "ranks 0 and 1 split the tensors of one data rank and were given batches of different values" in values
        assert "ranks 0 and 1 are of one data rank and were given different batches (23 and 24 samples)" in counts
        assert same == ""


def test_a_gradient_that_two_parameters_share_is_added_to_each_once(two: RankPool) -> None:
    """`DTensor.to_local` (torch 2.13) lets both take it for their own: 3 + 3 and 2 + 2 more, of the other one."""
    for gradients in two.run(cases.shared_gradients):
        assert gradients == [[5.0, 5.0], [5.0, 5.0], [3.0, 3.0]]


def test_a_digest_tells_batches_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (4, 6), generator=generator)
    tensors = {
        "flags": tokens > 20, "bytes": tokens.to(torch.uint8), "halves": tokens.bfloat16(), "tokens": tokens,
        "numbers": torch.randn(4, 3, generator=generator).where(tokens[:, :3] > 3, torch.nan),
        "pairs": torch.randn(4, generator=generator, dtype=torch.complex64),
    }  # fmt: skip
    own = Fed(tensors, 4, ()).digest

    assert own == Fed({name: value.clone() for name, value in reversed(tensors.items())}, 4, ()).digest
    assert 0 <= own < 2**48
    for name, value in tensors.items():
        changed = value.clone()
        changed.view(-1)[1] = value.view(-1)[1].logical_not() if name == "flags" else value.view(-1)[1] + 1
        assert Fed({**tensors, name: changed}, 4, ()).digest != own, name
    assert Fed({**tensors, "tokens": tokens.flip(0)}, 4, ()).digest != own
    assert Fed({**tensors, "others": tokens}, 4, ()).digest != own


def test_a_digest_of_several_pieces_knows_where_each_is() -> None:
    first, second = torch.zeros(2**16), torch.ones(2**16)

    one = Fed({"x": torch.cat([first, second])}, 1, ()).digest

    assert one != Fed({"x": torch.cat([second, first])}, 1, ()).digest
    numbers = torch.arange(2**17)
    kept = numbers.clone()
    assert Fed({"x": numbers}, 1, ()).digest == Fed({"x": kept}, 1, ()).digest
    assert torch.equal(numbers, kept)  # it is not written to
