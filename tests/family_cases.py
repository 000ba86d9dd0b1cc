"""What the ranks of the tests of Hugging Face families run, and how the results are compared."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from planner.graph import Graph
from planner.runtime import Trainer, apply_plan
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
    )
}


def graph_of(name: str, **settings: Any) -> Graph:
    """The trace of a family in float64."""
    with explicit_float32_as_float64():
        return trace(
            families.make(name, **settings), families.batch(name, 4), precision="fp64", name=name, device_kind="cpu"
        )


def num_microbatches(name: str) -> int:
    return 1 if families.FAMILIES[name].couples_samples else families.NUM_MICROBATCHES


def trainer_of(name: str, graph: Graph, kind: Kind, **settings: Any) -> Trainer:
    plan = make_plan(graph, kind, global_batch=families.SAMPLES, num_microbatches=num_microbatches(name))
    return apply_plan(
        plan, families.make(name, **settings), graph=graph, optimizer=models.sgd,
        max_grad_norm=families.MAX_GRAD_NORM, check=False,
    )  # fmt: skip


def own_part(batch: families.Batch, trainer: Trainer) -> families.Batch:
    """This data rank's samples."""
    return {
        key: value.chunk(trainer.data_world)[trainer.data_rank] if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def train(name: str, graph: Graph, kind_name: str, settings: dict[str, Any]) -> Result:
    """Three steps on this rank."""
    trainer = trainer_of(name, graph, KINDS[kind_name], **settings)
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
