"""Executable modules from a `Graph`: one per block, one for the prelude, and the stage that runs them.

The undecomposed nodes run in the graph's order, in-place ones included. Parameters and buffers are
the very objects they are given, under the model's own dotted names; sizes are those of one
micro-batch, devices the rank's own.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from planner.graph import Batch, Block, Graph, Node, reads
from planner.trace.aten import materialize, run_nodes, torch_operator

# Below this child a lowered module keeps the model's own names: a child of the model called `graph`
# or `meta` must not shadow an attribute of fx.GraphModule.
_PREFIX = "model"
# What checkpoint raises inside a block to end a recomputation early.
_CHECKPOINT_STOP = "_StopRecomputationError"


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


class Lowered(nn.Module):
    """A run of nodes as a module: tensors in (the order of `inputs`), a tuple of tensors out.

    `attributes` are the real tensors of parameters, buffers and constants that the nodes read and
    that are not among the inputs.
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
    ) -> None:
        super().__init__()
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.is_random = any(graph.nodes[i].is_random for i in nodes)
        self.sources: dict[str, Node] = {}  # name of a generated variable -> node that makes it
        self.body, targets = self._generate(graph, nodes, attributes, micro_batch, device)
        written = {t for i in nodes for t in graph.nodes[i].mutates}
        self.sites = {tensor: (self.body.get_submodule(path), leaf) for tensor, (path, leaf) in targets.items()}
        self.mutated = tuple(
            t for t, (module, leaf) in sorted(self.sites.items()) if t in written and leaf in module._buffers
        )

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs. An error carries a note with the user's own source line."""
        try:
            result: tuple[torch.Tensor, ...] = self.body.forward(*args)
        except Exception as error:
            if type(error).__name__ != _CHECKPOINT_STOP:
                self._explain(error)
            raise
        return result

    def value(self, tensor: int) -> torch.Tensor:
        """The object that is registered now for a parameter, buffer or constant."""
        module, leaf = self.sites[tensor]
        found: torch.Tensor = getattr(module, leaf)
        return found

    @contextmanager
    def buffers_as_before(self, before: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Within it the buffers this module writes are copies of `before`; after it, themselves.

        A recomputed forward must see what the first one saw, must not count twice, and what it
        saves for backward must not change when it ends: so the objects are exchanged, not values.
        """
        own = {tensor: self.value(tensor) for tensor in before}
        self._register({tensor: value.clone() for tensor, value in before.items()})
        try:
            yield
        finally:
            self._register(own)

    def snapshot(self) -> dict[int, torch.Tensor]:
        """Copies of the buffers that this module writes."""
        return {tensor: self.value(tensor).detach().clone() for tensor in self.mutated}

    def _register(self, buffers: Mapping[int, torch.Tensor]) -> None:
        for tensor, value in buffers.items():
            module, leaf = self.sites[tensor]
            module._buffers[leaf] = value

    def _generate(
        self,
        graph: Graph,
        nodes: Sequence[int],
        attributes: Mapping[int, torch.Tensor],
        micro_batch: int,
        device: torch.device,
    ) -> tuple[fx.GraphModule, dict[int, tuple[str, str]]]:
        """The generated module, and where each attribute is registered in it: (path, leaf)."""
        code = fx.Graph()
        env: dict[int, fx.Node] = {}
        owned: dict[str, torch.Tensor] = {}
        targets: dict[int, tuple[str, str]] = {}
        for tensor in self.inputs:
            env[tensor] = code.placeholder(f"in_{tensor}")

        def attribute(tensor: int) -> None:
            """Read an attribute where it is first needed."""
            described = graph.tensors[tensor]
            named = described.kind in ("parameter", "buffer")
            target = f"{_PREFIX}.{described.name}" if named else f"constant_{tensor}"
            owned[target] = attributes[tensor]
            path, _, leaf = target.rpartition(".")
            targets[tensor] = (path, leaf)
            env[tensor] = code.get_attr(target)
            if attributes[tensor].ndim > len(described.shape):  # a stored scalar
                env[tensor] = code.call_function(torch.ops.aten.reshape.default, (env[tensor], []))

        for index in nodes:
            node = graph.nodes[index]
            for tensor in reads(node):
                if tensor not in env:
                    attribute(tensor)
            operands = cast("Mapping[int, torch.Tensor]", env)
            call = code.call_function(
                torch_operator(node.op),
                tuple(materialize(a, operands, micro_batch, device) for a in node.args),  # type: ignore[misc]
                {k: materialize(a, operands, micro_batch, device) for k, a in node.kwargs},  # type: ignore[misc]
            )
            self.sources[call.name] = node
            for position, tensor_or_none in enumerate(node.outputs):
                if tensor_or_none is None:
                    continue
                if node.returns_list:
                    item = code.call_function(_getitem, (call, position))
                    self.sources[item.name] = node
                    env[tensor_or_none] = item
                else:
                    env[tensor_or_none] = call
        for tensor in self.outputs:
            if tensor not in env:  # a parameter, buffer or constant that is passed on as it is
                attribute(tensor)
        code.output(tuple(env[tensor] for tensor in self.outputs))
        with _without_lint_warnings():
            return fx.GraphModule(cast("dict[str, Any]", owned), code), targets

    def _explain(self, error: Exception) -> None:
        """Note on `error` which of the user's lines failed."""
        found = self._failed_node(error.__traceback__)
        if found is not None:
            error.add_note(f"in block {self.name}, {found.source} (operator {found.op})")

    def _failed_node(self, trace: TracebackType | None) -> Node | None:
        """The node whose generated line is on the traceback."""
        function = getattr(self.body.forward, "__func__", None)
        lines = self.body.code.split("\n")
        while trace is not None:
            if function is not None and trace.tb_frame.f_code is function.__code__:
                line = lines[trace.tb_lineno - 1] if trace.tb_lineno <= len(lines) else ""
                return self.sources.get(line.split("=")[0].split(":")[0].strip())
            trace = trace.tb_next
        return None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block of a stage: what it reads, makes, and what nobody reads after it."""

    module: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    recompute: bool


class Tied(nn.Module):
    """Parameters that several blocks of one stage read, owned by the stage and passed as inputs.

    Two FSDP groups may not hold one parameter, so none of the blocks owns it.
    """

    def __init__(self, graph: Graph, parameters: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self.shapes = {tensor: shape_of(graph, tensor, 1) for tensor in parameters}
        for tensor, parameter in parameters.items():
            self.register_parameter(f"tied_{tensor}", parameter)

    def values(self) -> dict[int, torch.Tensor]:
        """The registered objects by tensor index."""
        return {int(leaf.rpartition("_")[2]): p for leaf, p in self.named_parameters()}


class Stage(nn.Module):
    """A pipeline stage: positional arguments are the activations that earlier stages made.

    Keywords are the model's inputs, as `input_<tensor index>`. The prelude runs once, then the
    blocks in order. Returns the activations that later stages read, or the loss on the last stage.
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
        self.tied = Tied(graph, tied)
        self.prelude = prelude
        self.received = graph.carried[positions.start - 1] if positions.start else ()
        self.is_last = positions.stop == len(graph.blocks)
        self.sent = (graph.loss,) if self.is_last else graph.carried[positions.stop - 1]
        self.steps = _steps(blocks, recompute, self.sent)

    def forward(self, *activations: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one micro-batch through the blocks of this stage."""
        env = {int(key.removeprefix(INPUT)): value for key, value in inputs.items()}
        for tensor, value in zip(self.received, activations, strict=True):
            env[tensor] = (
                _ContiguousGradient.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]
            )
        if self.prelude is not None:
            # Nothing in it depends on a parameter.
            with torch.no_grad():
                made = self.prelude(*(env[tensor] for tensor in self.prelude.inputs))
            env.update(zip(self.prelude.outputs, made, strict=True))
        env.update({t: p.reshape(self.tied.shapes[t]) for t, p in self.tied.values().items()})
        for step in self.steps:
            block = cast("Lowered", self.blocks[step.module])
            args = [env[tensor] for tensor in step.reads]
            made = _recomputed(block, args) if step.recompute else block(*args)
            env.update(zip(step.makes, made, strict=True))
            for tensor in step.frees:
                env.pop(tensor, None)
        if self.is_last:
            return env[self.sent[0]]
        result = tuple(sendable(env[tensor]) for tensor in self.sent)
        return result[0] if len(result) == 1 else result

    def sites(self) -> dict[int, tuple[nn.Module, str]]:
        """Where each parameter of this stage is registered: (module, attribute)."""
        found: dict[int, tuple[nn.Module, str]] = {
            int(leaf.rpartition("_")[2]): (self.tied, leaf) for leaf, _ in self.tied.named_parameters()
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


def _recomputed(block: Lowered, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The block's outputs; in backward it runs a second time instead of keeping activations."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        again = block.buffers_as_before(block.snapshot()) if block.mutated else nullcontext()
        return nullcontext(), again

    result: tuple[torch.Tensor, ...] = checkpoint(
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=block.is_random,
        context_fn=contexts,
    )
    return result


def _steps(blocks: Sequence[Lowered], recompute: Sequence[bool], sent: Sequence[int]) -> tuple[Step, ...]:
    last: dict[int, int] = {}
    for position, block in enumerate(blocks):
        for tensor in (*block.inputs, *block.outputs):
            last[tensor] = position
    return tuple(
        Step(
            module=position,
            reads=block.inputs,
            makes=block.outputs,
            frees=tuple(t for t, end in last.items() if end == position and t not in sent),
            recompute=recompute[position],
        )
        for position, block in enumerate(blocks)
    )


def lower_block(
    graph: Graph,
    block: Block,
    *,
    tied: Sequence[int],
    attributes: Mapping[int, torch.Tensor],
    micro_batch: int,
    device: torch.device,
) -> Lowered:
    """One block as a module. `tied` parameters are inputs; `attributes` has the other tensors."""
    made = {t for i in block.nodes for t in graph.nodes[i].outputs}
    outputs = [*block.outputs]
    if graph.loss in made and graph.loss not in outputs:
        outputs.append(graph.loss)
    lifted = [tensor for tensor in block.parameters if tensor in tied]
    return Lowered(
        graph,
        block.nodes,
        name=block.name,
        inputs=(*block.inputs, *block.shared, *lifted),
        outputs=outputs,
        attributes=attributes,
        micro_batch=micro_batch,
        device=device,
    )


def lower_prelude(
    graph: Graph,
    needed: Sequence[int],
    *,
    attributes: Mapping[int, torch.Tensor],
    micro_batch: int,
    device: torch.device,
) -> Lowered | None:
    """The part of the prelude that makes `needed` (inputs among them are ignored), or None.

    With an in-place node anywhere in the prelude all of it runs: order and aliases stay the
    graph's.
    """
    maker = {t: i for i in graph.prelude.nodes for t in graph.nodes[i].outputs if t is not None}
    wanted = [tensor for tensor in dict.fromkeys(needed) if tensor in maker]
    if not wanted:
        return None
    nodes: set[int] = set()
    todo = [maker[tensor] for tensor in wanted]
    if any(graph.nodes[i].mutates for i in graph.prelude.nodes):
        todo = list(graph.prelude.nodes)
    while todo:
        index = todo.pop()
        if index not in nodes:
            nodes.add(index)
            todo += [maker[t] for t in reads(graph.nodes[index]) if t in maker]
    read = {t for i in nodes for t in reads(graph.nodes[i])}
    return Lowered(
        graph,
        sorted(nodes),
        name="prelude",
        inputs=[tensor for tensor in graph.inputs if tensor in read],
        outputs=wanted,
        attributes=attributes,
        micro_batch=micro_batch,
        device=device,
    )


def boundary_examples(graph: Graph, cuts: Sequence[int], micro_batch: int) -> dict[int, tuple[torch.Tensor, ...]]:
    """What crosses each cut, as meta tensors: shape, dtype and whether it carries a gradient.

    The nodes run once on meta tensors with autograd, so that the answer is torch's own.
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
    upto = max(cuts)
    run_nodes(
        graph.tensors,
        [graph.nodes[i] for i in sorted({*graph.prelude.nodes, *_nodes_of(graph.blocks[: upto + 1])})],
        env,
        micro_batch=micro_batch,
        device=meta,
    )
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
