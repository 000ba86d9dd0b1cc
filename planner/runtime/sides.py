"""The two sides that the self-check compares: a copy of the user's module, and the lowered blocks on its parameters.

Both can do without the repeats of a block class: such a module of the copy is replaced by a stand-in that hands its
input on, the lowered block likewise, so that one block of each class is compared together with all that is around them.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.graph import Graph, Ref, reads
from planner.runtime.blocks import Lowered, constant, lower_block, lower_prelude, shape_of
from planner.runtime.peers import ALONE, Peers
from planner.runtime.samples import index_limits
from planner.shard.chain import Link
from planner.shard.placement import R
from planner.trace.batch import leaves

_SPREAD = 0.1  # relative change of parameters
_PATTERN = 65_521  # random values that are repeated over a parameter; prime, so that no shape repeats them in rows
_SEED = 20_260_317


@dataclass(frozen=True, slots=True)
class Left:
    """A block that is left out: it hands its first input on as its main output, all else is the representative's."""

    position: int
    representative: int
    main_input: int
    main_output: int


# --- the module's side ---


def copy_of(
    model: nn.Module,
    graph: Graph,
    left: Sequence[Left],
    samples: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: bool,
) -> nn.Module:
    """The model in the compute dtype on `device`, in train mode as it was traced, its left-out modules replaced.

    Buffers keep their dtype, as in training. With `spread` parameters are moved by about a tenth.
    """
    memo: dict[int, Any] = {}
    stand_ins: dict[str, _StandIn] = {}
    for item in left:
        name = graph.blocks[item.position].name
        module = model.get_submodule(name)
        stand_ins[name] = _StandIn(module, shape_of(graph, item.main_input, samples))
        memo[id(module)] = stand_ins[name]
    limits = index_limits(graph) if any(b.is_meta for b in model.buffers()) else {}
    limit_of = {graph.tensors[t].name: limit for t, limit in limits.items()}
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(_SEED)).to(device)
    for module in _modules_but(model, memo):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _as_computed(parameter, dtype, device, pattern, len(memo), spread=spread)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = (
                    _filled(buffer, device, limit_of.get(names.get(id(buffer), "")))
                    if buffer.is_meta
                    else buffer.detach().clone().to(device)
                )
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().clone().to(device)
    copied = deepcopy(model, memo)
    if not copied.training:
        copied.train()
    by_position = {item.position: item for item in left}
    for position in {item.representative for item in by_position.values()}:
        followers = [stand_ins[graph.blocks[i.position].name] for i in left if i.representative == position]
        copied.get_submodule(graph.blocks[position].name).register_forward_hook(_shown_to(followers))
    return copied


def _modules_but(module: nn.Module, replaced: Mapping[int, Any]) -> Iterator[nn.Module]:
    """All modules that a copy will hold."""
    if id(module) not in replaced:
        yield module
        for child in module._modules.values():
            if child is not None:
                yield from _modules_but(child, replaced)


def _as_computed(
    parameter: nn.Parameter,
    dtype: torch.dtype,
    device: torch.device,
    pattern: torch.Tensor,
    offset: int,
    *,
    spread: bool,
) -> nn.Parameter:
    """A parameter's value moved a little, in the compute dtype; gradient hooks are kept."""
    if not parameter.is_floating_point():
        value = (
            torch.zeros_like(parameter, device=device) if parameter.is_meta else parameter.detach().clone().to(device)
        )
        return nn.Parameter(value, parameter.requires_grad)
    start = offset * 257 % _PATTERN
    noise = _tiled(pattern, start, parameter.shape)
    if parameter.is_meta:
        # Any values do as long as activations neither vanish nor grow: matrices by their inputs, vectors near one.
        fan = max(1, parameter.numel() // max(parameter.shape)) if parameter.ndim > 1 else 1
        value = noise / math.sqrt(fan) if parameter.ndim > 1 else 1 + _SPREAD * noise
    else:
        value = parameter.detach().to(device, torch.promote_types(parameter.dtype, torch.float32), copy=True)
        if spread:
            zeros = value == 0
            value.mul_(_tiled(1 + _SPREAD * pattern, start, parameter.shape))
            if zeros.any():
                value += zeros * (_SPREAD / 5) * noise
    result = nn.Parameter(value.to(dtype), parameter.requires_grad)
    for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
        result.register_hook(hook)  # type: ignore[no-untyped-call]
    return result


def _tiled(pattern: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """A tensor that repeats the pattern from `start` on."""
    end = start + shape.numel()
    return pattern.repeat(-(-end // len(pattern)) or 1)[start:end].reshape(shape)


def _filled(buffer: torch.Tensor, device: torch.device, limit: int | None) -> torch.Tensor:
    """A buffer of a model on meta: positions where it counts, values between a half and one where it measures."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.linspace(0.5, 1.0, max(1, buffer.numel()), device=device)[: buffer.numel()].reshape(
            buffer.shape
        ).to(buffer.dtype)  # fmt: skip
    last = torch.arange(buffer.shape[-1] if buffer.ndim else 1, device=device)
    if limit is not None:
        last = last.clamp(max=limit - 1)
    return last.to(buffer.dtype).expand(buffer.shape).clone() if buffer.ndim else last.to(buffer.dtype)[0]


class _StandIn(nn.Module):
    """In place of a repeated module: hands its main input on, and returns all else as its representative did."""

    def __init__(self, original: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.__dict__["_original"] = original  # not registered: its parameters are not ours
        self.__dict__["_main"] = shape
        self.__dict__["_template"] = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)  # what a loop over layers asks them

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StandIn":
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output."""
        given = pytree.tree_leaves((args, kwargs))
        shown, spec = pytree.tree_flatten(self.__dict__["_template"])
        value = given[self._position(given)].clone()
        shown[self._position(shown)] = value
        return pytree.tree_unflatten(shown, spec)

    def _position(self, found: Sequence[Any]) -> int:
        return next(
            i
            for i, v in enumerate(found)
            if isinstance(v, torch.Tensor) and v.is_floating_point() and tuple(v.shape) == self.__dict__["_main"]
        )


def _shown_to(followers: Sequence[_StandIn]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for follower in followers:
            follower.__dict__["_template"] = output

    return hook


# --- the blocks' side ---


class _HandedOn(nn.Module):
    """What stands for a left-out block among the lowered ones."""

    def __init__(self, graph: Graph, item: Left) -> None:
        super().__init__()
        block, shown = graph.blocks[item.position], graph.blocks[item.representative]
        others = [s for o, s in zip(block.outputs, shown.outputs, strict=True) if o != item.main_output]
        self.inputs = (item.main_input, *others)
        self.outputs = (item.main_output, *(o for o in block.outputs if o != item.main_output))

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        return (args[0].clone(), *args[1:])


def tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, the latter under all their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers(remove_duplicate=False))}


class Chain:
    """The lowered blocks in order, on given parameters and buffers: what training runs, on one device."""

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        graph: Graph,
        left: Sequence[Left],
        samples: int,
        device: torch.device,
        *,
        peers: Peers = ALONE,
    ) -> None:
        """`named` are parameters and buffers; those of one rank where the graph is that of one, with its `peers`."""
        absent = {item.position: item for item in left}
        kept = [block for position, block in enumerate(graph.blocks) if position not in absent]
        nodes = [graph.nodes[i] for i in (*graph.prelude.nodes, *(i for block in kept for i in block.nodes))]
        read = {t for node in nodes for t in reads(node)} | {t for block in kept for t in block.outputs}
        attributes: dict[int, torch.Tensor] = {}
        for tensor in read:
            described = graph.tensors[tensor]
            if described.kind == "constant":
                attributes[tensor] = constant(graph, tensor, device)
            elif described.kind in ("parameter", "buffer"):
                attributes[tensor] = named[described.name]
        self.graph = graph
        # A parameter that several blocks read is simply registered in each: nothing is wrapped here.
        self.parts: list[Lowered | _HandedOn] = [
            _HandedOn(graph, absent[position])
            if position in absent
            else lower_block(
                graph, block, tied=(), attributes=attributes, micro_batch=samples, device=device, peers=peers
            )
            for position, block in enumerate(graph.blocks)
        ]
        self.prelude = lower_prelude(
            graph,
            [tensor for block in kept for tensor in block.shared],
            attributes=attributes, micro_batch=samples, device=device,
        )  # fmt: skip

    def __call__(
        self, batch: Any, note: Callable[[int, Sequence[torch.Tensor]], None] = lambda *_: None
    ) -> torch.Tensor:
        """The loss; `note` is told the outputs of each block as they are made."""
        named = {leaf.name: leaf.tensor for leaf in leaves(batch)}
        env = {tensor: named[self.graph.tensors[tensor].name] for tensor in self.graph.inputs}
        if self.prelude is not None:
            with torch.no_grad():  # as in training: nothing in it depends on a parameter
                made = self.prelude(*(env[tensor] for tensor in self.prelude.inputs))
            env.update(zip(self.prelude.outputs, made, strict=True))
        for position, part in enumerate(self.parts):
            made = part(*(env[tensor] for tensor in part.inputs))
            note(position, made)
            env.update(zip(part.outputs, made, strict=True))
        return env[self.graph.loss]

    def lowered(self) -> Iterator[Lowered]:
        """The parts that are lowered code."""
        yield from (part for part in (self.prelude, *self.parts) if isinstance(part, Lowered))


# --- what can be left out ---


def repeats(model: nn.Module, graph: Graph, links: Sequence[Link] = ()) -> tuple[Left, ...]:
    """Blocks that are one call of one module and equal an earlier block, reading shared tensors made alike.

    With `links`, how axes split the graph, they are split alike as well.
    """
    modules = dict(model.named_modules())
    calls: dict[str, set[int]] = {}
    for index in (i for block in graph.blocks for i in block.nodes):
        for path in graph.nodes[index].path:
            calls.setdefault(path, set()).add(index)
    tied = {t for t, _ in graph.tie_groups}
    made = _recipes(graph)
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    result: list[Left] = []
    for position, block in enumerate(graph.blocks):
        is_module = block.name in modules and calls.get(block.name) == set(block.nodes)
        is_module &= f"{block.name}@1" not in calls
        if not is_module or tied & set(block.parameters):
            continue
        main = _main(graph, position, links)
        if main is None:
            continue
        kind = (links[-1].local.graph if links else graph).blocks[position].class_index
        key = (kind, tuple(made.get(t, t) for t in block.shared))
        if key in seen:
            result.append(Left(position, seen[key], *main))
        else:
            seen[key] = position
    return tuple(result)


def _recipes(graph: Graph) -> dict[int, int]:
    """Tensor of the prelude -> a number that is the same for tensors made in the same way of the same inputs."""
    result: dict[int, int] = {}
    numbers: dict[tuple[object, ...], int] = {}
    for index in graph.prelude.nodes:
        node = graph.nodes[index]
        for position, tensor in enumerate(node.outputs):
            if tensor is not None:
                key = (node.op, _by_recipe(node.args, result), _by_recipe(node.kwargs, result), position)
                # Negative: not the index of a tensor.
                result[tensor] = numbers.setdefault(key, -1 - len(numbers))
    return result


def _by_recipe(arg: object, made: Mapping[int, int]) -> object:
    if isinstance(arg, Ref):
        return Ref(made.get(arg.tensor, arg.tensor))
    # A number is not equal to itself of another type: 1, 1.0 and True.
    return tuple(_by_recipe(item, made) for item in arg) if isinstance(arg, tuple) else (type(arg).__name__, arg)


def _main(graph: Graph, position: int, links: Sequence[Link]) -> tuple[int, int] | None:
    """(input, output) of a block that have one shape, dtype and split, the input being new since the block before."""
    block = graph.blocks[position]
    if not position or not block.outputs:
        return None
    fresh = set(graph.blocks[position - 1].outputs)

    def described(tensor: int) -> tuple[object, ...]:
        placed = [link.local.placements.get(tensor, R) for link in links]
        return graph.tensors[tensor].shape, graph.tensors[tensor].dtype, placed

    for given in block.inputs:
        for made in block.outputs:
            if given in fresh and described(given) == described(made):
                return given, made
    return None


# --- how far two values are apart ---


def difference(one: torch.Tensor | None, two: torch.Tensor | None) -> float:
    """Norm of the difference; no gradient is a gradient of zero."""
    if one is None or two is None:
        return size_of(one if two is None else two)
    if torch.equal(one, two):
        return 0.0
    same = (one == two) | (one.isnan() & two.isnan())  # infinite values too
    return size_of(torch.where(same, 0.0, two.to(_widest(two)) - one.to(_widest(one))))


def size_of(value: torch.Tensor | None) -> float:
    """The norm."""
    if value is None:
        return 0.0
    value = value.detach() if value.is_floating_point() or value.is_complex() else value.double()
    return float(torch.linalg.vector_norm(value, dtype=_widest(value)))


def _widest(value: torch.Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


# --- chance ---


def without_chance(graph: Graph) -> Graph:
    """The graph whose random nodes are lowered as plain operators: `Repeatable` draws for both sides."""
    nodes = tuple(replace(node, is_random=False) if node.is_random else node for node in graph.nodes)
    return replace(graph, nodes=nodes, dropout_nodes=())


class Repeatable(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Chance that is the same in every run, whatever the order: dropout keeps all, the rest is seeded by operator.

    Counts the compute operators by the dtype of what they make.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._random(func, args, named)
        else:
            result = func(*args, **named)
        if isinstance(func, torch._ops.OpOverload) and not func.is_view and str(func) not in _MOVES:
            first = result[0] if isinstance(result, tuple | list) and result else result
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                self.counts[str(func), first.dtype] += 1
        return result

    def _random(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if func is torch.ops.aten.bernoulli_.float:  # what dropout keeps
            return args[0].fill_(1)
        given = list(args)
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in ("dropout_p", "dropout") or (argument.name == "p" and "dropout" in str(func)):
                if position < len(given):
                    given[position] = 0.0
                elif argument.name in named:
                    named[argument.name] = 0.0
        sizes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in given]
        with _DRAWING:
            torch.manual_seed(_SEED + sum(map(ord, f"{func}{sizes}")))
            return func(*given, **named)


_DRAWING = threading.Lock()  # ranks that are threads share torch's generators
_MOVES = frozenset({
    "aten._to_copy.default", "aten.clone.default", "aten.copy_.default", "aten.detach.default",
    "aten.empty.memory_format", "aten.empty_like.default",
    "aten.empty_strided.default", "aten.new_empty.default", "aten.new_empty_strided.default",
    "aten._unsafe_view.default", "aten._reshape_alias.default", "aten.zeros_like.default", "aten.ones_like.default",
})  # fmt: skip
