"""What the ranks of the tests of expert parallelism run."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from planner.errors import PlanError
from planner.plan import Plan
from planner.runtime import apply_plan
from planner.runtime.execute import GraphEngine
from planner.runtime.zero import is_spread, local
from planner.shard.spread import spread_experts
from planner.trace import priced, trace
from tests import distributed_cases, families, models
from tests.distributed_cases import (
    Kind,
    graph_of,
    make_plan,
    own_part,
    relative,
    trainer_of,
)
from tests.distributed_references import SAMPLES
from tests.float64 import explicit_float32_as_float64

STEPS = 3


def trained(name: str, kind: Kind) -> dict[str, float]:
    """Errors of a Hugging Face model after AdamW steps, beside the eager one with the same micro-batches.

    Where micro-batches are weighed alike that is the whole batch at once; a loss of how evenly a batch is routed is not
    one of its parts.
    """
    samples, num_microbatches = 4 * kind.dp, 2
    with explicit_float32_as_float64():
        eager, model = families.make(name), families.make(name)
        batches = [families.batch(name, samples * STEPS)]
        batches = [{k: v[i * samples : (i + 1) * samples] for k, v in batches[0].items()} for i in range(STEPS)]
        graph = trace(model, families.batch(name, 4), precision="fp64", device_kind="cpu")
        plan = make_plan(graph, kind, global_batch=samples, num_microbatches=num_microbatches)
        trainer = apply_plan(plan, model, graph=graph, optimizer=models.adamw)
        optimizer = models.adamw(list(eager.named_parameters()))
        errors: dict[str, float] = {}
        for step, batch in enumerate(batches):
            loss = trainer.step(own_part(batch, trainer))
            optimizer.zero_grad()
            parts = samples // plan.micro_batch
            wanted = 0.0
            for part in range(parts):
                mine = {key: value.chunk(parts)[part] for key, value in batch.items()}
                one = eager(**mine).loss / parts
                one.backward()
                wanted += one.item()
            norm = torch.nn.utils.get_total_norm([p.grad for p in eager.parameters() if p.grad is not None]).item()
            errors[f"loss {step}"], errors[f"norm {step}"] = abs(loss / wanted - 1), abs(trainer.grad_norm / norm - 1)
            if step == 0:
                gradients = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
                errors |= {f"gradient of {n}": relative(g, gradients[n]) for n, g in trainer.gradients().items()}
            optimizer.step()
        state = trainer.state_dict()
    return errors | {name: relative(state[name], value) for name, value in eager.state_dict().items()}


def held(kind: Kind) -> dict[str, tuple[int, ...]]:
    """Shapes of this rank's parts of the first layer's experts and of its router, and whether experts are spread."""
    trainer = trainer_of("moe", kind)
    owned = {o.name: o.parameter for o in trainer._trained}
    names = [f"blocks.0.mlp.{name}" for name in ("gate_up", "down", "router.weight")]
    assert [is_spread(owned[name]) for name in names] == [True, True, False]
    return {name: tuple(local(owned[name]).shape) for name in names}


def _whole_batch() -> dict[str, Tensor]:
    return models.batch("moe", SAMPLES, step=0)


def accumulated(kind: Kind) -> float:
    """The worst relative error of gradients that three calls add up, beside those of one call."""
    trainer = trainer_of("moe", kind)
    batch = own_part(_whole_batch(), trainer)
    trainer.forward_backward(batch)
    once = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    for _ in range(2):
        trainer.forward_backward(batch)
    thrice = trainer.gradients()
    return max(relative(thrice[name] / 3, gradient) for name, gradient in once.items())


def evaluated(kind: Kind) -> tuple[float, float]:
    """The loss of a batch of fewer tokens, evaluated, and that of the eager model."""
    trainer = trainer_of("moe", kind)
    batch = {name: value[:, :5] for name, value in _whole_batch().items()}
    found = trainer.evaluate(own_part(batch, trainer)).loss
    assert found is not None
    with torch.no_grad():
        return found, models.build("moe").eval()(**batch).item()


def uneven(kind: Kind) -> float:
    """The worst relative error of gradients where the second data rank has a sample less, beside the eager model."""
    trainer = trainer_of("moe", kind)
    batch = {name: value[: SAMPLES - 1] for name, value in _whole_batch().items()}
    own = {name: value[SAMPLES // 2 :] if trainer.data_rank else value[: SAMPLES // 2] for name, value in batch.items()}
    trainer.forward_backward(own)
    eager = models.build("moe")
    eager(**batch).backward()
    gradients = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    return max(relative(found, gradients[name]) for name, found in trainer.gradients().items())


def with_fewer_experts_than_owners(kind: Kind) -> float:
    """The worst relative error of gradients and parameters where a rank has a part of an expert alone."""
    trainer = trainer_of("moe", kind, num_microbatches=3)
    owned = {o.name: o.parameter for o in trainer._trained}
    whole = models.build("moe").blocks[0].mlp.down.shape  # type: ignore[index,union-attr]
    assert local(owned["blocks.0.mlp.down"]).shape == (1, whole[1] // 2, whole[2])
    state = trainer.state_dict()
    eager = models.build("moe")
    errors = [relative(state[name], value) for name, value in eager.state_dict().items()]
    trainer.forward_backward(own_part(_whole_batch(), trainer))
    eager(**_whole_batch()).backward()
    gradients = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    errors += [relative(found, gradients[name]) for name, found in trainer.gradients().items()]
    return max(errors)


LOADS = {f"blocks.{layer}.mlp": [8, 6, 1, 1] for layer in (0, 2, 3)}


def in_an_order(case: Callable[..., Any], *arguments: Any) -> Any:
    """A case with experts put together by measured loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_cases, "spread_experts", partial(spread_experts, loads=LOADS))
        plan = make_plan(graph_of("moe"), Kind(name="", dp=2, ep=2, zero=(1,)))
        assert any("@0.3.1.2" in text for sharding in plan.shardings for text in sharding.parameters)
        assert Plan.loads(plan.dumps()) == plan
        return case(*arguments)


def counted_and_planned(kind: Kind) -> tuple[Counter[str], Counter[str]]:
    """The collectives over `ep` of a step, and those of the plan."""
    trainer = trainer_of("moe", kind)
    engine = cast("GraphEngine", trainer.engine)
    communicator = engine.axes._communicators["ep"]
    found: Counter[str] = Counter()
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows"):

        def counting(*args: object, name: str = name, run: object = getattr(communicator, name)) -> object:
            found[name.removesuffix("_rows")] += 1
            return run(*args)  # type: ignore[operator]

        setattr(communicator, name, counting)
    trainer.step(own_part(_whole_batch(), trainer))
    (link,) = engine.axes.planned.links
    rank = priced(link.local.graph, graph_of("moe"), kind.ep, "cpu", axis="ep")
    planned: Counter[str] = Counter()
    for block in rank.blocks:
        for made in rank.classes[block.class_index].collectives:
            assert made.axis == "ep"
            planned[made.collective] += trainer.plan.num_microbatches
    return found, planned


def without_meshes_of_parameters() -> str:
    """The sentence of a torch whose FSDP has one mesh for all parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult")
        try:
            trainer_of("moe", Kind(name="", dp=2, ep=2, zero=(1,)))
        except PlanError as error:
            return str(error)
    return ""
