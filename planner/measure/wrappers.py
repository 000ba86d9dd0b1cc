"""CPU time of what is around a model's operators in training: FSDP2's hooks, a pipeline's schedule, optimizers.

All ranks measure together, and each counts the time of its own thread: waiting for others is priced as communication,
and what other programs take of a core is no part of it.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

Rows = dict[str, list[tuple[float, float]]]  # name -> [(size, seconds)]

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
OPTIMIZER_TENSORS = 16
_OPTIMIZER_ELEMENTS = (1 << 10, 1 << 18)  # of each tensor: next to nothing, and more than caches hold
FEW_TENSORS, MANY_TENSORS = 1, 8  # of a block, to tell what a collective takes from what each tensor does
_BLOCKS, _WIDTH = 4, 32
_STEPS, _FIRST_STEPS = 12, 4  # all, and of them those that do not count


def wrapper_rows(num_processes: int) -> Rows:
    """What FSDP2 adds to a small block: `hooks` to each pass, `gather` and `reduce` where it communicates.

    Rows are by tensors of the block. Without a collective parameters stay gathered and gradients whole.
    """
    mesh = init_device_mesh("cpu", (num_processes,))
    rows: Rows = {"hooks": [], "gather": [], "reduce": []}
    for tensors in (FEW_TENSORS, MANY_TENSORS):
        plain = _pass_seconds(_blocks(tensors), communicates=False)
        alone = _pass_seconds(_wrapped(tensors, mesh), communicates=False)
        with_all = _pass_seconds(_wrapped(tensors, mesh), communicates=True)
        calls = _collective_calls(tensors)
        rows["hooks"].append((tensors, max(0.0, sum(alone) - sum(plain)) / 2))
        rows["gather"].append((tensors, max(0.0, with_all[0] - alone[0] - calls[0])))
        rows["reduce"].append((tensors, max(0.0, with_all[1] - alone[1] - calls[1])))
    return rows


class _Products(nn.Module):
    """A block of so many square matrices."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.eye(_WIDTH) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of all."""
        for matrix in self.matrices:
            x = x @ matrix
        return x


def _blocks(tensors: int) -> nn.Sequential:
    return nn.Sequential(*(_Products(tensors) for _ in range(_BLOCKS)))


def _wrapped(tensors: int, mesh: DeviceMesh) -> nn.Sequential:
    model = _blocks(tensors)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        module.set_reshard_after_backward(False, recurse=False)
    return model


def _pass_seconds(model: nn.Sequential, *, communicates: bool) -> tuple[float, float]:
    """Seconds of the thread for forward and for backward of a block, all of which gather and reduce, or none."""
    data = torch.ones(2, _WIDTH, requires_grad=True)
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_requires_gradient_sync(communicates, recurse=False)
    times = []
    for _ in range(_STEPS):
        dist.barrier()
        start = time.thread_time()
        loss = model(data).sum()
        middle = time.thread_time()
        loss.backward()
        times.append((middle - start, time.thread_time() - middle))
        for parameter in model.parameters():
            parameter.grad = None
        if communicates:
            for part in parts:
                part.reshard()
    forward, backward = zip(*times[_FIRST_STEPS:], strict=True)
    return statistics.median(forward) / _BLOCKS, statistics.median(backward) / _BLOCKS


def _collective_calls(tensors: int) -> tuple[float, float]:
    """Seconds of the thread for an all-gather and a reduce-scatter of a block's size: priced as communication."""
    count = tensors * _WIDTH**2
    whole, part = torch.ones(count), torch.ones(count // dist.get_world_size())
    works: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather_into_tensor(whole[: len(part) * dist.get_world_size()], part),
        lambda: dist.reduce_scatter_tensor(part, whole[: len(part) * dist.get_world_size()]),
    )
    first, second = (_thread_seconds(work) for work in works)
    return first, second


def pipeline_seconds(rank: int, num_processes: int) -> float:
    """Seconds of the thread for one pass of one micro-batch through a stage that does next to nothing."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    num_microbatches = 4 * num_processes
    sample = torch.ones(1, 4, requires_grad=True)
    is_first, is_last = rank == 0, rank == num_processes - 1
    stage = PipelineStage(
        nn.Linear(4, 4), rank, num_processes, torch.device("cpu"),
        input_args=(sample,), output_args=(sample,),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    data = torch.ones(num_microbatches, 4)

    def work() -> None:
        schedule.step(*([data] if is_first else []), target=data if is_last else None, return_outputs=False)

    return _thread_seconds(work) / (2 * num_microbatches)


def message_seconds(rank: int, num_processes: int) -> float:
    """Seconds of the thread to post a small message to the next rank and one from the rank before, and to wait."""
    data, received = torch.ones(4), torch.ones(4)

    def work() -> None:
        operations = [
            dist.P2POp(dist.isend, data, (rank + 1) % num_processes),
            dist.P2POp(dist.irecv, received, (rank - 1) % num_processes),
        ]
        for pending in dist.batch_isend_irecv(operations):
            pending.wait()

    return _thread_seconds(work)


def optimizer_rows(num_processes: int) -> Rows:
    """[(bytes, seconds)] of a step on 16 parameters, and on as many that FSDP2 has sharded, which are DTensors."""
    rows: Rows = {}
    mesh = init_device_mesh("cpu", (num_processes,)) if num_processes > 1 else None
    for name, make in OPTIMIZERS.items():
        for elements in _OPTIMIZER_ELEMENTS:
            whole = [torch.ones(elements) for _ in range(OPTIMIZER_TENSORS)]
            num_bytes = 4.0 * elements * OPTIMIZER_TENSORS
            rows.setdefault(f"optimizer_{name}", []).append((num_bytes, _step_seconds(make, whole)))
            if mesh is not None and elements == _OPTIMIZER_ELEMENTS[0]:
                sharded: Sequence[torch.Tensor] = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
                rows[f"sharded_{name}"] = [(num_bytes / num_processes, _step_seconds(make, sharded))]
    return rows


def _step_seconds(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tensors: Sequence[torch.Tensor]
) -> float:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return _thread_seconds(make(parameters).step)


def _thread_seconds(work: Callable[[], object]) -> float:
    """The median of some repeats, as many on every rank: `work` may communicate."""
    times = []
    for _ in range(_STEPS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return statistics.median(times[_FIRST_STEPS:])
