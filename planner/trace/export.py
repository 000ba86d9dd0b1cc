"""From a module to flat nodes: torch.export at a large prime batch on fake CPU tensors.

One export tells which sizes and integer constants are batch: those that the prime divides
(decision 1 of the tracing experiments: it agrees with a comparison of two exports on all models
tried, and on fake tensors a large batch costs nothing). Sizes and numbers that depend on the batch
in another way are refused, as is what export would lose silently and is watched for while it runs:
custom autograd Functions, tensor hooks, backward hooks, parametrizations.
"""

import contextlib
import copy
import inspect
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from planner.errors import ModelError
from planner.graph import Arg, Fallback, Node, reads, refs
from planner.trace.batch import Leaf, LossFunction, describe, leaves, map_leaves, num_samples
from planner.trace.bounded import Bounded, TooLongError
from planner.trace.convert import Converter, FlatGraph, storage_roots
from planner.trace.prime import PRIMES, comes_roughly_from, is_near, prime_for
from planner.trace.refusal import (
    TRAINS_WITHOUT,
    UNKNOWN,
    NoGraphError,
    first_line,
    is_user_file,
    refused,
    user_line,
    where_defined,
)
from planner.trace.state import Kept, LossOnly, carried_over, is_filled_once
from planner.trace.watch import (
    CHANGES_VALUE,
    DRAWS_OUTSIDE,
    ListOfValuesError,
    OneByOne,
    no_lists_of_values,
    quiet_logs,
    refusals,
    watch,
    watch_python_state,
)

# What fake tensors cannot do although the batch fits.
_NEEDS_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
    GuardOnDataDependentSymNode, NotImplementedError,
)  # fmt: skip
# What they say to `x.numpy()` and the like.
_LEAVES_TORCH = (".numpy() is not supported", "Cannot access data pointer", "data pointer of FakeTensor")


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have no data; ordinary tensors may meet them and count as constants."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, export=True)


def fake_copy(model: nn.Module, dtype: torch.dtype, mode: FakeTensorMode) -> nn.Module:
    """The model on fake CPU tensors, floating parameters in the compute dtype; no weight is allocated.

    Buffers keep their dtype, as they do under FSDP's mixed precision. A tensor that is a plain
    attribute keeps its value and becomes a constant. A model in eval mode is put in train mode; in
    one that is training, modules that the user put in eval mode stay there.

    Raises:
        ModelError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=kind), parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and id(value) not in memo and value.device.type == "meta":
                    memo[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().cpu().clone()
    try:
        result = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(f"the model cannot be copied: {type(error).__name__}: {first_line(error)}") from error
    if not result.training:
        result.train()
    return result


def export(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, *, trains_on_cpu: bool = False
) -> FlatGraph:
    """The flat graph of model and loss in the compute dtype. The model itself is not touched.

    What the model does under autocast can be written down only where it `trains_on_cpu`.

    Raises:
        NoGraphError: the model runs on the batch, but has no graph.
        ModelError: the batch does not fit the model, or there is no scalar loss.
    """
    given = leaves(batch)
    prime = prime_for(model, given)
    if found := refusals(model):
        may_branch = False
        try:
            _exported(model, batch, dtype, loss_fn, prime, trains_on_cpu=trains_on_cpu)
        except NoGraphError as error:
            may_branch = error.may_branch
        raise NoGraphError(found, may_branch=may_branch)
    flat = _exported(model, batch, dtype, loss_fn, prime, trains_on_cpu=trains_on_cpu)
    if _has_number_near(flat, model, given, prime):
        # Such as batch + 1, or the index of the last sample: at another prime it is another number.
        other = _exported(
            model, batch, dtype, loss_fn, next(p for p in PRIMES[::-1] if p != prime), trains_on_cpu=trains_on_cpu
        )
        for one, two in zip(flat.nodes, other.nodes, strict=False):
            if (one.op, one.args, one.kwargs) != (two.op, two.args, two.kwargs):
                raise refused(
                    one.source,
                    f"a number of {one.op} is made from the batch size",
                    f"use sizes and indices that do not depend on the batch, {TRAINS_WITHOUT}",
                    couples=True,
                )
        for mine, its in zip(_made_in_forward(flat), _made_in_forward(other), strict=False):
            if flat.tensors[mine].value != other.tensors[its].value:
                reader = next((n for n in flat.nodes if mine in reads(n)), flat.nodes[0])
                raise refused(
                    reader.source,
                    "a tensor is made from the batch size",
                    f"make it with torch.full or multiply by the number, {TRAINS_WITHOUT}",
                    couples=True,
                )
    return flat


def _made_in_forward(flat: FlatGraph) -> list[int]:
    """Constants that forward makes of Python numbers, by torch.tensor for example."""
    return [i for i, t in enumerate(flat.tensors) if t.kind == "constant" and "lifted_tensor" in t.name]


def _exported(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, prime: int,
    replaced: Sequence[str] = (), *, trains_on_cpu: bool, is_second: bool = False,
) -> FlatGraph:  # fmt: skip
    """One export with `prime` samples; `replaced` are buffers that forward is known to replace.

    With `is_second` forward has run once before: Python values that it sets to the same again and again are set.
    """
    found: list[Fallback] = []
    checkpoints: list[str] = []
    given = leaves(batch)
    mode = fake_mode()
    changed: list[tuple[Kept, str]] = []
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn, lambda *what: changed.append(what), replaced)
    try:
        with (
            warnings.catch_warnings(), watch(found, checkpoints, prime), watch_python_state(model, changed, found),
            quiet_logs(), no_lists_of_values(), OneByOne(prime), Bounded(user_line),
            torch.inference_mode(False), torch.enable_grad(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            large = _fake_batch(batch, prime, dtype, mode)
            if is_second:
                with mode:
                    wrapped(large)
                changed.clear()
            program = torch.export.export(wrapped, (large,), strict=False)
    except (NoGraphError, TooLongError):
        raise
    except Exception as error:
        if found:
            raise NoGraphError(found, may_branch=True) from error
        is_general = _runs_at(prime, model, batch, dtype, loss_fn)
        if isinstance(error, ModelError):
            raise
        fallback = _export_failure(error)
        couples = "" if is_general else f"{fallback.source}: what forward does depends on the size of the batch"
        raise NoGraphError([fallback], couples, may_branch=True) from error
    caches = [name for kind, name in changed if kind == "cache"]
    is_cached = bool(caches) and all(kind != "value" for kind, _ in changed)
    if is_cached and all(f.reason.startswith(CHANGES_VALUE) for f in found):
        # An export with the cache filled would read constants where the first has the operators that make them.
        mode = fake_mode()
        again = LossOnly(fake_copy(model, dtype, mode), loss_fn)
        is_once = False
        with contextlib.suppress(Exception), _quiet_forward(), mode:  # one that fails the second time is none
            is_once = is_filled_once(again, _fake_batch(batch, prime, dtype, mode), caches)
        if not is_once:
            raise NoGraphError(found)
        found.clear()
    converter = Converter(
        program, model, given, prime, trains_on_cpu=trains_on_cpu, loss_source=_source_of_loss(loss_fn)
    )  # fmt: skip
    if found:
        if not is_second and all(f.reason.startswith(CHANGES_VALUE) for f in found):
            second = _exported(
                model, batch, dtype, loss_fn, prime, replaced, trains_on_cpu=trains_on_cpu, is_second=True
            )
            first = converter.flat_graph()
            if [(n.op, n.args, n.kwargs) for n in first.nodes] == [(n.op, n.args, n.kwargs) for n in second.nodes]:
                return second
        raise NoGraphError(found, may_branch=any(f.reason == DRAWS_OUTSIDE for f in found))
    if not replaced and (names := [name for kind, name in changed if kind == "buffer"]):
        return _exported(model, batch, dtype, loss_fn, prime, names, trains_on_cpu=trains_on_cpu, is_second=is_second)
    if names := [name for kind, name in changed if kind == "tensor"]:
        _check_carried(model, batch, dtype, loss_fn, prime, names)
    flat = converter.flat_graph()
    nodes = _written_early(flat) if replaced else flat.nodes
    return replace(flat, nodes=nodes, checkpoints=tuple(checkpoints))


def _source_of_loss(loss_fn: LossFunction | None) -> str:
    """Where the user's loss function is defined."""
    source = UNKNOWN if loss_fn is None else where_defined(loss_fn)
    return source if is_user_file(source) else UNKNOWN


def _written_early(flat: FlatGraph) -> tuple[Node, ...]:
    """The nodes with the copies of replaced buffers next to what reads and makes their values.

    They were made at the two ends of forward; one block should hold both, or a buffer could not be in a pipeline.
    """
    nodes = list(flat.nodes)
    roots = storage_roots(nodes)
    for write in [n for n in nodes if n.op == "aten.copy_.default" and flat.tensors[n.mutates[0]].kind == "buffer"]:
        buffer, (source,) = write.mutates[0], refs(write.args[1])
        moved = [write]
        detach = next((n for n in nodes if source in n.outputs), None)
        if detach is not None and detach.op == "aten.detach.default":
            moved.insert(0, detach)
            (source,) = refs(detach.args)
        read = next((n for n in nodes if n.op == "aten.clone.default" and [*refs(n.args)] == [buffer]), None)
        rest = [n for n in nodes if n not in moved and n is not read]
        copied = set(read.outputs) if read is not None else set()
        first = next((i for i, n in enumerate(rest) if copied & set(reads(n))), len(rest))
        if read is not None and first < len(rest):
            rest.insert(first, replace(read, path=rest[first].path))
        made = max((i for i, n in enumerate(rest) if source in n.outputs), default=-1)
        position = max(made, first if first < len(rest) else -1)
        if made < 0 or any(
            roots.get(t, t) == roots.get(source, source) for n in rest[position + 1 :] for t in n.mutates
        ):
            continue
        path = rest[made].path
        rest[position + 1 : position + 1] = [replace(n, path=path) for n in moved]
        nodes = rest
    return tuple(nodes)


def _check_carried(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, prime: int, names: Sequence[str]
) -> None:
    """Refuse plain tensor attributes through which one forward tells something to the next."""
    mode = fake_mode()
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn)
    with _quiet_forward(), mode:
        carried = carried_over(wrapped, _fake_batch(batch, prime, dtype, mode), names)
    if carried:
        owner = model.get_submodule(carried[0].rpartition(".")[0])
        raise refused(
            where_defined(type(owner).forward),
            f"forward reads the tensor attribute {carried[0]} that the forward before it set",
            f"register it as a buffer, {TRAINS_WITHOUT}",
        )


def _has_number_near(flat: FlatGraph, model: nn.Module, given: Sequence[Leaf], prime: int) -> bool:
    """Whether a constant lies near a multiple of the prime and is no size of the model or of a sample."""
    sizes = {s for t in (*model.parameters(), *model.buffers()) for s in t.shape}
    sizes |= {s for leaf in given for s in leaf.tensor.shape[leaf.is_batched :]}
    todo: list[Arg] = [(node.args, tuple(value for _, value in node.kwargs)) for node in flat.nodes]
    for index in _made_in_forward(flat):
        tensor = flat.tensors[index]
        if tensor.value and not tensor.dtype.startswith(("complex", "bool")):
            todo += torch.frombuffer(bytearray(tensor.value), dtype=getattr(torch, tensor.dtype)).double().tolist()
    while todo:
        item = todo.pop()
        if isinstance(item, tuple):
            todo += item
        elif (
            isinstance(item, int | float)
            and not isinstance(item, bool)
            and item not in sizes
            and (is_near(item, prime) or (isinstance(item, float) and comes_roughly_from(item, prime)))
        ):
            return True
    return False


def _fake_batch(batch: object, size: int, dtype: torch.dtype, mode: FakeTensorMode) -> Any:
    """`batch` with `size` samples and floats in the compute dtype, on fake tensors."""

    def fake(leaf: Leaf) -> torch.Tensor:
        shape = ((size,) if leaf.is_batched else leaf.tensor.shape[:1]) + leaf.tensor.shape[1:]
        kind = dtype if leaf.tensor.is_floating_point() else leaf.tensor.dtype
        with mode:
            return torch.empty(shape, dtype=kind)

    return map_leaves(batch, fake)


@contextlib.contextmanager
def _quiet_forward() -> Iterator[None]:
    """For a forward without export, on fake tensors."""
    with (
        warnings.catch_warnings(), quiet_logs(), no_lists_of_values(), torch.inference_mode(False), torch.enable_grad()
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        yield


def _runs_at(size: int, model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None) -> bool:
    """Whether the model runs at another batch size too, as it is and without export, on fake tensors.

    What fails for want of values counts as running.

    Raises:
        ModelError: it fails on the batch as it came: the batch does not fit.
    """
    mode = fake_mode()
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn)

    def failure(samples: int) -> Exception | None:
        try:
            with _quiet_forward(), mode:
                wrapped(_fake_batch(batch, samples, dtype, mode))
        except ModelError:
            raise
        except _NEEDS_VALUES:
            return None
        except Exception as error:
            return None if any(text in str(error) for text in _LEAVES_TORCH) else error
        return None

    if error := failure(num_samples(batch)):
        source = user_line(list(traceback.extract_tb(error.__traceback__)))
        place = "" if source == UNKNOWN else f"{source}: "
        hint = f"its forward takes {_parameters_of(model)}"
        if isinstance(error, TypeError) and _TAKES_LESS.search(str(error)):
            hint += _HINT
        elif dtype != torch.float32 and _MIXES_DTYPES.search(str(error)):
            hint = _CAST_HINT.format(dtype=str(dtype).removeprefix("torch."))
        raise ModelError(
            f"the model does not run on the batch {describe(batch, dtype)}: {place}{type(error).__name__}: "
            f"{first_line(error)}; {hint}"
        ) from error
    return failure(size) is None


_TAKES_LESS = re.compile(r"forward\(\) (takes .* positional|got an unexpected keyword)")
_MIXES_DTYPES = re.compile(r"dtype|should be the same|BFloat16|Half")
_CAST_HINT = (
    "parameters and the batch's floats are computed with in {dtype}, buffers and what forward makes are not cast: "
    "cast them, .to(x.dtype) for example, or plan in fp32"
)
_HINT = "; entries that forward does not take are those of a loss_fn(output, batch), labels for example: give one"


def _parameters_of(model: nn.Module) -> str:
    try:
        return str(inspect.signature(model.forward)).partition(" -> ")[0]
    except (TypeError, ValueError):
        return "(...)"


def _export_failure(error: Exception) -> Fallback:
    reason = f"export fails with {type(error).__name__}: {first_line(error)}"
    if any(text in str(error) for text in _LEAVES_TORCH):
        reason = f"forward takes the values out of a tensor, with .numpy() for example ({first_line(error)})"
    elif isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        reason = (
            "forward turns the value of a tensor into a Python number, by .item(), float() or a branch, for example"
            f"{_inside_torch(error)}"
        )
    elif isinstance(error, ListOfValuesError):
        reason = "forward turns a tensor into a list of Python numbers"
    return Fallback(
        source=user_line(list(traceback.extract_tb(error.__traceback__))),
        reason=reason,
        cure=f"keep branches and sizes in forward independent of tensor values, {TRAINS_WITHOUT}",
    )


def _inside_torch(error: Exception) -> str:
    """Which function of torch.nn did it, if one that the user's line calls."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return ""
        if "torch/nn/" in (path := frame.filename.replace(os.sep, "/")) and "_call_impl" not in frame.name:
            return f", in {frame.name} of torch/nn/{path.rpartition('torch/nn/')[2]}, line {frame.lineno}"
    return ""
