"""From an exported program to flat nodes: operators by name, batch sizes as such, nested graphs inlined."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from planner.errors import ModelError, TraceError
from planner.graph import (
    HOOKED,
    OPAQUE,
    Arg,
    Batch,
    BatchNumber,
    Node,
    Ref,
    Size,
    Symbol,
    Tensor,
    TensorKind,
    reads,
    refs,
)
from planner.trace import aten, autocast, opaque
from planner.trace.batch import Leaf
from planner.trace.prime import LARGEST_EXACT, comes_from, near_batch
from planner.trace.refusal import TRAINS_WITHOUT, UNKNOWN, NoGraphError, is_user_file, refused, where_defined
from planner.trace.watch import ONE_BY_ONE

# Operators that write what their schema does not say: batch norm updates its running statistics
# (arguments 3 and 4) where argument 5 says so.
HIDDEN_WRITES = {"aten.batch_norm.default": ((3, 4), 5), "aten.instance_norm.default": ((3, 4), 5)}
CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default",
          "aten._assert_async.msg", "aten.sym_constrain_range_for_size.default")  # fmt: skip


@dataclass(frozen=True)
class FlatGraph:
    """An exported model before it is cut."""

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    loss: int
    aliases: tuple[tuple[str, ...], ...]
    unused_parameters: tuple[str, ...]
    outputs: tuple[int | None, ...] = ()  # beside the loss, of an evaluation
    checkpoints: tuple[str, ...] = ()  # lines at which the model itself checkpoints
    source: str = UNKNOWN  # where forward is defined


def storage_roots(nodes: Iterable[Node]) -> dict[int, int]:
    """Of each view, or result of an operator in place: a tensor of the same storage that came first."""
    root: dict[int, int] = {}
    for node in nodes:
        first = next((root.get(t, t) for t in node.aliases), None)
        if first is not None:
            root.update((t, first) for t in node.outputs if t is not None)
    return root


class Converter:
    """Turn the nodes of an ExportedProgram into planner.graph nodes, nested graphs inlined.

    `loss_source` is where the loss function is defined: export keeps lines of forward only.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, given: Sequence[Leaf], prime: int,
        *, trains_on_cpu: bool, loss_source: str = UNKNOWN,
    ) -> None:  # fmt: skip
        self.program = program
        self.prime = prime
        self.near_batch = near_batch(prime)
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Arg] = {}
        self.trains_on_cpu = trains_on_cpu
        self.loss_source = loss_source
        self.autocast: torch.dtype | None = None  # in the region that is converted now
        self.hooks: dict[fx.Node, list[fx.Node]] = {}  # of a call: the hooks on its result, in order
        self.leaf_names = iter([leaf.name for leaf in given])
        self.inputs: list[int] = []
        self.source = where_defined(type(model).forward)
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
        others: list[Arg] = []
        self._find_hooks(self.program.graph_module)
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
                loss, *others = (
                    self.values.get(arg)
                    for arg, spec in zip(node.args[0], signature.output_specs, strict=True)
                    if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
                )
        self._check_hooks()
        if not isinstance(loss, Ref):
            raise ModelError(f"{self.source}: the loss is a constant; return a loss that the parameters determine")
        read = {t for node in self.nodes for t in reads(node)}
        used = {self.tensors[t].name for t in read if self.tensors[t].kind == "parameter"}
        for name, parameter in self.parameters.items():
            self._registered(name, parameter, "parameter")
        return FlatGraph(
            tensors=tuple(self.tensors),
            nodes=_with_buffers_written(self.tensors, self.nodes),
            inputs=tuple(self.inputs),
            loss=loss.tensor,
            outputs=tuple(value.tensor if isinstance(value, Ref) else None for value in others),
            aliases=self.aliases,
            unused_parameters=tuple(name for name in self.parameters if name not in used),
            source=self.source,
        )

    def _registered(self, name: str, value: torch.Tensor, kind: TensorKind) -> int:
        """The one tensor of a parameter or buffer; export has one for each of its names."""
        if name not in self.index_of:
            grad = kind == "parameter" and self.parameters[name].requires_grad
            self.index_of[name] = self._new(name, value, kind, grad=grad)
        return self.index_of[name]

    def _scale(self, value: Any) -> Any:
        """A number of the exported graph: a multiple of the prime is batch."""
        if not value or value % self.prime != 0:
            return value
        if isinstance(value, int):
            return Batch(value // self.prime)
        is_exact = abs(value) < LARGEST_EXACT  # a larger float (the least of a dtype, for masks) is divisible by chance
        return BatchNumber(int(value) // self.prime) if is_exact else value

    def _size(self, size: int, node: fx.Node) -> Size:
        if not isinstance(size, int):
            raise refused(
                self._source(node),
                f"a size depends on the values of tensors ({size})",
                f"give tensors a fixed size, with a mask for example, {TRAINS_WITHOUT}",
            )
        scaled: Size = self._scale(size)
        self._check_power(scaled, node)
        return scaled

    def _new(
        self, name: str, value: torch.Tensor, kind: TensorKind, *, grad: bool = False,
        data: bytes | None = None, node: fx.Node | None = None,
    ) -> int:  # fmt: skip
        shape: tuple[Size, ...] = tuple(value.shape)
        if node is not None:
            shape = tuple(self._size(s, node) for s in value.shape)
            if shape and shape[0] in self.near_batch:  # half a batch, or all but one sample
                raise refused(
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
        if name in CHECKS or name == HOOKED:
            return
        if target is operator.getitem and isinstance(container := self.values.get(node.args[0]), tuple):  # type: ignore[arg-type]
            self.values[node] = container[node.args[1]]  # type: ignore[index]
            self._hook(node)
            return
        if name == "aten._has_compatible_shallow_copy_type.default":  # all that is left of it in a graph
            raise refused(
                self._source(node),
                "forward assigns to the .data of a tensor",
                f"write it in place under torch.no_grad, {TRAINS_WITHOUT}",
            )
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self._inline(node, owner, name, no_grad)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            raise refused(
                self._source(node),
                f"the graph holds the nested operator {name}",
                f"write it without torch.cond, loops over tensors and the like, {TRAINS_WITHOUT}",
            )
        else:
            try:
                self._append(node)
                self._hook(node)
            except NoGraphError:
                raise
            except TraceError as error:
                raise refused(self._source(node), str(error), f"use another operator, {TRAINS_WITHOUT}") from error

    def _find_hooks(self, module: fx.GraphModule) -> None:
        """Note which results have tensor hooks, here and in nested graphs."""
        for node in module.graph.nodes:
            if str(node.target) == HOOKED:
                hooked = node.args[1]
                if hooked.op != "call_function":
                    raise refused(
                        self._source(node),
                        "a tensor hook is lost in a graph: it is set in another grad mode than its tensor",
                        f"scale the activation in forward instead, {TRAINS_WITHOUT}",
                    )
                self.hooks.setdefault(hooked, []).append(node)
        for child in module.children():
            if isinstance(child, fx.GraphModule):
                self._find_hooks(child)

    def _hook(self, node: fx.Node) -> None:
        """Put the hooks of a result between it and all that reads it; the first to run is the last in the graph."""
        for marker in reversed(self.hooks.get(node, ())):
            value = self.values[node]
            if not isinstance(value, Ref):
                raise TraceError("a tensor hook is set on a value that no operator made")
            made = self._new(marker.name, node.meta["val"], "activation", node=node)
            key = str(marker.args[0])
            self.nodes.append(
                Node(name=marker.name, op=HOOKED, args=(key, value), outputs=(made,), aliases=(value.tensor,),
                     path=self._path(node), source=self._source(marker))
            )  # fmt: skip
            self.values[node] = Ref(made)

    def _check_hooks(self) -> None:
        """Refuse a hook on a tensor that is written in place: it would see the gradient of another value."""
        hooked = {t: n.source for n in self.nodes if n.op == HOOKED for t in n.aliases}
        if not hooked:
            return
        root = storage_roots(self.nodes)
        written = {root.get(t, t) for n in self.nodes for t in n.mutates}
        for tensor, source in hooked.items():
            if root.get(tensor, tensor) in written:
                raise refused(
                    source,
                    "a tensor hook is lost in a graph: its tensor is written in place",
                    f"write it without operators in place, {TRAINS_WITHOUT}",
                )

    def _inline(self, node: fx.Node, owner: nn.Module, name: str, no_grad: bool) -> None:
        """Put the nodes of a nested graph in place of its call."""
        nested: Any = node.args[1] if name == "wrap_with_set_grad_enabled" else node.args[4]
        module: Any = getattr(owner, str(nested.target)) if isinstance(nested, fx.Node) else nested
        sources = (self._source(n) for n in (node, *module.graph.nodes))  # torch often gives the call none
        source = next((s for s in sources if s != UNKNOWN), UNKNOWN)
        outside = self.autocast
        if name == "wrap_with_set_grad_enabled":
            enabled, _, *args = node.args
            if enabled and no_grad:
                raise refused(
                    source,
                    "gradients are enabled inside a part without gradients",
                    f"compute that part outside of torch.no_grad, {TRAINS_WITHOUT}",
                )
            no_grad = not enabled
        else:
            device, dtype, enabled, _, _, *args = node.args
            assert dtype is None or isinstance(dtype, torch.dtype)
            if enabled and not (device == "cpu" and self.trains_on_cpu):
                raise refused(
                    source,
                    "the model switches autocast on, of which a graph holds only what it does on a CPU",
                    f"give the precision to the planner instead, {TRAINS_WITHOUT}",
                )
            self.autocast = (dtype or torch.get_autocast_dtype("cpu")) if enabled else None
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
        self.autocast = outside

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
        cast = self._cast(node) if self.autocast is not None else {}

        def value_of(operand: fx.Node) -> Arg:
            return cast.get(operand, self.values[operand])

        args = aten.freeze(tuple(node.args), value_of, self._scale)
        assert isinstance(args, tuple)
        kwargs = tuple((key, aten.freeze(value, value_of, self._scale)) for key, value in sorted(node.kwargs.items()))
        self._check_constants(node, (args, kwargs))
        self._check_batch_dim(node, name, args)
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
        if name == OPAQUE:
            shares, is_random = opaque.traits(str(args[0]))
            aliases = tuple(dict.fromkeys(refs(args))) if shares else ()
        else:
            is_random = aten.is_random(name, args, dict(kwargs))
            aliases = _touched(node, args, kwargs, only_writes=False)
        self.nodes.append(
            Node(
                name=node.name, op=name, args=args, kwargs=kwargs, outputs=outputs,
                returns_list=many, mutates=self._mutates(node, name, args, kwargs),
                aliases=aliases,
                is_random=is_random,
                path=self._path(node), source=self._source(node),
            )
        )  # fmt: skip
        found = tuple(Ref(o) if o is not None else None for o in outputs)
        self.values[node] = found if many else found[0]

    def _cast(self, node: fx.Node) -> dict[fx.Node, Arg]:
        """Operands of a call as autocast gives them, cast by nodes of their own."""
        assert self.autocast is not None
        try:
            casts = autocast.casts_of(node, self.autocast)
        except autocast.NotExplicit as reason:
            raise refused(
                self._source(node),
                f"autocast cannot be written down for an operator: {reason}",
                f"give the precision to the planner instead, {TRAINS_WITHOUT}",
            ) from None
        result: dict[fx.Node, Arg] = {}
        for operand, dtype in casts.items():
            value = self.values[operand]
            assert isinstance(value, Ref)
            before = self.tensors[value.tensor]
            short = str(dtype).removeprefix("torch.")
            name = f"{node.name}.{operand.name}.to"
            self.tensors.append(Tensor(name=name, shape=before.shape, dtype=short, kind="activation"))
            made = len(self.tensors) - 1
            self.nodes.append(
                Node(name=name, op="aten.to.dtype", args=(value, Symbol("dtype", short)), outputs=(made,),
                     path=self._path(node), source=self._source(node))
            )  # fmt: skip
            result[operand] = Ref(made)
        return result

    def _constant_result(self, node: fx.Node, name: str, args: Arg, kwargs: tuple[tuple[str, Arg], ...]) -> Arg:
        """The value of a node that makes no tensor, such as a promoted dtype, from operands that are no tensors."""
        if any(True for _ in refs((args, kwargs))):
            raise TraceError(f"forward turns the value of a tensor into a Python number ({name})")
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
            self._check_power(item, node)
            if isinstance(item, float) and comes_from(item, self.prime):
                raise refused(
                    self._source(node),
                    f"the number {item:g} is made from the batch size",
                    f"take the mean with a tensor operator instead, {TRAINS_WITHOUT}",
                    couples=True,
                )

    def _check_power(self, item: Arg, node: fx.Node) -> None:
        """Refuse a number made from the square of the batch size."""
        if isinstance(item, Batch) and item.per_sample % self.prime == 0:
            raise refused(
                self._source(node),
                "a number is made from the square of the batch size",
                f"do not compare the samples of a batch with each other, {TRAINS_WITHOUT}",
                couples=True,
            )

    def _check_batch_dim(self, node: fx.Node, name: str, args: tuple[Arg, ...]) -> None:
        """Refuse a loop over the samples by an index, which the trace unrolled."""
        if name == "aten.select.int" and args[1:] == (0, self.prime - 1) and isinstance(args[0], Ref):
            count = self.tensors[args[0].tensor].shape[0]
            self._check_count(self.prime if isinstance(count, Batch) else 0, node)

    def _check_count(self, count: int, node: fx.Node) -> None:
        """Refuse a loop over samples, which the trace unrolled."""
        if count and count % self.prime == 0:
            raise refused(
                self._source(node),
                ONE_BY_ONE,
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
                if is_user_file(file):
                    return f"{file}:{rest.split(',')[0]}"
        return UNKNOWN if self._path(node) else self.loss_source

    def _bytes_of(self, constant: torch.Tensor, node: fx.Node) -> bytes:
        """The value of a constant."""
        name = node.name.removeprefix("c_")
        has_value = type(constant) in (
            torch.Tensor,
            nn.Parameter,
        ) and not torch._C._functorch.is_functorch_wrapped_tensor(constant)
        if constant.device.type == "meta" or not has_value:
            reader = next(iter(node.users), node)
            if "lifted_tensor" in name:  # export saw a tensor that no operator of the graph made
                raise refused(
                    self._source(reader),
                    "forward computes by torch.autograd.grad, torch.func or the like, which a graph does not hold",
                    f"write it with operators, {TRAINS_WITHOUT}",
                    may_branch=True,
                )
            raise refused(
                self._source(reader),
                f"the constant {name} has no value on the meta device",
                f"register it as a buffer, or build the model on a real device, {TRAINS_WITHOUT}",
            )
        plain = constant.detach().cpu().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _with_buffers_written(tensors: Sequence[Tensor], nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes; one that writes into a view of a buffer is said to write the buffer, too."""
    buffer_of = {i: i for i, tensor in enumerate(tensors) if tensor.kind == "buffer"}
    result = []
    for node in nodes:
        shared = next((buffer_of[t] for t in node.aliases if t in buffer_of), None)
        if shared is not None:
            buffer_of.update((t, shared) for t in node.outputs if t is not None)
        written = dict.fromkeys([*node.mutates, *(buffer_of[t] for t in node.mutates if t in buffer_of)])
        result.append(replace(node, mutates=tuple(written)) if len(written) > len(node.mutates) else node)
    return tuple(result)


def _names_by_identity(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Names of one tensor together, in order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


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
