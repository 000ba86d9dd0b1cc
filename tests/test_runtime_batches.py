"""Batches other than the planned one: unequal counts of valid targets, fewer samples, other lengths, evaluation.

The reference is always the eager module on the whole global batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from planner.errors import RunError
from planner.graph import Graph
from planner.runtime import Trainer, apply_plan
from planner.runtime.inputs import shared_out
from planner.trace import trace
from tests import models
from tests.distributed_cases import Kind, make_plan, own_part, relative, unusual, unusual_batch
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed
GLOBAL_BATCH = 12
MICRO_BATCH = 2
VOCABULARY = 17
WIDTH = 8
CLIP = 0.1  # below every gradient norm here
Batch = dict[str, Tensor]


KINDS = {
    "one device": Kind(name="", recompute=("none", "full")),
    "ZeRO-0": Kind(name="", dp=2),
    "ZeRO-1": Kind(name="", dp=2, zero=(1,)),
    "ZeRO-3": Kind(name="", dp=2, zero=(3,), recompute=("full",)),
    "PP2": Kind(name="", pp=2, recompute=("full", "none")),
    "PP2xDP2 ZeRO-1": Kind(name="", pp=2, dp=2, zero=(1,)),
    "PP2xDP2 ZeRO-3": Kind(name="", pp=2, dp=2, zero=(3,), recompute=("full",)),
    "TP2": Kind(name="", tp=2, variant="leanest", recompute=("none", "full")),
    "TP2xDP2 ZeRO-1": Kind(name="", tp=2, dp=2, zero=(1,)),
    "TP2xPP2": Kind(name="", tp=2, pp=2, variant="leanest"),
    "CP2": Kind(name="", cp=2, zero=(3,), recompute=("none", "full")),
    "CP2xPP2": Kind(name="", cp=2, pp=2, zero=(1,), variant="lean"),
}


class Parts(nn.Module):
    """A model whose loss has parts of all kinds: two counted means, masked ones, plain ones, and one of no sample."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = tuple(parts)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if "norm" in parts else nn.Identity()
        self.drop = nn.Dropout(0.5) if "dropout" in parts else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if "tied" in parts:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Any]:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(x)
        output: dict[str, Any] = {"logits": logits, "states": (x, x.mean(1)), "none": None}
        if labels is None or mask is None:
            return output
        size = x.square().mean(-1)
        loss = torch.zeros((), dtype=x.dtype)
        if "counted" in self.parts:
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if "shifted" in self.parts:
            shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
            rows = logits.flatten(0, 1).log_softmax(-1)
            loss = loss + 0.5 * F.nll_loss(rows, shifted.flatten())
        if "smooth" in self.parts:
            loss = loss + F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)
        if "masked" in self.parts:
            loss = loss + 0.3 * (size * mask).sum() / mask.sum().clamp(min=1)
        if "normalised" in self.parts:
            loss = loss + 0.2 * (size * (mask / mask.sum())).sum()
        if "masked mean" in self.parts:
            loss = loss + 0.3 * (size * mask).mean() / mask.mean()
        if "plain" in self.parts:
            loss = loss + 0.2 * size.mean() + 0.1 * x.abs().sum() / (x.shape[0] * x.shape[1])
        if "decay" in self.parts:
            loss = loss + 0.01 * self.head.weight.square().sum()
        output["loss"] = loss
        return output


def make(parts: Sequence[str]) -> Parts:
    return Parts(parts).double()


def batch_of(samples: int, length: int, seed: int) -> Batch:
    """Labels and masks of very unequal counts; the first two samples have none that count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (samples, length), generator=generator)
    labels = torch.randint(VOCABULARY, (samples, length), generator=generator)
    hidden = torch.rand(samples, length, generator=generator) < torch.linspace(0.9, 0.1, samples)[:, None]
    hidden[: min(2, samples - 1)] = True
    return {"ids": ids, "labels": labels.masked_fill(hidden, -100), "mask": (~hidden).double()}


def graph_of(parts: Sequence[str]) -> Graph:
    graph = trace(make(parts), batch_of(4, 6, 0), precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    return graph


def trainer_of(parts: Sequence[str], kind: Kind, optimizer: str = "adamw", **options: Any) -> Trainer:
    graph = graph_of(parts)
    plan = make_plan(graph, kind, global_batch=GLOBAL_BATCH, num_microbatches=GLOBAL_BATCH // kind.dp // MICRO_BATCH)
    return apply_plan(plan, make(parts), graph=graph, optimizer=models.OPTIMIZERS[optimizer], check=False, **options)


def errors_of(trainer: Trainer, eager: nn.Module) -> list[float]:
    state = trainer.state_dict()
    return [relative(state[name], value) for name, value in eager.state_dict().items()]


def train(parts: Sequence[str], kind: Kind, batches: Sequence[Batch]) -> list[float]:
    """The worst relative error of each step's loss and norm, then of the parameters, beside the eager module."""
    trainer = trainer_of(parts, kind, max_grad_norm=CLIP)
    eager = make(parts)
    optimizer = models.adamw(eager.named_parameters())
    errors = []
    for batch in batches:
        loss = trainer.step(own_part(batch, trainer))
        optimizer.zero_grad()
        wanted = eager(**batch)["loss"]
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), CLIP)
        assert norm > CLIP
        optimizer.step()
        errors.append(max(abs(loss / wanted.item() - 1), abs(trainer.grad_norm / norm.item() - 1)))
    return [*errors, max(errors_of(trainer, eager))]


PARTS = {
    "counted": ("counted",),
    "counted twice": ("counted", "shifted", "smooth", "tied"),
    "divided": ("masked", "normalised", "masked mean"),
    "all": ("counted", "shifted", "masked", "plain", "decay", "tied"),
}


@pytest.mark.parametrize("parts", PARTS)
def test_unequal_counts_of_what_a_loss_is_a_mean_over(two: RankPool, parts: str) -> None:
    batches = [batch_of(GLOBAL_BATCH, 6, seed) for seed in range(2)]

    for errors in two.run(train, PARTS[parts], KINDS["ZeRO-3"], batches):
        assert max(errors) < 1e-9, errors


SHAPES = [(12, 6), (12, 9), (11, 6), (12, 6), (7, 9), (12, 9), (4, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_samples_and_other_lengths_in_a_row(one: RankPool, two: RankPool, four: RankPool, kind: str) -> None:
    pool = {1: one, 2: two, 4: four}[KINDS[kind].world_size]
    batches = [batch_of(samples, length, seed) for seed, (samples, length) in enumerate(SHAPES)]

    for errors in pool.run(train, PARTS["all"], KINDS[kind], batches):
        assert max(errors) < 1e-9, errors


def test_micro_batches_are_shared_out_alike_on_all_data_ranks() -> None:
    for samples in ([6, 6], [6, 5], [3, 6], [4, 3, 3, 2], [1, 2]):
        shares = [shared_out(samples, rank, micro_batch=2, num_microbatches=3) for rank in range(len(samples))]

        assert [sum(share.sizes) for share in shares] == samples
        assert len({len(share.sizes) for share in shares}) == 1
        assert all(0 < size <= 2 for share in shares for size in share.sizes)
        assert [share.first_sample for share in shares] == [sum(samples[:rank]) for rank in range(len(samples))]
        for share in shares:
            assert [size for size, count in share.runs for _ in range(count)] == list(share.sizes)
        assert len({tuple(count for _, count in share.runs) for share in shares}) == 1
    with pytest.raises(RunError, match="data rank 1 has 1 samples and another one 6, which are 3 micro-batches"):
        shared_out([6, 1], 0, micro_batch=2, num_microbatches=3)


def refused() -> list[tuple[str, float]]:
    """What both ranks say when one of them has a batch that does not fit; the loss of the next step each time."""
    trainer = trainer_of(("counted", "plain"), KINDS["ZeRO-3"])
    good = own_part(batch_of(GLOBAL_BATCH, 6, 0), trainer)
    longer = own_part(batch_of(GLOBAL_BATCH, 7, 0), trainer)
    first = dist.get_rank() == 0
    answers = []
    for bad in (
        {"ids": good["ids"]} if first else good,
        {**good, "labels": good["labels"][:, :-1]} if first else good,
        longer if first else good,
        {name: value[:1] for name, value in good.items()} if first else good,
    ):
        said = ""
        try:
            trainer.forward_backward(bad)
        except RunError as error:
            said = str(error)
        answers.append((said, trainer.forward_backward(good)))
    return answers


def test_a_batch_that_one_rank_cannot_run_is_refused_by_all(two: RankPool) -> None:
    rank0, rank1 = two.run(refused)
    for one_said, other_said, part in zip(
        [said for said, _ in rank0],
        [said for said, _ in rank1],
        ["lacks 'labels'", "does not run on the batch", "different shapes", "1 samples and another one 6"],
        strict=True,
    ):
        assert part in one_said
        assert part in other_said
    assert len({loss for _, loss in (*rank0, *rank1)}) == 1


def lengths_per_rank() -> float:
    """The error of a step in which each data rank has another length, for a loss of counted targets only."""
    trainer = trainer_of(("counted",), KINDS["ZeRO-3"])
    parts = [batch_of(6, length, seed) for seed, length in enumerate((6, 9))]
    loss = trainer.forward_backward(parts[trainer.data_rank])
    eager = make(("counted",))
    total = sum(
        F.cross_entropy(eager(b["ids"])["logits"].flatten(0, 1), b["labels"].flatten(), reduction="sum") for b in parts
    )
    wanted = total / sum(int((b["labels"] != -100).sum()) for b in parts)
    assert isinstance(wanted, Tensor)
    wanted.backward()
    gradients = trainer.gradients()
    named = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    return max(abs(loss / wanted.item() - 1), *(relative(gradients[n], g) for n, g in named.items()))


def test_data_ranks_may_have_other_lengths_where_only_targets_count(two: RankPool) -> None:
    assert max(two.run(lengths_per_rank)) < 1e-9


def own_loop(parts: Sequence[str], kind: Kind) -> list[float]:
    """A user's loop with three batches a step, written for the trainer and for the eager module."""
    trainer = trainer_of(parts, kind)
    eager = make(parts)
    optimizer = models.adamw(eager.named_parameters())
    errors = []
    for step in range(3):
        trainer.zero_grad()
        optimizer.zero_grad()
        for part in range(3):
            batch = batch_of(GLOBAL_BATCH - part, 6, 3 * step + part)
            loss = trainer.forward_backward(own_part(batch, trainer), scale=1 / 3)
            wanted = eager(**batch)["loss"]
            (wanted / 3).backward()
            errors.append(abs(loss / wanted.item() - 1))
        norm = trainer.clip_grad_norm_(CLIP)
        errors.append(abs(norm / nn.utils.clip_grad_norm_(eager.parameters(), CLIP).item() - 1))
        assert norm > CLIP
        trainer.optimizer_step()
        optimizer.step()
    return [*errors, max(errors_of(trainer, eager))]


@pytest.mark.parametrize(
    "kind",
    [
        "ZeRO-0",
        "ZeRO-1",
        "ZeRO-3",
        "PP2",
        "PP2xDP2 ZeRO-1",
        "PP2xDP2 ZeRO-3",
        "TP2",
        "TP2xDP2 ZeRO-1",
        "TP2xPP2",
        "CP2",
    ],
)
def test_a_loop_of_ones_own_accumulates_as_eager_does(two: RankPool, four: RankPool, kind: str) -> None:
    pool = {2: two, 4: four}[KINDS[kind].world_size]

    for errors in pool.run(own_loop, PARTS["all"], KINDS[kind]):
        assert max(errors) < 1e-9, errors


def evaluated(parts: Sequence[str], kind: Kind) -> list[float]:
    """Errors of evaluations between training steps, beside the eager module in eval mode."""
    trainer = trainer_of(parts, kind)
    eager = make(parts)
    errors = []

    def compared(batch: Batch, *names: str) -> None:
        before = trainer.state_dict()
        eager.load_state_dict(before)
        eager.eval()
        with torch.no_grad():
            wanted = eager(**batch)
        found = trainer.evaluate(own_part(batch, trainer), names)
        if "labels" in batch:
            assert found.loss is not None
            errors.append(abs(found.loss / wanted["loss"].item() - 1))
        else:
            assert found.loss is None
        leaves = {"logits": wanted["logits"], "states.0": wanted["states"][0], "states.1": wanted["states"][1]}
        for name, value in found.outputs.items():
            assert not value.requires_grad
            errors.append(relative(value, leaves[name]))
        asked = {n for n in leaves for name in names if n == name or n.startswith(f"{name}.")}
        assert found.outputs.keys() == asked
        local = trainer.evaluate(own_part(batch, trainer), names, gather=False)
        for name, value in local.outputs.items():
            errors.append(relative(value, leaves[name].chunk(trainer.data_world)[trainer.data_rank]))
        assert all(torch.equal(before[name], value) for name, value in trainer.state_dict().items())

    def unlabelled(batch: Batch) -> Batch:
        return {"ids": batch["ids"]}

    compared(batch_of(13, 6, 0), "logits")
    trainer.step(own_part(batch_of(12, 6, 1), trainer))
    compared(batch_of(12, 6, 2), "logits", "states")
    compared(batch_of(7, 9, 3))
    trainer.step(own_part(batch_of(12, 6, 4), trainer))
    compared(unlabelled(batch_of(15, 6, 5)), "states.1")
    return errors


@pytest.mark.parametrize(
    "kind",
    [
        "one device",
        "ZeRO-0",
        "ZeRO-1",
        "ZeRO-3",
        "PP2",
        "PP2xDP2 ZeRO-1",
        "PP2xDP2 ZeRO-3",
        "TP2",
        "TP2xPP2",
        "CP2xPP2",
    ],
)
def test_evaluation_equals_the_eager_module_in_eval_mode(
    one: RankPool, two: RankPool, four: RankPool, kind: str
) -> None:
    pool = {1: one, 2: two, 4: four}[KINDS[kind].world_size]
    parts = ("counted", "masked", "plain", "norm", "dropout")

    for errors in pool.run(evaluated, parts, KINDS[kind]):
        assert len(errors) == 13
        assert max(errors) < 1e-9, errors


def what_evaluate_refuses() -> list[str]:
    trainer = trainer_of(("counted",), Kind(name=""))
    batch = batch_of(4, 6, 0)
    answers = []
    calls: list[Callable[[], object]] = [
        lambda: trainer.evaluate(batch, ["probabilities"]),
        lambda: trainer.evaluate({"ids": batch["ids"]}),
        lambda: trainer.evaluate(batch, ["none"]),
    ]
    for call in calls:
        try:
            call()
            answers.append("")
        except RunError as error:
            answers.append(str(error))
    return answers


def test_what_cannot_be_evaluated_is_said(one: RankPool) -> None:
    ((unknown, unlabelled, none),) = one.run(what_evaluate_refuses)

    assert "returns no tensor 'probabilities'; it returns logits, states.0, states.1, loss" in unknown
    assert "lacks 'labels', so it has no loss" in unlabelled
    assert "returns no tensor 'none'" in none


class Coupled(nn.Module):
    """Every sample is compared with all others, and a mean over targets goes through a square."""

    def __init__(self, is_squared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_squared = is_squared
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.is_squared:
            return {"loss": F.cross_entropy(x, labels).square(), "x": x}
        return {"loss": F.cross_entropy(x @ x.T, torch.arange(len(x))), "x": x}


def coupled(is_squared: bool) -> list[tuple[float, float]]:
    """Losses of training and of evaluation on another number of samples, beside those of the eager module."""
    model, eager = Coupled(is_squared).double(), Coupled(is_squared).double()
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(7, WIDTH, generator=generator, dtype=torch.float64), "labels": torch.arange(7) % WIDTH}
    graph = trace(model, batch, precision="fp64", device_kind="cpu")
    count = 2 if is_squared else 1
    plan = make_plan(graph, Kind(name=""), global_batch=8, num_microbatches=count)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd, check=False)
    found = []
    if is_squared:
        for labels in (batch["labels"][:6], batch["labels"][:6].index_fill(0, torch.tensor([0]), -100)):
            part = {"x": batch["x"][:6], "labels": labels}
            try:
                loss = trainer.forward_backward(part)
            except RunError as error:
                assert "between 2 and 3 targets" in str(error)  # noqa: PT017
                assert "not linear in this mean over valid targets" in str(error)  # noqa: PT017
                continue
            wanted = [eager(**{k: v[i : i + 3] for k, v in part.items()})["loss"].item() for i in (0, 3)]
            found.append((loss, sum(wanted) / 2))
        return found
    found.append((trainer.step(batch), eager(**batch)["loss"].item()))
    eager.load_state_dict(trainer.state_dict())
    larger = {name: torch.cat([value, value[:4] + 1]) for name, value in batch.items()}
    evaluation = trainer.evaluate(larger, ["x"])
    assert evaluation.loss is not None
    assert torch.allclose(evaluation.outputs["x"], eager(**larger)["x"])
    found.append((evaluation.loss, eager(**larger)["loss"].item()))
    return found


@pytest.mark.parametrize("is_squared", [False, True])
def test_what_cannot_be_split_is_run_whole_or_refused(one: RankPool, is_squared: bool) -> None:
    (found,) = one.run(coupled, is_squared)

    assert len(found) == (1 if is_squared else 2)
    for loss, wanted in found:
        assert loss == pytest.approx(wanted, rel=1e-12)


def without_graph(zero: int) -> list[float]:
    """Errors of a model that has no graph, on a last batch with fewer samples and in evaluation."""
    model, eager = unusual("parameter hook"), unusual("parameter hook")
    graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
    assert graph.fallbacks
    plan = make_plan(graph, Kind(name="", dp=2, zero=(zero,)), global_batch=12, num_microbatches=3)
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd, max_grad_norm=CLIP, check=False)
    optimizer = models.sgd(eager.named_parameters())
    errors = []
    for step, samples in enumerate((12, 9, 11, 3)):
        batch = {name: value[:samples] for name, value in unusual_batch(step).items()}
        loss = trainer.step(own_part(batch, trainer))
        optimizer.zero_grad()
        wanted = eager(**batch)
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), CLIP)
        optimizer.step()
        errors += [abs(loss / wanted.item() - 1), abs(trainer.grad_norm / norm.item() - 1)]
        batch = {name: value[: 2 * step + 3] for name, value in unusual_batch(step + 7).items()}
        found = trainer.evaluate(own_part(batch, trainer))
        assert found.loss is not None
        errors.append(abs(found.loss / eager(**batch).item() - 1))
    assert trainer.engine.model.training  # type: ignore[attr-defined]
    return [*errors, max(errors_of(trainer, eager))]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_model_without_a_graph_takes_such_batches_too(two: RankPool, zero: int) -> None:
    for errors in two.run(without_graph, zero):
        assert len(errors) == 13
        assert max(errors) < 1e-9, errors


class Headed(nn.Module):
    """No loss of its own, and no graph if it counts its calls in Python."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts = counts
        self.calls = 0
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.counts:
            self.calls += 1
        states = self.layers(x)
        return states, self.drop(states).relu()


def squared(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    return (output[1] - batch["y"]).square().mean()


def by_loss_function(counts: bool, loss_fn: Any) -> list[Any]:
    """Evaluation of a model whose loss is given to `apply`, or the refusal where another one is given."""
    model, eager = Headed(counts).double(), Headed(counts).double().eval()
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(7, WIDTH, generator=generator, dtype=torch.float64) for name in ("x", "y")}
    graph = trace(model, batch, precision="fp64", device_kind="cpu", loss_fn=squared)
    assert bool(graph.fallbacks) == counts
    plan = make_plan(graph, Kind(name="", dp=2, zero=(3,)), global_batch=8, num_microbatches=2)
    trainer = apply_plan(plan, model, graph=graph, loss_fn=loss_fn, check=False)
    try:
        found = trainer.evaluate(own_part(batch, trainer), ["1"])
        alone = trainer.evaluate(own_part({"x": batch["x"]}, trainer), ["0"])
    except RunError as error:
        return [str(error)]
    assert found.loss is not None
    wanted = eager(**batch)
    return [
        abs(found.loss / squared(wanted, batch).item() - 1),
        relative(found.outputs["1"], wanted[1]),
        relative(alone.outputs["0"], wanted[0]),
    ]


@pytest.mark.parametrize("counts", [False, True])
def test_evaluation_by_a_loss_function(two: RankPool, counts: bool) -> None:
    for errors in two.run(by_loss_function, counts, squared):
        assert len(errors) == 3
        assert max(errors) < 1e-9


def doubled(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    return 2 * squared(output, batch)


def test_another_loss_function_than_the_traced_one_is_noticed(two: RankPool) -> None:
    for (said,) in two.run(by_loss_function, False, doubled):
        assert "the model or the loss function is not the one that was traced" in said
    for (said,) in two.run(by_loss_function, False, None):
        assert "give loss_fn" in said
