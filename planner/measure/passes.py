"""One lowered block on a real device: seconds and bytes of its passes, and of every operator that they launch.

An operator is timed where it runs, inside the pass of its block, so that its operands lie where training has them; from
pass to pass the caches are flushed by as much as the rest of the model moves. The pass itself is timed without looking
into it. A CPU's clock is that of the thread: what other programs take of a core does not count. On CUDA device events
time the kernels, behind a kernel that keeps the device waiting until all are sent.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from planner.graph import Batch, BlockClass, Graph, Operand, Ref, reads
from planner.measure.pace import Paced
from planner.profile import BlockRow, OperatorRow, block_key, operator_name
from planner.runtime.blocks import Lowered, constant, dtype_of, lower_block, shape_of
from planner.runtime.peers import ALONE, Peers
from planner.runtime.random import Draws
from planner.shard.placement import differentiable
from planner.trace import MEAN_LOSSES
from planner.trace.aten import run_nodes
from planner.trace.kernels import REPLACEMENTS, Launched, launched, storage_key, tensors_in
from planner.trace.parallel import Pretended

_LEAST_PASSES, _MOST_PASSES = 5, 60
_STEADY_SPREAD = 0.05  # of passes: more of them tell nothing new
_LARGEST_CACHE_BYTES = 2**28  # of a CPU: what a file of the system may say at most
_ASSUMED_CACHE_BYTES = 2**25
_CALLS = 500  # of an operator on one element, to know what a call takes
_VALUE_SCALE = 0.02
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A block class to measure for `micro_batch` samples: `graph` is that of one rank of the `axes`."""

    graph: Graph
    class_index: int
    micro_batch: int
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def kind(self) -> BlockClass:
        """The class as it was priced."""
        return self.graph.classes[self.class_index]

    @property
    def key(self) -> str:
        """That of its row."""
        return block_key(self.kind, self.micro_batch)

    @property
    def name(self) -> str:
        """For people: the model and the first block of the class."""
        block = next(b for b in self.graph.blocks if b.class_index == self.class_index)
        split = "".join(f", {axis} {size}" for axis, size in self.axes)
        return f"{self.graph.name} {block.name or 'the model'}{split}"

    @property
    def other_bytes(self) -> float:
        """What the other blocks of a step touch: their parameters, and what they save."""
        tensors = self.graph.tensors
        return sum(
            sum(tensors[p].num_bytes.fixed for p in block.parameters) + block.saved.at(self.micro_batch)
            for block in self.graph.blocks
        )


def cases(graphs: Sequence[tuple[Graph, Mapping[str, int]]], micro_batches: Sequence[int]) -> list[Case]:
    """What there is to measure of these graphs, each class once; a model without a graph has nothing."""
    found: dict[str, Case] = {}
    for micro_batch in micro_batches:  # outermost: where the time ends, all classes are known at the first ones
        for graph, axes in graphs:
            for index in range(0 if graph.fallbacks else len(graph.classes)):
                case = Case(graph=graph, class_index=index, micro_batch=micro_batch, axes=tuple(axes.items()))
                if case.kind.kernels:
                    found.setdefault(case.key, case)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What was measured of a case."""

    block: BlockRow
    operators: tuple[OperatorRow, ...]


def measure_passes(case: Case, device: torch.device, budget_seconds: float, *, pace: float = 0.0) -> Passes:
    """Passes of a case until their spread is small or the budget is used up; five of each kind at least.

    Seconds are scaled to a `pace` (see `planner.measure.pace`) that is not 0.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        block = _Block(case, device)
        flush = _flush(case, device)
        block.run(block.fresh_inputs())  # what is done once: choice of kernels, work space
        bytes_of = block.memory()
        timer = _Timer(device)
        paced = Paced() if pace else None

        def measured(seconds_of: Callable[[list[torch.Tensor]], Sequence[float]]) -> list[float]:
            inputs = block.fresh_inputs()
            flush()
            if paced is None:
                return list(seconds_of(inputs))
            seconds, pace_of_pass = paced.measure(lambda: seconds_of(inputs))
            return [value * pace / pace_of_pass for value in seconds]

        end = time.perf_counter() + budget_seconds / 2
        walls: list[list[float]] = []
        while _goes_on([sum(wall) for wall in walls], end):
            walls.append(measured(block.run))
        end = time.perf_counter() + budget_seconds / 2
        call = _call_seconds(timer) if device.type == "cpu" else 0.0
        columns: list[list[float]] = []
        while _goes_on([sum(column) for column in columns], end):
            columns.append(measured(lambda inputs: timer.seconds(block, inputs)))
    return _rows(case, device, walls, columns, timer.calls, bytes_of, call)


def _goes_on(totals: Sequence[float], end: float) -> bool:
    if len(totals) < _LEAST_PASSES:
        return True
    return len(totals) < _MOST_PASSES and spread(totals) > _STEADY_SPREAD and time.perf_counter() < end


def spread(values: Sequence[float]) -> float:
    """The distance of the quartiles over the median.

    >>> spread([1.0, 1.0, 1.0, 1.2, 0.8])
    0.0
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def _rows(
    case: Case,
    device: torch.device,
    walls: Sequence[Sequence[float]],
    columns: Sequence[Sequence[float]],
    calls: Sequence[tuple[Launched, str]],
    bytes_of: "_Memory",
    call_seconds: float,
) -> Passes:
    """Medians. On a CPU a call is taken off each operator, and what of the pass no operator explains is the host's."""
    series = [[max(value - call_seconds, 0.1 * value) for value in values] for values in zip(*columns, strict=True)]
    seconds = [statistics.median(values) for values in series]
    kernels = {
        phase: sum(value for value, (_, of) in zip(seconds, calls, strict=True) if of == phase)
        for phase in ("forward", "backward")
    }
    host = dict(zip(kernels, (statistics.median(wall) for wall in zip(*walls, strict=True)), strict=True))
    if device.type == "cpu":
        kernels = {phase: min(value, 0.95 * host[phase]) for phase, value in kernels.items()}
        host = {phase: value - kernels[phase] for phase, value in host.items()}
    keys = _keys(case, calls)
    found: dict[str, OperatorRow] = {}
    for index, (_, phase) in enumerate(calls):
        op, operands, flop = keys[index]
        made, saved, peak = bytes_of.of_calls[index] if index < len(bytes_of.of_calls) else (0.0, 0.0, 0.0)
        row = OperatorRow(
            op=op, phase=phase, operands=operands, flop=flop, seconds=_rounded(seconds[index]),
            spread=_rounded(spread(series[index])), repeats=len(columns), made_bytes=made, saved_bytes=saved,
            peak_bytes=peak,
        )  # fmt: skip
        same = found.get(row.key)  # the same operator twice in a block: their mean
        if same is not None:
            row = replace(row, seconds=_rounded((same.seconds + row.seconds) / 2), repeats=same.repeats + row.repeats)
        found[row.key] = row
    block = BlockRow(
        key=case.key, name=case.name, micro_batch=case.micro_batch,
        forward_seconds=_rounded(kernels["forward"]), backward_seconds=_rounded(kernels["backward"]),
        forward_host_seconds=_rounded(host["forward"]), backward_host_seconds=_rounded(host["backward"]),
        spread=_rounded(spread([sum(wall) for wall in walls])), repeats=len(walls), saved_bytes=bytes_of.saved,
        forward_peak_bytes=bytes_of.forward_peak, backward_peak_bytes=bytes_of.backward_peak,
    )  # fmt: skip
    return Passes(block=block, operators=tuple(found.values()))


def _keys(case: Case, calls: Sequence[tuple[Launched, str]]) -> list[tuple[str, tuple[str, ...], float]]:
    """Name, operands and FLOP of each call: as it was priced where that is the same list of operators."""
    priced = case.kind.kernels
    names = [("attention" if kernel.kind == "attention" else kernel.op, phase) for kernel, phase in calls]
    if names == [(operator_name(kernel), kernel.phase) for kernel in priced]:
        return [
            (
                operator_name(k),
                tuple(operand.text(case.micro_batch) for operand in k.operands),
                k.flop.at(case.micro_batch),
            )
            for k in priced
        ]
    return [
        (name, tuple(Operand(*operand).text(1) for operand in kernel.operands), kernel.flop)
        for (name, _), (kernel, _) in zip(names, calls, strict=True)
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# --- the block ------------------------------------------------------------------------------------


class _Filled(Pretended):
    """Collectives that copy what a rank has itself: right shapes and sane numbers, no ranks."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As many times as long."""
        return x.repeat(self.size, *[1] * (x.ndim - 1))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """As many times as short."""
        return x[: x.shape[0] // self.size].clone()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like `x`."""
        return x.clone(memory_format=torch.contiguous_format)


class _Block:
    """A lowered block with values: `run` takes it forward and backward once."""

    def __init__(self, case: Case, device: torch.device) -> None:
        graph = case.graph
        described = next(b for b in graph.blocks if b.class_index == case.class_index)
        communicators = {axis: _Filled(size) for axis, size in case.axes}
        peers = Peers.of(communicators) if communicators else ALONE
        self.device = device
        self._micro_batch = case.micro_batch
        values = _Values(case, device, peers)
        attributes = {
            t: values.of(t)
            for t in {t for i in described.nodes for t in reads(graph.nodes[i])}
            if graph.tensors[t].kind in ("parameter", "buffer", "constant")
        }
        self.lowered: Lowered = lower_block(
            graph, described, tied=(), attributes=attributes, micro_batch=case.micro_batch, device=device, peers=peers
        )
        moving = set(described.inputs) & differentiable(graph)
        self._inputs = [
            values.of(t).requires_grad_(t in moving and values.of(t).is_floating_point()) for t in self.lowered.inputs
        ]
        self._leaves = [x for x in self._inputs if x.requires_grad]
        self._leaves += [p for p in self.lowered.parameters() if p.requires_grad]
        self._gradients: list[torch.Tensor] = []

    def fresh_inputs(self) -> list[torch.Tensor]:
        """What one pass reads: an input may be written in place, which a leaf may not."""
        return [x.clone() if x.requires_grad else x for x in self._inputs]

    def run(
        self, inputs: list[torch.Tensor], between: Callable[[list[torch.Tensor]], None] = lambda outputs: None
    ) -> tuple[float, float]:
        """Seconds of the processor in forward and in backward; on a CPU that is all there is. Empties `inputs`."""
        self._wait()
        start = time.thread_time()
        made = self.lowered(*inputs, draws=Draws(_SEED, 0, 0), micro_batch=self._micro_batch)
        middle = time.thread_time()
        outputs = [x for x in made if x.requires_grad]
        between(list(made))
        if not self._gradients:
            self._gradients = [torch.randn_like(x) * _VALUE_SCALE for x in outputs]
        inputs.clear()
        del made
        self._wait()
        again = time.thread_time()
        if outputs and self._leaves:
            torch.autograd.grad(outputs, self._leaves, self._gradients, allow_unused=True)
        end = time.thread_time()
        self._wait()
        return middle - start, end - again

    def memory(self) -> "_Memory":
        """One pass that looks at nothing but memory."""
        inputs = self.fresh_inputs()
        others = [*self.lowered.parameters(), *self.lowered.buffers(), *self._gradients]
        watched = _Memory([*self._inputs, *inputs, *others])
        with watched, saved_tensors_hooks(watched.pack, lambda tensor: tensor):
            self.run(inputs, watched.turn)
        return watched

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Values:
    """Values for what a block reads: small normal numbers, indices that are in range, the prelude as it is."""

    def __init__(self, case: Case, device: torch.device, peers: Peers) -> None:
        self._case, self._device, self._peers = case, device, peers
        self._made: dict[int, torch.Tensor] = {}
        self._bounds = _bounds(case.graph)
        graph = case.graph
        nodes = [graph.nodes[i] for i in graph.prelude.nodes]
        made = {t for node in nodes for t in node.outputs}
        for index in graph.prelude.nodes:
            for tensor in reads(graph.nodes[index]):
                if tensor not in made:
                    self.of(tensor)
        with torch.no_grad():
            run_nodes(
                graph.tensors, nodes, self._made, micro_batch=case.micro_batch, device=device,
                replace={**REPLACEMENTS["cpu"], **peers.operators},
            )  # fmt: skip

    def of(self, tensor: int) -> torch.Tensor:
        """The value of a tensor, always the same one."""
        if tensor not in self._made:
            self._made[tensor] = self._draw(tensor)
        return self._made[tensor]

    def _draw(self, tensor: int) -> torch.Tensor:
        graph, device = self._case.graph, self._device
        described = graph.tensors[tensor]
        shape, dtype = shape_of(graph, tensor, self._case.micro_batch), dtype_of(graph, tensor)
        if described.kind == "constant" and not any(isinstance(size, Batch) for size in described.shape):
            return constant(graph, tensor, device)
        if dtype.is_floating_point or dtype.is_complex:
            # A statistic of a norm is a variance, too: buffers are positive.
            value = (
                torch.rand(shape, device=device) if described.kind == "buffer" else torch.randn(shape, device=device)
            )
            value = (value * (1.0 if described.kind in ("buffer", "activation") else _VALUE_SCALE)).to(dtype)
            if described.kind == "parameter":
                return torch.nn.Parameter(value, requires_grad=described.requires_grad)
            return value
        if described.kind == "input" and dtype != torch.bool:
            return torch.randint(self._bounds.get(tensor, 2), shape, device=device).to(dtype)
        return (
            torch.ones(shape, dtype=dtype, device=device)
            if dtype == torch.bool
            else torch.zeros(shape, dtype=dtype, device=device)
        )


def _bounds(graph: Graph) -> dict[int, int]:
    """Below what integers of an input have to be: rows of a table that they look up, classes of a loss."""
    made_of: dict[int, int] = {}  # views and copies of an input
    found: dict[int, int] = {}

    def told(arg: object, limit: object) -> None:
        if isinstance(arg, Ref) and isinstance(limit, int):
            root = made_of.get(arg.tensor, arg.tensor)
            found[root] = min(found.get(root, limit), limit)

    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if node.op == "aten.embedding.default" and isinstance(first, Ref):
            told(node.args[1], graph.tensors[first.tensor].shape[0])
        elif node.op in MEAN_LOSSES and isinstance(first, Ref):
            told(node.args[MEAN_LOSSES[node.op][0]], graph.tensors[first.tensor].shape[-1])
        elif isinstance(first, Ref) and not graph.tensors[first.tensor].dtype.startswith(("float", "bfloat")):
            root = made_of.get(first.tensor, first.tensor)
            if graph.tensors[root].kind == "input":
                made_of.update((t, root) for t in node.outputs if t is not None)
    return found


def _flush(case: Case, device: torch.device) -> Callable[[], None]:
    """Moves as much as the rest of the model does, but no more than pushes everything out of the caches."""
    size = int(min(2 * cache_bytes(device), case.other_bytes))
    data = torch.zeros(max(1, size // 4), device=device)

    def flush() -> None:
        data.add_(1.0)

    return flush


def cache_bytes(device: torch.device) -> int:
    """Bytes of a device's last cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        number = text.rstrip("KMG")
        if number.isdigit():
            sizes.append(int(number) << {"K": 10, "M": 20, "G": 30}.get(text[len(number) :], 0))
    return min(max(sizes, default=_ASSUMED_CACHE_BYTES), _LARGEST_CACHE_BYTES)


# --- looking into a pass --------------------------------------------------------------------------


class _Timer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every operator that launches something: by the clock on a CPU, by device events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Launched, str]] = []
        self.device = device
        self._phase = "forward"
        self._marks: list[Any] = []

    def seconds(self, block: _Block, inputs: list[torch.Tensor]) -> list[float]:
        """Of each operator of one pass, in order; `calls` says which they are."""
        self.calls, self._marks, self._phase = [], [], "forward"
        with self, _held_back(self.device):
            block.run(inputs, self._turn)
        return self.times()

    def times(self) -> list[float]:
        """Seconds of the calls so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [start.elapsed_time(end) / 1e3 for start, end in self._marks]
        return [end - start for start, end in self._marks]

    def _turn(self, outputs: list[torch.Tensor]) -> None:
        self._phase = "backward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = self._mark()
        out = func(*args, **kwargs)
        end = self._mark()
        kernel = launched(func, args, kwargs, out, ())
        if kernel is not None:
            self.calls.append((kernel, self._phase))
            self._marks.append((start, end))
        return out

    def _mark(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return time.thread_time()


def _call_seconds(timer: _Timer) -> float:
    """Seconds of calling an operator on one element: on a CPU that is dispatch, not work."""
    data = torch.ones(1)
    with timer:
        for _ in range(_CALLS):
            torch.neg(data)
    times = timer.times()
    return statistics.median(times)


_HELD_BACK_CYCLES = 20_000_000  # about 10 ms: as long as the processor takes to send some hundred kernels


@contextmanager
def _held_back(device: torch.device) -> Iterator[None]:
    """Keep a device busy first, so that kernels wait for it and not it for the processor."""
    sleep = getattr(torch.cuda, "_sleep", None)  # not public: without it small kernels include their launch
    if device.type == "cuda" and sleep is not None:
        sleep(_HELD_BACK_CYCLES)
    yield


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that live beyond what was given: of a pass, and of each operator that launches something."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = {storage_key(t) for t in given}
        self._live: dict[int, int] = {}
        self._maker: dict[int, int] = {}
        self._level = self._peak = self._kept = 0
        self._saved: set[int] = set()
        self._of_calls: list[list[float]] = []
        self.saved = self.forward_peak = self.backward_peak = 0.0

    @property
    def of_calls(self) -> list[tuple[float, float, float]]:
        """(made, saved, peak) bytes of each call."""
        return [(made, saved, peak) for made, saved, peak in self._of_calls]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps a tensor."""
        key = storage_key(tensor)
        if key in self._live and key not in self._saved:
            self._saved.add(key)
            if (maker := self._maker.get(key)) is not None:
                self._of_calls[maker][1] += self._live[key]
        return tensor

    def turn(self, outputs: list[torch.Tensor]) -> None:
        """Forward is done."""
        leaving = {storage_key(x) for x in outputs}
        kept = sum(self._live[key] for key in self._saved if key in self._live)
        self.saved = float(sum(self._live[key] for key in self._saved - leaving if key in self._live))
        self.forward_peak = float(max(0, self._peak - kept))
        self._kept, self._peak = kept, self._level

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.backward_peak = float(max(0, self._peak - self._kept))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_cuda = any(t.is_cuda for t in tensors_in([args, kwargs]))
        before = torch.cuda.memory_allocated() if on_cuda else 0
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        out = func(*args, **kwargs)
        made = [t for t in tensors_in(out) if storage_key(t) not in self._given | self._live.keys()]
        new = {storage_key(t): t.untyped_storage() for t in made}
        num_bytes = sum(storage.nbytes() for storage in new.values())
        is_call = launched(func, args, kwargs, out, ()) is not None
        for key, storage in new.items():
            self._live[key] = storage.nbytes()
            if is_call:
                self._maker[key] = len(self._of_calls)
            weakref.finalize(storage, self._drop, key)
        self._level += num_bytes
        self._peak = max(self._peak, self._level)
        if is_call:
            peak = torch.cuda.max_memory_allocated() - before if on_cuda else num_bytes
            self._of_calls.append([float(num_bytes), 0.0, float(max(0, peak))])
        return out

    def _drop(self, key: int) -> None:
        self._level -= self._live.pop(key, 0)
        self._saved.discard(key)
        self._maker.pop(key, None)
