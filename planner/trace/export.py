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
import logging
import math
import operator
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.utils import parametrize

from planner.errors import ModelError, TraceError
from planner.graph import Arg, Batch, Fallback, Node, Ref, Size, Tensor, TensorKind, reads, refs
from planner.trace import aten
from planner.trace.batch import Leaf, LossFunction, call, describe, leaves, map_leaves, num_samples, scalar_loss

# Primes that divide few usual sizes; the first that the model's own sizes allow is taken.
NEAR = 64  # constants this near to a multiple of the prime may be made from it
PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)

# Operators that write what their schema does not say: batch norm updates its running statistics
# (arguments 3 and 4) where argument 5 says so.
HIDDEN_WRITES = {"aten.batch_norm.default": ((3, 4), 5), "aten.instance_norm.default": ((3, 4), 5)}
RANDOM_MARKS = ("dropout", "rand", "bernoulli", "normal_", "multinomial", "uniform_", "exponential")
CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default",
          "aten._assert_async.msg", "aten.sym_constrain_range_for_size.default")  # fmt: skip
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_PLANNER_FOLDER = str(Path(__file__).parents[1])
_ZOO_FOLDER = str(Path(__file__).parents[1] / "zoo")
# What fake tensors cannot do although the batch fits.
_NEEDS_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
    GuardOnDataDependentSymNode, NotImplementedError,
)  # fmt: skip

UNKNOWN = "unknown place"
TRAINS_WITHOUT = "or train it as it is, without a pipeline and without recomputation"


@dataclass(frozen=True)
class FlatGraph:
    """An exported model before it is cut."""

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    loss: int
    aliases: tuple[tuple[str, ...], ...]
    unused_parameters: tuple[str, ...]


class NoGraphError(TraceError):
    """The model has no graph; `couples_samples` is set where its loss is no mean over samples."""

    def __init__(self, fallbacks: Sequence[Fallback], couples_samples: str = "") -> None:
        super().__init__("; ".join(str(f) for f in fallbacks))
        self.fallbacks = tuple(fallbacks)
        self.couples_samples = couples_samples


def _refused(source: str, reason: str, cure: str, *, couples: bool = False) -> NoGraphError:
    return NoGraphError([Fallback(source=source, reason=reason, cure=cure)], f"{source}: {reason}" if couples else "")


class LossOnly(nn.Module):
    """The model with its loss: what is exported returns one scalar. `note` is told what forward sets in Python."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None, note: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # in a tuple, so that a loss that is a module adds no parameters
        self.note = note  # not a list of our own: export puts attributes back to what they were

    def forward(self, batch: Any) -> torch.Tensor:
        """The scalar loss of one batch."""
        before = _python_values(self.model)
        loss = scalar_loss(call(self.model, batch), batch, self._loss_fn[0])
        for name, value in _python_values(self.model).items():
            if before.get(name, value) != value:
                self.note(name)
        return loss


def _python_values(model: nn.Module) -> dict[str, object]:
    """Public plain attributes of all modules by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, bool | int | float | str)
    }


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
        raise ModelError(f"the model cannot be copied: {type(error).__name__}: {_first_line(error)}") from error
    if not result.training:
        result.train()
    return result


def _is_user_file(name: str) -> bool:
    if name.startswith(_ZOO_FOLDER):
        return True
    return not name.startswith((_TORCH_FOLDER, _PLANNER_FOLDER, "<"))


def user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    for frame in reversed(frames):
        if _is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return UNKNOWN


def refusals(model: nn.Module) -> list[Fallback]:
    """What of the module itself an exported graph would lose."""
    found = []
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            found.append(_refusal_of_hook(f"the gradient hook on parameter {name}", hooks))
    for name, module in model.named_modules():
        label = f"module {name}" if name else "the model"
        for attribute in ("_backward_hooks", "_backward_pre_hooks"):
            if hooks := getattr(module, attribute, None):
                found.append(_refusal_of_hook(f"the backward hook on {label}", hooks))
        if parametrize.is_parametrized(module):
            changes = next(iter(module.parametrizations.values()))
            kind = type(changes[0])
            found.append(
                Fallback(
                    source=_where_defined(kind),
                    reason=f"{label} has a parametrization ({kind.__name__})",
                    cure="call torch.nn.utils.parametrize.remove_parametrizations, or compute the weight in forward",
                )
            )
    for attribute in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        if hooks := getattr(nn.modules.module, attribute, None):
            found.append(_refusal_of_hook("the backward hook on all modules", hooks))
    return found


def _where_defined(thing: Any) -> str:
    code = getattr(thing, "__code__", None) or getattr(getattr(thing, "__func__", None), "__code__", None)
    if code is None:
        kind = thing if isinstance(thing, type) else type(thing)
        for member in vars(kind).values():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None:
                break
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else UNKNOWN


def _refusal_of_hook(what: str, hooks: Any) -> Fallback:
    return Fallback(
        source=_where_defined(next(iter(hooks.values()))),
        reason=f"{what} is lost in a graph",
        cure="scale the loss or the activation in forward instead",
    )


@contextlib.contextmanager
def _watch(found: list[Fallback]) -> Iterator[None]:
    """Record custom Functions and tensor hooks that run while the model is exported.

    `apply` is watched where `Function` itself looks it up, one class below: a user's
    `f = MyFunction.apply` was bound before this.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    top: Any = torch.autograd.Function
    top_apply = top.__dict__["apply"]
    register_hook = torch.Tensor.register_hook

    def record(reason: str, cure: str) -> None:
        source = user_line(list(traceback.extract_stack(sys._getframe(2))))
        item = Fallback(source=source, reason=reason, cure=cure)
        if item not in found:
            found.append(item)

    def watch(cls: type) -> None:
        if cls.__module__ == "torch.utils.checkpoint":
            record(
                "reentrant checkpointing has no graph",
                "drop the checkpoint (the plan chooses what is recomputed) or give it use_reentrant=False",
            )
        elif not cls.__module__.startswith(("torch._", "torch.export", "torch.fx")):
            record(
                f"the backward of autograd.Function {cls.__name__} is lost in a graph",
                "write it with differentiable operators",
            )

    def watched_top(cls: type, *args: Any, **kwargs: Any) -> Any:
        watch(cls)
        return top_apply.__func__(cls, *args, **kwargs)

    def watched_base(cls: type, *args: Any, **kwargs: Any) -> Any:
        watch(cls)
        return super(base, cls).apply(*args, **kwargs)

    def watched_hook(self: torch.Tensor, hook: Any) -> Any:
        record("a tensor hook is lost in a graph", "scale the activation in forward instead")
        return register_hook(self, hook)  # type: ignore[no-untyped-call]

    top.apply = classmethod(watched_top)
    base.apply = classmethod(watched_base)
    torch.Tensor.register_hook = watched_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        top.apply = top_apply
        del base.apply
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]


def _near_batch(prime: int) -> frozenset[int]:
    """Sizes that come from the batch and are no multiple of it: halves, thirds, quarters, one more or less."""
    parts = {prime // k + more for k in (2, 3, 4) for more in (0, 1)}
    return frozenset(parts | {k * prime + more for k in (1, 2) for more in (-1, 1)})


def prime_for(model: nn.Module, given: Sequence[Leaf]) -> int:
    """A prime that no size of the model or of a sample can be mistaken for.

    Raises:
        ModelError: a size of the model stands against each of the primes.
    """
    sizes = {s for t in (*model.parameters(), *model.buffers()) for s in t.shape}
    for leaf in given:
        for size in leaf.tensor.shape[1:] if leaf.is_batched else leaf.tensor.shape:
            sizes |= {size - 1, size, size + 1}  # labels are shifted by one
    for prime in PRIMES:
        if not any(size and size % prime == 0 for size in sizes) and not sizes & _near_batch(prime):
            return prime
    raise ModelError(f"sizes of the model are too near to each of {PRIMES}; change one of them")


def export(model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None) -> FlatGraph:
    """The flat graph of model and loss in the compute dtype. The model itself is not touched.

    Raises:
        NoGraphError: the model runs on the batch, but has no graph.
        ModelError: the batch does not fit the model, or there is no scalar loss.
    """
    if found := refusals(model):
        raise NoGraphError(found)
    given = leaves(batch)
    prime = prime_for(model, given)
    flat = _exported(model, batch, dtype, loss_fn, prime)
    if _has_number_near(flat, model, given, prime):
        # Such as batch + 1, or the index of the last sample: at another prime it is another number.
        other = _exported(model, batch, dtype, loss_fn, next(p for p in PRIMES[::-1] if p != prime))
        for one, two in zip(flat.nodes, other.nodes, strict=False):
            if (one.op, one.args, one.kwargs) != (two.op, two.args, two.kwargs):
                raise _refused(
                    one.source,
                    f"a number of {one.op} is made from the batch size",
                    f"use sizes and indices that do not depend on the batch, {TRAINS_WITHOUT}",
                    couples=True,
                )
    return flat


def _exported(
    model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None, prime: int
) -> FlatGraph:
    """One export with `prime` samples."""
    found: list[Fallback] = []
    given = leaves(batch)
    mode = fake_mode()
    changed: list[str] = []
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn, changed.append)
    try:
        with (
            warnings.catch_warnings(), _watch(found), _watch_python_state(model, changed, found), _quiet_logs(),
            torch.inference_mode(False), torch.enable_grad(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            large = _fake_batch(batch, prime, dtype, mode)
            program = torch.export.export(wrapped, (large,), strict=False)
    except Exception as error:
        if found:
            raise NoGraphError(found) from error
        is_general = _runs_at(prime, model, batch, dtype, loss_fn)
        if isinstance(error, ModelError):
            raise
        fallback = _export_failure(error)
        couples = "" if is_general else f"{fallback.source}: what forward does depends on the size of the batch"
        raise NoGraphError([fallback], couples) from error
    if found:
        raise NoGraphError(found)
    return _Converter(program, model, given, prime).flat_graph()


def _has_number_near(flat: FlatGraph, model: nn.Module, given: Sequence[Leaf], prime: int) -> bool:
    """Whether an integer constant lies near a multiple of the prime and is no size of the model or of a sample."""
    sizes = {s for t in (*model.parameters(), *model.buffers()) for s in t.shape}
    sizes |= {s for leaf in given for s in leaf.tensor.shape[leaf.is_batched :]}
    todo: list[Arg] = [(node.args, tuple(value for _, value in node.kwargs)) for node in flat.nodes]
    while todo:
        item = todo.pop()
        if isinstance(item, tuple):
            todo += item
        elif (
            isinstance(item, int) and not isinstance(item, bool) and prime / 2 < item < 8 * prime and item not in sizes
        ):
            distance = min(item % prime, prime - item % prime)
            if distance <= NEAR:
                return True
    return False


def _numpy_state() -> bytes:
    """The state of numpy's global generator."""
    return pickle.dumps(np.random.get_state())  # noqa: NPY002 it is the generator that models use


@contextlib.contextmanager
def _watch_python_state(model: nn.Module, changed: list[str], found: list[Fallback]) -> Iterator[None]:
    """Record what forward changes or draws outside of tensors: a graph would repeat its first value forever."""
    before = random.getstate(), _numpy_state()
    yield
    source = _where_defined(type(model).forward)
    if changed:
        reason = f"forward changes the Python value {changed[0]}"
        found.append(Fallback(source=source, reason=reason, cure=f"keep it in a buffer, {TRAINS_WITHOUT}"))
    if (random.getstate(), _numpy_state()) != before:
        reason = "forward draws random numbers outside of torch"
        found.append(Fallback(source=source, reason=reason, cure=f"draw with torch, {TRAINS_WITHOUT}"))


def _fake_batch(batch: object, size: int, dtype: torch.dtype, mode: FakeTensorMode) -> Any:
    """`batch` with `size` samples and floats in the compute dtype, on fake tensors."""

    def fake(leaf: Leaf) -> torch.Tensor:
        shape = ((size,) if leaf.is_batched else leaf.tensor.shape[:1]) + leaf.tensor.shape[1:]
        kind = dtype if leaf.tensor.is_floating_point() else leaf.tensor.dtype
        with mode:
            return torch.empty(shape, dtype=kind)

    return map_leaves(batch, fake)


def _runs_at(size: int, model: nn.Module, batch: object, dtype: torch.dtype, loss_fn: LossFunction | None) -> bool:
    """Whether the model runs at another batch size too, as it is and without export, on fake tensors.

    What fails for want of values counts as running.

    Raises:
        ModelError: it fails on the batch as it came: the batch does not fit.
    """
    mode = fake_mode()
    changed: list[str] = []
    wrapped = LossOnly(fake_copy(model, dtype, mode), loss_fn, changed.append)

    def failure(samples: int) -> Exception | None:
        try:
            with warnings.catch_warnings(), _quiet_logs(), torch.inference_mode(False), torch.enable_grad(), mode:
                warnings.simplefilter("ignore")
                wrapped(_fake_batch(batch, samples, dtype, mode))
        except ModelError:
            raise
        except _NEEDS_VALUES:
            return None
        except Exception as error:
            return error
        return None

    if error := failure(num_samples(batch)):
        source = user_line(list(traceback.extract_tb(error.__traceback__)))
        place = "" if source == UNKNOWN else f"{source}: "
        raise ModelError(
            f"the model does not run on the batch {describe(batch, dtype)}: {place}{type(error).__name__}: "
            f"{_first_line(error)}; its forward takes {_parameters_of(model)}"
        ) from error
    return failure(size) is None


def _parameters_of(model: nn.Module) -> str:
    try:
        return str(inspect.signature(model.forward)).partition(" -> ")[0]
    except (TypeError, ValueError):
        return "(...)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0][:200] or "no message").rstrip(".")


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Export logs a failure with its whole graph; the caller reports it in one sentence."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)


def _export_failure(error: Exception) -> Fallback:
    return Fallback(
        source=user_line(list(traceback.extract_tb(error.__traceback__))),
        reason=f"export fails with {type(error).__name__}: {_first_line(error)}",
        cure=f"keep branches and sizes in forward independent of tensor values, {TRAINS_WITHOUT}",
    )


class _Converter:
    """Turn the nodes of an ExportedProgram into planner.graph nodes, nested graphs inlined."""

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, given: Sequence[Leaf], prime: int
    ) -> None:
        self.program = program
        self.prime = prime
        self.near_batch = _near_batch(prime)
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Arg] = {}
        self.leaf_names = iter([leaf.name for leaf in given])
        self.inputs: list[int] = []
        self.parameters = dict(model.named_parameters())
        self.index_of: dict[str, int] = {}  # of parameters and buffers
        groups = _names_by_identity(model.named_parameters(remove_duplicate=False))
        buffers = _names_by_identity(model.named_buffers(remove_duplicate=False))
        self.aliases = tuple(tuple(names) for names in groups if len(names) > 1)
        self.canonical = {name: names[0] for names in (*groups, *buffers) for name in names}

    def flat_graph(self) -> FlatGraph:
        """All nodes in order.

        Raises:
            NoGraphError: a node that a graph cannot hold, or that depends on the batch size in a
                way that is not proportional.
        """
        signature = self.program.graph_signature
        parameters, buffers = signature.inputs_to_parameters, signature.inputs_to_buffers  # both are computed anew
        constants = signature.inputs_to_lifted_tensor_constants
        loss: Arg = None
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                value: Any = node.meta.get("val")
                if node.name in parameters:
                    full = self.canonical[parameters[node.name].removeprefix("model.")]
                    index = self._registered(full, value, "parameter")
                elif node.name in buffers:
                    full = self.canonical[buffers[node.name].removeprefix("model.")]
                    index = self._registered(full, value, "buffer")
                elif node.name in constants:
                    constant = self.program.constants[constants[node.name]]
                    index = self._new(node.name, constant, "constant", data=self._bytes_of(constant, node))
                elif isinstance(value, torch.Tensor):
                    index = self._new(next(self.leaf_names), value, "input", node=node)
                    self.inputs.append(index)
                else:
                    self.values[node] = value
                    continue
                self.values[node] = Ref(index)
            elif node.op == "call_function":
                self._call(node, self.program.graph_module, no_grad=False)
            elif node.op == "output":
                (output,) = (
                    arg
                    for arg, spec in zip(node.args[0], signature.output_specs, strict=True)
                    if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
                )
                loss = self.values.get(output)
        if not isinstance(loss, Ref):
            raise ModelError("the loss is a constant; return a loss that the parameters determine")
        read = {t for node in self.nodes for t in reads(node)}
        used = {self.tensors[t].name for t in read if self.tensors[t].kind == "parameter"}
        for name, parameter in self.parameters.items():
            self._registered(name, parameter, "parameter")
        return FlatGraph(
            tensors=tuple(self.tensors),
            nodes=tuple(self.nodes),
            inputs=tuple(self.inputs),
            loss=loss.tensor,
            aliases=self.aliases,
            unused_parameters=tuple(name for name in self.parameters if name not in used),
        )

    def _registered(self, name: str, value: torch.Tensor, kind: TensorKind) -> int:
        """The one tensor of a parameter or buffer; export has one for each of its names."""
        if name not in self.index_of:
            grad = kind == "parameter" and self.parameters[name].requires_grad
            self.index_of[name] = self._new(name, value, kind, grad=grad)
        return self.index_of[name]

    def _scale(self, value: int) -> int | Batch:
        """An integer of the exported graph: a multiple of the prime is batch."""
        return Batch(value // self.prime) if value and value % self.prime == 0 else value

    def _size(self, size: int, node: fx.Node) -> Size:
        if not isinstance(size, int):
            raise _refused(
                self._source(node),
                f"a size depends on the values of tensors ({size})",
                f"give tensors a fixed size, with a mask for example, {TRAINS_WITHOUT}",
            )
        return self._scale(size)

    def _new(
        self, name: str, value: torch.Tensor, kind: TensorKind, *, grad: bool = False,
        data: bytes | None = None, node: fx.Node | None = None,
    ) -> int:  # fmt: skip
        shape: tuple[Size, ...] = tuple(value.shape)
        if node is not None:
            shape = tuple(self._size(s, node) for s in value.shape)
            if shape and shape[0] in self.near_batch:  # half a batch, or all but one sample
                raise _refused(
                    self._source(node),
                    "samples of one batch are not treated alike",
                    f"treat every sample of a batch alike, {TRAINS_WITHOUT}",
                    couples=True,
                )
        self.tensors.append(
            Tensor(
                name=name, shape=shape, dtype=str(value.dtype).removeprefix("torch."), kind=kind,
                requires_grad=grad, value=data,
            )
        )  # fmt: skip
        return len(self.tensors) - 1

    def _call(self, node: fx.Node, owner: nn.Module, *, no_grad: bool) -> None:
        """One call of the exported graph, or of a graph nested in it."""
        target = node.target
        name = str(target)
        if name in CHECKS:
            return
        if target is operator.getitem and isinstance(container := self.values.get(node.args[0]), tuple):  # type: ignore[arg-type]
            self.values[node] = container[node.args[1]]  # type: ignore[index]
            return
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self._inline(node, owner, name, no_grad)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            raise _refused(
                self._source(node),
                f"the graph holds the nested operator {name}",
                f"write it without torch.cond, loops over tensors and the like, {TRAINS_WITHOUT}",
            )
        else:
            try:
                self._append(node)
            except NoGraphError:
                raise
            except TraceError as error:
                raise _refused(self._source(node), str(error), f"use another operator, {TRAINS_WITHOUT}") from error

    def _inline(self, node: fx.Node, owner: nn.Module, name: str, no_grad: bool) -> None:
        """Put the nodes of a nested graph in place of its call."""
        nested: Any = node.args[1] if name == "wrap_with_set_grad_enabled" else node.args[4]
        module: Any = getattr(owner, str(nested.target)) if isinstance(nested, fx.Node) else nested
        sources = (self._source(n) for n in (node, *module.graph.nodes))  # torch often gives the call none
        source = next((s for s in sources if s != UNKNOWN), UNKNOWN)
        if name == "wrap_with_set_grad_enabled":
            enabled, _, *args = node.args
            if enabled and no_grad:
                raise _refused(
                    source,
                    "gradients are enabled inside a part without gradients",
                    f"compute that part outside of torch.no_grad, {TRAINS_WITHOUT}",
                )
            no_grad = not enabled
        else:
            _, _, enabled, _, _, *args = node.args
            if enabled:
                raise _refused(
                    source,
                    "the model switches autocast on, which a graph does not hold",
                    f"give the precision to the planner instead, {TRAINS_WITHOUT}",
                )
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args, strict=True):
            value: Any = self.values[arg] if isinstance(arg, fx.Node) else arg
            if no_grad and isinstance(value, Ref):
                value = self._detached(value, node, source)
            self.values[placeholder] = value
        for child in module.graph.nodes:
            if child.op == "call_function":
                self._call(child, module, no_grad=no_grad)
            elif child.op == "output":
                result = child.args[0]
                if isinstance(result, list | tuple):
                    self.values[node] = tuple(self.values[o] if isinstance(o, fx.Node) else o for o in result)
                else:
                    self.values[node] = self.values[result]

    def _detached(self, value: Ref, node: fx.Node, where: str) -> Ref:
        """`value` without gradient: what no_grad makes of an operand. It shares the storage."""
        source = self.tensors[value.tensor]
        if source.kind != "activation" and not source.requires_grad:
            return value
        self.tensors.append(
            Tensor(name=f"{source.name}.detached", shape=source.shape, dtype=source.dtype, kind="activation")
        )
        result = len(self.tensors) - 1
        self.nodes.append(
            Node(name=f"{node.name}.detach", op="aten.detach.default", args=(value,), outputs=(result,),
                 aliases=(value.tensor,), path=self._path(node), source=where)
        )  # fmt: skip
        return Ref(result)

    def _append(self, node: fx.Node) -> None:
        """One operator. The operands of a part without gradients are detached, so it needs no mark."""
        name = aten.operator_name(node.target)
        if name == "aten.detach_.default":
            name = "aten.detach.default"  # its only effect here is on autograd, not on data
        args = aten.freeze(tuple(node.args), self.values.__getitem__, self._scale)
        assert isinstance(args, tuple)
        kwargs = tuple(
            (key, aten.freeze(value, self.values.__getitem__, self._scale))
            for key, value in sorted(node.kwargs.items())
        )
        self._check_constants(node, (args, kwargs))
        value = node.meta.get("val")
        if value is not None and not isinstance(value, torch.Tensor | list | tuple):
            self.values[node] = self._constant_result(node, name, args, kwargs)
            return
        many = isinstance(value, list | tuple)
        items: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
        self._check_count(len(items), node)
        outputs = tuple(
            self._new(node.name, item, "activation", node=node) if isinstance(item, torch.Tensor) else None
            for item in items
        )
        self.nodes.append(
            Node(
                name=node.name, op=name, args=args, kwargs=kwargs, outputs=outputs,
                returns_list=many, mutates=self._mutates(node, name, args, kwargs),
                aliases=_touched(node, args, kwargs, only_writes=False),
                is_random=any(mark in name for mark in RANDOM_MARKS),
                path=self._path(node), source=self._source(node),
            )
        )  # fmt: skip
        found = tuple(Ref(o) if o is not None else None for o in outputs)
        self.values[node] = found if many else found[0]

    def _constant_result(self, node: fx.Node, name: str, args: Arg, kwargs: tuple[tuple[str, Arg], ...]) -> Arg:
        """The value of a node that makes no tensor, such as a promoted dtype, from operands that are no tensors."""
        if any(True for _ in refs((args, kwargs))):
            raise TraceError(f"{name} computes with values of tensors")
        cpu = torch.device("cpu")
        plain = aten.materialize(args, {}, self.prime, cpu)
        named = {key: aten.materialize(value, {}, self.prime, cpu) for key, value in kwargs}
        assert isinstance(plain, list)
        return aten.freeze(aten.torch_operator(name)(*plain, **named), lambda _: None, self._scale)

    def _check_constants(self, node: fx.Node, arguments: Arg) -> None:
        """Refuse numbers made from the batch size, such as 1 / batch, and lists of one item per sample."""
        todo: list[Arg] = [arguments]
        while todo:
            item = todo.pop()
            if isinstance(item, tuple):
                self._check_count(len(item), node)
                todo += item
            elif isinstance(item, float) and comes_from(item, self.prime):
                raise _refused(
                    self._source(node),
                    f"the number {item:g} is made from the batch size",
                    f"take the mean with a tensor operator instead, {TRAINS_WITHOUT}",
                    couples=True,
                )

    def _check_count(self, count: int, node: fx.Node) -> None:
        """Refuse a loop over samples, which the trace unrolled."""
        if count and count % self.prime == 0:
            raise _refused(
                self._source(node),
                "forward treats the samples of a batch one by one",
                f"write it for the whole batch, {TRAINS_WITHOUT}",
            )

    def _mutates(
        self, node: fx.Node, name: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
    ) -> tuple[int, ...]:
        if name == "aten.detach.default":
            return ()
        hidden: list[int] = []
        if name in HIDDEN_WRITES:
            positions, switch = HIDDEN_WRITES[name]
            if args[switch]:
                hidden = [t for p in positions for t in refs(args[p])]
        return tuple(dict.fromkeys([*hidden, *_touched(node, args, kwargs, only_writes=True)]))

    def _path(self, node: fx.Node) -> tuple[str, ...]:
        """Module calls, outermost first; a second call of one module carries torch's `@k`."""
        result = []
        for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
            name = name.removeprefix("model").lstrip(".")
            if name:
                result.append(f"{name}@{key.rsplit('@', 1)[1]}" if "@" in key else name)
        return tuple(result)

    def _source(self, node: fx.Node) -> str:
        """The user's innermost `file:line` of a node."""
        for line in reversed((node.meta.get("stack_trace") or "").split("\n")):
            line = line.strip()
            if line.startswith('File "'):
                file, _, rest = line[6:].partition('", line ')
                if _is_user_file(file):
                    return f"{file}:{rest.split(',')[0]}"
        return UNKNOWN

    def _bytes_of(self, constant: torch.Tensor, node: fx.Node) -> bytes:
        """The value of a constant."""
        if isinstance(constant, FakeTensor) or constant.device.type == "meta":
            reader = next(iter(node.users), node)
            raise _refused(
                self._source(reader),
                f"the constant {node.name.removeprefix('c_')} has no value on the meta device",
                f"register it as a buffer, or build the model on a real device, {TRAINS_WITHOUT}",
            )
        plain = constant.detach().cpu().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _names_by_identity(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Names of one tensor together, in order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def comes_from(number: float, prime: int) -> bool:
    """Whether a float is made from the batch size `prime`: a ratio with it, its root, or its logarithm.

    >>> comes_from(1 / 1009, 1009), comes_from(math.log(1009), 1009), comes_from(0.1, 1009)
    (True, True, False)
    """
    if not math.isfinite(number) or not number:
        return False

    def is_ratio(value: float, largest: int, tolerance: float) -> bool:
        near = Fraction(value).limit_denominator(largest)
        exact = abs(float(near) - value) <= tolerance * abs(value)
        return exact and bool(near) and (near.numerator % prime == 0 or near.denominator % prime == 0)

    size = abs(number)
    if is_ratio(size, 10**7, 4.5e-16):
        return True
    if 1e-100 < size < 1e100 and is_ratio(size * size, 10**6, 1e-15):
        return True
    return size < 50 and (is_ratio(math.exp(size), 100, 4e-15) or is_ratio(2.0**size, 100, 4e-15))


def _touched(
    node: fx.Node, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], *, only_writes: bool
) -> tuple[int, ...]:
    """Operands that the schema says are written, or whose storage the result may share."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    named, found = dict(kwargs), []
    for position, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not only_writes):
            found += list(refs(args[position] if position < len(args) else named.get(argument.name)))
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def checkpoint_inlined() -> Iterator[None]:
    """Within it a reentrant checkpoint runs its function plainly: pricing takes gradients, which it forbids."""
    kind: Any = torch.utils.checkpoint.CheckpointFunction

    def plainly(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return run(*args)

    kind.apply = plainly
    try:
        yield
    finally:
        del kind.apply
