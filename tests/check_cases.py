"""Faults planted into tensor parallelism: models that show them, and what the ranks of the tests run."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CheckError
from planner.graph import Graph
from planner.plan import Mesh, Plan
from planner.runtime import apply_plan, parts
from planner.shard import rules
from planner.shard.placement import Option, P, Q, R, Sharding
from planner.shard.program import variants
from planner.shard.rules import matmul, pointwise
from planner.shard.rules.call import AS_IT_IS, Call, Rule
from planner.shard.stored import stored
from planner.trace import parallel, trace
from tests import models
from tests.distributed_cases import PRICES, Kind, make_plan, relative

WIDTH, HIDDEN, SAMPLES = 8, 16, 4


class Layer(nn.Module):
    """A wide layer, something in between, and a narrow one."""

    def __init__(self, between: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self.up(x)))
        return x + y


class Attending(nn.Module):
    """Heads of one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + y


class Normed(nn.Module):
    """A norm before a layer, as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), Layer(torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.norm(x))
        return x + y


class Stack(nn.Module):
    """Four layers and a loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """The scalar loss."""
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(SAMPLES, 6, WIDTH, generator=generator, dtype=torch.float64)}


# --- faults ---


def _norm_of_parts(call: Call, *, is_rewritten: bool = True) -> Iterator[Option]:
    """A norm over a dim that is split, of what a rank has alone."""
    x, weight, bias = call.operand(0), call.operand(2), call.operand(3)
    assert x is not None
    dims = tuple(range(call.rank(x)))
    own = call.with_args({1: (HIDDEN // call.degree,)}) if is_rewritten else AS_IT_IS
    yield from call.einsum(
        [(x, dims), (weight, dims[-1:]), (bias, dims[-1:])],
        [dims],
        lambda split: own if split.letter == dims[-1] else AS_IT_IS,
    )


def _summed_by_nobody(call: Call) -> Iterator[Option]:
    """A linear layer whose parts of a sum are taken for the sum."""
    for option in matmul.linear(call):
        yield replace(option, outputs=tuple(R if p == P else p for p in option.outputs))


def _copy_without_sum(c: parallel.Communicator, x: Tensor) -> Tensor:
    return x.view_as(x)


def _swapped(piece_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def swapped(x: Tensor, dim: int, sizes: Any, repeats: int, rank: int, size: int) -> Tensor:
        found = piece_of(x, dim, sizes, repeats, rank, size)
        return found.roll(found.shape[dim] // repeats, dim) if repeats > 1 else found

    return swapped


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault: the model that shows it, the way to split it, what is named, and how it is planted."""

    make: Callable[[], nn.Module]
    operator: str  # "" where it is none
    placed: str
    rule: Mapping[str, Rule] | None = None
    operators: Mapping[str, Callable[..., Tensor]] | None = None
    pieces: bool = False
    variant: str = "fast"


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _taken_for_whole(original: Rule) -> Rule:
    """A norm of split rows whose gradients of weight and bias are taken for those of all rows."""

    def rule(call: Call) -> Iterator[Option]:
        for option in original(call):
            yield replace(option, operands=(option.operands[0], *(R if p == Q else p for p in option.operands[1:])))

    return rule


FAULTS = {
    "softmax along its own dim": Planted(
        make=lambda: Layer(_softmax), operator="aten.softmax.int", placed="S2[16]>S2[16]",
        rule={"aten.softmax": pointwise.pointwise}, variant="lean",  # as if its dim were as the others
    ),
    "norm over a split dim": Planted(
        make=lambda: Layer(nn.LayerNorm(HIDDEN)), operator="aten.layer_norm.default",
        placed="S2[16],S0[16],S0[16]>S2[16]", rule={"aten.layer_norm": _norm_of_parts}, variant="lean",
    ),
    "norm that fails": Planted(
        make=lambda: Layer(nn.LayerNorm(HIDDEN)), operator="aten.layer_norm.default",
        placed="S2[16],S0[16],S0[16]>S2[16]",
        rule={"aten.layer_norm": lambda call: _norm_of_parts(call, is_rewritten=False)}, variant="lean",
    ),
    "linear without a sum": Planted(
        make=lambda: Layer(torch.tanh), operator="aten.linear.default", placed="S2[16],S1[16],P>R",
        rule={"aten.linear": _summed_by_nobody}, variant="lean",
    ),
    "gradient of a weight that is a part": Planted(
        make=Normed, operator="aten.layer_norm.default", placed="S1[6],R,R>S1[6]",
        rule={"aten.layer_norm": _taken_for_whole(rules.TABLE["aten.layer_norm"])}, variant="leanest",
    ),
    "copy without a sum": Planted(
        make=lambda: Layer(torch.tanh), operator="planner.copy.default", placed="R>Q",
        operators={"planner.copy.default": _copy_without_sum}, variant="lean",
    ),
    "swapped pieces": Planted(make=Attending, operator="", placed="S0*3[8]", pieces=True),
}  # fmt: skip


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """Within it the fault is there."""
    table = cast("MutableMapping[str, Rule]", rules.TABLE)
    tables: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = []
    faults: list[tuple[MutableMapping[str, Any], Any]] = [(table, fault.rule), (parallel.OPERATORS, fault.operators)]
    for there, changed in faults:
        tables.append((there, {name: there[name] for name in changed or {}}))
        there.update(changed or {})
    piece_of = parts.piece_of  # type: ignore[attr-defined]
    try:
        if fault.pieces:
            parts.piece_of = _swapped(piece_of)  # type: ignore[attr-defined]
        yield
    finally:
        parts.piece_of = piece_of  # type: ignore[attr-defined]
        for there, before in tables:
            there.update(before)


def traced(model: nn.Module, precision: str = "fp64") -> Graph:
    graph = trace(model, batch(), precision=precision, device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    return graph


def shardings_of(graph: Graph, variant: str, axis: str = "tp") -> tuple[Sharding, ...]:
    """A way to split a graph in two that is found now, faults included."""
    found = variants(graph, 2, PRICES, whole_parameters=axis == "cp")
    return next((one for one in found if one.name == variant), found[-1]).shardings


def plan_of(graph: Graph, variant: str, axis: str = "tp") -> Plan:
    distinct, of_block = stored(shardings_of(graph, variant, axis), axis)
    kind = Kind(name="", zero=(int(axis == "cp"),))  # ranks of cp shard parameters
    plan = make_plan(
        graph, kind, global_batch=SAMPLES, num_microbatches=2, mesh=Mesh(**{axis: 2}), shardings=distinct
    )  # fmt: skip
    blocks = [replace(b, shardings=(i,)) for b, i in zip(plan.stages[0].blocks, of_block, strict=True)]
    return replace(plan, stages=(replace(plan.stages[0], blocks=tuple(blocks)),))


# --- what ranks run ---


def refused_then_trained(name: str, axis: str = "tp") -> tuple[str, str, tuple[str, ...], list[float]]:
    """The sentence with which a faulty plan is refused; then what a trainer that replicates says, and its errors.

    Errors are those of losses and parameters of three steps, beside the eager module's.
    """
    fault = FAULTS[name]
    with planted(fault):
        graph = traced(Stack(fault.make))
        plan = plan_of(graph, fault.variant, axis)
        try:
            apply_plan(plan, Stack(fault.make), graph=graph)
            sentence = ""
        except CheckError as error:
            sentence = str(error)
        trainer = apply_plan(plan, Stack(fault.make), graph=graph, optimizer=models.sgd, check="replicate")
        eager = Stack(fault.make)
        optimizer = models.sgd(eager.named_parameters())
        errors = []
        for step in range(3):
            loss = trainer.step(batch(step))
            wanted = eager(**batch(step))
            optimizer.zero_grad()
            wanted.backward()
            optimizer.step()
            errors.append(abs(loss / wanted.item() - 1))
        state = trainer.state_dict()
        errors += [relative(state[name], value) for name, value in eager.state_dict().items()]
        # another batch shape is split without the operator, too
        longer = {"x": torch.randn(SAMPLES, 10, WIDTH, generator=torch.Generator().manual_seed(9)).double()}
        wanted = eager(**longer).item()
        errors.append(abs(trainer.step(longer) / wanted - 1))
    assert trainer.check is not None
    return sentence, str(trainer.check), trainer.check.replicated, errors
