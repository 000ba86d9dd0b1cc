"""Executable modules from a `Graph`: one per block, one for the prelude, and the stage that runs them.

The undecomposed nodes run in the graph's order, in-place ones included. Parameters and buffers are
the very objects they are given, under the model's own dotted names; devices are the rank's own.

A module has a program for every graph of the model (another sequence length, evaluation): generated code over the same
registered parameters, for any number of samples.
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from planner.errors import PlanError
from planner.graph import Arg, Batch, Block, Graph, Node, reads
from planner.runtime.experts import ExpertCounter, not_counted
from planner.runtime.peers import ALONE, Peers, held
from planner.runtime.random import Draw, Draws
from planner.shard.loads import ends_of
from planner.trace import MEAN_LOSSES
from planner.trace.aten import materialize, run_nodes, torch_operator

# Below this child a lowered module keeps the model's own names: a child of the model called `graph`
# or `meta` must not shadow an attribute of fx.GraphModule.
_PREFIX = "model"
# What checkpoint raises inside a block to end a recomputation early.
_CHECKPOINT_STOP = "_StopRecomputationError"
WEIGHTS = -1  # among inputs: the weights of a micro-batch, which are no tensor of the graph
_SUM = 2  # the reduction of ATen's losses


def shape_of(graph: Graph, tensor: int, micro_batch: int) -> tuple[int, ...]:
    """Sizes of a tensor for `micro_batch` samples."""
    return tuple(
        size.per_sample * micro_batch if isinstance(size, Batch) else size for size in graph.tensors[tensor].shape
    )


def dtype_of(graph: Graph, tensor: int) -> torch.dtype:
    """The torch dtype of a tensor of the graph."""
    found: torch.dtype = getattr(torch, graph.tensors[tensor].dtype)
    return found


def constant(graph: Graph, tensor: int, device: torch.device) -> torch.Tensor:
    """The value of a constant of the graph on `device`."""
    shape, dtype = shape_of(graph, tensor, 1), dtype_of(graph, tensor)
    data = graph.tensors[tensor].value
    if not data:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone().to(device)


class Program:
    """Code for a run of nodes: tensors in (the order of `inputs`), a tuple of tensors out.

    `sites` are where the parameters and buffers that it reads are registered, by tensor: (module, attribute);
    `mutated` those of them that it writes. `sources` are the nodes by the name of the generated variable; `counters`
    count the tokens of experts.

    No dataclass: it is an argument of blocks, and FSDP's hooks (torch 2.13) look for tensors in all that a dataclass
    holds, twice a pass.
    """

    __slots__ = ("code", "constants", "counters", "inputs", "is_random", "mutated", "outputs", "sites", "sources")

    def __init__(
        self,
        *,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        code: fx.GraphModule,
        sites: Mapping[int, tuple[nn.Module, str]],
        constants: tuple[torch.Tensor, ...],
        mutated: tuple[int, ...],
        sources: Mapping[str, Node],
        is_random: bool,
        counters: tuple[ExpertCounter, ...] = (),
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.code = code
        self.sites = sites
        self.constants = constants
        self.mutated = mutated
        self.sources = sources
        self.is_random = is_random
        self.counters = counters

    def __call__(self, args: Sequence[torch.Tensor], micro_batch: int, draws: Draws | None) -> tuple[torch.Tensor, ...]:
        """The outputs, with the parameters and buffers that are registered now."""
        attributes = [held(getattr(module, leaf)) for module, leaf in self.sites.values()]
        result: tuple[torch.Tensor, ...] = self.code.forward(micro_batch, draws, *args, *attributes, *self.constants)
        return result

    def value(self, tensor: int) -> torch.Tensor:
        """The object that is registered now for a parameter or buffer."""
        module, leaf = self.sites[tensor]
        found: torch.Tensor = getattr(module, leaf)
        return found


class Lowered(nn.Module):
    """A run of nodes as a module: the owner of the parameters and buffers that the nodes read.

    `attributes` are the real tensors of parameters, buffers and constants that the nodes read and
    that are not among the inputs. It runs for `micro_batch` samples unless it is told otherwise.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[int],
        *,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        attributes: Mapping[int, torch.Tensor],
        micro_batch: int,
        device: torch.device,
        peers: Peers = ALONE,
        counters: Mapping[int, ExpertCounter] = {},
    ) -> None:
        super().__init__()
        self.name = name
        self.micro_batch = micro_batch
        self.device = device
        self.add_module(_PREFIX, nn.Module())
        self.program = self.compile(
            graph, nodes, inputs=inputs, outputs=outputs, attributes=attributes, peers=peers, counters=counters
        )

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the first program reads."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[int, ...]:
        """What the first program makes."""
        return self.program.outputs

    @property
    def is_random(self) -> bool:
        """Whether the first program draws random numbers."""
        return self.program.is_random

    @property
    def sites(self) -> Mapping[int, tuple[nn.Module, str]]:
        """Where the parameters and buffers of the first program are registered."""
        return self.program.sites

    @property
    def mutated(self) -> tuple[int, ...]:
        """The buffers that the first program writes."""
        return self.program.mutated

    def value(self, tensor: int) -> torch.Tensor:
        """The object that is registered now for a parameter or buffer of the first program."""
        return self.program.value(tensor)

    def forward(
        self,
        *args: torch.Tensor,
        draws: Draws | None = None,
        program: Program | None = None,
        micro_batch: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of `program`, or of the first. An error carries a note with the user's own source line.

        Random operators take their numbers from `draws`; without it from torch's generator, as the plain module does.
        """
        program = program or self.program
        try:
            return program(args, self.micro_batch if micro_batch is None else micro_batch, draws)
        except Exception as error:
            if type(error).__name__ != _CHECKPOINT_STOP:
                self._explain(error, program)
            raise

    def compile(  # type: ignore[override] # torch's own compiles the module in place
        self,
        graph: Graph,
        nodes: Sequence[int],
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
        attributes: Mapping[int, torch.Tensor],
        peers: Peers = ALONE,
        counters: Mapping[int, ExpertCounter] = {},
    ) -> Program:
        """Code for `nodes`; what it reads is registered here where it is not yet.

        With `WEIGHTS` among the inputs the loss terms and divisors of the graph are weighed. A graph of one rank's
        part communicates with its `peers`. `counters` are by what the grouped products make
        that they count.
        """
        read = _read_from_outside(graph, nodes, inputs, outputs)
        sites: dict[int, tuple[nn.Module, str]] = {}
        constants: dict[int, torch.Tensor] = {}
        for tensor in read:
            described = graph.tensors[tensor]
            if described.kind in ("parameter", "buffer"):
                sites[tensor] = self._registered(described.name, tensor, attributes)
            else:
                constants[tensor] = attributes[tensor]
        scalars = [t for t, (m, leaf) in sites.items() if getattr(m, leaf).ndim > len(graph.tensors[t].shape)]
        code, sources = _generate(
            graph, nodes, inputs, outputs, [*sites, *constants], scalars, self.device, peers, counters
        )
        written = {t for i in nodes for t in graph.nodes[i].mutates}
        made = {t for i in nodes for t in graph.nodes[i].outputs}
        return Program(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            code=code,
            sites=sites,
            constants=tuple(constants.values()),
            mutated=tuple(t for t, (module, leaf) in sorted(sites.items()) if t in written and leaf in module._buffers),
            sources=sources,
            is_random=any(graph.nodes[i].is_random for i in nodes),
            counters=tuple(counter for t, counter in counters.items() if t in made),
        )

    def _registered(self, name: str, tensor: int, attributes: Mapping[int, torch.Tensor]) -> tuple[nn.Module, str]:
        """Where the parameter or buffer `name` is registered, after doing so if it is not."""
        *path, leaf = name.split(".")
        module = self.get_submodule(_PREFIX)
        for child in path:
            if child not in module._modules:
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        if leaf not in module._parameters and leaf not in module._buffers:
            value = attributes[tensor]
            if isinstance(value, nn.Parameter):
                module.register_parameter(leaf, value)
            else:
                module.register_buffer(leaf, value)
        return module, leaf

    def _explain(self, error: Exception, program: Program) -> None:
        """Note on `error` which of the user's lines failed."""
        found = _failed_node(error.__traceback__, program)
        if found is not None:
            error.add_note(f"in block {self.name}, {found.source} (operator {found.op})")


def _failed_node(trace: TracebackType | None, program: Program) -> Node | None:
    """The node whose generated line is on the traceback."""
    function = getattr(program.code.forward, "__func__", None)
    lines = program.code.code.split("\n")
    while trace is not None:
        if function is not None and trace.tb_frame.f_code is function.__code__:
            line = lines[trace.tb_lineno - 1] if trace.tb_lineno <= len(lines) else ""
            return program.sources.get(line.split("=")[0].split(":")[0].strip())
        trace = trace.tb_next
    return None


@contextmanager
def buffers_as_before(program: Program, before: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within it the buffers that a program writes are copies of `before`; after it, themselves.

    A recomputed forward must see what the first one saw, must not count twice, and what it
    saves for backward must not change when it ends: so the objects are exchanged, not values.
    """
    own = {tensor: program.value(tensor) for tensor in before}
    _exchange(program, {tensor: value.clone() for tensor, value in before.items()})
    try:
        yield
    finally:
        _exchange(program, own)


def _exchange(program: Program, buffers: Mapping[int, torch.Tensor]) -> None:
    for tensor, value in buffers.items():
        module, leaf = program.sites[tensor]
        module._buffers[leaf] = value


def _read_from_outside(graph: Graph, nodes: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """Tensors that the nodes read, or pass on, and that are neither inputs nor made by them."""
    known = set(inputs)
    result: dict[int, None] = {}
    for index in nodes:
        result |= dict.fromkeys(t for t in reads(graph.nodes[index]) if t not in known)
        known.update(t for t in graph.nodes[index].outputs if t is not None)
    return [*(result | dict.fromkeys(t for t in outputs if t not in known))]


class _Samples:
    """The number of samples while code is generated: `3 * samples` is a variable of it, `3.0 * samples` another."""

    def __init__(self, code: fx.Graph) -> None:
        self._code = code
        self._samples = code.placeholder("micro_batch")
        self._made: dict[tuple[type, float], fx.Node] = {(int, 1): self._samples}

    def __rmul__(self, per_sample: float) -> fx.Node:
        key = (type(per_sample), per_sample)  # 3 equals 3.0
        if key not in self._made:
            self._made[key] = self._code.call_function(operator.mul, (self._samples, per_sample))
        return self._made[key]


def _generate(
    graph: Graph,
    nodes: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    attributes: Sequence[int],
    scalars: Sequence[int],
    device: torch.device,
    peers: Peers,
    counters: Mapping[int, ExpertCounter],
) -> tuple[fx.GraphModule, dict[str, Node]]:
    """A function (number of samples, draws, inputs, attributes), and the nodes by generated variable.

    `scalars` are attributes without dims that are stored with one.
    """
    code = fx.Graph()
    samples = _Samples(code)
    draws = code.placeholder("draws")
    env: dict[int, fx.Node] = {}
    sources: dict[str, Node] = {}
    modules: dict[str, nn.Module] = {}
    for tensor in inputs:
        env[tensor] = code.placeholder("weights" if tensor == WEIGHTS else f"in_{tensor}")
    for tensor in attributes:
        env[tensor] = code.placeholder(f"attribute_{tensor}")
    for tensor in scalars:
        env[tensor] = code.call_function(torch.ops.aten.reshape.default, (env[tensor], []))
    weighed = _Weighed(graph, env[WEIGHTS]) if WEIGHTS in env else None
    for index in nodes:
        node = graph.nodes[index]
        if node.is_random:
            draw = Draw(graph, index, device=device, peers=peers)
            modules[f"draw_{index}"] = draw
            call = code.call_module(f"draw_{index}", (draws, 1 * samples, *(env[t] for t in draw.operands)))
        else:
            operands = cast("Mapping[int, torch.Tensor]", env)
            args, kwargs = node.args, node.kwargs
            if weighed is not None:
                args, kwargs = weighed.arguments(node)
            given: Any = tuple(materialize(a, operands, cast("int", samples), device) for a in args)
            named: Any = {k: materialize(a, operands, cast("int", samples), device) for k, a in kwargs}
            if node.op in peers.operators:
                name = node.op.replace(".", "_")
                modules[name] = _Operator(peers.operators[node.op])
                call = code.call_module(name, given, named)
            else:
                call = code.call_function(torch_operator(node.op), given, named)
        sources[call.name] = node
        for position, tensor_or_none in enumerate(node.outputs):
            if tensor_or_none is None:
                continue
            if tensor_or_none in counters and (ends := ends_of(node)) is not None:
                modules[f"count_{index}"] = counters[tensor_or_none]
                code.call_module(f"count_{index}", (env[ends],))
            item = call
            if node.returns_list:
                item = code.call_function(_getitem, (call, position))
                sources[item.name] = node
            env[tensor_or_none] = item if weighed is None else weighed.result(code, tensor_or_none, item)
    code.output(tuple(env[tensor] for tensor in outputs))
    with _without_lint_warnings():
        return fx.GraphModule(modules, code), sources


class _Operator(nn.Module):
    """A function that belongs to a rank, which generated code can only call as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


class _Weighed:
    """Rewrites loss terms and divisors by the weights of a micro-batch, laid out as `weight_layout` says."""

    def __init__(self, graph: Graph, weights: fx.Node) -> None:
        self._graph = graph
        self._weights = weights
        self._layout = weight_layout(graph)
        self._counted = {term.tensor for term in graph.loss_terms if term.target is not None}
        self._divisors = {divisor.tensor for divisor in graph.divisors}

    def arguments(self, node: Node) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """A mean over valid targets becomes their sum: the weight divides it, and none valid gives zero, not NaN."""
        if not any(t in self._counted for t in node.outputs):
            return node.args, node.kwargs
        position = MEAN_LOSSES[node.op][2]
        if len(node.args) > position:
            return (*node.args[:position], _SUM, *node.args[position + 1 :]), node.kwargs
        return node.args, (*((k, v) for k, v in node.kwargs if k != "reduction"), ("reduction", _SUM))

    def result(self, code: fx.Graph, tensor: int, value: fx.Node) -> fx.Node:
        """What stands for a tensor: itself, its weighed value, or the whole batch's divisor."""
        if tensor not in self._layout:
            return value
        start, stop = self._layout[tensor]
        if tensor not in self._divisors:
            return code.call_function(_times, (value, self._weights, start))
        described = self._graph.tensors[tensor]
        is_float = described.dtype.startswith(("float", "bfloat"))
        dtype = dtype_of(self._graph, tensor if is_float else self._graph.loss)  # a share of a count is no integer
        shape = [size for size in described.shape if isinstance(size, int)]
        return code.call_function(_share, (self._weights, start, stop, shape, dtype))


def weight_layout(graph: Graph) -> dict[int, tuple[int, int]]:
    """Where in a micro-batch's weights a loss term has its factor, or a divisor its values: tensor -> (start, stop)."""
    result = {}
    start = 0
    for tensor in (*(term.tensor for term in graph.loss_terms), *(divisor.tensor for divisor in graph.divisors)):
        is_divisor = start >= len(graph.loss_terms)
        length = int(graph.tensors[tensor].num_elements.fixed) if is_divisor else 1
        result[tensor] = (start, start + length)
        start += length
    return result


def _times(value: torch.Tensor, weights: torch.Tensor, position: int) -> torch.Tensor:
    return value * weights[position].to(value.dtype)


def _share(weights: torch.Tensor, start: int, stop: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return weights[start:stop].to(dtype).reshape(shape)


def _getitem(values: Sequence[torch.Tensor], position: int) -> torch.Tensor:
    return values[position]


@contextmanager
def _without_lint_warnings() -> Iterator[None]:
    """Generated modules hold parameters under names that fx does not know from a root module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _ContiguousGradient(torch.autograd.Function):
    """The value itself; its gradient is made contiguous, as the receive buffer expects it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def sendable(value: torch.Tensor) -> torch.Tensor:
    """`value` as a stage may send it: contiguous, and no view (schedules detach outputs in place)."""
    if value.is_contiguous() and not value._is_view():
        return value
    return value.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Step:
    """One block of a stage: the code it runs, and what nobody reads after it."""

    module: int
    program: Program
    frees: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StageProgram:
    """How a stage runs one graph of the model: what it receives and sends, and its blocks in order.

    `tied` are the parameters that the stage owns: tensor -> (attribute, shape). `counted` is an input with a batch dim,
    and the dim: it tells how many samples a micro-batch has.
    """

    graph: Graph
    received: tuple[int, ...]
    sent: tuple[int, ...]
    prelude: Lowered | None
    steps: tuple[Step, ...]
    tied: Mapping[int, tuple[str, tuple[int, ...]]]
    counted: tuple[int, int]


class Tied(nn.Module):
    """Parameters that several blocks of one stage read, owned by the stage and passed as inputs.

    Two FSDP groups may not hold one parameter, so none of the blocks owns it.
    """

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        for tensor, parameter in parameters.items():
            self.register_parameter(f"tied_{tensor}", parameter)


class Stage(nn.Module):
    """A pipeline stage: positional arguments are the activations that earlier stages made.

    Keywords are the model's inputs, as `input_<tensor index>`, and the weights of the micro-batch where its programs
    take them. The prelude runs once, then the blocks in order. Returns the activations that later stages read; the last
    stage returns the loss, and the outputs if its graph has some.
    """

    def __init__(
        self,
        graph: Graph,
        blocks: Sequence[Lowered],
        *,
        positions: range,
        recompute: Sequence[bool],
        tied: Mapping[int, nn.Parameter],
        prelude: Lowered | None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.tied = Tied(tied)
        self.positions = positions
        self.recompute = tuple(recompute)
        self.is_last = positions.stop == len(graph.blocks)
        self._tied_leaf = {graph.tensors[tensor].name: f"tied_{tensor}" for tensor in tied}
        self._tied_shape = {graph.tensors[tensor].name: shape_of(graph, tensor, 1) for tensor in tied}
        self.first = self._program(graph, [block.program for block in blocks], prelude)
        self.program = self.first  # the one that runs: set it to run another
        self.draws: Iterator[Draws] = iter(())

    def add(
        self,
        graph: Graph,
        *,
        attributes: Mapping[int, torch.Tensor],
        device: torch.device,
        weighed: bool,
        peers: Peers = ALONE,
        counters: Mapping[int, ExpertCounter] = {},
    ) -> StageProgram:
        """A program for another graph of the model, over the same registered parameters."""
        tied = tuple(t for t, d in enumerate(graph.tensors) if d.kind == "parameter" and d.name in self._tied_leaf)
        programs = []
        for position, block in zip(self.positions, self.blocks, strict=True):
            inputs, outputs = _block_interface(graph, graph.blocks[position], tied, weighed=weighed)
            programs.append(
                cast("Lowered", block).compile(
                    graph,
                    graph.blocks[position].nodes,
                    inputs=inputs,
                    outputs=outputs,
                    attributes=attributes,
                    peers=peers,
                    counters=counters,
                )
            )
        needed = [t for p in self.positions for t in graph.blocks[p].shared]
        if self.is_last:
            needed += [tensor for _, tensor in graph.outputs]
        prelude = lower_prelude(graph, needed, attributes=attributes, micro_batch=1, device=device, weighed=weighed)
        return self._program(graph, programs, prelude)

    def _program(self, graph: Graph, programs: Sequence[Program], prelude: Lowered | None) -> StageProgram:
        first, last = self.positions.start, self.positions.stop - 1
        results = (*dict.fromkeys((graph.loss, *(tensor for _, tensor in graph.outputs))),)
        sent = results if self.is_last else graph.carried[last]
        return StageProgram(
            graph=graph,
            received=graph.carried[first - 1] if first else (),
            sent=sent,
            prelude=prelude,
            steps=_steps(programs, sent),
            tied={
                t: (self._tied_leaf[described.name], self._tied_shape[described.name])
                for t, described in enumerate(graph.tensors)
                if described.kind == "parameter" and described.name in self._tied_leaf
            },
            counted=next(
                (t, dim)
                for t in graph.inputs
                for dim, size in enumerate(graph.tensors[t].shape)
                if isinstance(size, Batch)
            ),
        )

    def forward(self, *activations: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one micro-batch through the blocks of this stage.

        Schedules run forward in the order of the micro-batches, so each takes the next of `draws`.
        """
        draws = next(self.draws, None)
        program = self.program
        env = {int(key.removeprefix(INPUT)): value for key, value in inputs.items()}
        tensor, dim = program.counted
        micro_batch = env[tensor].shape[dim]
        if WEIGHTS in env:
            env[WEIGHTS] = env[WEIGHTS].reshape(-1)
        for tensor, value in zip(program.received, activations, strict=True):
            env[tensor] = (
                _ContiguousGradient.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]
            )
        if program.prelude is not None:
            # Nothing in it depends on a parameter.
            with torch.no_grad():
                made = program.prelude(*(env[tensor] for tensor in program.prelude.inputs), micro_batch=micro_batch)
            env.update(zip(program.prelude.outputs, made, strict=True))
        env.update({t: held(getattr(self.tied, leaf)).reshape(shape) for t, (leaf, shape) in program.tied.items()})
        for step in program.steps:
            block = cast("Lowered", self.blocks[step.module])
            args = [env[tensor] for tensor in step.program.inputs]
            is_recomputed = self.recompute[step.module] and torch.is_grad_enabled()
            run = _recomputed if is_recomputed else _once
            made = run(block, args, program=step.program, micro_batch=micro_batch, draws=draws)
            env.update(zip(step.program.outputs, made, strict=True))
            for tensor in step.frees:
                env.pop(tensor, None)
        if self.is_last:
            results = tuple(env[tensor] for tensor in program.sent)
        else:
            results = tuple(sendable(env[tensor]) for tensor in program.sent)
        return results[0] if len(results) == 1 else results

    def sites(self) -> dict[int, tuple[nn.Module, str]]:
        """Where each parameter of this stage is registered: (module, attribute)."""
        found: dict[int, tuple[nn.Module, str]] = {
            tensor: (self.tied, leaf) for tensor, (leaf, _) in self.first.tied.items()
        }
        for block in self.blocks:
            for tensor, (module, leaf) in cast("Lowered", block).sites.items():
                if leaf in module._parameters:
                    found[tensor] = (module, leaf)
        return found

    def buffers_written(self) -> dict[int, torch.Tensor]:
        """Buffers that a block of this stage updates, by tensor index."""
        return {
            tensor: cast("Lowered", block).value(tensor)
            for block in self.blocks
            for tensor in cast("Lowered", block).mutated
        }


INPUT = "input_"  # keyword of a model input: this and its tensor index


def _once(
    block: Lowered, args: Sequence[torch.Tensor], *, program: Program, micro_batch: int, draws: Draws | None
) -> tuple[torch.Tensor, ...]:
    """The block's outputs."""
    result: tuple[torch.Tensor, ...] = block(*args, program=program, micro_batch=micro_batch, draws=draws)
    return result


@contextmanager
def _again(program: Program, before: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within it a program runs a second time in the same step."""
    with buffers_as_before(program, before), not_counted(program.counters):
        yield


def _recomputed(
    block: Lowered, args: Sequence[torch.Tensor], *, program: Program, micro_batch: int, draws: Draws | None
) -> tuple[torch.Tensor, ...]:
    """The block's outputs; in backward it runs a second time instead of keeping activations.

    The second time it draws the same: what it draws from is an argument.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        before = {tensor: program.value(tensor).detach().clone() for tensor in program.mutated}
        return nullcontext(), _again(program, before)

    result: tuple[torch.Tensor, ...] = checkpoint(
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=program.is_random and draws is None,
        context_fn=contexts,
        program=program,
        micro_batch=micro_batch,
        draws=draws,
    )
    return result


def _steps(programs: Sequence[Program], sent: Sequence[int]) -> tuple[Step, ...]:
    last: dict[int, int] = {}
    for position, program in enumerate(programs):
        for tensor in (*program.inputs, *program.outputs):
            if tensor != WEIGHTS:
                last[tensor] = position
    return tuple(
        Step(
            module=position,
            program=program,
            frees=tuple(t for t, end in last.items() if end == position and t not in sent),
        )
        for position, program in enumerate(programs)
    )


def _block_interface(
    graph: Graph, block: Block, tied: Sequence[int], *, weighed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a lowered block reads and makes; `tied` parameters and the weights are read as inputs."""
    made = {t for i in block.nodes for t in graph.nodes[i].outputs}
    outputs = [*block.outputs]
    if graph.loss in made and graph.loss not in outputs:
        outputs.append(graph.loss)
    lifted = [tensor for tensor in block.parameters if tensor in tied]
    weights = (WEIGHTS,) if weighed and made & weight_layout(graph).keys() else ()
    return (*block.inputs, *block.shared, *lifted, *weights), tuple(outputs)


def lower_block(
    graph: Graph,
    block: Block,
    *,
    tied: Sequence[int],
    attributes: Mapping[int, torch.Tensor],
    micro_batch: int,
    device: torch.device,
    weighed: bool = False,
    peers: Peers = ALONE,
    counters: Mapping[int, ExpertCounter] = {},
) -> Lowered:
    """One block as a module. `tied` parameters are inputs; `attributes` has the other tensors.

    Where `weighed`, blocks with a loss term or a divisor read the weights of the micro-batch as well.
    """
    inputs, outputs = _block_interface(graph, block, tied, weighed=weighed)
    return Lowered(
        graph,
        block.nodes,
        name=block.name,
        inputs=inputs,
        outputs=outputs,
        attributes=attributes,
        micro_batch=micro_batch,
        device=device,
        peers=peers,
        counters=counters,
    )


def lower_prelude(
    graph: Graph,
    needed: Sequence[int],
    *,
    attributes: Mapping[int, torch.Tensor],
    micro_batch: int,
    device: torch.device,
    weighed: bool = False,
    given: Sequence[int] = (),
) -> Lowered | None:
    """The part of the prelude that makes `needed` (inputs among them are ignored), or None.

    `given` tensors are inputs instead of being made. With an in-place node anywhere in the prelude all of it runs:
    order and aliases stay the graph's.
    """
    maker = {t: i for i in graph.prelude.nodes for t in graph.nodes[i].outputs if t is not None}
    wanted = [tensor for tensor in dict.fromkeys(needed) if tensor in maker and tensor not in given]
    if not wanted:
        return None
    nodes: set[int] = set()
    todo = [maker[tensor] for tensor in wanted]
    if any(graph.nodes[i].mutates for i in graph.prelude.nodes) and not given:
        todo = list(graph.prelude.nodes)
    while todo:
        index = todo.pop()
        if index not in nodes:
            nodes.add(index)
            todo += [maker[t] for t in reads(graph.nodes[index]) if t in maker and t not in given]
    read = {t for i in nodes for t in reads(graph.nodes[i])}
    made = {t for i in nodes for t in graph.nodes[i].outputs}
    weights = [WEIGHTS] if weighed and made & weight_layout(graph).keys() else []
    return Lowered(
        graph,
        sorted(nodes),
        name="prelude",
        inputs=[*(tensor for tensor in (*graph.inputs, *given) if tensor in read), *weights],
        outputs=wanted,
        attributes=attributes,
        micro_batch=micro_batch,
        device=device,
    )


def boundary_examples(
    graph: Graph, cuts: Sequence[int], micro_batch: int, *, peers: Peers = ALONE
) -> dict[int, tuple[torch.Tensor, ...]]:
    """What crosses each cut, as meta tensors: shape, dtype and whether it carries a gradient.

    The nodes run once on meta tensors with autograd, so that the answer is torch's own; `peers` must be pretended ones.

    Raises:
        PlanError: an operator does not run on meta tensors, or not for so many samples.
    """
    if not cuts:
        return {}
    meta = torch.device("meta")
    env: dict[int, torch.Tensor] = {}
    for index, described in enumerate(graph.tensors):
        if described.kind != "activation":
            env[index] = torch.empty(
                shape_of(graph, index, micro_batch), dtype=dtype_of(graph, index), device=meta,
                requires_grad=described.kind == "parameter" and described.requires_grad,
            )  # fmt: skip
    nodes = [graph.nodes[i] for i in sorted({*graph.prelude.nodes, *_nodes_of(graph.blocks[: max(cuts) + 1])})]
    for node in nodes:
        try:
            run_nodes(graph.tensors, [node], env, micro_batch=micro_batch, device=meta, replace=peers.operators)
        except NotImplementedError as error:
            raise PlanError(
                f"{node.source}: operator {node.op} does not run on tensors without data, by which a pipeline learns "
                "what its stages send; plan with pp=1"
            ) from error
        except Exception as error:
            raise PlanError(
                f"{node.source}: operator {node.op} fails for {micro_batch} samples with {type(error).__name__}: "
                f"{error}; plan with another micro-batch"
            ) from error
    return {
        cut: tuple(
            torch.empty(
                shape_of(graph, t, micro_batch), dtype=dtype_of(graph, t), device=meta,
                requires_grad=env[t].requires_grad,
            )
            for t in graph.carried[cut]
        )
        for cut in cuts
    }  # fmt: skip


def _nodes_of(blocks: Sequence[Block]) -> Iterator[int]:
    for block in blocks:
        yield from block.nodes
