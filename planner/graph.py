"""The model as data: one flat graph of ATen operators, cut into blocks. Complete and free of torch.

`trace` makes it, the runtime builds executable modules from it, everything between reads it.
Sizes and integer constants that scale with the micro-batch are `Batch`, so that one trace serves
every micro-batch size.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity that grows with the micro-batch: `fixed + per_sample * micro_batch`."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, micro_batch: int) -> float:
        """Its value for `micro_batch` samples.

        >>> Affine(10.0, 2.0).at(3)
        16.0
        """
        return self.fixed + self.per_sample * micro_batch

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)


@dataclass(frozen=True, slots=True)
class Batch:
    """A size, or an integer constant, equal to `per_sample` times the micro-batch."""

    per_sample: int


@dataclass(frozen=True, slots=True)
class BatchNumber(Batch):
    """A floating constant equal to `per_sample` times the micro-batch: a count of tokens to divide by, say."""


Size = int | Batch


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand: the tensor with this index in `Graph.tensors`."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch object by name: `Symbol("dtype", "float32")`. A device is always the rank's own."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


Arg = None | bool | int | float | str | Ref | Batch | Symbol | tuple["Arg", ...]
TensorKind = Literal["parameter", "buffer", "constant", "input", "activation"]
OrderForm = Literal[
    "places",  # rows in order; each is the number of its unsorted row, divided by `group`
    "rows",  # rows in order
    "keys",  # rows in order: what was sorted
    "counts",  # how often each key occurs
    "ends",  # where the run of each key ends
    "inverse",  # unsorted rows; each is its place in the order
    "sent",  # in the graph of a rank: rows that came to its experts, of which only values tell how many
]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """What a tensor is in an order of rows that cancels out: tokens sorted by expert and put back."""

    form: OrderForm
    group: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of the graph. Parameters are named as in `named_parameters()` of the model.

    An input is named by its place in the batch (`input_ids`, or `0` for the first argument).
    `value` holds the bytes of a constant that was made in `__init__` or in forward. `order` is what it is in an order
    of rows that cancels out.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    kind: TensorKind
    requires_grad: bool = False
    value: bytes | None = None
    order: RowOrder | None = None

    @property
    def num_elements(self) -> Affine:
        """Elements as a function of the micro-batch (a tensor has at most one batch dim)."""
        count, batched = 1, False
        for size in self.shape:
            batched |= isinstance(size, Batch)
            count *= size.per_sample if isinstance(size, Batch) else size
        return Affine(0.0, count) if batched else Affine(count)

    @property
    def num_bytes(self) -> Affine:
        """Bytes as a function of the micro-batch."""
        elements, width = self.num_elements, DTYPE_BYTES[self.dtype]
        return Affine(elements.fixed * width, elements.per_sample * width)

    @property
    def is_batched(self) -> bool:
        """Whether one of its dims is the batch."""
        return any(isinstance(size, Batch) for size in self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an operator, `aten.linear.default` or another `namespace.name.overload`.

    `outputs` are tensor indices; an operator that returns a list has `returns_list` set and `None`
    where a returned item is no tensor or is not used. `mutates` are the tensors written in place
    (a batch norm writes its running statistics although its schema does not say so); `aliases` are
    operands whose storage the outputs may share (views and in-place writes).
    `path` is the chain of module calls, outermost first; `source` the user's `file:line`.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[int | None, ...]
    returns_list: bool = False
    mutates: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    is_random: bool = False
    path: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Operand:
    """The form of a tensor that a kernel reads; `is_strided` where neighbours in its last dim are apart in memory."""

    dtype: str
    shape: tuple[Size, ...]
    is_strided: bool = False

    def text(self, micro_batch: int) -> str:
        """In short, for `micro_batch` samples.

        >>> Operand("float32", (Batch(64), 8), is_strided=True).text(2)
        'float32[128,8]T'
        """
        sizes = (s.per_sample * micro_batch if isinstance(s, Batch) else s for s in self.shape)
        return f"{self.dtype}[{','.join(map(str, sizes))}]{'T' * self.is_strided}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launched kernel of a block: what the roofline prices.

    `num_bytes` are read plus written; views launch nothing and are absent. `operands` name the row of a profile that
    may have its time (empty = their sizes are no multiples of the micro-batch); `measured` are (micro-batch, seconds)
    of such rows, without the processor's time to send the kernel. `node` is the place in the block of the node that
    launches it; without `has_formula` it may compute more than the FLOP that are counted.
    """

    op: str
    phase: Literal["forward", "backward"]
    kind: Literal["matmul", "attention", "convolution", "memory"]
    dtype: str
    flop: Affine
    num_bytes: Affine
    node: int = -1
    has_formula: bool = True
    operands: tuple[Operand, ...] = ()
    measured: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicated:
    """One collective that a block makes in a pass: what, over which mesh axis, how much.

    `num_bytes` are counted as `planner.collectives` does. `node` is the place in the block of the node that makes it.
    """

    collective: str
    axis: str
    phase: Literal["forward", "backward"]
    num_bytes: Affine
    node: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """One forward and one backward pass of a block for `micro_batch` samples, on the device that is planned for.

    Kernels alone, and what the processor takes to send them (`host`; where it computes itself, the rest of the pass).
    """

    micro_batch: int
    forward_seconds: float
    backward_seconds: float
    forward_host_seconds: float
    backward_host_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """Structurally equal blocks, priced once.

    `saved` are the bytes autograd keeps for backward that the block made itself and that do not
    leave it; `saves_input` / `saves_output` tell which of the block's `inputs` / `outputs` are
    kept as well. Peaks are bytes alive beyond inputs, parameters and what is saved in the end.
    `measured` are whole passes from a profile, of increasing micro-batch; a class without any may be priced after that
    of the whole model which it is one rank's part of (`part_of`).
    """

    kernels: tuple[Kernel, ...]
    saved: Affine
    saves_input: tuple[bool, ...]
    saves_output: tuple[bool, ...]
    forward_peak: Affine
    backward_peak: Affine
    collectives: tuple[Communicated, ...] = ()
    measured: tuple[MeasuredPasses, ...] = ()
    part_of: "BlockClass | None" = None

    def flop(self, phase: str) -> Affine:
        """FLOP of all kernels of one phase."""
        total = Affine()
        for kernel in self.kernels:
            if kernel.phase == phase:
                total += kernel.flop
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A contiguous run of nodes: the unit of planning and of execution.

    `inputs` are activations that earlier blocks made; `shared` are model inputs and tensors of the
    prelude, available on every stage; `outputs` are what later blocks (or the loss) read.
    `parameters` and `buffers` are tensor indices. `saved` are the bytes kept for backward without
    recomputation, `input_bytes` those of its inputs, which is all that full recomputation keeps.
    A block of a model without graph has no nodes; its name is the module to wrap ("" = the root).
    """

    name: str
    kind: Literal["block", "glue"]
    class_index: int
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    shared: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    saved: Affine = Affine()
    input_bytes: Affine = Affine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prelude:
    """The input-only cone: nodes that no parameter reaches, run once per stage and micro-batch."""

    nodes: tuple[int, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    num_bytes: Affine = Affine()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A reduction over samples that the loss is linear in: what a micro-batch's share weighs.

    `tensor` is what the reduction makes. A mean over class indices `target` counts those other than `ignore_index`;
    its micro-batches are weighed by their counts, with `target` one that inputs determine. Other reductions
    (`target` None) are weighed by the micro-batch's share of the samples to the `power`: 0 where a divisor does it.
    """

    tensor: int
    power: int = 1
    target: int | None = None
    ignore_index: int = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisor:
    """A value of inputs alone that parts of the loss are divided by, such as a number of unmasked tokens.

    It grows with the samples to the power `degree`. `sums` are the reductions over samples that it is made of, with
    their degrees (1 = a sum, 0 = a mean): over micro-batches they add up to those of the whole batch.
    """

    tensor: int
    degree: int
    sums: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferUpdate:
    """A buffer that each forward sets to `decay` times itself plus what does not depend on it (a running mean)."""

    buffer: int
    decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Why a model has no graph: the user's `file:line`, what is there, and what to change."""

    source: str
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}; {self.cure}"


# Operators whose backward is the user's own code: an autograd Function, and a tensor hook.
OPAQUE, HOOKED = "planner.opaque.default", "planner.hooked.default"
_OWN_BACKWARD = (OPAQUE, HOOKED)
# Namespaces whose backward is a derivative, and so linear in the gradient of the output.
_DERIVATIVES = ("aten", "prims", "operator", "math", "planner")

# Operators that leave the elements of their first operand in their row-major order.
KEEPS_ORDER = {
    "view", "_unsafe_view", "reshape", "view_as", "reshape_as", "_reshape_alias", "flatten", "ravel", "unflatten",
    "squeeze", "unsqueeze", "contiguous",
}  # fmt: skip
# Operators that change how a tensor is placed on the ranks of an axis (planner.shard.placement).
CONVERSIONS = {
    "copy", "reduce", "reduce_copy", "cut", "take", "gather", "gather_sum", "scatter", "exchange", "share", "unshare",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced model.

    `dtype` is the compute dtype, baked into the graph. `checkpoints` are lines at which the model itself recomputes.
    `aliases` are groups of names that are one
    parameter (the first is the name used here). `settings` are what the batch holds beside tensors.
    `couples_samples` says why a batch must not be
    split ("" = it may); where costs are no lines in it, they are right for `priced_samples` (0 = they are lines).
    `not_separable` says why splitting it gives the loss of the parts rather than
    of the whole ("" = both are equal). `loss_terms` and `divisors` say how micro-batches are weighed, `unweighed` why
    those with unequal counts of valid targets cannot be ("" = they can). `outputs` are named leaves of what the model
    returns, in a graph for evaluation; where that has no loss, `loss` is the first of them. `buffer_updates` are
    recursions that data-parallel ranks merge after a step, `one_data_rank` why there may be no more than one of them
    ("" = there may). With `fallbacks` there is no graph: nodes are empty, blocks are modules to wrap.
    """

    name: str
    dtype: str
    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    loss: int
    blocks: tuple[Block, ...]
    classes: tuple[BlockClass, ...]
    prelude: Prelude = Prelude()
    aliases: tuple[tuple[str, ...], ...] = ()
    unused_parameters: tuple[str, ...] = ()
    dropout_nodes: tuple[int, ...] = ()
    loss_terms: tuple[LossTerm, ...] = ()
    divisors: tuple[Divisor, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    unweighed: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    couples_samples: str = ""
    priced_samples: int = 0
    not_separable: str = ""
    updates_statistics: bool = False
    buffer_updates: tuple[BufferUpdate, ...] = ()
    one_data_rank: str = ""
    checkpoints: tuple[str, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what is executed: sources, module paths and prices do not count."""
        digest = hashlib.sha256()
        for part in (
            self.dtype, self.settings, self.inputs, self.loss, self.aliases, self.unused_parameters,
            tuple((t.name if t.kind != "activation" else "", t.shape, t.dtype, t.kind,
                   t.requires_grad, t.value) for t in self.tensors),
            tuple((n.op, n.args, n.kwargs, n.outputs, n.mutates) for n in self.nodes),
            tuple((b.name, b.nodes, b.inputs, b.shared, b.outputs, b.parameters)
                  for b in self.blocks),
            self.prelude.nodes, bool(self.fallbacks),
        ):  # fmt: skip
            digest.update(repr(part).encode())
        return digest.hexdigest()

    @cached_property
    def tie_groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(parameter tensor, blocks that read it) for every parameter read by several blocks."""
        readers: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for parameter in block.parameters:
                readers.setdefault(parameter, []).append(index)
        return tuple((p, tuple(b)) for p, b in sorted(readers.items()) if len(b) > 1)

    @cached_property
    def carried(self) -> tuple[tuple[int, ...], ...]:
        """Per cut after block i (len(blocks) - 1 cuts): tensors made before and read after it.

        A tensor that skips a stage is relayed, so it counts at every cut it crosses.
        """
        last_reader: dict[int, int] = {}
        made_by: dict[int, int] = {}
        for index, block in enumerate(self.blocks):
            for tensor in block.inputs:
                last_reader[tensor] = index
            for tensor in block.outputs:
                made_by[tensor] = index
        last_reader |= dict.fromkeys((tensor for _, tensor in self.outputs), len(self.blocks))  # the last stage's
        return tuple(
            tuple(t for t in sorted(made_by) if made_by[t] <= cut < last_reader.get(t, -1))
            for cut in range(len(self.blocks) - 1)
        )

    @cached_property
    def needs_two_samples(self) -> str:
        """Why a micro-batch must not be one sample ("" = it may): a batch norm has no variance of one value."""
        for node in self.nodes:
            if node.op == "aten.batch_norm.default" and node.args[5] is True and isinstance(node.args[0], Ref):
                sizes = self.tensors[node.args[0].tensor].shape
                of_one_sample = [size.per_sample if isinstance(size, Batch) else size for size in sizes]
                if prod(of_one_sample[:1] + of_one_sample[2:]) == 1:
                    return f"{node.source}: a batch norm has one value per channel in a sample"
        return ""

    @cached_property
    def reads_updates(self) -> str:
        """Why buffers that forward updates rule out a pipeline ("" = they do not): `file:line` and what is there.

        A pipeline runs forward for several micro-batches before it runs backward for the first, so autograd would find
        what it saved of a buffer changed. And each stage has copies of its own, which only its own blocks update.
        """
        updated = {t: t for n in self.nodes for t in n.mutates if self.tensors[t].kind == "buffer"}
        block_of = {node: position for position, block in enumerate(self.blocks) for node in block.nodes}
        touched: dict[int, int] = {}  # buffer -> the block that uses it
        moving = {i for i, t in enumerate(self.tensors) if t.requires_grad}  # what a gradient flows through
        for index, node in enumerate(self.nodes):
            used = {updated[t] for t in (*reads(node), *node.mutates) if t in updated}
            has_backward = node.op != "aten.detach.default" and any(t in moving for t in reads(node))
            if has_backward:
                moving.update(t for t in (*node.outputs, *node.mutates) if t is not None)
            saves = not node.mutates and not node.aliases and node.op != "aten.clone.default"
            if saves and used and has_backward:
                return (
                    f"{node.source} reads a buffer that forward updates, which a pipeline would change before the "
                    "backward pass"
                )
            for buffer in used:
                if touched.setdefault(buffer, block_of.get(index, -1)) != block_of.get(index, -1):
                    return (
                        f"{node.source} uses buffer {self.tensors[buffer].name}, which another block uses, too, and "
                        "forward updates: stages would have different copies"
                    )
            shared = next((updated[t] for t in node.aliases if t in updated), None)
            if shared is not None:
                updated.update((t, shared) for t in node.outputs if t is not None)
        return ""

    @cached_property
    def own_backward(self) -> str:
        """`file:line` of the first operator whose backward need not be linear in the gradient ("" = there is none)."""
        return next((node.source or node.name for node in self.nodes if not is_derivative(node.op)), "")

    @cached_property
    def sample_runs(self) -> dict[int, int | None]:
        """Of each tensor with a batch dim: how often that dim runs through the samples; None = not known.

        A dim of `per_sample * micro_batch` rows is `[runs, micro_batch, per_sample / runs]` when taken apart: 1 run
        where the rows of a sample are together, more where another dim was merged in front of the batch.
        """
        return sample_runs(self.tensors, self.nodes)

    def carried_bytes(self, cut: int) -> Affine:
        """Bytes that cross the cut after block `cut`, per micro-batch."""
        total = Affine()
        for tensor in self.carried[cut]:
            total += self.tensors[tensor].num_bytes
        return total

    @cached_property
    def num_parameters(self) -> int:
        """Distinct parameters of the model, the unused ones included (their elements)."""
        return int(sum(t.num_elements.fixed for t in self.tensors if t.kind == "parameter"))

    def flop_per_sample(self) -> float:
        """Model FLOP of one sample, forward and backward, without recomputation."""
        return sum(
            self.classes[block.class_index].flop(phase).at(1)
            for block in self.blocks
            for phase in ("forward", "backward")
        )


def sample_runs(tensors: Sequence[Tensor], nodes: Iterable[Node]) -> dict[int, int | None]:
    """`Graph.sample_runs` of the tensors that `nodes` make, and of the inputs."""
    runs: dict[int, int | None] = {i: 1 for i, t in enumerate(tensors) if t.kind == "input" and t.is_batched}
    for node in nodes:
        for tensor in node.outputs:
            if tensor is not None and tensors[tensor].is_batched:
                runs[tensor] = _runs_of(node, tensors, tensor, runs)
    return runs


def _runs_of(node: Node, tensors: Sequence[Tensor], tensor: int, runs: dict[int, int | None]) -> int | None:
    """`sample_runs` of one output of a node."""
    name = node.op.split(".")[1] if node.op.count(".") > 1 else node.op
    before, rows = _around_batch(tensors[tensor])
    operands = list(dict.fromkeys(reads(node)))
    batched = [t for t in (operands[:1] if name in KEEPS_ORDER else operands) if tensors[t].is_batched]
    if not batched:
        return 1
    found = {(runs.get(t), *_around_batch(tensors[t])) for t in batched}
    first_runs, first_before, first_rows = next(iter(found))
    if len({known for known, _, _ in found}) > 1 or first_runs is None:
        return None
    if node.op.startswith("planner.") and name in CONVERSIONS:
        # Pieces of a dim whose parts are batches are whole runs; those of parts that a batch repeats are in all runs.
        parts = [item for arg in node.args if isinstance(arg, tuple) for item in arg]
        is_cut = any(isinstance(item, Batch) for item in parts)
        left = first_runs * rows // first_rows if is_cut else first_runs
        return left if left and (not is_cut or first_runs * rows % first_rows == 0) else None
    if name in KEEPS_ORDER:  # what runs in front of a sample's first element stays there
        in_front = first_before * first_runs
        if in_front == 0:  # no elements
            return None
        return in_front // before if in_front % before == 0 and rows % (in_front // before) == 0 else None
    if len(found) == 1 and rows != first_rows:
        if name in ("repeat", "tile") or (name == "cat" and len(batched) > 1):
            return first_runs * (rows // first_rows) if rows % first_rows == 0 else None
        if first_runs > 1:  # part of the runs, if it is whole runs
            left = first_runs * rows // first_rows
            return left if left and first_runs * rows % first_rows == 0 else None
    return first_runs


def _around_batch(tensor: Tensor) -> tuple[int, int]:
    """Elements of the dims in front of a tensor's batch dim, and the rows of one sample in it."""
    before = 1
    for size in tensor.shape:
        if isinstance(size, Batch):
            return before, size.per_sample
        before *= size
    raise ValueError(f"tensor {tensor.name} has no batch dim")


def is_derivative(op: str) -> bool:
    """Whether the backward of an operator is linear in the gradient of what it makes: not where it is the user's code.

    >>> is_derivative("aten.relu.default"), is_derivative(OPAQUE), is_derivative("mylib.clamped.default")
    (True, False, False)
    """
    return op not in _OWN_BACKWARD and op.partition(".")[0] in _DERIVATIVES


def refs(arg: object) -> Iterator[int]:
    """Tensor indices in an argument, nested tuples included, in order."""
    if isinstance(arg, Ref):
        yield arg.tensor
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def reads(node: Node) -> Iterator[int]:
    """Tensor indices that `node` reads."""
    yield from refs(node.args)
    for _, value in node.kwargs:
        yield from refs(value)


def total(affines: Iterable[Affine]) -> Affine:
    """Sum of affine quantities."""
    result = Affine()
    for affine in affines:
        result += affine
    return result
