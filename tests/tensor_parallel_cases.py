"""What the ranks of the tests of tensor parallelism run."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from planner.errors import PlanError, RunError
from planner.graph import Graph
from planner.plan import Mesh, Plan, ShardingPlan
from planner.runtime import apply_plan
from planner.runtime.execute import GraphEngine, stage_positions
from planner.runtime.peers import held
from planner.runtime.zero import local
from planner.shard.localize import localize
from planner.shard.placement import Placement, Q, R, Sharding, differentiable
from planner.shard.rules import options
from planner.shard.stored import stored
from planner.trace import priced, trace
from tests import models
from tests.distributed_cases import (
    Kind,
    found_shardings,
    graph_of,
    make_plan,
    own_part,
    relative,
    trainer_of,
    unusual,
    unusual_batch,
)
from tests.distributed_references import SAMPLES

Counted = Counter[tuple[str, int]]  # (collective, bytes of one as planner.collectives counts them)


def counted_and_planned(model: str, kind: Kind) -> tuple[Counted, Counted, int]:
    """The collectives of this rank's blocks in a step, those that the plan knows, and all-reduces beside them.

    The last are those of gradients that are partial over the axis.
    """
    trainer = trainer_of(model, kind)
    engine = cast("GraphEngine", trainer.engine)
    (communicator,) = engine.axes._communicators.values()
    found: Counted = Counter()

    def count(name: str) -> None:
        run = getattr(communicator, name)

        def counting(x: Tensor, *rows: Any) -> Tensor:
            result: Tensor = run(x, *rows)
            of = result if name == "all_gather" else x  # the whole; what an all-to-all takes is one rank's part
            found[name.removesuffix("_rows"), of.numel() * of.element_size()] += 1
            return result

        setattr(communicator, name, counting)

    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows"):
        count(name)
    sums = 0
    reduce = engine.axes._reduce

    def reducing(tensors: Any) -> None:
        nonlocal sums
        sums += 1
        reduce(tensors)

    engine.axes._reduce = reducing  # type: ignore[method-assign]
    trainer.step(own_part(models.batch(model, SAMPLES, step=0), trainer))

    whole = graph_of(model)
    ((axis, degree),) = trainer.plan.mesh.splits
    shardings = found_shardings(whole, degree, kind.variant, whole_parameters=kind.cp > 1)
    local = priced(localize(whole, shardings, degree, axis=axis).graph, whole, degree, "cpu", axis=axis)
    planned: Counted = Counter()
    plan = trainer.plan
    for position in stage_positions(plan)[dist.get_rank() // (kind.dp * degree)]:
        for made in local.classes[local.blocks[position].class_index].collectives:
            assert made.axis == axis
            planned[made.collective, round(made.num_bytes.at(plan.micro_batch))] += plan.num_microbatches
        for index in local.blocks[position].nodes:
            if local.nodes[index].op == "planner.cross_entropy_of_part.default":
                planned["all_reduce", 8] -= plan.num_microbatches  # valid targets: the trainer counts them beforehand
    return found, +planned, sums


class Counting(torch.nn.Module):
    """Every layer hands on a mean over targets that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 7) for _ in range(4))
        self.back = torch.nn.ModuleList(torch.nn.Linear(7, 6) for _ in range(4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        means = []
        for layer, back in zip(self.layers, self.back, strict=True):
            logits = layer(x)
            means.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            x = torch.tanh(back(logits))
        loss: Tensor = means[0] + means[1] + means[2] + means[3] + x.square().mean()
        return loss


def all_partial(graph: Graph) -> tuple[Sharding, ...]:
    """Every rank of two computes everything, and has a part of every gradient: only scalars are handed on whole."""
    moving = differentiable(graph)

    def placed(tensors: tuple[int, ...]) -> tuple[Placement, ...]:
        return tuple(Q if t in moving and graph.tensors[t].shape else R for t in tensors)

    return tuple(
        Sharding(
            options=tuple(options(graph.nodes[i], graph.tensors, 2, {}, moving)[1] for i in block.nodes),
            parameters=placed(block.parameters),
            buffers=placed(block.buffers),
            inputs=placed(block.inputs),
            outputs=placed(block.outputs),
        )
        for block in graph.blocks
    )


def train_all_partial() -> list[float]:
    """Errors of losses and parameters of two steps with unequal counts of targets, beside the eager module."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(2):
        labels = torch.randint(7, (6, 5), generator=generator)
        hidden = torch.rand(6, 5, generator=generator) < torch.linspace(0.9, 0.0, 6)[:, None]
        tokens = torch.randint(7, (6, 5), generator=generator)
        batches.append({"tokens": tokens, "labels": labels.masked_fill(hidden, -100)})
    model, eager = Counting().double(), Counting().double()
    graph = trace(model, batches[0], precision="fp64", device_kind="cpu")
    shardings, of_block = stored(all_partial(graph))
    plan = make_plan(graph, Kind(name=""), global_batch=6, num_microbatches=3, mesh=Mesh(tp=2), shardings=shardings)
    blocks = [replace(b, shardings=(i,)) for b, i in zip(plan.stages[0].blocks, of_block, strict=True)]
    plan = replace(plan, stages=(replace(plan.stages[0], blocks=tuple(blocks)),))
    trainer = apply_plan(plan, model, graph=graph, optimizer=models.sgd, check=False)
    optimizer = models.sgd(eager.named_parameters())
    errors = []
    for batch in batches:
        loss = trainer.step(batch)
        wanted = eager(**batch)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        errors.append(abs(loss / wanted.item() - 1))
    state = trainer.state_dict()
    return [*errors, *(relative(state[name], value) for name, value in eager.state_dict().items())]


def as_of(plan: Plan, axis: str) -> tuple[ShardingPlan, ...]:
    """The shardings of a plan as those of another axis."""
    return tuple(replace(sharding, axis=axis) for sharding in plan.shardings)


def refusal(change: str) -> str:
    """The sentence with which a trainer of the test GPT on two ranks refuses."""
    graph, model = graph_of("gpt"), models.build("gpt")
    plan = make_plan(graph, Kind(name="", tp=2, variant="leanest"))
    blocks = plan.stages[0].blocks
    match change:
        case "no sharding":
            first = replace(blocks[0], shardings=())
            plan = replace(plan, stages=(replace(plan.stages[0], blocks=(first, *blocks[1:])),))
        case "unknown sharding":
            first = replace(blocks[0], shardings=(99,))
            plan = replace(plan, stages=(replace(plan.stages[0], blocks=(first, *blocks[1:])),))
        case "sharding without tp":
            plan = replace(plan, mesh=Mesh(dp_replicate=2), global_batch=2 * SAMPLES)
        case "no rule":
            nodes = tuple("S0[2]>S0[2]" for _ in plan.shardings[0].nodes)
            plan = replace(plan, shardings=(replace(plan.shardings[0], nodes=nodes), *plan.shardings[1:]))
        case "no graph":
            model = unusual("function")
            graph = trace(model, unusual_batch(0), precision="fp64", device_kind="cpu")
            plan = make_plan(graph, Kind(name=""), mesh=Mesh(tp=2))
            first = replace(plan.stages[0].blocks[0], shardings=(0,))
            plan = replace(plan, stages=(replace(plan.stages[0], blocks=(first,) * len(plan.stages[0].blocks)),))
        case "ep":
            plan = replace(plan, mesh=Mesh(ep=2), shardings=as_of(plan, "ep"), global_batch=2 * SAMPLES)
        case "ep with cp":
            plan = replace(plan, mesh=Mesh(ep=2, cp=2))
        case "cp without its shardings":
            blocks = tuple(replace(block, zero=1) for block in blocks)
            plan = replace(plan, mesh=Mesh(cp=2, tp=2), stages=(replace(plan.stages[0], blocks=blocks),))
        case "cp with ZeRO-0":
            plan = replace(plan, mesh=Mesh(cp=2), shardings=as_of(plan, "cp"))
        case "cp with parts of parameters":
            blocks = tuple(replace(block, zero=1) for block in blocks)
            stages = (replace(plan.stages[0], blocks=blocks),)
            plan = replace(plan, mesh=Mesh(cp=2), shardings=as_of(plan, "cp"), stages=stages)
        case _:
            raise AssertionError(change)
    try:
        apply_plan(plan, model, graph=graph, check=False)
    except PlanError as error:
        return str(error)
    return ""


def different_batches(kind: Kind) -> list[str]:
    """What `step` says where the ranks of one data rank are given other values, other counts, and the same."""
    trainer = trainer_of("gpt", kind)
    batch = models.batch("gpt", SAMPLES, step=0)
    first = dist.get_rank() == 0
    answers = []
    for given in (
        models.batch("gpt", SAMPLES, step=int(first)),
        {name: value[: SAMPLES - first] for name, value in batch.items()},
        batch,
    ):
        try:
            trainer.step(given)
            answers.append("")
        except RunError as error:
            answers.append(str(error))
    return answers


def accumulated(kind: Kind) -> float:
    """The worst relative error of gradients that three calls add up, beside those of one call."""
    trainer = trainer_of("gpt-tied", kind)
    batch = own_part(models.batch("gpt-tied", SAMPLES, step=0), trainer)
    trainer.forward_backward(batch)
    once = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    for _ in range(2):
        trainer.forward_backward(batch)
    thrice = trainer.gradients()
    return max(relative(thrice[name] / 3, gradient) for name, gradient in once.items())


def sums_of(sizes: list[int]) -> list[list[float]]:
    """What `Axis.sum` makes of tensors full of the rank's number plus one."""
    trainer = trainer_of("gpt", Kind(name="", tp=2))
    axis = cast("GraphEngine", trainer.engine).axes
    kinds = (torch.float64, torch.float32)
    tensors = [torch.full((size,), dist.get_rank() + 1.0, dtype=kinds[i % 2]) for i, size in enumerate(sizes)]
    axis.sum(tensors)
    return [sorted(set(tensor.tolist())) for tensor in tensors]


def checked_and_saved(kind: Kind, folder: str) -> tuple[str, float, list[float]]:
    """What the self-check says; errors of the loss in evaluation, and of what is saved after a step.

    The step is by `sgd` on all samples of a batch; the reference is the eager module's.
    """
    graph, eager = graph_of("gpt"), models.build("gpt")
    trainer = apply_plan(make_plan(graph, kind), models.build("gpt"), graph=graph, optimizer=models.sgd)
    batch = models.batch("gpt", SAMPLES, step=0)
    wanted = eager(**batch)
    evaluated = trainer.evaluate(own_part(batch, trainer)).loss
    assert evaluated is not None
    trainer.step(own_part(batch, trainer))
    optimizer = models.sgd(eager.named_parameters())
    wanted.backward()
    optimizer.step()
    trainer.save_weights(folder)
    dist.barrier()
    saved = {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}
    state = trainer.state_dict()
    errors = [relative(held[name], value) for name, value in eager.state_dict().items() for held in (saved, state)]
    return str(trainer.check), abs(evaluated / wanted.item() - 1), errors


def shared_gradients() -> list[list[float]]:
    """Gradients of two parameters that are added up, and of one that is summed, after three backward passes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one, other, summed = (
        torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)) for _ in range(3)
    )
    for factor in (2.0, 2.0, 1.0):
        ((held(one) + held(other)) * factor).sum().backward()
        held(summed).sum().backward()
    return [local(parameter.grad).tolist() for parameter in (one, other, summed) if parameter.grad is not None]
