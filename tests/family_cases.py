"""What the ranks of the tests of Hugging Face families run, and how the results are compared."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from planner.graph import Graph
from planner.plan import Plan
from planner.runtime import Trainer, apply, apply_plan
from planner.runtime.check import CheckReport
from planner.shard.placement import Placement
from planner.trace import trace
from tests import families, models
from tests.distributed_cases import Kind, Result, make_plan, relative
from tests.eager_oracle import Reference
from tests.float64 import explicit_float32_as_float64

KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="one device"),
        Kind(name="ZeRO-3", dp=2, zero=(3,), recompute=("full",)),
        Kind(name="PP2", pp=2, recompute=("full",)),
        Kind(name="ZeRO-3 on 4", dp=4, zero=(3,), recompute=("full",)),
        Kind(name="PP2xDP2", pp=2, dp=2, zero=(3,), recompute=("full",)),
        Kind(name="PP2, one micro-batch", pp=2, schedule="gpipe", recompute=("full",)),
        Kind(name="PP4, one micro-batch", pp=4, schedule="gpipe", recompute=("full",)),
        Kind(name="TP2", tp=2, variant="leanest", recompute=("none", "full")),
        Kind(name="TP4", tp=4, variant="leanest", recompute=("full",)),
        Kind(name="TP2, by tokens", tp=2, variant="sequence", recompute=("full",)),
        Kind(
            name="PP2xTP2, by chance", pp=2, tp=2, variant="chance", schedule="gpipe", recompute=("none", "full")
        ),
        Kind(name="TP2xDP2 ZeRO-3", dp=2, tp=2, zero=(3,), variant="leanest", recompute=("full", "none")),
        Kind(
            name="PP2xDP2xTP2 ZeRO-1, by tokens", pp=2, dp=2, tp=2, zero=(1,), variant="sequence", recompute=("full",)
        ),
        Kind(
            name="PP2xDP2xTP2 ZeRO-3, by tokens", pp=2, dp=2, tp=2, zero=(3,), variant="sequence",
            recompute=("none", "full"),
        ),
    )
}  # fmt: skip


def graph_of(name: str, **settings: Any) -> Graph:
    """The trace of a family in float64."""
    with explicit_float32_as_float64():
        return trace(
            families.make(name, **settings), families.batch(name, 4), precision="fp64", name=name, device_kind="cpu"
        )


def num_microbatches(name: str) -> int:
    return 1 if families.FAMILIES[name].couples_samples else families.NUM_MICROBATCHES


def plan_of(name: str, graph: Graph, kind_name: str) -> Plan:
    """A kind of plan for a family."""
    kind = KINDS[kind_name]
    return make_plan(graph, kind, global_batch=families.SAMPLES, num_microbatches=num_microbatches(name))


def trainer_of(name: str, graph: Graph, plan: Plan, **settings: Any) -> Trainer:
    return apply_plan(
        plan, families.make(name, **settings), graph=graph, optimizer=models.sgd,
        max_grad_norm=families.MAX_GRAD_NORM, check=False,
    )  # fmt: skip


def shares_split(graph: Graph, plan: Plan) -> tuple[float, float]:
    """The share of matrices that a plan splits, and of blocks that hand on hidden states split by tokens."""
    placed: dict[int, Placement] = {}
    by_tokens = []
    for block, block_plan in zip(graph.blocks, plan.block_plans, strict=True):
        (index,) = block_plan.shardings
        sharding = plan.shardings[index]
        placed |= zip(block.parameters, map(Placement.parse, sharding.parameters), strict=True)
        handed_on = map(Placement.parse, sharding.outputs)
        by_tokens.append(any(p.is_split and p.dim == 1 for p in handed_on))
    matrices = [placement for t, placement in placed.items() if len(graph.tensors[t].shape) > 1]
    return sum(p.is_split for p in matrices) / len(matrices), sum(by_tokens) / (len(by_tokens) - 1)


def own_part(batch: families.Batch, trainer: Trainer) -> families.Batch:
    """This data rank's samples."""
    return {
        key: value.chunk(trainer.data_world)[trainer.data_rank] if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def train(name: str, graph: Graph, plan: Plan, settings: dict[str, Any]) -> Result:
    """Three steps on this rank."""
    return train_by(trainer_of(name, graph, plan, **settings), name)


def train_by_apply(name: str, plan: Plan) -> tuple[Result, CheckReport | None]:
    """Three steps on this rank as a user trains: traced anew and checked, with what the check found."""
    with explicit_float32_as_float64():
        trainer = apply(
            plan, families.make(name), batch=families.batch(name, 4), optimizer=models.sgd,
            max_grad_norm=families.MAX_GRAD_NORM,
        )  # fmt: skip
    return train_by(trainer, name), trainer.check


def train_by(trainer: Trainer, name: str) -> Result:
    """Three steps."""
    losses, norms = [], []
    for step in range(families.STEPS):
        losses.append(trainer.step(own_part(families.batch(name, families.SAMPLES, step=step), trainer)))
        norms.append(trainer.grad_norm)
        if step == 0:
            gradients = trainer.gradients()
    return Result(losses=losses, norms=norms, first_gradients=gradients, state=trainer.state_dict())


def worst_error(results: Sequence[Result], expected: Reference) -> tuple[float, str]:
    """The largest relative error of losses, norms, first gradients and last parameters on any rank, and where it is.

    Gradients that are zero by construction (a key's bias) are rounding noise: they must be noise here too.
    """
    errors: list[tuple[float, str]] = []
    assert min(expected.gradient_norms) > families.MAX_GRAD_NORM, "clipping is not active"
    scale = families.MAX_GRAD_NORM / (expected.gradient_norms[0] + 1e-6)
    seen: set[str] = set()
    for rank, result in enumerate(results):
        for what, values, wanted in (
            ("loss", result.losses, expected.losses),
            ("norm", result.norms, expected.gradient_norms),
        ):
            errors += [(abs(v / w - 1), f"{what} of rank {rank}") for v, w in zip(values, wanted, strict=True)]
        for name, gradient in result.first_gradients.items():
            seen.add(name)
            if name in expected.zero_gradients:
                errors.append((gradient.abs().max().item() / families.MAX_GRAD_NORM, f"zero gradient of {name}"))
            else:
                errors.append((relative(gradient, expected.first_gradients[name] * scale), f"gradient of {name}"))
        errors += [(relative(result.state[n], p), f"parameter {n}") for n, p in expected.parameters.items()]
    assert seen == set(expected.first_gradients), seen ^ set(expected.first_gradients)
    return max(errors)


def worst_difference(results: Sequence[Result], expected: Result) -> tuple[float, str]:
    """The largest relative difference of two plans' losses, norms, first gradients and last parameters."""
    errors: list[tuple[float, str]] = []
    for rank, result in enumerate(results):
        errors += [
            (abs(a / b - 1), f"loss of rank {rank}") for a, b in zip(result.losses, expected.losses, strict=True)
        ]
        errors += [(abs(a / b - 1), f"norm of rank {rank}") for a, b in zip(result.norms, expected.norms, strict=True)]
        for name, gradient in result.first_gradients.items():
            wanted = expected.first_gradients[name]
            noise = 1e-12 * families.MAX_GRAD_NORM  # a key's bias has no gradient but rounding
            if max(gradient.abs().max().item(), wanted.abs().max().item()) > noise:
                errors.append((relative(gradient, wanted), f"gradient of {name}"))
        errors += [(relative(result.state[n], p), f"parameter {n}") for n, p in expected.state.items()]
    return max(errors)
