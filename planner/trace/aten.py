"""ATen operators by name: fx arguments to `Arg` and back, and an interpreter for nodes.

`freeze` and `materialize` are each other's inverse; nothing else knows how a torch object is
written down in a `Graph`.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from planner.errors import TraceError
from planner.graph import Arg, Batch, BatchNumber, Node, Ref, Symbol, Tensor
from planner.trace import grouped, opaque, parallel

_PYTHON_MODULES = {"operator": operator, "math": math}
_SLICE = "slice"  # the first item of a frozen slice


@cache
def torch_operator(name: str) -> Callable[..., Any]:
    """The callable of `aten.linear.default`, another `namespace.name.overload`, or `math.sqrt`.

    >>> torch_operator("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>

    Raises:
        TraceError: this process knows no such operator.
    """
    found: Any
    match name.split("."):
        case _ if name == grouped.NAME:
            found = grouped.grouped_mm
        case _ if name in opaque.RUNS:
            found = opaque.RUNS[name]
        case _ if name in parallel.OPERATORS:
            found = parallel.unbound(name)
        case [module, function] if module in _PYTHON_MODULES:
            found = getattr(_PYTHON_MODULES[module], function, None)
        case [namespace, packet, overload]:
            packets = getattr(torch.ops, namespace)
            found = getattr(getattr(packets, packet, None), overload, None)
        case _:
            found = None
    if found is None:
        raise TraceError(f"operator {name!r} is not registered in this process; import the package that defines it")
    function_found: Callable[..., Any] = found
    return function_found


def operator_name(target: object) -> str:
    """The name of an fx call target, as `torch_operator` reads it.

    >>> operator_name(torch.ops.aten.add.Tensor), operator_name(operator.mul)
    ('aten.add.Tensor', 'operator.mul')

    Raises:
        TraceError: the target is neither an operator nor a function of `operator` or `math`.
    """
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return grouped.NAME if name in grouped.SPELLINGS else name
    name = getattr(target, "__name__", "")
    for module, functions in _PYTHON_MODULES.items():
        if getattr(functions, name, None) is target:
            return f"{module}.{name}"
    raise TraceError(f"the call target {target!r} is not an operator that a graph can hold")


def freeze(value: object, ref_of: Callable[[torch.fx.Node], Arg], scale: Callable[[Any], Arg]) -> Arg:
    """An fx argument as plain data: nodes through `ref_of`, numbers through `scale`.

    Sequences become tuples, a slice a tuple that starts with "slice".

    >>> freeze([2, torch.float32, slice(0, 4)], lambda node: None, lambda size: size)
    (2, Symbol(kind='dtype', name='float32'), ('slice', 0, 4, None))

    Raises:
        TraceError: an object that has no plain form.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            return scale(value)
        case torch.fx.Node():
            return ref_of(value)
        case list() | tuple():
            return tuple(freeze(item, ref_of, scale) for item in value)
        case slice(start=start, stop=stop, step=step):
            return (_SLICE, *(freeze(bound, ref_of, scale) for bound in (start, stop, step)))
        case torch.dtype():
            return Symbol("dtype", _short(value))
        case torch.layout():
            return Symbol("layout", _short(value))
        case torch.memory_format():
            return Symbol("memory_format", _short(value))
        case torch.device():
            return Symbol("device", "rank")
        case _:
            kind = type(value)
            raise TraceError(f"an argument of type {kind.__module__}.{kind.__qualname__} cannot be kept in a graph")


def materialize(arg: Arg, env: Mapping[int, torch.Tensor], micro_batch: int, device: torch.device) -> object:
    """What an operator is called with: tensors from `env`, sizes for `micro_batch`, tuples as lists.

    >>> materialize((Batch(3), 5), {}, 2, torch.device("cpu"))
    [6, 5]
    """
    match arg:
        case Ref(tensor):
            return env[tensor]
        case BatchNumber(per_sample):
            return float(per_sample) * micro_batch
        case Batch(per_sample):
            return per_sample * micro_batch
        case Symbol("device", _):
            return device
        case Symbol(_, name):
            found: object = getattr(torch, name)
            return found
        case ("slice", start, stop, step):
            bounds = [materialize(bound, env, micro_batch, device) for bound in (start, stop, step)]
            return slice(*bounds)
        case tuple():
            return [materialize(item, env, micro_batch, device) for item in arg]
        case _:
            return arg


def call_node(
    node: Node,
    env: Mapping[int, torch.Tensor],
    *,
    micro_batch: int,
    device: torch.device,
    replace: Mapping[str, Callable[..., Any]] = {},
) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs one node; yields (tensor index, result) for every output that is used."""
    function = replace.get(node.op) or torch_operator(node.op)
    args = [materialize(arg, env, micro_batch, device) for arg in node.args]
    kwargs = {key: materialize(arg, env, micro_batch, device) for key, arg in node.kwargs}
    result = function(*args, **kwargs)
    results: Sequence[Any] = result if node.returns_list else (result,)
    # `zip` is not strict: a node without outputs (an assertion) returns None.
    for index, value in zip(node.outputs, results, strict=False):
        if index is not None:
            yield index, value


def run_nodes(
    graph_tensors: Sequence[Tensor],
    nodes: Iterable[Node],
    env: dict[int, torch.Tensor],
    *,
    micro_batch: int,
    device: torch.device,
    replace: Mapping[str, Callable[..., Any]] = {},
) -> None:
    """Interprets `nodes` in order and stores what they make in `env`.

    `replace` gives other callables for some operator names.

    Raises:
        TraceError: a node reads a tensor that is not in `env`.
    """
    for node in nodes:
        try:
            made = call_node(node, env, micro_batch=micro_batch, device=device, replace=replace)
            env.update(made)
        except KeyError as error:
            missing = error.args[0]
            if not isinstance(missing, int) or missing in env:
                raise
            raise TraceError(
                f"node {node.name} ({node.op}) reads tensor {graph_tensors[missing].name!r}, which no earlier node made"
            ) from error


def is_random(name: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> bool:
    """Whether a call draws random numbers: torch marks operators that may; a rate of 0 or a train flag switches it off.

    >>> [is_random("aten.dropout.default", (Ref(0), rate, True), {}) for rate in (0.1, 0.0)]
    [True, False]
    """
    operator = torch_operator(name)
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    schema: Any = getattr(operator, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in ("p", "dropout", "dropout_p") and isinstance(value, int | float) and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True


def _short(torch_object: torch.dtype | torch.layout | torch.memory_format) -> str:
    """`float32` of `torch.float32`."""
    return str(torch_object).removeprefix("torch.")
